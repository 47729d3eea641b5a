"""The reference page of the settings, made from their table so that it cannot tell another story.

`python -m quire.config.settings_reference > docs/reference/settings.md` writes it; a test compares the two.
"""

import sys

from quire.config.table import SETTINGS, Setting

HEAD = """\
# Settings

<!-- Made from src/quire/config/table.py: python -m quire.config.settings_reference > docs/reference/settings.md -->

Every setting has one name in three spellings: `max_running` in a TOML file, `QUIRE_MAX_RUNNING` in the environment,
`--max-running` on the command line. A flag beats the environment, the environment beats the file, the file beats the
default. `quire config show` prints the settings in force and where each came from.

One file is read: the one `--config` names, else the one `$QUIRE_CONFIG` names, else `quire.toml` in the current folder,
else `$XDG_CONFIG_HOME/quire/config.toml` (`~/.config/quire/config.toml`). `quire config path` shows which. It is flat:

```toml
memory = "4GiB"
max_running = 32
```

A name that is no setting is an error, in the file and, where it begins with `QUIRE_`, in the environment. The variables
that Kubernetes sets for a service called quire are left alone. An empty variable counts as not set.

"""

TAIL = """\
Other variables: `QUIRE_CONFIG` names the file that is read, `QUIRE_CACHE` the folder where quire keeps converted
[models](../guides/models.md). `QUIRE_FAULTS` breaks a server on purpose, for tests, and is refused without
`QUIRE_TESTING=1`.
"""


def settings_page() -> str:
    """The page as it should stand in docs/reference/settings.md."""
    heading = "| setting | default | what it does |\n|---|---|---|\n"
    rows = "".join(
        f"| [`{setting.name}`](#{setting.name}) | {setting.default_text} | {_first_sentence(setting)} |\n"
        for setting in SETTINGS
    )
    return HEAD + heading + rows + "\n" + "\n".join(_section(setting) for setting in SETTINGS) + "\n" + TAIL


def _first_sentence(setting: Setting) -> str:
    return setting.help.partition(". ")[0].rstrip(".") + "."


def _section(setting: Setting) -> str:
    return (
        f"## {setting.name}\n\n{setting.help}\n\n"
        f"- It must be {setting.kind.rule}.\n"
        f"- Default: {setting.default_text}.\n"
        f"- `{_toml(setting)}` in a file, `{setting.variable}={setting.example}` in the environment, "
        f"`{setting.flag} {setting.example}` as a flag.\n"
    )


def _toml(setting: Setting) -> str:
    is_number = setting.example.replace(".", "", 1).isdigit()
    return f"{setting.name} = {setting.example}" if is_number else f'{setting.name} = "{setting.example}"'


if __name__ == "__main__":
    sys.stdout.write(settings_page())

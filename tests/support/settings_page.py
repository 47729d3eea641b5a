"""The reference page of the settings, generated from their table.

`python -m tests.support.settings_page > docs/reference/settings.md` writes it; a test compares the two.
"""

import sys
import textwrap

from quire.config.table import SETTINGS, Group, Setting

WIDTH = 100
HEAD = """\
# Settings

<!-- Made from src/quire/config/table.py: python -m tests.support.settings_page > docs/reference/settings.md -->

Every setting has one name in three spellings: `max_running` in a TOML file, `QUIRE_MAX_RUNNING` in
the environment, `--max-running` on the command line. A flag overrides the environment, the
environment overrides the file, the file overrides the default. `quire config show` prints the
settings in force and their sources.

One file is read: the one `--config` names, else the one `$QUIRE_CONFIG` names, else `quire.toml` in
the current folder, else `$XDG_CONFIG_HOME/quire/config.toml` (`~/.config/quire/config.toml`).
`quire config path` shows which. It is flat:

```toml
memory = "4GiB"
max_running = 32
```

Models of a server may follow, each a table `[models.NAME]`: [several
models](../guides/several-models.md).

An unknown name is an error, in the file and, where it begins with `QUIRE_`, in the
environment. The variables that Kubernetes sets for a service called quire are left alone. An empty
variable counts as not set.

"""

TAIL = """\
Other variables: `QUIRE_CONFIG` names the file that is read, `QUIRE_CACHE` the folder where quire
keeps converted [models](../guides/models.md), `QUIRE_STRANGER_KEY` has the key of a
[fleet's OpenAI members](../guides/fleet.md#members-that-are-not-quire). `QUIRE_FAULTS` injects
faults into a server, for tests, and is rejected without `QUIRE_TESTING=1`.
"""


def settings_page() -> str:
    """The content of docs/reference/settings.md."""
    return HEAD + "\n".join(_group(group) for group in Group) + "\n" + TAIL


def _group(group: Group) -> str:
    ours = [setting for setting in SETTINGS if setting.group is group]
    rows = "".join(
        f"| [`{setting.name}`](#{setting.name}) | {setting.default_text} | {_first_sentence(setting)} |\n"
        for setting in ours
    )
    table = f"## {group.value}\n\n| setting | default | what it does |\n|---|---|---|\n{rows}"
    return "\n".join([table, *(_section(setting) for setting in ours)])


def _first_sentence(setting: Setting) -> str:
    return setting.help.partition(". ")[0].rstrip(".") + "."


def _section(setting: Setting) -> str:
    spellings = (
        f"`{_toml(setting)}` in a file, `{setting.variable}={setting.example}` in the environment, "
        f"`{setting.flag} {setting.example}` as a flag."
    )
    points = (f"It must be {setting.kind.rule}.", f"Default: {setting.default_text}.", spellings)
    return "\n".join([f"### {setting.name}", "", _wrapped(setting.help), "", *map(_point, points), ""])


def _wrapped(sentences: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        sentences, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _point(sentence: str) -> str:
    return _wrapped(sentence, "- ", "  ")


def _toml(setting: Setting) -> str:
    is_number = setting.example.replace(".", "", 1).isdigit()
    return f"{setting.name} = {setting.example}" if is_number else f'{setting.name} = "{setting.example}"'


if __name__ == "__main__":
    sys.stdout.write(settings_page())

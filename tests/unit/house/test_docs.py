"""What the documents say is still so: what they name exists, examples print what is shown, options have their help."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from quire import cli
from quire.cli.fleet.commands import fleet_app
from quire.config import SETTINGS
from tests.support import pages

ROOT = pages.ROOT
EVERYTHING = """\
# A page

```
src/quire/core/step.py   [the scheduler](core/gone.md) is drawn in old.py
```

See [above](#a-page), [here](other.md#two-words-1) and [there](other.md#:~:text=Two%20words); `core/step.py`,
`core/`, `core/step`, `api/dialects/NAME/`, `make check`, `QUIRE_PORT`, `--port 80` and `quire serve
MODEL`. Not [this](gone.md), [this](#nowhere), [this](other.md#two-words-2) or
[that](other.md#:~:text=Three), nor `core/gone.py`, `core/old`, `make nothing`,
`QUIRE_GATE`, `--gate`, `quire sarve`, [gone.py](other.md), `quire[fast]`, `pip install '.[slow]'`.

```console
$ make check && QUIRE_PORT=1 quire serve model --port 80 | tee log
$ quire replay
$ quire serve model --gate
$ curl http://x --data {} -H 'Content-Type: application/json'
$ curl http://x -d {}
```
"""
WRONG = (
    "(gone.md)", "(#nowhere)", "(other.md#two-words-2)", "(other.md#:~:text=Three)", "gone.py", "core/gone.py",
    "core/old", "old.py", "make nothing", "QUIRE_GATE", "[slow]", "--gate", "quire sarve", "quire replay",
    "quire serve model --gate", "curl http://x -d {}",
)  # fmt: skip


def test_links_commands_options_variables_targets_and_files_of_the_documents_exist() -> None:
    assert pages.broken(pages.this_repository(), pages.documents()) == []


def test_whatever_a_page_names_and_the_repository_lacks_is_found_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "src" / "quire" / "core").mkdir(parents=True)
    (tmp_path / "src" / "quire" / "core" / "step.py").touch()
    (tmp_path / "Makefile").write_text("check:\n\ttrue\n")
    (tmp_path / "pyproject.toml").write_text("[project.optional-dependencies]\nfast = []\n")
    (tmp_path / "other.md").write_text("# Two words\n\n## Two words\n")
    (tmp_path / "page.md").write_text(EVERYTHING)
    repository = replace(pages.this_repository(), root=tmp_path)
    found = pages.broken(repository, pages.documents(tmp_path))
    assert sorted(line.removeprefix("page.md: ").split(": ")[0] for line in found) == sorted(WRONG)


def test_the_example_of_the_readme_prints_what_the_readme_shows() -> None:
    run = subprocess.run([sys.executable, ROOT / "examples" / "shared_prefix.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("name", "page"), [("sim", "simulate.md"), ("plan", "plan.md")])
def test_the_guide_tells_of_every_option_what_the_help_tells(name: str, page: str) -> None:
    guide = " ".join((ROOT / "docs" / "guides" / page).read_text().split())
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    for option in command.params:
        assert option.opts[0] in guide
        assert (option.help or "") in guide, option.opts


@pytest.mark.parametrize("name", ["keys", "member", "gateway"])
def test_the_guide_of_fleets_tells_of_every_option_that_is_no_setting(name: str) -> None:
    guide = " ".join((ROOT / "docs" / "guides" / "fleet.md").read_text().split())
    flags = {setting.flag for setting in SETTINGS}
    command = typer.main.get_command(fleet_app).commands[name]  # type: ignore[attr-defined]
    own = [option for option in command.params if option.opts[0] not in flags]
    assert own
    for option in own:
        assert option.opts[0] in guide
        assert (option.help or "") in guide, option.opts


def test_the_guide_of_fleets_on_ray_tells_of_every_option_that_is_no_setting() -> None:
    guide = " ".join((ROOT / "docs" / "guides" / "fleet-ray.md").read_text().split())
    flags = {setting.flag for setting in SETTINGS}
    command = typer.main.get_command(fleet_app).commands["ray"].commands["config"]  # type: ignore[attr-defined]
    for option in command.params:
        if option.opts[0] not in flags:
            assert option.opts[0] in guide
            assert (option.help or "") in guide, option.opts


def test_the_waits_shown_in_the_readme_are_those_the_command_prints() -> None:
    out = CliRunner().invoke(cli.app, ["sim", "--scenario", "tenants", "--seed", "3"]).stdout
    rows = [line for line in out.splitlines() if line.startswith(("│ a ", "│ b ", "│ c ", "│ d ", "│ greedy "))]
    assert len(rows) == 5
    assert "\n".join(rows) in (ROOT / "README.md").read_text()

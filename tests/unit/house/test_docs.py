"""What the documents say is still so: links lead somewhere, cited tests exist, examples print what is shown."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer
from typer.testing import CliRunner

from quire import cli
from quire.cli.fleet.commands import fleet_app
from quire.config import SETTINGS

ROOT = Path(__file__).parents[3]
PAGES = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_every_cited_text_stands_in_it(page: Path) -> None:
    for link in links(page):
        target, _, cited = link.partition("#:~:text=")
        target = target.partition("#")[0]
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {link}"
        if cited:
            assert unquote(cited) in path.read_text(), f"{page.name}: {link}"


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

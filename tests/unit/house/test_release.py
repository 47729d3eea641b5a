"""One version: the package, the changelog, the tag that would publish it, and what is built where."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from quire import __version__
from tests.support.machine import release
from tests.support.machine.release import changelog_versions, disagreement, package_version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    assert package_version() == __version__ == changelog_versions()[0]
    assert disagreement(f"v{__version__}") == ""
    assert disagreement("v9.9.9") == f"the tag must be v{__version__}, as src/quire/__init__.py says; v9.9.9 given"


def test_a_changelog_that_tells_of_another_version_stops_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src" / "quire").mkdir(parents=True)
    (tmp_path / "src" / "quire" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.2 (yesterday)\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert disagreement("v1.2.3") == "the changelog must begin with 1.2.3, it begins with ['1.2.2']"
    (tmp_path / "src" / "quire" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="must say __version__"):
        package_version()


def test_wheels_are_built_for_the_pythons_that_the_package_names() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"] if "Python :: 3." in one]
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["tool"]["cibuildwheel"]["build"].split() == [f"cp{one.replace('.', '')}-*" for one in named]


def test_the_workflow_builds_on_linux_and_on_macs_and_publishes_what_was_checked() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    runners = jobs["wheels"]["strategy"]["matrix"]["runner"]
    assert [any(part in one for one in runners) for part in ("24.04", "24.04-arm", "macos")] == [True, True, True]
    assert jobs["publish"]["needs"] == ["wheels", "sdist"]
    assert any("tests.support.machine.release" in step.get("run", "") for step in jobs["publish"]["steps"])
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert ci["check"]["steps"][-1]["run"] == ".ci/run"


def test_transformers_is_taken_as_far_as_it_was_proved_and_a_job_tries_the_next() -> None:
    (wanted,) = (one for one in PROJECT["project"]["optional-dependencies"]["torch"] if one.startswith("transformers"))
    pinned = re.search(r"^transformers==(\d+)\.(\d+)", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert wanted.endswith(f"<{pinned[1]}.{int(pinned[2]) + 1}")
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text())
    assert "schedule" in job[True]  # what YAML makes of `on`
    assert any("--upgrade transformers" in step.get("run", "") for step in job["jobs"]["transformers"]["steps"])


def test_no_page_installs_by_a_name_that_is_not_published() -> None:
    """Until there is a release, the name on the index would be somebody else's package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    by_name = re.compile(r"pip install\s+(?:-\S+\s+)*['\"]?quire(?=['\"\s\[`]|$)")
    assert [str(page) for page in pages if by_name.search(page.read_text())] == []
    assert by_name.search("$ pip install quire")
    assert by_name.search("pip install -U 'quire[torch]'")
    assert not by_name.search("pip install quire-0.2.0-*.whl")

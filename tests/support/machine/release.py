"""Whether a tag, the package and the changelog speak of one version: `python3 -m tests.support.machine.release v0.2.0`.

Standard library only, and without importing quire: a release is checked before anything is installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def package_version() -> str:
    """What the package says of itself."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "src" / "quire" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("src/quire/__init__.py must say __version__")
    return found[1]


def changelog_versions() -> list[str]:
    """Of the changelog, the newest first."""
    return re.findall(r"^## (\d+\.\d+\.\d+)\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def disagreement(tag: str) -> str:
    """What does not fit together; nothing if all does."""
    version, told = package_version(), changelog_versions()
    if tag != f"v{version}":
        return f"the tag must be v{version}, as src/quire/__init__.py says; {tag} given"
    if not told or told[0] != version:
        return f"the changelog must begin with {version}, it begins with {told[:1]}"
    return ""


if __name__ == "__main__":
    sys.exit(disagreement(sys.argv[1]) or 0)

"""A commit checked out beside this one, with an interpreter that imports quire from there.

Some rows are ratios to an earlier commit, and some show that a test fails there. Packages are borrowed from the
environment this runs in; only quire itself is the earlier one.
"""

import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2
from tempfile import TemporaryDirectory, TemporaryFile

from benchmarks.proof import ROOT


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit's files, and a Python that sees them."""

    root: Path
    python: Path

    def run(self, words: Sequence[str], timeout_s: float | None = None) -> "subprocess.CompletedProcess[str]":
        """Run its Python with these words, in its folder."""
        return subprocess.run(
            [str(self.python), *words], cwd=self.root, capture_output=True, text=True, timeout=timeout_s
        )


@contextmanager
def checked_out(commit: str) -> Iterator[Checkout]:
    """The commit in a folder of its own, gone afterwards."""
    with TemporaryDirectory(prefix="quire-before-") as folder:
        root = Path(folder) / "quire"
        _extract(commit, root)
        _add_native(commit, root)
        yield Checkout(root, _environment(Path(folder) / "environment", root / "src"))


def _extract(commit: str, root: Path) -> None:
    with TemporaryFile() as archive:
        subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=archive, check=True)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(root, filter="data")


def _add_native(commit: str, root: Path) -> None:
    """The kernels as they were: copied where their sources have not changed since, else built."""
    same = subprocess.run(["git", "diff", "--quiet", commit, "--", "native"], cwd=ROOT).returncode == 0
    built = list((ROOT / "src" / "quire").glob("_native*.so"))
    if same and built:
        for module in built:
            copy2(module, root / "src" / "quire")
        return
    folder = root / "build" / "native"
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True
    ).stdout.strip()
    settings = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(["cmake", "-S", root / "native", "-B", folder, *settings], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", folder, "--parallel"], check=True, stdout=sys.stderr)
    for module in folder.rglob("_native*.so"):
        copy2(module, root / "src" / "quire")


def _environment(folder: Path, source: Path) -> Path:
    """An interpreter whose path begins with this source; its packages are those of ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file is only added to the path: hooks of editable installs in there do not run.
    (packages / "here.pth").write_text(f"{source}\n{sysconfig.get_paths()['purelib']}\n")
    return folder / "bin" / "python"

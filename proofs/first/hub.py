"""`quire pull` with a fake hub on loopback that breaks off, sends wrong data, refuses and redirects.

Every pull is a process that uses the real hub library. After each, the files under a model's name are compared with
those of the hub: none may differ or be shorter. The pull is repeated until it succeeds; then the bytes that the hub
sent are compared with the size of the files.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from tests.support.fleet.hub_stand_in import HubStandIn, Shelf, standing_in

NUM_PARALLEL = 8
MAX_TRIES = 8
SIZES = (200_000, 1_500_000)
BREAKS = ("break", "break", "break", "429", "500", "busy", "")
WRONG_DATA = ("wrong", "more", "whole")
HOSTILE = ("../escaped-Q8_0.gguf", "/tmp/escaped-Q8_0.gguf", "a/../../escaped-Q8_0.gguf", ".escaped-Q8_0.gguf")  # noqa: S108
NAME = "org/name"
PULL_S = 120


@dataclass
class PullCounts:
    """Counts over pulls."""

    num_pulls: int = 0
    num_wrong: int = 0
    num_resumed: int = 0
    num_through: int = 0
    num_repositories: int = 0
    num_bytes: int = 0
    """Sizes of repositories whose hub sent no wrong data."""
    num_sent: int = 0
    """The bytes that the hub sent for them."""
    codes: dict[int, int] = field(default_factory=dict)


@section("pulls from a hub that misbehaves")
def pulls(proof: Proof) -> None:
    """Pull random repositories with eight processes at a time."""
    count = proof.sized(quick=40, full=500)
    total = PullCounts()
    numbers = itertools.count()
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:

        def start_pull() -> Future[PullCounts]:
            seed = proof.random.getrandbits(64)
            return pool.submit(_pull_repository, proof.folder / f"hub-{next(numbers)}", seed)

        pending = {start_pull() for _ in range(NUM_PARALLEL)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for pull in done:
                _add(total, pull.result())
                if total.num_pulls < count:
                    pending.add(start_pull())
    say(f"    {total.num_through} of {total.num_repositories} repositories were complete; exit codes {total.codes}")
    proof.at_least("hub_pulls", total.num_pulls, count)
    proof.equals("hub_failures", total.num_wrong, 0, "wrong or short files under a model's name")
    proof.at_least("hub_resumed", total.num_resumed, count // 10, "pulls that resumed a partial file")
    resent_share = (total.num_sent - total.num_bytes) / max(1, total.num_bytes)
    proof.at_most("hub_twice", resent_share, 0.05, f"of {total.num_bytes / 1e6:,.0f} MB")
    proof.equals("hub_stuck", total.num_repositories - total.num_through, 0, "repositories that were never complete")


@section("told to end while it fetches")
def terminated(proof: Proof) -> None:
    """SIGTERM while the hub has sent half a file and then nothing."""
    max_s = 0.0
    for number in range(proof.sized(quick=3, full=20)):
        with standing_in() as hub:
            hub.shelves[NAME] = Shelf({"model-Q8_0.gguf": proof.random.randbytes(SIZES[0])})
            hub.misdeeds.append("hang")
            process = _start_pull(hub, proof.folder / f"ended-{number}")
            while hub.num_bytes_sent == 0:
                time.sleep(0.01)
            start_s = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=PULL_S)
            max_s = max(max_s, time.perf_counter() - start_s)
    proof.at_most("hub_end_s", max_s, 2.0, "SIGTERM to exit, the slowest")


def _add(total: PullCounts, counts: PullCounts) -> None:
    for name in ("pulls", "wrong", "resumed", "through", "repositories", "bytes", "sent"):
        setattr(total, f"num_{name}", getattr(total, f"num_{name}") + getattr(counts, f"num_{name}"))
    for code, count in counts.codes.items():
        total.codes[code] = total.codes.get(code, 0) + count


def _pull_repository(folder: Path, seed: int) -> PullCounts:
    """Pull until it succeeds. After MAX_TRIES the hub makes no more faults; a pull that fails then is stuck."""
    random, counts = Random(seed), PullCounts(num_repositories=1)
    with standing_in() as hub:
        shelf = hub.shelves[NAME] = _shelf(random)
        expected_names = [name for name in shelf.files if "Q8_0" in name and name not in HOSTILE]
        is_honest = random.random() < 0.5  # without wrong data no bytes are discarded
        faults = [random.choice(BREAKS if is_honest else BREAKS + WRONG_DATA) for _ in range(random.randint(0, 12))]
        hub.misdeeds.extend(faults)
        for attempt in range(MAX_TRIES + 1):
            has_part = any(folder.glob("hub/*/blobs/*.incomplete"))
            is_last = attempt == MAX_TRIES
            if is_last:
                hub.misdeeds.clear()
            if not is_last and random.random() < 0.35:
                hub.misdeeds.appendleft("hang")
                code = _kill_pull(hub, folder, random)
            else:
                code = _start_pull(hub, folder).wait(timeout=PULL_S)
            counts.num_pulls += 1
            counts.num_resumed += has_part
            counts.codes[code] = counts.codes.get(code, 0) + 1
            counts.num_wrong += _num_wrong(folder, shelf)
            if code == 0:
                break
        names = {path.name for path in _files(folder)}
        counts.num_through = {Path(name).name for name in expected_names} <= names
        if is_honest and counts.num_through:
            counts.num_bytes = sum(len(shelf.files[name]) for name in expected_names)
            counts.num_sent = hub.num_bytes_sent
    return counts


def _shelf(random: Random) -> Shelf:
    size = random.randint(*SIZES)
    if random.random() < 0.3:
        names = [f"big/model-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    else:
        names = ["model-Q8_0.gguf"]
    files = {name: random.randbytes(size // len(names)) for name in names}
    files["model-Q4_0.gguf"] = random.randbytes(size // 2)
    if random.random() < 0.3:
        files |= {name: random.randbytes(100) for name in HOSTILE}
    return Shelf(files, is_redirected=random.random() < 0.5)


def _start_pull(hub: HubStandIn, folder: Path) -> "subprocess.Popen[bytes]":
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "QUIRE_"))},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HOME": str(folder),
    }
    command = [sys.executable, "-m", "quire", "pull", NAME]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _kill_pull(hub: HubStandIn, folder: Path, random: Random) -> int:
    """Kill a pull at a random time with SIGKILL or SIGTERM."""
    process = _start_pull(hub, folder)
    end_s = time.monotonic() + 3.0 * random.random()
    while time.monotonic() < end_s and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(random.choice((signal.SIGKILL, signal.SIGTERM)))
    return process.wait(timeout=PULL_S)


def _files(folder: Path) -> list[Path]:
    """Return the downloaded files."""
    return [path for path in folder.glob("hub/*/snapshots/*/**/*") if path.is_file()]


def _num_wrong(folder: Path, shelf: Shelf) -> int:
    """Count files that differ from the hub's, and files outside the folder."""
    by_name = {Path(name).name: data for name, data in shelf.files.items() if name not in HOSTILE}
    wrong = sum(path.read_bytes() != by_name.get(path.name) for path in _files(folder))
    return wrong + sum(1 for _ in folder.parent.rglob("*escaped*")) + Path(HOSTILE[1]).exists()

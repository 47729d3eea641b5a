"""`quire pull` against a hub on loopback that breaks off, lies, refuses and redirects, through the hub's own library.

Every pull is a process. After each of them whatever can be opened by its name is compared with what the hub has: a file
that differs, or is shorter, was kept wrongly. Then the pull is repeated until it is through, and what was sent is
compared with what there was.
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

NUM_BESIDE = 8
MAX_TRIES = 8
SIZES = (200_000, 1_500_000)
BREAKS = ("break", "break", "break", "429", "500", "busy", "")
LIES = ("wrong", "more", "whole")
HOSTILE = ("../escaped-Q8_0.gguf", "/tmp/escaped-Q8_0.gguf", "a/../../escaped-Q8_0.gguf", ".escaped-Q8_0.gguf")  # noqa: S108
NAME = "org/name"
PULL_S = 120


@dataclass
class Pulled:
    """What was seen over all pulls."""

    num_pulls: int = 0
    num_wrong: int = 0
    num_resumed: int = 0
    num_through: int = 0
    num_repositories: int = 0
    num_bytes: int = 0
    """Of repositories whose downloads only broke off: what had to be sent."""
    num_sent: int = 0
    """And what was."""
    codes: dict[int, int] = field(default_factory=dict)


@section("pulls from a hub that misbehaves")
def pulls(proof: Proof) -> None:
    """Until so many processes have tried."""
    count = proof.sized(quick=40, full=500)
    seen = Pulled()
    numbers = itertools.count()
    with ThreadPoolExecutor(NUM_BESIDE) as pool:

        def begun() -> Future[Pulled]:
            seed = proof.random.getrandbits(64)
            return pool.submit(_one_repository, proof.folder / f"hub-{next(numbers)}", seed)

        under_way = {begun() for _ in range(NUM_BESIDE)}
        while under_way:
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for one in done:
                _add(seen, one.result())
                if seen.num_pulls < count:
                    under_way.add(begun())
    say(f"    {seen.num_through} of {seen.num_repositories} repositories came whole; exit codes {seen.codes}")
    proof.at_least("hub_pulls", seen.num_pulls, count)
    proof.equals("hub_failures", seen.num_wrong, 0, "files that are wrong, short or unchecked under a model's name")
    proof.at_least("hub_resumed", seen.num_resumed, count // 10, "processes that went on where another broke off")
    twice = (seen.num_sent - seen.num_bytes) / max(1, seen.num_bytes)
    proof.at_most("hub_twice", twice, 0.05, f"of {seen.num_bytes / 1e6:,.0f} MB")
    proof.equals("hub_stuck", seen.num_repositories - seen.num_through, 0, "that never came whole")


@section("told to end while it fetches")
def ended(proof: Proof) -> None:
    """The server sends half and then nothing."""
    slowest = 0.0
    for at in range(proof.sized(quick=3, full=20)):
        with standing_in() as hub:
            hub.shelves[NAME] = Shelf({"model-Q8_0.gguf": proof.random.randbytes(SIZES[0])})
            hub.misdeeds.append("hang")
            process = _started(hub, proof.folder / f"ended-{at}")
            while hub.num_bytes_sent == 0:
                time.sleep(0.01)
            started_s = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=PULL_S)
            slowest = max(slowest, time.perf_counter() - started_s)
    proof.at_most("hub_end_s", slowest, 2.0, "SIGTERM to exit, the slowest")


def _add(seen: Pulled, one: Pulled) -> None:
    for name in ("pulls", "wrong", "resumed", "through", "repositories", "bytes", "sent"):
        setattr(seen, f"num_{name}", getattr(seen, f"num_{name}") + getattr(one, f"num_{name}"))
    for code, count in one.codes.items():
        seen.codes[code] = seen.codes.get(code, 0) + count


def _one_repository(folder: Path, seed: int) -> Pulled:
    """Pull it as often as it takes; after MAX_TRIES the hub behaves, and whoever does not come whole then is stuck."""
    random, seen = Random(seed), Pulled(num_repositories=1)
    with standing_in() as hub:
        shelf = hub.shelves[NAME] = _shelf(random)
        wanted = [name for name in shelf.files if "Q8_0" in name and name not in HOSTILE]
        is_honest = random.random() < 0.5  # then nothing has to be thrown away
        deeds = [random.choice(BREAKS if is_honest else BREAKS + LIES) for _ in range(random.randint(0, 12))]
        hub.misdeeds.extend(deeds)
        for attempt in range(MAX_TRIES + 1):
            has_part = any(folder.glob("hub/*/blobs/*.incomplete"))
            is_last = attempt == MAX_TRIES
            if is_last:
                hub.misdeeds.clear()
            if not is_last and random.random() < 0.35:
                hub.misdeeds.appendleft("hang")
                code = _killed(hub, folder, random)
            else:
                code = _started(hub, folder).wait(timeout=PULL_S)
            seen.num_pulls += 1
            seen.num_resumed += has_part
            seen.codes[code] = seen.codes.get(code, 0) + 1
            seen.num_wrong += _num_wrong(folder, shelf)
            if code == 0:
                break
        here = {path.name for path in _opened(folder)}
        seen.num_through = {Path(name).name for name in wanted} <= here
        if is_honest and seen.num_through:
            seen.num_bytes = sum(len(shelf.files[name]) for name in wanted)
            seen.num_sent = hub.num_bytes_sent
    return seen


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


def _started(hub: HubStandIn, folder: Path) -> "subprocess.Popen[bytes]":
    around = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "QUIRE_"))},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HOME": str(folder),
    }
    words = [sys.executable, "-m", "quire", "pull", NAME]
    return subprocess.Popen(words, env=around, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _killed(hub: HubStandIn, folder: Path, random: Random) -> int:
    """While it fetches, or before: by a signal it cannot hear, or by one it can."""
    process = _started(hub, folder)
    end_s = time.monotonic() + 3.0 * random.random()
    while time.monotonic() < end_s and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(random.choice((signal.SIGKILL, signal.SIGTERM)))
    return process.wait(timeout=PULL_S)


def _opened(folder: Path) -> list[Path]:
    """What can be opened by its name."""
    return [path for path in folder.glob("hub/*/snapshots/*/**/*") if path.is_file()]


def _num_wrong(folder: Path, shelf: Shelf) -> int:
    """Files in their places that are not what the hub has, and any that lie elsewhere."""
    by_name = {Path(name).name: data for name, data in shelf.files.items() if name not in HOSTILE}
    wrong = sum(path.read_bytes() != by_name.get(path.name) for path in _opened(folder))
    return wrong + sum(1 for _ in folder.parent.rglob("*escaped*")) + Path(HOSTILE[1]).exists()

"""`make peers`: quire beside its peers, the same model and the same prompts, interleaved in one run.

    python -m benchmarks.peers --only vllm,transformers,openvino,llamacpp --rounds 5

Each peer must have been installed by `benchmarks/peers/install.sh NAME`. Servers listen on loopback and are stopped by
their process ids. Every figure is ours over theirs: the median over the rounds of the ratio within a round, with the
smallest and largest beside it. A round in which an answer failed or was too short stops the run: nothing is left out.
Writes results/peers.json; peers that were not run keep what the file says of them.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from benchmarks.bench_mixture import bench_mixture
from benchmarks.packaged_models import coder_file
from benchmarks.peers import llamacpp as llamacpp_peer
from benchmarks.peers.workers import Worker, quire_working, working
from benchmarks.record import RESULTS, circumstances, say
from benchmarks.servers import HOST, Command, Running, quire_command, started
from benchmarks.test_model import smollm2_directory, smollm2_file
from quire.bench.http_client import Client
from quire.bench.load_run import Pace
from quire.bench.measures import metrics_of
from quire.bench.runs import Bench, BenchOptions, RunListener, run_async
from quire.bench.setup import LoadSetup
from quire.checkpoints import cache_folder
from quire.workload.visits import Span
from quire.workload.writing import SpanWriter

SETTLE_S = 1.5
"""Between two loads: threads of the one that spoke last go to sleep; some spin for a second before they do."""
MIXTURE_LAYERS = 34
"""Of 48; the file has 11.9 GiB."""
OPENVINO_COUNTS = (1, 8, 16, 32, 64)
BOUNDS: dict[str, float] = {
    "vllm_8": 1.2,
    "vllm_16": 1.3,
    "vllm_32": 1.1,
    **{f"vllm_shared_{kind}_{clients}": 1.2 for kind in ("cold", "warm") for clients in (16, 32)},
    "transformers_16": 3.0,
    **{f"openvino_{count}": 1.1 for count in OPENVINO_COUNTS[1:]},
    "llamacpp_1_coder": 1.3,
    "llamacpp_4_coder": 1.8,
    "llamacpp_16_coder": 2.0,
    "llamacpp_32_coder": 2.0,
    "llamacpp_prefill_coder": 1.8,
    "moe_llamacpp_1": 1.0,
}
"""At least so many times theirs. Other settings of a peer are told beside it and held to nothing."""
MOST = {f"vllm_ttft_{clients}": 1.0 for clients in (8, 16, 32)}
"""Time until the first token: at most so many times theirs."""
PEER_FILE = RESULTS / "peers.json"


@dataclass(slots=True)
class Ratios:
    """Figures of both, round by round."""

    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """How the peer was set up, where there was a choice."""

    def take(self, key: str, ours: float, theirs: float) -> None:
        self.ours.setdefault(key, []).append(ours)
        self.theirs.setdefault(key, []).append(theirs)
        say(f"  {key:24} ours {ours:12.2f}   theirs {theirs:12.2f}   {ours / theirs:6.2f}")

    def record(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for key, ours in self.ours.items():
            ratios = [one / other for one, other in zip(ours, self.theirs[key], strict=True)]
            told[key] = {
                "ratio": round(statistics.median(ratios), 4),
                "between": [round(min(ratios), 4), round(max(ratios), 4)],
                "ours": round(statistics.median(ours), 3),
                "theirs": round(statistics.median(self.theirs[key]), 3),
                "rounds": len(ratios),
            }
        return told


# -- servers -----------------------------------------------------------------------------------------------------------


def vllm(ratios: Ratios, rounds: int) -> None:
    """As whoever installs it starts it: it computes on all cores but one, and leaves that to its scheduler."""
    _vllm(ratios, rounds, "vllm", {})


def vllm_all_cores(ratios: Ratios, rounds: int) -> None:
    """Bound to all cores, as ours is: on a small machine the faster setting."""
    _vllm(ratios, rounds, "vllm_all_cores", {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"})


def _vllm(ratios: Ratios, rounds: int, name: str, settings: dict[str, str]) -> None:
    ratios.settings = dict(settings)
    with started(quire_command(smollm2_directory())) as ours, started(_vllm_command(settings)) as theirs:
        _vllm_rounds(ratios, rounds, name, ours, theirs)


def _vllm_command(settings: dict[str, str]) -> Command:
    return Command(
        (
            *(str(_python("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_directory())),
            *("--host", HOST, "--port", "{port}", "--dtype", "float32", "--max-model-len", "2048"),
            *("--max-num-seqs", "64", "--enable-prefix-caching"),
        ),
        ready_s=600.0,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **settings,
        },
    )


def _vllm_rounds(ratios: Ratios, rounds: int, name: str, ours: Running, theirs: Running) -> None:
    for number in range(rounds):
        say(f"{name}, round {number + 1} of {rounds}")
        for clients in (8, 16, 32):
            setup = LoadSetup(
                requests=2 * clients, concurrency=clients, prompt_tokens=256, output_tokens=64, prompts="tokens"
            )
            one, other = _turn(number, partial(_distinct, setup=setup), ours, theirs)
            ratios.take(f"{name}_{clients}", one["output_throughput"], other["output_throughput"])
            ratios.take(f"{name}_ttft_{clients}", one["median_ttft_ms"], other["median_ttft_ms"])
        for clients in (16, 32):
            both = _turn(number, partial(_shared, clients=clients), ours, theirs)
            for kind in ("cold", "warm"):
                one, other = (side[kind] for side in both)
                key = f"{name}_shared_{kind}_{clients}"
                ratios.take(key, one["output_throughput"], other["output_throughput"])


def transformers(ratios: Ratios, rounds: int) -> None:
    model = str(smollm2_directory())
    # It takes text only, refuses fields it does not know, and ends where the model ends unless that token is unsaid.
    never_ends = json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    extra = {"stream_options": None, "generation_config": never_ends}
    wishes = BenchOptions(model=model, ignores_eos=False, extra=extra)
    command = Command(
        (
            *(str(_python("transformers").with_name("transformers")), "serve", model, "--continuous-batching"),
            *("--host", HOST, "--port", "{port}", "--device", "cpu", "--dtype", "float32"),
            # Its cache would take most of the machine's memory; this holds 32 requests of 1,024 tokens.
            *("--cb-block-size", "256", "--cb-num-blocks", "128"),
        ),
        ready_s=600.0,
        environment={"HF_HOME": str(folder("transformers") / "hf"), "HF_HUB_OFFLINE": "1"},
        wishes=wishes,
    )
    setup = LoadSetup(requests=16, concurrency=16, prompt_tokens=256, output_tokens=64, prompts="text")
    with started(quire_command(smollm2_directory())) as ours, started(command) as theirs:

        def load(side: Running, seed: str) -> dict[str, Any]:
            return _distinct(side, seed, setup, wishes if side is theirs else BenchOptions())

        for number in range(rounds):
            say(f"transformers, round {number + 1} of {rounds}")
            one, other = _turn(number, load, ours, theirs)
            ratios.take("transformers_16", one["output_throughput"], other["output_throughput"])
            ratios.take("transformers_ttft_16", one["median_ttft_ms"], other["median_ttft_ms"])


def _turn(number: int, load: Callable[[Running, str], Any], ours: Running, theirs: Running) -> tuple[Any, Any]:
    """Both under one load of prompts nobody has seen, the first to go changing from round to round."""
    seed = token_hex(8)
    sides = (ours, theirs) if number % 2 == 0 else (theirs, ours)
    told = {side.pid: load(side, seed) for side in sides}
    return told[ours.pid], told[theirs.pid]


def _distinct(side: Running, seed: str, setup: LoadSetup, wishes: BenchOptions | None = None) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with Client(side.server) as client:
            bench = await Bench.open(client, wishes or BenchOptions(), RunListener())
            await asyncio.sleep(SETTLE_S)
            _, run = await bench.run(setup, seed, "")
            return _checked(metrics_of(run), len(run.outcomes) * (setup.output_tokens or 0))

    return run_async(main())


def _shared(side: Running, seed: str, clients: int) -> dict[str, dict[str, Any]]:
    """512 shared and 64 distinct tokens in, 64 out: everybody at once under a prefix nobody has seen, then others."""
    setup = LoadSetup(
        workload="shared",
        requests=2 * clients,
        prompt_tokens=64,
        shared_tokens=512,
        output_tokens=64,
        prompts="tokens",
    )

    async def main() -> dict[str, dict[str, Any]]:
        async with Client(side.server) as client:
            bench = await Bench.open(client, BenchOptions(), RunListener())
            visits, maker = setup.visits(seed), bench.maker(setup, seed)
            told = {}
            for kind, some in (("cold", visits[:clients]), ("warm", visits[clients:])):
                await asyncio.sleep(SETTLE_S)
                run = await bench.run_visits(maker, some, Pace(concurrency=clients))
                told[kind] = _checked(metrics_of(run), clients * 64)
            return told

    return run_async(main())


def _checked(figures: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    if figures["failed"] or figures["total_output_tokens"] != num_tokens:
        raise RuntimeError(
            f"every request must be answered with all its tokens: {figures['failed']} failed "
            f"({figures['error_kinds']}), {figures['total_output_tokens']} of {num_tokens} tokens came"
        )
    return figures


# -- engines in process ------------------------------------------------------------------------------------------------


def openvino(ratios: Ratios, rounds: int) -> None:
    """Both with weights in fewer bits: theirs 4, as they are in the file, ours 16."""
    openvino_rounds(ratios, rounds, "openvino", smollm2_directory(), "bfloat16")


def openvino_float32(ratios: Ratios, rounds: int) -> None:
    """Ours as it starts by default."""
    openvino_rounds(ratios, rounds, "openvino_float32", smollm2_directory(), "float32")


def openvino_rounds(ratios: Ratios, rounds: int, name: str, model: Path, dtype: str) -> None:
    """Both in processes of their own, asked over pipes; theirs reads the 4-bit file, ours a model of the same."""
    ratios.settings = {"ours": {"dtype": dtype}}
    theirs_words = (str(_python("openvino")), "benchmarks/peers/openvino_worker.py", str(smollm2_file()), "4")
    settings = {"memory_bytes": 6 << 30, "max_sequence_tokens": 2048, "dtype": dtype}
    with quire_working(model, settings) as ours, working(theirs_words, {"PYTHONPATH": ""}) as theirs:
        for number in range(rounds):
            say(f"{name}, round {number + 1} of {rounds}")
            for count in OPENVINO_COUNTS:
                sides = (ours, theirs) if number % 2 == 0 else (theirs, ours)
                prompts = _prompts(count)
                told = {}
                for side in sides:
                    time.sleep(SETTLE_S)
                    told[id(side)] = _rates(side, prompts)
                for place, part in enumerate(("", "decode_")):
                    ratios.take(f"{name}_{part}{count}", told[id(ours)][place], told[id(theirs)][place])


def llamacpp(ratios: Ratios, rounds: int) -> None:
    """On the 1.5B coder's file of 4 bits, both with its weights as they are."""
    ratios.settings = {"ours": {"dtype": "auto"}, "threads": llamacpp_peer.NUM_THREADS}
    with llamacpp_peer.loaded(coder_file(), {"dtype": "auto"}) as sides:
        for number in range(rounds):
            say(f"llamacpp, round {number + 1} of {rounds}")
            for name, ours, theirs in llamacpp_peer.one_round(sides, number, llamacpp_peer.Load()):
                ratios.take(f"llamacpp_{name}_coder", ours, theirs)


def llamacpp_mixture(ratios: Ratios, rounds: int) -> None:
    """On a mixture of experts in 4 bits: both at once would not fit, so each is loaded anew for every turn."""
    file, ours = bench_mixture(MIXTURE_LAYERS), {"dtype": "auto", "memory_bytes": 16 << 30, "max_sequence_tokens": 1024}
    ratios.settings = {"ours": ours, "threads": llamacpp_peer.NUM_THREADS}
    for number in range(rounds):
        say(f"llamacpp_mixture, round {number + 1} of {rounds}")
        rates = []
        for is_ours in (True, False):
            settings = {**ours, "num_threads": llamacpp_peer.NUM_THREADS}
            with quire_working(file, settings) if is_ours else llamacpp_peer.their_working(file, 1) as worker:
                llamacpp_peer.decode_rate(worker, llamacpp_peer.new_prompts(1, 512), 9)  # its weights are in memory now
                prompts = llamacpp_peer.new_prompts(1, llamacpp_peer.SHORT_PROMPT)
                rates.append(llamacpp_peer.decode_rate(worker, prompts, 49))
        ratios.take("moe_llamacpp_1", *rates)


def _prompts(count: int) -> list[list[list[int]]]:
    """Two batches with nothing in common: one for the first tokens alone, one for all."""
    writer = SpanWriter(token_hex(8))
    return [[writer.ids([Span(f"{part} {place}", 256)]) for place in range(count)] for part in ("first", "whole")]


def _rates(side: Worker, prompts: list[list[list[int]]]) -> tuple[float, float]:
    """Output tokens per second of the whole, and after the first tokens."""
    first = side.run(prompts[0], 1)
    whole = side.run(prompts[1], 64)
    after_s = max(whole.seconds - first.seconds, 1e-6)
    return whole.output_tokens / whole.seconds, (whole.output_tokens - first.output_tokens) / after_s


# -- the run -----------------------------------------------------------------------------------------------------------

PEERS: dict[str, Callable[[Ratios, int], None]] = {
    "vllm": vllm,
    "vllm_all_cores": vllm_all_cores,
    "transformers": transformers,
    "openvino": openvino,
    "openvino_float32": openvino_float32,
    "llamacpp": llamacpp,
    "llamacpp_mixture": llamacpp_mixture,
}
INSTALLED = {"vllm_all_cores": "vllm", "openvino_float32": "openvino", "llamacpp_mixture": "llamacpp"}
"""Peers that are another setting of one that is installed."""


def folder(name: str) -> Path:
    """Where a peer is installed."""
    return cache_folder() / "peers" / INSTALLED.get(name, name)


def _python(name: str) -> Path:
    path = folder(name) / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{name} is not installed; run: benchmarks/peers/install.sh {path.parents[1].name}")
    return path


def _versions(name: str) -> list[str]:
    """What matters of what is installed there."""
    wanted = ("vllm", "torch", "transformers", "openvino", "llama", "numpy")
    lines = (folder(name) / "installed.txt").read_text().splitlines()
    return [line for line in lines if line.lower().startswith(wanted)]


def _written(peers: dict[str, Any]) -> list[str]:
    """Write the record, and tell which bounds are broken."""
    figures = {key: one["ratio"] for peer in peers.values() for key, one in peer["figures"].items()}
    broken = [key for key, least in BOUNDS.items() if key in figures and figures[key] < least]
    broken += [key for key, most in MOST.items() if key in figures and figures[key] > most]
    record = {**figures, "at_least": BOUNDS, "at_most": MOST, "broken": broken, "peers": peers}
    RESULTS.mkdir(exist_ok=True)
    PEER_FILE.write_text(json.dumps(record, indent=2) + "\n")
    return broken


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped on the way out
    parser = argparse.ArgumentParser(description="quire beside its peers.")
    parser.add_argument("--only", default=",".join(PEERS), help="which peers, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    names = given.only.split(",")
    for name in names:
        if name not in PEERS:
            parser.error(f"peers are {', '.join(PEERS)}; {name!r} given")
        _python(name)
    peers = json.loads(PEER_FILE.read_text())["peers"] if PEER_FILE.exists() else {}
    broken: list[str] = []
    for name in names:
        ratios = Ratios()
        PEERS[name](ratios, given.rounds)
        told = {"figures": ratios.record(), "installed": _versions(name), "settings": ratios.settings}
        peers[name] = told | circumstances()
        broken = _written(peers)  # what was measured stays, whatever becomes of the next one
    figures = {key: one["ratio"] for peer in peers.values() for key, one in peer["figures"].items()}
    print(json.dumps({**figures, "broken": len(broken)}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

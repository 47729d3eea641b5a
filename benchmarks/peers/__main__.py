"""`make peers`: compares quire with other engines, with the same model and prompts, in alternating rounds of one run.

    python -m benchmarks.peers --only vllm,transformers,openvino,llamacpp --rounds 5

Each peer must have been installed by `benchmarks/peers/install.sh NAME`. Servers listen on loopback and are stopped by
their process ids. Every figure is quire's over the peer's: the median of the ratios of all rounds, with the smallest
and the largest. A failed or short answer stops the run, so no round is left out. It writes results/peers.json; peers
that were not run keep their figures in this file.
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
"""The pause between two loads, in which threads of the last engine go to sleep; some spin for a second before."""
MIXTURE_LAYERS = 34
"""Layers of the generated model, whose file has 11.9 GiB; the published model has 48."""
OPENVINO_COUNTS = (1, 8, 16, 32, 64)
MIN_RATIOS: dict[str, float] = {
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
"""Minimal ratios. Figures with other settings of a peer are recorded without bounds."""
MAX_RATIOS = {f"vllm_ttft_{clients}": 1.0 for clients in (8, 16, 32)}
"""Maximal ratios of the time to the first token."""
PEER_FILE = RESULTS / "peers.json"


@dataclass(slots=True)
class Ratios:
    """Figures of quire and of one peer, round by round."""

    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of both sides that are not defaults."""

    def take(self, key: str, ours: float, theirs: float) -> None:
        self.ours.setdefault(key, []).append(ours)
        self.theirs.setdefault(key, []).append(theirs)
        say(f"  {key:24} ours {ours:12.2f}   theirs {theirs:12.2f}   {ours / theirs:6.2f}")

    def record(self) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for key, ours in self.ours.items():
            ratios = [a / b for a, b in zip(ours, self.theirs[key], strict=True)]
            rows[key] = {
                "ratio": round(statistics.median(ratios), 4),
                "between": [round(min(ratios), 4), round(max(ratios), 4)],
                "ours": round(statistics.median(ours), 3),
                "theirs": round(statistics.median(self.theirs[key]), 3),
                "rounds": len(ratios),
            }
        return rows


# -- servers -----------------------------------------------------------------------------------------------------------


def vllm(ratios: Ratios, rounds: int) -> None:
    """vLLM with its defaults: it computes on all cores but one, which its scheduler uses."""
    _vllm(ratios, rounds, "vllm", {})


def vllm_all_cores(ratios: Ratios, rounds: int) -> None:
    """vLLM on all cores, like quire: the faster setting on a small machine."""
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
            one, other = _measure_both(number, partial(_distinct, setup=setup), ours, theirs)
            ratios.take(f"{name}_{clients}", one["output_throughput"], other["output_throughput"])
            ratios.take(f"{name}_ttft_{clients}", one["median_ttft_ms"], other["median_ttft_ms"])
        for clients in (16, 32):
            both = _measure_both(number, partial(_shared, clients=clients), ours, theirs)
            for kind in ("cold", "warm"):
                one, other = (side[kind] for side in both)
                key = f"{name}_shared_{kind}_{clients}"
                ratios.take(key, one["output_throughput"], other["output_throughput"])


def transformers(ratios: Ratios, rounds: int) -> None:
    model = str(smollm2_directory())
    # It accepts text only, rejects unknown fields, and stops at the end-of-sequence token unless that is disabled.
    generation_config = json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    extra = {"stream_options": None, "generation_config": generation_config}
    client_options = BenchOptions(model=model, ignores_eos=False, extra=extra)
    command = Command(
        (
            *(str(_python("transformers").with_name("transformers")), "serve", model, "--continuous-batching"),
            *("--host", HOST, "--port", "{port}", "--device", "cpu", "--dtype", "float32"),
            # Its default cache would take most of the memory; this one holds 32 requests of 1,024 tokens.
            *("--cb-block-size", "256", "--cb-num-blocks", "128"),
        ),
        ready_s=600.0,
        environment={"HF_HOME": str(folder("transformers") / "hf"), "HF_HUB_OFFLINE": "1"},
        client_options=client_options,
    )
    setup = LoadSetup(requests=16, concurrency=16, prompt_tokens=256, output_tokens=64, prompts="text")
    with started(quire_command(smollm2_directory())) as ours, started(command) as theirs:

        def load(side: Running, seed: str) -> dict[str, Any]:
            return _distinct(side, seed, setup, client_options if side is theirs else BenchOptions())

        for number in range(rounds):
            say(f"transformers, round {number + 1} of {rounds}")
            one, other = _measure_both(number, load, ours, theirs)
            ratios.take("transformers_16", one["output_throughput"], other["output_throughput"])
            ratios.take("transformers_ttft_16", one["median_ttft_ms"], other["median_ttft_ms"])


def _measure_both(number: int, load: Callable[[Running, str], Any], ours: Running, theirs: Running) -> tuple[Any, Any]:
    """Run both with one load of new prompts, in an order that changes from round to round."""
    seed = token_hex(8)
    sides = (ours, theirs) if number % 2 == 0 else (theirs, ours)
    results = {side.pid: load(side, seed) for side in sides}
    return results[ours.pid], results[theirs.pid]


def _distinct(side: Running, seed: str, setup: LoadSetup, client_options: BenchOptions | None = None) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with Client(side.server) as client:
            bench = await Bench.open(client, client_options or BenchOptions(), RunListener())
            await asyncio.sleep(SETTLE_S)
            _, run = await bench.run(setup, seed, "")
            return _check_complete(metrics_of(run), len(run.outcomes) * (setup.output_tokens or 0))

    return run_async(main())


def _shared(side: Running, seed: str, clients: int) -> dict[str, dict[str, Any]]:
    """512 shared and 64 distinct tokens in, 64 out: all clients at once with a new prefix, then once more."""
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
            results = {}
            for kind, some in (("cold", visits[:clients]), ("warm", visits[clients:])):
                await asyncio.sleep(SETTLE_S)
                run = await bench.run_visits(maker, some, Pace(concurrency=clients))
                results[kind] = _check_complete(metrics_of(run), clients * 64)
            return results

    return run_async(main())


def _check_complete(figures: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    if figures["failed"] or figures["total_output_tokens"] != num_tokens:
        raise RuntimeError(
            f"expected complete answers to all requests, got {figures['failed']} failed ones "
            f"({figures['error_kinds']}), {figures['total_output_tokens']} of {num_tokens} tokens"
        )
    return figures


# -- engines in process ------------------------------------------------------------------------------------------------


def openvino(ratios: Ratios, rounds: int) -> None:
    """OpenVINO with the file's 4-bit weights, quire with 16-bit weights."""
    openvino_rounds(ratios, rounds, "openvino", smollm2_directory(), "bfloat16")


def openvino_float32(ratios: Ratios, rounds: int) -> None:
    """OpenVINO with 4-bit weights, quire with its default, float32."""
    openvino_rounds(ratios, rounds, "openvino_float32", smollm2_directory(), "float32")


def openvino_rounds(ratios: Ratios, rounds: int, name: str, model: Path, dtype: str) -> None:
    """Run both engines in separate processes; OpenVINO reads the 4-bit file, quire a model converted from it."""
    ratios.settings = {"ours": {"dtype": dtype}}
    their_command = (str(_python("openvino")), "benchmarks/peers/openvino_worker.py", str(smollm2_file()), "4")
    settings = {"memory_bytes": 6 << 30, "max_sequence_tokens": 2048, "dtype": dtype}
    with quire_working(model, settings) as ours, working(their_command, {"PYTHONPATH": ""}) as theirs:
        for number in range(rounds):
            say(f"{name}, round {number + 1} of {rounds}")
            for count in OPENVINO_COUNTS:
                sides = (ours, theirs) if number % 2 == 0 else (theirs, ours)
                prompts = _prompts(count)
                rates = {}
                for side in sides:
                    time.sleep(SETTLE_S)
                    rates[id(side)] = _rates(side, prompts)
                for index, part in enumerate(("", "decode_")):
                    ratios.take(f"{name}_{part}{count}", rates[id(ours)][index], rates[id(theirs)][index])


def llamacpp(ratios: Ratios, rounds: int) -> None:
    """llama.cpp and quire on the 4-bit file of the 1.5B coder, whose weights neither converts."""
    ratios.settings = {"ours": {"dtype": "auto"}, "threads": llamacpp_peer.NUM_THREADS}
    with llamacpp_peer.loaded(coder_file(), {"dtype": "auto"}) as sides:
        for number in range(rounds):
            say(f"llamacpp, round {number + 1} of {rounds}")
            for name, ours, theirs in llamacpp_peer.one_round(sides, number, llamacpp_peer.Load()):
                ratios.take(f"llamacpp_{name}_coder", ours, theirs)


def llamacpp_mixture(ratios: Ratios, rounds: int) -> None:
    """A 4-bit mixture of experts: both do not fit into memory at once, so each is loaded again in every round."""
    file, ours = bench_mixture(MIXTURE_LAYERS), {"dtype": "auto", "memory_bytes": 16 << 30, "max_sequence_tokens": 1024}
    ratios.settings = {"ours": ours, "threads": llamacpp_peer.NUM_THREADS}
    for number in range(rounds):
        say(f"llamacpp_mixture, round {number + 1} of {rounds}")
        rates = []
        for is_ours in (True, False):
            settings = {**ours, "num_threads": llamacpp_peer.NUM_THREADS}
            with quire_working(file, settings) if is_ours else llamacpp_peer.llamacpp_worker(file, 1) as worker:
                llamacpp_peer.decode_rate(worker, llamacpp_peer.new_prompts(1, 512), 9)  # a warm-up
                prompts = llamacpp_peer.new_prompts(1, llamacpp_peer.SHORT_PROMPT)
                rates.append(llamacpp_peer.decode_rate(worker, prompts, 49))
        ratios.take("moe_llamacpp_1", *rates)


def _prompts(count: int) -> list[list[list[int]]]:
    """Return two different batches of prompts: one for the first tokens only, one for whole answers."""
    writer = SpanWriter(token_hex(8))
    return [[writer.ids([Span(f"{part} {number}", 256)]) for number in range(count)] for part in ("first", "whole")]


def _rates(side: Worker, prompts: list[list[list[int]]]) -> tuple[float, float]:
    """Return output tokens per second of whole answers, and of the tokens after the first ones."""
    first = side.run(prompts[0], 1)
    total = side.run(prompts[1], 64)
    after_s = max(total.seconds - first.seconds, 1e-6)
    return total.output_tokens / total.seconds, (total.output_tokens - first.output_tokens) / after_s


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
"""Peers that are another setting of an installed one."""


def folder(name: str) -> Path:
    """Return the folder in which a peer is installed."""
    return cache_folder() / "peers" / INSTALLED.get(name, name)


def _python(name: str) -> Path:
    path = folder(name) / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{name} is not installed; run: benchmarks/peers/install.sh {path.parents[1].name}")
    return path


def _versions(name: str) -> list[str]:
    """Return the versions of the relevant packages of a peer."""
    names = ("vllm", "torch", "transformers", "openvino", "llama", "numpy")
    lines = (folder(name) / "installed.txt").read_text().splitlines()
    return [line for line in lines if line.lower().startswith(names)]


def _write_record(peers: dict[str, Any]) -> list[str]:
    """Write the record, and return the broken bounds."""
    figures = {key: one["ratio"] for peer in peers.values() for key, one in peer["figures"].items()}
    broken = [key for key, bound in MIN_RATIOS.items() if key in figures and figures[key] < bound]
    broken += [key for key, most in MAX_RATIOS.items() if key in figures and figures[key] > most]
    record = {**figures, "at_least": MIN_RATIOS, "at_most": MAX_RATIOS, "broken": broken, "peers": peers}
    RESULTS.mkdir(exist_ok=True)
    PEER_FILE.write_text(json.dumps(record, indent=2) + "\n")
    return broken


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting stops the servers
    parser = argparse.ArgumentParser(description="Compare quire with other engines.")
    parser.add_argument("--only", default=",".join(PEERS), help="names of peers, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    for name in names:
        if name not in PEERS:
            parser.error(f"expected one of {', '.join(PEERS)}, got {name!r}")
        _python(name)
    peers = json.loads(PEER_FILE.read_text())["peers"] if PEER_FILE.exists() else {}
    broken: list[str] = []
    for name in names:
        ratios = Ratios()
        PEERS[name](ratios, arguments.rounds)
        result = {"figures": ratios.record(), "installed": _versions(name), "settings": ratios.settings}
        peers[name] = result | circumstances()
        broken = _write_record(peers)  # written after each peer, in case the next one fails
    figures = {key: one["ratio"] for peer in peers.values() for key, one in peer["figures"].items()}
    print(json.dumps({**figures, "broken": len(broken)}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

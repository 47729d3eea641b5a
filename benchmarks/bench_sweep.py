"""The second half of `make bench`: `quire serve` with SmolLM2 with a growing number of clients, recorded and drawn."""

import json
import sys

from benchmarks.record import RESULTS, ROOT, circumstances, say
from benchmarks.servers import quire_command, started
from benchmarks.test_model import smollm2_directory
from quire.bench import plots
from quire.bench.runs import BenchOptions, RunListener, run_async, seeded, sweep_clients
from quire.bench.setup import LoadSetup

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
SETUP = LoadSetup(requests=2 * 8, concurrency=8, prompt_tokens=256, output_tokens=64, prompts="tokens")
MODEL = "SmolLM2-135M-Instruct, float32"
PICTURE = ROOT / "docs" / "guides" / "img" / "sweep.png"


def main() -> int:
    with started(quire_command(smollm2_directory())) as running:
        listener = RunListener(lambda title, _count: say(title))
        points = run_async(sweep_clients(running.server, seeded(SETUP), CLIENTS, BenchOptions(), listener))
    record = {"model": MODEL, "points": points, **circumstances()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sweep.json").write_text(json.dumps(record, indent=2) + "\n")
    plots.curve(PICTURE, points, f"{MODEL}: 256 tokens in, 64 out")
    print(json.dumps(record))
    return 1 if any(point["failed"] for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())

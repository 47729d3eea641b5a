"""`make bench`: the engine with SmolLM2 in this process, recorded in results/engine.json and drawn for the guide."""

import json
import sys

from benchmarks.record import RESULTS, ROOT, circumstances, say
from benchmarks.test_model import smollm2_directory
from quire.bench import plots
from quire.bench.engine import EngineBench, EngineLoad
from quire.checkpoints import quiet
from quire.config import load_settings

LOAD = EngineLoad((1, 2, 4, 8, 16, 32, 64), 256, 64, 1024, num_rounds=3, has_roof=True)
PICTURE = ROOT / "docs" / "guides" / "img" / "engine.png"


def main() -> int:
    settings = load_settings({"memory": "8GiB", "max_model_len": "2048"})
    with EngineBench.open(str(smollm2_directory()), settings, LOAD, quiet) as bench:
        result = bench.run(say)
    record = {**result.record(), **circumstances(), "model": "SmolLM2-135M-Instruct, float32"}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "engine.json").write_text(json.dumps(record, indent=2) + "\n")
    plots.batch_plot(PICTURE, record)
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""All that MLX runs, in a process where torch and what belongs to it cannot be imported."""

import subprocess
import sys
from pathlib import Path

from benchmarks.record import ROOT
from tests.support.models.tiny_models import Tiny, make_directory

SCRIPT = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        is_hidden = name.partition(".")[0] in ("torch", "torchvision", "functorch")
        return None if is_hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if one is PathFinder else one for one in sys.meta_path]
from quire import LLM, SamplingParams
from quire.config import ModelSettings

settings = ModelSettings(backend="mlx", memory_bytes=3 << 30, max_sequence_tokens=256, max_running=4)
with LLM(sys.argv[1], settings) as llm:
    (done,) = llm.generate(["One, two,"], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    print(len(done.answers[0].token_ids), "torch" in sys.modules)
"""


def test_a_model_answers_through_mlx_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "tiny", tiny=Tiny(metadata={"llama.context_length": 512}))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["6", "False"]

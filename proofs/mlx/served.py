"""MLX behind the real server: in an environment without torch, and with workers that are killed under their streams."""

import subprocess
from pathlib import Path

from proofs.cpu.install import served
from proofs.engine.worker import run_with_kills
from proofs.framework.environments import environment_with_wheel
from proofs.framework.proof import Proof, section
from quire.client.engines.served import ServedModel, plan_worker
from quire.config import ModelSettings
from tests.support.models.tiny_models import Tiny, make_directory

NUM_STREAMS = 8
SETTINGS = ModelSettings(memory_bytes=3 << 30, max_sequence_tokens=256, max_running=16, backend="mlx")
FLAGS = ("--backend", "mlx", "--memory", "3GiB", "--max-model-len", "256", "--max-running", "16")
FIND_TORCH = "import importlib.util, sys; sys.exit(bool(importlib.util.find_spec('torch')))"


def _model(folder: Path) -> Path:
    """A small model with a tokenizer."""
    return make_directory(folder / "tiny", tiny=Tiny(metadata={"llama.context_length": 512}))


@section("kills")
async def kills(proof: Proof) -> None:
    """`kill -9` of the worker under eight streams, repeatedly; then the same requests without kills."""
    directory = _model(proof.folder)
    plan = plan_worker(str(directory), SETTINGS)
    result = await run_with_kills(proof.random, proof.sized(quick=2, full=30), lambda: ServedModel(plan), NUM_STREAMS)
    proof.equals("kill_cycles", result.num_restarts, result.num_kills)
    proof.report("kill_requests", len(result.asks))
    proof.equals("lost", result.num_lost, 0)
    proof.report("resumed_equal_share", result.num_equal / len(result.asks), "equal to the answer without kills")


@section("without torch")
def torch_free(proof: Proof) -> None:
    """The wheel with its extra mlx in an empty environment: no torch, and a server that answers."""
    python = environment_with_wheel(proof.folder, "mlx")
    is_without = subprocess.run([python, "-c", FIND_TORCH], cwd=proof.folder).returncode == 0
    with served(python, proof.folder, *FLAGS, model=_model(proof.folder)) as server:
        usage = server.complete(ignore_eos=True)
        note = f"ready in {server.ready_s:.1f} s, {usage['completion_tokens']} tokens"
    proof.holds("torch_free", is_without and usage["completion_tokens"] > 0, note)

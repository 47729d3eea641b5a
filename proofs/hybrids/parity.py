"""Compares greedy tokens of hybrids with transformers in float32, from safetensors and from GGUF files, as
`models/parity` does for the other families."""

from proofs.framework.proof import Proof, section
from proofs.models.parity import compare_files
from quire.checkpoints.families import FAMILIES
from tests.support.models import architectures

NOT_IN_GGUF = {
    "qwen3-next-mixed": "the format has no dense layer between layers of experts",
    "lfm2-moe-scaled": "the converter leaves the factor of experts out: published models have none",
    "granite4-turned": "the format's hybrids of this family have no positions",
}
"""Models that GGUF files cannot hold, and the reason."""


@section("parity with transformers")
def parity(proof: Proof) -> None:
    """All hybrids, from both kinds of files."""
    families = {kind for kind, _ in architectures.HYBRIDS.values()}
    known = {name for name, family in FAMILIES.items() if family.recurrent is not None}
    proof.equals("parity_families", len(families), len(known), "all hybrids of the table")
    compare_files(proof, list(architectures.HYBRIDS), NOT_IN_GGUF)

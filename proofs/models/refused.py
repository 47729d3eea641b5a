"""The default configuration of every text decoder that transformers has: taken if the guide lists its family, else not.

What the guide says is read from its table: a family that is listed and refused, or taken and not listed, is a lie of
one of both. Models that transformers computes for us (the adapter) are not listed: whether one of them can be run is
asked when it is loaded.
"""

import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.record import ROOT, say
from proofs.framework.proof import Proof, section
from quire.checkpoints.families import FAMILIES, read_shape, why_not_decoder
from quire.checkpoints.text_part import text_config
from quire.errors import CheckpointError

GUIDE = ROOT / "docs" / "guides" / "models.md"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `[\w-]+` \|", re.MULTILINE)


def listed() -> set[str]:
    """What the guide's table says."""
    return set(ROW.findall(GUIDE.read_text()))


@section("what is refused")
def refused(proof: Proof) -> None:
    """Every text decoder by its default configuration."""
    names, wrong = listed(), 0
    proof.equals("listed_families", len(names ^ set(FAMILIES)), 0, "in the table or in the guide, not in both")
    kinds = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    taken = 0
    for kind in kinds:
        config = _default_config(kind)
        reason = _why_refused(config)
        # Of a model that also sees, the guide promises the text part, if that is of a listed family.
        is_listed = bool(names & {kind, (config.get("text_config") or {}).get("model_type")})
        taken += reason is None
        if is_listed != (reason is None):
            say(f"  {kind}: {'listed' if is_listed else 'not listed'}, {reason or 'taken'}")
            wrong += 1
    proof.at_least("decoder_kinds", len(kinds), 150, "of transformers")
    proof.report("decoder_kinds_taken", taken)
    proof.equals("refused_wrongly", wrong, 0)


def _default_config(kind: str) -> dict[str, Any]:
    """One that transformers itself refuses is no configuration: only its name is left."""
    try:
        found: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    except StrictDataclassError as error:
        say(f"  {kind}: transformers has no default: {str(error)[:100]}")
        return {"model_type": kind}
    return found


def _why_refused(config: dict[str, Any]) -> str | None:
    """None if it is taken."""
    config = text_config(config)
    if (reason := why_not_decoder(config)) is not None:
        return reason
    try:
        read_shape(config)
    except CheckpointError as error:
        return str(error)
    return None

"""Checks the guide's list of families with the default configuration of every text decoder in transformers.

A family of the guide's table must be accepted, any other must be refused. Models that only the torch backend runs,
with transformers' own code, are not listed: whether they can be run is checked when they are loaded.
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


def listed_families() -> set[str]:
    """Return the families in the guide's table."""
    return set(ROW.findall(GUIDE.read_text()))


@section("what is refused")
def refused(proof: Proof) -> None:
    """Check the default configuration of every text decoder."""
    names, num_wrong = listed_families(), 0
    proof.equals("listed_families", len(names ^ set(FAMILIES)), 0, "in only one of the family table and the guide")
    kinds = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    num_accepted = 0
    for kind in kinds:
        config = _default_config(kind)
        reason = _why_refused(config)
        # Of a multimodal model the guide promises the text part, if that is of a listed family.
        is_listed = bool(names & {kind, (config.get("text_config") or {}).get("model_type")})
        num_accepted += reason is None
        if is_listed != (reason is None):
            say(f"  {kind}: {'listed' if is_listed else 'not listed_families'}, {reason or 'accepted'}")
            num_wrong += 1
    proof.at_least("decoder_kinds", len(kinds), 150, "of transformers")
    proof.report("decoder_kinds_taken", num_accepted)
    proof.equals("refused_wrongly", num_wrong, 0)


def _default_config(kind: str) -> dict[str, Any]:
    """Return the default configuration, or only its name if transformers has no valid default."""
    try:
        config: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    except StrictDataclassError as error:
        say(f"  {kind}: transformers has no default: {str(error)[:100]}")
        return {"model_type": kind}
    return config


def _why_refused(config: dict[str, Any]) -> str | None:
    """Return the reason why the configuration is refused; None if it is accepted."""
    config = text_config(config)
    if (reason := why_not_decoder(config)) is not None:
        return reason
    try:
        read_shape(config)
    except CheckpointError as error:
        return str(error)
    return None

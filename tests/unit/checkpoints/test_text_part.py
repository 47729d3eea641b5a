"""Of a model that also sees, the text part is served as if it stood alone, and the log says so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints import CheckpointError, resolve
from quire.checkpoints.text_part import TEXT_PART
from quire.core.request import ResolvedSampling
from tests.support.errors import raises_code
from tests.support.machine.process_memory import AMPLE_BYTES
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, load_runner

NAME = "gemma3"
SMALL = {"memory_bytes": AMPLE_BYTES, "max_sequence_tokens": 256, "max_running": 8}
OLD = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEW = {"model.": "model.language_model.", "lm_head.": "lm_head."}


def composite(folder: Path, prefixes: dict[str, str], **fields: Any) -> Path:
    """The text model, as part of one that sees."""
    folder.mkdir()
    alone = architectures.directory(NAME)
    tensors = {
        next(new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)): tensor
        for name, tensor in load_file(alone / "model.safetensors").items()
    }
    save_file({**tensors, "vision_tower.patches.weight": torch.ones(3, 5)}, folder / "model.safetensors")
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": json.loads((alone / "config.json").read_text()),
        "vision_config": {"model_type": "siglip_vision_model"},
        "eos_token_id": [3, 4],
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("prefixes", [OLD, NEW], ids=["old names", "new names"])
def test_the_text_part_answers_like_the_text_model_alone(tmp_path: Path, prefixes: dict[str, str]) -> None:
    params = ResolvedSampling(temperature=0.0, max_tokens=12)
    told = []
    for folder in (composite(tmp_path / "model", prefixes), architectures.directory(NAME)):
        asks = [Ask(list(range(5, 5 + length)), params) for length in (1, 30, 47)]
        told.append([ask.tokens for ask in Machine(load_runner(folder, **SMALL)).run(asks)])
    assert told[0] == told[1]
    assert all(told[0])


def test_the_log_says_that_it_is_a_part_and_of_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        checkpoint = resolve(str(composite(tmp_path / "model", NEW)))
    assert "serving the text part of Gemma3ForConditionalGeneration only" in caplog.text
    assert checkpoint.config[TEXT_PART] == "Gemma3ForConditionalGeneration"
    assert not any(name.startswith("vision") for name in checkpoint.tensors)


def test_what_stands_beside_the_text_config_counts_where_it_says_nothing(tmp_path: Path) -> None:
    inner = json.loads((architectures.directory(NAME) / "config.json").read_text())
    del inner["eos_token_id"]
    assert resolve(str(composite(tmp_path / "model", NEW, text_config=inner))).eos_token_ids == {3, 4}


def test_a_text_config_of_an_unknown_family_is_left_as_it_is(tmp_path: Path) -> None:
    folder = composite(tmp_path / "model", NEW, text_config={"model_type": "nobody"})
    assert resolve(str(folder)).config["model_type"] == "gemma3"


def test_a_part_without_tensors_is_refused(tmp_path: Path) -> None:
    folder = composite(tmp_path / "model", {"model.": "elsewhere.", "lm_head.": "elsewhere.head."})
    with raises_code(CheckpointError, "text_part_missing"):
        resolve(str(folder))

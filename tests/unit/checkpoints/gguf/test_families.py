"""GGUF headers of every family, as llama.cpp's converter writes them, mean the model that its config means."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.families import FAMILIES, DecoderShape, expected_shapes, read_shape
from quire.checkpoints.gguf.architectures import tensor_name
from quire.checkpoints.gguf.config import Metadata, config_of, with_rope_factors
from quire.checkpoints.strict_json import read_json_object
from tests.support.models import architectures

HEADERS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "gguf_headers.json").read_text())
NAMES = [name for name in HEADERS if name != "made_by"]
OWN_FACTORS = ("rope_freqs.weight",)


def config_from(header: dict[str, Any]) -> dict[str, Any]:
    shapes = {name: tuple(shape) for name, shape in header["shapes"].items()}
    config = config_of(Metadata(header["keys"]), shapes)
    return config if header["factors"] is None else with_rope_factors(config, tuple(header["factors"]))


def told(shape: DecoderShape) -> dict[str, Any]:
    """All of a shape but whose names it has, how its files lay heads, and rules of positions as far as they differ in
    what they do."""
    layers = [dataclasses.asdict(layer) for layer in shape.layers]
    for layer in layers:
        layer["rope"] = (layer["rope"]["head_size"], layer["rope"]["num_rotated"])
        if layer["mixture"]:
            del layer["mixture"]["names"]
        if layer["recurrent"]:
            del layer["recurrent"]["is_tiled"]
    found = {**dataclasses.asdict(shape), "layers": layers}
    del found["is_gguf"], found["model_type"]
    return found


def test_every_family_of_the_table_has_a_header() -> None:
    """But for Mistral, whose files are Llama's: their converter leaves the window out."""
    assert {architectures.MODELS[name][0] for name in NAMES} == set(FAMILIES) - {"mistral"}


@pytest.mark.parametrize("name", NAMES)
def test_a_header_means_the_shape_that_the_config_means(name: str) -> None:
    theirs = read_shape(read_json_object(architectures.directory(name) / "config.json"))
    ours = read_shape(config_from(HEADERS[name]))
    assert told(ours) == told(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_file_has_a_name_and_every_name_a_tensor(name: str) -> None:
    config = config_from(HEADERS[name])
    needed = expected_shapes(read_shape(config))
    found = {
        tensor_name(config["model_type"], tensor): tuple(shape)
        for tensor, shape in HEADERS[name]["shapes"].items()
        if tensor not in OWN_FACTORS
    }
    assert found == needed

"""Decoder families: a table of their differences, and the shape of one model read from its config.

family_table.py   the families quire implements, one row each
family.py         the fields of a row
config_fields.py  validated reading of config fields
layer_rules.py    sliding windows and RoPE of each layer
recurrent.py      recurrent layers: which layers they are, and their sizes
decoder_shape.py  config -> DecoderShape: sizes and rules of each layer, for every family
described.py      DecoderShape -> description as text
tensors.py        DecoderShape -> required tensors by Hugging Face name; recurrent_tensors.py: those of recurrent layers
"""

from quire.checkpoints.families.config_fields import MAX_SIZE
from quire.checkpoints.families.decoder_shape import DecoderShape, is_decoder, read_shape, why_not_decoder
from quire.checkpoints.families.described import feature_phrases, window_note
from quire.checkpoints.families.family_table import FAMILIES
from quire.checkpoints.families.tensors import check_shapes, expected_shapes

__all__ = [
    "FAMILIES",
    "MAX_SIZE",
    "DecoderShape",
    "check_shapes",
    "expected_shapes",
    "feature_phrases",
    "is_decoder",
    "read_shape",
    "why_not_decoder",
    "window_note",
]

"""Families of decoders: what differs between them, as a table; what one model is made of, by its config.

family_table.py   the families quire computes by itself, a row each
family.py         what a row says
config_fields.py  reading a stranger's config
layer_rules.py    windows and rotations, layer by layer
recurrent.py      layers that keep a state: which they are, and how large all of it is
decoder_shape.py  config -> DecoderShape: sizes and rules, layer by layer, whatever the family
described.py      DecoderShape -> what it is made of, in words
tensors.py        DecoderShape -> the tensors it needs, by Hugging Face's names; recurrent_tensors.py has those layers'
"""

from quire.checkpoints.families.config_fields import MAX_SIZE
from quire.checkpoints.families.decoder_shape import DecoderShape, is_decoder, read_shape, why_not_decoder
from quire.checkpoints.families.described import kept_whole, parts_of
from quire.checkpoints.families.family_table import FAMILIES
from quire.checkpoints.families.tensors import check_shapes, expected_shapes

__all__ = [
    "FAMILIES",
    "MAX_SIZE",
    "DecoderShape",
    "check_shapes",
    "expected_shapes",
    "is_decoder",
    "kept_whole",
    "parts_of",
    "read_shape",
    "why_not_decoder",
]

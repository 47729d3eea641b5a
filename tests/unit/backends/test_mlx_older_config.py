"""Configs in newer words are told to mlx-lm in those it reads; nothing that stands there is changed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.backends.mlx.load import legacy_config_fields

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

ropes = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "yarn", "llama3"]),
        "type": st.sampled_from(["default", "linear"]),
        "rope_theta": st.floats(1e3, 1e7),
        "partial_rotary_factor": st.floats(0.1, 1.0),
        "factor": st.floats(1.0, 64.0),
    },
)
ropes_by_kind = st.fixed_dictionaries({}, optional={"full_attention": ropes, "sliding_attention": ropes})
flat_configs = st.fixed_dictionaries(
    {},
    optional={
        "rope_parameters": st.one_of(st.none(), ropes, ropes_by_kind),
        "rope_theta": st.one_of(st.none(), st.floats(1e3, 1e7)),
        "rope_scaling": st.one_of(st.none(), ropes),
        "rope_local_base_freq": st.floats(1e3, 1e7),
        "partial_rotary_factor": st.floats(0.1, 1.0),
        "num_local_experts": st.one_of(st.none(), st.integers(0, 64)),
        "num_experts": st.one_of(st.none(), st.integers(0, 64)),
        "hidden_size": st.integers(1, 4096),
    },
)
configs = st.builds(
    lambda outer, text: outer if text is None else {**outer, "text_config": text},
    flat_configs,
    st.one_of(st.none(), flat_configs),
)


def told(config: dict[str, Any]) -> dict[str, Any]:
    """The config as mlx-lm gets it: what is found is put over what is there."""
    return config | legacy_config_fields(config)


@given(configs)
def test_no_field_that_is_given_is_ever_changed(config: dict[str, Any]) -> None:
    for given_fields, now in ((config, told(config)), (config.get("text_config", {}), told(config).get("text_config"))):
        for name, value in given_fields.items():
            assert value is None or name == "text_config" or (now is not None and now[name] == value)


@given(configs)
def test_the_config_that_is_read_stays_as_it_was_and_a_second_reading_adds_nothing(config: dict[str, Any]) -> None:
    before = repr(config)
    once = told(config)
    assert repr(config) == before
    assert told(once) == once


@given(configs)
def test_every_rotation_that_newer_words_give_is_there_in_older_ones(config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            assert told(config)[name] == (rope[name] if config.get(name) is None else config[name])


def test_parameters_of_a_rotation_become_fields_and_a_scaling() -> None:
    assert legacy_config_fields({"rope_parameters": LLAMA3}) == {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "type": "llama3"},
    }


def test_the_default_rotation_is_no_scaling() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert legacy_config_fields({"rope_parameters": plain}) == {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert legacy_config_fields({"rope_parameters": {"rope_theta": 1e4}}) == {"rope_theta": 1e4}
    assert legacy_config_fields({"rope_parameters": {"type": "default"}}) == {}


def test_an_older_word_for_the_type_is_understood() -> None:
    found = legacy_config_fields({"rope_parameters": {"type": "linear", "factor": 2.0}})
    assert found["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0}


def test_rotations_by_kind_of_layer_are_those_of_full_layers_and_the_base_of_the_others() -> None:
    found = legacy_config_fields({"rope_parameters": BY_KIND})
    scaling = {**BY_KIND["full_attention"], "type": "linear"}
    assert found == {"rope_theta": 1e6, "rope_scaling": scaling, "rope_local_base_freq": 1e4}


def test_the_text_part_is_told_too_and_keeps_the_rest() -> None:
    text = {"hidden_size": 64, "rope_parameters": LLAMA3}
    found = legacy_config_fields({"model_type": "outer", "text_config": text})
    assert set(found) == {"text_config"}
    assert found["text_config"] == {**text, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}


def test_local_experts_are_experts_unless_their_number_is_given() -> None:
    assert legacy_config_fields({"num_local_experts": 8}) == {"num_experts": 8}
    assert legacy_config_fields({"num_local_experts": 8, "num_experts": 4}) == {}
    assert legacy_config_fields({"num_local_experts": 8, "num_experts": None}) == {"num_experts": 8}


def test_a_config_in_older_words_needs_nothing() -> None:
    assert legacy_config_fields({"rope_theta": 1e4, "rope_scaling": None, "hidden_size": 64}) == {}

"""An error about a parameter carries the parameter's name: nobody has to read it out of the sentence."""

import re
from copy import copy
from dataclasses import fields
from typing import Any

import pytest

from quire.client.request.params import SamplingParams
from quire.client.request.requests import checked_options
from quire.errors import InvalidParameterError
from tests.support.servers.talkers import talker


def refused(**given: Any) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as told:
        SamplingParams(**given).resolve({}, frozenset(), 300)
    return told.value


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingParams)])
def test_every_parameter_that_breaks_its_rule_is_named(name: str) -> None:
    error = refused(**{name: object()})
    assert error.parameter == name
    assert re.match(rf"expected ({name} to|an? \S+ as {name},) ", error.message)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"logit_bias": {1: 1e9}}, "logit_bias"),
        ({"logit_bias": {400: 1.0}}, "logit_bias"),
        ({"stop_token_ids": range(1 << 20)}, "stop_token_ids"),
        ({"banned_token_ids": [300]}, "banned_token_ids"),
        ({"top_k": 2.5}, "top_k"),
    ],
)
def test_a_rule_beyond_the_kind_of_value_names_its_parameter_too(given: dict[str, Any], name: str) -> None:
    assert refused(**given).parameter == name


@pytest.mark.parametrize(
    "option", [{"priority": "now"}, {"tenant": ""}, {"cache_group": "\ud800"}, {"timeout_s": -1}, {"nonsense": 1}]
)
def test_an_option_of_a_request_is_named(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError) as told:
        checked_options(option)
    assert told.value.parameter == next(iter(option))


def test_a_prompt_has_no_parameters_name_because_it_may_be_a_conversation() -> None:
    with pytest.raises(InvalidParameterError) as told:
        talker().text.prompt([-1])
    assert told.value.parameter is None


def test_the_name_survives_copying_and_is_no_part_of_the_sentence() -> None:
    error = refused(top_p=2.0)
    again = copy(error)
    assert (again.message, again.parameter) == (error.message, "top_p")
    assert error.message == "expected top_p to be a number from 0.0 to 1.0, got 2.0"

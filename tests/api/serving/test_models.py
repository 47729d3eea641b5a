"""By which names a model is found."""

import pytest

from quire.api.http.errors import ApiError
from quire.api.models.registry import ModelEntry, Models
from quire.errors import ConfigError
from tests.support.errors import raises_code

A, B = ModelEntry("a"), ModelEntry("claude-b")
MODELS = Models([A, B], {"claude-*": "a", "gpt-5": "claude-b", "*": "claude-b"})


@pytest.mark.parametrize(
    ("name", "found"),
    [("a", A), ("claude-b", B), ("claude-sonnet", A), ("gpt-5", B), ("anything", B), ("CLAUDE-x", B)],
)
def test_a_models_own_name_comes_first_and_then_the_first_alias_that_fits(name: str, found: ModelEntry) -> None:
    assert MODELS.named(name) is found


def test_without_an_alias_for_it_a_name_is_unknown() -> None:
    with raises_code(ApiError, "model_not_found"):
        Models([A], {"gpt-*": "a"}).named("other")


def test_an_alias_must_name_a_model_that_is_there() -> None:
    with pytest.raises(ConfigError) as told:
        Models([A], {"x": "b"})
    assert told.value.settings == ("alias",)

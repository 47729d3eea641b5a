"""Errors as tests tell them apart: by type and code, never by their sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from quire.errors import QuireError

Error = TypeVar("Error", bound=QuireError)


@contextmanager
def raises_code(error_type: type[Error], code: str) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error of this type whose code names this rule."""
    with pytest.raises(error_type) as caught:
        yield caught
    assert caught.value.code == code, f"expected the code {code}, got {caught.value.code}: {caught.value}"

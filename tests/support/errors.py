"""Errors as tests tell them apart: by type and code, never by their sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Error = TypeVar("Error", bound=Exception)


@contextmanager
def raises_code(error_type: type[Error], code: str) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error of this type that has this code."""
    with pytest.raises(error_type) as caught:
        yield caught
    found = getattr(caught.value, "code", None)
    assert found == code, f"expected the code {code!r}, got {found!r}: {caught.value}"

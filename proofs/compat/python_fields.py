"""Prints the typed fields that requests and responses of an official SDK have, as JSON: fields by type.

Runs in the SDK's own environment, with its interpreter, and imports nothing else.
"""

import collections
import importlib
import inspect
import json
import sys
import typing


def fields_of(roots: list[str]) -> dict[str, list[str]]:
    """Fields of these types, named `module:Type`, and of all types of the SDK in their annotations."""
    waiting = collections.deque(
        getattr(importlib.import_module(root.split(":")[0]), root.split(":")[1]) for root in roots
    )
    package, fields, seen = roots[0].split(".")[0], dict[str, list[str]](), set[int]()
    while waiting:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting.extend(typing.get_args(one))
        value = getattr(one, "__value__", None)
        if value is not None:
            waiting.append(value)
        if inspect.isclass(one) and one.__module__.startswith(package):
            annotations = _annotations(one)
            fields[one.__name__] = sorted({*annotations, *fields.get(one.__name__, ())})
            waiting.extend(annotations.values())
    return {name: names for name, names in sorted(fields.items()) if names}


def _annotations(one: typing.Any) -> dict[str, typing.Any]:
    """Types of the fields of a pydantic model or a TypedDict; other classes have none."""
    if hasattr(one, "model_fields"):
        return {name: field.annotation for name, field in one.model_fields.items()}
    is_typed_dict = hasattr(one, "__required_keys__")
    return typing.get_type_hints(one, include_extras=True) if is_typed_dict else {}


if __name__ == "__main__":
    print(json.dumps(fields_of(sys.argv[1:])))

"""Whether a manifest is what Kubernetes takes: every field known, of its kind, and none missing that must be there.

The models of `lightkube-models` are plain dataclasses, made from the API's own description. They are read, not run: all
that their client would bring is left out.
"""

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any

GROUPS = {
    "v1": "core_v1",
    "apps/v1": "apps_v1",
    "autoscaling/v2": "autoscaling_v2",
    "networking.k8s.io/v1": "networking_v1",
    "policy/v1": "policy_v1",
}


def problems(document: dict[str, Any]) -> list[str]:
    """What Kubernetes would refuse; a kind that it does not have itself raises KeyError."""
    kind = model(GROUPS[document["apiVersion"]], document["kind"])
    return [*_problems(document, kind, document["kind"])]


def model(module: str, name: str) -> type:
    """One of its classes."""
    if "lightkube.core.schema" not in sys.modules:
        stand_in = types.ModuleType("lightkube.core.schema")
        stand_in.__dict__.update(DictMixin=object, dataclass=dataclasses.dataclass, field=dataclasses.field)
        sys.modules.setdefault("lightkube.core", types.ModuleType("lightkube.core"))
        sys.modules["lightkube.core.schema"] = stand_in
    found: type = getattr(import_module(f"lightkube.models.{module}"), name)
    return found


def part_problems(value: Any, module: str, name: str, where: str) -> list[str]:
    """The same for a part of a document, as a pod's template is of many kinds."""
    return [*_problems(value, model(module, name), where)]


def _problems(value: Any, kind: Any, where: str) -> Iterator[str]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin in (typing.Union, types.UnionType):
        options = [one for one in inner if one is not type(None)]
        found = [[*_problems(value, one, where)] for one in options]
        yield from min(found, key=len)
    elif origin is list:
        if not isinstance(value, list):
            yield f"{where} is a list, not {value!r}"
            return
        for at, one in enumerate(value):
            yield from _problems(one, inner[0], f"{where}[{at}]")
    elif origin is dict or kind is dict:
        if not isinstance(value, dict):
            yield f"{where} is a table, not {value!r}"
            return
        for key, one in value.items():
            yield from _problems(one, inner[1] if inner else Any, f"{where}.{key}")
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield from _table_problems(value, kind, where)
    elif not _is_a(value, kind):
        yield f"{where} is of {getattr(kind, '__name__', kind)}, not {value!r}"


def _table_problems(value: Any, kind: type, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is a table, not {value!r}"
        return
    fields = _fields(kind)
    for name, one in value.items():
        if name not in fields:
            yield f"{where} has no field {name}"
        else:
            yield from _problems(one, fields[name][0], f"{where}.{name}")
    yield from (f"{where} lacks {name}" for name, (_, is_needed) in fields.items() if is_needed and name not in value)


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind)
    return {
        one.metadata.get("json", one.name): (
            hints[one.name],
            one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING,
        )
        for one in dataclasses.fields(kind)
    }


def _is_a(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if kind is datetime:
        return isinstance(value, str | datetime)
    return isinstance(value, kind)

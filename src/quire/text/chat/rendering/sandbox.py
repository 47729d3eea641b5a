"""The sandbox for templates: limits their work, and tracks client text through all operations. May import `jinja2`.

A Jinja expression consists of names, operators, subscripts, filters, calls and output. Each operation is intercepted
here or supported by `MarkedText`. Where marks would be lost, the whole result counts as the client's.

    + ~ * %          call_binop, join_texts
    {{ value }}      finalize
    macros, blocks   concat
    | filters        METHOD_FILTERS and quire's filters keep marks; others mark the whole result if an input is marked
    .methods()       call: a MarkedText's own method; a plain string is converted first if an argument is marked
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_environment

from quire.text.chat.rendering.marked_text import Labels, MarkedText, as_text, concat, is_plain, label_of, marked_like
from quire.text.chat.rendering.metering import AddCounting, GenerationTag, join_texts, meter_of

SELECTING_FILTERS = frozenset({"attr", "d", "default", "first", "last", "max", "min", "random"})
"""Filters that return one of their inputs unchanged."""
METHOD_FILTERS = frozenset({"capitalize", "lower", "trim", "upper"})
"""Filters that call one method of their input, which keeps marks."""

SIMPLE_PERCENT = re.compile(r"%(?:\(\w+\))?(?:[sdi%]|\.\d+f)")
PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")
"""Placeholder of a marked text during formatting."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment for chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(concat)

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=as_text)
        self.filters = {name: _with_marks(name, function) for name, function in self.filters.items()}
        own_filters = {"format": format_percent, "join": join_filter, "replace": replace_filter, "string": as_text}
        self.filters |= {"tojson": to_json, **own_filters}
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator of `intercepted_binops`, with limits and marks."""
        meter_of(context).check_operands(operator, left, right)
        if operator == "%" and isinstance(left, str):
            return _percent(left, right)
        return marked_like(super().call_binop(context, operator, left, right), left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, with marks on its result."""
        values = (*args, *kwargs.values())
        owner = getattr(called, "__self__", None)
        if type(owner) is str and not all(map(is_plain, values)):
            called = getattr(MarkedText(owner, ()), called.__name__)
        result = super().call(context, called, *args, **kwargs)
        return result if _marks_own_result(called) else marked_like(result, owner, *values)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace `str.format` and `str.format_map` by versions that keep marks."""
        is_format = super().wrap_str_format(value) is not None
        return BraceFormat(self, value.__self__, takes_mapping=value.__name__ == "format_map") if is_format else None

    def build_template(self, source: str) -> tuple[jinja2.Template, str]:
        """Return the compiled template and all its text literals. Raises jinja's errors and RecursionError."""
        tree = self.parse(source)
        literals = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        literals += [node.data for node in tree.find_all(nodes.TemplateData)]
        return self.from_string(AddCounting().visit(tree)), "\0".join(literals)


def _marks_own_result(called: Any) -> bool:
    """Return whether a callable's result has correct marks: it uses `concat`, or is a method of a MarkedText, list,
    dict or tuple."""
    owner = getattr(called, "__self__", None)
    is_marked_method = isinstance(called, MethodType) and isinstance(owner, MarkedText)
    uses_concat = called is join_texts or isinstance(called, Macro | LoopContext | BlockReference | BraceFormat)
    return uses_concat or is_marked_method or isinstance(owner, dict | list | tuple)


def _with_marks(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of jinja. A string result is marked if an input is marked."""
    if name in SELECTING_FILTERS:
        return function
    num_jinja_args = int(hasattr(function, "jinja_pass_arg"))  # jinja passes a context or environment first

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if name not in METHOD_FILTERS and isinstance(result, MarkedText):
            result = str.__str__(result)  # its marks may be incomplete
        return marked_like(result, *args[num_jinja_args:], *kwargs.values())

    return wrapper


# -- quire's filters ---------------------------------------------------------------------------------------------------


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`| tojson` as published templates expect it. Jinja's filter escapes HTML, which models were not trained on."""

    def dump(content: Any) -> str:
        return json.dumps(content, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    text = marked_like(dump(value), value, separators)
    if isinstance(value, list) and isinstance(text, MarkedText) and not text.labeled_spans:
        text = MarkedText(text, None, _item_labels(text, value, dump))
    return str(text)


def _item_labels(text: str, items: list[Any], dump: Callable[[Any], str]) -> Labels:
    """Return range and label of each item in a list's JSON; empty if an item is not found or has no single label."""
    labels, end = list[tuple[int, int, str]](), 0
    for item in items:
        item_text = dump([item])[1:-1].strip()  # with the same indentation as in the whole list
        start = text.find(item_text, end)
        label = label_of(item)
        if start < 0 or label is None:
            return ()
        end = start + len(item_text)
        labels.append((start, end, label))
    return tuple(labels)


@pass_environment
def join_filter(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    """`| join`: join the items, or an attribute of each item, with separator `d`."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return _marked(d).join(map(as_text, items))


def replace_filter(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """`| replace` with marks."""
    return _marked(value).replace(as_text(old), as_text(new), -1 if count is None else count)


def format_percent(value: Any, *args: Any, **kwargs: Any) -> str:
    """`| format`: `%` formatting with marks."""
    if args and kwargs:
        raise jinja2.TemplateRuntimeError("can't handle positional and keyword arguments at the same time")
    return _percent(as_text(value), kwargs or args)


def _marked(value: Any) -> MarkedText:
    text = as_text(value)
    return text if isinstance(text, MarkedText) else MarkedText(text, ())


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# -- string formatting -------------------------------------------------------------------------------------------------


class Placeholders:
    """Replaces marked texts by placeholders during formatting, because formatting would lose their marks."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def protect(self, value: Any) -> Any:
        """Return the value, or a placeholder if it may include client text."""
        if is_plain(value):
            return value
        self._texts.append(as_text(value))
        return f"\ue000{len(self._texts) - 1}\ue001"

    def restore(self, text: str) -> str:
        """Replace the placeholders in the text by the marked texts."""
        pieces = PLACEHOLDER.split(text)
        return concat(self._texts[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces))


def _percent(layout: str, values: Any) -> str:
    if not is_plain(layout) or SIMPLE_PERCENT.sub("", layout).count("%"):
        return str(marked_like(str.__mod__(layout, values), layout, values))
    placeholders = Placeholders()
    protect = placeholders.protect
    if isinstance(values, Mapping):
        return placeholders.restore(str.__mod__(layout, {name: protect(value) for name, value in values.items()}))
    operands = tuple(map(protect, values)) if isinstance(values, tuple) else (protect(values),)
    return placeholders.restore(str.__mod__(layout, operands))


class MarkingFormatter(SandboxedFormatter):
    """Brace formatting that keeps the marks of client text."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.placeholders = Placeholders()

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Apply a conversion such as `{!r}` and keep the marks."""
        return marked_like(super().convert_field(value, conversion), value)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Apply a format such as `{:>9}` and return a placeholder if the value is marked."""
        return self.placeholders.protect(marked_like(super().format_field(value, format_spec), value))


class BraceFormat:
    """`str.format` or `str.format_map` of one string, with marks."""

    def __init__(self, environment: jinja2.Environment, layout: str, *, takes_mapping: bool) -> None:
        self._environment = environment
        self._layout = layout
        self._takes_mapping = takes_mapping

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        formatter = MarkingFormatter(self._environment)
        values, names = ((), args[0]) if self._takes_mapping else (args, kwargs)
        text = formatter.placeholders.restore(formatter.vformat(str.__str__(self._layout), values, names))
        return text if is_plain(self._layout) else MarkedText.labelled(text, label_of(self._layout, values, names))

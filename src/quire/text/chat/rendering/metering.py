"""Counts what a template does, so that a loop cannot run away. May touch `jinja2`; knows nothing of messages.

Jinja has no hook for loops. But it compiles a tree, and a tree can be changed first: every loop and every macro gets
one more statement, which counts, and every `~` is measured. A template can neither name nor replace the meter.
"""

from collections.abc import Sized
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from quire.errors import InvariantError, TemplateError
from quire.text.chat.rendering.marked_text import concat, written

METER = "the meter"
"""Where a rendering's meter is among its variables: no Jinja name has a space in it."""


class WorkMeter:
    """What one rendering has used so far."""

    __slots__ = ("_max_chars", "_max_steps", "_num_chars", "_num_steps")

    def __init__(self, max_steps: int, max_chars: int) -> None:
        self._max_steps = max_steps
        self._max_chars = max_chars
        self._num_steps = 0
        self._num_chars = 0

    def count_step(self) -> None:
        """A loop goes round once more, or a macro is called."""
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            rule = f"expected a chat template of at most {self._max_steps} steps, these messages need more"
            raise TemplateError(f"{rule}; send fewer messages", code="too_many_steps")

    def count_output(self, num_chars: int) -> None:
        """So much more text has come out."""
        self._num_chars += num_chars
        self.check_length(self._num_chars)

    def check_length(self, num_items: int) -> None:
        """Whether a text or list of this length may be made at all."""
        if num_items > self._max_chars:
            rule = f"expected a prompt of at most {self._max_chars} characters, got at least {num_items}"
            raise TemplateError(f"{rule}; send fewer or shorter messages", code="prompt_too_long")

    def check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Whether what the operator would make is of a size to be made."""
        if operator == "**":
            sentence = "chat templates must not use **; the operator of this server can configure another template"
            raise TemplateError(sentence, code="power_in_template")
        if operator == "*":
            sized, times = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(sized, Sized) and isinstance(times, int):
                self.check_length(len(sized) * times)
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self.check_length(len(left) + len(right))


def meter_of(context: Context) -> WorkMeter:
    """The meter that this rendering was given; not looked for among what the template itself has set."""
    meter = context.parent[METER]
    if not isinstance(meter, WorkMeter):
        raise InvariantError("expected a meter for the rendering")
    return meter


def count_step(context: Context) -> bool:
    """What is called in every loop and macro. True, so that it can stand before a loop's own condition."""
    meter_of(context).count_step()
    return True


def join_texts(context: Context, *operands: Any) -> str:
    """What `~` does, measured."""
    texts = [written(operand) for operand in operands]
    meter_of(context).check_length(sum(map(len, texts)))
    return concat(texts)


class AddCounting(NodeTransformer):
    """Changes a parsed template so that it counts its own steps."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's own spelling
        """Each round counts, and each item that the loop's condition passes over."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node))
        if node.test is not None:
            node.test = nodes.And(_call(count_step, node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        """Each call counts."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The sandbox has no eye on `~`."""
        self.generic_visit(node)
        return _call(join_texts, node, *node.nodes)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:  # noqa: N802
        """Escaping for browsers would lose who wrote what."""
        raise TemplateSyntaxError("chat templates must not use autoescape", node.lineno)


def _call(function: Any, place: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
    name = nodes.ImportedName(f"{__name__}.{function.__name__}")
    call = nodes.Call(name, [nodes.ContextReference(), *arguments], [], None, None)
    call.set_lineno(place.lineno)
    return call


def _statement(place: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_call(count_step, place), lineno=place.lineno)


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a trainer counts. A server shows what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own spelling

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)

"""Limits the work of a template, for example in endless loops. May import `jinja2`; independent of messages.

Jinja has no hook for loops. So the syntax tree is changed before it is compiled: every loop and macro gets a counting
statement, and every `~` checks its result's length. Template code cannot access or replace the meter.
"""

from collections.abc import Sized
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from quire.errors import InvariantError, TemplateError
from quire.text.chat.rendering.marked_text import as_text, concat

METER = "the meter"
"""Variable that contains the meter. Templates cannot name it, because Jinja names have no spaces."""


class WorkMeter:
    """Counters and limits of one rendering."""

    __slots__ = ("_max_chars", "_max_steps", "_num_chars", "_num_steps")

    def __init__(self, max_steps: int, max_chars: int) -> None:
        self._max_steps = max_steps
        self._max_chars = max_chars
        self._num_steps = 0
        self._num_chars = 0

    def count_step(self) -> None:
        """Count one loop iteration or macro call. Raises TemplateError beyond the limit."""
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            message = f"expected a chat template of at most {self._max_steps} steps, got more for these messages"
            raise TemplateError(f"{message}; send fewer messages", code="too_many_steps")

    def count_output(self, num_chars: int) -> None:
        """Count characters of output. Raises TemplateError beyond the limit."""
        self._num_chars += num_chars
        self.check_length(self._num_chars)

    def check_length(self, num_items: int) -> None:
        """Raise TemplateError if a string or list of this length is too long."""
        if num_items > self._max_chars:
            message = f"expected a prompt of at most {self._max_chars} characters, got at least {num_items}"
            raise TemplateError(f"{message}; send fewer or shorter messages", code="prompt_too_long")

    def check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Raise TemplateError for `**`, and if the result of `*` or `+` would be too long."""
        if operator == "**":
            message = "chat templates must not use **; the operator of this server can configure another template"
            raise TemplateError(message, code="power_in_template")
        if operator == "*":
            sequence, factor = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(sequence, Sized) and isinstance(factor, int):
                self.check_length(len(sequence) * factor)
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self.check_length(len(left) + len(right))


def meter_of(context: Context) -> WorkMeter:
    """Return this rendering's meter. It is in the initial variables, which a template cannot set."""
    meter = context.parent[METER]
    if not isinstance(meter, WorkMeter):
        raise InvariantError("expected a meter for the rendering")
    return meter


def count_step(context: Context) -> bool:
    """Count one step; called in every loop and macro. Return True, so that `and` can add a loop's own condition."""
    meter_of(context).count_step()
    return True


def join_texts(context: Context, *operands: Any) -> str:
    """Implement `~` with a check of the result's length."""
    texts = [as_text(operand) for operand in operands]
    meter_of(context).check_length(sum(map(len, texts)))
    return concat(texts)


class AddCounting(NodeTransformer):
    """Adds step counting to a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja calls visit_ + class name
        """Count each iteration, and each item that the loop's condition skips."""
        self.generic_visit(node)
        node.body.insert(0, _counting_statement(node))
        if node.test is not None:
            node.test = nodes.And(_call(count_step, node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - jinja calls visit_ + class name
        """Count each call."""
        self.generic_visit(node)
        node.body.insert(0, _counting_statement(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - jinja calls visit_ + class name
        """Check `~`, which jinja's sandbox does not intercept."""
        self.generic_visit(node)
        return _call(join_texts, node, *node.nodes)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:  # noqa: N802
        """Reject autoescape, because HTML escaping would lose the marks of client text."""
        raise TemplateSyntaxError("chat templates must not use autoescape", node.lineno)


def _call(function: Any, location: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
    name = nodes.ImportedName(f"{__name__}.{function.__name__}")
    call = nodes.Call(name, [nodes.ContextReference(), *arguments], [], None, None)
    call.set_lineno(location.lineno)
    return call


def _counting_statement(location: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_call(count_step, location), lineno=location.lineno)


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks training targets. Here its content is rendered normally."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads this class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)

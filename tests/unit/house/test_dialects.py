"""A dialect owns its bytes: nothing outside OpenAI's folder knows OpenAI's words, and another API is a small file.

What counts as a leak is tried on small invented trees; the real tree has none.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from proofs.house.measures import Module, read_tree

ROOT = Path(__file__).parents[3]
WHERE, OWNER = ("quire.api", "quire.client"), "quire.api.dialects.openai"
OTHERS = "quire.api.dialects.anthropic"
WORDS = re.compile(r"\bchoices\b|\[DONE\]|chat\.completion")
"""Of a stream and of whole answers. The path of a route is written with a slash."""
ERROR_KEYS = {"message", "type", "param", "code"}
TOY = ROOT / "tests" / "support" / "servers" / "toy_dialect.py"
MAX_TOY_LINES = 120


def dialect_leaks(modules: Sequence[Module]) -> list[str]:
    """Where OpenAI's words or the shape of its errors are spelled by code that is for any dialect."""
    return [
        f"{module.name}:{line}: {what}"
        for module in modules
        if module.name.startswith(WHERE) and not module.name.startswith(OWNER)
        for line, what in _spelled(module.tree, has_own_errors=module.name.startswith(OTHERS))
    ]


def _spelled(tree: ast.AST, *, has_own_errors: bool) -> Iterator[tuple[int, str]]:
    """Another dialect spells errors too, in a shape of its own: there, all fields of OpenAI's must be named."""
    for line, text in _literals(tree):
        if found := WORDS.search(text):
            yield line, found[0]
        elif re.search(r'"error"\s*:\s*\{', text):
            yield line, "an error object as text"
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set) and _is_error(node, has_own_errors):
            yield node.lineno, "an error object"


def _literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts and bytes of the code, in f-strings too. Prose may name what it does not spell: docstrings are left out."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in prose:
            if isinstance(node.value, str):
                yield node.lineno, node.value
            elif isinstance(node.value, bytes):
                yield node.lineno, node.value.decode("latin-1")


def _is_error(node: ast.Dict | ast.List | ast.Tuple | ast.Set, has_own_errors: bool) -> bool:
    """`{"error": {"message": …}}`, or a collection that names all fields of such an object."""
    if _texts(node.keys if isinstance(node, ast.Dict) else node.elts) >= ERROR_KEYS:
        return True
    if not isinstance(node, ast.Dict) or has_own_errors:
        return False
    inner = [value for key, value in zip(node.keys, node.values, strict=True) if _texts([key]) == {"error"}]
    return any(isinstance(one, ast.Dict) and "message" in _texts(one.keys) for one in inner)


def _texts(nodes: Sequence[ast.expr | None]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def leaks(text: str, name: str = "quire.api.http.sse") -> list[str]:
    return dialect_leaks([Module(name, Path("invented.py"), text, ast.parse(text))])


@pytest.mark.parametrize(
    "text",
    [
        'told = {"choices": []}',
        'DONE = b"data: [DONE]\\n\\n"',
        'word = f"{name}: [DONE]"',
        'name = "chat.completion.chunk"',
        'told = dict(object="chat.completion")',
        'body = {"error": {"message": "no"}}',
        'error = {"message": 1, "type": 2, "param": 3, "code": 4}',
        'required = ["message", "type", "param", "code"]',
        """body = '{"error": {"code": 1}}'""",
        "before = b',\"choices\":['",
    ],
)
def test_words_and_shapes_of_one_api_are_leaks_where_code_is_for_all(text: str) -> None:
    assert leaks(text)
    assert leaks(text, "quire.client.reply.reply")
    assert not leaks(text, "quire.api.dialects.openai.chat")
    assert not leaks(text, "quire.bench.stream_chunks")


@pytest.mark.parametrize(
    "text",
    [
        '"""Ends with [DONE], and has choices."""',
        'path = "/v1/chat/completions"',
        'told = {"error": error, "message": message}',
        "choices = []",
    ],
)
def test_prose_paths_and_plain_names_are_none(text: str) -> None:
    assert not leaks(text)


def test_the_tree_has_none_and_the_toy_is_small() -> None:
    assert dialect_leaks(read_tree(ROOT / "src" / "quire")) == []
    assert len(TOY.read_text().splitlines()) <= MAX_TOY_LINES

"""What counts as a leak of a dialect, on small invented trees; the real tree has none."""

import ast
from pathlib import Path

import pytest

from proofs.house.measures import Module, read_tree
from proofs.seam.dialects import TOY, dialect_leaks

ROOT = Path(__file__).parents[3]


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
    assert len(TOY.read_text().splitlines()) <= 120

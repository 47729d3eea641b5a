"""What the proof of real clients rests on: the script that stands for a model, and what counts as found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proofs.agents.clients import NUM_CLIENTS, rows
from proofs.agents.clients_run.packages import GROUPS, name_of
from proofs.agents.clients_run.scripted_model import DONE, TITLE, Turn, answer
from proofs.agents.launch import ProcessList, contents
from proofs.agents.real import FILE, prints_fibonacci
from proofs.agents.reuse import num_common, reuse_of


def system(*tools: dict[str, Any], text: str = "You help.") -> Turn:
    """As Qwen2.5's template writes it."""
    shown = "\n".join(json.dumps({"type": "function", "function": tool}) for tool in tools)
    return Turn(
        "system", f"{text}\n\nsignatures within <tools></tools> XML tags:\n<tools>\n{shown}\n</tools>\n\nFor each"
    )


def tool(name: str, /, *required: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(required)}}


WRITE = tool("write", "content", "filePath", content="string", filePath="string", mode="integer")
SHELL = tool("exec_command", "cmd", cmd="string")
TWO_FILES = Turn("user", "Write the file /a/b.txt with the content x-1 and Write the file c with the content y.")


def called(text: str) -> Any:
    begin, body, end = text.split("\n")
    assert (begin, end) == ("<tool_call>", "</tool_call>")
    return json.loads(body)


def result(text: str) -> Turn:
    return Turn("user", f"<tool_response>\n{text}\n</tool_response>")


def test_a_file_is_written_by_the_best_tool_there_is() -> None:
    assert called(answer([system(SHELL, WRITE), TWO_FILES])) == {
        "name": "write",
        "arguments": {"content": "x-1", "filePath": "/a/b.txt"},
    }
    assert called(answer([system(SHELL), TWO_FILES]))["arguments"] == {"cmd": "printf '%s' x-1 > /a/b.txt"}


def test_each_result_leads_to_the_next_call_and_the_last_one_is_told() -> None:
    asked = [system(WRITE), TWO_FILES, Turn("assistant", "..."), result("Write the file no with the content no")]
    assert called(answer(asked))["arguments"] == {"content": "y", "filePath": "c"}
    assert answer([*asked, Turn("assistant", "..."), result("fine")]) == f"{DONE}. The tool said: fine"


def test_a_named_tool_is_called_with_what_its_schema_wants() -> None:
    asked = Turn("user", "Call the tool City with the name Bonn-1 and the size 7.")
    city = tool("City", "name", "size", "is_old", name="string", size="integer", is_old="boolean")
    expected = {"name": "City", "arguments": {"name": "Bonn-1", "size": 7, "is_old": False}}
    assert called(answer([system(city), asked])) == expected


def test_who_has_no_tools_gets_a_title_or_a_file_as_it_is_wanted() -> None:
    assert answer([Turn("system", "Find a title."), TWO_FILES]) == TITLE
    assert answer([Turn("system", "Return a *file listing*."), TWO_FILES]).startswith("/a/b.txt\n```\nx-1\n```")


def request(prompt: list[int], num_fed: int, answer: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"prompt": prompt, "answer": list(answer), "num_fed": num_fed}


def test_what_could_be_found_is_common_with_a_prompt_and_its_answer_in_whole_blocks() -> None:
    first = request([*range(40)], 40, (40, 41, 42, 43, 44, 45, 46, 47))
    second = request([*range(50)], 18)
    found = reuse_of([first, second])
    assert (found.num_prompt, found.num_possible, found.num_found) == (50, 48, 32)
    assert found.ratio == pytest.approx(2 / 3)
    assert reuse_of([first, request([*range(48)], 16)]).num_possible == 32  # the last token is computed in any case
    assert num_common([1, 2, 3], [1, 2]) == 2


def test_the_table_has_eighteen_clients_with_pinned_versions_and_keys_of_their_own() -> None:
    found = [*rows()]
    assert len({one.key for one in found}) == len(found) == NUM_CLIENTS
    assert all(GROUPS[one.group].version(one.package)[0].isdigit() for one in found)
    assert found[0].words.startswith("Claude Code 2.1.197, Messages: ")
    assert [name_of(one) for one in ("@a/b@1.2", "c@3", "d==4", "e[f]==5", "zod")] == ["@a/b", "c", "d", "e[f]", "zod"]


def test_a_program_counts_that_prints_ten_numbers_and_no_others(tmp_path: Path) -> None:
    assert not prints_fibonacci(tmp_path)
    for text, is_good in (
        ("a, b = 0, 1\nfor _ in range(10):\n    print(a)\n    a, b = b, a + b\n", True),
        ("print([1, 1, 2, 3, 5, 8, 13, 21, 34, 55])\n", True),
        ("print([1, 1, 2, 3, 5, 8, 13, 21, 34])\n", False),
        ("print(", False),
    ):
        (tmp_path / FILE).write_text(text)
        assert prints_fibonacci(tmp_path) is is_good


def test_every_file_that_is_left_or_changed_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    before = contents(tmp_path)
    (tmp_path / "one").write_text("2")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / ".git").mkdir()
    now = contents(tmp_path)
    assert set(now) - set(before) == {"folder", "link"}
    assert now["one"] != before["one"]


def test_a_secret_on_a_command_line_is_seen_by_who_looks() -> None:
    looks = ProcessList("a-secret-of-a-test")
    words = [sys.executable, "-c", "print(input('.'))", "--key=a-secret-of-a-test"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."  # it runs: its command line is there to be seen
        looks.look()
        process.communicate(b"\n")
    assert looks.num_seen == 1

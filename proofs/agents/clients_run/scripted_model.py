"""What a good model would write, by a script: tools are called as their schemas say, then their results are told.

    turns of the prompt ─► answer()

A task is a sentence in what the user says. `Write the file PATH with the content WORD` is done with whatever tool can
do it, one call for each such sentence; `Call the tool NAME with the KEY VALUE and the KEY VALUE` with that tool. Who
has no tools and edits by what it is told (aider) is answered in that form. `Say exactly this:` is answered with what
follows. Pure: nothing is read but the prompt.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WRITE = re.compile(r"Write the file (\S+) with the content ([\w-]+)")
CALL = re.compile(r"Call the tool (\w+) with ((?:the \w+ [\w-]+(?: and )?)+)")
ARGUMENT = re.compile(r"the (\w+) ([\w-]+)")
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
TOOLS_BEGIN, TOOLS_END = "XML tags:\n<tools>\n", "\n</tools>"
WRITERS = ("Write", "write", "write_file", "exec_command", "shell", "shell_command", "Bash", "bash")
"""Tools that can write a file, the best first."""
PATHS = ("file_path", "filePath", "filepath", "path", "absolute_path")
COMMANDS = ("command", "cmd")
WHOLE_FILES = "*file listing*"
"""What those are told in their first turn who are to answer with whole files."""
TITLE = "A file is written"
DONE = "It is done"
"""How the last words begin."""
SHOWN_CHARS = 400
EXACTLY = "Say exactly this:"


@dataclass(frozen=True, slots=True)
class Turn:
    """What somebody said in a conversation."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a tool is asked."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def written(self) -> str:
        """As Qwen2.5's template has it."""
        told = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{told}\n</tool_call>"


def answer(turns: Sequence[Turn]) -> str:
    """What comes next: the next call of the last task, or what came of it."""
    if turns and turns[-1].text.startswith(EXACTLY):
        return turns[-1].text.removeprefix(EXACTLY)
    task, after = _last_task(turns)
    tools = dict(_tools(turns[0].text)) if turns else {}
    if WHOLE_FILES in turns[0].text:
        return _listing(task)
    calls, results = [*_calls(task, tools)], [one for turn in after for one in RESULT.findall(turn.text)]
    if not tools or not calls:
        return TITLE
    if len(results) < len(calls):
        return calls[len(results)].written
    return f"{DONE}. The tool said: {results[-1][:SHOWN_CHARS]}"


def _last_task(turns: Sequence[Turn]) -> tuple[str, Sequence[Turn]]:
    """The last thing the user wants, and what was said since. What tools said is nobody's wish."""
    for at in range(len(turns) - 1, -1, -1):
        said = RESULT.sub("", turns[at].text)
        if turns[at].role == "user" and (WRITE.search(said) or CALL.search(said)):
            return said, turns[at + 1 :]
    return "", turns


def _tools(system: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Schemas of arguments by the tools' names, as the template shows them."""
    shown = system.rpartition(TOOLS_END)[0].rpartition(TOOLS_BEGIN)[2]
    for line in shown.splitlines():
        function = json.loads(line)["function"]
        yield function["name"], function.get("parameters") or {}


def _calls(task: str, tools: Mapping[str, Mapping[str, Any]]) -> Iterator[Call]:
    writer = next((name for name in WRITERS if name in tools), None)
    if writer is not None:
        for path, content in WRITE.findall(task):
            yield Call(writer, _writing(tools[writer], path, content))
    for name, told in CALL.findall(task):
        if name in tools:
            yield Call(name, _filled(tools[name], dict(ARGUMENT.findall(told))))


def _writing(schema: Mapping[str, Any], path: str, content: str) -> dict[str, Any]:
    known = dict.fromkeys(PATHS, path) | {"content": content}
    known |= dict.fromkeys(COMMANDS, f"printf '%s' {content} > {path}")
    return _filled(schema, known)


def _filled(schema: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """In the schema's order: what is known, and something for what is required."""
    required = schema.get("required") or ()
    properties = schema.get("properties") or {}
    return {
        name: _value(one, known.get(name))
        for name, one in properties.items()
        if name in required or (name in known and not required)
    }


def _value(schema: Mapping[str, Any], known: str | None) -> Any:
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return int(known or 1)
    if kind == "boolean":
        return False
    if kind == "array":
        return ["bash", "-c", known] if known else []
    if kind == "object":
        return {}
    return known if known is not None else schema.get("enum", ["as asked"])[0]


def _listing(task: str) -> str:
    """Whole files, as aider wants them."""
    files = (f"{path}\n```\n{content}\n```" for path, content in WRITE.findall(task))
    return "\n\n".join(files) or TITLE

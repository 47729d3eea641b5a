"""A scripted model that answers as a good model would: it calls tools by their schemas, then repeats their results.

    turns of the prompt ─► answer()

A task is a sentence in a user message. `Write the file PATH with the content WORD` becomes a call of a tool that can
write files, one call per sentence; `Call the tool NAME with the KEY VALUE and the KEY VALUE` becomes a call of that
tool. A client without tools that parses files from text (aider) gets whole files. `Say exactly this:` is answered with
the text that follows. Pure functions: they read nothing but the prompt.
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
"""A text in the first turn of a client that wants whole files."""
TITLE = "A file is written"
DONE = "It is done"
"""The beginning of a final answer."""
SHOWN_CHARS = 400
EXACTLY = "Say exactly this:"


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def text_form(self) -> str:
        """The call in the format of Qwen2.5's template."""
        text = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{text}\n</tool_call>"


def answer(turns: Sequence[Turn]) -> str:
    """The next message: the next call of the last task, or its final answer."""
    if turns and turns[-1].text.startswith(EXACTLY):
        return turns[-1].text.removeprefix(EXACTLY)
    task, later_turns = _last_task(turns)
    tools = dict(_tools(turns[0].text)) if turns else {}
    if WHOLE_FILES in turns[0].text:
        return _listing(task)
    calls, results = [*_calls(task, tools)], [result for turn in later_turns for result in RESULT.findall(turn.text)]
    if not tools or not calls:
        return TITLE
    if len(results) < len(calls):
        return calls[len(results)].text_form
    return f"{DONE}. The tool said: {results[-1][:SHOWN_CHARS]}"


def _last_task(turns: Sequence[Turn]) -> tuple[str, Sequence[Turn]]:
    """The last user message with a task, and the turns after it. A task in a tool's result does not count."""
    for index in range(len(turns) - 1, -1, -1):
        text = RESULT.sub("", turns[index].text)
        if turns[index].role == "user" and (WRITE.search(text) or CALL.search(text)):
            return text, turns[index + 1 :]
    return "", turns


def _tools(system: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, schema of the arguments) of each tool in the template's system prompt."""
    listing = system.rpartition(TOOLS_END)[0].rpartition(TOOLS_BEGIN)[2]
    for line in listing.splitlines():
        function = json.loads(line)["function"]
        yield function["name"], function.get("parameters") or {}


def _calls(task: str, tools: Mapping[str, Mapping[str, Any]]) -> Iterator[Call]:
    writer = next((name for name in WRITERS if name in tools), None)
    if writer is not None:
        for path, content in WRITE.findall(task):
            yield Call(writer, _write_arguments(tools[writer], path, content))
    for name, text in CALL.findall(task):
        if name in tools:
            yield Call(name, _arguments(tools[name], dict(ARGUMENT.findall(text))))


def _write_arguments(schema: Mapping[str, Any], path: str, content: str) -> dict[str, Any]:
    values = dict.fromkeys(PATHS, path) | {"content": content}
    values |= dict.fromkeys(COMMANDS, f"printf '%s' {content} > {path}")
    return _arguments(schema, values)


def _arguments(schema: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Arguments in the schema's order: the known values, and a placeholder for any other required one."""
    required = schema.get("required") or ()
    properties = schema.get("properties") or {}
    return {
        name: _value(property_schema, values.get(name))
        for name, property_schema in properties.items()
        if name in required or (name in values and not required)
    }


def _value(schema: Mapping[str, Any], value: str | None) -> Any:
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return int(value or 1)
    if kind == "boolean":
        return False
    if kind == "array":
        return ["bash", "-c", value] if value else []
    if kind == "object":
        return {}
    return value if value is not None else schema.get("enum", ["as asked"])[0]


def _listing(task: str) -> str:
    """Whole files in aider's format."""
    files = (f"{path}\n```\n{content}\n```" for path, content in WRITE.findall(task))
    return "\n\n".join(files) or TITLE

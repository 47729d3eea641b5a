"""`make compat`: the typed request and response fields of the newest official SDKs, compared with the committed list.

    environments of their own ─► fields of the newest openai and anthropic, Python and JavaScript ─► fields.json

A field that is not in the list is printed by name, and the command ends with 1: decide what quire does with it, then
write the list with `--write`. JavaScript adds only the names that the Python SDK of the same API does not have.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import say
from proofs.framework.environments import environment, run

HERE = Path(__file__).parent
LIST = HERE / "fields.json"
JAVASCRIPT_ONLY = "names of JavaScript only"
TYPESCRIPT = "typescript@5"
"""The last major version with a compiler that programs can call."""
Fields = Mapping[str, Mapping[str, list[str]]]
"""Names of fields by API and type."""


@dataclass(frozen=True, slots=True)
class Sdk:
    """One API's official SDKs, and the types of its requests and responses in each."""

    name: str
    """The API's name, and its package's on PyPI."""
    python_types: tuple[str, ...]
    npm_package: str
    npm_types: tuple[str, ...]


_CHAT, _RESPONSES = "openai/resources/chat/completions", "openai/resources/responses/responses"
_MESSAGES = "@anthropic-ai/sdk/resources/messages"
SDKS = (
    Sdk(
        "openai",
        (
            "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
            "openai.types.chat:ChatCompletion",
            "openai.types.chat:ChatCompletionChunk",
            "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
            "openai.types.responses:Response",
            "openai.types.responses:ResponseStreamEvent",
        ),
        "openai",
        (
            f"{_CHAT}:ChatCompletionCreateParamsStreaming",
            f"{_CHAT}:ChatCompletion",
            f"{_CHAT}:ChatCompletionChunk",
            f"{_RESPONSES}:ResponseCreateParamsStreaming",
            f"{_RESPONSES}:Response",
            f"{_RESPONSES}:ResponseStreamEvent",
        ),
    ),
    Sdk(
        "anthropic",
        (
            "anthropic.types.message_create_params:MessageCreateParamsStreaming",
            "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
            "anthropic.types:Message",
            "anthropic.types:RawMessageStreamEvent",
        ),
        "@anthropic-ai/sdk",
        (
            f"{_MESSAGES}:MessageCreateParamsStreaming",
            f"{_MESSAGES}:MessageCountTokensParams",
            f"{_MESSAGES}:Message",
            f"{_MESSAGES}:RawMessageStreamEvent",
        ),
    ),
)


def newest_fields(sdk: Sdk, folder: Path) -> dict[str, list[str]]:
    """Install the newest versions into this folder and return their fields."""
    python = environment(folder / "python", sys.executable)
    run([python, "-m", "pip", "install", "--quiet", sdk.name])
    fields: dict[str, list[str]] = _output([python, HERE / "python_fields.py", *sdk.python_types], folder)
    packages = folder / "javascript"
    packages.mkdir()
    (packages / "package.json").write_text('{"private": true}\n')
    run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", f"{sdk.npm_package}@latest", TYPESCRIPT],
        None,
        packages,
    )
    script = shutil.copy(HERE / "javascript_fields.mjs", packages)
    known = {name for names in fields.values() for name in names}
    fields[JAVASCRIPT_ONLY] = [
        name for name in _output(["node", script, *sdk.npm_types], packages) if name not in known
    ]
    npm_version = json.loads((packages / "node_modules" / sdk.npm_package / "package.json").read_text())["version"]
    version = f"import importlib.metadata as m; print(m.version({sdk.name!r}).join('\"\"'))"
    say(f"{sdk.name} {_output([python, '-c', version], folder)} (PyPI), {sdk.npm_package} {npm_version} (npm)")
    return fields


def _output(words: list[object], folder: Path) -> Any:
    """What a program prints, parsed. Raises RuntimeError with its errors."""
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[:2]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def differences(listed: Fields, newest: Fields) -> Iterator[str]:
    """One line for each field that is new, and for each that is gone, by its full name."""
    was, now = set(_full_names(listed)), set(_full_names(newest))
    yield from (f"new   {name}" for name in sorted(now - was))
    yield from (f"gone  {name}" for name in sorted(was - now))


def _full_names(fields: Fields) -> Iterator[str]:
    for api, kinds in fields.items():
        for kind, names in kinds.items():
            yield from (f"{api}: {kind}.{name}" for name in names)


def text_of(fields: Fields) -> str:
    """The committed form: one line for each type, so that a change is a line of a diff."""
    apis = []
    for api, kinds in fields.items():
        lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(names)}" for kind, names in kinds.items())
        apis.append(f" {json.dumps(api)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(apis) + "\n}\n"


def main(words: list[str]) -> int:
    """Compare, or write the list with `--write`; 1: a field is new or gone."""
    newest = {}
    for sdk in SDKS:
        with TemporaryDirectory(prefix="quire-compat-") as folder:
            newest[sdk.name] = newest_fields(sdk, Path(folder))
    lines = [*differences(json.loads(LIST.read_text()) if LIST.exists() else {}, newest)]
    if "--write" in words:
        LIST.write_text(text_of(newest))
        say(f"wrote {LIST.name}: {len(lines)} changes")
        return 0
    say("\n".join(lines) or "no new fields")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

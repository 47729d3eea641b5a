"""Tool calls of real models: tools of many schemas, required and optional, at two temperatures; `jsonschema` judges."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from benchmarks.packaged_models import coder_file
from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from proofs.framework.proof import Proof, section
from proofs.steps.asked import SUBJECTS, TEMPERATURES
from proofs.steps.schemas import FIFTY, bounded_schema
from quire.client.engines.llm import LLM
from quire.client.reply.outputs import Completion
from quire.client.request.conversation import chat_inputs
from quire.client.request.params import SamplingParams
from quire.config import ModelSettings

NUM_TOOLS = 40
MAX_TOKENS = 200


def arguments_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool takes an object: a schema of another type becomes its only argument, `value`."""
    if schema.get("type") == "object":
        return schema
    return {"type": "object", "properties": {"value": schema}, "required": ["value"], "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    f"tool_{number}_{task.name}": bounded_schema(arguments_schema(task.schema))
    for number, task in enumerate([t for t in FIFTY if "$defs" not in t.schema or "type" in t.schema][:NUM_TOOLS])
}


@dataclass(frozen=True, slots=True)
class ToolAsk:
    """A question, the names of its tools, and its `tool_choice`."""

    message: str
    tools: Sequence[str]
    choice: str | dict[str, Any]
    params: SamplingParams


def tool_asks(count: int, random: Random) -> list[ToolAsk]:
    """Questions about all tools in turn, each with two other tools in its list."""
    names, asks = [*SCHEMAS], list[ToolAsk]()
    for index in range(count):
        name = names[index % len(names)]
        other_names = random.sample([tool for tool in names if tool != name], 2)
        by_name = {"type": "function", "function": {"name": name}}
        choice: str | dict[str, Any] = ("auto", "required", by_name)[index % 3]
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=TEMPERATURES[index // 3 % 2], seed=random.getrandbits(60)
        )
        subject = random.choice(SUBJECTS)
        message = f"Call the tool {name} for {subject}. Invent what you do not know, and keep it short."
        asks.append(ToolAsk(message, [name, *other_names], choice, params))
    return asks


@section("tool calls")
def calls(proof: Proof) -> None:
    """Ask both models, and check the answers that end with calls."""
    count = proof.sized(quick=30, full=500)
    proof.at_least("tool_schemas", len(SCHEMAS), proof.sized(quick=1, full=NUM_TOOLS))
    num_invalid = num_calls = num_requests = 0
    for path, tool_format in ((smollm2_file(), "hermes"), (coder_file(), "auto")):
        asks = tool_asks(count, proof.random)
        completions = answers_of(path, asks, tool_format)
        num_requests += len(asks)
        ends = Counter(completion.finish_reason for completion in completions)
        say(f"    {path.name}: {dict(ends)}")
        for ask, completion in zip(asks, completions, strict=True):
            if completion.finish_reason == "tool_calls":
                num_calls += len(completion.tool_calls)
                invalid = [call for call in completion.tool_calls if not is_valid_call(ask, call.name, call.arguments)]
                num_invalid += len(invalid)
                for call in invalid[:3]:
                    say(f"    {call.name}, seed {ask.params.seed}: {call.arguments}")
        proof.report(f"calls_cut_{'smollm2' if tool_format == 'hermes' else 'coder'}", ends["length"], "by max_tokens")
    proof.report("tool_requests", num_requests)
    proof.at_least("tool_calls_made", num_calls, num_requests // 4, "else few calls were checked")
    proof.equals("tool_calls_invalid", num_invalid, 0)


def answers_of(path: Path, asks: Sequence[ToolAsk], tool_format: str) -> list[Completion]:
    """The answers of one model, sixteen at a time."""
    settings = ModelSettings(
        memory_bytes=6 << 30,
        max_sequence_tokens=4096,
        max_running=16,
        tool_format=tool_format,  # type: ignore[arg-type]
    )
    with LLM(str(path), settings) as llm:
        inputs = [
            chat_inputs(
                llm.text,
                [{"role": "user", "content": ask.message}],
                ask.params,
                tools=[_tool(name) for name in ask.tools],
                tool_choice=ask.choice,
            )
            for ask in asks
        ]
        return llm.generate([ids for ids, _ in inputs], [params for _, params in inputs])


def is_valid_call(ask: ToolAsk, name: str, arguments: str) -> bool:
    """Whether a call names one of the question's tools, with arguments that its schema allows."""
    if name not in ask.tools:
        return False
    try:
        return bool(Draft202012Validator(SCHEMAS[name]).is_valid(json.loads(arguments)))
    except ValueError:
        return False


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}}

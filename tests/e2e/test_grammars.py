"""A real model that must answer in JSON: in this process, in a worker's, and after that worker was killed."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest

import quire
from benchmarks.test_model import smollm2_file
from quire.client.engines.served import ServedModel, plan_worker
from quire.config import ModelSettings
from quire.errors import InvalidParameterError
from tests.support.errors import raises_code
from tests.support.machine.process_memory import budget_bytes

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "music", "running"]}, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Describe Ada, who is 36 and likes chess, as JSON."}]


def settings() -> ModelSettings:
    return ModelSettings(memory_bytes=budget_bytes(2 << 30), max_sequence_tokens=512, max_running=8)


def params(seed: int, temperature: float = 0.8) -> quire.SamplingParams:
    grammar = quire.Grammar.json_schema(SCHEMA)
    return quire.SamplingParams(grammar=grammar, max_tokens=120, temperature=temperature, seed=seed)


def is_person(answer: quire.Answer) -> bool:
    found: dict[str, Any] = json.loads(answer.text)
    return answer.finish_reason == "stop" and list(found) == ["name", "age", "hobbies"] and 0 <= found["age"] <= 150


def test_answers_are_people_alone_in_a_batch_and_from_a_worker_that_was_killed() -> None:
    asked = [params(seed, 0.8 if seed else 0.0) for seed in range(6)]
    with quire.LLM(str(smollm2_file()), settings()) as llm:
        alone = [llm.chat(ASKED, one)[0].answers[0] for one in asked]

    async def together() -> list[quire.Answer]:
        async with ServedModel(plan_worker(str(smollm2_file()), settings())) as model:
            asking = [asyncio.create_task(model.chat(ASKED, one)) for one in asked]
            async for _ in model.stream_chat(ASKED, params(0)):
                break  # somebody has begun
            assert model.supervisor.pid is not None
            os.kill(model.supervisor.pid, signal.SIGKILL)
            return [(await one).answers[0] for one in asking]

    assert all(is_person(answer) for answer in alone), [answer.text for answer in alone]
    assert [answer.token_ids for answer in asyncio.run(together())] == [answer.token_ids for answer in alone]


def test_a_grammar_that_nobody_can_follow_reaches_no_worker() -> None:
    async def ask() -> None:
        async with ServedModel(plan_worker(str(smollm2_file()), settings())) as model:
            bad = quire.SamplingParams(grammar=quire.Grammar.json_schema({"type": "objekt"}))
            with raises_code(InvalidParameterError, "unusable_grammar"):
                await model.chat(ASKED, bad)
            assert model.supervisor.num_restarts == 0

    asyncio.run(ask())

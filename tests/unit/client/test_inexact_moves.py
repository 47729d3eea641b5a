"""An answer that went on where other bits are computed says so, in every dialect; all others say nothing."""

import pytest

from quire.api.dialects.anthropic import writer as anthropic
from quire.api.dialects.openai import response_writer as responses
from quire.api.dialects.openai.completions import CompletionWriter
from quire.api.dialects.openai.schemas import CompletionFields
from quire.client.reply.reply import Reply
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.core.events import Replayed
from tests.support.servers.talkers import talker


def reply(*events: Replayed) -> Reply:
    text = talker().text
    params = SamplingParams(max_tokens=4)
    made = Reply(make_request(text, [1, 2, 3], params), params, text.tokenizer)
    made.take(events)
    return made


@pytest.mark.parametrize("num_moves", [0, 2])
def test_moves_to_other_bits_are_told_where_there_were_some(num_moves: int) -> None:
    moved = reply(Replayed("r"), *[Replayed("r", is_exact=False)] * num_moves)
    done = moved.completion()
    assert (done.num_replays, done.num_inexact_moves) == (1, num_moves)
    writer = CompletionWriter("model", CompletionFields.model_validate({"model": "model", "prompt": [1]}))
    told = [
        writer.usage([moved]).get("completion_tokens_details", {}),
        responses._usage(moved)["output_tokens_details"],
        anthropic.usage(moved),
    ]
    assert [one.get("inexact_moves", 0) for one in told] == [num_moves] * 3
    assert all(("inexact_moves" in one) == bool(num_moves) for one in told)

"""Sequences and their legal moves."""

import pytest
from msgspec.structs import replace

from quire.core.request import Request, ResolvedSampling
from quire.core.scheduling.sequence import Sequence, SequenceStatus
from quire.errors import InvariantError
from tests.support.core.shadow import namespace
from tests.support.errors import raises_code

REQUEST = Request("r", (1, 2, 3), namespace(4), 0.0)


def test_limits_count_from_the_clients_prompt() -> None:
    sequence = Sequence(1, REQUEST, (0.0, 1), 0, (7, 8))
    assert sequence.tokens == [1, 2, 3, 7, 8]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens) == (3, 2)


def test_a_request_is_computed_with_the_adapter_its_blocks_are_named_by() -> None:
    assert (REQUEST.adapter, replace(REQUEST, namespace=namespace(4, adapter="lora")).adapter) == ("", "lora")


def test_siblings_branch_off_before_the_last_prompt_token() -> None:
    leader = Sequence(1, REQUEST, (0.0, 1))
    assert leader.fork_point is None
    leader.siblings = [Sequence(2, REQUEST, (0.0, 2), 1)]
    assert leader.fork_point == 2


def test_a_finished_sequence_does_not_move_again() -> None:
    sequence = Sequence(1, REQUEST, (0.0, 1))
    sequence.move(SequenceStatus.RUNNING)
    sequence.move(SequenceStatus.WAITING)
    sequence.move(SequenceStatus.FINISHED)
    for status in SequenceStatus:
        with raises_code(InvariantError, "invariant_broken"):
            sequence.move(status)


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (ResolvedSampling(), False),
        (ResolvedSampling(repetition_penalty=1.1), True),
        (ResolvedSampling(presence_penalty=0.1), True),
        (ResolvedSampling(frequency_penalty=0.1), True),
    ],
)
def test_only_penalties_need_the_known_tokens(params: ResolvedSampling, needs: bool) -> None:
    assert params.needs_known_tokens is needs

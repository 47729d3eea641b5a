"""Calls of an engine: each has one outcome, a result of its kind or an error."""

import pytest

from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.inspect.snapshots import BlockFacts
from quire.engine.calls import BlockInfo, CallError, CallReply, Explain, Explained, GetBlock, PendingCalls
from quire.errors import EngineDeadError, MessageError
from tests.support.errors import raises_code

SPACE = Namespace(1, "model", "", "layout", 4, "group")
FOUND = Explained(Divergence(0, MissReason.FIRST_SEEN))
FACTS = BlockInfo(BlockFacts(7, "free", 0, 0, None, None, None, None, 0, (), (), ()))


def test_replies_come_in_any_order_and_each_once() -> None:
    calls, outcomes = PendingCalls(), list[object]()
    first, second = calls.open(GetBlock(7), outcomes.append), calls.open(Explain(SPACE, (1,)), outcomes.append)
    calls.resolve(CallReply.of(second.call_id, FOUND))
    calls.resolve(CallReply.of(first.call_id, FACTS))
    assert (outcomes, len(calls)) == ([FOUND, FACTS], 0)
    with raises_code(MessageError, "malformed_message"):
        calls.resolve(CallReply.of(first.call_id, FACTS))
    assert len(outcomes) == 2


def test_a_result_of_another_kind_or_an_unknown_error_is_no_reply() -> None:
    calls, outcomes = PendingCalls(), list[object]()
    call = calls.open(GetBlock(7), outcomes.append)
    for result in (FOUND, CallError("KeyError", ("why",)), CallError("QueueFullError", (1, 2, 3, 4, 5))):
        with pytest.raises(MessageError):
            calls.resolve(CallReply(call.call_id, result))
    assert (outcomes, len(calls)) == ([], 1)


def test_an_error_arrives_as_it_was_and_the_end_of_an_engine_is_one() -> None:
    calls, outcomes = PendingCalls(), list[object]()
    call = calls.open(GetBlock(7), outcomes.append)
    calls.open(GetBlock(8), outcomes.append)
    calls.resolve(CallReply.of(call.call_id, EngineDeadError("first")))
    calls.fail_all(EngineDeadError("second"))
    calls.fail_all(EngineDeadError("third"))
    assert [str(one) for one in outcomes] == ["first", "second"]

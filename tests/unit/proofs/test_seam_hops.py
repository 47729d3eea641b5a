"""A way is what lies between two moments of a trace, without what a server does by itself."""

from proofs.seam.hops import APPLY, PLAN, SEND, SUBMIT, TOKENS, Call, Trace


def call(at_s: float, callee: str, *classes: str, is_return: bool = False) -> Call:
    return Call(at_s, is_return, "caller", callee, classes)


def test_the_way_in_ends_with_the_scheduler_and_passes_both_processes_once() -> None:
    parent = (call(1, "a", "A"), call(2, "idle", "I"), call(3, SEND, "S"), call(9, "later", "L"))
    worker = (call(2, "before"), call(4, "decode", "D"), call(5, SUBMIT), call(6, SUBMIT, is_return=True), call(7, "x"))
    way = Trace(parent, worker, 0.0, frozenset({"idle"})).way_in()
    assert [hop.rpartition(" -> ")[2] for hop in way.hops] == ["a", SEND, "decode", SUBMIT]
    assert way.forms == {"A", "S", "D"}


def test_a_way_out_is_a_tokens_from_the_end_of_its_step_to_that_of_the_next() -> None:
    worker = tuple(one for at in range(TOKENS) for one in (call(10 * at + 1, PLAN), call(10 * at + 5, APPLY)))
    parent = tuple(call(10 * at + 8, "pieces", "Piece") for at in range(TOKENS))
    ways = Trace(parent, worker, 0.0, frozenset()).ways_out()
    assert len(ways) == TOKENS - 5
    assert all([hop.rpartition(" -> ")[2] for hop in way.hops] == [APPLY, "pieces"] for way in ways)

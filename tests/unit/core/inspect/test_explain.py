"""Why a prompt was not found, as the scheduler says it: at admission where it is asked for, and at any time between."""

from dataclasses import replace

from quire.core.divergence import Divergence, MissReason
from quire.core.events import Admitted
from tests.support.servers.server import Server

PROMPT = list(range(1, 14))


def miss_of(server: Server, name: str) -> Divergence | None:
    (event,) = [one for one in server.log if isinstance(one, Admitted) and one.request_id == name]
    return event.miss


def explained(server: Server, prompt: list[int], tenant: str = "default") -> Divergence:
    return server.scheduler.explain(replace(server.namespace, cache_group=tenant), tuple(prompt))


def test_an_admission_says_why_only_where_it_is_asked() -> None:
    server = Server()
    plain, asked = server.ask(PROMPT), server.ask([40, *PROMPT], is_explained=True)
    server.run()
    assert miss_of(server, plain) is None
    assert miss_of(server, asked) == Divergence(0, MissReason.FIRST_SEEN)


def test_an_admission_says_why_as_it_was_then() -> None:
    server = Server()
    server.ask(PROMPT)
    server.run()
    changed = [*PROMPT[:6], 30, *PROMPT[7:]]
    name = server.ask(changed, is_explained=True)
    server.run()
    assert miss_of(server, name) == Divergence(4, MissReason.DIVERGED, 6, (5, 6, 7, 8))
    again = server.ask(changed, is_explained=True)
    server.run()
    assert miss_of(server, again) == Divergence(12, MissReason.TOO_SHORT)


def test_a_preempted_request_is_explained_once() -> None:
    server = Server()
    name = server.ask(PROMPT, 20, is_explained=True)
    server.step()
    server.scheduler.preempt_latest()
    server.run()
    assert miss_of(server, name) == Divergence(0, MissReason.FIRST_SEEN)


def test_what_somebody_who_runs_will_compute_is_being_computed() -> None:
    server = Server(num_blocks=200, max_step_tokens=16, max_running=8)
    long = list(range(1, 41))
    first = server.ask(long, is_explained=True)
    second = server.ask(long, is_explained=True)
    server.step()
    assert explained(server, long) == Divergence(16, MissReason.COMPUTING)
    assert explained(server, [*long[:18], 45, 45, 45]) == Divergence(16, MissReason.FIRST_SEEN), "only the same tokens"
    assert explained(server, long, tenant="theirs") == Divergence(0, MissReason.FIRST_SEEN)
    server.run()
    assert miss_of(server, first) == Divergence(0, MissReason.FIRST_SEEN), "nobody waits for itself"
    assert miss_of(server, second) is not None
    assert explained(server, long) == Divergence(36, MissReason.TOO_SHORT)


def test_of_equal_prompts_that_come_together_the_first_computes_for_the_others() -> None:
    server = Server()
    names = [server.ask(PROMPT, is_explained=True) for _ in range(3)]
    server.run()
    assert [miss_of(server, name) for name in names] == [
        Divergence(0, MissReason.FIRST_SEEN),
        Divergence(0, MissReason.COMPUTING),
        Divergence(0, MissReason.COMPUTING),
    ]


def test_a_request_that_waits_computes_nothing() -> None:
    server = Server(max_running=1, max_step_tokens=8)
    server.ask([30, 31, 32], 9)
    server.step()
    server.ask(PROMPT)
    server.step()
    assert explained(server, PROMPT) == Divergence(0, MissReason.FIRST_SEEN)


def test_asking_changes_nothing() -> None:
    server = Server()
    server.ask(PROMPT, 8)
    server.step()
    before = server.memory.stats()
    explained(server, [*PROMPT, 3, 4])
    assert server.memory.stats() == before
    server.run()

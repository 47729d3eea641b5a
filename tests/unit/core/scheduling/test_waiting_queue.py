"""Who is next, and who does not get in."""

from random import Random

import pytest

from quire.core.request import PriorityClass, Request
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.waiting_queue import Line, QueueConfig, WaitingQueue
from quire.errors import ConfigError, QueueFullError, TenantShareError
from tests.support.core.shadow import namespace
from tests.support.errors import raises_code

HIGH, NORMAL, LOW = PriorityClass.HIGH, PriorityClass.NORMAL, PriorityClass.LOW


class Waiting:
    """A queue with names for sequences."""

    def __init__(self, **settings: object) -> None:
        self.queue = WaitingQueue(QueueConfig(**settings))  # type: ignore[arg-type]
        self.sequences: dict[str, Sequence] = {}
        self.displaced: list[str] = []

    def add(self, name: str, at_s: float = 0.0, priority: PriorityClass = NORMAL, tenant: str = "t") -> Sequence:
        request = Request(name, (1,), namespace(4), at_s, tenant=tenant, priority=priority)
        number = len(self.sequences) + 1
        sequence = Sequence(number, request, self.queue.key(request, at_s, number))
        room = self.queue.request_place(request, at_s)
        if room.displaced_name is not None:
            self.queue.remove(self.sequences[room.displaced_name])
            self.displaced.append(room.displaced_name)
        self.queue.enter(tenant, 1)
        (self.queue.add_promised if room.has_reservation else self.queue.add)(sequence)
        self.sequences[name] = sequence
        return sequence

    def pop(self) -> str | None:
        head = self.queue.head()
        if head is None:
            return None
        self.queue.remove(head)
        return head.request.request_id

    def order(self) -> list[str]:
        names = []
        while (name := self.pop()) is not None:
            names.append(name)
        return names


def test_first_come_first_served_within_a_class() -> None:
    waiting = Waiting()
    for name, at_s in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        waiting.add(name, at_s)
    assert waiting.order() == ["a", "b", "c"]
    assert waiting.pop() is None


def test_a_class_is_a_head_start_and_no_more() -> None:
    waiting = Waiting()
    waiting.add("low", 0.0, LOW)
    waiting.add("normal in time", 19.9, NORMAL)
    waiting.add("normal too late", 20.1, NORMAL)
    waiting.add("high in time", 59.9, HIGH)
    waiting.add("high too late", 60.1, HIGH)
    assert waiting.order() == ["normal in time", "high in time", "low", "normal too late", "high too late"]


def test_inside_a_class_the_least_served_tenant_goes_first() -> None:
    waiting = Waiting()
    for at in range(3):
        waiting.add(f"a{at}", float(at), tenant="a")
        waiting.add(f"b{at}", 10.0 + at, tenant="b")
    waiting.queue.charge("a", 100, 0)
    assert waiting.pop() == "b0"
    waiting.queue.charge("b", 0, 50)
    assert waiting.order() == ["a0", "a1", "a2", "b1", "b2"]


def test_weights_divide_service() -> None:
    waiting = Waiting(tenant_weights={"heavy": 4.0, "light": 1.0})
    waiting.add("h", tenant="heavy")
    waiting.add("l", tenant="light")
    waiting.queue.charge("heavy", 300, 0)
    waiting.queue.charge("light", 100, 0)
    assert waiting.order() == ["h", "l"]


def test_an_output_token_costs_four_prompt_tokens() -> None:
    waiting = Waiting()
    waiting.add("a", tenant="a")
    waiting.queue.charge("a", 10, 5)
    assert waiting.queue.tenants["a"].service == 30.0


def test_service_orders_tenants_only_inside_the_class_that_is_next() -> None:
    waiting = Waiting()
    waiting.add("served high", 0.0, HIGH, tenant="a")
    waiting.add("unserved low", 0.0, LOW, tenant="b")
    waiting.queue.charge("a", 1000, 0)
    assert waiting.order() == ["served high", "unserved low"]


def test_a_returning_tenant_has_saved_up_nothing() -> None:
    waiting = Waiting()
    waiting.add("a", tenant="a")
    waiting.queue.charge("a", 500, 0)
    waiting.add("b", tenant="b")
    assert waiting.queue.tenants["b"].service == 500.0
    waiting.queue.remove(waiting.sequences["b"])
    waiting.queue.leave("b")
    waiting.queue.charge("b", 100, 0)
    waiting.add("b again", tenant="b")
    assert waiting.queue.tenants["b"].service == 600.0, "and loses nothing either"


def test_a_preempted_sequence_comes_back_to_where_its_key_says() -> None:
    waiting = Waiting()
    waiting.add("first", 0.0)
    waiting.add("second", 1.0)
    victim = waiting.queue.head()
    assert victim is not None
    waiting.queue.remove(victim)
    victim.num_preemptions += 1
    waiting.queue.wait(victim)
    assert victim in waiting.queue
    assert waiting.order() == ["first", "second"]
    assert waiting.queue.tenants["t"].num_waiting == 0


def test_the_queue_is_full_when_its_places_are_taken() -> None:
    waiting = Waiting(max_requests=3, class_reserve=0.0)
    for name in "abc":
        waiting.add(name)
    with pytest.raises(QueueFullError) as full:
        waiting.add("d")
    assert (full.value.num_waiting, full.value.limit) == (3, 3)
    waiting.pop()
    waiting.add("f")


def test_a_flood_of_one_class_leaves_room_for_the_others() -> None:
    waiting = Waiting(max_requests=20)
    for index in range(16):
        waiting.add(f"high{index}", priority=HIGH)
    with pytest.raises(QueueFullError) as full:
        waiting.add("one more", priority=HIGH)
    assert (full.value.num_waiting, full.value.limit) == (16, 16)
    for index in range(2):
        waiting.add(f"low{index}", priority=LOW)
        waiting.add(f"normal{index}", priority=NORMAL)
    for priority in PriorityClass:
        with pytest.raises(QueueFullError) as full:
            waiting.add(f"last {priority}", priority=priority)
        assert (full.value.num_waiting, full.value.limit) == (20, 20)


def test_tenants_share_the_queue_by_weight() -> None:
    waiting = Waiting(max_requests=80, class_reserve=0.0, tenant_weights={"a": 3.0, "b": 1.0})
    waiting.add("b0", tenant="b")
    for index in range(60):
        waiting.add(f"a{index}", priority=list(PriorityClass)[index % 3], tenant="a")
    with pytest.raises(TenantShareError) as refused:
        waiting.add("one more", tenant="a")
    assert (refused.value.tenant, refused.value.num_requests, refused.value.limit) == ("a", 60, 60)
    for index in range(1, 20):
        waiting.add(f"b{index}", priority=list(PriorityClass)[index % 3], tenant="b")
    with pytest.raises(TenantShareError) as refused:
        waiting.add("b20", tenant="b")
    assert (refused.value.tenant, refused.value.num_requests, refused.value.limit) == ("b", 20, 20)


def test_who_waits_beyond_its_share_gives_way_to_one_below_its_own() -> None:
    waiting = Waiting(max_requests=10, class_reserve=0.0)
    for index in range(10):
        waiting.add(f"a{index}", float(index), tenant="a")
    for index in range(5):
        waiting.add(f"b{index}", 10.0 + index, tenant="b")
    assert waiting.displaced == ["a9", "a8", "a7", "a6", "a5"]
    for tenant in "ab":
        with pytest.raises(TenantShareError) as refused:
            waiting.add("one more", 20.0, tenant=tenant)
        assert (refused.value.num_requests, refused.value.limit) == (5, 5)


def test_a_tenant_comes_in_when_it_was_told_to_though_its_share_is_used_up() -> None:
    waiting = Waiting(max_requests=20, class_reserve=0.0)
    waiting.add("b", tenant="b")
    for index in range(10):
        waiting.add(f"a{index}", tenant="a")
    with pytest.raises(TenantShareError) as refused:
        waiting.add("early", 1.0, tenant="a")
    with pytest.raises(TenantShareError) as again:
        waiting.add("early again", 0.5 + refused.value.retry_after_s, tenant="a")
    waiting.add("on time", 0.5 + refused.value.retry_after_s + again.value.retry_after_s, tenant="a")
    assert (waiting.queue.shares.num_taken, waiting.queue.shares.num_promised) == (11, 1)


def test_refusing_changes_nothing_of_the_queue() -> None:
    waiting = Waiting(max_requests=1, class_reserve=0.0)
    waiting.add("a")
    for _ in range(3):
        with pytest.raises(QueueFullError):
            waiting.add("b")
    assert len(waiting.queue) == 1
    assert waiting.order() == ["a"]


def test_removed_sequences_do_not_pile_up() -> None:
    waiting = Waiting(max_requests=100_000, class_reserve=0.0)
    for index in range(2000):
        waiting.add(f"keep{index}", tenant=f"t{index % 7}") if index % 20 == 0 else None
        waiting.queue.remove(waiting.add(f"gone{index}", float(-index), tenant=f"g{index}"))
    queue = waiting.queue.classes[NORMAL]
    assert len(queue.lines) == 7
    assert len(queue.all_tenants.in_order) + len(queue.all_tenants.heap) <= 2 * 100 + 65
    assert len(queue.by_service) <= 2 * 7 + 65
    assert len(waiting.order()) == 100


def test_a_tenant_whose_requests_all_went_is_forgotten_by_the_class() -> None:
    waiting = Waiting()
    waiting.queue.remove(waiting.add("a", tenant="a"))
    waiting.add("b", tenant="b")
    assert waiting.order() == ["b"]
    waiting.add("a again", tenant="a")
    assert waiting.order() == ["a again"]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_requests": 0}, "queue_too_small"),
        ({"class_reserve": 0.4}, "invalid_class_reserve"),
        ({"tenant_weights": {"a": 0.0}}, "invalid_config"),
    ],
)
def test_a_setting_that_breaks_a_rule_is_refused(settings: dict[str, object], code: str) -> None:
    with raises_code(ConfigError, code):
        QueueConfig(**settings)  # type: ignore[arg-type]


def test_a_newcomer_to_an_idle_server_does_not_start_from_nothing() -> None:
    waiting = Waiting()
    waiting.add("a", tenant="a")
    waiting.queue.charge("a", 1000, 0)
    waiting.pop()
    waiting.queue.leave("a")
    waiting.add("b", tenant="b")
    waiting.add("a again", 1.0, tenant="a")
    assert waiting.queue.tenants["b"].service == 1000.0


def test_a_returning_tenant_is_level_with_those_who_wait_not_with_one_who_only_runs() -> None:
    waiting = Waiting()
    waiting.add("modest", tenant="modest")
    waiting.pop()
    waiting.add("busy", tenant="busy")
    waiting.queue.charge("busy", 700, 0)
    waiting.add("new", tenant="new")
    assert waiting.queue.tenants["new"].service == 700.0
    waiting.order()
    waiting.add("newer", tenant="newer")
    assert waiting.queue.tenants["newer"].service == 0.0, "nobody waits: level with the least served who runs"


def test_tenants_that_are_not_listed_have_a_share_each() -> None:
    waiting = Waiting(max_requests=100, class_reserve=0.0, tenant_weights={"paid": 8.0})
    for tenant in ("paid", "anon", "somebody"):
        waiting.add(f"{tenant}0", tenant=tenant)
    for index in range(1, 10):
        waiting.add(f"anon{index}", tenant="anon")
    with pytest.raises(TenantShareError) as refused:
        waiting.add("one more", tenant="anon")
    assert (refused.value.num_requests, refused.value.limit) == (10, 10)
    for index in range(1, 10):
        waiting.add(f"somebody{index}", tenant="somebody")
    for index in range(1, 80):
        waiting.add(f"paid{index}", tenant="paid")


def test_at_rest_the_queue_holds_on_to_nobody() -> None:
    waiting = Waiting()
    for index in range(5):
        waiting.add(f"r{index}", tenant=f"t{index}")
    waiting.order()
    queue = waiting.queue.classes[NORMAL]
    assert (len(queue.all_tenants), queue.lines, queue.entries) == (0, {}, {})
    waiting.queue.shares.advance(60.0)
    assert (len(waiting.queue.shares), waiting.queue.shares.tenants) == (0, set())
    assert not any(isinstance(part, Sequence) for entry in queue.by_service for part in entry)


def test_who_comes_back_finds_its_place_among_those_who_wait() -> None:
    waiting = Waiting(max_requests=1000)
    random = Random(5)
    moments = sorted(random.random() for _ in range(200))
    sequences = [waiting.add(f"r{at}", moment) for at, moment in enumerate(moments)]
    gone = random.sample(sequences, 120)
    for sequence in gone:
        waiting.queue.remove(sequence)
        sequence.num_preemptions += 1
    for sequence in gone[:80]:
        waiting.queue.wait(sequence)
    for sequence in gone[:40]:
        waiting.queue.remove(sequence)
    expected = sorted({*sequences} - {*gone[80:]} - {*gone[:40]}, key=lambda sequence: sequence.key)
    assert waiting.order() == [sequence.request.request_id for sequence in expected]


def test_a_line_that_many_came_back_to_and_left_is_swept() -> None:
    line = Line()
    request = Request("r", (1,), namespace(4), 0.0)
    line.add(Sequence(0, request, (1000.0, 0)))
    for number in range(1, 500):
        line.add(Sequence(number, request, (float(number), number)))
    for number in range(500, 0, -1):
        if number != 7 and number < 500:
            line.remove(Sequence(number, request, (float(number), number)))
    assert len(line) == 2
    assert len(line.heap) <= 67
    first = line.first()
    assert first is not None
    assert first.sequence_id == 7

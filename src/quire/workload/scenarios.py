"""Named workloads for the simulator. The same name and seed give the same requests on any machine.

Where prompts should share prefixes by chance, token ids are drawn from a small vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from quire.workload.arrivals import at_once, bursts, poisson, steady
from quire.workload.workload_request import WorkloadRequest

PRIORITIES = ("high", "normal", "low")


def tokens(random: Random, length: int, vocabulary_size: int) -> tuple[int, ...]:
    """Draw `length` random tokens, all at least 1, because 0 means end of text."""
    return tuple(random.randrange(1, vocabulary_size) for _ in range(length))


def length_up_to(random: Random, longest: int) -> int:
    """Draw a length log-uniformly from 1 to `longest`."""
    return max(1, int(longest ** random.random()))


@dataclass(slots=True)
class Prompts:
    """A source of prompts with shared prefixes: system prompts and growing conversations."""

    random: Random
    vocabulary_size: int
    longest: int
    num_system_prompts: int = 4
    share_new: float = 0.3
    """Fraction of prompts that share nothing with other prompts."""
    _systems: list[tuple[int, ...]] = field(init=False)
    _conversations: list[tuple[int, ...]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._systems = [
            tokens(self.random, max(1, self.random.randint(self.longest // 4, self.longest // 2)), self.vocabulary_size)
            for _ in range(self.num_system_prompts)
        ]

    def next(self) -> tuple[int, ...]:
        """Return a new prompt, or a question appended to a system prompt or to an earlier conversation."""
        kind_draw = self.random.random()
        if kind_draw < self.share_new:
            return tokens(self.random, length_up_to(self.random, self.longest), self.vocabulary_size)
        if kind_draw < 0.7 or not self._conversations:
            prefix = self.random.choice(self._systems)
        else:
            prefix = self.random.choice(self._conversations)
        question = tokens(self.random, length_up_to(self.random, max(1, self.longest // 4)), self.vocabulary_size)
        prompt = (*prefix, *question)[: self.longest]
        self._conversations = [*self._conversations[-15:], prompt]
        return prompt


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named workload, and its purpose."""

    name: str
    purpose: str
    requests: Callable[[Random, int], Iterator[WorkloadRequest]]
    """Takes a random source and the number of requests; yields the requests in order of arrival."""


def chaos(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """All kinds of requests at once: classes, tenants, continuations, deadlines, shared and new prompts."""
    prompts = Prompts(random, vocabulary_size=random.choice((3, 3, 8)), longest=random.choice((8, 24, 60)))
    rate_per_s = random.choice((20.0, 100.0, 1000.0))
    arrivals = random.choice((poisson(random, rate_per_s), bursts(random, rate_per_s, 20.0), at_once()))
    num_tenants = random.choice((1, 2, 5))
    longest_output = random.choice((4, 10, 40))
    for index, time_s in enumerate(islice(arrivals, num_requests)):
        yield WorkloadRequest(
            name=f"r{index}",
            arrival_s=time_s,
            prompt=prompts.next(),
            max_tokens=length_up_to(random, longest_output),
            seed=random.getrandbits(32),
            tenant=f"tenant{random.randrange(num_tenants)}",
            priority=random.choice(PRIORITIES),
            num_continuations=random.choice((1, 1, 1, 1, 1, 2, 3)),
            timeout_s=random.choice((None, None, None, None, 0.5, 5.0)),
        )


def chat_scenario(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """People in chats, with a few system prompts and growing conversations."""
    prompts = Prompts(random, vocabulary_size=1000, longest=1500, share_new=0.05)
    for index, time_s in enumerate(islice(poisson(random, 3.0), num_requests)):
        yield WorkloadRequest(f"chat{index}", time_s, prompts.next(), random.randint(16, 128), random.getrandbits(32))


def agent_scenario(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """Repeated bursts of agents; all agents of a burst share one long uncached prompt."""
    for index, time_s in enumerate(islice(bursts(random, 3.0, 16.0), num_requests)):
        shared_prefix = tokens(Random(f"{time_s}"), 600, 1000)
        own_tokens = tokens(random, random.randint(8, 64), 1000)
        yield WorkloadRequest(
            f"agent{index}", time_s, (*shared_prefix, *own_tokens), random.randint(16, 64), random.getrandbits(32)
        )


def flood(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """HIGH requests beyond the server's capacity, with a few NORMAL and LOW requests that must not starve."""
    for index, time_s in enumerate(islice(steady(20.0), num_requests)):
        priority = random.choices(PRIORITIES, (18, 1, 1))[0]
        prompt = tokens(random, random.randint(64, 256), 1000)
        yield WorkloadRequest(f"flood{index}", time_s, prompt, 32, random.getrandbits(32), priority=priority)


def tenants(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """One tenant sends ten times as many requests as each of four others."""
    for index, time_s in enumerate(islice(poisson(random, 12.0), num_requests)):
        tenant = random.choices(("greedy", "a", "b", "c", "d"), (10, 1, 1, 1, 1))[0]
        prompt = tokens(random, random.randint(32, 256), 1000)
        yield WorkloadRequest(f"tenant{index}", time_s, prompt, 32, random.getrandbits(32), tenant=tenant)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("chaos", "every kind of request and every fault: what the proof runs", chaos),
        Scenario("drafts", "the same on a server that drafts tokens, right or wrong", chaos),
        Scenario("hybrid", "the same on a server whose model has recurrent layers, with few slots for states", chaos),
        Scenario("chat", "conversations that grow under a few system prompts", chat_scenario),
        Scenario("agents", "bursts of agents with the same cold prompt", agent_scenario),
        Scenario("flood", "urgent requests beyond capacity, and others that must not starve", flood),
        Scenario("tenants", "one tenant that sends ten times as many requests as the others", tenants),
    )
}

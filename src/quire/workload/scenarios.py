"""Named workloads. The same name and seed give the same requests, on any machine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from quire.workload.arrivals import at_once, bursts, poisson, steady
from quire.workload.prompts import Prompts, length_up_to, tokens
from quire.workload.workload_request import WorkloadRequest

PRIORITIES = ("high", "normal", "low")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload under a name, and what it is for."""

    name: str
    purpose: str
    requests: Callable[[Random, int], Iterator[WorkloadRequest]]
    """Random source and number of requests -> the requests, in order of arrival."""


def chaos(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """Every kind of request at once: classes, tenants, continuations, deadlines, shared and new prompts."""
    prompts = Prompts(random, vocabulary_size=random.choice((3, 3, 8)), longest=random.choice((8, 24, 60)))
    rate_per_s = random.choice((20.0, 100.0, 1000.0))
    moments = random.choice((poisson(random, rate_per_s), bursts(random, rate_per_s, 20.0), at_once()))
    num_tenants = random.choice((1, 2, 5))
    longest_output = random.choice((4, 10, 40))
    for index, moment_s in enumerate(islice(moments, num_requests)):
        yield WorkloadRequest(
            name=f"r{index}",
            arrival_s=moment_s,
            prompt=prompts.next(),
            max_tokens=length_up_to(random, longest_output),
            seed=random.getrandbits(32),
            tenant=f"tenant{random.randrange(num_tenants)}",
            priority=random.choice(PRIORITIES),
            num_continuations=random.choice((1, 1, 1, 1, 1, 2, 3)),
            timeout_s=random.choice((None, None, None, None, 0.5, 5.0)),
        )


def chat_scenario(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """People in chats: a few system prompts, conversations that grow turn by turn."""
    prompts = Prompts(random, vocabulary_size=1000, longest=1500, share_new=0.05)
    for index, moment_s in enumerate(islice(poisson(random, 3.0), num_requests)):
        yield WorkloadRequest(f"chat{index}", moment_s, prompts.next(), random.randint(16, 128), random.getrandbits(32))


def agent_scenario(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """Agents that start together with the same long cold prompt, again and again."""
    for index, moment_s in enumerate(islice(bursts(random, 3.0, 16.0), num_requests)):
        shared = tokens(Random(f"{moment_s}"), 600, 1000)
        own = tokens(random, random.randint(8, 64), 1000)
        yield WorkloadRequest(
            f"agent{index}", moment_s, (*shared, *own), random.randint(16, 64), random.getrandbits(32)
        )


def flood(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """A flood of urgent requests at more than the server can do, with a trickle of others that must not starve."""
    for index, moment_s in enumerate(islice(steady(20.0), num_requests)):
        priority = random.choices(PRIORITIES, (18, 1, 1))[0]
        prompt = tokens(random, random.randint(64, 256), 1000)
        yield WorkloadRequest(f"flood{index}", moment_s, prompt, 32, random.getrandbits(32), priority=priority)


def tenants(random: Random, num_requests: int) -> Iterator[WorkloadRequest]:
    """One tenant sends ten times as much as each of the other four."""
    for index, moment_s in enumerate(islice(poisson(random, 12.0), num_requests)):
        tenant = random.choices(("greedy", "a", "b", "c", "d"), (10, 1, 1, 1, 1))[0]
        prompt = tokens(random, random.randint(32, 256), 1000)
        yield WorkloadRequest(f"tenant{index}", moment_s, prompt, 32, random.getrandbits(32), tenant=tenant)


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

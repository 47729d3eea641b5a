"""Named workloads of visits (conversations of one client). Equal names, sizes and seeds give equal visits anywhere."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from quire.workload.visits import Span, Turn, Visit


@dataclass(frozen=True, slots=True)
class MixSizes:
    """Sizes of a mix, in tokens and counts. Each mix has its own defaults."""

    prompt_tokens: int = 256
    """Tokens that a turn adds, such as a question or a tool's result."""
    output_tokens: int = 64
    shared_tokens: int = 0
    """Tokens of the prefix that visits of a group share, such as a system prompt or a document."""
    num_groups: int = 1
    """Number of different shared prefixes."""
    num_turns: int = 1


@dataclass(frozen=True, slots=True)
class Mix:
    """A named workload, with its purpose and default sizes."""

    name: str
    purpose: str
    sizes: MixSizes
    visits: Callable[[Random, MixSizes], Iterator[Visit]]
    """Generates visits without end; the caller takes as many as it needs."""


def distinct(_random: Random, sizes: MixSizes) -> Iterator[Visit]:
    """Prompts without shared prefixes, which measure a server without its prefix cache."""
    for index in count():
        question = Span(f"prompt {index}", sizes.prompt_tokens)
        yield Visit(f"distinct{index}", (Turn((question,), sizes.output_tokens),))


def shared(random: Random, sizes: MixSizes) -> Iterator[Visit]:
    """Single questions, each after one of a few system prompts."""
    for index in count():
        question = Span(f"question {index}", sizes.prompt_tokens)
        yield Visit(f"shared{index}", (Turn((question,), sizes.output_tokens),), _system_prompt(random, sizes))


def chat_mix(random: Random, sizes: MixSizes) -> Iterator[Visit]:
    """People in a chat; every turn contains the whole conversation."""
    for index in count():
        turns = tuple(
            Turn((Span(f"chat {index} turn {turn}", _uniform(random, sizes.prompt_tokens)),), sizes.output_tokens)
            for turn in range(sizes.num_turns)
        )
        yield Visit(f"chat{index}", turns, _system_prompt(random, sizes))


def agent_mix(random: Random, sizes: MixSizes) -> Iterator[Visit]:
    """Agents with a long system prompt, a task, and several tool results of widely varying lengths."""
    for index in count():
        task = Turn((Span(f"agent {index} task", _uniform(random, sizes.prompt_tokens)),), sizes.output_tokens)
        results = tuple(
            Turn((Span(f"agent {index} result {turn}", _skewed(random, sizes.prompt_tokens)),), sizes.output_tokens)
            for turn in range(1, sizes.num_turns)
        )
        yield Visit(f"agent{index}", (task, *results), _system_prompt(random, sizes))


def documents(random: Random, sizes: MixSizes) -> Iterator[Visit]:
    """Questions about long documents; each document is used by several visits."""
    for index in count():
        document = Span(f"document {random.randrange(sizes.num_groups)}", sizes.shared_tokens)
        question = Span(f"about {index}", sizes.prompt_tokens)
        yield Visit(f"document{index}", (Turn((question,), sizes.output_tokens),), (document,))


def mixed(random: Random, sizes: MixSizes) -> Iterator[Visit]:
    """People in a chat, agents, and long background jobs, randomly interleaved."""
    chats = chat_mix(Random(random.getrandbits(64)), sizes)
    agents = agent_mix(Random(random.getrandbits(64)), sizes)
    large = replace(sizes, shared_tokens=4 * sizes.shared_tokens, num_groups=64, output_tokens=2 * sizes.output_tokens)
    jobs = documents(Random(random.getrandbits(64)), large)
    sources = (("person", "high", chats), ("agent", "normal", agents), ("job", "low", jobs))
    while True:
        kind, priority, source = random.choices(sources, (5, 3, 2))[0]
        yield replace(next(source), kind=kind, priority=priority)


def _system_prompt(random: Random, sizes: MixSizes) -> tuple[Span, ...]:
    if not sizes.shared_tokens:
        return ()
    return (Span(f"system {random.randrange(sizes.num_groups)}", sizes.shared_tokens),)


def _uniform(random: Random, mean: int) -> int:
    """Draw a length uniformly from half to one and a half times the mean."""
    return max(1, random.randint(mean - mean // 2, mean + mean // 2))


def _skewed(random: Random, mean: int) -> int:
    """Draw a length log-uniformly from a quarter to four times `mean`."""
    return max(1, int(mean * 4 ** random.uniform(-1.0, 1.0)))


MIXES = {
    mix.name: mix
    for mix in (
        Mix("distinct", "prompts with nothing in common", MixSizes(256, 64), distinct),
        Mix("shared", "questions under a shared system prompt", MixSizes(64, 64, shared_tokens=512), shared),
        Mix("chat", "conversations that grow turn by turn", MixSizes(48, 64, 256, 4, 4), chat_mix),
        Mix("agents", "growing history with tool results", MixSizes(96, 48, 1024, 2, 6), agent_mix),
        Mix("documents", "several questions about each long document", MixSizes(48, 64, 2048, 4), documents),
        Mix("mixed", "people, agents and long jobs in one stream", MixSizes(64, 48, 256, 4, 3), mixed),
    )
}


def sample_visits(mix: Mix, sizes: MixSizes, seed: str, num_requests: int) -> list[Visit]:
    """Return visits with `num_requests` turns in total; the last visit may be cut short."""
    visits: list[Visit] = []
    num_remaining = num_requests
    for visit in mix.visits(Random(f"{mix.name} {seed}"), sizes):
        if num_remaining <= 0:
            break
        visits.append(replace(visit, turns=visit.turns[:num_remaining]))
        num_remaining -= len(visit.turns)
    return visits

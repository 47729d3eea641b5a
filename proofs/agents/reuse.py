"""How much of an agent's conversation is found in the cache: within it, and in the next one of the same agent.

What could be found is what the renderings have in common, in whole blocks: each request's prompt against the prompts
and answers of those before it. What was found is what the runner did not have to compute. Both in the server's tokens.
The folder is a repository, and what git says of it changes between the conversations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from benchmarks.record import say
from proofs.agents.clients_run.agents import ALL_AGENTS, Agent, AgentRuns
from proofs.agents.clients_run.packages import NotInstalledError, PackageGroup, installed
from proofs.agents.clients_run.runs import Ground
from proofs.agents.clients_run.scripted_server import MODEL, ScriptedServer, running
from proofs.framework.proof import Proof, section

GROUPS = ("claude-code", "codex", "opencode", "qwen-code")
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of some requests: prompt tokens, those that could be found, those that were."""

    num_prompt: int
    num_possible: int
    num_found: int

    @property
    def ratio(self) -> float:
        """Found over possible."""
        return self.num_found / self.num_possible if self.num_possible else 0.0


def num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def reuse_of(requests: Sequence[dict[str, Any]]) -> Reuse:
    """Of all but the first, each against all before it."""
    num_prompt = num_possible = num_found = 0
    for at, one in enumerate(requests):
        if not at:
            continue
        prompt = one["prompt"]
        common = max(num_common(prompt, before["prompt"] + before["answer"]) for before in requests[:at])
        # A prompt's last token is computed in any case: its logits are needed.
        possible = min(common, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        num_prompt += len(prompt)
        num_possible += possible
        num_found += min(possible, len(prompt) - one["num_fed"])
    return Reuse(num_prompt, num_possible, num_found)


@dataclass(frozen=True, slots=True)
class Conversations:
    """What one agent's two conversations came to."""

    within: Reuse
    """Of the first one, and of what was said in it later."""
    num_opening: int
    """Tokens of tools and system that the second one begins with."""
    num_opening_found: int
    problems: tuple[str, ...]


def converse(server: ScriptedServer, agent: Agent, group: PackageGroup, ground: Ground) -> Conversations:
    """Two files, a third one in the same conversation, and a fourth one in another."""
    desk = AgentRuns.opened(agent, group, ground)
    assert agent.asked_again is not None
    problems, num_before = list[str](), len(server.requests())
    first, content = desk.write_task("first.txt")
    second, _ = desk.write_task("second.txt")
    run = desk.ask(agent.asked(f"{first} But before you say so: {second}"))
    problems.append(desk.problem(run, "first.txt", content) or "")
    task, content = desk.write_task("third.txt")
    problems.append(desk.problem(desk.ask(agent.asked_again(task)), "third.txt", content) or "")
    within = server.requests()[num_before:]
    task, content = desk.write_task("fourth.txt")
    problems.append(desk.problem(desk.ask(agent.asked(task)), "fourth.txt", content) or "")
    fresh = max(server.requests()[num_before + len(within) :], key=lambda one: one["num_opening"])
    num_found = min(fresh["num_opening"], len(fresh["prompt"]) - fresh["num_fed"])
    return Conversations(reuse_of(within), fresh["num_opening"], num_found, tuple(filter(None, problems)))


@section("turn 2")
def turn2(proof: Proof) -> None:
    """The four agents that send their tools and their history with every request."""
    worst_within = worst_fresh = 1.0
    num_agents = num_failed = 0
    with running(proof.folder) as server:
        for agent in (one for one in ALL_AGENTS if one.group in GROUPS):
            try:
                group = installed(agent.group)
            except NotInstalledError as error:
                say(f"    {error}")
                continue
            num_agents += 1
            ground = Ground.made(proof.folder / agent.group, server.url, MODEL)
            ground.make_repository()
            found = converse(server, agent, group, ground)
            num_failed += bool(found.problems)
            for told in found.problems:
                say(f"    {agent.title}: {told}")
            key, fresh = agent.group.replace("-", "_"), found.num_opening_found / found.num_opening
            proof.report(f"turn2_reuse_{key}", found.within.ratio, f"of {found.within.num_possible:,} tokens")
            proof.report(
                f"turn2_cached_{key}", found.within.num_found / found.within.num_prompt, "of all prompt tokens"
            )
            proof.report(f"fresh_reuse_{key}", fresh, f"of {found.num_opening:,} tokens of tools and system")
            worst_within, worst_fresh = min(worst_within, found.within.ratio), min(worst_fresh, fresh)
    proof.equals("turn2_agents", num_agents, len(GROUPS))
    proof.equals("turn2_tasks_failed", num_failed, 0)
    proof.at_least("turn2_reuse", worst_within, 0.97, "of the worst of them")
    proof.at_least("fresh_reuse", worst_fresh, 0.8, "of the worst of them")

"""How many prompt tokens of an agent are found in the prefix cache, within a conversation and at the start of the next.

Possible tokens: the longest common prefix of a prompt with an earlier prompt and its answer, in whole blocks. Found
tokens: those of them that the runner did not have to compute. Both are counted in the server's tokens. The agent works
in a git repository, whose status, which agents put into their prompts, changes between the conversations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from benchmarks.record import say
from proofs.agents.clients_run.agents import ALL_AGENTS, Agent, AgentRuns
from proofs.agents.clients_run.packages import NotInstalledError, PackageGroup, installed
from proofs.agents.clients_run.runs import Workspace
from proofs.agents.clients_run.scripted_server import MODEL, ScriptedServer, running
from proofs.framework.proof import Proof, section

GROUPS = ("claude-code", "codex", "opencode", "qwen-code")
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of some requests: all prompt tokens, those that could be in the cache, and those that were found there."""

    num_prompt: int
    num_possible: int
    num_found: int

    @property
    def ratio(self) -> float:
        """Found tokens over possible tokens."""
        return self.num_found / self.num_possible if self.num_possible else 0.0


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def reuse_of(requests: Sequence[dict[str, Any]]) -> Reuse:
    """The reuse of all requests but the first, each against all requests before it."""
    num_prompt = num_possible = num_found = 0
    for index, request in enumerate(requests):
        if not index:
            continue
        prompt = request["prompt"]
        common = max(num_common(prompt, earlier["prompt"] + earlier["answer"]) for earlier in requests[:index])
        # A prompt's last token is computed in any case: its logits are needed.
        possible = min(common, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        num_prompt += len(prompt)
        num_possible += possible
        num_found += min(possible, len(prompt) - request["num_fed"])
    return Reuse(num_prompt, num_possible, num_found)


@dataclass(frozen=True, slots=True)
class Conversations:
    """The reuse in two conversations of one agent."""

    first_reuse: Reuse
    """In the first conversation, all of its turns."""
    num_opening: int
    """Tokens of the tools and the system prompt, with which the second conversation begins."""
    num_opening_found: int
    problems: tuple[str, ...]


def converse(server: ScriptedServer, agent: Agent, group: PackageGroup, workspace: Workspace) -> Conversations:
    """Let an agent write two files, a third in the same conversation, and a fourth in a new one."""
    runs = AgentRuns.configure(agent, group, workspace)
    assert agent.continue_words is not None
    problems, num_before = list[str](), len(server.requests())
    first_task, content = runs.write_task("first.txt")
    second_task, _ = runs.write_task("second.txt")
    run = runs.ask(agent.task_words(f"{first_task} But before you say so: {second_task}"))
    problems.append(runs.problem(run, "first.txt", content) or "")
    task, content = runs.write_task("third.txt")
    problems.append(runs.problem(runs.ask(agent.continue_words(task)), "third.txt", content) or "")
    first_requests = server.requests()[num_before:]
    task, content = runs.write_task("fourth.txt")
    problems.append(runs.problem(runs.ask(agent.task_words(task)), "fourth.txt", content) or "")
    request = max(server.requests()[num_before + len(first_requests) :], key=lambda request: request["num_opening"])
    num_found = min(request["num_opening"], len(request["prompt"]) - request["num_fed"])
    return Conversations(reuse_of(first_requests), request["num_opening"], num_found, tuple(filter(None, problems)))


@section("turn 2")
def turn2(proof: Proof) -> None:
    """Measure the four agents that send their tools and their history with every request."""
    min_reuse = min_fresh = 1.0
    num_agents = num_failed = 0
    with running(proof.folder) as server:
        for agent in (one for one in ALL_AGENTS if one.group in GROUPS):
            try:
                group = installed(agent.group)
            except NotInstalledError as error:
                say(f"    {error}")
                continue
            num_agents += 1
            workspace = Workspace.create(proof.folder / agent.group, server.url, MODEL)
            workspace.make_repository()
            result = converse(server, agent, group, workspace)
            num_failed += bool(result.problems)
            for problem in result.problems:
                say(f"    {agent.title}: {problem}")
            key, opening_share = agent.group.replace("-", "_"), result.num_opening_found / result.num_opening
            reuse = result.first_reuse
            proof.report(f"turn2_reuse_{key}", reuse.ratio, f"of {reuse.num_possible:,} tokens")
            proof.report(f"turn2_cached_{key}", reuse.num_found / reuse.num_prompt, "of all prompt tokens")
            proof.report(f"fresh_reuse_{key}", opening_share, f"of {result.num_opening:,} tokens of tools and system")
            min_reuse, min_fresh = min(min_reuse, reuse.ratio), min(min_fresh, opening_share)
    proof.equals("turn2_agents", num_agents, len(GROUPS))
    proof.equals("turn2_tasks_failed", num_failed, 0)
    proof.at_least("turn2_reuse", min_reuse, 0.97, "of the worst of them")
    proof.at_least("fresh_reuse", min_fresh, 0.8, "of the worst of them")

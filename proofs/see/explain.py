"""Explanations of misses, each beside what was worked out apart from the server.

Real routes with oracles behind them. Every miss is made on purpose, for one reason; right is an explanation whose
reason, counts, position, tokens and part are right in the record of the request, in the answer's header and, where a
question changes nothing, in `/v1/cache/explain` asked just before.
"""

from datetime import date, timedelta
from random import Random
from typing import Any

from proofs.framework.proof import Proof, section
from proofs.see.explain_model import (
    BLOCK_SIZE,
    BODIES,
    CacheModel,
    Conversation,
    Expected,
    Part,
    Tokens,
    lost,
    tokens_of,
    written,
)
from proofs.see.explain_server import (
    CHUNK,
    EXPLAIN_PATH,
    PROMPT_PATH,
    ExplainClient,
    GatedRunner,
    asked,
    completion,
    gated,
    met,
    prompt_of,
    text,
)
from tests.support.servers.local_api import Reply
from tests.support.servers.talkers import AGENT_TEMPLATE, talker


def is_told(record: dict[str, Any], tokens: Tokens, expected: Expected, part: Part) -> bool:
    """Whether a record or an explanation says exactly this."""
    found = record["difference"] or {}
    return bool(
        record["reason"] == expected.reason
        and record["prompt_tokens"] == len(tokens)
        and record["cached_tokens"] == expected.num_cached
        and record["lost_tokens"] == lost(len(tokens), expected.num_cached)
        and found.get("position") == expected.position
        and found.get("token_id") == expected.token_id
        and found.get("cached_token_id") == expected.cached_token_id
        and record["part"] == part
    )


def is_in_header(answer: Reply, tokens: Tokens, expected: Expected) -> bool:
    position = "" if expected.position is None else f"; position={expected.position}"
    told = f"cached={expected.num_cached}; prompt={len(tokens)}; reason={expected.reason}{position}"
    return answer.headers.get("x-quire-cache") == told


# -- conversations -----------------------------------------------------------------------------------------------------


def conversation(random: Random, day: date) -> Conversation:
    names = random.sample(["find", "read", "paint", "list", "count", "fetch"], random.randint(2, 5))
    tools = tuple((name, text(random, random.randint(3, 9))) for name in names)
    system = f"{text(random, random.randint(3, 12))}. Today is {day:%A %d %B %Y}. {text(random, 8)}"
    turns = tuple((("user", "assistant")[at % 2], text(random, random.randint(4, 12))) for at in range(3))
    return Conversation(system, tools, turns)


def changed(random: Random, case: str, before: Conversation, day: date) -> Conversation:
    """The same but for what the case is about."""
    if case == "date":
        later = day + timedelta(days=random.randint(1, 400))
        system = before.system.replace(f"{day:%A %d %B %Y}", f"{later:%A %d %B %Y}")
        return Conversation(system, before.tools, before.turns)
    if case == "tools":
        tools = list(before.tools)
        while tuple(tools) == before.tools:
            random.shuffle(tools)
        return Conversation(before.system, tuple(tools), before.turns)
    at = random.randrange(len(before.turns))
    turns = list(before.turns)
    turns[at] = (turns[at][0], f"{turns[at][1][: random.randint(1, 20)]} {text(random, 6)}")
    return Conversation(before.system, before.tools, tuple(turns))


def diverged(asking: ExplainClient, random: Random, case: str, tenant: str) -> None:
    """A prompt that differs from one before in its date, the order of its tools, or a message."""
    day = date(2026, 1, 1) + timedelta(days=random.randrange(365))
    path, make, first_turn = BODIES[random.randrange(len(BODIES))]
    while True:
        before = conversation(random, day)
        after = changed(random, case, before, day)
        model, ours = CacheModel(), written(after, first_turn)
        model.computed(tokens_of(written(before, first_turn).text))
        tokens = tokens_of(ours.text)
        expected = model.expected(tokens)
        if expected.position is not None:
            break
    stream = {"stream": random.random() < 0.5}
    asking.ask(tenant, path, make(before) | stream)
    part = ours.part_at(expected.position)
    checks = []
    if path == BODIES[0][0]:
        told = asking.ask(tenant, EXPLAIN_PATH, make(after)).json
        checks.append(is_told(told, tokens, expected, part))
    answer = asking.ask(tenant, path, make(after) | stream)
    checks.append(is_in_header(answer, tokens, expected))
    asking.judge(case, *checks, is_told(asking.record(tenant, answer), tokens, expected, part))


# -- prompts of tokens -------------------------------------------------------------------------------------------------


def ran(asking: ExplainClient, case: str, tenant: str, tokens: Tokens, expected: Expected) -> None:
    """Asked about, then run: both must say it."""
    told = asking.ask(tenant, EXPLAIN_PATH, completion(tokens)).json
    answer = asking.ask(tenant, PROMPT_PATH, completion(tokens))
    record = asking.record(tenant, answer)
    asking.judge(
        case,
        is_told(told, tokens, expected, None),
        is_told(record, tokens, expected, None),
        is_in_header(answer, tokens, expected),
    )


def too_short(asking: ExplainClient, random: Random, tenant: str) -> None:
    """All blocks are there; the prompt is one token too short to reuse its last, or ends within a block."""
    tokens = prompt_of(random, BLOCK_SIZE * random.randint(2, 12) + random.choice((0, 0, 1, 2, 3)))
    asking.ask(tenant, PROMPT_PATH, completion(tokens))
    model = CacheModel()
    model.computed(tokens)
    ran(asking, "too_short", tenant, tokens, model.expected(tokens))


def of_another(asking: ExplainClient, random: Random, tenant: str, other: str) -> None:
    """Cached, but for another tenant: never seen."""
    tokens = prompt_of(random, random.randint(9, 60))
    asking.ask(other, PROMPT_PATH, completion(tokens))
    ran(asking, "another_tenant", tenant, tokens, Expected("first_seen", 0))


def of_another_model(asking: ExplainClient, random: Random, tenant: str) -> None:
    """Cached for another model of the server. A request that runs asks its own model alone."""
    tokens = prompt_of(random, random.randint(9, 60))
    asking.ask(tenant, PROMPT_PATH, completion(tokens, model="other"))
    told = asking.ask(tenant, EXPLAIN_PATH, completion(tokens)).json
    is_named = (told["differs"], told["other_model"]) == (["model"], "other")
    asking.judge("other_namespace", is_named, is_told(told, tokens, Expected("other_namespace", 0), None))


def computing(asking: ExplainClient, runner: GatedRunner, random: Random, tenant: str) -> None:
    """The same prompt comes while it is computed: what the first step left is waited for, and found."""
    # The second is let in when the first leaves it a block of the step's budget: in the first's last step.
    num_before = CHUNK * random.randint(1, 3)
    tokens = prompt_of(random, num_before + random.randint(2 * BLOCK_SIZE + 1, CHUNK - BLOCK_SIZE))
    answers = met(asking, runner, tokens, (tenant, tenant))
    first, second = (asking.record(tenant, answer) for answer in answers)
    limit = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    asking.judge(
        "computing",
        is_told(first, tokens, Expected("first_seen", 0), None),
        is_told(second, tokens, Expected("computing", limit), None),
        f"from token {num_before} on" in second["explanation"],
        is_in_header(answers[1], tokens, Expected("computing", limit)),
    )


def evicted(asking: ExplainClient, random: Random, tenant: str, num_blocks: int) -> None:
    """Cached, and then the whole pool was needed for others."""
    tokens = prompt_of(random, random.randint(9, 60))
    asking.ask(tenant, PROMPT_PATH, completion(tokens))
    left = num_blocks
    while left > 0:
        others = prompt_of(random, 200)
        asking.ask(tenant, PROMPT_PATH, completion(others))
        left -= len(others) // BLOCK_SIZE
    told = asking.ask(tenant, EXPLAIN_PATH, completion(tokens)).json
    is_recent = told["evicted_seconds_ago"] is not None and 0 <= told["evicted_seconds_ago"] < 600
    ran(asking, "evicted", tenant, tokens, Expected("evicted", 0))
    asking.judge("evicted_when", is_recent)


def state_missing(asking: ExplainClient, random: Random, tenant: str) -> None:
    """A model with recurrent layers keeps its state behind a prompt's last whole block. A prompt that ends before that
    has its blocks there and no state; once it has run, it has one too."""
    num_blocks = random.randint(3, 14)
    tokens = prompt_of(random, BLOCK_SIZE * num_blocks + random.randrange(1, BLOCK_SIZE))
    asking.ask(tenant, PROMPT_PATH, completion(tokens))
    num_shared = random.randint(1, num_blocks - 1)
    shorter = tokens[: BLOCK_SIZE * num_shared + random.randrange(1, BLOCK_SIZE)]
    ran(asking, "state_missing", tenant, shorter, Expected("state_missing", 0))
    ran(asking, "state_missing", tenant, shorter, Expected("too_short", BLOCK_SIZE * num_shared))


@section("explanations")
def explanations(proof: Proof) -> None:
    count = proof.sized(quick=84, full=1004)
    each, random = count // 8, proof.random
    num_left = count - 7 * each
    agents = talker(1 << 14, BLOCK_SIZE, template=AGENT_TEMPLATE, max_sequence_tokens=2048)
    models = {"oracle": agents, "other": talker(1 << 12, BLOCK_SIZE)}
    sums: list[ExplainClient] = []
    with asked(proof.folder, 8 * each + 8, models) as asking:
        tenants = (f"t{at}" for at in range(8 * each + 8))
        for case in ("date", "tools", "message"):
            for _ in range(each):
                diverged(asking, random, case, next(tenants))
        for _ in range(each):
            too_short(asking, random, next(tenants))
            of_another(asking, random, next(tenants), next(tenants))
            of_another_model(asking, random, next(tenants))
        sums.append(asking)
    bit_by_bit, runner = gated()
    with asked(proof.folder, each, {"oracle": bit_by_bit}) as asking:
        for at in range(each):
            computing(asking, runner, random, f"t{at}")
        sums.append(asking)
    with asked(proof.folder, each, {"oracle": talker(1 << 14, BLOCK_SIZE, num_slots=4 * each + 64)}) as asking:
        for at in range(each):
            state_missing(asking, random, f"t{at}")
        sums.append(asking)
    with asked(proof.folder, num_left, {"oracle": talker(64, BLOCK_SIZE)}) as asking:
        for at in range(num_left):
            evicted(asking, random, f"t{at}", 64)
        sums.append(asking)
    tried = {case: number for one in sums for case, number in one.num_tried.items() if case != "evicted_when"}
    right = {case: number for one in sums for case, number in one.num_right.items()}
    for case, number in tried.items():
        proof.report(f"explain_{case}_right", right[case] / number, note=f"of {number}")
    proof.report("explain_cases", sum(tried.values()))
    proof.equals("explain_evicted_when", right["evicted_when"] / num_left, 1.0)
    proof.equals("explain_correct", sum(right[case] for case in tried) / sum(tried.values()), 1.0)

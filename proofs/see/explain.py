"""Explanations of cache misses, each compared with that of a reference model (`explain_model`).

The routes are real, the models are oracles. Every miss is provoked for one reason. An explanation is correct if its
reason, counts, position, tokens and part are correct in the record of the request, in the answer's header and, where
asking changes nothing, in the answer of `/v1/cache/explain` just before.
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
    num_lost_tokens,
    render,
    tokens_of,
)
from proofs.see.explain_server import (
    CHUNK,
    EXPLAIN_PATH,
    PROMPT_PATH,
    ExplainClient,
    GatedRunner,
    ask_twice,
    completion,
    open_gated_model,
    prompt_of,
    serve,
    text,
)
from tests.support.servers.local_api import Reply
from tests.support.servers.talkers import AGENT_TEMPLATE, talker


def is_expected(record: dict[str, Any], tokens: Tokens, expected: Expected, part: Part) -> bool:
    """Whether a record or an explanation is as expected in all fields."""
    difference = record["difference"] or {}
    return bool(
        record["reason"] == expected.reason
        and record["prompt_tokens"] == len(tokens)
        and record["cached_tokens"] == expected.num_cached
        and record["lost_tokens"] == num_lost_tokens(len(tokens), expected.num_cached)
        and difference.get("position") == expected.position
        and difference.get("token_id") == expected.token_id
        and difference.get("cached_token_id") == expected.cached_token_id
        and record["part"] == part
    )


def is_in_header(answer: Reply, tokens: Tokens, expected: Expected) -> bool:
    position = "" if expected.position is None else f"; position={expected.position}"
    value = f"cached={expected.num_cached}; prompt={len(tokens)}; reason={expected.reason}{position}"
    return answer.headers.get("x-quire-cache") == value


# -- conversations -----------------------------------------------------------------------------------------------------


def conversation(random: Random, day: date) -> Conversation:
    names = random.sample(["find", "read", "paint", "list", "count", "fetch"], random.randint(2, 5))
    tools = tuple((name, text(random, random.randint(3, 9))) for name in names)
    system = f"{text(random, random.randint(3, 12))}. Today is {day:%A %d %B %Y}. {text(random, 8)}"
    turns = tuple((("user", "assistant")[number % 2], text(random, random.randint(4, 12))) for number in range(3))
    return Conversation(system, tools, turns)


def change_conversation(random: Random, case: str, before: Conversation, day: date) -> Conversation:
    """A copy of a conversation with another date, order of tools, or message."""
    if case == "date":
        new_day = day + timedelta(days=random.randint(1, 400))
        system = before.system.replace(f"{day:%A %d %B %Y}", f"{new_day:%A %d %B %Y}")
        return Conversation(system, before.tools, before.turns)
    if case == "tools":
        tools = list(before.tools)
        while tuple(tools) == before.tools:
            random.shuffle(tools)
        return Conversation(before.system, tuple(tools), before.turns)
    index = random.randrange(len(before.turns))
    turns = list(before.turns)
    turns[index] = (turns[index][0], f"{turns[index][1][: random.randint(1, 20)]} {text(random, 6)}")
    return Conversation(before.system, before.tools, tuple(turns))


def check_diverged(client: ExplainClient, random: Random, case: str, tenant: str) -> None:
    """Send a prompt that differs from an earlier one in its date, the order of its tools, or a message."""
    day = date(2026, 1, 1) + timedelta(days=random.randrange(365))
    path, make_body, first_turn = BODIES[random.randrange(len(BODIES))]
    while True:
        before = conversation(random, day)
        after = change_conversation(random, case, before, day)
        model, prompt = CacheModel(), render(after, first_turn)
        model.store(tokens_of(render(before, first_turn).text))
        tokens = tokens_of(prompt.text)
        expected = model.explain(tokens)
        if expected.position is not None:
            break
    stream = {"stream": random.random() < 0.5}
    client.ask(tenant, path, make_body(before) | stream)
    part = prompt.part_at(expected.position)
    checks = []
    if path == BODIES[0][0]:
        explanation = client.ask(tenant, EXPLAIN_PATH, make_body(after)).json
        checks.append(is_expected(explanation, tokens, expected, part))
    answer = client.ask(tenant, path, make_body(after) | stream)
    checks.append(is_in_header(answer, tokens, expected))
    client.judge(case, *checks, is_expected(client.record(tenant, answer), tokens, expected, part))


# -- prompts of tokens -------------------------------------------------------------------------------------------------


def check_run(client: ExplainClient, case: str, tenant: str, tokens: Tokens, expected: Expected) -> None:
    """Ask for an explanation, then run the prompt: both must be as expected."""
    explanation = client.ask(tenant, EXPLAIN_PATH, completion(tokens)).json
    answer = client.ask(tenant, PROMPT_PATH, completion(tokens))
    record = client.record(tenant, answer)
    client.judge(
        case,
        is_expected(explanation, tokens, expected, None),
        is_expected(record, tokens, expected, None),
        is_in_header(answer, tokens, expected),
    )


def check_too_short(client: ExplainClient, random: Random, tenant: str) -> None:
    """Run a prompt twice: all blocks are cached, but its last tokens are too few to reuse their block."""
    tokens = prompt_of(random, BLOCK_SIZE * random.randint(2, 12) + random.choice((0, 0, 1, 2, 3)))
    client.ask(tenant, PROMPT_PATH, completion(tokens))
    model = CacheModel()
    model.store(tokens)
    check_run(client, "too_short", tenant, tokens, model.explain(tokens))


def check_other_tenant(client: ExplainClient, random: Random, tenant: str, other: str) -> None:
    """Run a prompt that only another tenant has run: for this tenant it is `first_seen`."""
    tokens = prompt_of(random, random.randint(9, 60))
    client.ask(other, PROMPT_PATH, completion(tokens))
    check_run(client, "another_tenant", tenant, tokens, Expected("first_seen", 0))


def check_other_model(client: ExplainClient, random: Random, tenant: str) -> None:
    """Explain a prompt that is cached for another model; no request runs, since it would search only its own model."""
    tokens = prompt_of(random, random.randint(9, 60))
    client.ask(tenant, PROMPT_PATH, completion(tokens, model="other"))
    explanation = client.ask(tenant, EXPLAIN_PATH, completion(tokens)).json
    is_named = (explanation["differs"], explanation["other_model"]) == (["model"], "other")
    client.judge("other_namespace", is_named, is_expected(explanation, tokens, Expected("other_namespace", 0), None))


def check_computing(client: ExplainClient, runner: GatedRunner, random: Random, tenant: str) -> None:
    """Send a prompt that is being computed: the second request waits for its blocks, and finds them."""
    # The second is scheduled when the first leaves it a block of the step's budget: in the first one's last step.
    num_before = CHUNK * random.randint(1, 3)
    tokens = prompt_of(random, num_before + random.randint(2 * BLOCK_SIZE + 1, CHUNK - BLOCK_SIZE))
    answers = ask_twice(client, runner, tokens, (tenant, tenant))
    first, second = (client.record(tenant, answer) for answer in answers)
    limit = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    client.judge(
        "computing",
        is_expected(first, tokens, Expected("first_seen", 0), None),
        is_expected(second, tokens, Expected("computing", limit), None),
        f"from token {num_before} on" in second["explanation"],
        is_in_header(answers[1], tokens, Expected("computing", limit)),
    )


def check_evicted(client: ExplainClient, random: Random, tenant: str, num_blocks: int) -> None:
    """Run a prompt whose blocks were evicted, because other prompts needed the whole pool."""
    tokens = prompt_of(random, random.randint(9, 60))
    client.ask(tenant, PROMPT_PATH, completion(tokens))
    num_remaining = num_blocks
    while num_remaining > 0:
        filler = prompt_of(random, 200)
        client.ask(tenant, PROMPT_PATH, completion(filler))
        num_remaining -= len(filler) // BLOCK_SIZE
    explanation = client.ask(tenant, EXPLAIN_PATH, completion(tokens)).json
    is_recent = explanation["evicted_seconds_ago"] is not None and 0 <= explanation["evicted_seconds_ago"] < 600
    check_run(client, "evicted", tenant, tokens, Expected("evicted", 0))
    client.judge("evicted_when", is_recent)


def check_state_missing(client: ExplainClient, random: Random, tenant: str) -> None:
    """A model with recurrent layers stores its state after a prompt's last whole block. A shorter prompt finds blocks
    but no state; once it has run, its state is stored too."""
    num_blocks = random.randint(3, 14)
    tokens = prompt_of(random, BLOCK_SIZE * num_blocks + random.randrange(1, BLOCK_SIZE))
    client.ask(tenant, PROMPT_PATH, completion(tokens))
    num_shared = random.randint(1, num_blocks - 1)
    shorter = tokens[: BLOCK_SIZE * num_shared + random.randrange(1, BLOCK_SIZE)]
    check_run(client, "state_missing", tenant, shorter, Expected("state_missing", 0))
    check_run(client, "state_missing", tenant, shorter, Expected("too_short", BLOCK_SIZE * num_shared))


@section("explanations")
def explanations(proof: Proof) -> None:
    count = proof.sized(quick=84, full=1004)
    num_each, random = count // 8, proof.random
    num_evicted = count - 7 * num_each
    agent_model = talker(1 << 14, BLOCK_SIZE, template=AGENT_TEMPLATE, max_sequence_tokens=2048)
    models = {"oracle": agent_model, "other": talker(1 << 12, BLOCK_SIZE)}
    clients: list[ExplainClient] = []
    with serve(proof.folder, 8 * num_each + 8, models) as client:
        tenants = (f"t{number}" for number in range(8 * num_each + 8))
        for case in ("date", "tools", "message"):
            for _ in range(num_each):
                check_diverged(client, random, case, next(tenants))
        for _ in range(num_each):
            check_too_short(client, random, next(tenants))
            check_other_tenant(client, random, next(tenants), next(tenants))
            check_other_model(client, random, next(tenants))
        clients.append(client)
    gated_model, runner = open_gated_model()
    with serve(proof.folder, num_each, {"oracle": gated_model}) as client:
        for number in range(num_each):
            check_computing(client, runner, random, f"t{number}")
        clients.append(client)
    with serve(proof.folder, num_each, {"oracle": talker(1 << 14, BLOCK_SIZE, num_slots=4 * num_each + 64)}) as client:
        for number in range(num_each):
            check_state_missing(client, random, f"t{number}")
        clients.append(client)
    with serve(proof.folder, num_evicted, {"oracle": talker(64, BLOCK_SIZE)}) as client:
        for number in range(num_evicted):
            check_evicted(client, random, f"t{number}", 64)
        clients.append(client)
    tried = {case: number for client in clients for case, number in client.num_tried.items() if case != "evicted_when"}
    correct = {case: number for client in clients for case, number in client.num_correct.items()}
    for case, number in tried.items():
        proof.report(f"explain_{case}_right", correct[case] / number, note=f"of {number}")
    proof.report("explain_cases", sum(tried.values()))
    proof.equals("explain_evicted_when", correct["evicted_when"] / num_evicted, 1.0)
    proof.equals("explain_correct", sum(correct[case] for case in tried) / sum(tried.values()), 1.0)

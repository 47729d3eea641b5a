"""A tenant learns nothing of another tenant from explanations, headers, records, usage and metrics.

An attacker knows how the victim's prompts begin, and the ids of its requests, and sends the same 2,000 requests to a
server that the victim has used, and to one that it has not. Both must answer alike, byte for byte, but for ids and
dates; and no answer may have a word that only the victim's prompts have.
"""

import re
from random import Random
from typing import Any

from proofs.framework.proof import Proof, section
from proofs.see.explain_model import BLOCK_SIZE, tokens_of
from proofs.see.explain_server import (
    EXPLAIN_PATH,
    PROMPT_PATH,
    WORDS,
    ExplainClient,
    ask_twice,
    key_of,
    open_gated_model,
    prompt_of,
    serve,
    text,
)
from tests.support.servers.local_api import Reply
from tests.support.servers.talkers import talker

CHANGING = re.compile(rb"(chatcmpl|cmpl|resp|msg|req)[-_][0-9a-f]{8,}|\"(created|created_at|seconds_ago)\":[0-9.]+")
SECRETS = ("zebra", "quartz", "velvet", "oxygen")
"""Words that only the victim's prompts have."""


def secret_prompt(random: Random) -> str:
    beginning = f"{text(random, 6)} {random.choice(SECRETS)} {text(random, random.randint(4, 20))}"
    return f"{beginning} {random.choice(SECRETS)} {text(random, 4)}"


def comparable(answer: Reply) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers and body of an answer, without the ids and dates that differ every time."""
    changing = ("date", "x-request-id", "content-length")
    headers = sorted((name, value) for name, value in answer.headers.items() if name.lower() not in changing)
    return answer.status, headers, CHANGING.sub(b"", answer.data)


def attack(random: Random, prompts: list[str], ids: list[str]) -> tuple[str, str, dict[str, Any] | None]:
    """A request of the attacker, made from the beginnings of the victim's prompts and the ids of its requests."""
    guess = random.choice(prompts)
    guess = guess[: min(guess.find(word) for word in SECRETS if word in guess)]
    guess += random.choice(("", text(random, 3), random.choice(WORDS)))
    tokens = list(tokens_of(guess))[: random.randint(6, 60)] or [9, 10]
    prompt = random.choice((guess, tokens))
    group = random.choice(("tenant:t0", "t0", "tenant:t0/salt:", "\u0000", "*"))
    extra: dict[str, Any] = random.choice(
        (
            {},
            {"cache_salt": group},
            {"cache_group": "tenant:t0"},
            {"user": "t0", "tenant": "t0"},
            {"metadata": {"tenant": "t0"}},
        )
    )
    body = {"model": "oracle", "prompt": prompt, "max_tokens": 2, "temperature": 0.0, "seed": 1, **extra}
    # Two prompts without a common prefix: whether one waits for the other would depend on timing.
    two_prompts = [prompt, "~~~~ ~~~~ ~~~~"] if isinstance(prompt, str) else [prompt, [300, 301, 302, 303, 304, 305]]
    # One token, because the number of tokens in a chunk depends on timing.
    usage = {"stream": True, "max_tokens": 1, "stream_options": {"include_usage": True}}
    turns = [{"role": "user", "content": guess}]
    kinds: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", EXPLAIN_PATH, body),
        ("POST", PROMPT_PATH, {**body, "cache_explain": True}),
        (
            "POST",
            PROMPT_PATH,
            {**body, "cache_explain": True, **usage},
        ),
        ("POST", PROMPT_PATH, {**body, "prompt": two_prompts, "cache_explain": True}),
        ("POST", PROMPT_PATH, {**body, "prompt_logprobs": 1}),
        ("POST", "/v1/chat/completions", chat_of(guess, extra)),
        (
            "POST",
            "/v1/messages",
            {"model": "oracle", "max_tokens": 2, "temperature": 0.0, "messages": turns},
        ),
        ("POST", "/v1/responses", {"model": "oracle", "max_output_tokens": 2, "temperature": 0.0, "input": guess}),
        ("GET", f"/v1/requests/{random.choice(ids)}/cache", None),
        ("GET", f"/v1/requests/{random.choice(ids)[:-1]}/cache", None),
        ("GET", f"/v1/responses/{random.choice(ids)}", None),
    ]
    return random.choice(kinds)


def chat_of(text: str, more: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "oracle", "messages": messages, "max_tokens": 2, "temperature": 0.0, "cache_explain": True, **more}


def run_victim(client: ExplainClient, prompts: list[str]) -> list[str]:
    """Send the victim's prompts; returns all ids of these requests."""
    answers = [client.ask("t0", PROMPT_PATH, {"prompt": prompt, "max_tokens": 2}) for prompt in prompts]
    return [name for answer in answers for name in (answer.headers["x-request-id"], answer.json["id"])]


@section("strangers")
def strangers(proof: Proof) -> None:
    count, random = proof.sized(quick=240, full=2000), proof.random
    prompts = [secret_prompt(random) for _ in range(40)]
    tries, num_leaks, num_own = list[tuple[str, str, dict[str, Any] | None]](), 0, 0
    answers: list[list[tuple[int, list[tuple[str, str]], bytes]]] = []
    for has_victim in (True, False):
        with serve(proof.folder, 3, {"oracle": talker(1 << 14, BLOCK_SIZE)}) as client:
            if has_victim:
                ids = run_victim(client, prompts)
                tries = [attack(random, prompts, ids) for _ in range(count)]
            replies = list[tuple[int, list[tuple[str, str]], bytes]]()
            for method, path, body in tries:
                answer = client.server.request(method, path, body, x_api_key=key_of("t1"), x_tenant="t0")
                replies.append(comparable(answer))
                num_leaks += any(word.encode() in answer.data for word in SECRETS)
                num_leaks += any(word in str(answer.headers) for word in SECRETS)
            metrics = client.server.get("/metrics", x_api_key=key_of("t1")).data.decode()
            num_leaks += sum(word in metrics for word in (*SECRETS, "t0", *(prompt[:12] for prompt in prompts)))
            answers.append(replies)
            if has_victim:
                num_own = sum(_shows_secret(client, prompt) for prompt in prompts)
    with_victim, without_victim = answers
    num_differing = sum(a != b for a, b in zip(with_victim, without_victim, strict=True))
    num_concurrent = _num_concurrent_leaks(proof, proof.sized(quick=10, full=60))
    proof.at_least("victims_that_see_their_own", num_own, 1, note="a control: secrets are visible to their owner")
    proof.report("leak_tries", count + proof.sized(quick=10, full=60))
    proof.report("leak_tries_answered", sum(status == 200 for status, _, _ in without_victim))
    proof.equals("answers_that_differ_by_a_stranger", num_differing, 0)
    proof.equals("leaks", num_leaks + num_differing + num_concurrent, 0)


def _shows_secret(client: ExplainClient, prompt: str) -> bool:
    """Whether the victim, with a request like the attacker's, gets one of its own secret words."""
    start = min(prompt.find(word) for word in SECRETS if word in prompt)
    body = {"prompt": f"{prompt[:start]}other {WORDS[0]} {WORDS[1]} {WORDS[2]}"}
    difference = client.ask("t0", EXPLAIN_PATH, body).json["difference"]
    return difference is not None and any(word[:2] in difference["cached_after"] for word in SECRETS)


def _num_concurrent_leaks(proof: Proof, count: int) -> int:
    """Send a prompt of one tenant that another tenant's request is computing; returns how many answers reveal that."""
    model, runner = open_gated_model()
    with serve(proof.folder, 2 * count, {"oracle": model}) as client:
        answers = [
            ask_twice(client, runner, prompt_of(proof.random, 70), (f"t{2 * i}", f"t{2 * i + 1}")) for i in range(count)
        ]
    expected = "cached=0; prompt=70; reason=first_seen"
    return sum(second.headers["x-quire-cache"] != expected for _, second in answers)

"""What one tenant learns of another: nothing, whatever is asked of explanations, headers, records, usage and metrics.

The same 2,000 requests of an attacker, who knows how the victim's prompts begin and what its requests are called, go to
a server where the victim was and to one where it never was. Both must answer alike, byte for byte, but for ids and
dates; and no word that only the victim says may come back.
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
    asked,
    gated,
    key_of,
    met,
    prompt_of,
    text,
)
from tests.support.servers.local_api import Reply
from tests.support.servers.talkers import talker

ANY_NAME = re.compile(rb"(chatcmpl|cmpl|resp|msg|req)[-_][0-9a-f]{8,}|\"(created|created_at|seconds_ago)\":[0-9.]+")
SECRETS = ("zebra", "quartz", "velvet", "oxygen")
"""Words of the victim's that nobody else ever says."""


def secret_prompt(random: Random) -> str:
    said = f"{text(random, 6)} {random.choice(SECRETS)} {text(random, random.randint(4, 20))}"
    return f"{said} {random.choice(SECRETS)} {text(random, 4)}"


def seen(answer: Reply) -> tuple[int, list[tuple[str, str]], bytes]:
    """What a client sees, without names and dates that are new every time."""
    changing = ("date", "x-request-id", "content-length")
    headers = sorted((name, value) for name, value in answer.headers.items() if name.lower() not in changing)
    return answer.status, headers, ANY_NAME.sub(b"", answer.data)


def attack(random: Random, prompts: list[str], names: list[str]) -> tuple[str, str, dict[str, Any] | None]:
    """A request of somebody who knows how the victim's prompts begin, and the names of the victim's requests."""
    guess = random.choice(prompts)
    guess = guess[: min(guess.find(word) for word in SECRETS if word in guess)]
    guess += random.choice(("", text(random, 3), random.choice(WORDS)))
    tokens = list(tokens_of(guess))[: random.randint(6, 60)] or [9, 10]
    told = random.choice((guess, tokens))
    group = random.choice(("tenant:t0", "t0", "tenant:t0/salt:", "\u0000", "*"))
    more: dict[str, Any] = random.choice(
        (
            {},
            {"cache_salt": group},
            {"cache_group": "tenant:t0"},
            {"user": "t0", "tenant": "t0"},
            {"metadata": {"tenant": "t0"}},
        )
    )
    body = {"model": "oracle", "prompt": told, "max_tokens": 2, "temperature": 0.0, "seed": 1, **more}
    # Two that have nothing in common: whether one waits for the other is a matter of time, too.
    both = [told, "~~~~ ~~~~ ~~~~"] if isinstance(told, str) else [told, [300, 301, 302, 303, 304, 305]]
    # One token: how many come with one chunk is a matter of time.
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
        ("POST", PROMPT_PATH, {**body, "prompt": both, "cache_explain": True}),
        ("POST", PROMPT_PATH, {**body, "prompt_logprobs": 1}),
        ("POST", "/v1/chat/completions", chat_of(guess, more)),
        (
            "POST",
            "/v1/messages",
            {"model": "oracle", "max_tokens": 2, "temperature": 0.0, "messages": turns},
        ),
        ("POST", "/v1/responses", {"model": "oracle", "max_output_tokens": 2, "temperature": 0.0, "input": guess}),
        ("GET", f"/v1/requests/{random.choice(names)}/cache", None),
        ("GET", f"/v1/requests/{random.choice(names)[:-1]}/cache", None),
        ("GET", f"/v1/responses/{random.choice(names)}", None),
    ]
    return random.choice(kinds)


def chat_of(said: str, more: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": said}]
    return {"model": "oracle", "messages": messages, "max_tokens": 2, "temperature": 0.0, "cache_explain": True, **more}


def victims_names(asking: ExplainClient, prompts: list[str]) -> list[str]:
    """The victim's requests, by all names they have."""
    answers = [asking.ask("t0", PROMPT_PATH, {"prompt": one, "max_tokens": 2}) for one in prompts]
    return [name for one in answers for name in (one.headers["x-request-id"], one.json["id"])]


@section("strangers")
def strangers(proof: Proof) -> None:
    count, random = proof.sized(quick=240, full=2000), proof.random
    prompts = [secret_prompt(random) for _ in range(40)]
    tries, num_leaks, num_own = list[tuple[str, str, dict[str, Any] | None]](), 0, 0
    answers: list[list[tuple[int, list[tuple[str, str]], bytes]]] = []
    for is_there in (True, False):
        with asked(proof.folder, 3, {"oracle": talker(1 << 14, BLOCK_SIZE)}) as asking:
            if is_there:
                names = victims_names(asking, prompts)
                tries = [attack(random, prompts, names) for _ in range(count)]
            heard = list[tuple[int, list[tuple[str, str]], bytes]]()
            for method, path, body in tries:
                answer = asking.here.request(method, path, body, x_api_key=key_of("t1"), x_tenant="t0")
                heard.append(seen(answer))
                num_leaks += any(word.encode() in answer.data for word in SECRETS)
                num_leaks += any(word in str(answer.headers) for word in SECRETS)
            page = asking.here.get("/metrics", x_api_key=key_of("t1")).data.decode()
            num_leaks += sum(word in page for word in (*SECRETS, "t0", *(prompt[:12] for prompt in prompts)))
            answers.append(heard)
            if is_there:
                num_own = sum(_shows_secret(asking, prompt) for prompt in prompts)
    with_victim, alone = answers
    num_differing = sum(one != other for one, other in zip(with_victim, alone, strict=True))
    num_met = _met_while_computed(proof, proof.sized(quick=10, full=60))
    proof.at_least("victims_that_see_their_own", num_own, 1, note="else nothing here could be seen")
    proof.report("leak_tries", count + proof.sized(quick=10, full=60))
    proof.report("leak_tries_answered", sum(one[0] == 200 for one in alone))
    proof.equals("answers_that_differ_by_a_stranger", num_differing, 0)
    proof.equals("leaks", num_leaks + num_differing + num_met, 0)


def _shows_secret(asking: ExplainClient, prompt: str) -> bool:
    """Whether the victim, who asks as the attacker does, reads its own word."""
    start = min(prompt.find(word) for word in SECRETS if word in prompt)
    body = {"prompt": f"{prompt[:start]}other {WORDS[0]} {WORDS[1]} {WORDS[2]}"}
    told = asking.ask("t0", EXPLAIN_PATH, body).json["difference"]
    return told is not None and any(word[:2] in told["cached_after"] for word in SECRETS)


def _met_while_computed(proof: Proof, count: int) -> int:
    """A stranger asks the very prompt that is being computed, and must not be told so."""
    opened, runner = gated()
    with asked(proof.folder, 2 * count, {"oracle": opened}) as asking:
        found = [
            met(asking, runner, prompt_of(proof.random, 70), (f"t{2 * at}", f"t{2 * at + 1}")) for at in range(count)
        ]
    wanted = "cached=0; prompt=70; reason=first_seen"
    return sum(second.headers["x-quire-cache"] != wanted for _, second in found)

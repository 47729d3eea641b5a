"""The prefix guard of a real server: it warns of unstable prefixes (a date, a random id), does not warn of stable ones,
and, where it removes such lines, as many prompt tokens are found in the cache as without them.

The corpus of `tests/data/prefix_corpus.json` is sent over HTTP in three dialects, each case with a key of its own, to
oracle models with a small tokenizer and a ChatML template.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.client.request.conversation import StablePrefix
from tests.support.fleet.prefix_corpus import Body, corpus, stable_bodies, unstable_bodies, without_unstable_line
from tests.support.servers.guarded_prompts import TEMPLATES
from tests.support.servers.local_api import LiveServer, Reply, house
from tests.support.servers.talkers import talker

MODELS = {"": "oracle", "tools last": "oracle-tools-last"}
SIZES = {"max_sequence_tokens": 16_384, "num_blocks": 16_384, "block_size": 16, "max_step_tokens": 2048}
HEADER = "x-quire-prefix-warning"


logging.getLogger("quire.prefix").setLevel(logging.ERROR)  # it would print a warning for each case


def serve(keys: Path, lines: Sequence[str] = ()) -> AbstractContextManager[LiveServer]:
    """Run a server of both models; `lines` is the operator's list of unstable lines to remove."""
    models = {
        name: talker(template=TEMPLATES[template], max_bytes=100_000, **SIZES) for template, name in MODELS.items()
    }
    return house(models=models, keys_file=keys, settings=AdmissionSettings(stable_prefix=StablePrefix(lines)))


def ask(server: LiveServer, key: str, body: Body, case: dict[str, Any]) -> Reply:
    """Send one request in the case's dialect. A case with a `history` is made to get that history's answer."""
    model = MODELS[case.get("template", "")]
    match case.get("dialect", "chat"):
        case "messages":
            return _checked(server.post("/v1/messages", _as_messages(body) | {"model": model}, x_api_key=key))
        case "responses":
            return _checked(server.post("/v1/responses", _as_items(body) | {"model": model}, x_api_key=key))
    fields: dict[str, Any] = {"model": model, "messages": list(body.messages), "max_tokens": 1}
    if body.tools:
        fields["tools"] = list(body.tools)
    if body.answer is not None and case.get("history"):
        fields |= {"structured_outputs": {"choice": [body.answer["content"]]}, "max_tokens": 1000}
    return _checked(server.post("/v1/chat/completions", fields, x_api_key=key))


def _checked(reply: Reply) -> Reply:
    if reply.status != 200:
        raise RuntimeError(f"an answer was {reply.status}: {reply.data[:300]!r}")
    return reply


def _as_messages(body: Body) -> dict[str, Any]:
    system = [{"type": "text", "text": message["content"]} for message in body.messages if message["role"] == "system"]
    messages = [message for message in body.messages if message["role"] != "system"]
    tools = [
        {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
        for function in (tool["function"] for tool in body.tools)
    ]
    fields: dict[str, Any] = {"system": system, "messages": messages, "max_tokens": 1}
    return fields | ({"tools": tools} if tools else {})


def _as_items(body: Body) -> dict[str, Any]:
    items = [
        {"type": "message", "role": message["role"].replace("system", "developer"), "content": message["content"]}
        for message in body.messages
    ]
    tools = [{"type": "function", **tool["function"]} for tool in body.tools]
    return {"input": items, "max_output_tokens": 1} | ({"tools": tools} if tools else {})


def num_cached(reply: Reply) -> int:
    """The number of prompt tokens that were found in the cache."""
    usage = reply.json["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


@section("unstable prefixes")
def unstable(proof: Proof) -> None:
    """Send every kind of unstable prefix with its own key: a warning is listed, and is in a header of an answer."""
    cases, seeds = corpus("unstable"), range(proof.sized(quick=1, full=3))
    keys = proof.folder / "unstable.json"
    secrets = {(index, seed): add_key(keys, f"u{index}-{seed}") for index in range(len(cases)) for seed in seeds}
    num_found = num_in_headers = 0
    with serve(keys) as server:
        for (index, seed), key in secrets.items():
            case = cases[index]
            replies = [ask(server, key, body, case) for body in unstable_bodies(case, seed)]
            warnings = server.get("/v1/cache/warnings", x_api_key=key).json["data"]
            kinds = [warning["kind"] for warning in warnings]
            num_in_headers += any(HEADER in reply.headers for reply in replies)
            num_found += case["kind"] in kinds
            if case["kind"] not in kinds:
                say(f"    not found: {case['name']} ({case['kind']}), warnings: {kinds}")
    proof.at_least("guard_found", num_found / len(secrets), 1.0, f"of {len(cases)} kinds, {len(seeds)} of each")
    proof.at_least("guard_told", num_in_headers / len(secrets), 1.0, "in a header of an answer")


@section("stable conversations")
def stable(proof: Proof) -> None:
    """Send stable conversations of every kind with several keys: no warning comes."""
    cases, num_keys = corpus("stable"), proof.sized(quick=2, full=8)
    keys = proof.folder / "stable.json"
    secrets = [add_key(keys, f"s{number}") for number in range(num_keys)]
    num_headers = num_warnings = num_requests = 0
    with serve(keys) as server:
        for number, key in enumerate(secrets):
            for case in cases:
                replies = [ask(server, key, body, case) for body in stable_bodies(case, number)]
                num_requests += len(replies)
                headers = [reply.headers[HEADER] for reply in replies if HEADER in reply.headers]
                num_headers += len(headers)
                if headers:
                    say(f"    warned: {case['name']}: {headers[0]}")
            num_warnings += len(server.get("/v1/cache/warnings", x_api_key=key).json["data"])
    proof.report("stable_conversations", num_keys * len(cases), f"of {num_requests} requests")
    proof.equals("false_alarms", max(num_headers, num_warnings), 0)


@section("lines taken out")
def taken_out(proof: Proof) -> None:
    """Compare cached tokens: with unstable lines, with lines that the server removes, and without such lines."""
    cases = [case for case in corpus("unstable") if "fix" in case]
    lines = sorted({case["fix"] for case in cases})
    unchanged, removed, ideal = [
        _cached_tokens(proof, name, cases, listed, is_ideal=is_ideal)
        for name, listed, is_ideal in (("kept", (), False), ("taken", lines, False), ("ideal", (), True))
    ]
    ratios = [removed_count / ideal_count for removed_count, ideal_count in zip(removed, ideal, strict=True)]
    proof.report("reuse_as_it_is", sum(unchanged) / sum(ideal), "of the ideal")
    proof.at_least("guard_reuse", sum(removed) / sum(ideal), 0.95, f"of {sum(ideal):,} tokens, {len(cases)} kinds")
    proof.at_least("guard_reuse_worst", min(ratios), 0.95, cases[ratios.index(min(ratios))]["name"])


def _cached_tokens(
    proof: Proof, name: str, cases: Sequence[dict[str, Any]], lines: Sequence[str], *, is_ideal: bool
) -> list[int]:
    """The number of cached tokens of each case's requests."""
    keys = proof.folder / f"{name}.json"
    secrets = [add_key(keys, f"c{number}") for number in range(len(cases))]
    counts = list[int]()
    with serve(keys, lines) as server:
        for case, key in zip(cases, secrets, strict=True):
            bodies = unstable_bodies(case)
            requests = [without_unstable_line(case, body) for body in bodies] if is_ideal else bodies
            counts.append(sum(num_cached(ask(server, key, body, case)) for body in requests))
    return counts

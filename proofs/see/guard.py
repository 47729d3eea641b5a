"""The prefix guard beside a real server: unstable prefixes are found, stable conversations are left alone, and with the
lines taken out the cache finds what it would have found without them.

The corpus of `tests/data/prefix_corpus.json` is sent over HTTP in three dialects, each case with a key of its own, to
oracles behind a small tokenizer and a ChatML template.
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


logging.getLogger("quire.prefix").setLevel(logging.ERROR)  # what it says of each case would fill the page


def server(keys: Path, listed: Sequence[str] = ()) -> AbstractContextManager[LiveServer]:
    """Both models, with what the operator lists."""
    models = {
        name: talker(template=TEMPLATES[template], max_bytes=100_000, **SIZES) for template, name in MODELS.items()
    }
    return house(models=models, keys_file=keys, settings=AdmissionSettings(stable_prefix=StablePrefix(listed)))


def ask(here: LiveServer, key: str, body: Body, case: dict[str, Any]) -> Reply:
    """One request in the case's dialect. Where a history is told anew it gets the answer that its client will tell."""
    model = MODELS[case.get("template", "")]
    match case.get("dialect", "chat"):
        case "messages":
            return _checked(here.post("/v1/messages", _as_messages(body) | {"model": model}, x_api_key=key))
        case "responses":
            return _checked(here.post("/v1/responses", _as_items(body) | {"model": model}, x_api_key=key))
    told: dict[str, Any] = {"model": model, "messages": list(body.messages), "max_tokens": 1}
    if body.tools:
        told["tools"] = list(body.tools)
    if body.answer is not None and case.get("history"):
        told |= {"structured_outputs": {"choice": [body.answer["content"]]}, "max_tokens": 1000}
    return _checked(here.post("/v1/chat/completions", told, x_api_key=key))


def _checked(reply: Reply) -> Reply:
    if reply.status != 200:
        raise RuntimeError(f"an answer was {reply.status}: {reply.data[:300]!r}")
    return reply


def _as_messages(body: Body) -> dict[str, Any]:
    system = [{"type": "text", "text": one["content"]} for one in body.messages if one["role"] == "system"]
    said = [one for one in body.messages if one["role"] != "system"]
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in (tool["function"] for tool in body.tools)
    ]
    told: dict[str, Any] = {"system": system, "messages": said, "max_tokens": 1}
    return told | ({"tools": tools} if tools else {})


def _as_items(body: Body) -> dict[str, Any]:
    items = [
        {"type": "message", "role": one["role"].replace("system", "developer"), "content": one["content"]}
        for one in body.messages
    ]
    tools = [{"type": "function", **tool["function"]} for tool in body.tools]
    return {"input": items, "max_output_tokens": 1} | ({"tools": tools} if tools else {})


def num_cached(reply: Reply) -> int:
    """Prompt tokens that were found."""
    usage = reply.json["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


@section("unstable prefixes")
def unstable(proof: Proof) -> None:
    """Every kind, by its own key: its warning is there, and the last answers carry it."""
    cases, seeds = corpus("unstable"), range(proof.sized(quick=1, full=3))
    keys = proof.folder / "unstable.json"
    secrets = {(at, seed): add_key(keys, f"u{at}-{seed}") for at in range(len(cases)) for seed in seeds}
    num_found = num_told = 0
    with server(keys) as here:
        for (at, seed), key in secrets.items():
            case = cases[at]
            replies = [ask(here, key, body, case) for body in unstable_bodies(case, seed)]
            found = here.get("/v1/cache/warnings", x_api_key=key).json["data"]
            kinds = [one["kind"] for one in found]
            num_told += any(HEADER in reply.headers for reply in replies)
            num_found += case["kind"] in kinds
            if case["kind"] not in kinds:
                say(f"    not found: {case['name']} ({case['kind']}), warned of {kinds}")
    proof.at_least("guard_found", num_found / len(secrets), 1.0, f"of {len(cases)} kinds, {len(seeds)} of each")
    proof.at_least("guard_told", num_told / len(secrets), 1.0, "in a header of an answer")


@section("stable conversations")
def stable(proof: Proof) -> None:
    """Several keys, each with conversations of every kind one after the other."""
    cases, num_keys = corpus("stable"), proof.sized(quick=2, full=8)
    keys = proof.folder / "stable.json"
    secrets = [add_key(keys, f"s{number}") for number in range(num_keys)]
    num_headers = num_warnings = num_requests = 0
    with server(keys) as here:
        for number, key in enumerate(secrets):
            for case in cases:
                replies = [ask(here, key, body, case) for body in stable_bodies(case, number)]
                num_requests += len(replies)
                told = [reply.headers[HEADER] for reply in replies if HEADER in reply.headers]
                num_headers += len(told)
                if told:
                    say(f"    warned: {case['name']}: {told[0]}")
            num_warnings += len(here.get("/v1/cache/warnings", x_api_key=key).json["data"])
    proof.report("stable_conversations", num_keys * len(cases), f"of {num_requests} requests")
    proof.equals("false_alarms", max(num_headers, num_warnings), 0)


@section("lines taken out")
def taken_out(proof: Proof) -> None:
    """What is found of each kind that has such a line: as it is, with the lines taken out, and without them."""
    cases = [case for case in corpus("unstable") if "fix" in case]
    listed = sorted({case["fix"] for case in cases})
    kept, found, ideal = [
        _num_found(proof, name, cases, lines, is_ideal=is_ideal)
        for name, lines, is_ideal in (("kept", (), False), ("taken", listed, False), ("ideal", (), True))
    ]
    ratios = [some / all_of_it for some, all_of_it in zip(found, ideal, strict=True)]
    proof.report("reuse_as_it_is", sum(kept) / sum(ideal), "of the ideal")
    proof.at_least("guard_reuse", sum(found) / sum(ideal), 0.95, f"of {sum(ideal):,} tokens, {len(cases)} kinds")
    proof.at_least("guard_reuse_worst", min(ratios), 0.95, cases[ratios.index(min(ratios))]["name"])


def _num_found(
    proof: Proof, name: str, cases: Sequence[dict[str, Any]], listed: Sequence[str], *, is_ideal: bool
) -> list[int]:
    """Tokens that each case's requests find."""
    keys = proof.folder / f"{name}.json"
    secrets = [add_key(keys, f"c{number}") for number in range(len(cases))]
    found = list[int]()
    with server(keys, listed) as here:
        for case, key in zip(cases, secrets, strict=True):
            bodies = unstable_bodies(case)
            sent = [without_unstable_line(case, body) for body in bodies] if is_ideal else bodies
            found.append(sum(num_cached(ask(here, key, body, case)) for body in sent))
    return found

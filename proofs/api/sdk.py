"""The official SDKs, in Python and in JavaScript, with chats and completions of several answers, cut by a stop string.

A stop string is taken from the middle of an answer that was made without it, so that it is known to come; then the
answer must end before it. Refusals (401, 429, 503) are provoked at a server with room for one request. All APIs and
tools: `proofs/agents/sdk.py`.
"""

from typing import Any

from proofs.api.load import serve_words, started
from proofs.api.sdk_environments import Cases, cases_of, commands
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key


@section("sdk")
def sdk(proof: Proof) -> None:
    """Run half of the cases in each language; at full scale, a tenth of them with the real model."""
    count = proof.sized(quick=60, full=1000)
    num_real = count // 10 if proof.is_full else 0
    servers = [_run_at_server(proof, ("oracle", count - num_real))]
    if num_real:
        servers.append(_run_at_server(proof, ("m", num_real), *serve_words(), module="quire serve"))
    refusals = _refusals(proof)
    results = [*(cases for group in servers for cases in group.values()), *refusals.values()]
    num_js = sum(group["javascript"].count for group in (*servers, refusals))
    num_stops = [sum(cases.num_stops for cases in group.values()) for group in servers]
    proof.at_least("sdk_cases", sum(cases.count for cases in results), count)
    proof.at_least("sdk_js_cases", num_js, 0.4 * count)
    proof.at_least("sdk_real_cases", num_real, proof.sized(quick=0, full=100))
    proof.at_least("sdk_stop_cases", min(num_stops), 1, "at each server")
    proof.equals("sdk_refusals", sum(cases.num_refused for cases in refusals.values()), 6, "401, 429, 503 in each")
    proof.none("sdk_wrong", [line for cases in results for line in cases.wrong])


def _run_at_server(proof: Proof, job: tuple[str, int], *arguments: str, **options: Any) -> dict[str, Cases]:
    model, count = job
    fields = {"kinds": "completions", "key": "none", "model": model, "num_cases": -(-count // 2)}
    with started(proof.folder, *arguments, **options) as server:
        return {
            name: cases_of(server, command, {**fields, "seed": proof.random.getrandbits(30)})
            for name, command in commands(proof.folder).items()
        }


def _refusals(proof: Proof) -> dict[str, Cases]:
    """Provoke 503, 429 and 401 at a server with room for one request: each must be an error class of the SDK.

    Each language has a server of its own: if another tenant had sent a request within the last minute, fair sharing
    would reject the request of the first tenant for another reason than a full server.
    """
    keys, results = proof.folder / "sdk-keys.json", {}
    fields = {"kinds": "refusals", "key": add_key(keys, "good"), "model": "oracle", "num_cases": 1, "seed": 1}
    fields["limited"] = [add_key(keys, "once", requests_per_minute=1)]
    for name, command in commands(proof.folder).items():
        options = ("--keys-file", str(keys), "--max-open-requests", "1", "--step-s", "0.02")
        with started(proof.folder, *options) as server:
            results[name] = cases_of(server, command, fields)
    return results

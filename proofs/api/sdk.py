"""What the official SDKs make of chats and texts, in Python and in JavaScript: several answers, cut by a stop.

A stop string is taken from the middle of an answer that came without one, so that it is known to come: then the answer
must end before it. Refusals that depend on who asks and when (401, 429, 503) are asked for at a server that has one key
too many and one place too few. All APIs and tools: `proofs/agents/sdk.py`.
"""

from typing import Any

from proofs.api.load import serve_words, started
from proofs.api.sdk_environments import Cases, cases_of, commands
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key


@section("sdk")
def sdk(proof: Proof) -> None:
    """Half of the cases in each language; at full scale a tenth of them with the real model."""
    count = proof.sized(quick=60, full=1000)
    num_real = count // 10 if proof.is_full else 0
    servers = [_at_server(proof, ("oracle", count - num_real))]
    if num_real:
        servers.append(_at_server(proof, ("m", num_real), *serve_words(), module="quire serve"))
    refusals = _refusals(proof)
    done = [*(cases for one in servers for cases in one.values()), *refusals.values()]
    num_js = sum(one["javascript"].count for one in (*servers, refusals))
    num_stops = [sum(cases.num_stops for cases in one.values()) for one in servers]
    proof.at_least("sdk_cases", sum(one.count for one in done), count)
    proof.at_least("sdk_js_cases", num_js, 0.4 * count)
    proof.at_least("sdk_real_cases", num_real, proof.sized(quick=0, full=100))
    proof.at_least("sdk_stop_cases", min(num_stops), 1, "at each server")
    proof.equals("sdk_refusals", sum(one.num_refused for one in refusals.values()), 6, "401, 429, 503 in each")
    proof.none("sdk_wrong", [line for one in done for line in one.wrong])


def _at_server(proof: Proof, case: tuple[str, int], *words: str, **how: Any) -> dict[str, Cases]:
    model, count = case
    what = {"kinds": "completions", "key": "none", "model": model, "num_cases": -(-count // 2)}
    with started(proof.folder, *words, **how) as server:
        return {
            name: cases_of(server, command, {**what, "seed": proof.random.getrandbits(30)})
            for name, command in commands(proof.folder).items()
        }


def _refusals(proof: Proof) -> dict[str, Cases]:
    """At a server with one place, held by a client: 503, 429 and 401 as errors of the SDK's own kinds.

    Each language has a server of its own: where another tenant has sent a request within the last minute, a tenant
    that holds the one place has its share, and the server is not full.
    """
    keys, done = proof.folder / "sdk-keys.json", {}
    what = {"kinds": "refusals", "key": add_key(keys, "good"), "model": "oracle", "num_cases": 1, "seed": 1}
    what["limited"] = [add_key(keys, "once", requests_per_minute=1)]
    for name, command in commands(proof.folder).items():
        words = ("--keys-file", str(keys), "--max-open-requests", "1", "--step-s", "0.02")
        with started(proof.folder, *words) as server:
            done[name] = cases_of(server, command, what)
    return done

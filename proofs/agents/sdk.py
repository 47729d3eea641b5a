"""What the official SDKs make of the three APIs, in Python and in JavaScript: tools, classes to parse into, streaming
helpers, conversations kept by the server, counts, and refusals as errors of their own kinds.

The SDKs live in environments of their own (`sdk_environments`), and the cases run there (`sdk_cases`). Both languages
ask one server, at the same time.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.record import say
from proofs.api.load import serve_words, started
from proofs.api.sdk_environments import LANGUAGES, cases_of, commands
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key


@section("sdk")
def sdk(proof: Proof) -> None:
    """Half of the calls in each language."""
    count, folder = proof.sized(quick=60, full=1_000), proof.folder
    keys = folder / "sdk-keys.json"
    words = serve_words("--tool-format", "hermes", "--store", str(folder / "sdk.db"), "--keys-file", str(keys))
    asked = {name: _asked(keys, name, count // 2, proof.random.getrandbits(30)) for name in LANGUAGES}
    by_language = commands(folder)
    with started(folder, *words, module="quire serve") as server, ThreadPoolExecutor() as threads:
        running = {name: threads.submit(cases_of, server, by_language[name], asked[name]) for name in LANGUAGES}
        told = {name: one.result() for name, one in running.items()}
    wrong = [line for one in told.values() for line in one.wrong]
    for name, one in told.items():
        say(f"    {name}: {one.versions}, {one.kinds}")
        proof.at_least(f"sdk_calls_{name}", one.num_calls, 0.4 * count)
        proof.at_least(f"sdk_kinds_{name}", len(one.kinds), 12, "each tried once at least")
    proof.at_least("sdk_calls", sum(one.num_calls for one in told.values()), count)
    proof.none("sdk_wrong", wrong, "raised, or streamed in another way than told whole")


def _asked(keys: Path, name: str, count: int, seed: int) -> dict[str, Any]:
    limited = [add_key(keys, f"{name}-once-{at}", requests_per_minute=1) for at in range(2)]
    what = {"key": add_key(keys, name), "limited": limited, "model": "m", "count": count, "seed": seed}
    return {**what, "kinds": "agents", "num_cases": 14}

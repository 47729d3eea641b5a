"""The official SDKs against the three APIs, in Python and in JavaScript: tools, parsing to classes, streaming helpers,
stored conversations, token counts, and refusals as the SDK's own error classes.

The SDKs are installed in environments of their own (`sdk_environments`), where the cases run (`sdk_cases`). Both
languages send requests to one server, at the same time.
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
    """Make half of the calls in each language."""
    count, folder = proof.sized(quick=60, full=1_000), proof.folder
    keys = folder / "sdk-keys.json"
    options = serve_words("--tool-format", "hermes", "--store", str(folder / "sdk.db"), "--keys-file", str(keys))
    inputs = {name: _case_input(keys, name, count // 2, proof.random.getrandbits(30)) for name in LANGUAGES}
    by_language = commands(folder)
    with started(folder, *options, module="quire serve") as server, ThreadPoolExecutor() as threads:
        futures = {name: threads.submit(cases_of, server, by_language[name], inputs[name]) for name in LANGUAGES}
        results = {name: result.result() for name, result in futures.items()}
    wrong = [line for result in results.values() for line in result.wrong]
    for name, result in results.items():
        say(f"    {name}: {result.versions}, {result.kinds}")
        proof.at_least(f"sdk_calls_{name}", result.num_calls, 0.4 * count)
        proof.at_least(f"sdk_kinds_{name}", len(result.kinds), 12, "each tried once at least")
    proof.at_least("sdk_calls", sum(result.num_calls for result in results.values()), count)
    proof.none("sdk_wrong", wrong, "an exception, or a stream that differs from the whole answer")


def _case_input(keys: Path, name: str, count: int, seed: int) -> dict[str, Any]:
    limited = [add_key(keys, f"{name}-once-{index}", requests_per_minute=1) for index in range(2)]
    fields = {"key": add_key(keys, name), "limited": limited, "model": "m", "count": count, "seed": seed}
    return {**fields, "kinds": "agents", "num_cases": 14}

"""Findings 2 and 4: client text never becomes control tokens, and a template freezes nobody but its own chat.

`injected_roles`, `template_unequal`, `hostile_templates` and what belongs to it, `template_ms`.
"""

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import tokenizers

from benchmarks.record import say
from proofs.before import BEFORE, HERE, Checkout, checked_out
from proofs.chat_samples import NONCE
from proofs.hostile_templates import templates
from proofs.hostile_watch import Watch, burn, burn_all, resident_bytes
from proofs.proof import Proof, section
from proofs.public_tokenizers import Published, published
from proofs.stolen_time import watched
from quire.checkpoints import load_tokenizer
from quire.errors import QuireError
from quire.text.chat.messages import ROLES
from quire.text.chat.render_process import MEMORY_BYTES
from quire.text.chat.template import ChatTemplate

SCRIPT = "proofs.chat_ids"
SCRIPT_FILES = ("proofs/__init__.py", "proofs/chat_ids.py", "proofs/chat_samples.py")
"""What the commit before is given to run it."""
ENDED_S = 3.0
PARENT_BYTES = 96 * 1024 * 1024
"""How much this process may grow while it has templates rendered: prompts, answers and its own figures."""
Outcomes = list[list[list[int] | str]]
"""For each tokenizer, the ids of its conversations, or why there are none."""


def _job(model: Published, **seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "name": model.name,
        "tokenizer_file": str(model.tokenizer_file),
        "template": model.template,
        "special_tokens": model.special_tokens,
        "names": tried_names(model),
        **{kind: list(each) for kind, each in seeds.items()},
    }


def tried_names(model: Published) -> list[str]:
    """The names its template writes, three times, so that they are tried most often; then some of the others."""
    names = [*model.control_names().values()]
    own = [name for name in names if name in model.template or name in model.special_tokens.values()]
    return own * 3 + [name for name in names if name not in own][:: max(1, len(names) // 40)]


def _ran(checkout: Checkout, jobs: list[dict[str, Any]]) -> list[list[Any]]:
    run = checkout.run(["-m", SCRIPT, "ids"], said=json.dumps(jobs))
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    told: list[list[Any]] = json.loads(run.stdout.splitlines()[-1])
    return told


# -- control tokens ----------------------------------------------------------------------------------------------------


@section("chats: control tokens and ids of ordinary ones")
def chats(proof: Proof) -> None:
    models = published()
    # More than are wanted: some templates refuse some of them, for two turns of a user in a row or a developer.
    num_hostile, num_ordinary = proof.sized(quick=90, full=660), proof.sized(quick=400, full=2500)
    step = len(models)  # conversations are shared out among the tokenizers
    jobs = [
        _job(one, hostile=range(index, num_hostile, step), ordinary=range(index, num_ordinary, step))
        for index, one in enumerate(models)
    ]
    now = _ran(HERE, jobs)
    with checked_out(BEFORE) as checkout:
        checkout.bring(*SCRIPT_FILES)
        before = _ran(checkout, jobs)
    _injected(proof, models, [one[0] for one in now], [one[0] for one in before])
    _unequal(proof, models, [one[1] for one in now], [one[1] for one in before])


def _injected(proof: Proof, models: Sequence[Published], now: Outcomes, before: Outcomes) -> None:
    num_tries, num_encoded = sum(map(len, now)), sum(isinstance(one, list) for each in now for one in each)
    forged, forged_before = 0, 0
    for model, ours, theirs in zip(models, now, before, strict=True):
        library = load_tokenizer(model.tokenizer_file)
        found = num_forged(library, model, ours), num_forged(library, model, theirs)
        say(f"    {model.name}: {found[0]} forged, {found[1]} before")
        forged, forged_before = forged + found[0], forged_before + found[1]
    taken = _roles_taken(models)
    proof.report("injected_tries", num_tries)
    proof.at_least("injected_encoded", num_encoded, proof.sized(quick=60, full=500))
    proof.at_least("injected_roles_before", forged_before, 1, "the trial would see it")
    proof.equals("strange_roles_taken", taken, 0)
    proof.equals("injected_roles", forged + taken, 0)


def num_forged(library: tokenizers.Tokenizer, model: Published, outcomes: list[list[int] | str]) -> int:
    """Control tokens directly beside a nonce: a client wrote that, and nobody else."""
    control, num_found = model.control_names(), 0
    for ids in outcomes:
        if isinstance(ids, str):
            continue
        for index in (index for index, one in enumerate(ids) if one in control):
            before = library.decode(ids[max(0, index - 12) : index], skip_special_tokens=False)
            after = library.decode(ids[index + 1 : index + 13], skip_special_tokens=False)
            num_found += before.rstrip(" ").endswith(NONCE) or after.lstrip(" ").startswith(NONCE)
    return num_found


def _roles_taken(models: Sequence[Published]) -> int:
    """Strange roles that were not refused: names of tokens, halves of them, and words nobody knows."""
    num_taken = 0
    for model in models:
        template = ChatTemplate(model.template, model.special_tokens)
        names = tried_names(model)[:40]
        halves = ["".join(filter(str.isalnum, name)) for name in names]
        for role in {*names, *halves, "admin", "user\n", " system", "System"} - ROLES:
            try:
                template.render([{"role": role, "content": "x"}])
                num_taken += 1
            except QuireError:
                pass
        template.close()
    return num_taken


def _unequal(proof: Proof, models: Sequence[Published], now: Outcomes, before: Outcomes) -> None:
    num_unequal = num_encoded = 0
    for model, ours, theirs in zip(models, now, before, strict=True):
        pairs = list(zip(ours, theirs, strict=True))
        encoded = [pair for pair in pairs if isinstance(pair[1], list)]
        unequal = [pair for pair in pairs if pair[0] != pair[1] and list in map(type, pair)]
        num_encoded, num_unequal = num_encoded + len(encoded), num_unequal + len(unequal)
        say(f"    {model.name}: {len(encoded)} of {len(pairs)} encoded, {len(unequal)} unequal")
    proof.report("template_chats", sum(map(len, now)))
    proof.at_least("template_chats_encoded", num_encoded, proof.sized(quick=300, full=2000))
    proof.equals("template_unequal", num_unequal, 0)


# -- hostile templates -------------------------------------------------------------------------------------------------


@section("templates: hostile ones")
def hostile(proof: Proof) -> None:
    sources = templates(proof.sized(quick=24, full=200))
    burn("x")  # what is loaded once is not growth
    before_bytes = resident_bytes(os.getpid())
    with watched() as stolen:
        watch = Watch(stolen)
        took = burn_all(sources, watch)
    late = [one for one in took if one[1] > ENDED_S]
    for family, seconds in late:
        say(f"    {family}: {seconds:.2f} s")
    for pause in watch.blocked:
        say(f"    late {pause.late_s:.3f} s, of it stolen {pause.stolen_s:.3f}, queued {pause.queued_s:.3f}")
    grown = watch.peak_parent_bytes - before_bytes
    over = int(watch.peak_helper_bytes > MEMORY_BYTES) + int(grown > PARENT_BYTES)
    proof.report("hostile_tried", len(sources))
    proof.report("hostile_longest_s", max(seconds for _, seconds in took))
    proof.at_most("hostile_helper_mb", watch.peak_helper_bytes / 1e6, MEMORY_BYTES / 1e6)
    proof.at_most("hostile_server_grown_mb", grown / 1e6, PARENT_BYTES / 1e6)
    proof.equals("hostile_blocked", len(watch.blocked), 0, "over 100 ms")
    proof.equals("hostile_over_budget", over, 0)
    proof.equals("hostile_templates", len(late) + len(watch.blocked) + over, 0, "failures")


# -- cost --------------------------------------------------------------------------------------------------------------


class Clock:
    """A process that times chats, one at a time; while it is not asked it does nothing."""

    def __init__(self, checkout: Checkout, jobs: list[dict[str, Any]]) -> None:
        self._process = subprocess.Popen(
            [checkout.python, "-m", SCRIPT, "clock"],
            cwd=checkout.root,
            env=checkout.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say(json.dumps(jobs))

    def milliseconds(self, job: int, seed: int) -> float:
        return float(self._say(f"{job} {seed}"))

    def close(self) -> None:
        self._process.communicate()

    def _say(self, line: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a clock has pipes")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@section("templates: cost of an ordinary chat")
def cost(proof: Proof) -> None:
    models = [one for one in published() if one.name in ("smollm2", "qwen3", "llama3_2")]
    jobs, num_chats = [_job(one) for one in models], proof.sized(quick=200, full=1000)
    with checked_out(BEFORE) as checkout, ExitStack() as stack:
        checkout.bring(*SCRIPT_FILES)
        clocks = [stack.enter_context(closing(Clock(one, jobs))) for one in (checkout, HERE)]
        # Interleaved, chat by chat: a machine that is busy is busy for both.
        more = [[_more(clocks, job, seed) for seed in range(num_chats)] for job in range(len(models))]
    middles = [statistics.median(each) for each in more]
    for model, middle, each in zip(models, middles, more, strict=True):
        low, _, high = statistics.quantiles(each, n=4)
        say(f"    {model.name}: {middle:+.2f} ms; half of all between {low:+.2f} and {high:+.2f}")
    proof.at_most("template_ms", max(middles), 3, "more than before")


def _more(clocks: Sequence[Clock], job: int, seed: int) -> float:
    """How many milliseconds more the same chat takes now."""
    order = (0, 1) if seed % 2 else (1, 0)
    took = {which: clocks[which].milliseconds(job, seed) for which in order}
    return took[1] - took[0]

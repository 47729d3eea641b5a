"""Finding 4: a template freezes nobody but its own chat."""

import os

from benchmarks.record import say
from proofs.findings.hostile.hostile_templates import templates
from proofs.findings.hostile.hostile_watch import Watch, burn, burn_all, resident_bytes
from proofs.framework.proof import Proof, section
from proofs.framework.stolen_time import watched
from quire.text.chat.rendering.process import MEMORY_BYTES

ENDED_S = 3.0
PARENT_BYTES = 96 * 1024 * 1024
"""How much this process may grow while it has templates rendered: prompts, answers and its own figures."""


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

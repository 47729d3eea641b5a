"""Finding 4: a hostile chat template, which burns time or memory, delays only its own chat."""

import os

from benchmarks.record import say
from proofs.findings.hostile.hostile_templates import templates
from proofs.findings.hostile.hostile_watch import Watch, burn, burn_all, resident_bytes
from proofs.framework.proof import Proof, section
from proofs.framework.stolen_time import watch_stolen_time
from quire.text.chat.rendering.process import MEMORY_BYTES

MAX_BURN_S = 3.0
PARENT_BYTES = 96 * 1024 * 1024
"""How much this process, which has helper processes render the templates, may grow meanwhile."""


@section("templates: hostile ones")
def hostile(proof: Proof) -> None:
    sources = templates(proof.sized(quick=24, full=200))
    burn("x")  # so that what is loaded only once does not count as growth
    before_bytes = resident_bytes(os.getpid())
    with watch_stolen_time() as stolen:
        watch = Watch(stolen)
        burns = burn_all(sources, watch)
    late = [(family, seconds) for family, seconds in burns if seconds > MAX_BURN_S]
    for family, seconds in late:
        say(f"    {family}: {seconds:.2f} s")
    for pause in watch.blocked:
        say(f"    late {pause.late_s:.3f} s: stolen {pause.stolen_s:.3f}, queued {pause.queued_s:.3f}")
    growth_bytes = watch.peak_parent_bytes - before_bytes
    num_over = int(watch.peak_helper_bytes > MEMORY_BYTES) + int(growth_bytes > PARENT_BYTES)
    proof.report("hostile_tried", len(sources))
    proof.report("hostile_longest_s", max(seconds for _, seconds in burns))
    proof.at_most("hostile_helper_mb", watch.peak_helper_bytes / 1e6, MEMORY_BYTES / 1e6)
    proof.at_most("hostile_server_grown_mb", growth_bytes / 1e6, PARENT_BYTES / 1e6)
    proof.equals("hostile_blocked", len(watch.blocked), 0, "over 100 ms")
    proof.equals("hostile_over_budget", num_over, 0)
    proof.equals("hostile_templates", len(late) + len(watch.blocked) + num_over, 0, "failures")

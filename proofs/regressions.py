"""Runs other proofs, and finds rows that held and do not now.

The sections of a broken row are run again, interleaved with the commit before: a row that counts (mismatches, losses,
violations) regressed if it holds there and is broken here; a row that is timed or drawn must be broken here and hold
there three times in a row, because the machine is shared.

With KEPT set to a folder, a proof that was run there on this commit is not run again: several proofs have a row about
all others, each beside another commit.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.record import circumstances, say
from proofs.before import HERE, Checkout, checked_out
from proofs.proof import Figure, Proof, Section

PROOFS: Mapping[str, str] = {
    "memory": "proofs.memory",
    "scheduler": "proofs.scheduler",
    "engine": "proofs.engine",
    "torch": "proofs.torch_backend",
    "worker": "proofs.worker",
    "doors": "proofs.api",
    "bench": "proofs.bench",
    "native": "proofs.native",
}
"""Every proof by the name of its target and its record, but for those that run the others."""
QUICK_PROOFS = ("memory", "scheduler", "engine")
"""Other proofs that a quick run looks at; a full run looks at all."""
MODULES: Mapping[str, str] = {
    **PROOFS,
    "findings": "proofs.findings",
    "house": "proofs.house",
    "seam": "proofs.seam",
    "cpu": "proofs.cpu",
    "steps": "proofs.steps",
    "agents": "proofs.agents",
    "first": "proofs.first",
    "models": "proofs.models",
    "hybrids": "proofs.hybrids",
    "mlx": "proofs.mlx",
    "capacity": "proofs.capacity",
    "fleet": "proofs.fleet",
    "see": "proofs.see",
}
KEPT = "PROOF_OUTCOMES"
"""The variable that names a folder for outcomes."""
BROKE_OFF = "broke off"
"""How the name of a section or a proof ends that did not come to its end."""
ROUNDS = 3
TIMED = (
    "near the roof",
    "the host's share",
    "prefill",
    "a shared prefix",
    "sixteen at once",
    "keys and values in bf16",
)
"""Sections of proof-native whose rows are ratios of times."""
LOWER_IS_BETTER = frozenset({"host_share"})
MIN_SPEED = 0.98
TIMEOUT_S = {"quick": 3600.0, "full": 6 * 3600.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a proof said."""

    figures: dict[str, Figure]
    broken: frozenset[str]
    table: tuple[str, ...] = ()
    """Its rows that do not hold, as it printed them, and sections that broke off."""
    sections: dict[str, str] = field(default_factory=dict)
    """The section of each row."""

    def holds(self, key: str) -> bool:
        """The row was there and was kept; or what broke off elsewhere did not."""
        return key not in self.broken and (key in self.figures or key.endswith(BROKE_OFF))


def outcome_of(name: str, scale: str = "quick", checkout: Checkout = HERE, only: Sequence[str] = ()) -> Outcome:
    """Run a proof, or some sections of it, in this commit or in another that is checked out."""
    say(f"  proof-{name}{'' if checkout is HERE else ' of the commit before'} ...")
    module = MODULES[name] if checkout.has(MODULES[name]) else f"benchmarks.proof_{name}"  # where they stood once
    words = ["-m", module, "--scale", scale, "--only", ",".join(only)]
    return read_outcome(name, checkout.run(words, TIMEOUT_S[scale]))


def known_outcome_of(name: str, scale: str = "quick") -> Outcome:
    """The same for all of a proof in this commit, which may have been run before."""
    about = circumstances()
    if KEPT not in os.environ or about["uncommitted_changes"]:
        return outcome_of(name, scale)
    path = Path(os.environ[KEPT]) / f"{about['commit']}-{name}-{scale}.json"
    if not path.exists():
        outcome = asdict(outcome_of(name, scale))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**outcome, "broken": sorted(outcome["broken"])}))
    told = json.loads(path.read_text())
    return Outcome(told["figures"], frozenset(told["broken"]), tuple(told["table"]), told["sections"])


def regressions(proof: Proof, commit: str, outcomes: Mapping[str, Outcome], scale: str = "quick") -> None:
    """Report `regressions` over these runs of other proofs."""
    suspects = {name: outcome for name, outcome in outcomes.items() if outcome.broken}
    lost: list[str] = []
    if suspects:
        with checked_out(commit) as before:
            for name, outcome in suspects.items():
                lost += _lost(name, outcome, before, scale)
    for row in lost:
        say(f"  regressed: {row}")
    proof.at_least("regression_proofs", len(outcomes), 1, "else nothing was compared")
    proof.equals("regressions", len(lost), 0)


def rows_lost_since(commit: str) -> Section:
    """A section of a proof: rows of the other proofs that held at this commit and do not now."""

    def prove(proof: Proof) -> None:
        names = PROOFS if proof.is_full else QUICK_PROOFS
        regressions(proof, commit, {name: known_outcome_of(name) for name in names})

    return Section("regressions", prove)


def native_speed(proof: Proof, commit: str) -> None:
    """Report the timed rows of proof-native over those of the commit before, run turn about."""
    with checked_out(commit) as before:
        pairs = [
            tuple(outcome_of("native", "quick", checkout, TIMED) for checkout in (before, HERE)) for _ in range(ROUNDS)
        ]
    ratios = speed_ratios([(there.figures, here.figures) for there, here in pairs])
    for key, ratio in ratios.items():
        say(f"    {key:24} {ratio:.3f}")
    proof.at_least("native_speed_rows", len(ratios), 12, "else rows are missing")
    proof.at_least("native_speed", geometric_mean(ratios.values()), MIN_SPEED, "geometric mean over the commit before")


def speed_ratios(pairs: Sequence[tuple[Mapping[str, Figure], Mapping[str, Figure]]]) -> dict[str, float]:
    """For each timed row that every run has: median here over median there, above 1 where this commit is quicker."""
    runs = [figures for pair in pairs for figures in pair]
    keys = [key for key in runs[0] if f"{key}_spread" in runs[0] and all(key in run for run in runs)]
    found = {key: median(here[key] for _, here in pairs) / median(there[key] for there, _ in pairs) for key in keys}
    return {key: 1.0 / ratio if key in LOWER_IS_BETTER else ratio for key, ratio in found.items()}


def _lost(name: str, outcome: Outcome, before: Checkout, scale: str) -> list[str]:
    """Those of its broken rows that the commit before keeps."""
    only = _sections_of(outcome)
    pairs: list[tuple[Outcome, Outcome]] = []
    left = set(outcome.broken)
    while left and len(pairs) < ROUNDS:
        there = outcome_of(name, scale, before, only)
        if only and _lacks_rows(there, outcome):
            only = ()  # a row that stood in another section then
            there = outcome_of(name, scale, before)
        _check_measured(name, there, outcome)
        here = outcome_of(name, scale, HERE, only)
        pairs.append((there, here))
        left = {key for key in left if _is_lost_so_far(key, pairs)}
        say(f"  {name}, round {len(pairs)}: broken here and kept before: {', '.join(sorted(left)) or 'nothing'}")
        if left and all(_is_counted(key, here) for key in left):
            break
    return [f"{name}: {key}" for key in sorted(left)]


def _check_measured(name: str, there: Outcome, outcome: Outcome) -> None:
    """What broke off there alone was not compared: a package may be missing that the commit before needs."""
    broke_off = {key for key in there.broken - outcome.broken if key.endswith(BROKE_OFF)}
    if broke_off:
        raise RuntimeError(f"proof-{name} of the commit before: {', '.join(sorted(broke_off))}; see above why")


def _lacks_rows(there: Outcome, outcome: Outcome) -> bool:
    """Whether a row that is broken here was not found there, though its section came to its end."""
    lacking = (outcome.broken & outcome.figures.keys()) - there.figures.keys()
    return any(f"{outcome.sections.get(key)}: {BROKE_OFF}" not in there.broken for key in lacking)


def _sections_of(outcome: Outcome) -> tuple[str, ...]:
    """The sections to run for its broken rows; none where one is not known, which runs all."""
    titles = {outcome.sections.get(key) for key in outcome.broken}
    return tuple(sorted(title for title in titles if title)) if None not in titles else ()


def _is_lost_so_far(key: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> bool:
    return all(there.holds(key) and not here.holds(key) for there, here in pairs)


def _is_counted(key: str, outcome: Outcome) -> bool:
    """Whole numbers are counted, and need no second look."""
    return isinstance(outcome.figures.get(key), int)


def read_outcome(name: str, ran: "subprocess.CompletedProcess[str]") -> Outcome:
    """The figures are the last line on stdout; what broke is the last line on stderr that says so."""
    lines = ran.stdout.strip().splitlines()
    figures = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    told = [line for line in ran.stderr.splitlines() if line.startswith("broken: ")]
    broken = frozenset(told[-1].removeprefix("broken: ").split(", ")) if told else frozenset()
    if ran.returncode and not broken:
        broken = frozenset({f"{name}: {BROKE_OFF}"})
    if any(key.endswith(BROKE_OFF) for key in broken):
        say(ran.stderr[-6000:])  # why
    rows = [line.strip().removesuffix(" BROKEN") for line in ran.stderr.splitlines() if line.endswith(" BROKEN")]
    sections = _titles(ran.stderr.splitlines(), {*figures, *broken})
    return Outcome(figures, broken, (*rows, *sorted(broken - set(figures))), sections)


def _titles(lines: Sequence[str], keys: set[str]) -> dict[str, str]:
    """The section of each of these rows: its title stands above it, and begins what is said when it breaks off."""
    found: dict[str, str] = {}
    title = ""
    for line in lines:
        if line.endswith(" ...") and not line.startswith(" "):
            title = line.removesuffix(" ...")
            found[f"{title}: {BROKE_OFF}"] = title
        elif (word := line.strip().partition(" ")[0]) in keys and title:
            found[word] = title
    return {key: title for key, title in found.items() if key in keys}

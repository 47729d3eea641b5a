"""Draws docs/concepts/img/step-profile.svg: the time of the parts of real steps, compared with the roofline.

`make profile-step` runs it and writes the numbers to results/step-profile.json. `step_clock` times the parts inside
the steps; the roof is measured in the same rounds, as `proofs.numerics.native` defines it.
"""

import json
import sys
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.bare import bare_products
from benchmarks.record import RESULTS, ROOT, circumstances, say
from benchmarks.step_clock import step_timers
from benchmarks.steps import GIB, decoding, fastest, interleave, kv_bytes, smollm2_model
from benchmarks.test_model import smollm2
from quire.backends.cpu.measured_roof import read_sum
from quire.checkpoints.families import read_shape

PICTURE = ROOT / "docs" / "concepts" / "img" / "step-profile.svg"
BATCHES = ((1, 288), (16, 288), (16, 1024), (64, 1024))
DETAILED = (16, 288)
ROUNDS = 25

GROUPS = {
    "products": ("gate_up", "down", "qkv", "out", "head"),
    "attention": ("attention",),
    "other kernels": ("gated", "rope_write", "add_rms_norm", "embed", "argmax", "make_tiles", "between"),
    "host": ("plan", "apply", "rest"),
}
COLOURS = {"products": "#bcd9f5", "attention": "#f6e3b4", "other kernels": "#c7ebc8", "host": "#f3c9c9"}
NAMES = {
    "gate_up": "gate and up",
    "down": "down",
    "qkv": "queries, keys, values",
    "out": "attention's output",
    "head": "head",
    "attention": "attention over the blocks",
    "gated": "SiLU and gate",
    "rope_write": "rotary positions, KV write",
    "add_rms_norm": "residual and norm",
    "argmax": "the likeliest token",
    "make_tiles": "tiles",
    "embed": "embedding, angles",
    "between": "between kernels",
    "plan": "plan",
    "apply": "apply",
    "rest": "inputs, Python between calls",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """One batch size and context: milliseconds of a step, of its parts, and of the roof."""

    num_rows: int
    context: int
    step_ms: float
    roof_ms: float
    parts_ms: dict[str, float]

    def group_ms(self, group: str) -> float:
        return sum(self.parts_ms.get(part, 0.0) for part in GROUPS[group])


def main() -> int:
    profiles = [_profile(*situation) for situation in BATCHES]
    record = {
        "profiles": [
            {
                "num_rows": profile.num_rows,
                "context": profile.context,
                "step_ms": round(profile.step_ms, 3),
                "roof_ms": round(profile.roof_ms, 3),
                "parts_ms": {part: round(milliseconds, 3) for part, milliseconds in profile.parts_ms.items()},
            }
            for profile in profiles
        ],
        **circumstances(),
    }
    (RESULTS / "step-profile.json").write_text(json.dumps(record, indent=2) + "\n")
    PICTURE.write_text(picture(profiles, str(record["date"])))
    say(f"{PICTURE.relative_to(ROOT)} drawn")
    return 0


def _profile(num_rows: int, context: int) -> Profile:
    model, num_product_rows = smollm2_model(), max(2, num_rows)
    machine = decoding(model, num_rows, context - ROUNDS // 2)
    data = np.zeros(GIB // 4, np.float32)
    data += 1.0
    bare = bare_products(read_shape(smollm2().config), num_product_rows, num_product_rows)
    with step_timers(machine, model) as clock:
        calls = {**bare, "read": lambda: read_sum(data), "step": lambda: clock.step(machine)}
        times = interleave(calls, ROUNDS)
    roof = median(fastest(times, list(bare))) + kv_bytes(num_rows, context) * min(times["read"]) / GIB
    parts = {part: seconds * 1e3 for part, seconds in clock.shares().items()}
    step = parts.pop("step")
    parts["rest"] = parts.pop("host") - parts["plan"] - parts["apply"]
    say(f"  {num_rows} x {context}: step {step:.1f} ms, roof {roof * 1e3:.1f} ms")
    return Profile(num_rows, context, step, roof * 1e3, parts)


# -- the picture -------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 760, 232, 640
STYLE = (
    'text{font:13px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2933}.t{font-weight:bold}'
    ".s{font-size:11px;fill:#52606d}.b{stroke:#1f2933;stroke-width:1}.e{text-anchor:end}.m{text-anchor:middle}"
    ".d{stroke:#1f2933;stroke-dasharray:4 3;stroke-width:1.4}"
)
TITLE = "Where a step's time goes"


def picture(profiles: list[Profile], date: str) -> str:
    lines: list[str] = []
    (detailed,) = [profile for profile in profiles if (profile.num_rows, profile.context) == DETAILED]
    bottom = _draw_parts(lines, detailed, 28)
    bottom = _draw_shares(lines, profiles, bottom + 44)
    lines.append(f'<text x="20" y="{bottom + 26}" class="s">SmolLM2-135M in float32 on two cores; {date}</text>')
    height = bottom + 44
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{TITLE}"><title>{TITLE}</title><style>{STYLE}</style>'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def _draw_parts(lines: list[str], profile: Profile, top: int) -> int:
    """Draw a bar for each part of one step."""
    heading = f"one step: {profile.num_rows} sequences, context {profile.context}, {profile.step_ms:.1f} ms"
    lines.append(f'<text x="20" y="{top}" class="t">{heading}</text>')
    longest, y = max(profile.parts_ms.values()), top + 18
    for group, parts in GROUPS.items():
        for part in parts:
            milliseconds = profile.parts_ms.get(part, 0.0)
            width = max(1.0, milliseconds / longest * (RIGHT - LEFT))
            lines.append(f'<text x="{LEFT - 10}" y="{y + 13}" class="s e">{NAMES[part]}</text>')
            lines.append(_box(LEFT, y, width, 18, COLOURS[group]))
            text = f"{milliseconds:.1f} ms" if milliseconds >= 0.05 else f"{milliseconds * 1e3:.0f} µs"
            lines.append(f'<text x="{LEFT + width + 8:.1f}" y="{y + 13}" class="s">{text}</text>')
            y += 22
        y += 6
    return y


def _draw_shares(lines: list[str], profiles: list[Profile], top: int) -> int:
    """Draw one bar for each step, split into groups of parts, with a line at the roof."""
    lines.append(f'<text x="20" y="{top}" class="t">shares of a step</text>')
    y, x = top + 14, LEFT
    for group, colour in COLOURS.items():
        lines.append(_box(x, top - 11, 12, 12, colour))
        lines.append(f'<text x="{x + 18}" y="{top}" class="s">{group}</text>')
        x += 40 + 7 * len(group)
    lines.append(f'<line x1="{x}" y1="{top - 13}" x2="{x}" y2="{top + 3}" class="d"/>')
    lines.append(f'<text x="{x + 8}" y="{top}" class="s">roof</text>')
    for profile in profiles:
        rows = "1 sequence" if profile.num_rows == 1 else f"{profile.num_rows} sequences"
        lines.append(f'<text x="{LEFT - 10}" y="{y + 21}" class="s e">{rows}, context {profile.context}</text>')
        bar_x, scale = float(LEFT), (RIGHT - LEFT) / profile.step_ms
        for group, colour in COLOURS.items():
            width = profile.group_ms(group) * scale
            lines.append(_box(bar_x, y, width, 34, colour))
            if width > 30:
                share = f"{profile.group_ms(group) / profile.step_ms:.0%}"
                lines.append(f'<text x="{bar_x + width / 2:.1f}" y="{y + 21}" class="s m">{share}</text>')
            bar_x += width
        roof = LEFT + profile.roof_ms * scale
        lines.append(f'<line x1="{roof:.1f}" y1="{y - 3}" x2="{roof:.1f}" y2="{y + 37}" class="d"/>')
        lines.append(f'<text x="{RIGHT + 8}" y="{y + 21}" class="s">{profile.step_ms:.1f} ms</text>')
        y += 46
    return y - 8


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" class="b" fill="{colour}"/>'


if __name__ == "__main__":
    sys.exit(main())

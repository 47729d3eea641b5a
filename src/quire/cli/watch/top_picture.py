"""The screen of `quire top` as lines of text. The list of running requests fills the remaining rows.

Colour is never the only signal, and control characters from the server are escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from quire.cli.shared.columns import plain
from quire.cli.watch.top_figures import STATES, TopFigures, duration, number, percent
from quire.cli.watch.top_glyphs import STYLES, Glyphs, bar, history_curve
from quire.cli.watch.watched_state import SeenEngine, SeenSnapshot
from quire.core.inspect.snapshots import RunningFigures

MAX_NAME_CHARS = 64
MIN_HEIGHT_FOR_LISTS = 20
MAX_LIST_ROWS = 6
MIN_RUNNING_ROWS = 3
COLUMNS = ((12, "tenant"), (7, "class"), (6, "phase"))
MIN_REQUEST_CHARS, MAX_REQUEST_CHARS = 12, 40
FIGURES_CHARS = 34
LONG_STEP_S = 1.0
IN_ASCII = str.maketrans({"\u2026": "~"})


@dataclass(frozen=True, slots=True)
class Frame:
    """Size and glyphs of the terminal."""

    width: int
    height: int
    glyphs: Glyphs


def picture(figures: TopFigures, frame: Frame, trouble: str | None = None, keys: str = "") -> list[Text]:
    """Return at most `height` lines. `trouble` is the error that prevents newer snapshots, `keys` the key bindings."""
    head = [_title(figures, frame)]
    if trouble is not None:
        head.append(_line(f"! {plain(trouble)}; retrying, showing the last snapshot", frame, "reverse"))
    foot = [_line(keys, frame, "dim")] if keys else []
    if figures.seen is None:
        waiting = _line("waiting for the first snapshot", frame)
        return _fitted([*head, waiting], foot, frame)
    body = [*_now(figures, frame), *_pool(figures.seen, frame), *_steps(figures, frame)]
    if frame.height >= MIN_HEIGHT_FOR_LISTS:
        body += _lists(figures.seen, frame)
        body += _notes(figures.seen, frame)
    left = frame.height - len(head) - len(body) - len(foot)
    return _fitted([*head, *body, *_running(figures.seen.running, frame, left)], foot, frame)


def _fitted(lines: list[Text], foot: list[Text], frame: Frame) -> list[Text]:
    shown = [*lines[: max(0, frame.height - len(foot))], *foot]
    if frame.glyphs.is_ascii:
        for line in shown:  # names may contain characters that this terminal cannot show
            line.plain = line.plain.translate(IN_ASCII).encode("ascii", "replace").decode()
            line.truncate(frame.width)
    return shown


def _line(text: str, frame: Frame, style: str = "") -> Text:
    line = Text(text, style, no_wrap=True)
    line.truncate(frame.width, overflow="ellipsis")
    return line


def _name(text: str, width: int = MAX_NAME_CHARS) -> str:
    """Escape and shorten the untrusted name of a model, tenant or request."""
    harmless = plain(text[:MAX_NAME_CHARS])
    return harmless if len(harmless) <= width and len(text) <= MAX_NAME_CHARS else f"{harmless[: max(0, width - 1)]}~"


def _requests(number: int) -> str:
    return f"{number:,} request{'s' * (number != 1)}"


def _heading(words: str, frame: Frame) -> Text:
    line = Text(no_wrap=True)
    line.append(f"{frame.glyphs.line * 2} ", "dim").append(words, "bold")
    line.append(f" {frame.glyphs.line * max(0, frame.width - len(words) - 4)}", "dim")
    line.truncate(frame.width)
    return line


def _title(figures: TopFigures, frame: Frame) -> Text:
    line = Text(no_wrap=True).append("quire top", "bold").append(f"  {_name(figures.server)}  ")
    seen = figures.seen
    for model in () if seen is None else seen.models:
        is_watched = seen is not None and model.name == seen.model
        name = f"{_name(model.name)} {_name(model.state)}".strip()
        line.append(f"[{name}]" if is_watched else f" {name} ", "bold" if is_watched else "dim").append(" ")
    line.truncate(frame.width, overflow="ellipsis")
    return line


def _now(figures: TopFigures, frame: Frame) -> list[Text]:
    seen = figures.seen
    if seen is None:
        return []
    entries = (
        (number(figures.output_tokens_per_s), "tokens/s"),
        (number(figures.prompt_tokens_per_s), "prompt/s"),
        (duration(figures.ttft_p50_s), "first token"),
        (percent(figures.hit_rate), "hit rate"),
        (f"{len(seen.running):,}", "running"),
        (f"{sum(one.num_requests for one in seen.queue):,}", "waiting"),
        (f"{seen.totals.num_preemptions:,}", "preempted"),
        *_engine(seen.engine),
    )
    lines = _flowing([Text(value, "bold").append(f" {label}", "not bold dim") for value, label in entries], frame)
    label = "tokens/s, last hour "
    hour = history_curve(
        [row.output_tokens_per_s for row in figures.history], frame.width - len(label) - 12, frame.glyphs
    )
    top = max((row.output_tokens_per_s or 0.0 for row in figures.history), default=0.0)
    if not top:
        return lines
    return [*lines, _curved(label, hour, f" max {number(top)}", frame)]


def _engine(engine: SeenEngine | None) -> list[tuple[str, str]]:
    """Return the computed tokens and, if the current step takes long, its duration so far."""
    if engine is None:
        return []
    step = [(duration(engine.step_s), "in a step")] if engine.step_s > LONG_STEP_S else []
    return [(f"{engine.num_computed_tokens:,}", "computed"), *step]


def _curved(label: str, drawn: str, behind: str, frame: Frame) -> Text:
    line = Text(no_wrap=True).append(label, "dim").append(drawn, "cyan").append(behind, "dim")
    line.truncate(frame.width)
    return line


def _pool(seen: SeenSnapshot, frame: Frame) -> list[Text]:
    pool = seen.shown_pool
    if pool is None:
        return [_heading("pool: no data, the model is not loaded", frame)]
    words = f"pool: {pool.num_blocks:,} blocks of {pool.block_size} tokens"
    legend = list[Text]()
    # Members report only the number of blocks in use, so a gateway cannot distinguish free from cached blocks.
    names = {state: state for state in STATES} if seen.fleet is None else {"free": "free or cached", "used": "used"}
    for state, name in names.items():
        count = int(getattr(pool.counts, state))
        label = f" {name} {count:,} {percent(count / pool.num_blocks)}"
        legend.append(Text(frame.glyphs.states[state], STYLES[state]).append(label, "default"))
    return [_heading(words, frame), bar(pool.counts, frame.width, frame.glyphs), *_flowing(legend, frame)]


def _flowing(entries: Sequence[Text], frame: Frame) -> list[Text]:
    """Lay out entries side by side, on as many lines as needed."""
    lines = [Text(no_wrap=True)]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + len(entry) + 2 > frame.width:
            lines.append(Text(no_wrap=True))
        lines[-1].append("   " if lines[-1] else "").append_text(entry)
    for line in lines:
        line.truncate(frame.width)
    return lines


def _steps(figures: TopFigures, frame: Frame) -> list[Text]:
    if not figures.steps:
        return []
    room = max(8, frame.width - 24)
    last = list(figures.steps)[-room:]
    lines = [_heading(f"tokens per step, last {len(last)} steps; the latest took {last[-1].ms:,.1f} ms", frame)]
    for label, values in (
        ("prompt ", [step.prompt_tokens for step in last]),
        ("output ", [step.output_tokens for step in last]),
    ):
        lines.append(_curved(label, history_curve(values, room, frame.glyphs), f" max {max(values):,}", frame))
    return lines


def _lists(seen: SeenSnapshot, frame: Frame) -> list[Text]:
    half = frame.width // 2
    waiting = sorted(seen.queue, key=lambda one: -one.num_requests)
    queue = [
        f"{one.num_requests:>6,}  {_name(one.priority.lower(), 7):<7} {_name(one.tenant, half - 18)}" for one in waiting
    ]
    worst = sorted(seen.misses, key=lambda one: -one.num_tokens)
    missed = [f"{one.num_tokens:>10,}  {_name(one.reason, 16)}, {_requests(one.num_requests)}" for one in worst]
    left, right = _few(queue, "no waiting requests"), _few(missed, "no misses")
    left_frame, right_frame = Frame(half - 1, 0, frame.glyphs), Frame(frame.width - half, 0, frame.glyphs)
    lines = [_beside(_heading("queue", left_frame), _heading("missed tokens, last hour", right_frame), half)]
    for at in range(max(len(left), len(right))):
        one = Text(left[at] if at < len(left) else "", no_wrap=True)
        other = Text(right[at] if at < len(right) else "", no_wrap=True)
        lines.append(_beside(one, other, half))
    for line in lines:
        line.truncate(frame.width)
    return lines


def _few(rows: Sequence[str], nothing: str) -> list[str]:
    """Return the first rows and a line with the number of omitted rows."""
    if not rows:
        return [f"  {nothing}"]
    if len(rows) <= MAX_LIST_ROWS:
        return list(rows)
    return [*rows[: MAX_LIST_ROWS - 1], f"  and {len(rows) - MAX_LIST_ROWS + 1} more"]


def _beside(left: Text, right: Text, half: int) -> Text:
    left.truncate(half - 1)
    left.pad_right(half - len(left))
    return left.append_text(right)


def _notes(seen: SeenSnapshot, frame: Frame) -> list[Text]:
    lines = list[Text]()
    if seen.fleet is not None:
        held = f", {seen.fleet.num_quarantined} quarantined" if seen.fleet.num_quarantined else ""
        moved = f"{len(seen.fleet.members)} members, {seen.fleet.num_moved} streams moved{held}"
        lines.append(_line(f"fleet: {moved}, hit rate {percent(seen.fleet.hit_rate)}", frame))
    ended = [worker for worker in seen.workers if worker.why]
    if ended:
        why = f"worker {ended[-1].number} ended: {plain(ended[-1].why or '')}"
        lines.append(_line(f"! {why}", frame, "yellow"))
    if seen.warnings:
        worst = max(seen.warnings, key=lambda one: one.num_lost_tokens)
        warning = f'{_name(worst.tenant)}\'s prompts change at "{_name(worst.line)}"'
        cost = f"{worst.num_lost_tokens:,} tokens lost in {_requests(worst.num_requests)}"
        lines.append(_line(f"! {warning}: {cost} ({len(seen.warnings)} such warnings)", frame, "yellow"))
    return lines


def _running(running: Sequence[RunningFigures], frame: Frame, num_lines: int) -> list[Text]:
    if num_lines < MIN_RUNNING_ROWS:
        return []
    lines = [_heading(f"running: {len(running)}", frame)]
    if not running:
        return [*lines, _line("  no running requests", frame)]
    named = sum(width + 1 for width, _ in COLUMNS)
    room = min(MAX_REQUEST_CHARS, max(MIN_REQUEST_CHARS, frame.width - named - FIGURES_CHARS - 1))
    header = "".join(f"{title:<{width}} " for width, title in ((room, "request"), *COLUMNS))
    lines.append(_line(f"{header}{'computed':>16}{'cached':>9}{'output':>9}", frame, "dim"))
    left = num_lines - len(lines)
    shown = running if len(running) <= left else running[: left - 1]
    lines += [_line(_row(one, room), frame) for one in shown]
    if len(shown) < len(running):
        lines.append(_line(f"and {len(running) - len(shown)} more", frame, "dim"))
    return lines


def _row(one: RunningFigures, room: int) -> str:
    widths = (room, *(width for width, _ in COLUMNS))
    words = (one.request_id, one.tenant, one.priority.lower(), one.phase)
    named = "".join(f"{_name(word, width):<{width}} " for word, width in zip(words, widths, strict=True))
    computed = f"{one.computed:,}/{one.known:,}"
    return f"{named}{computed:>16}{one.cached_tokens:>9,}{one.output_tokens:>9,}"

"""The screen of `quire top` as lines of text. The list of running requests fills the remaining rows.

Colour is never the only signal, and control characters from the server are escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from quire.cli.shared.columns import plain
from quire.cli.watch.top_figures import STATES, TopMetrics, duration, number, percent
from quire.cli.watch.top_glyphs import STYLES, Glyphs, bar, history_curve
from quire.cli.watch.watched_state import WatchedEngine, WatchedSnapshot
from quire.core.inspect.snapshots import RunningFigures

MAX_NAME_CHARS = 64
MIN_HEIGHT_FOR_LISTS = 20
MAX_LIST_ROWS = 6
MIN_RUNNING_ROWS = 3
COLUMNS = ((12, "tenant"), (7, "class"), (6, "phase"))
MIN_REQUEST_CHARS, MAX_REQUEST_CHARS = 12, 40
COUNTS_CHARS = 34
LONG_STEP_S = 1.0
IN_ASCII = str.maketrans({"\u2026": "~"})


@dataclass(frozen=True, slots=True)
class Frame:
    """Size and glyphs of the terminal."""

    width: int
    height: int
    glyphs: Glyphs


def screen_lines(metrics: TopMetrics, frame: Frame, error: str | None = None, keys: str = "") -> list[Text]:
    """Return at most `height` lines. `error` is the error that prevents newer snapshots, `keys` the key bindings."""
    head = [_title(metrics, frame)]
    if error is not None:
        head.append(_line(f"! {plain(error)}; retrying, showing the last snapshot", frame, "reverse"))
    foot = [_line(keys, frame, "dim")] if keys else []
    if metrics.snapshot is None:
        waiting = _line("waiting for the first snapshot", frame)
        return _fit([*head, waiting], foot, frame)
    body = [*_current_metrics(metrics, frame), *_pool(metrics.snapshot, frame), *_steps(metrics, frame)]
    if frame.height >= MIN_HEIGHT_FOR_LISTS:
        body += _lists(metrics.snapshot, frame)
        body += _notes(metrics.snapshot, frame)
    num_left = frame.height - len(head) - len(body) - len(foot)
    return _fit([*head, *body, *_running(metrics.snapshot.running, frame, num_left)], foot, frame)


def _fit(lines: list[Text], foot: list[Text], frame: Frame) -> list[Text]:
    fitting = [*lines[: max(0, frame.height - len(foot))], *foot]
    if frame.glyphs.is_ascii:
        for line in fitting:  # names may contain characters that this terminal cannot show
            line.plain = line.plain.translate(IN_ASCII).encode("ascii", "replace").decode()
            line.truncate(frame.width)
    return fitting


def _line(text: str, frame: Frame, style: str = "") -> Text:
    line = Text(text, style, no_wrap=True)
    line.truncate(frame.width, overflow="ellipsis")
    return line


def _name(text: str, width: int = MAX_NAME_CHARS) -> str:
    """Escape and shorten the untrusted name of a model, tenant or request."""
    escaped = plain(text[:MAX_NAME_CHARS])
    return escaped if len(escaped) <= width and len(text) <= MAX_NAME_CHARS else f"{escaped[: max(0, width - 1)]}~"


def _requests(number: int) -> str:
    return f"{number:,} request{'s' * (number != 1)}"


def _heading(title: str, frame: Frame) -> Text:
    line = Text(no_wrap=True)
    line.append(f"{frame.glyphs.line * 2} ", "dim").append(title, "bold")
    line.append(f" {frame.glyphs.line * max(0, frame.width - len(title) - 4)}", "dim")
    line.truncate(frame.width)
    return line


def _title(metrics: TopMetrics, frame: Frame) -> Text:
    line = Text(no_wrap=True).append("quire top", "bold").append(f"  {_name(metrics.server)}  ")
    snapshot = metrics.snapshot
    for model in () if snapshot is None else snapshot.models:
        is_watched = snapshot is not None and model.name == snapshot.model
        name = f"{_name(model.name)} {_name(model.state)}".strip()
        line.append(f"[{name}]" if is_watched else f" {name} ", "bold" if is_watched else "dim").append(" ")
    line.truncate(frame.width, overflow="ellipsis")
    return line


def _current_metrics(metrics: TopMetrics, frame: Frame) -> list[Text]:
    snapshot = metrics.snapshot
    if snapshot is None:
        return []
    entries = (
        (number(metrics.output_tokens_per_s), "tokens/s"),
        (number(metrics.prompt_tokens_per_s), "prompt/s"),
        (duration(metrics.ttft_p50_s), "first token"),
        (percent(metrics.hit_rate), "hit rate"),
        (f"{len(snapshot.running):,}", "running"),
        (f"{sum(entry.num_requests for entry in snapshot.queue):,}", "waiting"),
        (f"{snapshot.totals.num_preemptions:,}", "preempted"),
        *_engine(snapshot.engine),
    )
    lines = _wrap([Text(value, "bold").append(f" {label}", "not bold dim") for value, label in entries], frame)
    label = "tokens/s, last hour "
    curve = history_curve(
        [row.output_tokens_per_s for row in metrics.history], frame.width - len(label) - 12, frame.glyphs
    )
    maximum = max((row.output_tokens_per_s or 0.0 for row in metrics.history), default=0.0)
    if not maximum:
        return lines
    return [*lines, _curve_line(label, curve, f" max {number(maximum)}", frame)]


def _engine(engine: WatchedEngine | None) -> list[tuple[str, str]]:
    """Return the computed tokens and, if the current step takes long, its duration so far."""
    if engine is None:
        return []
    step = [(duration(engine.step_s), "in a step")] if engine.step_s > LONG_STEP_S else []
    return [(f"{engine.num_computed_tokens:,}", "computed"), *step]


def _curve_line(label: str, curve: str, suffix: str, frame: Frame) -> Text:
    line = Text(no_wrap=True).append(label, "dim").append(curve, "cyan").append(suffix, "dim")
    line.truncate(frame.width)
    return line


def _pool(snapshot: WatchedSnapshot, frame: Frame) -> list[Text]:
    pool = snapshot.shown_pool
    if pool is None:
        return [_heading("pool: no data, the model is not loaded", frame)]
    title = f"pool: {pool.num_blocks:,} blocks of {pool.block_size} tokens"
    legend = list[Text]()
    # Members report only the number of blocks in use, so a gateway cannot distinguish free from cached blocks.
    names = {state: state for state in STATES} if snapshot.fleet is None else {"free": "free or cached", "used": "used"}
    for state, name in names.items():
        count = int(getattr(pool.counts, state))
        label = f" {name} {count:,} {percent(count / pool.num_blocks)}"
        legend.append(Text(frame.glyphs.states[state], STYLES[state]).append(label, "default"))
    return [_heading(title, frame), bar(pool.counts, frame.width, frame.glyphs), *_wrap(legend, frame)]


def _wrap(entries: Sequence[Text], frame: Frame) -> list[Text]:
    """Lay out entries side by side, on as many lines as needed."""
    lines = [Text(no_wrap=True)]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + len(entry) + 2 > frame.width:
            lines.append(Text(no_wrap=True))
        lines[-1].append("   " if lines[-1] else "").append_text(entry)
    for line in lines:
        line.truncate(frame.width)
    return lines


def _steps(metrics: TopMetrics, frame: Frame) -> list[Text]:
    if not metrics.steps:
        return []
    width = max(8, frame.width - 24)
    last = list(metrics.steps)[-width:]
    lines = [_heading(f"tokens per step, last {len(last)} steps; the latest took {last[-1].ms:,.1f} ms", frame)]
    for label, values in (
        ("prompt ", [step.prompt_tokens for step in last]),
        ("output ", [step.output_tokens for step in last]),
    ):
        lines.append(_curve_line(label, history_curve(values, width, frame.glyphs), f" max {max(values):,}", frame))
    return lines


def _lists(snapshot: WatchedSnapshot, frame: Frame) -> list[Text]:
    half = frame.width // 2
    queue = [
        f"{entry.num_requests:>6,}  {_name(entry.priority.lower(), 7):<7} {_name(entry.tenant, half - 18)}"
        for entry in sorted(snapshot.queue, key=lambda entry: -entry.num_requests)
    ]
    misses = sorted(snapshot.misses, key=lambda miss: -miss.num_tokens)
    rows = [f"{miss.num_tokens:>10,}  {_name(miss.reason, 16)}, {_requests(miss.num_requests)}" for miss in misses]
    left, right = _first_rows(queue, "no waiting requests"), _first_rows(rows, "no misses")
    left_frame, right_frame = Frame(half - 1, 0, frame.glyphs), Frame(frame.width - half, 0, frame.glyphs)
    lines = [_side_by_side(_heading("queue", left_frame), _heading("missed tokens, last hour", right_frame), half)]
    for row in range(max(len(left), len(right))):
        left_text = Text(left[row] if row < len(left) else "", no_wrap=True)
        right_text = Text(right[row] if row < len(right) else "", no_wrap=True)
        lines.append(_side_by_side(left_text, right_text, half))
    for line in lines:
        line.truncate(frame.width)
    return lines


def _first_rows(rows: Sequence[str], empty_text: str) -> list[str]:
    """Return the first rows and a line with the number of omitted rows."""
    if not rows:
        return [f"  {empty_text}"]
    if len(rows) <= MAX_LIST_ROWS:
        return list(rows)
    return [*rows[: MAX_LIST_ROWS - 1], f"  and {len(rows) - MAX_LIST_ROWS + 1} more"]


def _side_by_side(left: Text, right: Text, half: int) -> Text:
    left.truncate(half - 1)
    left.pad_right(half - len(left))
    return left.append_text(right)


def _notes(snapshot: WatchedSnapshot, frame: Frame) -> list[Text]:
    lines = list[Text]()
    if snapshot.fleet is not None:
        quarantined = f", {snapshot.fleet.num_quarantined} quarantined" if snapshot.fleet.num_quarantined else ""
        counts = f"{len(snapshot.fleet.members)} members, {snapshot.fleet.num_moved} streams moved{quarantined}"
        lines.append(_line(f"fleet: {counts}, hit rate {percent(snapshot.fleet.hit_rate)}", frame))
    workers = [worker for worker in snapshot.workers if worker.why]
    if workers:
        reason = f"worker {workers[-1].number} ended: {plain(workers[-1].why or '')}"
        lines.append(_line(f"! {reason}", frame, "yellow"))
    if snapshot.warnings:
        worst = max(snapshot.warnings, key=lambda warning: warning.num_lost_tokens)
        text = f'{_name(worst.tenant)}\'s prompts change at "{_name(worst.line)}"'
        cost = f"{worst.num_lost_tokens:,} tokens lost in {_requests(worst.num_requests)}"
        lines.append(_line(f"! {text}: {cost} ({len(snapshot.warnings)} such warnings)", frame, "yellow"))
    return lines


def _running(running: Sequence[RunningFigures], frame: Frame, num_lines: int) -> list[Text]:
    if num_lines < MIN_RUNNING_ROWS:
        return []
    lines = [_heading(f"running: {len(running)}", frame)]
    if not running:
        return [*lines, _line("  no running requests", frame)]
    columns_width = sum(width + 1 for width, _ in COLUMNS)
    id_width = min(MAX_REQUEST_CHARS, max(MIN_REQUEST_CHARS, frame.width - columns_width - COUNTS_CHARS - 1))
    header = "".join(f"{title:<{width}} " for width, title in ((id_width, "request"), *COLUMNS))
    lines.append(_line(f"{header}{'computed':>16}{'cached':>9}{'output':>9}", frame, "dim"))
    num_left = num_lines - len(lines)
    listed = running if len(running) <= num_left else running[: num_left - 1]
    lines += [_line(_row(request, id_width), frame) for request in listed]
    if len(listed) < len(running):
        lines.append(_line(f"and {len(running) - len(listed)} more", frame, "dim"))
    return lines


def _row(request: RunningFigures, id_width: int) -> str:
    widths = (id_width, *(width for width, _ in COLUMNS))
    texts = (request.request_id, request.tenant, request.priority.lower(), request.phase)
    cells = "".join(f"{_name(text, width):<{width}} " for text, width in zip(texts, widths, strict=True))
    computed = f"{request.computed:,}/{request.known:,}"
    return f"{cells}{computed:>16}{request.cached_tokens:>9,}{request.output_tokens:>9,}"

"""Takes the pictures of `quire top` and `quire explain`: docs/images/top.svg and docs/images/explain.svg.

`python -m benchmarks.watching_pictures FOLDER` runs both commands in a terminal and draws what they show: what the test
model's cache says of a prompt whose day has changed, and a server that agents of three tenants keep busy. Its model is
an oracle with a pace, as in the pictures of the dashboard: its speed is no measurement.
"""

import asyncio
import fcntl
import html
import json
import os
import pty
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from itertools import groupby
from pathlib import Path

from rich.style import Style
from rich.text import Span, Text

from benchmarks.dashboard_load import agents
from benchmarks.record import ROOT, say
from benchmarks.terminal_picture import CHARACTER, LINE, MARGIN
from benchmarks.test_model import smollm2_file
from quire.api.access.keys import add_key

IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 104, 36
UNDER_LOAD_S = 150.0
"""The pool fills, the queue forms, and the last hour has a few rows."""
PORT = 8000
TOP, EXPLAIN = "quire top", "quire explain body.json"
ORACLE = (
    *("--blocks", "20000", "--running", "64", "--sequence-tokens", "4096"),
    *("--step-s", "0.2", "--prompt-tokens", "512"),
)
NUM_AGENTS = 80
START_S = 900.0
FRAME = "\x1b[H"
"""Where a screen is drawn anew."""
COLOURS = {
    "grey": ("#59636e", "#9198a1"), "red": ("#a40e26", "#ff7b72"), "blue": ("#0550ae", "#79c0ff"),
    "green": ("#116329", "#56d364"),
    "magenta": ("#8250df", "#d2a8ff"), "yellow": ("#7d4e00", "#e3b341"), "cyan": ("#1b6c7c", "#56d4dd"),
}  # fmt: skip
"""In the light and in the dark."""
NUMBERED = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "grey")
"""What a terminal calls its colours."""
LIBRARY = (
    "You answer letters to a public library of a small town, its readers and its books, and you answer in one or two "
    "friendly sentences. Today is {day}, and the library is open from nine to five. Never promise a book that is lent "
    "out, and never tell who has it."
)


# -- servers that work -------------------------------------------------------------------------------------------------


@contextmanager
def served(words: Sequence[str], folder: Path, around: Mapping[str, str]) -> Iterator[None]:
    """A server at the usual port, until this is left."""
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*words, "--port", str(PORT)], cwd=folder, env=dict(around), stderr=log)
        try:
            _wait_until_ready(server)
            yield
        finally:
            for _ in range(2):  # what runs need not be waited for
                server.send_signal(signal.SIGINT)
            server.wait()


def _wait_until_ready(server: "subprocess.Popen[bytes]") -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and server.poll() is None:
        with suppress(OSError, HTTPException):
            if _asked("GET", "/ready") == 200:
                return
        time.sleep(0.2)
    sys.exit("the server did not come up; server.log says why")


def _asked(method: str, path: str, body: object = None) -> int:
    connection = HTTPConnection("127.0.0.1", PORT, timeout=600)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


# -- what a terminal shows ---------------------------------------------------------------------------------------------


def shown(command: str, folder: Path, around: Mapping[str, str], for_s: float | None = None) -> list[Text]:
    """What a command leaves on a terminal; of one that draws a screen, its last picture before q is typed."""
    pid, wire = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", command], dict(around))  # noqa: S606
    fcntl.ioctl(wire, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    until_s = None if for_s is None else time.monotonic() + for_s
    heard = b""
    while True:
        ready, _, _ = select.select([wire], [], [], 0.2)
        if until_s is not None and time.monotonic() >= until_s:
            os.write(wire, b"q")
            until_s = None
        try:
            data = os.read(wire, 65_536) if ready else None
        except OSError:  # the terminal is gone with the last who had it open
            break
        if data == b"":
            break
        heard += data or b""
    os.close(wire)
    os.waitpid(pid, 0)
    told = heard.decode(errors="replace").replace("\r", "")
    frames = told.split(FRAME)
    last = frames[-1].partition("\x1b[?")[0] if len(frames) > 1 else told
    return [Text.from_ansi(line) for line in last.rstrip().split("\n")]


def drawn(command: str, lines: Sequence[Text]) -> str:
    """As a picture, in the light or in the dark."""
    rows = [part for row in (Text(f"$ {command}", "bold"), *lines) for part in _wrapped(row)]
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(rows) * LINE + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            f"<title>{html.escape(command)}, in a terminal</title>",
            f"<style>\n{_style()}\n</style>",
            f'<rect class="screen" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8"/>',
            *(piece for at, row in enumerate(rows) for piece in _row(row, MARGIN + LINE * (at + 0.75))),
            "</svg>",
            "",
        ]
    )


def _row(row: Text, y: float) -> Iterator[str]:
    """Every run of one style where it stands: fonts have block characters of other widths than letters."""
    column = 0
    for text, style in _runs(row):
        if text.strip():
            x, length = MARGIN + column * CHARACTER, len(text) * CHARACTER
            kind = f' class="{style}"' if style else ""
            yield (
                f'<text x="{x:.1f}" y="{y:.0f}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"{kind}>'
                f"{html.escape(text)}</text>"
            )
        column += len(text)


def _runs(row: Text) -> Iterator[tuple[str, str]]:
    """Pieces of one style each."""
    styles = [""] * len(row.plain)
    for span in (Span(0, len(row.plain), row.style), *row.spans):
        for at in range(span.start, min(span.end, len(styles))):
            styles[at] = f"{styles[at]} {_classes(span.style)}".strip()
    for style, group in groupby(zip(row.plain, styles, strict=True), key=lambda one: one[1]):
        yield "".join(character for character, _ in group), style


def _classes(given: str | Style) -> str:
    """What the picture's style sheet calls it."""
    style = Style.parse(given) if isinstance(given, str) else given
    number = None if style.color is None else style.color.number
    colour = () if number is None or number >= len(NUMBERED) else (NUMBERED[number],)
    return " ".join((*colour, *(["bold"] if style.bold else []), *(["dim"] if style.dim else [])))


def _wrapped(row: Text) -> list[Text]:
    """On as many lines as the terminal needs for it."""
    return list(row.divide(range(COLUMNS, len(row.plain), COLUMNS)))


def _style() -> str:
    light = "\n".join(f"  .{name} {{ fill: {one}; }}" for name, (one, _) in COLOURS.items())
    dark = "\n".join(f"    .{name} {{ fill: {one}; }}" for name, (_, one) in COLOURS.items())
    return f"""\
  text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1b1f24; white-space: pre; }}
  .screen {{ fill: #f4f5f7; stroke: #d5d9de; }}
  .bold {{ font-weight: 600; }}
  .dim {{ fill: #59636e; }}
{light}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #e7eaed; }}
    .screen {{ fill: #1d2125; stroke: #363c43; }}
    .dim {{ fill: #9198a1; }}
{dark}
  }}"""


def explained(folder: Path, around: Mapping[str, str]) -> list[Text]:
    """Yesterday's question to the test model, and then today's: the day stands near the top."""
    shutil.copy(smollm2_file(), folder / "smollm2.gguf")
    with served(["quire", "serve", "smollm2.gguf", "--memory", "1GB"], folder, around):
        for day in ("Monday", "Tuesday"):
            told = [("system", LIBRARY.format(day=day)), ("user", "Is the book about bees there?")]
            messages = [{"role": role, "content": content} for role, content in told]
            body = {"model": "smollm2", "messages": messages, "max_tokens": 4}
            (folder / "body.json").write_text(json.dumps(body))
            if day == "Monday":
                _asked("POST", "/v1/chat/completions", body)
        return shown(EXPLAIN, folder, around)


async def watched(folder: Path, around: Mapping[str, str]) -> list[Text]:
    """A server whose model is an oracle with a pace, while agents of three tenants keep 64 places busy."""
    keys_file = folder / "keys.json"
    keys_file.unlink(missing_ok=True)
    ceilings = {"support": "high", "research": "normal", "nightly": "low"}
    keys = {name: add_key(keys_file, name, max_class=ceiling) for name, ceiling in ceilings.items()}
    words = [sys.executable, "-m", "tests.support.servers.oracle_server", *ORACLE, "--keys-file", str(keys_file)]
    with served(words, folder, {**around, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}):
        async with agents(f"http://127.0.0.1:{PORT}", keys, NUM_AGENTS, random.Random(29)):
            return await asyncio.to_thread(shown, TOP, folder, around, UNDER_LOAD_S)


def main(folder: Path) -> None:
    """Both pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    around = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(folder), "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS),
    }  # fmt: skip
    if (cache := os.environ.get("QUIRE_CACHE")) is not None:
        around["QUIRE_CACHE"] = cache
    for name, command, lines in (
        ("explain", EXPLAIN, explained(folder, around)),
        ("top", TOP, asyncio.run(watched(folder, around))),
    ):
        path = IMAGES / f"{name}.svg"
        path.write_text(drawn(command, lines))
        say(f"{path.relative_to(ROOT)}: {len(lines)} lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

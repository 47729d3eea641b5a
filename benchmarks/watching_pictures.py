"""Draws the pictures of `quire top` and `quire explain`: docs/images/top.svg and docs/images/explain.svg.

`python -m benchmarks.watching_pictures FOLDER` runs both commands in a terminal and draws their output: the prefix miss
of a prompt whose date has changed, and a server that agents of three tenants keep busy. Its model is an oracle, which
computes nothing and has a fixed step time: its speed is no measurement.
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
"""Long enough to fill the pool and the queue, and to get a few rows in the last hour."""
PORT = 8000
TOP, EXPLAIN = "quire top", "quire explain body.json"
ORACLE = (
    *("--blocks", "20000", "--running", "64", "--sequence-tokens", "4096"),
    *("--step-s", "0.2", "--prompt-tokens", "512"),
)
NUM_AGENTS = 80
START_S = 900.0
FRAME = "\x1b[H"
"""The escape code with which a new frame begins."""
COLOURS = {
    "grey": ("#59636e", "#9198a1"), "red": ("#a40e26", "#ff7b72"), "blue": ("#0550ae", "#79c0ff"),
    "green": ("#116329", "#56d364"),
    "magenta": ("#8250df", "#d2a8ff"), "yellow": ("#7d4e00", "#e3b341"), "cyan": ("#1b6c7c", "#56d4dd"),
}  # fmt: skip
"""Colours in the light and the dark scheme."""
NUMBERED = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "grey")
"""Names of the terminal's colours by number."""
LIBRARY = (
    "You answer letters to a public library of a small town, its readers and its books, and you answer in one or two "
    "friendly sentences. Today is {day}, and the library is open from nine to five. Never promise a book that is lent "
    "out, and never tell who has it."
)


# -- servers -----------------------------------------------------------------------------------------------------------


@contextmanager
def run_server(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a server on the default port while the block runs."""
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, "--port", str(PORT)], cwd=folder, env=dict(environment), stderr=log)
        try:
            _wait_until_ready(server)
            yield
        finally:
            for _ in range(2):  # the second signal stops running requests
                server.send_signal(signal.SIGINT)
            server.wait()


def _wait_until_ready(server: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and server.poll() is None:
        with suppress(OSError, HTTPException):
            if _request("GET", "/ready") == 200:
                return
        time.sleep(0.2)
    sys.exit("the server did not become ready; see server.log")


def _request(method: str, path: str, body: object = None) -> int:
    connection = HTTPConnection("127.0.0.1", PORT, timeout=600)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


# -- output of a terminal ----------------------------------------------------------------------------------------------


def screen_of(command: str, folder: Path, environment: Mapping[str, str], for_s: float | None = None) -> list[Text]:
    """Run a command and return its output; of a full-screen program, the last frame before q is typed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", command], dict(environment))  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    end_s = None if for_s is None else time.monotonic() + for_s
    data_so_far = b""
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        if end_s is not None and time.monotonic() >= end_s:
            os.write(terminal, b"q")
            end_s = None
        try:
            data = os.read(terminal, 65_536) if ready else None
        except OSError:  # the last process with this terminal has ended
            break
        if data == b"":
            break
        data_so_far += data or b""
    os.close(terminal)
    os.waitpid(pid, 0)
    output = data_so_far.decode(errors="replace").replace("\r", "")
    frames = output.split(FRAME)
    frame = frames[-1].partition("\x1b[?")[0] if len(frames) > 1 else output
    return [Text.from_ansi(line) for line in frame.rstrip().split("\n")]


def draw(command: str, lines: Sequence[Text]) -> str:
    """Return the picture as SVG, with a light and a dark scheme."""
    rows = [part for row in (Text(f"$ {command}", "bold"), *lines) for part in _wrap(row)]
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(rows) * LINE + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            f"<title>{html.escape(command)}, in a terminal</title>",
            f"<style>\n{_style()}\n</style>",
            f'<rect class="screen" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8"/>',
            *(piece for index, row in enumerate(rows) for piece in _row(row, MARGIN + LINE * (index + 0.75))),
            "</svg>",
            "",
        ]
    )


def _row(row: Text, y: float) -> Iterator[str]:
    """Yield each run of one style at its column, because block characters may have other widths than letters."""
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
    """Split a row into runs of one style."""
    styles = [""] * len(row.plain)
    for span in (Span(0, len(row.plain), row.style), *row.spans):
        for column in range(span.start, min(span.end, len(styles))):
            styles[column] = f"{styles[column]} {_classes(span.style)}".strip()
    for style, group in groupby(zip(row.plain, styles, strict=True), key=lambda pair: pair[1]):
        yield "".join(character for character, _ in group), style


def _classes(style_or_name: str | Style) -> str:
    """Return the classes of a style in the picture's style sheet."""
    style = Style.parse(style_or_name) if isinstance(style_or_name, str) else style_or_name
    number = None if style.color is None else style.color.number
    colour = () if number is None or number >= len(NUMBERED) else (NUMBERED[number],)
    return " ".join((*colour, *(["bold"] if style.bold else []), *(["dim"] if style.dim else [])))


def _wrap(row: Text) -> list[Text]:
    """Wrap a row to the width of the terminal."""
    return list(row.divide(range(COLUMNS, len(row.plain), COLUMNS)))


def _style() -> str:
    light = "\n".join(f"  .{name} {{ fill: {colour}; }}" for name, (colour, _) in COLOURS.items())
    dark = "\n".join(f"    .{name} {{ fill: {colour}; }}" for name, (_, colour) in COLOURS.items())
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


def explain_output(folder: Path, environment: Mapping[str, str]) -> list[Text]:
    """Ask a question with Monday's date in the system prompt, and explain the miss of the same with Tuesday's."""
    shutil.copy(smollm2_file(), folder / "smollm2.gguf")
    with run_server(["quire", "serve", "smollm2.gguf", "--memory", "1GB"], folder, environment):
        for day in ("Monday", "Tuesday"):
            turns = [("system", LIBRARY.format(day=day)), ("user", "Is the book about bees there?")]
            messages = [{"role": role, "content": content} for role, content in turns]
            body = {"model": "smollm2", "messages": messages, "max_tokens": 4}
            (folder / "body.json").write_text(json.dumps(body))
            if day == "Monday":
                _request("POST", "/v1/chat/completions", body)
        return screen_of(EXPLAIN, folder, environment)


async def top_output(folder: Path, environment: Mapping[str, str]) -> list[Text]:
    """Return a screen of `quire top` of an oracle server that agents of three tenants keep busy."""
    keys_file = folder / "keys.json"
    keys_file.unlink(missing_ok=True)
    max_classes = {"support": "high", "research": "normal", "nightly": "low"}
    keys = {name: add_key(keys_file, name, max_class=ceiling) for name, ceiling in max_classes.items()}
    command = [sys.executable, "-m", "tests.support.servers.oracle_server", *ORACLE, "--keys-file", str(keys_file)]
    with run_server(command, folder, {**environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}):
        async with agents(f"http://127.0.0.1:{PORT}", keys, NUM_AGENTS, random.Random(29)):
            return await asyncio.to_thread(screen_of, TOP, folder, environment, UNDER_LOAD_S)


def main(folder: Path) -> None:
    """Draw both pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(folder), "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS),
    }  # fmt: skip
    if (cache := os.environ.get("QUIRE_CACHE")) is not None:
        environment["QUIRE_CACHE"] = cache
    for name, command, lines in (
        ("explain", EXPLAIN, explain_output(folder, environment)),
        ("top", TOP, asyncio.run(top_output(folder, environment))),
    ):
        path = IMAGES / f"{name}.svg"
        path.write_text(draw(command, lines))
        say(f"{path.relative_to(ROOT)}: {len(lines)} lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

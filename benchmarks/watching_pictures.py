"""Takes the pictures of `quire top` and `quire explain`: docs/images/top.svg and docs/images/explain.svg.

`python -m benchmarks.watching_pictures FOLDER` serves the test model to agents of three tenants and draws what the
commands show in a terminal meanwhile. Nothing is typed in here but the commands and the agents' words.
"""

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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import groupby
from pathlib import Path

from rich.style import Style
from rich.text import Span, Text

from benchmarks.record import ROOT, say
from benchmarks.terminal_picture import CHARACTER, LINE, MARGIN
from benchmarks.test_model import smollm2_file
from quire.api.access.keys import add_key

IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 104, 36
UNDER_LOAD_S = 75.0
"""Of the model's own pace: the pool fills, the queue forms, and the last hour has a few rows."""
START_S = 300.0
FRAME = "\x1b[H"
"""Where a screen is drawn anew."""
TENANTS: Mapping[str, tuple[str, int]] = {"support": ("high", 4), "research": ("normal", 12), "nightly": ("low", 8)}
"""The most urgent class of each, and how many agents it has."""
COLOURS = {
    "grey": ("#59636e", "#9198a1"), "blue": ("#0550ae", "#79c0ff"), "green": ("#116329", "#56d364"),
    "magenta": ("#8250df", "#d2a8ff"), "yellow": ("#7d4e00", "#e3b341"), "cyan": ("#1b6c7c", "#56d4dd"),
}  # fmt: skip
"""In the light and in the dark."""
NUMBERED = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "grey")
"""What a terminal calls its colours."""
TOOLS = (
    "read_file reads a file of the project. write_file writes one, all of it. run_tests runs the tests and tells which "
    "failed. search finds words in the project. ask asks the person who sits before it. Use one at a time, and say in "
    "a sentence why. Never guess what is in a file: read it. Never end before the tests pass. Names of files are from "
    "the folder where the project begins. Keep what you write short, in the words of the project, and leave what works "
    "as it is. When you are not sure what is wanted, ask first; when a tool fails twice, say so and stop. "
)
QUESTIONS = (
    "The tests of the parser fail since yesterday. Find out why.", "Write what changed since the last release.",
    "Which files would a new setting touch?", "Make the search ignore folders that are hidden.",
    "Sum up the open questions of this week.", "Why is the start slower than it was?",
)  # fmt: skip
LIBRARY = (
    "You answer letters to a public library of a small town, its readers and its books, and you answer in one or two "
    "friendly sentences. Today is {day}, and the library is open from nine to five. Never promise a book that is lent "
    "out, and never tell who has it."
)


# -- a server that works -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """Where it listens, and the keys of its tenants."""

    port: int
    keys: Mapping[str, str]

    def ask(self, tenant: str, system: str, asked: str, num_tokens: int) -> str:
        """One answer."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": num_tokens, "service_tier": "priority"}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            headers = {"content-type": "application/json", "authorization": f"Bearer {self.keys[tenant]}"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            return str(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])
        finally:
            connection.close()


@contextmanager
def served(folder: Path, around: Mapping[str, str]) -> Iterator[Served]:
    """The test model behind keys."""
    shutil.copy(smollm2_file(), folder / "smollm2.gguf")
    keys_file = folder / "keys.json"
    keys_file.unlink(missing_ok=True)
    keys = {name: add_key(keys_file, name, max_class=ceiling) for name, (ceiling, _) in TENANTS.items()}
    words = ["quire", "serve", "smollm2.gguf", "--port", "8000", "--keys-file", str(keys_file), "--max-running", "16"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*words, "--memory", "900MB"], cwd=folder, env=dict(around), stderr=log)
        try:
            _wait_until_ready(8000, server)
            yield Served(8000, keys)
        finally:
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGINT)
            server.wait()


def _wait_until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and server.poll() is None:
        with suppress(OSError, HTTPException):
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    sys.exit("the server did not come up; server.log says why")


@contextmanager
def agents(at: Served) -> Iterator[None]:
    """Conversations that grow, of all tenants at once, until the picture is taken."""
    is_over = threading.Event()

    def work(tenant: str, number: int) -> None:
        dice = random.Random(f"{tenant} {number}")
        while not is_over.is_set():
            # What belongs behind stands in front: the day and a number of the run, as clients do.
            rotating = f"Run {dice.randrange(10**6)}. " if tenant == "nightly" else ""
            said = ""
            for _ in range(dice.randint(2, 5)):
                said += f"{dice.choice(QUESTIONS)} "
                with suppress(OSError, HTTPException, KeyError, ValueError):
                    answer = at.ask(tenant, f"{rotating}You are an agent of {tenant}. {TOOLS}", said, 48)
                    said += f"{answer} "
                if is_over.is_set():
                    return

    for tenant, (_, num_agents) in TENANTS.items():
        for number in range(num_agents):
            threading.Thread(target=work, args=(tenant, number), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


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


def main(folder: Path) -> None:
    """Both pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    around = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(folder), "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS),
        **{name: value for name, value in os.environ.items() if name.startswith("QUIRE_CACHE")},
    }  # fmt: skip
    with served(folder, around) as at:
        at.ask("support", LIBRARY.format(day="Monday"), "Is the book about bees there?", 4)
        asked = {"model": "smollm2", "messages": [
            {"role": "system", "content": LIBRARY.format(day="Tuesday")},
            {"role": "user", "content": "Is the book about bees there?"},
        ]}  # fmt: skip
        (folder / "body.json").write_text(json.dumps(asked))
        explained = shown("quire explain body.json", folder, {**around, "OPENAI_API_KEY": at.keys["support"]})
        (IMAGES / "explain.svg").write_text(drawn("quire explain body.json", explained))
        with agents(at):
            (IMAGES / "top.svg").write_text(drawn("quire top", shown("quire top", folder, around, UNDER_LOAD_S)))
    for name in ("explain.svg", "top.svg"):
        say(f"docs/images/{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Records a real run of commands in a terminal, and draws it: docs/pictures/first-model.svg.

`python -m benchmarks.terminal_picture FOLDER` runs the README's lines in a folder that has a wheel and a model, in an
environment of its own. Lines appear at their recorded times; pauses are cut to two seconds. All text but the commands
is recorded.
"""

import html
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import ROOT
from benchmarks.test_model import smollm2_file

PICTURE = ROOT / "docs" / "pictures" / "first-model.svg"
COLUMNS, ROWS = 100, 24
LINE, CHARACTER, MARGIN = 20, 8.4, 16
MAX_PAUSE_S = 2.0
PAUSE_S = 1.2
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
STYLE = """\
  text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1b1f24; white-space: pre; }
  .typed { font-weight: 600; }
  rect { fill: #f4f5f7; stroke: #d5d9de; }
  @media (prefers-color-scheme: dark) { text { fill: #e7eaed; } rect { fill: #1d2125; stroke: #363c43; } }
  @keyframes come { from { opacity: 0; } to { opacity: 1; } }
  @media (prefers-reduced-motion: no-preference) { text { animation: come 0.1s both; } }"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the terminal, and the time when it appeared."""

    at_s: float
    text: str
    is_typed: bool = False


def record_command(command: str, environment: dict[str, str], folder: Path, end: str, start_s: float) -> Iterator[Line]:
    """Run a command and yield its lines until it ends, or prints `end` and is interrupted, as a user would do."""
    yield Line(time.monotonic() - start_s, f"$ {command}", is_typed=True)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", f"stty cols {COLUMNS}; {command}"], environment)  # noqa: S606
    rest, is_interrupted = "", False
    while True:
        ready, _, _ = select.select([terminal], [], [], 600)
        try:
            data = os.read(terminal, 65536) if ready else b""
        except OSError:  # the last process with this terminal has ended
            data = b""
        if not data:
            break
        *lines, rest = ESCAPES.sub("", rest + data.decode(errors="replace")).split("\n")
        for line in lines:
            for row in wrap(line, folder):
                yield Line(time.monotonic() - start_s, row)
            if end and end in line and not is_interrupted:
                is_interrupted = True
                os.kill(pid, signal.SIGINT)
        if is_interrupted:
            break
    if is_interrupted:
        os.close(terminal)
    os.waitpid(pid, 0)


def wrap(line: str, folder: Path) -> list[str]:
    """Wrap a line to rows; the folder is shown as the home folder, and a long list of packages is cut."""
    plain = line.replace(str(folder), "~")
    if plain.startswith("Successfully"):
        return [f"{plain[: COLUMNS - 1]}…"]
    return [plain[start : start + COLUMNS] for start in range(0, len(plain), COLUMNS)]


def shorten_pauses(lines: list[Line]) -> list[Line]:
    """Shorten long pauses."""
    result, skipped_s, last_s = list[Line](), 0.0, 0.0
    for line in lines:
        skipped_s += max(0.0, line.at_s - last_s - MAX_PAUSE_S)
        last_s = line.at_s
        result.append(Line(line.at_s - skipped_s, line.text, line.is_typed))
    return result


def draw(lines: list[Line]) -> str:
    """Return the picture as SVG."""
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (index + 0.75):.0f}" class="{"typed" if line.is_typed else "said"}"'
        f' style="animation-delay: {line.at_s:.2f}s">{html.escape(line.text)}</text>'
        for index, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            "<title>quire run, recorded in a terminal</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8"/>',
            *rows,
            "</svg>",
            "",
        ]
    )


def main(folder: Path) -> None:
    """Record the README's two commands, and draw them."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    shutil.copy(smollm2_file(), folder / "model.gguf")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    if not list(folder.glob("quire-*.whl")):
        subprocess.run(wheel, check=True)
    environment = {
        "PATH": f"{folder}/venv/bin:/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "NO_COLOR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off",
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }  # fmt: skip
    chapter = (ROOT / "README.md").read_text().partition("## Your first model")[2].partition("\n## ")[0]
    install, run = re.findall(r"^\$ (.+)$", chapter, re.MULTILINE)
    start_s = time.monotonic()
    lines = [
        line
        for line in record_command(install, environment, folder, "", start_s)
        if line.is_typed or line.text.startswith("Successfully")
    ]
    lines += [line for line in record_command(run, environment, folder, "in a browser", start_s) if line.text.strip()]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(shorten_pauses(lines)))
    sys.stderr.write(f"{PICTURE.relative_to(ROOT)}: {len(lines)} lines\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The page at `/` in a real browser, wide and narrow, light and dark: controls, contrast, requests, hostile answers.

Hostile answers come from a scripted model behind the real server and its stream, so the browser gets what a real model
could have generated. Screenshots are written beside the record.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from benchmarks.record import PROOF_RESULTS, say
from benchmarks.servers import HOST
from proofs.agents.clients_run import scripted_server
from proofs.agents.clients_run.scripted_model import EXACTLY
from proofs.api.load import Server, serve_words, started
from proofs.framework.browser import Page, browsing
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

SIZES = ((1280, 800), (390, 844))
PICTURES = PROOF_RESULTS / "pictures"
LEAST_CONTRAST = 4.5
OTHER = "elsewhere.example"
QUESTION = "Write two sentences about the sea, a list of three fish, and a line of Python."
MARKDOWN_ANSWER = (
    "# Fish\n\nHere are **three** of them:\n\n- cod\n- *trout*\n- `eel`\n\n> The sea is wide.\n\n"
    "```python\nprint([fish for fish in ('cod', 'trout', 'eel')])\n```\n\n| fish | where |\n|---|---|\n| cod | sea |\n"
)
ALLOWED_TAGS = (
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "div", "span", "button", "pre"),
    *("code", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "a", "details", "summary", "br"),
)
MARKUP = (
    "<script>fetch('https://{other}/s')</script>",
    "<img src=https://{other}/i.png onerror=alert(1)>",
    "![x](https://{other}/m.png)",
    "[x](javascript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "<iframe src=https://{other}></iframe>",
    "<style>@import url(https://{other}/c.css);</style>",
    "<link rel=stylesheet href=https://{other}/l.css>",
    "<svg onload=alert(1)><use href=https://{other}/u.svg#x /></svg>",
    "<a href=https://{other} ping=https://{other}/p>x</a>",
    "<form action=https://{other}><button>x</button></form>",
    '[x](https://{other}/"onmouseover="alert(1))',
    "<video src=https://{other}/v.mp4 autoplay></video>",
    "<base href=https://{other}/>",
    "<meta http-equiv=refresh content='0;url=https://{other}'>",
    "<details open ontoggle=alert(1)>x</details>",
    "`<b onclick=alert(1)>`",
    "```html\n<script src=https://{other}/f.js></script>\n```",
    "| <b> | ![](https://{other}/t.png) |\n|---|---|\n| **<i>** | x |",
    "<math><mtext></math><img src=x onerror=alert(1)>",
)
FIND_UNESCAPED = """(() => {
  const found = [];
  for (const node of document.querySelectorAll('#messages article.assistant .text *')) {
    const name = node.tagName.toLowerCase();
    const strange = [...node.attributes].filter(({ name, value }) => name.startsWith('on') || name === 'ping'
      || name === 'style' || name === 'src' || (name === 'href' && !/^https?:/.test(value)));
    if (!KNOWN.includes(name) || strange.length) found.push(node.outerHTML.slice(0, 120));
  }
  return found;
})()""".replace("KNOWN", json.dumps(ALLOWED_TAGS))
CONTRAST = """(() => {
  const parse = (words) => {
    const [r, g, b, a = 1] = words.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const light = (rgb) => {
    const straight = (one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((one) => straight(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const { rgb, a } = parse(getComputedStyle(at).backgroundColor);
      if (a > 0.99) return rgb;
    }
    return matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement, box = node.getBoundingClientRect();
    const isSeen = node.checkVisibility({ visibilityProperty: true }) && box.width > 1 && box.height > 1;
    if (!text.data.trim() || !isSeen) continue;
    const own = light(parse(getComputedStyle(node).color).rgb), under = light(ground(node));
    const ratio = (Math.max(own, under) + 0.05) / (Math.min(own, under) + 0.05);
    if (ratio < LEAST) found.push(`${text.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()""".replace("LEAST", str(LEAST_CONTRAST))
CONTROLS = """(() => {
  window.controls = [...document.querySelectorAll('button, a[href], input, select, textarea, summary')]
    .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled)
    .filter((one) => one.getBoundingClientRect().width > 0);
  window.reached = new Set();
  return window.controls.length;
})()"""
PAINT = "(performance.getEntriesByName('first-paint')[0] ?? { startTime: Infinity }).startTime"


@dataclass
class Checks:
    """Numbers of failures by check, over all sizes and colour schemes."""

    counts: dict[str, int] = field(default_factory=dict)
    paints_ms: list[float] = field(default_factory=list)

    def add(self, name: str, failures: Sequence[str]) -> None:
        """Count failures of a check, and print the first."""
        self.counts[name] = self.counts.get(name, 0) + len(failures)
        for failure in failures[:5]:
            say(f"    {name}: {failure}")


@section("the page in a browser")
def page(proof: Proof) -> None:
    """Contrast, reachable controls and foreign requests, at two sizes, light and dark."""
    with started(proof.folder, *serve_words(), module="quire serve") as server:
        checks = asyncio.run(_check_page(server))
        stop_s = asyncio.run(_stop_seconds(server, proof.sized(quick=2, full=5)))
    with scripted_server.running(proof.folder) as script:
        texts = [hostile(proof.random) for _ in range(proof.sized(quick=20, full=200))]
        asyncio.run(_check_hostile(script.url, texts, checks))
    for name, count in checks.counts.items():
        proof.equals(f"page_{name}", count, 0)
    proof.at_least("page_hostile_answers", len(texts), proof.sized(quick=20, full=200))
    proof.at_most("page_first_paint_ms", max(checks.paints_ms), 1000)
    proof.at_most("page_stop_s", stop_s, 1.0, "from stop to free blocks")
    proof.equals("page_checks", sum(checks.counts.values()), 0, "the sum of all checks")


@section("the page without a key")
def leaks(proof: Proof) -> None:
    """A client without a key gets the page, and nothing of the server."""
    keys = proof.folder / "page-keys.json"
    add_key(keys, "alice")
    with started(proof.folder, *serve_words("--keys-file", str(keys)), module="quire serve") as server:
        unprotected = [path for method, path in _paths(server, keys) if _answer(server, path, method)[0] != 401]
        static = ["/", *(f"/page/{name}" for name in ("style.css", "main.js", "server.js", "icon.svg"))]
        answers = {path: _answer(server, path) for path in static}
        missing = [path for path, (status, _) in answers.items() if status != 200]
        names = [path for path, (_, data) in answers.items() if b"SmolLM2" in data or b"alice" in data]
        has_dialog = asyncio.run(_has_key_dialog(server))
    for leak in unprotected + missing + names:
        say(f"    {leak}")
    proof.holds("page_asks_for_key", has_dialog, "a dialog, and no models behind it")
    proof.equals("page_leaks", len(unprotected) + len(missing) + len(names), 0, "routes, files and names without a key")


# -- checks in the browser ---------------------------------------------------------------------------------------------


async def _check_page(server: Server) -> Checks:
    checks = Checks()
    async with browsing() as new_tab:
        for width, height in SIZES:
            async with new_tab() as tab:
                await tab.open(f"{server.url}/", width, height)
                await tab.until("document.querySelectorAll('#model option').length > 0")
                checks.paints_ms.append(await tab.run(PAINT))
                await _ask(tab, QUESTION, max_tokens=80)
                for scheme in ("light", "dark"):
                    await tab.set_scheme(scheme)
                    await tab.save_screenshot(PICTURES / f"page-{width}-{scheme}.png")
                    checks.add("low_contrast", await tab.run(CONTRAST))
                await _check_controls(tab, checks)
                if await tab.run("document.getElementById('open-list').checkVisibility()"):
                    await tab.run("document.getElementById('open-list').click()")
                    await tab.save_screenshot(PICTURES / f"page-{width}-list.png")
                    await _check_controls(tab, checks)
                    checks.add("low_contrast", await tab.run(CONTRAST))
                    await tab.run("document.getElementById('open-list').click()")
                await _check_settings(tab, checks, width)
                _check_requests(tab, server.url, checks)
                overflow = await tab.run("document.documentElement.scrollWidth - window.innerWidth")
                checks.add("scrolls_sideways", [f"{overflow} pixels at {width}"] if overflow > 0 else [])
    return checks


async def _check_controls(tab: Page, checks: Checks) -> None:
    """Press Tab until every control should have had the focus, and count those that had not."""
    count = await tab.run(CONTROLS)
    for _ in range(2 * count + 4):
        await tab.press_tab()
        await tab.run("void window.reached.add(document.activeElement)")
    missed = await tab.run("controls.filter((one) => !reached.has(one)).map((one) => one.outerHTML.slice(0, 80))")
    checks.add("unreachable", missed)


async def _check_settings(tab: Page, checks: Checks, width: int) -> None:
    await tab.run("document.getElementById('open-settings').click()")
    await tab.save_screenshot(PICTURES / f"page-{width}-settings.png")
    checks.add("low_contrast", await tab.run(CONTRAST))
    await tab.run("document.getElementById('settings').close()")


def _check_requests(tab: Page, url: str, checks: Checks) -> None:
    checks.add("script_errors", tab.errors)
    checks.add("foreign_requests", [one for one in tab.urls if not one.startswith((url, "data:", "about:"))])
    checks.add("dialogs", ["a dialog"] * tab.num_dialogs)


async def _ask(tab: Page, question: str, max_tokens: int | None = None) -> None:
    """Type a question, send it, and wait for the answer."""
    if max_tokens is not None:
        await tab.run(
            f"document.getElementById('max_tokens').value = '{max_tokens}';"
            "document.getElementById('settings').dispatchEvent(new Event('close'))"
        )
    await tab.run(
        f"document.getElementById('question').value = {json.dumps(question)};"
        "document.getElementById('composer').requestSubmit()"
    )
    await tab.until("document.getElementById('stop').hidden")


async def _check_hostile(url: str, texts: Sequence[str], checks: Checks) -> None:
    async with browsing() as new_tab, new_tab() as tab:
        await tab.open(f"{url}/", *SIZES[0])
        await tab.until("document.querySelectorAll('#model option').length > 0")
        await _ask(tab, EXACTLY + MARKDOWN_ANSWER)
        await tab.save_screenshot(PICTURES / "page-markdown.png")
        checks.add("unescaped", await tab.run(FIND_UNESCAPED))
        for text in texts:
            await tab.run("document.getElementById('new').click()")
            await _ask(tab, EXACTLY + text)
            checks.add("unescaped", await tab.run(FIND_UNESCAPED))
            num_answers = await tab.run("document.querySelectorAll('#messages article.assistant').length")
            num_failed = await tab.run("document.querySelectorAll('#messages .failed').length")
            checks.add("not_shown", [] if num_answers == 1 and not num_failed else [text])
        _check_requests(tab, url, checks)


def hostile(random: Random) -> str:
    """Return markup that would have an effect if it were not escaped, between marks of Markdown."""
    parts = [random.choice(MARKUP).format(other=OTHER) for _ in range(random.randint(1, 4))]
    between = ("\n\n", " ", "\n- ", "\n> ", " **", "* ", "\n# ", "`")
    return "".join(part + random.choice(between) for part in parts)


async def _stop_seconds(server: Server, count: int) -> float:
    """Return the longest time from a click on stop until all blocks are free."""
    longest = 0.0
    async with browsing() as new_tab, new_tab() as tab:
        await tab.open(f"{server.url}/", *SIZES[0])
        await tab.until("document.querySelectorAll('#model option').length > 0")
        for _ in range(count):
            await tab.run(
                "document.getElementById('max_tokens').value = '900';"
                "document.getElementById('settings').dispatchEvent(new Event('close'));"
                "document.getElementById('question').value = 'Count from one to a thousand in words.';"
                "document.getElementById('composer').requestSubmit()"
            )
            await asyncio.to_thread(_wait_until, lambda: _usage(server) > 0)
            await tab.run("document.getElementById('stop').click()")
            start_s = perf_counter()
            await asyncio.to_thread(_wait_until, lambda: _usage(server) == 0)
            longest = max(longest, perf_counter() - start_s)
            await tab.run("document.getElementById('new').click()")
    return longest


def _usage(server: Server) -> float:
    return float(server.admin("/stats")["models"][0]["engine"]["kv_usage"])


def _wait_until(condition: Any, within_s: float = 60.0) -> None:
    end_s = perf_counter() + within_s
    while not condition():
        if perf_counter() > end_s:
            raise RuntimeError(f"the condition did not hold within {within_s:.0f} s")


# -- without a key -----------------------------------------------------------------------------------------------------


def _paths(server: Server, keys: Path) -> list[tuple[str, str]]:
    """Return all routes of the OpenAPI description, without the two public ones."""
    key, deadline_s = add_key(keys, "bob"), perf_counter() + 30
    while (answer := _answer(server, "/openapi.json", key=key))[0] != 200:  # the server reads a changed keys file again
        if perf_counter() > deadline_s:
            raise RuntimeError(f"expected status 200 with a new key, got {answer[0]}: {answer[1]!r}")
    description = json.loads(answer[1])
    public = ("/health", "/ready")
    return [
        (method.upper(), path.replace("{name}", "m").replace("{response_id}", "resp_1"))
        for path, methods in description["paths"].items() if path not in public for method in methods
    ]  # fmt: skip


def _answer(server: Server, path: str, method: str = "GET", key: str = "") -> tuple[int, bytes]:
    connection = HTTPConnection(HOST, server.port, timeout=60)
    try:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


async def _has_key_dialog(server: Server) -> bool:
    async with browsing() as new_tab, new_tab() as tab:
        await tab.open(f"{server.url}/", *SIZES[0])
        await tab.until("document.getElementById('key-dialog').open")
        await tab.save_screenshot(PICTURES / "page-key.png")
        return bool(await tab.run("document.querySelectorAll('#model option').length === 0"))

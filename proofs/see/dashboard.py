"""The dashboard in a real browser, with a real server under load: its content, cost, requests and accessibility.

64 requests run on 20,000 blocks; the model is an oracle with a fixed time per step. A full run saves screenshots
for the README and the guide.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.dashboard_load import agents
from proofs.api.load import Server, started
from proofs.first.page import CONTRAST, LEAST_CONTRAST, PAINT, Checks
from proofs.framework.browser import Page, browsing
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

IMAGES = Path(__file__).parents[2] / "docs" / "images"
TENANTS = ("research", "support", "nightly")
NUM_RUNNING = 64
NUM_BLOCKS = 20_000
SERVED = (
    *("--blocks", str(NUM_BLOCKS), "--running", str(NUM_RUNNING), "--sequence-tokens", "4096"),
    *("--step-s", "0.08", "--prompt-tokens", "512"),
)
DESKTOP, PHONE = (1440, 1000), (390, 844)
MEASURED_S = 10
MAX_PICTURE_BYTES = 300_000
CLICKS = 60
"""Random positions on the map that are tried until the block there is used by a request."""
IS_OPEN = "!document.getElementById('content').hidden && performance.getEntriesByName('update').length > 1"
CONTROLS = """(() => {
  window.controls = [...document.querySelectorAll('button, a[href], input, select, summary, [tabindex="0"]')]
    .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled)
    .filter((one) => one.getBoundingClientRect().width > 0);
  window.reached = new Set();
  return window.controls.length;
})()"""
RECORD_TEXTS = """(() => {
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  window.drawn = null;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    if (window.drawn) {
      const point = this.getTransform().transformPoint({ x, y });
      const clamp = (value, size) => Math.max(0, Math.min(size - 1, Math.round(value)));
      const pixel = [clamp(point.x, this.canvas.width), clamp(point.y, this.canvas.height)];
      const [r, g, b, a] = this.getImageData(...pixel, 1, 1).data;
      window.drawn.push([text, this.fillStyle, a > 250 ? [r, g, b] : null, this.canvas.id]);
    }
    return fillText.call(this, text, x, y, ...more);
  };
})()"""
LOW_CONTRAST_TEXTS = """(() => {
  const card = getComputedStyle(document.querySelector('.card')).backgroundColor.match(/\\d+/g).map(Number);
  const luminance = (rgb) => {
    const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    return rgb.reduce((sum, value, i) => sum + [0.2126, 0.7152, 0.0722][i] * linear(value / 255), 0);
  };
  const parse = (words) => words.startsWith('#')
    ? [1, 3, 5].map((at) => parseInt(words.slice(at, at + 2), 16)) : words.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const problems = new Set();
  for (const [text, color, background, id] of window.drawn) {
    const [a, b] = [luminance(parse(color)), luminance(background ?? card)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < LEAST) problems.add(`${id} ${text}: ${ratio.toFixed(2)}`);
  }
  const count = window.drawn.length;
  window.drawn = null;
  return [count, [...problems]];
})()""".replace("LEAST", str(LEAST_CONTRAST))


@dataclass(frozen=True)
class Site:
    """A server under load, with an admin key and a tenant's key."""

    server: Server
    admin_key: str
    common_key: str

    @property
    def url(self) -> str:
        return f"{self.server.url}/dashboard"


@section("the dashboard in a browser")
def dashboard(proof: Proof) -> None:
    """Check what the dashboard shows, and what it costs the browser."""
    keys_file = proof.folder / "dashboard-keys.json"
    keys = {name: add_key(keys_file, name) for name in TENANTS}
    admin_key = add_key(keys_file, "operator", admin=True)
    with started(proof.folder, *SERVED, "--keys-file", str(keys_file)) as server:
        site = Site(server, admin_key, keys["research"])
        checks, figures = asyncio.run(_check_all(proof, site, keys))
    for name in ("running", "used_percent"):
        proof.report(f"dashboard_{name}", figures[name])
    for name, count in checks.counts.items():
        proof.equals(f"dashboard_{name}", count, 0)
    proof.at_most("dashboard_first_paint_ms", median(checks.paints_ms), 1000, f"median of {len(checks.paints_ms)}")
    proof.report("dashboard_slowest_paint_ms", max(checks.paints_ms), "including a browser that had just been started")
    proof.at_least("dashboard_updates_per_s", figures["updates_per_s"], 2)
    proof.at_most("dashboard_script_ms", figures["script_ms"], 10, "of an update, in processor time")
    num_slow = (median(checks.paints_ms) > 1000) + (figures["updates_per_s"] < 2)
    proof.equals("dashboard_checks", sum(checks.counts.values()) + num_slow, 0, "failed checks of all kinds")


async def _check_all(proof: Proof, site: Site, keys: dict[str, str]) -> tuple[Checks, dict[str, float]]:
    checks = Checks()
    folder = IMAGES if proof.is_full else proof.folder
    async with agents(site.server.url, keys, NUM_RUNNING + 16, proof.random), browsing() as new_tab:
        async with new_tab() as tab:
            await _check_keys(tab, site, checks)
        await asyncio.sleep(proof.sized(quick=20, full=150))
        for _ in range(2):
            async with _open_page(new_tab, site, DESKTOP, checks):
                pass
        async with _open_page(new_tab, site, DESKTOP, checks) as tab:
            figures = await _measure(tab)
            await _check_themes(tab, checks, folder, "dashboard")
            await _check_chain(tab, checks, proof.random)
            await tab.save_screenshot(folder / "dashboard-block.png")
            await _check_arrow_keys(tab, checks)
            await _check_tab_key(tab, checks)
            await _check_controls(tab, checks)
        async with _open_page(new_tab, site, PHONE, checks) as tab:
            await _check_themes(tab, checks, folder, "dashboard-phone")
            await _check_tab_key(tab, checks)
        for name in ("dashboard-light", "dashboard-dark", "dashboard-phone-light", "dashboard-block"):
            size = (folder / f"{name}.png").stat().st_size
            checks.add("large_pictures", [f"{name}: {size} bytes"] if size > MAX_PICTURE_BYTES else [])
    async with browsing() as new_tab, _open_page(new_tab, site, DESKTOP, checks) as tab:
        await _check_lost_server(tab, site, checks)
    return checks, figures


@asynccontextmanager
async def _open_page(new_tab: Any, site: Site, size: tuple[int, int], checks: Checks) -> AsyncIterator[Page]:
    """Open the page with the operator's key; when the block ends, count foreign requests and script errors."""
    async with new_tab() as tab:
        await tab.call("Page.enable")
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=RECORD_TEXTS)
        await tab.open(f"{site.url}#key={site.admin_key}", *size)
        try:
            await tab.until(IS_OPEN)
        except TimeoutError:
            words = await tab.run("document.body.innerText.slice(0, 400)")
            raise RuntimeError(f"the dashboard does not open: {words}; {tab.errors}") from None
        checks.paints_ms.append(await tab.run(PAINT))
        yield tab
        overflow = await tab.run("document.documentElement.scrollWidth - window.innerWidth")
        checks.add("scrolls_sideways", [f"{overflow} pixels at {size[0]}"] if overflow > 0 else [])
        _count_errors(tab, site, checks)


def _count_errors(tab: Page, site: Site, checks: Checks) -> None:
    """Count errors. The browser logs a refused request as `Failed to load resource`, which is no script error."""
    checks.add("script_errors", [error for error in tab.errors if not error.startswith("Failed to load resource")])
    foreign_requests = [url for url in tab.urls if not url.startswith((site.server.url, "data:", "about:"))]
    checks.add("foreign_requests", foreign_requests)
    checks.add("dialogs", ["a dialog"] * tab.num_dialogs)


# -- checks of the page ------------------------------------------------------------------------------------------------


async def _check_keys(tab: Page, site: Site, checks: Checks) -> None:
    """Type keys as a user does: no key, a tenant's key, the operator's key."""
    await tab.open(site.url, *DESKTOP)
    gate = "!document.getElementById('gate').hidden && !document.getElementById('gate-STATUS').hidden"
    await tab.until(gate.replace("STATUS", "401"))
    checks.add("low_contrast", await tab.run(CONTRAST))
    await _type_key(tab, site.common_key)
    await tab.until(gate.replace("STATUS", "403"))
    text = await tab.run("document.getElementById('gate-403').textContent")
    checks.add("not_told_how", [] if "quire keys add NAME --admin" in text else [text])
    is_shown = await tab.run("!document.getElementById('content').hidden")
    checks.add("leaks", ["the content is shown without an admin key"] if is_shown else [])
    await _type_key(tab, site.admin_key)
    await tab.until(IS_OPEN)
    storage = await tab.run("JSON.stringify({ ...localStorage }) + document.cookie + location.href")
    checks.add("leaks", [storage] if site.admin_key in storage else [])
    _count_errors(tab, site, checks)


async def _type_key(tab: Page, key: str) -> None:
    await tab.run("document.getElementById('admin-key').focus()")
    await tab.call("Input.insertText", text=key)
    await _press(tab, "Enter", "\r")


async def _press(tab: Page, key: str, text: str = "") -> None:
    codes = {"Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "Escape": 27, " ": 32}
    event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
    await tab.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
    await tab.call("Input.dispatchKeyEvent", type="keyUp", **event)


async def _measure(tab: Page) -> dict[str, float]:
    """Measure the rate of updates, and the processor time of each in the page's thread."""

    async def script_s() -> float:
        answer = await tab.call("Performance.getMetrics")
        return float(next(metric["value"] for metric in answer["metrics"] if metric["name"] == "ScriptDuration"))

    await tab.call("Performance.enable", timeDomain="threadTicks")
    await tab.run("performance.clearMeasures('update')")
    before_s = await script_s()
    await asyncio.sleep(MEASURED_S)
    count, elapsed_ms = await tab.run(
        "((all) => [all.length, all.at(-1).startTime - all[0].startTime])(performance.getEntriesByName('update'))"
    )
    after_s = await script_s()
    figures = "['running', 'used'].map((one) => document.getElementById(`${one}-figure`).textContent)"
    running, used = await tab.run(figures)
    return {
        "updates_per_s": 1000 * (count - 1) / elapsed_ms,
        "script_ms": 1000 * (after_s - before_s) / max(1, count),
        "running": int(running),
        "used_percent": float(used.rstrip("%")),
    }


async def _check_themes(tab: Page, checks: Checks, folder: Path, name: str) -> None:
    """Take screenshots in light and dark, by the system's preference and by the page's own control."""
    for scheme in ("light", "dark"):
        await tab.set_scheme(scheme)
        await tab.until("performance.getEntriesByName('update').length > 0")
        await tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        await tab.save_screenshot(folder / f"{name}-{scheme}.png")
        await _check_contrast(tab, checks)
    for choice, brightness in (("light", 255), ("dark", 0)):
        await _choose(tab, "theme", choice)
        red = await tab.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        checks.add("theme_not_followed", [] if abs(red - brightness) < 60 else [f"{choice}: {red}"])
        await _check_contrast(tab, checks)
    await _choose(tab, "theme", "system")
    await tab.set_scheme("light")


async def _check_contrast(tab: Page, checks: Checks) -> None:
    checks.add("low_contrast", await tab.run(CONTRAST))
    await tab.run("void (window.drawn = [])")
    await tab.run("document.getElementById('theme').dispatchEvent(new Event('change'))")  # redraws all canvases
    count, problems = await tab.run(LOW_CONTRAST_TEXTS)
    checks.add("low_contrast", problems)
    checks.add("nothing_drawn", [] if count > 20 else [f"{count} words on canvases"])


async def _choose(tab: Page, name: str, value: str) -> None:
    await tab.run(
        f"document.getElementById('{name}').value = {json.dumps(value)};"
        f"document.getElementById('{name}').dispatchEvent(new Event('change'))"
    )


async def _check_chain(tab: Page, checks: Checks, random: Random) -> None:
    """Click on a block that a request uses: its chain is shown."""
    await tab.run("document.getElementById('pool-title').scrollIntoView()")
    left, top, width, height = await tab.run(
        "(({ x, y, width, height }) => [x, y, width, height])"
        "(document.getElementById('pool-over').getBoundingClientRect())"
    )
    for _ in range(CLICKS):
        position = {"x": left + random.random() * width, "y": top + random.random() * height * 0.4}
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", **position)
        words = await tab.run("document.getElementById('pool-words').textContent")
        if re.search("held by one|shared", words):
            break
    for kind in ("mousePressed", "mouseReleased"):
        await tab.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **position)
    words = await tab.run("document.getElementById('pool-words').textContent")
    await _check_chain_shown(tab, checks, int(re.sub(r"\D", "", words.partition(":")[0]) or 0))


async def _check_chain_shown(tab: Page, checks: Checks, block: int) -> None:
    await tab.until("document.querySelectorAll('#block-terms dd').length > 0")
    title, chain, numbers = await tab.run(
        "[document.getElementById('block-title').textContent, document.querySelector('#block-terms dd').textContent,"
        "[...document.querySelectorAll('#block-terms div:first-child .blocks button')].map((one) => one.textContent)]"
    )
    is_described = title == f"Block {block:,}" and "from the root" in chain and numbers[-1:] == [str(block)]
    is_lit = await tab.run(
        "(({ width, height }, data) => data.getImageData(0, 0, width, height).data.some((one) => one === 255))"
        "(document.getElementById('pool-over'), document.getElementById('pool-over').getContext('2d'))"
    )
    checks.add("chain_not_shown", [] if is_described and is_lit else [f"{title}: {chain} {numbers} {is_lit}"])


async def _check_arrow_keys(tab: Page, checks: Checks) -> None:
    """Move between blocks with the arrow keys, open a chain with Enter, and check the text for screen readers."""
    await tab.run("document.getElementById('block-close').click(); document.getElementById('pool-over').focus()")
    texts = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowDown", "Home"):
        await _press(tab, key)
        texts.append(await tab.run("document.getElementById('pool-over').getAttribute('aria-valuetext')"))
    numbers = [int(re.sub(r"\D", "", text.partition(":")[0]) or 0) for text in texts]
    is_wrong = numbers[:3] != [1, 2, 3] or numbers[3] < 20 or numbers[4] != 1
    checks.add("keys_do_not_move", [str(texts)] if is_wrong else [])
    await _press(tab, "Enter", "\r")
    await tab.until("document.getElementById('block-title').textContent === 'Block 1'")
    for name in ("tree", "steps", "timeline", "rate", "prompts", "first", "hits"):
        await tab.run(f"document.getElementById('{name}-chart').focus()")
        await _press(tab, "ArrowRight")
        words = await tab.run(f"document.getElementById('{name}-words').textContent")
        checks.add("keys_do_not_move", [] if words else [name])


async def _check_tab_key(tab: Page, checks: Checks) -> None:
    """Reach every control with the Tab key; each must have a visible outline."""
    count = await tab.run(CONTROLS)
    for _ in range(2 * count + 4):
        await tab.press_tab()
        await tab.run("void window.reached.add(document.activeElement)")
        outline = await tab.run(
            "((one) => one === document.body ? '2px' : getComputedStyle(one).outlineWidth)(document.activeElement)"
        )
        checks.add("focus_not_seen", [] if outline != "0px" else ["no outline"])
    missed = await tab.run("controls.filter((one) => !reached.has(one)).map((one) => one.outerHTML.slice(0, 80))")
    checks.add("unreachable", missed)
    checks.add("unreachable", [] if count > 15 else [f"only {count} controls"])


async def _check_controls(tab: Page, checks: Checks) -> None:
    """Pause and resume the stream; select one state in the legend; open a block by its number."""
    await tab.run("document.getElementById('pause').click()")
    await tab.until("document.getElementById('connection').dataset.state === 'paused'")
    await tab.run("performance.clearMeasures('update')")
    await asyncio.sleep(2)
    num_updates = await tab.run("performance.getEntriesByName('update').length")
    checks.add("pause_does_not_hold", [f"{num_updates} updates"] if num_updates > 1 else [])
    await tab.run("document.getElementById('pause').click()")
    await tab.until("performance.getEntriesByName('update').length > 1")
    await tab.run("document.querySelector('.legend-item').click()")
    num_pressed = await tab.run("document.querySelectorAll('.legend-item[aria-pressed=true]').length")
    checks.add("legend_does_not_choose", [] if num_pressed == 1 else [f"{num_pressed} pressed"])
    await tab.run("document.querySelector('.legend-item').click()")
    await tab.run("document.getElementById('block').value = '17'; document.getElementById('go-to').requestSubmit()")
    await tab.until("document.getElementById('block-title').textContent === 'Block 17'")


async def _check_lost_server(tab: Page, site: Site, checks: Checks) -> None:
    """Stop the server: the page says so, and reconnects after growing waits."""
    await asyncio.to_thread(site.server.stop)
    await tab.until("document.getElementById('connection').dataset.state === 'lost'")
    words = await tab.run("document.getElementById('connection-words').textContent")
    checks.add("not_told_that_it_is_lost", [] if words.startswith("Lost: ") else [words])
    num_before = len(tab.urls)
    await asyncio.sleep(6)
    num_requests = len(tab.urls) - num_before
    checks.add("asks_too_often", [f"{num_requests} times in 6 s"] if not 1 <= num_requests <= 6 else [])

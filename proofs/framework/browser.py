"""A headless Chromium, driven by its own debugging protocol: pages, keys, pictures, and whom they ask."""

import asyncio
import base64
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

WORDS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars=false", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--remote-debugging-port=0", "about:blank",
)  # fmt: skip
START_S = 60.0
WAIT_S = 120.0
TAB = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}


def is_there() -> bool:
    """Whether this machine has one."""
    return shutil.which("chromium") is not None


class Page:
    """One tab, and everything it did."""

    def __init__(self, wire: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self._wire = wire
        self._session_id = session_id
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Of scripts, and what the browser complained of."""
        self.asked: list[str] = []
        """Addresses that were asked for."""
        self.num_dialogs = 0
        self._sending: asyncio.Future[None] | None = None

    async def listen(self) -> None:
        """Everything the browser says, until it is gone."""
        async for message in self._wire:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._hear(told.get("method", ""), told.get("params", {}))

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.num_dialogs += 1
                self._post("Page.handleJavaScriptDialog", accept=True)

    def _post(self, method: str, **params: Any) -> "asyncio.Future[dict[str, Any]]":
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        told = {"id": number, "sessionId": self._session_id, "method": method, "params": params}
        self._sending = asyncio.ensure_future(self._wire.send_json(told))
        return answer

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and what came of it."""
        told = await asyncio.wait_for(self._post(method, **params), WAIT_S)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        found: dict[str, Any] = told["result"]
        return found

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script[:200]}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str, within_s: float = WAIT_S) -> None:
        """Wait for an expression to be true."""
        async with asyncio.timeout(within_s):
            while not await self.run(script):
                await asyncio.sleep(0.02)

    async def open(self, url: str, width: int, height: int, scheme: str = "light") -> None:
        """A page of this size and colour scheme."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.dress(scheme)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def dress(self, scheme: str) -> None:
        """Light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def tab(self) -> None:
        """Press the key that leads to the next control."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, **TAB)

    async def picture(self, path: Path) -> None:
        """What it looks like."""
        told = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def browsing() -> AsyncIterator[Callable[[], AbstractAsyncContextManager[Page]]]:
    """A browser with a profile of its own; what is yielded opens a tab, on a wire of its own."""
    with TemporaryDirectory(prefix="browser-") as profile:
        command = ("chromium", f"--user-data-dir={profile}", *WORDS)
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        reading: asyncio.Task[None] | None = None
        try:
            assert process.stderr is not None
            async with asyncio.timeout(START_S):
                while not (found := re.search(rb"ws://\S+", await process.stderr.readline())):
                    pass
            reading = asyncio.ensure_future(_drain(process.stderr))
            async with aiohttp.ClientSession() as session:
                yield lambda: _tab(session, found[0].decode())
        finally:
            if reading is not None:
                reading.cancel()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


@asynccontextmanager
async def _tab(session: aiohttp.ClientSession, address: str) -> AsyncIterator[Page]:
    """A tab whose storage is its own."""
    async with session.ws_connect(address, max_msg_size=1 << 28) as wire:

        async def ask(number: int, method: str, **params: Any) -> dict[str, Any]:
            await wire.send_json({"id": number, "method": method, "params": params})
            while (told := json.loads((await wire.receive()).data)).get("id") != number:
                pass
            found: dict[str, Any] = told["result"]
            return found

        context = (await ask(-1, "Target.createBrowserContext"))["browserContextId"]
        target = await ask(-2, "Target.createTarget", url="about:blank", browserContextId=context)
        attached = await ask(-3, "Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(wire, attached["sessionId"])
        listening = asyncio.ensure_future(page.listen())
        try:
            yield page
        finally:
            listening.cancel()

"""A headless Chromium, driven over its DevTools protocol: tabs, keys, screenshots, and the URLs that pages request."""

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

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars=false", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--remote-debugging-port=0", "about:blank",
)  # fmt: skip
START_S = 60.0
WAIT_S = 120.0
TAB_KEY = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}


def is_installed() -> bool:
    """Whether this machine has Chromium on its PATH."""
    return shutil.which("chromium") is not None


class Page:
    """One tab, with the errors, requests and dialogs of its pages so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self._socket = socket
        self._session_id = session_id
        self._numbers = itertools.count(1)
        self._responses: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Exceptions of scripts, and errors in the browser's log."""
        self.urls: list[str] = []
        """What the pages requested."""
        self.num_dialogs = 0
        self._send_task: asyncio.Future[None] | None = None

    async def listen(self) -> None:
        """Read responses and events until the browser closes the WebSocket."""
        async for message in self._socket:
            received = json.loads(message.data)
            if "id" in received:
                self._responses.pop(received["id"]).set_result(received)
            else:
                self._on_event(received.get("method", ""), received.get("params", {}))

    def _on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.num_dialogs += 1
                self._post("Page.handleJavaScriptDialog", accept=True)

    def _post(self, method: str, **params: Any) -> "asyncio.Future[dict[str, Any]]":
        number = next(self._numbers)
        response = self._responses[number] = asyncio.get_running_loop().create_future()
        command = {"id": number, "sessionId": self._session_id, "method": method, "params": params}
        self._send_task = asyncio.ensure_future(self._socket.send_json(command))
        return response

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol, and return its result."""
        response = await asyncio.wait_for(self._post(method, **params), WAIT_S)
        if "error" in response:
            raise RuntimeError(f"{method}: {response['error']}")
        result: dict[str, Any] = response["result"]
        return result

    async def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression, and return its value."""
        response = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in response:
            raise RuntimeError(f"{script[:200]}: {response['exceptionDetails']}")
        return response["result"].get("value")

    async def until(self, script: str, timeout_s: float = WAIT_S) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.run(script):
                await asyncio.sleep(0.02)

    async def open(self, url: str, width: int, height: int, scheme: str = "light") -> None:
        """Load a page in a window of this size, with this colour scheme, and wait until it is complete."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.set_scheme(scheme)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def set_scheme(self, scheme: str) -> None:
        """Make pages see a system that prefers this colour scheme, light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def press_tab(self) -> None:
        """Press the Tab key, which moves the focus to the next control."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, **TAB_KEY)

    async def save_screenshot(self, path: Path) -> None:
        """Write what the tab shows, as a PNG."""
        response = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(response["data"]))


@asynccontextmanager
async def browsing() -> AsyncIterator[Callable[[], AbstractAsyncContextManager[Page]]]:
    """Start a browser with an empty profile; yields a function that opens a tab with its own WebSocket."""
    with TemporaryDirectory(prefix="browser-") as profile:
        command = ("chromium", f"--user-data-dir={profile}", *ARGUMENTS)
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        drain_task: asyncio.Task[None] | None = None
        try:
            assert process.stderr is not None
            async with asyncio.timeout(START_S):
                while not (address := re.search(rb"ws://\S+", await process.stderr.readline())):
                    pass
            drain_task = asyncio.ensure_future(_drain(process.stderr))
            async with aiohttp.ClientSession() as session:
                yield lambda: _tab(session, address[0].decode())
        finally:
            if drain_task is not None:
                drain_task.cancel()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


@asynccontextmanager
async def _tab(session: aiohttp.ClientSession, address: str) -> AsyncIterator[Page]:
    """Open a tab that shares neither cookies nor storage with other tabs."""
    async with session.ws_connect(address, max_msg_size=1 << 28) as socket:

        async def call(number: int, method: str, **params: Any) -> dict[str, Any]:
            await socket.send_json({"id": number, "method": method, "params": params})
            while (response := json.loads((await socket.receive()).data)).get("id") != number:
                pass
            result: dict[str, Any] = response["result"]
            return result

        context = (await call(-1, "Target.createBrowserContext"))["browserContextId"]
        target = await call(-2, "Target.createTarget", url="about:blank", browserContextId=context)
        attachment = await call(-3, "Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(socket, attachment["sessionId"])
        listen_task = asyncio.ensure_future(page.listen())
        try:
            yield page
        finally:
            listen_task.cancel()

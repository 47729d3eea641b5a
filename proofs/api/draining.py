"""Servers that get SIGTERM: in the middle of all kinds of requests, and while the model is still loading."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.api.load import Server, started, stream_text
from proofs.framework.proof import Proof, section

IN_TIME_S = 5.0
"""A server may take this much longer than its drain time: for final events, and for the end of its worker."""
NUM_STREAMS, NUM_WHOLE, NUM_HALVES, NUM_LATE = 14, 6, 4, 4


@section("drain")
def drain(proof: Proof) -> None:
    """Send SIGTERM at random moments, in a quarter of the runs while the model is loading."""
    folder, random = proof.folder, proof.random
    count, failures, ready_ms, num_late = proof.sized(quick=4, full=30), [], [], 0
    for index in range(count):
        drain_s = random.choice([0.3, 1.0, 3.0])
        options = ("--step-s", "0.01", "--drain-s", str(drain_s))
        is_loading = index % 4 == 1
        load_options = ("--load-s", "30") if is_loading else ()
        with started(folder, *options, *load_options, is_awaited=not is_loading) as server:
            ending = Ending(server, random, drain_s)
            asyncio.run(ending.while_loading() if is_loading else ending.while_serving())
            ready_ms.append(ending.not_ready_ms)
            num_late += ending.num_late
        if ending.problems:
            failures.append(ending.problems)
            say(f"  {index}{' while loading' if is_loading else ''}: {'; '.join(ending.problems)[:600]}")
    proof.at_most("drain_ready_ms", max(ready_ms), 100)
    proof.at_least("drain_turned_away", num_late, 1, "requests after the signal")
    proof.equals("drain_failures", len(failures), 0, f"of {count}")


@dataclass
class Ending:
    """The last seconds of one server, and messages about what was wrong."""

    server: Server
    random: Random
    drain_s: float
    problems: list[str] = field(default_factory=list)
    not_ready_ms: float = 0.0
    num_late: int = 0
    """Requests after the signal that got a reply."""
    _signal_s: float = 0.0

    async def while_serving(self) -> None:
        """Send streams, whole requests and half-sent bodies, then the signal, then late requests."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            requests = [self._stream(session, index) for index in range(NUM_STREAMS)]
            requests += [self._whole(session, index) for index in range(NUM_WHOLE)]
            requests += [self._half(index % 2 == 0) for index in range(NUM_HALVES)]
            tasks = [asyncio.ensure_future(request) for request in requests]
            await asyncio.sleep(self.random.uniform(0.0, 0.6))
            await self._signal(session)
            await asyncio.gather(*(self._late(session) for _ in range(NUM_LATE)))
            await asyncio.gather(*tasks)
        await self._end()

    async def while_loading(self) -> None:
        """Send the signal while only the HTTP server runs."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            await self._until_answers(session)
            half = asyncio.ensure_future(self._half(is_finished=False))
            # A request waits for the model, and gets an error when the load is ended.
            late = asyncio.ensure_future(self._late(session))
            await asyncio.sleep(self.random.uniform(0.0, 1.5))
            await self._signal(session)
            await half
            await late
        await self._end()

    async def _until_answers(self, session: aiohttp.ClientSession) -> None:
        while self.server.process.poll() is None:
            try:
                async with session.get(f"{self.server.url}/health"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)

    async def _signal(self, session: aiohttp.ClientSession) -> None:
        self._signal_s = time.perf_counter()
        self.server.process.terminate()
        while await self._is_ready(session):
            pass
        self.not_ready_ms = (time.perf_counter() - self._signal_s) * 1000

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.server.url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _end(self) -> None:
        """Check that the server ended by itself, in time, with all of its processes."""
        within_s = self.drain_s + IN_TIME_S
        try:
            code = await asyncio.to_thread(self.server.process.wait, within_s + 20)
        except Exception as error:
            self.problems.append(f"the server did not end: {error}")
            return
        seconds = time.perf_counter() - self._signal_s
        if code != 0 or seconds > within_s:
            self.problems.append(f"code {code} after {seconds:.1f} s of {self.drain_s}: {self.server.lines[-3:]}")
        if remaining := await asyncio.to_thread(self.server.remaining_processes):
            self.problems.append(f"processes {remaining} are left")

    # -- clients -------------------------------------------------------------------------------------------------------

    def _body(self, name: str) -> dict[str, Any]:
        return {"model": "oracle", "max_tokens": 400, "ignore_eos": True, "prompt": name}

    async def _stream(self, session: aiohttp.ClientSession, index: int) -> None:
        """Stream: all tokens, or an error event and an end, or a complete refusal."""
        try:
            stream = await stream_text(session, self.server.url, self._body(f"stream {index}"))
        except aiohttp.ClientError as error:
            self.problems.append(f"a stream broke: {error!r}")
            return
        is_cut = stream.status == 200 and stream.is_ended and stream.errors == ["server_draining"]
        if not stream.is_whole(400) and not is_cut and not _is_refused(stream.status, stream.errors, stream.has_retry):
            self.problems.append(f"a stream without an end: {stream.status} {stream.errors} {stream.tail!r}")

    async def _whole(self, session: aiohttp.ClientSession, index: int) -> None:
        """Request without streaming: all tokens, or a refusal."""
        try:
            async with session.post(f"{self.server.url}/v1/completions", json=self._body(f"whole {index}")) as response:
                answer = await response.json()
        except aiohttp.ClientError as error:
            self.problems.append(f"a whole request broke: {error!r}")
            return
        code = answer.get("error", {}).get("code")
        is_whole = response.status == 200 and answer["usage"]["completion_tokens"] == 400
        if not is_whole and not _is_refused(response.status, [code], "retry-after" in response.headers):
            self.problems.append(f"a whole request: {response.status} {code}")

    async def _late(self, session: aiohttp.ClientSession) -> None:
        """Request after the signal: 503 with `retry-after`, or no connection when the server has ended."""
        try:
            async with session.post(f"{self.server.url}/v1/completions", json=self._body("late")) as response:
                answer = await response.json()
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.ClientConnectorError) or self._is_over():
                return
            self.problems.append(f"a late request broke: {error!r}")
            return
        self.num_late += 1
        code = answer.get("error", {}).get("code")
        if response.status != 503 or code != "server_draining" or "retry-after" not in response.headers:
            self.problems.append(f"a late request: {response.status} {code}, {'retry-after' in response.headers}")

    def _is_over(self) -> bool:
        """Whether the drain time is over: a request sent then may be lost."""
        return time.perf_counter() - self._signal_s > self.drain_s

    async def _half(self, is_finished: bool) -> None:
        """Send half a body; one that is finished after the signal is answered, the other's connection ends."""
        data = json.dumps({**self._body("half"), "max_tokens": 2}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data[:20])
        await writer.drain()
        if is_finished:
            while not self._signal_s:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            writer.write(data[20:])
        try:
            async with asyncio.timeout(self.drain_s + IN_TIME_S + 10):
                line = await reader.readline()
        except ConnectionError:
            line = b""
        except TimeoutError:
            self.problems.append("a half-sent body got no reply and kept its connection")
            line = b""
        finally:
            writer.close()
        status = int(line.split()[1]) if line else 0
        # A request that was open may finish; the others are refused, or their connection ends.
        if status not in ((200, 503) if is_finished else (0, 408, 503)):
            self.problems.append(f"a half-sent body {'finished' if is_finished else 'abandoned'}: {status}")


def _is_refused(status: int, codes: list[str], has_retry: bool) -> bool:
    return status == 503 and codes == ["server_draining"] and has_retry

"""Servers that are told to end: in the middle of everything a client can be at, and before they were ready at all."""

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
"""An end may take this much longer than the drain: last words, and the worker's own end."""
NUM_STREAMS, NUM_WHOLE, NUM_HALVES, NUM_LATE = 14, 6, 4, 4


@section("drain")
def drain(proof: Proof) -> None:
    """SIGTERM at random moments; a quarter of them while the model is loading."""
    folder, dice = proof.folder, proof.random
    count, failures, ready_ms, num_late = proof.sized(quick=4, full=30), [], [], 0
    for at in range(count):
        drain_s = dice.choice([0.3, 1.0, 3.0])
        words = ("--step-s", "0.01", "--drain-s", str(drain_s))
        is_loading = at % 4 == 1
        more = ("--load-s", "30") if is_loading else ()
        with started(folder, *words, *more, is_awaited=not is_loading) as server:
            ending = Ending(server, dice, drain_s)
            asyncio.run(ending.while_loading() if is_loading else ending.while_serving())
            ready_ms.append(ending.not_ready_ms)
            num_late += ending.num_late
        if ending.wrong:
            failures.append(ending.wrong)
            say(f"  {at}{' while loading' if is_loading else ''}: {'; '.join(ending.wrong)[:600]}")
    proof.at_most("drain_ready_ms", max(ready_ms), 100)
    proof.at_least("drain_turned_away", num_late, 1, "came after the signal")
    proof.equals("drain_failures", len(failures), 0, f"of {count}")


@dataclass
class Ending:
    """One server's last seconds, and what was not as it should be."""

    server: Server
    dice: Random
    drain_s: float
    wrong: list[str] = field(default_factory=list)
    not_ready_ms: float = 0.0
    num_late: int = 0
    """Came after the signal and were told so."""
    _told_s: float = 0.0

    async def while_serving(self) -> None:
        """Streams, whole answers, bodies that are half sent; and newcomers after the signal."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            asking = [self._stream(session, at) for at in range(NUM_STREAMS)]
            asking += [self._whole(session, at) for at in range(NUM_WHOLE)]
            asking += [self._half(at % 2 == 0) for at in range(NUM_HALVES)]
            tasks = [asyncio.ensure_future(one) for one in asking]
            await asyncio.sleep(self.dice.uniform(0.0, 0.6))
            await self._signal(session)
            await asyncio.gather(*(self._late(session) for _ in range(NUM_LATE)))
            await asyncio.gather(*tasks)
        await self._end()

    async def while_loading(self) -> None:
        """Nothing is there but the HTTP server."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            await self._until_answers(session)
            half = asyncio.ensure_future(self._half(is_finished=False))
            # Whoever asks for the model waits for it, and is told that it will not come.
            waiting = asyncio.ensure_future(self._late(session))
            await asyncio.sleep(self.dice.uniform(0.0, 1.5))
            await self._signal(session)
            await half
            await waiting
        await self._end()

    async def _until_answers(self, session: aiohttp.ClientSession) -> None:
        while self.server.process.poll() is None:
            try:
                async with session.get(f"{self.server.url}/health"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)

    async def _signal(self, session: aiohttp.ClientSession) -> None:
        self._told_s = time.perf_counter()
        self.server.process.terminate()
        while await self._is_ready(session):
            pass
        self.not_ready_ms = (time.perf_counter() - self._told_s) * 1000

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.server.url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _end(self) -> None:
        """It ended by itself, in time, and took everybody with it."""
        within_s = self.drain_s + IN_TIME_S
        try:
            code = await asyncio.to_thread(self.server.process.wait, within_s + 20)
        except Exception as error:
            self.wrong.append(f"it did not end: {error}")
            return
        seconds = time.perf_counter() - self._told_s
        if code != 0 or seconds > within_s:
            self.wrong.append(f"code {code} after {seconds:.1f} s of {self.drain_s}: {self.server.lines[-3:]}")
        if left := await asyncio.to_thread(self.server.left_behind):
            self.wrong.append(f"processes {left} are left")

    # -- those who ask -------------------------------------------------------------------------------------------------

    def _body(self, name: str) -> dict[str, Any]:
        return {"model": "oracle", "max_tokens": 400, "ignore_eos": True, "prompt": name}

    async def _stream(self, session: aiohttp.ClientSession, at: int) -> None:
        """All of it, or an error and an end, or a whole refusal."""
        try:
            told = await stream_text(session, self.server.url, self._body(f"stream {at}"))
        except aiohttp.ClientError as error:
            self.wrong.append(f"a stream broke: {error!r}")
            return
        is_cut = told.status == 200 and told.is_ended and told.errors == ["server_draining"]
        if not told.is_whole(400) and not is_cut and not _is_refused(told.status, told.errors, told.has_retry):
            self.wrong.append(f"a stream without an end: {told.status} {told.errors} {told.tail!r}")

    async def _whole(self, session: aiohttp.ClientSession, at: int) -> None:
        """All of it, or a refusal."""
        try:
            async with session.post(f"{self.server.url}/v1/completions", json=self._body(f"whole {at}")) as response:
                answer = await response.json()
        except aiohttp.ClientError as error:
            self.wrong.append(f"a whole request broke: {error!r}")
            return
        code = answer.get("error", {}).get("code")
        is_whole = response.status == 200 and answer["usage"]["completion_tokens"] == 400
        if not is_whole and not _is_refused(response.status, [code], "retry-after" in response.headers):
            self.wrong.append(f"a whole request: {response.status} {code}")

    async def _late(self, session: aiohttp.ClientSession) -> None:
        """Whoever comes after the signal is told when to come again; once it has ended there is nobody to ask."""
        try:
            async with session.post(f"{self.server.url}/v1/completions", json=self._body("late")) as response:
                answer = await response.json()
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.ClientConnectorError) or self._is_over():
                return
            self.wrong.append(f"a newcomer broke: {error!r}")
            return
        self.num_late += 1
        told = answer.get("error", {}).get("code")
        if response.status != 503 or told != "server_draining" or "retry-after" not in response.headers:
            self.wrong.append(f"a newcomer: {response.status} {told}, {'retry-after' in response.headers}")

    def _is_over(self) -> bool:
        """What is sent while the last connection is closed may be lost."""
        return time.perf_counter() - self._told_s > self.drain_s

    async def _half(self, is_finished: bool) -> None:
        """A body that stands still; one that is finished after the signal is answered, one that is not is let go."""
        data = json.dumps({**self._body("half"), "max_tokens": 2}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data[:20])
        await writer.drain()
        if is_finished:
            while not self._told_s:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            writer.write(data[20:])
        try:
            async with asyncio.timeout(self.drain_s + IN_TIME_S + 10):
                line = await reader.readline()
        except ConnectionError:
            line = b""
        except TimeoutError:
            self.wrong.append("a half-sent body was held")
            line = b""
        finally:
            writer.close()
        status = int(line.split()[1]) if line else 0
        # One that was inside may finish; the others are refused, or the connection ends.
        if status not in ((200, 503) if is_finished else (0, 408, 503)):
            self.wrong.append(f"a half-sent body {'finished' if is_finished else 'abandoned'}: {status}")


def _is_refused(status: int, codes: list[str], has_retry: bool) -> bool:
    return status == 503 and codes == ["server_draining"] and has_retry

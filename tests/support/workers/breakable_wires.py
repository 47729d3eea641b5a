"""A wire between a gateway and a member that can be cut, or carry nothing: a forwarder of TCP in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Wire:
    """Forwards to one address."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._carries = asyncio.Event()
        self._carries.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._there: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_cut = False
        self.overheard = bytearray()
        """All that was said towards the address."""

    def cut(self) -> None:
        """All connections break; new ones as soon as they are made."""
        self.is_cut = True
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        """Connections stay and carry nothing, as if somebody dropped what is on its way."""
        self._carries.clear()

    def mend(self) -> None:
        """New connections are carried; old ones that were frozen have lost what was on them, and break."""
        self.is_cut = False
        for writer in self._writers:
            writer.close()
        self._carries.set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, there}
        self._there.add(there)
        self._writers |= both
        tasks = [asyncio.ensure_future(self._carry(*one)) for one in ((reader, there), (there_reader, writer))]
        self._tasks |= {*tasks}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for one in both:
            one.close()
        self._writers -= both
        self._tasks -= {*tasks}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._carries.wait()
                if writer in self._there:
                    self.overheard += data
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def wire_to(address: str) -> AsyncIterator[tuple[Wire, str]]:
    """A wire, and the address at its near end."""
    wire = Wire(int(address.rpartition(":")[2]))
    server = await asyncio.start_server(wire.connect, "127.0.0.1", 0)
    try:
        yield wire, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        wire.cut()

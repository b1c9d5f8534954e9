"""A TCP proxy on loopback that hurts connections: delays, stalls, resets, refuses, loses answers. Needs no root.

::

    async with FaultProxy("127.0.0.1", 6379) as proxy:  # clients use proxy.host and proxy.port
        proxy.delay(0.2)  # each way, for what comes from now on
        proxy.stall("up")  # what clients say is held back, their connections stay open
        proxy.stall()  # both ways: a black hole, as in a partition; no FIN, no RST
        proxy.lose_answers()  # questions get through; the first byte of an answer resets the connection
        proxy.lose_answers(after=100, by="stall")
        proxy.strand()  # the connections that stand never answer again, new ones work
        proxy.reset()  # every connection, now
        proxy.refuse()  # new connections are reset at once
        proxy.lead_to("127.0.0.1", 6380)  # new connections go to another server, as when a name has moved
        proxy.heal()  # what was held back goes on its way
        async with late(proxy) as give_up:
            await give_up(store.renew(grants, ttl))  # the asker has gone; after the block, the server gets it

*Up* is from the client to the server, *down* is back. Everything belongs to the loop that entered the proxy.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Literal

from tenure._runtime.tasks import Tasks

__all__ = ["Direction", "FaultProxy", "Loss", "late"]

Direction = Literal["up", "down"]
"""``up`` is from the client to the server, ``down`` from the server to the client."""

Loss = Literal["reset", "stall"]
"""How an answer is lost: the connection is reset, or it stays open and carries nothing more."""

CHUNK = 65_536
CHUNKS_HELD = 64  # of one connection and way; then the sender is slowed down, as by a full network
_LINGER_NONE = struct.pack("ii", 1, 0)  # close() sends RST, and not FIN


class FaultProxy:
    """Stand between clients and the server at *host* and *port*; used as ``async with``."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._links: set[_Link] = set()
        self._tasks = Tasks()
        self._refusing = False
        self._resets = 0
        self.gates: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.delays: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self.loss: tuple[int, Loss] | None = None
        self.catching: asyncio.Event | None = None
        """Set by the first connection that has something for the server, which then holds it until ``deliver``."""
        self.host: str = "127.0.0.1"
        self.port: int = 0
        self.accepted: int = 0
        """How many connections were let in so far."""

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._welcome, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.heal()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.refuse()  # what has come, and was not looked at yet
        self.reset()
        for _ in range(10):  # a connection that came just now is made, welcomed and reset in a turn of the loop each
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)
        await self._server.wait_closed()

    @property
    def open(self) -> int:
        """How many connections are open."""
        return len(self._links)

    # --- faults ---

    def delay(self, seconds: float, *ways: Direction) -> None:
        """Let everything that comes from now on arrive so much later; both ways if none is given."""
        for way in _meant(ways):
            self.delays[way] = seconds

    def stall(self, *ways: Direction) -> None:
        """Hold everything back; both ways if none is given. Connections can still be made, and seem to work."""
        for way in _meant(ways):
            self.gates[way].clear()

    def lose_answers(self, *, after: int = 0, by: Loss = "reset") -> None:
        """Let each connection bring back *after* more bytes, and then break it, by a reset or by silence.

        What was asked is carried out all the same: the first byte of an answer is not sent before that.
        """
        self.loss = after, by
        for link in self._links:
            link.lose(self.loss)

    def strand(self) -> None:
        """Let the connections that stand be silent from now on; new ones work."""
        for link in self._links:
            link.lose((0, "stall"))

    def reset(self) -> None:
        """Break every connection with RST, also one that is still being made."""
        self._resets += 1
        for link in list(self._links):
            link.break_()

    def refuse(self) -> None:
        """Reset new connections at once; those that stand are left alone."""
        self._refusing = True

    def lead_to(self, host: str, port: int) -> None:
        """Let new connections go to another server; those that stand are left alone, and ``heal`` changes nothing."""
        self._target = host, port

    async def deliver(self) -> None:
        """Bring what was caught to the server, and wait until it has answered or closed the connection.

        A client that has closed its connection meanwhile is seen to do so by the server only then.
        """
        caught = [link for link in self._links if link.is_caught]
        for link in caught:
            link.let_go()
        await asyncio.gather(*(link.answered.wait() for link in caught))

    def heal(self) -> None:
        """End every fault. What was held back arrives, on connections that have outlasted it."""
        self._refusing = False
        self.loss = None
        for way, gate in self.gates.items():
            self.delays[way] = 0.0
            gate.set()
        for link in self._links:
            link.lose(None)

    # --- inner ---

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.keep(task)
        if self._refusing:
            _reset(writer)
            return
        self.accepted += 1
        resets = self._resets
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        if self._resets != resets:
            _reset(writer)
            _reset(there[1])
            return
        link = _Link(self, (reader, writer), there)
        link.lose(self.loss)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Held = asyncio.Queue[tuple[float, bytes]]  # when it is due, and what; nothing is the end


class _Link:
    """One client's connection, and the one made for it to the server."""

    def __init__(self, proxy: FaultProxy, client: _Stream, server: _Stream) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._loss: tuple[int, Loss] | None = None
        self._unlost = asyncio.Event()
        self._broken = False
        self._pumps: list[asyncio.Task[None]] = []
        self._passable = asyncio.Event()
        self._passable.set()
        self.answered = asyncio.Event()
        self.answered.set()

    @property
    def is_caught(self) -> bool:
        """Whether it holds back what its client has asked."""
        return not self._passable.is_set()

    def let_go(self) -> None:
        """Send on what was held back."""
        self._passable.set()

    async def run(self) -> None:
        """Carry both ways until both have ended, or the connection is broken."""
        up: _Held = asyncio.Queue(CHUNKS_HELD)
        down: _Held = asyncio.Queue(CHUNKS_HELD)
        self._pumps = [
            asyncio.create_task(pump)
            for pump in (
                self._take_in(self._client[0], up, "up"),
                self._give_out(self._server[1], up, "up"),
                self._take_in(self._server[0], down, "down"),
                self._give_out(self._client[1], down, "down"),
            )
        ]
        try:
            await asyncio.gather(*self._pumps)
        except OSError:
            self._broken = True  # one side was reset: so is the other
        except asyncio.CancelledError:
            if not self._broken:  # it is us who are cancelled, with the loop
                raise
        finally:
            self.answered.set()  # or it never will
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for _, writer in (self._client, self._server):
                if self._broken:
                    _reset(writer)
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    def break_(self) -> None:
        """Reset both sides."""
        self._broken = True
        for _, writer in (self._client, self._server):
            _reset(writer)
        for pump in self._pumps:
            pump.cancel()

    def lose(self, loss: tuple[int, Loss] | None) -> None:
        """Count down, from now, to the byte with which answers are lost; or lose none any more."""
        self._loss = loss
        if loss is None:
            self._unlost.set()
        else:
            self._unlost.clear()

    async def _take_in(self, source: asyncio.StreamReader, held: _Held, way: Direction) -> None:
        # Taking in goes on while the other end waits, so that a delay is a delay, and not a narrow road.
        loop = asyncio.get_running_loop()
        while True:
            data = await source.read(CHUNK)
            if way == "down" and self._passable.is_set():
                self.answered.set()
            await held.put((loop.time() + self._proxy.delays[way], data))
            if not data:
                return

    async def _give_out(self, sink: asyncio.StreamWriter, held: _Held, way: Direction) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await held.get()
            if (pause := due - loop.time()) > 0:
                await asyncio.sleep(pause)
            await self._proxy.gates[way].wait()
            if way == "up":
                await self._hold_if_caught(data)
            if not data:
                if sink.can_write_eof():
                    sink.write_eof()
                return
            if way == "down" and self._loss is not None:
                data = await self._lose_some(sink, data)
            sink.write(data)
            await sink.drain()

    async def _hold_if_caught(self, data: bytes) -> None:
        catching = self._proxy.catching
        if data and catching is not None and not catching.is_set():
            self._passable.clear()
            self.answered.clear()
            catching.set()
        await self._passable.wait()
        if not data:
            await self.answered.wait()  # a server may drop the question of a client that is seen to have gone

    async def _lose_some(self, sink: asyncio.StreamWriter, data: bytes) -> bytes:
        """Send what may still come back; return what comes after it, once answers are no longer lost."""
        assert self._loss is not None
        left, by = self._loss
        through, rest = data[:left], data[left:]
        self._loss = left - len(through), by
        sink.write(through)
        if rest:
            if by == "reset":
                await sink.drain()
                self.break_()
                await asyncio.sleep(0)  # which is where we are cancelled
            await self._unlost.wait()
        return rest


@asynccontextmanager
async def late(*proxies: FaultProxy) -> AsyncIterator[Callable[[Awaitable[object]], Awaitable[None]]]:
    """Yield what holds a question on its way through *proxies* and has its asker give up; deliver it after the block.

    The asker must be connected already: what is held is the first thing that it sends.
    """

    async def give_up(question: Awaitable[object]) -> None:
        caught = asyncio.Event()
        for proxy in proxies:
            proxy.catching = caught
        asking, catching = asyncio.ensure_future(question), asyncio.ensure_future(caught.wait())
        await asyncio.wait({asking, catching}, return_when=asyncio.FIRST_COMPLETED)
        for proxy in proxies:
            proxy.catching = None
        is_early = asking.done()
        asking.cancel()
        catching.cancel()
        answers = await asyncio.gather(asking, catching, return_exceptions=True)
        if is_early:
            raise RuntimeError(f"the question was answered without being sent: {answers[0]!r}")

    try:
        yield give_up
    finally:
        for proxy in proxies:
            await proxy.deliver()


def _meant(ways: tuple[Direction, ...]) -> tuple[Direction, ...]:
    return ways or ("up", "down")


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    writer.transport.abort()

"""A TCP proxy on loopback that injects faults: delays, stalls, resets, refusals, lost answers. Needs no root.

::

    async with FaultProxy("127.0.0.1", 6379) as proxy:  # clients use proxy.host and proxy.port
        proxy.delay(0.2)  # in each direction, for data received from now on
        proxy.stall("up")  # data of clients is held back, their connections stay open
        proxy.stall()  # both directions: as in a partition; no FIN, no RST
        proxy.lose_answers()  # requests get through; the first byte of an answer resets the connection
        proxy.lose_answers(after=100, by="stall")
        proxy.stall_existing()  # existing connections carry no more answers, new ones work
        proxy.reset()  # every connection, now
        proxy.refuse()  # new connections are reset at once
        proxy.redirect("127.0.0.1", 6380)  # new connections go to another server, as after a change of DNS
        proxy.heal()  # data that was held back is sent on
        kill(proxy, after=3)  # the client's first three writes get through, and then none, as if it was killed
        async with late(proxy) as give_up:
            await give_up(store.renew(grants, ttl))  # the caller gives up; after the block, the server gets it
        async with hold(proxy) as begin:
            asking = await begin(store.renew(grants, ttl))  # it is carried out; its answer comes after the block

*Up* is from the client to the server, *down* is back. The proxy runs on the loop that entered it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Literal

from tenure._runtime.tasks import Tasks

__all__ = ["Begin", "Direction", "FaultProxy", "Kill", "Loss", "hold", "kill", "late"]

Direction = Literal["up", "down"]
"""``up`` is from the client to the server, ``down`` from the server to the client."""

Loss = Literal["reset", "stall"]
"""How an answer is lost: the connection is reset, or it stays open and carries nothing more."""

Begin = Callable[[Awaitable[Any]], Awaitable[asyncio.Future[Any]]]
"""Sends a request; returns its answer to come, once the request or the answer is held back."""

CHUNK = 65_536
CHUNKS_HELD = 64  # of one connection and direction; then the sender must wait, as on a full network
_LINGER_NONE = struct.pack("ii", 1, 0)  # close() sends RST, and not FIN


def _never(data: bytes) -> bool:
    return False


class FaultProxy:
    """Stand between clients and the server at *host* and *port*; used as ``async with``."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._connections: set[_Connection] = set()
        self._tasks = Tasks()
        self._refusing = False
        self._resets = 0
        self._asked_on: object = None  # the connection of the request whose answer is held back
        self.flowing: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.delays: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self.loss: tuple[int, Loss] | None = None
        self.holding: asyncio.Event | None = None
        """Set by the first connection that gets data for the server, which then holds this data until ``deliver``."""
        self.withheld: asyncio.Event | None = None
        """Set when data has come that is held back by ``stall``."""
        self.stall_answer_to: Callable[[bytes], bool] | None = None
        """Which data of clients is the request whose answer is held back, with all after it."""
        self.killing: Kill | None = None
        """The kill of the client that is to come."""
        self.is_noise: Callable[[bytes], bool] = _never
        """Which data is sent by itself, as a ping: it is neither a request nor an answer that is held back."""
        self.host: str = "127.0.0.1"
        self.port: int = 0
        self.accepted: int = 0
        """The number of connections accepted so far."""
        self.refused: int = 0
        """The number of connections reset so far because of ``refuse``."""

    async def __aenter__(self) -> FaultProxy:
        # asyncio's own server leaves connections open that it has accepted just before it is closed.
        self._listening = socket.create_server((self.host, 0))
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listening, self._accept)
        self.heal()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()  # which resets the connections that were made, and not accepted yet
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    # --- faults ---

    def delay(self, seconds: float, *directions: Direction) -> None:
        """Delay all data received from now on by *seconds*; in both directions if none is given."""
        for direction in _or_both(directions):
            self.delays[direction] = seconds

    def stall(self, *directions: Direction) -> None:
        """Hold all data back; in both directions if none is given. Connections can still be made, and seem to work."""
        for direction in _or_both(directions):
            self.flowing[direction].clear()

    def lose_answers(self, *, after: int = 0, by: Loss = "reset") -> None:
        """Let *after* more bytes of answers through on each connection; then reset it, or hold back the rest.

        The requests are carried out all the same: the server answers only after that.
        """
        self.loss = after, by
        for connection in self._connections:
            connection.lose(self.loss)

    def stall_existing(self) -> None:
        """Hold back all further answers on the existing connections; new ones work."""
        for connection in self._connections:
            connection.lose((0, "stall"))

    def reset(self) -> None:
        """Break every connection with RST, also one that is still being made."""
        self._resets += 1
        for connection in list(self._connections):
            connection.reset()

    def refuse(self) -> None:
        """Reset new connections at once; existing ones are not changed."""
        self._refusing = True

    def abandon(self) -> None:
        """End every connection as the kill of the client does: what it has sent before goes on to the server."""
        self.refuse()
        for connection in list(self._connections):
            connection.abandon()

    def redirect(self, host: str, port: int) -> None:
        """Let new connections go to another server. Existing ones are not changed, and ``heal`` does not undo this."""
        self._target = host, port

    async def deliver(self) -> None:
        """Send the held requests to the server, and wait until it has answered or closed the connection.

        Only then does the server see that a client has closed its connection meanwhile.
        """
        held = [connection for connection in self._connections if connection.is_held]
        for connection in held:
            connection.release()
        await asyncio.gather(*(connection.answered.wait() for connection in held))

    def heal(self) -> None:
        """End every fault. Data that was held back is sent on, on connections that are still open."""
        self._refusing = False
        self.loss = None
        for direction, flowing in self.flowing.items():
            self.delays[direction] = 0.0
            flowing.set()
        for connection in self._connections:
            connection.lose(None)

    def note_received(self, connection: object, direction: Direction, data: bytes) -> None:
        """Note that *data* has come on a connection, and may have to wait."""
        if not data or self.is_noise(data):
            return
        if direction == "up" and self.stall_answer_to is not None and self.stall_answer_to(data):
            self.stall_answer_to, self._asked_on = None, connection
            self.stall("down")
        is_held = not self.flowing[direction].is_set()
        if is_held and self.withheld is not None and (direction == "up" or connection is self._asked_on):
            self.withheld.set()

    # --- connections ---

    def _accept(self) -> None:
        """Accept one connection; the loop calls this when one was made."""
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # the client has gone meanwhile
            return
        accepted.setblocking(False)
        self._tasks.spawn(self._connect(accepted, self._resets))

    async def _connect(self, accepted: socket.socket, resets: int) -> None:
        """Connect to the server, and copy data; *resets* is how many resets there had been when it was accepted."""
        # asyncio does this for sockets that it makes. Otherwise, the second of two short answers is late by 40 ms.
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = await asyncio.open_connection(sock=accepted)
        if self._refusing:
            self.refused += 1
            await _reset_and_wait(client[1])
            return
        self.accepted += 1
        try:
            server = await asyncio.open_connection(*self._target)
        except OSError:
            await _reset_and_wait(client[1])
            return
        if self._resets != resets:
            await _reset_and_wait(client[1])
            await _reset_and_wait(server[1])
            return
        connection = _Connection(self, client, server)
        connection.lose(self.loss)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Buffer = asyncio.Queue[tuple[float, bytes]]  # the time when it is due, and the data; empty at the end


class _Connection:
    """One client's connection, and the one made for it to the server."""

    def __init__(self, proxy: FaultProxy, client: _Stream, server: _Stream) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._loss: tuple[int, Loss] | None = None
        self._not_losing = asyncio.Event()
        self._broken = False
        self._is_abandoned = False
        self._pumps: list[asyncio.Task[None]] = []
        self._released = asyncio.Event()
        self._released.set()
        self.answered = asyncio.Event()
        self.answered.set()

    @property
    def is_held(self) -> bool:
        """Whether it holds back a request of its client."""
        return not self._released.is_set()

    def release(self) -> None:
        """Send on the request that was held back."""
        self._released.set()

    async def run(self) -> None:
        """Copy data in both directions until both have ended, or the connection is broken."""
        up: _Buffer = asyncio.Queue(CHUNKS_HELD)
        down: _Buffer = asyncio.Queue(CHUNKS_HELD)
        self._pumps = [
            asyncio.create_task(pump)
            for pump in (
                self._receive_all(self._client[0], up, "up"),
                self._send_all(self._server[1], up, "up"),
                self._receive_all(self._server[0], down, "down"),
                self._send_all(self._client[1], down, "down"),
            )
        ]
        try:
            await asyncio.gather(*self._pumps)
        except OSError:
            self._broken = True  # one side was reset: so is the other
        except asyncio.CancelledError:
            if not self._broken:  # this task itself is cancelled, with the loop
                raise
        finally:
            self.answered.set()  # otherwise ``deliver`` would wait for ever
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for _, writer in (self._client, self._server):
                if self._broken and not (self._is_abandoned and writer is self._server[1]):
                    _reset(writer)
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    def reset(self) -> None:
        """Reset both sides."""
        self._broken = True
        for _, writer in (self._client, self._server):
            _reset(writer)
        for pump in self._pumps:
            pump.cancel()

    def abandon(self) -> None:
        """Reset the client's side; the server gets what was sent to it, and the end of the connection."""
        self._broken = self._is_abandoned = True
        _reset(self._client[1])
        for pump in self._pumps:
            pump.cancel()

    def lose(self, loss: tuple[int, Loss] | None) -> None:
        """Lose answers as *loss* says: after so many bytes from now, and how; None: lose no more."""
        self._loss = loss
        if loss is None:
            self._not_losing.set()
        else:
            self._not_losing.clear()

    async def _receive_all(self, source: asyncio.StreamReader, held: _Buffer, direction: Direction) -> None:
        # Receiving goes on while earlier data waits to be sent, so that a delay does not limit the throughput.
        loop = asyncio.get_running_loop()
        while True:
            data = await source.read(CHUNK)
            if direction == "down" and self._released.is_set():
                self.answered.set()
            self._proxy.note_received(self, direction, data)
            await held.put((loop.time() + self._proxy.delays[direction], data))
            if not data:
                return

    async def _send_all(self, sink: asyncio.StreamWriter, held: _Buffer, direction: Direction) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await held.get()
            if (pause := due - loop.time()) > 0:
                await asyncio.sleep(pause)
            await self._proxy.flowing[direction].wait()
            if direction == "up":
                await self._hold_if_requested(data)
                if data and self._proxy.killing is not None and not self._proxy.killing.lets_through():
                    await asyncio.sleep(0)  # this task is cancelled here
            if not data:
                if sink.can_write_eof():
                    sink.write_eof()
                return
            if direction == "down" and self._loss is not None:
                data = await self._lose_answer(sink, data)
            sink.write(data)
            await sink.drain()

    async def _hold_if_requested(self, data: bytes) -> None:
        holding = self._proxy.holding
        if data and holding is not None and not holding.is_set():
            self._released.clear()
            self.answered.clear()
            holding.set()
        await self._released.wait()
        if not data:
            await self.answered.wait()  # a server may drop the request of a client that has closed its connection

    async def _lose_answer(self, sink: asyncio.StreamWriter, data: bytes) -> bytes:
        """Send the bytes that may still pass; return the rest, once answers are no longer lost."""
        assert self._loss is not None
        left, by = self._loss
        through, rest = data[:left], data[left:]
        self._loss = left - len(through), by
        sink.write(through)
        if rest:
            if by == "reset":
                await sink.drain()
                self.reset()
                await asyncio.sleep(0)  # this task is cancelled here
            await self._not_losing.wait()
        return rest


class Kill:
    """The kill of a client after so many of its writes: nothing that it sends then arrives, and it can't connect."""

    def __init__(self, proxies: Sequence[FaultProxy], after: int) -> None:
        self._proxies = proxies
        self._left = after
        self.has_happened = False
        """Whether the client has tried to send more than it could."""

    def lets_through(self) -> bool:
        """Return whether another write still reaches the server; if not, end all connections."""
        self._left -= 1
        if self._left >= 0:
            return True
        if not self.has_happened:
            self.has_happened = True
            for proxy in self._proxies:
                proxy.abandon()
        return False


def kill(*proxies: FaultProxy, after: int) -> Kill:
    """Let *after* more writes of the client of *proxies* through, and then no more, as if it was killed."""
    killing = Kill(proxies, after)
    for proxy in proxies:
        proxy.killing = killing
    return killing


@asynccontextmanager
async def late(*proxies: FaultProxy) -> AsyncIterator[Callable[[Awaitable[object]], Awaitable[None]]]:
    """Yield a function that gives up a request that *proxies* hold back; deliver the request after the block.

    The client must be connected already: the first data that it sends is held.
    """

    async def give_up(request: Awaitable[object]) -> None:
        held = asyncio.Event()
        for proxy in proxies:
            proxy.holding = held
        asking, holding = asyncio.ensure_future(request), asyncio.ensure_future(held.wait())
        await asyncio.wait({asking, holding}, return_when=asyncio.FIRST_COMPLETED)
        for proxy in proxies:
            proxy.holding = None
        is_early = asking.done()
        asking.cancel()
        holding.cancel()
        answers = await asyncio.gather(asking, holding, return_exceptions=True)
        if is_early:
            raise RuntimeError(f"the request was answered without being sent: {answers[0]!r}")

    try:
        yield give_up
    finally:
        for proxy in proxies:
            await proxy.deliver()


@asynccontextmanager
async def hold(
    *proxies: FaultProxy,
    direction: Direction = "down",
    decides: Callable[[bytes], bool] = bool,
    is_noise: Callable[[bytes], bool] = _never,
) -> AsyncIterator[Begin]:
    """Yield a function that sends a request, of which *proxies* hold back the answer (or the request, if *up*).

    It returns the answer to come as soon as something is held back: the answer proves that the request was carried out.
    One request in each block, of a client that asks for nothing else meanwhile. If it is several in turn on the wire,
    *decides* tells which of them is meant; *is_noise* tells what both sides send by themselves. When the block ends,
    the proxies are healed: all that was held back is sent on.
    """
    asked: list[asyncio.Future[Any]] = []

    async def begin(request: Awaitable[Any]) -> asyncio.Future[Any]:
        withheld = asyncio.Event()
        for proxy in proxies:
            proxy.withheld, proxy.is_noise = withheld, is_noise
            if direction == "down":
                proxy.stall_answer_to = decides
            else:
                proxy.stall("up")
        asked.append(await begun(request, withheld))
        return asked[-1]

    try:
        yield begin
    except BaseException:
        for one in asked:  # nobody waits for it any more
            one.cancel()
        raise
    finally:
        for proxy in proxies:
            proxy.withheld = proxy.stall_answer_to = proxy._asked_on = None
            proxy.is_noise = _never
            proxy.heal()


async def begun(request: Awaitable[Any], withheld: asyncio.Event) -> asyncio.Future[Any]:
    """Send a request, and return its answer to come when *withheld* is set.

    Raises:
        RuntimeError: It was answered before that.
    """
    asking, waiting = asyncio.ensure_future(request), asyncio.ensure_future(withheld.wait())
    await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not withheld.is_set():
        answers = await asyncio.gather(asking, return_exceptions=True)
        raise RuntimeError(f"the request was answered, and nothing held back: {answers[0]!r}")
    return asking


def _or_both(directions: tuple[Direction, ...]) -> tuple[Direction, ...]:
    return directions or ("up", "down")


async def _reset_and_wait(writer: asyncio.StreamWriter) -> None:
    _reset(writer)
    with suppress(OSError):
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    writer.transport.abort()

"""The transport over TCP: one connection from each member to each other, dialled again when it breaks.

House rules:

- ``send`` never waits. A message that can't be sent soon is dropped: the member asks again, and a stale message is
  useless.
- A member sends on the connections that it has dialled. A client gets its answers on its own connection.
- Everything is bounded: frames by length, an outbox by bytes and age, unverified connections by number and time,
  clients by number.
  Of too many connections, the oldest is closed, so that no flood can keep a member out.
- Network failures are no errors here; the protocol is made for them. They are counted and repaired.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import ssl
import struct
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.keys import Keys, KeysOfFleet
from tenure._backends.peers.seal import (
    GREETING,
    INTRODUCTION,
    NONCE,
    Broken,
    Channel,
    SharedKey,
    greeting,
    introduced,
    introduction,
    length_of,
    nonce_of,
)
from tenure._backends.peers.transport import CROWDED, Counts, Deliver
from tenure._backends.peers.wire import Malformed, Message, decode, encode
from tenure._connect_failures import Target
from tenure._jitter import Rng, later
from tenure._runtime.tasks import Tasks
from tenure._tls_context import ReloadingContext, shown_by
from tenure._tls_failures import TlsAdvice
from tenure.errors import Unavailable

OUTBOX_MAX = 1_048_576
"""Bytes that wait for one member; the oldest are dropped beyond that."""

UNVERIFIED_MAX = 64
"""Connections at one time that have not introduced themselves."""

CLIENTS_MAX = 64
"""Connections of clients at one time."""

GREET_WITHIN = 3.0
"""Seconds for a connection to be set up, greetings and introduction included."""

ACCEPT_WITHIN = 0.5
"""Seconds after which a member that has not closed the connection has accepted it."""

TURNS_TO_ANSWER = 4
"""Turns of the loop until a connection that it has accepted reaches ``_answer``, which closes it after ``close``."""

DIAL_EVERY_MAX = 2.0
"""Seconds, at most, between attempts to reach a member that can't be reached."""


_TLS_ADVICE = TlsAdvice(
    authority="name the authority of all members with tls_ca=FILE",
    certificate="give it tls_cert and tls_key",
    plain="give all members tls_cert, tls_key and tls_ca, or none",
)


class Outbox:
    """The messages to one member that wait to be sent, until they are stale."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keeps: float) -> None:
        self._loop = loop
        self._keeps = keeps
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, body: bytes) -> None:
        """Add *body*; drop the oldest if there are too many bytes."""
        self._waiting.append((self._loop.time(), body))
        self._bytes += len(body)
        while self._bytes > OUTBOX_MAX:
            self._bytes -= len(self._waiting.popleft()[1])
        self._news.set()

    async def get(self) -> list[bytes]:
        """Wait for something to send, and return everything that is not stale."""
        while True:
            await self._news.wait()
            self._news.clear()
            oldest = self._loop.time() - self._keeps
            fresh = [body for at, body in self._waiting if at >= oldest]
            self._waiting.clear()
            self._bytes = 0
            if fresh:
                return fresh


class TcpTransport:
    """A :class:`tenure._backends.peers.transport.Transport` over TCP.

    Args:
        fleet: The fleet, and this member's place in it.
        secret: The key that seals every frame; or keys, which are replaced.
        dice: Source of jitter.
        server_tls, client_tls: Contexts to listen and to dial with; None for TCP in clear.
        listen: Where to listen if not at this member's own address: ``host:port``.
        listener: A socket that listens already; otherwise one is made.
    """

    def __init__(
        self,
        fleet: Fleet,
        secret: Keys,
        rng: Rng,
        *,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ReloadingContext | None = None,
        listen: str | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.counts = Counts()
        self._fleet = fleet
        self._secret = secret
        self._rng = rng
        self._server_tls = server_tls
        self._client_tls = client_tls
        self._listen_at = listen
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._tasks = Tasks()
        self._outboxes: dict[int, Outbox] = {}
        self._reachable: dict[int, asyncio.Event] = {}
        self._sealed: dict[asyncio.StreamWriter, SharedKey] = {}  # connections, and the key of each
        self._unverified: dict[asyncio.Task[None], None] = {}
        self._clients: dict[asyncio.Task[None], None] = {}
        self._clients_served = 0
        self._closed = False
        self._silence_max = max(30.0, 4 * fleet.suspect_after)
        self._deliver: Deliver = lambda sender, message: None

    async def open(self, deliver: Deliver) -> None:
        """Listen, if this is a member, and begin to dial all others."""
        self._deliver = deliver
        if self._fleet.me is not None:
            await self._listen(self._fleet.me)
        loop = asyncio.get_running_loop()
        for other in self._fleet.others:
            self._outboxes[other] = Outbox(loop, max(1.0, self._fleet.question_lasts))
            self._reachable[other] = asyncio.Event()
            self._spawn(self._keep_dialling(other))
        if isinstance(self._secret, KeysOfFleet):
            self._spawn(self._follow(self._secret))

    def send(self, to: int, message: Message) -> None:
        """Put *message* into the outbox of *to*; without one, it is lost."""
        outbox = self._outboxes.get(to)
        if outbox is not None:
            outbox.put(encode(message))
            self.counts.sent += 1

    async def close(self) -> None:
        """Stop listening, and drop every connection."""
        self._closed = True
        if self._server is not None:
            try:
                await _stop_accepting(self._server)
            finally:
                self._server.close()
        await self._tasks.cancel_all()
        self._outboxes.clear()

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn(call)

    # --- incoming connections ---

    async def _listen(self, me: int) -> None:
        at = self._listen_at or self._fleet.members[me]
        host, port = address(at)
        place: dict[str, Any] = {"sock": self._listener} if self._listener else {"host": host, "port": port}
        try:
            self._server = await asyncio.start_server(self._answer, **place)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise Unavailable(f"can't listen on {at} ({why}): {_advice(error, self._listen_at)}") from error

    def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server_tls is not None:
            transport = cast("asyncio.Transport", writer.transport)
            transport.pause_reading()  # the first bytes are for the handshake, which begins a moment later
        if self._closed:
            writer.transport.abort()
            return
        serving = self._spawn(self._serve(reader, writer))
        serving.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled before it had begun

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._admit(task, self._unverified, UNVERIFIED_MAX)
        try:
            async with asyncio.timeout(GREET_WITHIN):
                if self._server_tls is not None:  # only here, so that a connection without a handshake counts too
                    await writer.start_tls(self._server_tls)
                mine, theirs = await self._greet(reader, writer)
                channel, sender = await self._introduced(reader, writer, mine, theirs)
            self._unverified.pop(task, None)
            if sender is None:
                self._admit(task, self._clients, CLIENTS_MAX)
                await self._serve_client(reader, writer, channel)
            else:
                self._reachable[sender].set()  # it is alive: dial it at once
                await self._read(reader, channel, sender, self._silence_max)
        except (OSError, EOFError, Broken, TimeoutError, asyncio.CancelledError) as error:
            # The other side connects again. No task awaits this one, so it can also end here when it is cancelled:
            # because it was crowded out, or because the transport is closed.
            _forget_frames(error)
        finally:
            self._unverified.pop(task, None)
            self._clients.pop(task, None)
            self._sealed.pop(writer, None)

    def _admit(self, task: asyncio.Task[None], those: dict[asyncio.Task[None], None], most: int) -> None:
        """Add *task* to *those*; if there are too many, end the oldest."""
        if len(those) >= most:
            oldest = next(iter(those))
            del those[oldest]
            oldest.cancel()
            self.counts.drop(CROWDED)
        those[task] = None

    async def _introduced(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mine: bytes, theirs: bytes
    ) -> tuple[Channel, int | None]:
        """Return the channel of who has dialled, by the key that has sealed its first frame, and which member it is."""
        me = self._fleet.me
        assert me is not None
        frame = await self._frame(reader)
        keys = self._secret.latest() if len(frame) == INTRODUCTION else self._secret.latest()[:1]
        channels = [(key, key.channel(mine, theirs, dialled=False)) for key in keys]
        key, channel = next((one for one in channels if one[1].has_sealed(frame)), channels[0])
        body = channel.open(frame, self.counts)
        try:
            if body is None:
                raise Malformed("not sealed with this key")
            sender = introduced(body, me, self._fleet.size)
        except Malformed as error:
            if body is not None:
                self.counts.drop("foreign")
            raise Broken(str(error)) from error
        self._sealed[writer] = key
        return channel, sender

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: Channel) -> None:
        self._clients_served += 1
        number = -self._clients_served
        self._outboxes[number] = outbox = Outbox(asyncio.get_running_loop(), self._fleet.question_lasts)
        writing = asyncio.create_task(self._write(writer, channel, outbox))
        try:
            await self._read(reader, channel, number, self._silence_max)
        finally:
            del self._outboxes[number]
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    # --- outgoing connections ---

    async def _keep_dialling(self, to: int) -> None:
        pause = 0.05
        while True:
            begun = asyncio.get_running_loop().time()
            try:
                await self._dial(to)
            except (OSError, EOFError, Broken, TimeoutError) as error:  # it is dead, not started yet, or cut off
                member, advice = self._fleet.members[to], replace(_TLS_ADVICE, own=shown_by(self._client_tls))
                failed = Target(member, member, software="that member", tls=advice).failure(error)
                if failed is not None:
                    self.counts.unreached[to] = failed
            if asyncio.get_running_loop().time() - begun > GREET_WITHIN:
                pause = 0.05
            self._reachable[to].clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(later(pause, self._rng, 0.5)):
                    await self._reachable[to].wait()
            pause = min(2 * pause, DIAL_EVERY_MAX)

    async def _dial(self, to: int) -> None:
        host, port = address(self._fleet.members[to])
        async with asyncio.timeout(GREET_WITHIN):
            reader, writer = await asyncio.open_connection(host, port, ssl=self._client_tls)
        try:
            async with asyncio.timeout(GREET_WITHIN):
                mine, theirs = await self._greet(reader, writer)
                key = self._sealed[writer] = self._secret.latest()[0]
                channel = key.channel(mine, theirs, dialled=True)
                self.counts.unreached.pop(to, None)
                writer.write(channel.seal(introduction(self._fleet.me, to)))
                await writer.drain()
            writing = asyncio.create_task(self._write(writer, channel, self._outboxes[to]))
            reading = asyncio.create_task(self._read(reader, channel, to))
            try:
                done, _ = await asyncio.wait({reading}, timeout=ACCEPT_WITHIN)
                is_refused = done and key in self._secret.latest()  # else it was broken here
                (self.counts.refused.add if is_refused else self.counts.refused.discard)(to)
                await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                writing.cancel()
                reading.cancel()
                await asyncio.gather(writing, reading, return_exceptions=True)
        finally:
            self._sealed.pop(writer, None)
            writer.transport.abort()

    # --- both ---

    async def _follow(self, keys: KeysOfFleet) -> None:
        """Look for other keys, and break connections whose key is not accepted any more: it may be stolen."""
        while True:
            await asyncio.sleep(self._fleet.heartbeat)
            await keys.look()
            accepted = keys.latest()
            for writer in [writer for writer, key in self._sealed.items() if key not in accepted]:
                writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[bytes, bytes]:
        """Exchange greetings; return our nonce and theirs."""
        _keep_alive(writer)
        mine = secrets.token_bytes(NONCE)
        writer.write(greeting(mine))
        theirs = nonce_of(await reader.readexactly(GREETING), self.counts)
        if theirs == mine:
            _close_at_once(writer)
            raise Broken("this member reached itself")
        return mine, theirs

    async def _frame(self, reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(length_of(await reader.readexactly(4), self.counts))

    async def _read(
        self, reader: asyncio.StreamReader, channel: Channel, sender: int, silence: float | None = None
    ) -> None:
        while True:
            async with asyncio.timeout(silence):
                frame = await self._frame(reader)
            body = channel.open(frame, self.counts)
            if body is None:
                continue
            try:
                message = decode(body)
            except Malformed:
                channel.drop("malformed", self.counts)
                continue
            self.counts.received += 1
            self._deliver(sender, message)

    async def _write(self, writer: asyncio.StreamWriter, channel: Channel, outbox: Outbox) -> None:
        while True:
            for body in await outbox.get():
                writer.write(channel.seal(body))
            # A side that reads nothing for so long counts as gone; the connection is dialled again.
            async with asyncio.timeout(max(GREET_WITHIN, self._fleet.suspect_after)):
                await writer.drain()


async def _stop_accepting(server: asyncio.Server) -> None:
    """Accept no more connections, and wait until those that the loop has just accepted reach ``_answer``.

    A server that is closed before that leaves them open for ever.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        with suppress(NotImplementedError):
            loop.remove_reader(listening.fileno())
    for _ in range(TURNS_TO_ANSWER):
        await asyncio.sleep(0)


def _advice(error: OSError, listen: str | None) -> str:
    """Say what to do about an address that can't be listened on."""
    if error.errno == errno.EADDRINUSE:
        return "another process does; if that is this member, leave me= out of the URL to connect as a client"
    if error.errno == errno.EACCES:
        return "this user may not; use a port above 1023"
    if listen is not None:
        return "it is no address of this machine now; listen=0.0.0.0 means all that it has"
    return (
        "it is no address of this machine now; check that me= names this member, or, if others reach it through an "
        "address that it does not have itself, add listen=0.0.0.0"
    )


def address(member: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 address is in brackets."""
    host, _, port = member.rpartition(":")
    return host.strip("[]"), int(port)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the stack frames of *error*.

    The frames and the error reference each other, and with them the 256 KiB of a failed TLS handshake. In a flood of
    those, none may stay until the garbage is collected.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _close_at_once(writer: asyncio.StreamWriter) -> None:
    """Release the port without the usual minute's wait.

    A process that dials a port of this machine on which no process listens may get this very port for its own end: it
    reaches itself. As long as it keeps the port, the member that it belongs to can't listen on it.
    """
    link: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Send at once, and notice soon when the other side is gone."""
    link: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GREET_WITHIN * 1000))

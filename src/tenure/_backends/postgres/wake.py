"""Hints: one connection that listens for notifications, and notifications to others, sent apart from the writes.

A notification's payload is ``SENDER:TOPIC``. The topic is that of the notifier, such as ``queue:orders``; the sender is
a nonce by which a process recognises its own notifications, which its listeners have got already.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import DRIVER_ERRORS, Connection
from tenure._opened import Fact
from tenure._runtime.backoff import Backoff
from tenure._runtime.closing import close_together
from tenure._runtime.notifier import Notifier
from tenure._runtime.on_loop import on_loop
from tenure.errors import TenureError

PAUSES = (0.001, 0.005)
"""The least and the most seconds between two notifications: a commit with one takes a lock that the whole database
shares."""

PROBE_EVERY = 45.0
"""Seconds after which a silent connection is checked by a statement: often enough for what forgets such connections."""

# Notifications are lost with the server anyway, so they don't wait for the disk.
_NOTIFY = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2 || topic)
FROM pg_catalog.unnest($3::text[]) AS topic
"""


class Wake:
    """The hints of one opened backend, from this process and from others."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._channel = channel_of(client.options.schema)
        self._nonce = secrets.token_hex(4)
        self._notifier = Notifier()
        self._guard = threading.Lock()
        # The listening connection is on the loop that opened the backend, the renewal thread's: the user's code never
        # blocks it, and a listener that doesn't read its notifications would hold up the whole database.
        self._home = _running_loop()
        self._listening: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._senders: dict[asyncio.AbstractEventLoop, _Sender] = {}
        self.connected: bool = False
        """Whether it listens at the moment."""

    def listen(self, topic: str) -> AsyncIterator[None]:
        """Yield whenever *topic* was notified, and whenever a notification may have been missed."""
        hints = self._notifier.listen(topic)
        if self._client.options.listen:
            self._ensure_listening()
        return hints

    def notify_here(self, topic: str) -> None:
        """Notify this process's listeners if it doesn't listen to the server, which notifies all others."""
        if not self._client.options.listen:
            self._notifier.notify(topic)

    def notify(self, *topics: str) -> None:
        """Notify the listeners of *topics*: in this process at once, in others soon, together with other topics."""
        loop = asyncio.get_running_loop()
        sender = self._senders.get(loop)
        if sender is None:
            for old in [one for one in self._senders if one.is_closed()]:
                del self._senders[old]
            sender = self._senders[loop] = _Sender(self._client, self._channel, self._nonce)
        for topic in topics:
            self._notifier.notify(topic)
            sender.notify(topic)

    def fact(self) -> Fact:
        """Return how this process gets hints."""
        if not self._client.options.listen:
            return Fact("hints", "none (listen=false): candidates and consumers poll")
        advice = "" if self.connected or not self._is_wanted else "not connected"
        return Fact("hints", f"LISTEN {self._channel!r}", advice, "postgres-not-listening")

    async def close(self) -> None:
        """Stop listening, send the notifications that wait, and end every iterator."""
        self._notifier.close()
        parts = [partial(on_loop, loop, sender.close) for loop, sender in list(self._senders.items())]
        if self._listening is not None:
            parts.append(partial(on_loop, self._listening.get_loop(), self._stop_listening))
        await close_together(*parts)

    # --- the connection that listens ---

    def _ensure_listening(self) -> None:
        """Begin to listen, if this is the first listener."""
        with self._guard:
            if self._is_wanted:
                return
            self._is_wanted = True
        here = _running_loop()
        home = self._home if self._home is not None and self._home.is_running() else here
        if home is None:
            self._is_wanted = False
        elif home is here:
            self._begin()
        else:
            home.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._listening = asyncio.get_running_loop().create_task(self._keep_listening(), name="tenure-postgres-listen")

    async def _stop_listening(self) -> None:
        assert self._listening is not None
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _keep_listening(self) -> None:
        backoff, now = Backoff(), asyncio.get_running_loop().time
        while True:
            with suppress(TenureError, *DRIVER_ERRORS):
                connection = await self._client.connect()
                began = now()
                try:
                    await self._listen(connection)
                finally:
                    if self.connected:
                        backoff.reset_after(now() - began)
                    self.connected = False
                    connection.terminate()
            await backoff.rest()

    async def _listen(self, connection: Connection) -> None:
        """Listen on *connection* until it is found broken."""
        within = self._client.options.timeout
        broken = asyncio.Event()
        connection.add_termination_listener(lambda _: broken.set())
        async with asyncio.timeout(within):
            await connection.add_listener(self._channel, self._on_notification)
        self.connected = True
        self._notifier.notify_all()  # a notification may have been missed
        while not broken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_EVERY):
                    await broken.wait()
                return
            await connection.fetchval("SELECT 1", timeout=within)

    def _on_notification(self, connection: object, pid: int, channel: str, payload: object) -> None:
        sender, _, topic = str(payload).partition(":")
        if sender != self._nonce:
            self._notifier.notify(topic)


def pause_after(pause: float, since: float) -> float:
    """Return the pause after a notification that came *since* seconds after the last one, whose *pause* is over.

    It is doubled each time, and is the shortest again after almost two of the longest without one. So each of a
    hundred messages a second is notified at once, and of a thousand, every fifth.
    """
    shortest, longest = PAUSES
    return shortest if since > 1.8 * longest else min(2 * pause, longest)


class _Sender:
    """Notifies other processes, from one loop: at once, or together with later topics soon after the last time."""

    def __init__(self, client: Client, channel: str, nonce: str) -> None:
        self._client = client
        self._channel = channel
        self._sender = f"{nonce}:"
        self._topics: set[str] = set()
        self._pause, self._notified_at = 0.0, -math.inf
        self._sending: asyncio.Task[None] | None = None

    def notify(self, topic: str) -> None:
        self._topics.add(topic)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send(), name="tenure-postgres-notify")

    async def close(self) -> None:
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=1.0)

    async def _send(self) -> None:
        while self._topics:
            topics, self._topics = sorted(self._topics), set()
            with suppress(TenureError):  # a hint may be absent
                await self._client.fetch(_NOTIFY, self._channel, self._sender, topics)
            now = time.monotonic()
            self._pause, self._notified_at = pause_after(self._pause, now - self._notified_at), now
            await asyncio.sleep(self._pause)


def channel_of(schema: str) -> str:
    """Return the channel on which the users of *schema* notify each other."""
    return f"{schema}.hints"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

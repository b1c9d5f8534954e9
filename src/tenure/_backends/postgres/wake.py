"""Waking: one connection that listens to what others tell, and telling them, seldom and off the way of the writes.

A notification's payload is ``SENDER:TOPIC``. The topic is that of the bell, such as ``queue:orders``; the sender is a
nonce by which a process knows its own, as it has rung its own bell already.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import DRIVER_ERRORS, Connection, on_loop
from tenure._opened import Fact
from tenure._runtime.notifier import Notifier
from tenure.errors import TenureError

PAUSE = 0.01
"""Seconds between two notifications: at each commit of one, the whole database takes a lock."""

PROBE_EVERY = 30.0
"""Seconds after which a silent connection is asked whether it still stands."""

RETRY_MAX = 5.0

# News is gone with the server anyway, so it doesn't wait for the disk.
_TELL = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2 || topic) FROM unnest($3::text[]) AS topic
"""


class Wake:
    """The bell of one opened backend, rung by this process and by others."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._channel = channel_of(client.options.schema)
        self._nonce = secrets.token_hex(4)
        self._notifier = Notifier()
        self._guard = threading.Lock()
        # Hints are heard on the loop that opened the backend, the renewal thread's: it is never blocked by the
        # user's code,
        # and a listener that doesn't read what it is sent holds up the whole database.
        self._home = _running_loop()
        self._listening: asyncio.Task[None] | None = None
        self._wanted = False
        self._ringers: dict[asyncio.AbstractEventLoop, _Ringer] = {}
        self.connected: bool = False
        """Whether it listens at the moment."""

    def listen(self, topic: str) -> AsyncIterator[None]:
        """Yield whenever *topic* was rung, and whenever something may have been missed."""
        hints = self._notifier.listen(topic)
        if self._client.options.listen:
            self._want()
        return hints

    def ring_here(self, topic: str) -> None:
        """Wake those of this process, if they don't hear the server, which has told everybody else."""
        if not self._client.options.listen:
            self._notifier.notify(topic)

    def ring(self, *topics: str) -> None:
        """Wake those who listen to *topics*: in this process at once, in others soon, together with other news."""
        loop = asyncio.get_running_loop()
        ringer = self._ringers.get(loop)
        if ringer is None:
            for old in [one for one in self._ringers if one.is_closed()]:
                del self._ringers[old]
            ringer = self._ringers[loop] = _Ringer(self._client, self._channel, self._nonce)
        for topic in topics:
            self._notifier.notify(topic)
            ringer.ring(topic)

    def fact(self) -> Fact:
        """Tell how changes are heard of."""
        if not self._client.options.listen:
            return Fact("hints", "none (listen=false): candidates and consumers look now and then")
        return Fact("hints", f"LISTEN {self._channel!r}", "" if self.connected or not self._wanted else "not connected")

    async def close(self) -> None:
        """Hear no more, tell what is still to be told, and end every iterator."""
        self._notifier.close()
        for loop, ringer in list(self._ringers.items()):
            await on_loop(loop, ringer.close)
        if self._listening is not None:
            await on_loop(self._listening.get_loop(), self._deafen)

    # --- the connection that listens ---

    def _want(self) -> None:
        """Begin to listen, when first somebody wants to hear."""
        with self._guard:
            if self._wanted:
                return
            self._wanted = True
        here = _running_loop()
        home = self._home if self._home is not None and self._home.is_running() else here
        if home is None:
            self._wanted = False
        elif home is here:
            self._begin()
        else:
            home.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._listening = asyncio.get_running_loop().create_task(self._keep_listening(), name="tenure-postgres-listen")

    async def _deafen(self) -> None:
        assert self._listening is not None
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _keep_listening(self) -> None:
        pause = 0.05
        while True:
            with suppress(TenureError, *DRIVER_ERRORS):
                connection = await self._client.connect()
                try:
                    await self._listen(connection)
                finally:
                    if self.connected:
                        pause = 0.05
                    self.connected = False
                    connection.terminate()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, RETRY_MAX)

    async def _listen(self, connection: Connection) -> None:
        """Listen on *connection* until it is found broken."""
        within = self._client.options.timeout
        broken = asyncio.Event()
        connection.add_termination_listener(lambda _: broken.set())
        async with asyncio.timeout(within):
            await connection.add_listener(self._channel, self._hear)
        self.connected = True
        self._notifier.notify_all()  # something may have been told while we were deaf
        while not broken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_EVERY):
                    await broken.wait()
                return
            await connection.fetchval("SELECT 1", timeout=within)

    def _hear(self, connection: object, pid: int, channel: str, payload: object) -> None:
        sender, _, topic = str(payload).partition(":")
        if sender != self._nonce:
            self._notifier.notify(topic)


class _Ringer:
    """Tells other processes, from one loop: at once if the last time is past, else together with what comes soon."""

    def __init__(self, client: Client, channel: str, nonce: str) -> None:
        self._client = client
        self._channel = channel
        self._sender = f"{nonce}:"
        self._topics: set[str] = set()
        self._telling: asyncio.Task[None] | None = None

    def ring(self, topic: str) -> None:
        self._topics.add(topic)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell(), name="tenure-postgres-notify")

    async def close(self) -> None:
        if self._telling is not None:
            await asyncio.wait({self._telling}, timeout=1.0)

    async def _tell(self) -> None:
        while self._topics:
            topics, self._topics = sorted(self._topics), set()
            with suppress(TenureError):  # a hint may be absent
                await self._client.ask(_TELL, self._channel, self._sender, topics)
            await asyncio.sleep(PAUSE)


def channel_of(schema: str) -> str:
    """Return the name under which the users of *schema* tell each other."""
    return f"{schema}.hints"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

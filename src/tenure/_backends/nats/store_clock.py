"""The clock of the server, estimated from its answers: for the delays and the expiry of messages.

The ends of locks are never judged by it; they are counted on this process's own clock.
"""

from __future__ import annotations

from datetime import datetime

from tenure._backends.nats.client import Client, Json
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_STREAM, Refusal
from tenure._foreign import Unreadable, a_text, digits, read_or, seconds
from tenure._runtime.clock import Clock
from tenure._runtime.remote_clock import RemoteClock

KNOWN_FOR = 60.0
"""Seconds after which the server's time is read again."""


class StoreClock(RemoteClock):
    """An estimate of the server's time."""

    def __init__(self, client: Client, local: Clock) -> None:
        super().__init__(local)
        self._client = client

    async def ensure_known(self, connection: Connection, stream: str) -> None:
        """Read the server's time, by a request about *stream*, unless that was done a moment ago."""
        asked_at = self.local.now()
        if asked_at - self.learned_at < KNOWN_FOR:
            return
        try:
            answer = await self._client.call(connection, f"STREAM.INFO.{stream}")
        except Refusal as error:
            if error.code != NO_STREAM:
                raise
            return
        self.learn_from(answer, asked_at)

    def learn_from(self, answer: Json, asked_at: float) -> None:
        """Note the time that an answer to a request sent at *asked_at* tells; before 2.10, answers don't tell it."""
        told = read_or(timestamp_of, answer.get("ts"), None)
        if told is None:
            self.take_local()
        else:
            self.learn(told, asked_at)


def timestamp_of(written: object) -> float:
    """Return a time of NATS, such as ``2026-11-24T09:48:57.143453167Z``, in Unix seconds.

    Raises:
        Unreadable: It is none.
    """
    whole, _, fraction = a_text(written).removesuffix("Z").partition(".")
    try:
        moment = int(datetime.fromisoformat(whole + "+00:00").timestamp())
    except ValueError as error:
        raise Unreadable(f"it is no time: {error}") from None
    return seconds(
        (moment * 10**9 + digits(fraction.ljust(9, "0")[:9])) / 1e9
    )  # as in the subject of an acknowledgement

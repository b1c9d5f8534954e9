"""The clock of the server, estimated from its answers: for the delays and the expiry of messages.

The ends of locks are never judged by it; they are counted on this process's own clock.
"""

from __future__ import annotations

import time
from datetime import datetime

from tenure._backends.nats.client import Client, Json
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_STREAM, Refusal
from tenure._checks import LONGEST
from tenure._foreign import Unreadable, a_text, digits, read_or, seconds
from tenure._runtime.clock import Clock

KNOWN_FOR = 60.0
"""Seconds after which the server's time is read again."""


class StoreClock:
    """An estimate of the server's time, in Unix seconds; ``local`` is this process's monotonic clock."""

    def __init__(self, client: Client, local: Clock) -> None:
        self._client = client
        self.local: Clock = local
        self._offset: float | None = None
        self._read_at = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the server's time was read."""
        return self._offset is not None

    def now(self) -> float:
        """Return the estimated time of the server; before it was read, that of this machine's wall clock."""
        return time.time() if self._offset is None else self.local.now() + self._offset

    def after(self, seconds: float) -> float:
        """Return the time in *seconds*, to be stored: at most the last one that is read again, which is ``LONGEST``."""
        return min(self.now() + seconds, LONGEST)

    async def ensure_known(self, connection: Connection, stream: str) -> None:
        """Read the server's time, by a request about *stream*, unless that was done a moment ago."""
        if self._offset is not None and self.local.now() - self._read_at < KNOWN_FOR:
            return
        asked_at = self.local.now()
        try:
            answer = await self._client.call(connection, f"STREAM.INFO.{stream}")
        except Refusal as error:
            if error.code != NO_STREAM:
                raise
            return
        self.learn(answer, asked_at)

    def learn(self, answer: Json, asked_at: float) -> None:
        """Correct the estimate by an answer that tells the server's time, to a request sent at *asked_at*.

        Before 2.10, answers don't tell it: then it is this machine's wall clock, which has to agree with the server's.
        """
        written = answer.get("ts")
        now = self.local.now()
        self._read_at = now
        told = read_or(timestamp_of, written, None)
        if told is None:
            self._offset = time.time() - now
            return
        # It is a time between request and answer. An estimate that agrees with that is kept: it would jump otherwise.
        least, most = told - now, told - asked_at
        self._offset = least if self._offset is None else min(max(self._offset, least), most)


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

"""Hints: the bucket reports each message that it has stored, on a subject of core NATS that has no stream.

There is one subscription for each name that somebody waits for, and no consumer in JetStream. Nobody subscribes to the
keys themselves: those are also the messages that the bucket refuses; and a subscriber would keep the server from
saying that there is no bucket.

Any program that may publish there can forge a report: it is a reason to ask the store, and says nothing by itself.

No report is kept for a subscriber that is away: a new subscription begins with a hint. If the bucket reports nothing,
because somebody else has made it, or this user may not subscribe, listeners are told that hints are absent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import nats.errors

from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.lease_records import read
from tenure._backends.nats.observations import Observations
from tenure._runtime.shared_hints import SharedHints, Source

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription


class Hints(SharedHints[str, "Reports"]):
    """The hints of one opened backend.

    Args:
        client: Has the connections.
        observations: Note the writes that pass.
        subject_of: The subject on which the bucket reports an election.
        reports: Whether the bucket reports anything.
    """

    def __init__(
        self,
        client: Client,
        observations: Observations,
        subject_of: Callable[[str], str],
        reports: Callable[[Connection], Awaitable[bool]],
    ) -> None:
        super().__init__()
        self.client = client
        self._observed = observations
        self._subject_of = subject_of
        self._reports = reports

    def source(self, key: str) -> Reports:
        """Make the subscription to the reports of a name."""
        return Reports(self, key)

    async def subscribe(self, name: str, connection: Connection) -> tuple[Connection, Subscription, bool]:
        """Subscribe to the reports of *name*; return whether there are any, too."""
        subject = self._subject_of(name)
        subscribed = await connection.subscribe(subject, partial(self._reported, name))
        await connection.flush()  # from now on, no change is missed
        return connection, subscribed, connection.may_subscribe(subject) and await self._reports(connection)

    def _reported(self, name: str, message: Msg) -> None:
        """Note a message that the bucket may have stored; a mere renewal gives no hint."""
        record = read(message.data)
        if record is not None and record.name == name:
            self._observed.note_report(record)
            if record.write == "renewed":
                return
        self.notifier.notify(name)


class Reports(Source):
    """The subscription to the reports of one name."""

    def __init__(self, hints: Hints, name: str) -> None:
        super().__init__(hints)
        self._hints = hints
        self._name = name

    async def follow(self) -> None:
        """Subscribe, and return when the connection is lost."""
        connection, subscribed, is_heard = await self._hints.client.run(partial(self._hints.subscribe, self._name))
        lost = asyncio.Event()
        withdraw = connection.when_lost(lost.set)
        try:
            if is_heard:
                self.live()
                await lost.wait()
            else:
                self.deaf()
        finally:
            withdraw()
            with suppress(nats.errors.Error, OSError):
                await subscribed.unsubscribe()

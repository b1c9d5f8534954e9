"""Hints: the bucket reports each message that it has stored, on a subject of core NATS that has no stream.

There is one subscription for each name that somebody waits for, and one for all names while somebody follows their
renewals, as a member of a group does; and no consumer in JetStream. Nobody subscribes to the keys themselves: those are
also the messages that the bucket refuses; and a subscriber would keep the server from saying that there is no bucket.

Any program that may publish there can forge a report: it is a reason to ask the store, and says nothing by itself.

No report is kept for a subscriber that is away: a new subscription begins with a hint. If the bucket reports nothing,
because somebody else has made it, or this user may not subscribe, listeners are told that hints are absent.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import nats.errors

from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.lease_records import Record, read
from tenure._backends.nats.names import begins_as, short_word_of
from tenure._backends.nats.observations import Observations
from tenure._runtime.shared_hints import SharedHints, Source

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription


class Listening(SharedHints[str, "Reports"]):
    """What this process hears of the bucket's reports.

    Args:
        client: Has the connections.
        observations: Note the writes that pass.
        bucket: Its name, with which the subjects of all reports begin.
        reports: Whether the bucket reports anything.
    """

    def __init__(
        self,
        client: Client,
        observations: Observations,
        bucket: str,
        reports: Callable[[Connection], Awaitable[bool]],
    ) -> None:
        super().__init__()
        self.client = client
        self.observed = observations
        self._bucket = bucket
        self._reports = reports

    def report_of(self, word: str) -> str:
        """Return the subject on which the bucket reports the election with this *word*."""
        return f"{self._bucket}.{word}"

    async def subscribe(
        self, word: str, on_report: Callable[[Msg], None], connection: Connection
    ) -> tuple[Connection, Subscription, bool]:
        """Subscribe to the reports of a *word*; return whether there are any, too."""
        subject = self.report_of(word)
        subscribed = await connection.subscribe(subject, on_report)
        await connection.flush()  # from now on, no change is missed
        return connection, subscribed, connection.may_subscribe(subject) and await self._reports(connection)


class Reports(Source):
    """A subscription to reports: to those of one word, or of all."""

    def __init__(self, listening: Listening, word: str) -> None:
        super().__init__(listening)
        self._listening = listening
        self._word = word

    @abstractmethod
    def reported(self, message: Msg) -> None:
        """Note a message that the bucket may have stored."""

    async def follow(self) -> None:
        """Subscribe, and return when the connection is lost."""
        subscribe = partial(self._listening.subscribe, self._word, self.reported)
        connection, subscribed, is_heard = await self._listening.client.run(subscribe)
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


class Hints(Listening):
    """The hints of one opened backend."""

    def source(self, key: str) -> Reports:
        """Make the subscription to the reports of a name."""
        return NameReports(self, key)


class NameReports(Reports):
    """The reports of one name: a hint each, but for mere renewals."""

    def __init__(self, hints: Hints, name: str) -> None:
        super().__init__(hints, short_word_of(name))
        self._name = name

    def reported(self, message: Msg) -> None:
        """Note it; a mere renewal gives no hint."""
        record = read(message.data)
        if record is not None and record.name == self._name:
            self._listening.observed.note_report(record)
            if record.write == "renewed":
                return
        self.notify()


class Renewals(Listening):
    """The renewals of all names that begin with a prefix, noted while somebody follows them."""

    async def keys_of(self, topic: str) -> Collection[str]:
        """Return the only key: one subscription serves all prefixes."""
        return ("*",)

    def source(self, key: str) -> Reports:
        """Make the subscription to all reports."""
        return AllReports(self, key)


class AllReports(Reports):
    """The reports of all names: only noted."""

    def end(self) -> None:
        """Follow it no more, and forget what was heard."""
        super().end()
        self._listening.observed.forget_followed()

    def reported(self, message: Msg) -> None:
        """Note it if it is about a name that is followed."""
        word = message.subject.rpartition(".")[2]
        if any(begins_as(word, prefix) for prefix in self.topics):  # else don't even read it
            record = read(message.data)
            if record is not None and short_word_of(record.name) == word and self._is_followed(record):
                self._listening.observed.note_report(record)

    def _is_followed(self, record: Record) -> bool:
        return record.name.startswith(tuple(self.topics))

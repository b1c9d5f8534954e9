"""Where a queue is in NATS: its streams, its consumer and its subjects; made when they are first used.

A queue has a stream in which each message stays until it is settled (retention *workqueue*), with one consumer, from
which every process pulls; and a second stream for its dead letters. Each message that tenure stores has a subject of
its own, so that it can be replaced by one that is stored later, in one step of the server: see ``storing``.

House rules:

- The time that a consumer gives a lock (its ``ack_wait``) never changes: it is part of its name. A process that would
  learn late of a shorter one would trust a lock too long. A claim for another time sets it for each message. If an
  administrator changes it all the same, it is set back; see ``configuration``.
- A queue that is deleted and made again has another consumer: an answer under an old lock reaches nobody.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from tenure._backends.nats.client import FAILURES, Client, Json, names_in, number_in, part_of, stored_in
from tenure._backends.nats.configuration import WINDOW_MIN, Consumer, ConsumerCheck
from tenure._backends.nats.connection import Connection, Headers
from tenure._backends.nats.errors import (
    NO_CONSUMER,
    NO_LEADER,
    NO_MESSAGE,
    NO_STREAM,
    NoJetStream,
    Refusal,
    is_wrong_sequence,
)
from tenure._backends.nats.names import is_cut, name_by, short_word_of, word_of
from tenure._foreign import a_count, a_text, an_object, digits, read_object, read_or, seconds
from tenure._queue.broker import QueueOptions, QueueSettings, read_settings
from tenure._queue.checks import DEAD_SUFFIX, NAME_MAX, read_name
from tenure._runtime.clock import Clock, SystemClock
from tenure.errors import ConfigError

OWN = ".=m."
"""Stands in the subjects of messages that tenure has stored. No name of a queue contains it, as it is written."""

SLACK_MAX, SLACK_SHARE = 0.25, 0.02

SERIALIZABLE = (2, 9, 21)
"""Older versions may accept two writes that expect the same, if the stream has replicas (issue 4320)."""

_CONSUMER = re.compile(r"tenure-(\d+)-[0-9a-f]+")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
ACK_WAIT = 30.0
"""Seconds for which the server locks a message, if its consumer doesn't say."""
DURATION_MAX = 3_153_600_000.0
"""Seconds of the longest duration that the server is told: a hundred years. Its own are counted in nanoseconds."""
MARK_MAX = 100
"""Characters of the longest mark that is read."""
RECORD_MAX = 2**23
"""The longest record that is read: with many schedules, it is long."""
NEXT_MAX = 10**17
"""The highest first sequence of a stream that is read: what follows must have room."""
_NOT_UNIQUE = frozenset({10_099, 10_100})
"""Codes: the stream has another consumer already."""


def slack_of(lock: float) -> float:
    """Return the seconds by which the server's lock is longer than the one that is promised.

    So a message that the server has sent by itself needs no renewal before it is handed out.
    """
    return min(SLACK_MAX, lock * SLACK_SHARE)


def is_own(subject: str) -> bool:
    """Return whether a message with this *subject* is one that tenure has stored, unless somebody pretends that."""
    start, _, key = subject.rpartition(OWN)
    return bool(start) and _KEY.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class Place:
    """The stream of a queue, or of its dead letters."""

    stream: str
    subject: str
    """Other programs send to it, and to any subject below it."""

    @property
    def everything(self) -> str:
        """All subjects below its own."""
        return f"{self.subject}.>"

    def subject_of(self, key: str) -> str:
        """Return the subject of the message with *key*, which no other has."""
        return f"{self.subject}{OWN}{key}"

    def key_of(self, subject: str) -> str | None:
        """Return the key of the message with this *subject*; None if another program chose it."""
        start = f"{self.subject}{OWN}"
        return subject.removeprefix(start) if subject.startswith(start) and is_own(subject) else None


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a queue outside its streams: it outlives them."""

    settings: QueueOptions = field(default_factory=QueueOptions)
    """Those that were declared."""
    next: int = 1
    """The first sequence of the stream, when it is made."""
    next_dead: int = 1
    idle_at: float | None = None
    name: str = ""
    """The queue's name, if its word is cut, and doesn't tell it."""
    schedules: Mapping[str, str] = field(default_factory=dict)
    """What is kept of its schedules, by their names; see ``tenure._queue.schedule_steps``."""
    made: str = ""
    """A mark that came with the first setting: it tells the queue from one that was deleted."""


class Places:
    """The places of the queues of one client."""

    def __init__(self, client: Client, clock: Clock | None = None) -> None:
        self._client = client
        self.consumer_check: ConsumerCheck = ConsumerCheck(client, clock or SystemClock())
        self._prefix = client.options.prefix
        self.bucket: str = f"KV_{self._prefix}-queues"
        """The stream of the records."""
        self._consumers: dict[str, Consumer] = {}

    def place_of(self, queue: str) -> Place:
        """Return where *queue* is, whether it has been made or not."""
        word = short_word_of(queue)
        return Place(f"{self._prefix}_{word}", f"{self._prefix}.{word}")

    def forget(self, queue: str) -> None:
        """Look for the consumer of *queue* again when it is next needed."""
        self._consumers.pop(queue, None)

    # --- the record ---

    async def read_record(self, connection: Connection, queue: str) -> tuple[Record, int]:
        """Return what is kept of *queue*, and its revision; 0 if nothing is."""
        try:
            answer = await self._client.call(
                connection, f"STREAM.MSG.GET.{self.bucket}", {"last_by_subj": self._subject_of(queue)}
            )
        except Refusal as error:
            if error.code in (NO_STREAM, NO_MESSAGE):
                return Record(), 0
            raise
        one = stored_in(answer)
        return record_of(one.body), one.number

    async def write_record(self, connection: Connection, queue: str, record: Record, revision: int) -> bool:
        """Write what is kept of *queue*, unless another process has written since *revision*; return whether it was."""
        body = json.dumps(asdict(record)).encode()
        try:
            await self._store_record(connection, queue, body, revision)
            return True
        except Refusal as error:
            if is_wrong_sequence(error):
                return False
            raise

    async def _store_record(self, connection: Connection, queue: str, body: bytes, revision: int) -> None:
        make = partial(self.make_bucket, connection)
        await self.store(connection, make, self.bucket, self._subject_of(queue), body, last=revision)

    async def records(self, connection: Connection) -> dict[str, Record]:
        """Return the records of all queues."""
        found: dict[str, Record] = {}
        after = 0
        while True:
            try:
                answer = await self._client.call(
                    connection, f"STREAM.MSG.GET.{self.bucket}", {"seq": after + 1, "next_by_subj": ">"}
                )
            except Refusal as error:
                if error.code in (NO_STREAM, NO_MESSAGE):
                    return found
                raise
            one = stored_in(answer)
            after = max(after + 1, one.number)
            record, word = record_of(one.body), one.subject.rpartition(".")[2]
            name = read_or(read_name, record.name if is_cut(word) else name_by(word), None)
            if name is not None and short_word_of(name) == word:
                found[name] = record

    async def make_bucket(self, connection: Connection) -> None:
        """Make the stream of the records, unless it is there."""
        await self.make_stream(
            connection,
            {
                "name": self.bucket,
                "subjects": [f"$KV.{self._prefix}-queues.>"],
                "max_msgs_per_subject": 1,
                "description": "what tenure keeps of its queues",
            },
        )

    def _subject_of(self, queue: str) -> str:
        return f"$KV.{self._prefix}-queues.{short_word_of(queue)}"

    # --- streams ---

    async def store(
        self,
        connection: Connection,
        make: Callable[[], Awaitable[None]],
        stream: str,
        subject: str,
        body: bytes,
        headers: Headers | None = None,
        *,
        last: int | None = None,
    ) -> Json:
        """Publish a message, as ``Client.store`` does; if no stream takes it, *make* that, and repeat it.

        Raises:
            Refusal: It was refused.
            NoJetStream: Still no stream takes it.
        """
        pauses = self._client.pauses(connection)
        is_made = False
        while True:
            try:
                return await self._client.store(connection, stream, subject, body, headers, last=last)
            except NoJetStream:
                if not is_made:
                    await make()
                    is_made = True
                pause = next(pauses, None)
                if pause is None:
                    if self._client.is_spread(connection):
                        raise Refusal(NO_LEADER, f"no server takes messages for {subject!r}") from None
                    raise
            await asyncio.sleep(pause)

    async def require(self, connection: Connection, stream: str) -> None:
        """Check that there is a *stream* of which nobody has taken a message: in a cluster, it may have no leader.

        Raises:
            NoJetStream: There is none.
        """
        if self._client.is_spread(connection):
            try:
                await self._client.call(connection, f"STREAM.INFO.{stream}")
            except Refusal as error:
                if error.code == NO_LEADER:
                    return
                if error.code != NO_STREAM:
                    raise
            else:
                return
        raise NoJetStream

    async def is_stream_gone(self, connection: Connection, stream: str) -> bool:
        """Return whether there is no *stream*; False if that can't be found out."""
        try:
            await self._client.call(connection, f"STREAM.INFO.{stream}")
        except Refusal as error:
            return error.code == NO_STREAM
        except FAILURES:
            return False
        return False

    async def why_not_taken(self, connection: Connection, queue: str) -> Refusal:
        """Return why the stream of *queue*, which is there, takes no messages."""
        place = self.place_of(queue)
        if self._client.is_spread(connection):
            config = part_of(await self._client.call(connection, f"STREAM.INFO.{place.stream}"), "config")
            if place.everything in names_in(config, "subjects"):
                return Refusal(NO_LEADER, f"no server takes messages for the stream {place.stream!r}")
        return Refusal(NO_STREAM, f"the stream {place.stream!r} does not have the subjects of {queue!r}")

    async def make_stream(self, connection: Connection, config: Json) -> None:
        """Make a stream, unless it is there."""
        usual: Json = {
            "retention": "limits",
            "storage": "file",
            "discard": "new",  # a full stream refuses messages, instead of dropping the oldest
            "num_replicas": self._client.options.replicas,
            "allow_direct": True,
        }
        await self._client.make_stream(connection, {**usual, **config})

    async def make(self, connection: Connection, queue: str) -> None:
        """Make the stream of *queue*, which may be one of dead letters, unless it is there."""
        home = queue.removesuffix(DEAD_SUFFIX)
        if self._client.options.replicas > 1 and connection.version < SERIALIZABLE:
            raise ConfigError(
                f"NATS {'.'.join(map(str, connection.version))} may accept two writes where only one is right, if a "
                "stream has replicas (nats-server issue 4320); upgrade to 2.9.21 or newer, or set replicas=1"
            )
        if short_word_of(home) != word_of(home):
            await self.change_record(home, lambda record: replace(record, name=home))
        record, _ = await self.read_record(connection, home)
        place = self.place_of(queue)
        if queue != home:
            config: Json = {"description": f"dead letters of {home}", "max_msgs_per_subject": 1, "discard": "old"}
            first = record.next_dead
        else:
            window = max(WINDOW_MIN, QueueSettings(**record.settings).dedupe_window)
            config = {
                "description": f"queue {home}",
                "retention": "workqueue",
                "duplicate_window": nanoseconds(window),
            }
            first = record.next
        config |= {"name": place.stream, "subjects": [place.subject, place.everything]}
        if first > 1:  # sequences go on from those of the stream that was deleted
            await self._make_stream_from(connection, config, first)
        else:
            await self.make_stream(connection, config)

    async def _make_stream_from(self, connection: Connection, config: Json, first: int) -> None:
        """Make a stream whose first message has the number *first*."""
        if connection.version >= (2, 10, 0):
            await self.make_stream(connection, {**config, "first_seq": first})
            return
        # An older server numbers from 1 until an empty stream is purged. So nobody may send to it before that.
        nobody = [f"{self._prefix}.=new.{config['name']}"]
        await self.make_stream(connection, {**config, "subjects": nobody})
        made = part_of(await self._client.call(connection, f"STREAM.INFO.{config['name']}"), "config")
        if names_in(made, "subjects") == nobody:
            await self._client.call(connection, f"STREAM.PURGE.{config['name']}", {"seq": first})
            made["subjects"] = config["subjects"]
            await self._client.call(connection, f"STREAM.UPDATE.{config['name']}", made)

    async def set_window(self, connection: Connection, queue: str, window: float) -> None:
        """Let the stream of *queue* remember ids for *window* seconds."""
        pauses = self._client.pauses(connection)
        while True:
            try:
                await self._set_window(connection, self.place_of(queue).stream, nanoseconds(max(WINDOW_MIN, window)))
                return
            except Refusal as error:  # in a cluster, a stream that another process is making is missing for a moment
                pause = next(pauses, None) if error.code == NO_STREAM else None
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def _set_window(self, connection: Connection, stream: str, wanted: int) -> None:
        config = part_of(await self._client.call(connection, f"STREAM.INFO.{stream}"), "config")
        if config.get("duplicate_window") != wanted:
            config["duplicate_window"] = wanted
            await self._client.call(connection, f"STREAM.UPDATE.{stream}", config)

    # --- consumers ---

    async def consumer_of(self, connection: Connection, queue: str) -> Consumer | None:
        """Return the consumer of *queue*; None if it has none."""
        known = self._consumers.get(queue)
        if known is not None:
            return known
        stream = self.place_of(queue).stream
        try:
            pages = self._client.pages(connection, f"CONSUMER.NAMES.{stream}", "consumers")
            names = [name async for page in pages for name in names_in(page, "consumers")]
        except Refusal as error:
            if error.code == NO_STREAM:
                return None
            raise
        for name in sorted(names, key=lambda one: not _CONSUMER.fullmatch(one)):
            ack_wait = ack_wait_in(name)
            is_ours = ack_wait is not None
            if ack_wait is None:  # another program's
                config = part_of(await self._client.call(connection, f"CONSUMER.INFO.{stream}.{name}"), "config")
                ack_wait = (read_or(a_count, config.get("ack_wait"), 0) / 10**9) or ACK_WAIT
            else:
                # In a cluster, the server that answers may not know one yet that was just made: a claim looks again.
                with suppress(NoJetStream):
                    await self.consumer_check.check(connection, stream, Consumer(name, ack_wait))
            consumer = Consumer(name, ack_wait, is_ours)
            self._consumers[queue] = consumer
            return consumer
        return None

    async def checked_consumer_of(self, connection: Connection, queue: str) -> Consumer | None:
        """Return the consumer of *queue*, which was looked at a short while ago; None if it has none."""
        consumer = await self.consumer_of(connection, queue)
        if consumer is None or not self.consumer_check.is_due(consumer):
            return consumer
        try:
            await self.consumer_check.check(connection, self.place_of(queue).stream, consumer)
        except NoJetStream:
            self.forget(queue)
            return await self.consumer_of(connection, queue)
        return consumer

    async def make_consumer(self, connection: Connection, queue: str, lock: float) -> Consumer:
        """Return the consumer of *queue*; make it, and the stream, if they are missing, for locks of *lock* seconds."""
        for _ in range(3):
            found = await self.consumer_of(connection, queue)
            if found is not None:
                return found
            await self.make(connection, queue)
            milliseconds = round((lock + slack_of(lock)) * 1000)
            # The last word tells it from the one of a stream that was deleted, whose locks are over; and senders can't
            # guess it, see ``copies``.
            name = f"tenure-{milliseconds}-{secrets.token_hex(16)}"
            stream = self.place_of(queue).stream
            config: Json = {
                "durable_name": name,
                "ack_policy": "explicit",
                "ack_wait": milliseconds * 10**6,
                "max_ack_pending": -1,
                "max_deliver": -1,
                "max_waiting": 10_000,
                "description": "from which every process of tenure pulls",
            }
            try:
                await self._client.call(
                    connection, f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config}
                )
            except Refusal as error:
                if error.code in (NO_STREAM, NO_CONSUMER):
                    continue
                if error.code not in _NOT_UNIQUE:
                    raise
        found = await self.consumer_of(connection, queue)
        if found is None:
            raise Refusal(NO_CONSUMER, f"the consumer of {queue!r} was deleted as soon as it was made")
        return found

    async def has_consumer(self, connection: Connection, queue: str, name: str) -> bool:
        """Return whether *queue* has the consumer *name*, whatever was known of it."""
        self.forget(queue)
        found = await self.consumer_of(connection, queue)
        return found is not None and found.name == name

    async def is_gone(self, connection: Connection, queue: str, name: str) -> bool:
        """Return whether *queue* has no consumer *name* any more; False if that can't be found out."""
        try:
            return not await self.has_consumer(connection, queue, name)
        except FAILURES:
            return False

    async def require_consumer(self, connection: Connection, queue: str, name: str) -> None:
        """Check that *queue* has the consumer *name*, which did not answer: in a cluster, it may have no leader.

        Raises:
            NoJetStream: It has not.
        """
        self.forget(queue)
        if not (self._client.is_spread(connection) and await self.has_consumer(connection, queue, name)):
            raise NoJetStream

    async def has_undelivered(self, connection: Connection, queue: str, consumer: Consumer, after: int) -> bool:
        """Return whether the stream has messages after number *after* that *consumer* has not delivered, and would.

        The leader of the stream knows of all that is stored, and that of the consumer how far it has come.
        """
        stream = self.place_of(queue).stream
        if after and not await self._has_any(connection, stream, after):
            return False
        try:
            found = await self._client.call(connection, f"CONSUMER.INFO.{stream}.{consumer.name}")
        except Refusal as error:
            if error.code in (NO_STREAM, NO_CONSUMER):
                return False
            raise
        config = part_of(found, "config")
        if found.get("paused") or config.get("filter_subject") or config.get("filter_subjects"):
            return False  # another program's
        if 0 < read_or(a_count, config.get("max_ack_pending"), 0) <= number_in(found, "num_ack_pending"):
            return False
        return await self._has_any(connection, stream, number_in(part_of(found, "delivered"), "stream_seq"))

    async def _has_any(self, connection: Connection, stream: str, after: int) -> bool:
        """Return whether *stream* has a message after number *after*."""
        try:
            await self._client.call(connection, f"STREAM.MSG.GET.{stream}", {"seq": after + 1, "next_by_subj": ">"})
        except Refusal as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return False
            raise
        return True

    # --- all queues ---

    async def queues(self, connection: Connection) -> list[str]:
        """Return every queue that has a stream."""
        start, found, cut = f"{self._prefix}_", list[str](), set[str]()
        async for page in self._client.pages(connection, "STREAM.NAMES", "streams"):
            for word in (name.removeprefix(start) for name in names_in(page, "streams") if name.startswith(start)):
                if is_cut(word):
                    cut.add(word)
                else:
                    found += filter(None, [name_by(word)])
        if cut:
            found += [name for name in await self.records(connection) if short_word_of(name) in cut]
        return [one for one in found if read_or(read_name, one, None) is not None]

    async def change_record(self, queue: str, change: Any) -> Record:
        """Write *change(record)* as the record of *queue*, in one step; return the new one."""

        async def ask(connection: Connection) -> Record:
            while True:
                record, revision = await self.read_record(connection, queue)
                new: Record = change(record)
                if new == record or await self.write_record(connection, queue, new, revision):
                    return new
                await asyncio.sleep(0)

        return await self._client.run(ask)


def ack_wait_in(consumer: str) -> float | None:
    """Return for how many seconds the consumer of this name locks a message; None if tenure didn't name it."""
    found = _CONSUMER.fullmatch(consumer)
    milliseconds = read_or(digits, found[1], 0) if found else 0
    return milliseconds / 1000 if 0 < milliseconds <= DURATION_MAX * 1000 else None


def record_of(body: bytes) -> Record:
    """Return the record in the body of a message; what is unreadable, or a newer version's, is left out."""
    given = read_or(partial(read_object, most=RECORD_MAX), body, {})
    return Record(
        settings=read_or(read_settings, given.get("settings"), QueueOptions()),
        next=read_or(_a_first, given.get("next"), 1),
        next_dead=read_or(_a_first, given.get("next_dead"), 1),
        idle_at=read_or(seconds, given.get("idle_at"), None),
        name=read_or(_a_name, given.get("name"), ""),
        schedules=read_or(_schedules, given.get("schedules"), {}),
        made=read_or(_a_mark, given.get("made"), ""),
    )


def _a_first(value: object) -> int:
    return a_count(value, least=1, most=NEXT_MAX)


def _a_mark(value: object) -> str:
    return a_text(value, MARK_MAX)


def _a_name(value: object) -> str:
    return a_text(value, NAME_MAX)


def _schedules(value: object) -> dict[str, str]:
    """Return the texts of schedules; one that is unreadable is left out."""
    found = {}
    for name, text in an_object(value).items():
        if (kept := read_or(a_text, text, None)) is not None and read_or(a_text, name, None) is not None:
            found[name] = kept
    return found


def nanoseconds(duration: float) -> int:
    """Return seconds as the server is told them."""
    return round(min(duration, DURATION_MAX) * 10**9)

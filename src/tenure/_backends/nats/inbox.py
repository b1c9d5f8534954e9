"""Ids that are remembered, in a bucket with one key for each: of messages that were completed, and of those sent.

NATS itself remembers the ids of sent messages, for minutes at least. A queue may be declared to forget them sooner:
then each id gets a new name when its time is over, and NATS remembers the name.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from functools import partial

from tenure._backends.nats.client import Client, Json, part_of, stored_in
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_MESSAGE, NO_STREAM, Refusal, is_wrong_sequence
from tenure._backends.nats.names import short_word_of
from tenure._backends.nats.places import Places, nanoseconds
from tenure._backends.nats.store_clock import StoreClock
from tenure._foreign import a_count, a_text, read_object, read_or, seconds

DAY = 86_400.0

_NAME_END = re.compile("/[0-9a-f]{16}")
"""What the name under which NATS remembers an id has behind it."""


class Inbox:
    """The remembered ids of all queues of one client."""

    def __init__(self, client: Client, places: Places, clock: StoreClock) -> None:
        self._client = client
        self._places = places
        self._clock = clock
        self._bucket = f"KV_{client.options.prefix}-inbox"
        self._kept_for = 0.0

    async def remember(self, connection: Connection, queue: str, id_: str, seconds: float) -> None:
        """Remember *id_* for *seconds*, or for longer if that was asked before."""
        await self._make(connection, seconds)
        subject = self._subject_of(queue, id_)
        await self._clock.ensure_known(connection, self._bucket)
        until = self._clock.after(seconds)
        while True:
            known, revision = await self._read(connection, subject)
            if _until(known) >= until or await self._write(connection, subject, {"until": until}, revision):
                return

    async def handled(self, connection: Connection, queue: str, ids: Sequence[str]) -> list[bool]:
        """Return which *ids* are remembered."""
        found = [(await self._read(connection, self._subject_of(queue, one)))[0] for one in ids]
        if any(found):
            await self._clock.ensure_known(connection, self._bucket)
        return [_until(one) > self._clock.now() for one in found]

    async def name_of(self, connection: Connection, queue: str, id_: str, window: float) -> str:
        """Return the name under which NATS is to remember *id_*: the same one for *window* seconds."""
        await self._make(connection, window)
        subject = self._subject_of(queue, id_, "sent.")
        await self._clock.ensure_known(connection, self._bucket)
        while True:
            known, revision = await self._read(connection, subject)
            name = read_or(a_text, known.get("name"), "")
            if _until(known) > self._clock.now() and _is_name_of(id_, name):
                return name
            name = f"{id_}/{secrets.token_hex(8)}"
            new = {"until": self._clock.after(window), "name": name}
            if await self._write(connection, subject, new, revision):
                return name

    async def forget_queue(self, connection: Connection, queue: str) -> None:
        """Forget every id of *queue*."""
        try:
            await self._client.call(
                connection,
                f"STREAM.PURGE.{self._bucket}",
                {"filter": f"$KV.{self._client.options.prefix}-inbox.{short_word_of(queue)}.>"},
            )
        except Refusal as error:
            if error.code != NO_STREAM:
                raise

    async def _read(self, connection: Connection, subject: str) -> tuple[Json, int]:
        """Return what is kept of an id, and its revision; nothing, and 0, if it isn't known.

        What another program has written there says nothing.
        """
        try:
            answer = await self._client.call(connection, f"STREAM.MSG.GET.{self._bucket}", {"last_by_subj": subject})
        except Refusal as error:
            if error.code in (NO_STREAM, NO_MESSAGE):
                return {}, 0
            raise
        one = stored_in(answer)
        return read_or(read_object, one.body, {}), one.number

    async def _write(self, connection: Connection, subject: str, known: Json, revision: int) -> bool:
        """Keep what is *known* of an id, unless another process has written since *revision*."""
        try:
            require = partial(self._places.require, connection, self._bucket)
            body = json.dumps(known).encode()
            await self._places.store(connection, require, self._bucket, subject, body, last=revision)
        except Refusal as error:
            if is_wrong_sequence(error):
                return False
            raise
        return True

    async def _make(self, connection: Connection, seconds: float) -> None:
        """Make the bucket, or let it keep its keys longer: they are removed after whole days."""
        wanted = (seconds // DAY + 2) * DAY
        if wanted <= self._kept_for:
            return
        prefix = self._client.options.prefix
        await self._places.make_stream(
            connection,
            {
                "name": self._bucket,
                "subjects": [f"$KV.{prefix}-inbox.>"],
                "max_msgs_per_subject": 1,
                "max_age": nanoseconds(wanted),
                "description": "the ids of messages that were completed",
            },
        )
        config = part_of(await self._client.call(connection, f"STREAM.INFO.{self._bucket}"), "config")
        if 0 < read_or(a_count, config.get("max_age"), 0) < nanoseconds(wanted):
            await self._client.call(
                connection, f"STREAM.UPDATE.{self._bucket}", {**config, "max_age": nanoseconds(wanted)}
            )
        self._kept_for = wanted

    def _subject_of(self, queue: str, id_: str, kind: str = "") -> str:
        digest = hashlib.sha256(id_.encode()).hexdigest()[:32]
        return f"$KV.{self._client.options.prefix}-inbox.{short_word_of(queue)}.{kind}{digest}"


def _is_name_of(id_: str, name: str) -> bool:
    return name.startswith(id_) and _NAME_END.fullmatch(name, len(id_)) is not None


def _until(known: Json) -> float:
    return read_or(seconds, known.get("until"), 0.0)

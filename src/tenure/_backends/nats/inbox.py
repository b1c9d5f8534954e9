"""Ids that are remembered, in a bucket with one key for each: of messages that were completed, and of those sent.

NATS itself remembers the ids of sent messages, for minutes at least. A queue may be declared to forget them sooner:
then each id gets a new name when its time is over, and NATS remembers the name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from base64 import b64decode
from collections.abc import Sequence

from tenure._backends.nats.client import Client, Json
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_MESSAGE, NO_STREAM, Refusal, is_wrong_sequence
from tenure._backends.nats.names import short_word_of
from tenure._backends.nats.places import Places
from tenure._backends.nats.store_clock import StoreClock

DAY = 86_400.0


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
        until = self._clock.now() + seconds
        while True:
            known, revision = await self._read(connection, subject)
            if known.get("until", 0.0) >= until or await self._write(connection, subject, {"until": until}, revision):
                return

    async def handled(self, connection: Connection, queue: str, ids: Sequence[str]) -> list[bool]:
        """Return which *ids* are remembered."""
        found = [(await self._read(connection, self._subject_of(queue, one)))[0] for one in ids]
        if any(found):
            await self._clock.ensure_known(connection, self._bucket)
        return [one.get("until", 0.0) > self._clock.now() for one in found]

    async def name_of(self, connection: Connection, queue: str, id_: str, window: float) -> str:
        """Return the name under which NATS is to remember *id_*: the same one for *window* seconds."""
        await self._make(connection, window)
        subject = self._subject_of(queue, id_, "sent.")
        await self._clock.ensure_known(connection, self._bucket)
        while True:
            known, revision = await self._read(connection, subject)
            if known.get("until", 0.0) > self._clock.now():
                return str(known["name"])
            name = f"{id_}/{secrets.token_hex(8)}"
            new = {"until": self._clock.now() + window, "name": name}
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
        """Return what is kept of an id, and its revision; nothing, and 0, if it isn't known."""
        try:
            answer = await self._client.call(connection, f"STREAM.MSG.GET.{self._bucket}", {"last_by_subj": subject})
        except Refusal as error:
            if error.code in (NO_STREAM, NO_MESSAGE):
                return {}, 0
            raise
        message = answer["message"]
        return json.loads(b64decode(message["data"])), int(message["seq"])

    async def _write(self, connection: Connection, subject: str, known: Json, revision: int) -> bool:
        """Keep what is *known* of an id, unless another process has written since *revision*."""
        try:
            await self._client.store(connection, subject, json.dumps(known).encode(), last=revision)
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
                "max_age": round(wanted * 10**9),
                "description": "the ids of messages that were completed",
            },
        )
        config = (await self._client.call(connection, f"STREAM.INFO.{self._bucket}"))["config"]
        if 0 < int(config.get("max_age", 0)) < round(wanted * 10**9):
            await self._client.call(
                connection, f"STREAM.UPDATE.{self._bucket}", {**config, "max_age": round(wanted * 10**9)}
            )
        self._kept_for = wanted

    def _subject_of(self, queue: str, id_: str, kind: str = "") -> str:
        digest = hashlib.sha256(id_.encode()).hexdigest()[:32]
        return f"$KV.{self._client.options.prefix}-inbox.{short_word_of(queue)}.{kind}{digest}"

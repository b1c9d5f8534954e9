"""Messages stored again: the step that fences off every earlier delivery.

NATS settles by the number of a message in its stream, and accepts the acknowledgement of an old delivery as well as of
the present one. So no message is handed out twice under the same number. Before a message whose lock has ended is
delivered again, it is stored again, and the original is removed: an acknowledgement of the original does nothing then,
however late it comes. A message that is abandoned or given back is stored again, too, and so is one that is to be
dead-lettered.

The copy is at the end of the stream. So that it need not wait there, its receiver has it at once: it is stored as
locked, for so many seconds. A process that pulls it puts it off for that time. Such a lock is renewed by storing the
message once more, and completed by deleting it, which tells whether it was there.

- The copy has the subject of the original, which no other message has, and is stored only if the original is the last
  message of that subject. That comparison decides, in one step of the server, between two who do this at the same time.
- Then the original is acknowledged. If that is lost, it is delivered again; its receiver finds the copy, and removes
  the original. If the copy is gone by then, the copy's id, which the server remembers for some minutes, tells that
  there was one.
- Only a copy that proves by its id that it is one has the original removed; see ``copies``. If others have sent
  something to its subject, the copy gets another one.
- The server could do both in one step (``Nats-Rollup``). But then it forgets which other messages it has to deliver
  again, up to 2.15 at least: its purge moves a consumer's floors past messages that are still pending.

A message from another program has a subject that it shares with others. Its copy gets a subject of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from tenure._backends.nats.client import Client, Json
from tenure._backends.nats.connection import Connection, has_no_stream
from tenure._backends.nats.copies import Copies
from tenure._backends.nats.errors import (
    NO_LEADER,
    NO_MESSAGE,
    NO_STREAM,
    HeadersTooLong,
    NoJetStream,
    Refusal,
    TooLarge,
    is_too_large,
    is_wrong_sequence,
)
from tenure._backends.nats.message_format import NATIVE_ID, Properties, encode_to_fit, without_headers
from tenure._backends.nats.messages import Found, read_message
from tenure._backends.nats.places import Places, nanoseconds
from tenure._queue.identity import dead_letters_of

ACK, NAK, WORKING = b"+ACK", b"-NAK", b"+WPI"

PUT_OFF_MAX = 31_536_000.0
"""Seconds for which a message is put off at once: the server's times end in 2262. For a longer delay, it is put off
again."""

_GONE = frozenset({NO_MESSAGE, 10_043, 10_057})
"""Codes of JetStream: there is no such message to delete."""


def new_key() -> str:
    """Return a word that ends the subject of a new message."""
    return secrets.token_urlsafe(12)


def locks_for(seconds: float) -> bytes:
    """Return the acknowledgement that lets the server deliver a message again after *seconds*, or ``PUT_OFF_MAX``.

    Until then, its receiver can still settle it: so this sets the length of a lock, as well as a delay.
    """
    return NAK + b' {"delay": %d}' % nanoseconds(min(seconds, PUT_OFF_MAX))


class Storing:
    """Stores messages again."""

    def __init__(self, client: Client, places: Places) -> None:
        self._client = client
        self._places = places

    async def acknowledge(self, connection: Connection, deliveries: Sequence[Found], how: bytes) -> None:
        """Acknowledge many deliveries of one consumer; return once the server has processed all of them.

        One server processes them in the order in which they come, so the answer to the last one is enough. Of several,
        another may lead the consumer by then, which has not got the first ones: so each is answered.

        Raises:
            NoJetStream: There is no such consumer any more.
        """
        if not deliveries:
            return
        replies = [one.reply for one in deliveries]
        if not self._client.is_spread(connection):
            for reply in replies[:-1]:
                await connection.publish(reply, how)
            await connection.request(replies[-1], how)
            return
        pauses = self._client.pauses(connection)
        while True:
            is_gone = partial(self._places.is_gone, connection, deliveries[0].queue, deliveries[0].consumer)
            answers = await self._client.answers(connection, [(reply, how, None) for reply in replies], is_gone)
            replies = [
                reply for reply, answer in zip(replies, answers, strict=True) if answer is None or has_no_stream(answer)
            ]
            if not replies:
                return
            await self._places.require_consumer(connection, deliveries[0].queue, deliveries[0].consumer)
            pause = next(pauses, None)
            if pause is None:
                raise Refusal(NO_LEADER, f"no server leads the consumer {deliveries[0].consumer!r}")
            await asyncio.sleep(pause)

    async def replace(self, connection: Connection, found: Found, properties: Properties) -> Found | None:
        """Store a live message again, with *properties*; return it as it is then, or None if it is gone.

        Then every earlier delivery of it is over, and it can be pulled, as one that was never delivered. With
        ``locked_for`` it is locked at the same time: whoever pulls it puts it off.

        Raises:
            HeadersTooLong: The headers of its sender leave no room for what must be noted.
            TooLarge: With what must be noted, it is larger than its stream takes.
        """
        place, copies = self._places.place_of(found.queue), await self.copies_of(connection, found)
        headers = encode_to_fit(properties, found.body, connection.max_payload)
        headers[NATIVE_ID] = id_ = copies.id_of(found)
        subject, last = self.subject_of(found), found.stored_as if place.key_of(found.subject) is not None else 0
        copy: Found | None = None
        aside = 0
        pauses = self._client.pauses(connection)
        while True:
            try:
                require = partial(self._places.require, connection, place.stream)
                answer = await self._store(connection, require, place.stream, subject, found.body, headers, last)
                if not answer.get("duplicate"):
                    stored = int(answer["seq"])
                    copy = replace(
                        found, subject=subject, stored_as=stored, properties=properties, reply="", delivered=0,
                        native_id=id_,
                    )  # fmt: skip
                break
            except NoJetStream:
                return None  # the queue was deleted
            except Refusal as error:
                if not is_wrong_sequence(error):
                    raise
                newest = await self._newest_of(connection, found, subject)
                if newest is not None and copies.has(found, newest):
                    break
                if last and (newest is None or newest.stored_as < last):
                    break  # it is gone
                if newest is not None and newest.stored_as != last:  # others have sent it
                    if not await self.exists(connection, found):
                        return None
                    aside += 1
                    subject, last = place.subject_of(copies.key_aside(found, aside)), 0
                    continue
                # Before 2.11, a copy that too few replicas have is the reason, too; and it may still be lost.
                pause = next(pauses, None)
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        if copy is not None and aside:
            return copy if await self._replaces(connection, place.stream, found, copy) else None
        # Also if there was a copy before: then this delivery is of the original, which was left behind.
        await self._remove(connection, found)
        return copy

    async def _replaces(self, connection: Connection, stream: str, found: Found, copy: Found) -> bool:
        """Remove the original of a *copy* that has another subject; if it was gone already, remove the copy instead.

        The server has not compared them: what took the original away meanwhile decides.
        """
        if await self.delete(connection, stream, found.stored_as):
            return True
        await self.delete(connection, stream, copy.stored_as)
        return False

    async def is_as_found(self, connection: Connection, found: Found) -> bool:
        """Whether a message is there as it was found, and has no copy."""
        place, copies = self._places.place_of(found.queue), await self.copies_of(connection, found)
        if not await self.exists(connection, found):
            return False
        for aside in count():
            subject = place.subject_of(copies.key_aside(found, aside)) if aside else self.subject_of(found)
            newest = await self._newest_of(connection, found, subject)
            if newest is not None and copies.has(found, newest):
                return False
            if newest is None and aside:
                break
        return True

    def subject_of(self, found: Found) -> str:
        """Return the subject that the copy of a message has, unless others have sent something there."""
        place = self._places.place_of(found.queue)
        return found.subject if place.key_of(found.subject) is not None else place.subject_of(f"n{found.stored_as}")

    async def copies_of(self, connection: Connection, found: Found) -> Copies:
        """Return what tells the copies of a message."""
        stream = self._places.place_of(found.queue).stream
        if found.consumer:
            return Copies(stream, found.consumer)
        consumer = await self._places.consumer_of(connection, found.queue)
        return Copies(stream, consumer.name if consumer is not None else "")

    async def _remove(self, connection: Connection, found: Found) -> None:
        """Remove the original of a message that was stored again."""
        if found.reply:
            await self.acknowledge(connection, [found], ACK)
        else:
            await self.delete(connection, self._places.place_of(found.queue).stream, found.stored_as)

    async def newest(self, connection: Connection, found: Found) -> Found | None:
        """Return what is the last message now of the subject that copies of *found* have; None if there is none."""
        return await self._newest_of(connection, found, self.subject_of(found))

    async def _newest_of(self, connection: Connection, found: Found, subject: str) -> Found | None:
        stream = self._places.place_of(found.queue).stream
        try:
            answer = await self._client.call(connection, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        except Refusal as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return None
            raise
        return replace(read_message(found.queue, answer), consumer=found.consumer)

    async def exists(self, connection: Connection, found: Found) -> bool:
        """Whether a message is still there."""
        stream = self._places.place_of(found.queue).stream
        try:
            await self._client.call(connection, f"STREAM.MSG.GET.{stream}", {"seq": found.stored_as})
        except Refusal as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return False
            raise
        return True

    async def replace_dead(self, connection: Connection, found: Found, properties: Properties) -> Found | None:
        """Store a dead letter again, with *properties*, if it is still as it was *found*; return it as it is then.

        Their stream keeps one message of a subject, so that the copy takes the place of the original in one step.
        Headers that left just enough room for its death, but leave none for a lock, are not kept: see ``bury``.
        """
        try:
            headers = encode_to_fit(properties, found.body, connection.max_payload)
        except HeadersTooLong:
            properties = without_headers(properties)
            headers = encode_to_fit(properties, found.body, connection.max_payload)
        subject = self.subject_of(found)
        try:
            last = found.stored_as if subject == found.subject else 0
            stream = self._places.place_of(found.queue).stream
            require = partial(self._places.require, connection, stream)
            answer = await self._store(connection, require, stream, subject, found.body, headers, last)
        except NoJetStream:
            return None
        except Refusal as error:
            if is_wrong_sequence(error):
                return None
            raise
        if subject != found.subject:  # another program's
            await self.delete(connection, stream, found.stored_as)
        return replace(found, subject=subject, stored_as=int(answer["seq"]), properties=properties)

    async def delete(self, connection: Connection, stream: str, stored_as: int) -> bool:
        """Remove a message for good; False if it is not there."""
        try:
            request = {"seq": stored_as, "no_erase": True}
            await self._client.call(connection, f"STREAM.MSG.DELETE.{stream}", request, repeats=False)
        except Refusal as error:
            if error.code in _GONE or error.code == NO_STREAM:
                return False
            raise
        return True

    async def scan(
        self, connection: Connection, queue: str, after: int = 0, until: int | None = None
    ) -> AsyncIterator[Found]:
        """Yield the messages in the stream of *queue*, in its order, from after number *after*, up to *until*."""
        stream = self._places.place_of(queue).stream
        while True:
            try:
                answer = await self._client.call(
                    connection, f"STREAM.MSG.GET.{stream}", {"seq": after + 1, "next_by_subj": ">"}
                )
            except Refusal as error:
                if error.code in (NO_MESSAGE, NO_STREAM):
                    return
                raise
            found = read_message(queue, answer)
            after = max(after + 1, found.stored_as)
            if until is not None and after > until:
                return
            yield found

    # --- dead letters ---

    async def bury(self, connection: Connection, found: Found, dead: Properties) -> bool:
        """Move a message to the dead letters; False if it is gone, and was not moved.

        First it is stored again, marked as dead: that decides, once and for all. Then it is copied and removed. A
        process that receives it in between finishes the move, and delivers nothing. Headers that leave no room for
        that are not kept.
        """
        try:
            marked = await self.replace(connection, found, dead)
        except HeadersTooLong:
            marked = await self.replace(connection, found, without_headers(dead))
        if marked is None:
            return False
        # As of a full server: it is decided all the same, and done later.
        with suppress(Refusal, TooLarge, TimeoutError):
            await self.finish(connection, marked)
        return True

    async def finish(self, connection: Connection, found: Found) -> bool:
        """Finish the move of a message that is marked as dead; return whether this call has removed it."""
        place, copies = self._places.place_of(found.queue), await self.copies_of(connection, found)
        headers = encode_to_fit(found.properties, found.body, connection.max_payload)
        headers[NATIVE_ID] = copies.id_of(found)
        await self.store_new(connection, dead_letters_of(found.queue), copies.key_of_dead(found), found.body, headers)
        return await self.delete(connection, place.stream, found.stored_as)

    async def store_new(
        self, connection: Connection, queue: str, key: str, body: bytes, headers: dict[str, str]
    ) -> None:
        """Store a message with *key*, which no sender can guess, in *queue*, unless there is one already.

        The queue is made if it is missing.
        """
        subject = self._places.place_of(queue).subject_of(key)
        try:
            make = partial(self._places.make, connection, queue)
            await self._store(connection, make, self._places.place_of(queue).stream, subject, body, headers, 0)
        except Refusal as error:
            if not is_wrong_sequence(error):
                raise

    async def _store(
        self,
        connection: Connection,
        make: Callable[[], Awaitable[None]],
        stream: str,
        subject: str,
        body: bytes,
        headers: dict[str, str],
        last: int,
    ) -> Json:
        """Store a message, as ``Places.store`` does.

        Raises:
            TooLarge: The stream takes none that is so large.
        """
        try:
            return await self._places.store(connection, make, stream, subject, body, headers, last=last)
        except Refusal as error:
            if is_too_large(error):
                raise TooLarge(error.text) from error
            raise

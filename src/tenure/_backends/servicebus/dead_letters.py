"""Dead letters: peek, redrive and purge. They are in the entity's own sub-queue, and no service moves them back."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.codec import Encoded
from tenure._backends.servicebus.feeds import Feeds
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.looking import looked_at
from tenure._backends.servicebus.message_format import Received, copied
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.removal import Act, Source, remove, renew
from tenure._backends.servicebus.sending import Sending
from tenure._queue.broker import Selection
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage, dead_message_of
from tenure._runtime.remote_clock import RemoteClock
from tenure.errors import ConfigError, MessageRefused


class DeadLetters:
    """The dead letters of every queue. All of it belongs to the library's thread."""

    def __init__(
        self, namespace: Namespace, places: Places, sending: Sending, clock: RemoteClock, feeds: Feeds
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._sending = sending
        self._clock = clock
        self._feeds = feeds

    async def peek(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters in order of sequence, without locking them."""
        path = await self._places.existing(dead_letters_of(queue))
        which = which.at(self._clock.now())
        shown: list[DeadMessage] = []
        async for found, _ in looked_at(self._namespace, path, queue, which.after):
            if len(shown) >= limit:
                break
            if which.fits(found.sequence, found.id, found.death):
                shown.append(dead_message_of(queue, found.delivery(queue, "", is_dead=True), found.death))
        return shown

    async def redrive(self, queue: str, which: Selection, limit: int | None, *, dry_run: bool, to: str | None) -> int:
        """Send dead letters again, to *queue* or to another, and remove them: each is written before it is removed."""
        path = await self._places.existing(queue)
        if path is None:
            return 0
        target = queue if to is None else to
        if to is None and path.subscription is not None:
            raise ConfigError(
                f"dead letters of the subscription {queue!r} can't be put back: its topic would give them to every "
                "subscription; redrive them to a queue of their own: to=…"
            )
        is_new = await self._places.detects_duplicates(target)
        again = partial(_again, queue, to=target, is_new=is_new, keeps_time=target == queue)

        async def send(chosen: list[tuple[Received, Arrived]], done: Callable[[int], None]) -> None:
            has_session = any(found.session is not None for found, _ in chosen)
            encoded = [again(found, arrived) for found, arrived in chosen]
            sent = 0

            def note(number: int) -> None:
                nonlocal sent
                sent += number
                done(number)

            while sent < len(encoded):
                try:
                    await self._sending.send(target, encoded, sessions=has_session, are_copies=True, sent=note)
                except MessageRefused as refused:  # one is too large with its history
                    found, arrived = chosen[refused.index]
                    short = again(found, arrived, is_short=True)
                    if sent or len(short.data) >= len(encoded[refused.index].data):
                        raise
                    encoded[refused.index] = short

        return await self._remove(queue, which, limit, send, dry_run=dry_run)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good, oldest first."""
        if await self._places.existing(queue) is None:
            return 0
        return await self._remove(queue, which, limit)

    async def _remove(
        self, queue: str, which: Selection, limit: int | None, act: Act | None = None, *, dry_run: bool = False
    ) -> int:
        which = which.at(self._clock.now())
        name = dead_letters_of(queue)
        path, feed = await self._places.path_of(name), self._feeds.of(name)

        async def claim(most: int) -> tuple[ReceiveLink | None, list[Arrived]]:
            taken = await feed.claim_certainly(most)
            return taken.link, taken.messages

        def is_selected(found: Received) -> bool:
            return which.fits(found.sequence, found.id, found.death)

        source = Source(queue, claim, partial(renew, self._namespace, path), self._places.lock_known(queue))
        return await remove(source, is_selected, limit, act, dry_run=dry_run)


def _again(
    queue: str, found: Received, arrived: Arrived, *, to: str, is_new: bool, keeps_time: bool, is_short: bool = False
) -> Encoded:
    """Return a dead letter as it is sent again. With an id that *is new*, it is the same for each attempt."""
    notes = replace(found.notes_of_death.redriven(), sent_at=found.sent_at if keeps_time else None)
    place = f"{queue} {found.sequence} {found.enqueued_at}"  # not the lock: that is another one at each attempt
    new_id = uuid.uuid5(uuid.NAMESPACE_OID, place).hex if is_new else None
    return copied(found, arrived.message, notes.least() if is_short else notes, new_id=new_id, to=to)

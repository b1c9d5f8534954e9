"""Messages on their way out: in as few transfers as the service takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.codec import Encoded
from tenure._backends.servicebus.driver import NOT_FOUND, Refused
from tenure._backends.servicebus.links import SendLink
from tenure._backends.servicebus.places import Places
from tenure.errors import ConfigError, MessageRefused

ROOM = 1_024
"""Bytes of a transfer that are kept for its own frame."""

NOTES_ROOM = 1_024
"""Bytes that a new message leaves for what is noted with a copy of it, if not all: whose copy it is, and its counts."""

EACH = 8
"""Bytes that each message of a transfer takes besides its own."""


class Sending:
    """Sends encoded messages. All of it belongs to the library's thread."""

    def __init__(self, namespace: Namespace, places: Places) -> None:
        self._namespace = namespace
        self._places = places
        self._one_by_one: set[str] = set()
        """The entities that are partitioned: their batches must be for one partition."""

    async def send(
        self,
        queue: str,
        messages: Sequence[Encoded],
        *,
        sessions: bool = False,
        are_copies: bool = False,
        sent: Callable[[int], None] | None = None,
    ) -> None:
        """Send *messages*; each transfer is one step, all of them together are not.

        Those that are no copies have to have room for what is noted with a copy later.

        Where it matters which of them were sent when it fails, *sent* is called with the number of further ones: none
        behind those is sent then.
        """
        done = 0

        def note(number: int) -> None:
            nonlocal done
            done += number
            if sent is not None:
                sent(number)

        send = partial(
            self._send,
            queue,
            sessions=sessions,
            sent=note,
            kept=0 if are_copies else NOTES_ROOM,
            in_turn=sent is not None,
        )
        try:
            await send(messages)
        except Refused as refused:
            if refused.condition != NOT_FOUND:
                raise
            self._places.forget(queue)  # it was deleted meanwhile
            await send(messages[done:])

    async def _send(
        self,
        queue: str,
        messages: Sequence[Encoded],
        *,
        sessions: bool,
        sent: Callable[[int], None],
        kept: int,
        in_turn: bool,
    ) -> None:
        path = await self._places.path_of(queue, sessions=sessions)
        if path.subscription is not None:
            raise ConfigError(
                f"{queue!r} is a subscription, which can't be sent to; send to its topic: queue({path.entity!r})"
            )
        link = await self._namespace.sender(path.entity)
        for portion in portions(messages, link.size_max, link.batch_max, kept):
            if path.entity not in self._one_by_one:
                try:
                    await link.send(portion)
                except Refused as refused:
                    if len(portion) == 1 or not _is_for_one_partition(refused):
                        raise
                    self._one_by_one.add(path.entity)
                else:
                    sent(len(portion))
                    continue
            await _each(link, portion, sent, in_turn=in_turn)


def _is_for_one_partition(refused: Refused) -> bool:
    """Return whether a batch was refused, as a whole, since its messages belong to several partitions."""
    return refused.condition == "amqp:not-allowed" and "partition" in refused.text.lower()


async def _each(link: SendLink, messages: Sequence[Encoded], sent: Callable[[int], None], *, in_turn: bool) -> None:
    """Send each message in a transfer of its own, in order: all before the first answer, or each *in turn*."""
    if in_turn:
        for one in messages:
            await link.send([one])
            sent(1)
        return
    found = await asyncio.gather(*(link.send([one]) for one in messages), return_exceptions=True)
    for error in found:
        if error is not None:
            raise error
    sent(len(messages))


def portions(messages: Sequence[Encoded], size_max: int, batch_max: int, kept: int = 0) -> list[list[Encoded]]:
    """Return *messages* in portions: each fits into a transfer of *batch_max* bytes, or is one message of *size_max*.

    Of its size, each message leaves *kept* bytes.

    Raises:
        MessageRefused: One of them doesn't fit.
    """
    found: list[list[Encoded]] = []
    size = batch_max
    for index, one in enumerate(messages):
        length = len(one.data)
        if length > size_max - ROOM - kept:
            text = (
                f"the message takes {length:,} bytes with its headers, and this namespace allows {size_max:,}, of "
                f"which {ROOM + kept:,} are kept for what tenure notes with it; send a reference to the data instead"
            )
            raise MessageRefused(text, index, len(messages))
        if size + length + EACH > batch_max - ROOM:
            found.append([])
            size = 0
        found[-1].append(one)
        size += length + EACH
    return found

"""Messages on their way out: in as few transfers as the service takes."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.servicebus.client import NOT_FOUND, Namespace
from tenure._backends.servicebus.driver import Refused
from tenure._backends.servicebus.places import Places
from tenure.errors import ConfigError, MessageRefused

ROOM = 1_024
"""Bytes of a transfer that are kept for its own frame."""

EACH = 8
"""Bytes that each message of a transfer takes besides its own."""


class Sending:
    """Sends encoded messages. All of it belongs to the library's thread."""

    def __init__(self, namespace: Namespace, places: Places) -> None:
        self._namespace = namespace
        self._places = places

    async def send(self, queue: str, messages: Sequence[bytes], *, sessions: bool = False) -> None:
        """Send *messages*; each transfer is one step, all of them together are not."""
        try:
            await self._send(queue, messages, sessions=sessions)
        except Refused as refused:
            if refused.condition != NOT_FOUND:
                raise
            self._places.forget(queue)  # it was deleted meanwhile
            await self._send(queue, messages, sessions=sessions)

    async def _send(self, queue: str, messages: Sequence[bytes], *, sessions: bool) -> None:
        path = await self._places.path_of(queue, sessions=sessions)
        if path.subscription is not None:
            raise ConfigError(
                f"{queue!r} is a subscription, which can't be sent to; send to its topic: queue({path.entity!r})"
            )
        link = await self._namespace.sender(path.entity)
        for portion in portions(messages, link.size_max):
            await link.send(portion)


def portions(messages: Sequence[bytes], size_max: int) -> list[list[bytes]]:
    """Return *messages* in portions that fit into a transfer of *size_max* bytes.

    Raises:
        MessageRefused: One of them doesn't fit.
    """
    found: list[list[bytes]] = []
    size = size_max
    for index, one in enumerate(messages):
        if len(one) > size_max - ROOM:
            text = (
                f"the message takes {len(one):,} bytes with its headers, and this namespace allows {size_max:,}; send "
                "a reference to the data instead"
            )
            raise MessageRefused(text, index, len(messages))
        if size + len(one) + EACH > size_max - ROOM:
            found.append([])
            size = 0
        found[-1].append(one)
        size += len(one) + EACH
    return found

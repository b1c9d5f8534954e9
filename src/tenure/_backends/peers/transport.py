"""The door to the other members: messages go out and come in; each may be lost, late or doubled; none is forged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tenure._backends.peers.wire import Message

Deliver = Callable[[int, Message], None]

CROWDED = "crowded out"


@dataclass(slots=True)
class Counts:
    """What came and went. A frame that was dropped has changed nothing but its number here."""

    sent: int = 0
    received: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Frames that were not handled, by the reason: forged, replayed, malformed, oversized, stranger.
    Under ``CROWDED``, connections that had to make room for newer ones."""
    refused: set[int] = field(default_factory=set)
    """Members that hung up on us as soon as we had said who we are: they have other keys or terms than we."""

    def drop(self, why: str) -> None:
        """Count a frame that was dropped."""
        self.dropped[why] = self.dropped.get(why, 0) + 1


class Transport(Protocol):
    """A way to every other member."""

    counts: Counts

    async def open(self, deliver: Deliver) -> None:
        """Begin to listen (a member does) and to connect; *deliver* is called with each message and its sender.

        Who only looks on gets a negative number as a sender, by which it can be answered for as long as it is there.

        Raises:
            Unavailable: The address can't be listened on now.
        """
        ...

    def send(self, to: int, message: Message) -> None:
        """Send *message*, or lose it; never wait."""
        ...

    async def close(self) -> None:
        """Let go of every connection. A second time does nothing."""
        ...

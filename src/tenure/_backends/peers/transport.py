"""The port to the other members: messages go out and come in; each may be lost, late or doubled; none is forged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tenure._backends.peers.wire import Message
from tenure.errors import TenureError

Deliver = Callable[[int, Message], None]

CROWDED = "crowded out"


@dataclass(slots=True)
class Counts:
    """Frames sent, received and dropped. A dropped frame changes nothing but its number here."""

    sent: int = 0
    received: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped frames by reason: forged, replayed, malformed, oversized, foreign (of another protocol or fleet).
    Under ``CROWDED``, connections that were closed to make room for newer ones."""
    refused: set[int] = field(default_factory=set)
    """Members that closed the connection after this member's introduction: their keys or fleet's terms differ."""
    unreached: dict[int, TenureError] = field(default_factory=dict)
    """Members to which there is no connection, and why."""

    def drop(self, why: str) -> None:
        """Count a frame that was dropped."""
        self.dropped[why] = self.dropped.get(why, 0) + 1


class Transport(Protocol):
    """Carries messages to every other member."""

    counts: Counts

    async def open(self, deliver: Deliver) -> None:
        """Begin to listen (a member does) and to connect; *deliver* is called with each message and its sender.

        A client gets a negative number as a sender, by which it can be answered for as long as it is connected.

        Raises:
            Unavailable: This member's address can't be listened on now.
        """
        ...

    def send(self, to: int, message: Message) -> None:
        """Send *message*, or lose it; never wait."""
        ...

    async def close(self) -> None:
        """Close every connection. A second call does nothing."""
        ...

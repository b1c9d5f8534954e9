"""The locks of this process: which message of a stream each delivery is, and until when it is surely locked.

The server answers an acknowledgement in the same way whether the message was still locked or not. But a lock can't have
ended before the moment that is counted here. So an answer that comes before that moment proves that the server acted
while the lock held; a later one proves nothing, and the lock is over.

A server that is restarted may have forgotten what it delivered in its last tenth of a second, and deliver it again as
if it were new. So a lock belongs to the server's process that gave it, and is over when that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tenure._backends.nats.connection import Connection
from tenure._backends.nats.messages import Found
from tenure._queue import receipts


@dataclass(slots=True, eq=False)
class Held(receipts.Held):
    """A message that this process has locked: by the server, or with a lock that is stored in it."""

    found: Found
    ends_at: float
    """The end of the lock by the local clock; the server ends it a little later."""
    connection: Connection | None
    """Over which the server gave the lock; None if the lock is stored with the message."""
    was_tried: bool = False
    """Whether a verdict got no answer, so that it may have been passed already."""
    is_completed: bool = False
    """Whether it is completed, and only its id is still to be remembered."""

    def is_known_to(self, connection: Connection) -> bool:
        """Whether the server's process that gave the lock is there still, as far as *connection* tells."""
        given = self.connection
        return given is None or not given.is_lost or given.server_id == connection.server_id


Receipts: TypeAlias = receipts.Receipts[Held]

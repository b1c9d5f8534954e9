"""Which message is a copy of which: told by ids that only consumers of the queue can compute.

Whoever may send to a queue can list its subjects, and send to each of them, with any id. So neither a subject nor the
number of a message proves a copy. What a sender can't find out is the name of the queue's consumer: reading from it is
another right, and the name ends with a random word. The id of a copy proves that its sender knows that name::

    Nats-Msg-Id: tenure-COPIED-FIRST-PROOF

``COPIED`` is the number of the message that it replaces, ``FIRST`` that of the message as it was sent, from which all
its copies descend.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from tenure._backends.nats.messages import Found

_ID = re.compile(r"tenure-([0-9]{1,19})-([0-9]{1,19})-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Copies:
    """Ids and keys of the copies of messages in a *stream*, from which processes read by *consumer*."""

    stream: str
    consumer: str

    def id_of(self, found: Found) -> str:
        """Return the id of the next copy of a message: the same one, whoever stores it."""
        return self._id(found.stored_as, self.first_of(found))

    def first_of(self, found: Found) -> int:
        """Return the number under which a message was first stored; its own, if nothing proves that it is a copy."""
        said = _ID.fullmatch(found.native_id)
        if said is None:
            return found.stored_as
        copied, first = int(said[1]), int(said[2])
        return first if hmac.compare_digest(found.native_id, self._id(copied, first)) else found.stored_as

    def has(self, found: Found, other: Found) -> bool:
        """Whether *other* is a copy of the message that was *found*, or a copy of its copy."""
        return other.stored_as > found.stored_as and self.first_of(other) == self.first_of(found)

    def key_aside(self, found: Found, attempt: int) -> str:
        """Return the key of the next copy of a message, if others have sent something to the subject of the usual one.

        To this one they can't have sent anything: nobody can guess it before there is a copy.
        """
        return f"a{self._proof('aside', found.stored_as, self.first_of(found), attempt)}"

    def key_of_dead(self, found: Found) -> str:
        """Return the key of a message as a dead letter: no other message can have it, and stand in its place."""
        return f"d{self._proof('dead', self.first_of(found))}"

    def key_of_redriven(self, dead: Found) -> str:
        """Return the key of a dead letter that is put back into a queue: one, whatever becomes of it there."""
        return f"r{self._proof('redriven', dead.queue, dead.subject)}"

    def _id(self, copied: int, first: int) -> str:
        return f"tenure-{copied}-{first}-{self._proof('copy', copied, first)}"

    def _proof(self, *what: str | int) -> str:
        text = "/".join(map(str, (self.stream, *what)))
        return hmac.digest(self.consumer.encode(), text.encode(), "sha256").hex()[:32]

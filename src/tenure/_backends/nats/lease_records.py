"""The record of an election, as its key in the bucket holds it. Pure: JSON in, JSON out.

House rules:

- The token of a term is the revision of the message that acquired it: the stream's own number, which no deleted or
  purged key takes back. That message can't hold its own number, so it has ``token_above``, the newest token that its
  writer knew: the token is higher than that, too, if the bucket was deleted meanwhile. Later messages have ``token``.
- Each acquisition, renewal and release has a ``stamp`` of its own, and no other write changes it. So a lease has been
  renewed if and only if its stamp is another.
- ``write`` says what the message does, so that whoever hears of it knows that without the one before.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tenure._backends.nats.names import name_of, short_word_of
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Metadata

Write = Literal["acquired", "renewed", "released", "asked to resign"]


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of an election by its newest message."""

    name: str
    holder: str
    """Empty if there is none."""
    token: int
    """Of the present term, or the newest one."""
    ttl: float
    stamp: str
    write: Write
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    resign_asked: bool = False

    @property
    def grant(self) -> Grant:
        """The claim that it is about."""
        return Grant(self.name, self.holder, self.token)

    def at(self, revision: int) -> Record:
        """Return it as stored under *revision*, which an acquisition gets its token from."""
        return replace(self, token=max(self.token, revision)) if self.write == "acquired" else self


# --- keys --------------------------------------------------------------------------------------------------------


def name_by(key: str) -> str | None:
    """Return the name of the election whose key this is, and which isn't cut; None if tenure writes no such key."""
    name = name_of(key)
    return name if name and short_word_of(name) == key else None


# --- reading and writing -----------------------------------------------------------------------------------------


def written(record: Record) -> bytes:
    """Return the body of the message."""
    found: dict[str, object] = {"name": record.name, "holder": record.holder, "write": record.write}
    if record.write == "acquired":
        found["token_above"] = record.token - 1
    else:
        found["token"] = record.token
    found |= {"ttl": record.ttl, "stamp": record.stamp}
    if record.metadata:
        found["metadata"] = dict(record.metadata)
    if record.resign_asked:
        found["resign_asked"] = True
    return json.dumps(found, ensure_ascii=False).encode()


def read(body: bytes, revision: int = 0) -> Record | None:
    """Return the record in a message that has this *revision*; None if tenure did not write it."""
    try:
        found: Any = json.loads(body)
    except ValueError:  # also a UnicodeDecodeError
        return None
    if not isinstance(found, dict):
        return None
    write: Any = found.get("write")
    ttl: Any = found.get("ttl")
    token: Any = found.get("token_above" if write == "acquired" else "token")
    metadata = found.get("metadata") or {}
    texts = (found.get("name"), found.get("holder"), found.get("stamp"), *_items(metadata))
    is_known = (
        write in get_args(Write)
        and all(isinstance(one, str) for one in texts)
        and isinstance(token, int)
        and isinstance(ttl, int | float)
        and 0.0 < ttl < math.inf
        and isinstance(metadata, dict)
    )
    if not is_known:
        return None
    return Record(
        name=found["name"],
        holder=found["holder"],
        token=token + (write == "acquired"),
        ttl=float(ttl),
        stamp=found["stamp"],
        write=write,
        metadata=FrozenDict(metadata) if metadata else NO_METADATA,
        resign_asked=bool(found.get("resign_asked")),
    ).at(revision)


def _items(metadata: object) -> list[object]:
    return [*metadata.keys(), *metadata.values()] if isinstance(metadata, dict) else []


# --- changes -----------------------------------------------------------------------------------------------------


def acquired(name: str, holder: str, ttl: float, metadata: Metadata, *, after: int, stamp: str) -> Record:
    """Return the record of a new term, whose token is higher than *after*."""
    kept = FrozenDict(metadata) if metadata else NO_METADATA
    return Record(name, holder, after + 1, ttl, stamp, "acquired", kept)


def renewed(record: Record, ttl: float, *, left: float, stamp: str) -> Record:
    """Return it renewed for *ttl* seconds, and at least for the *left* ones: a renewal never shortens a lease."""
    return replace(record, ttl=max(ttl, left), stamp=stamp, write="renewed")


def released(record: Record, *, stamp: str) -> Record:
    """Return it without a holder; its token is kept."""
    return replace(record, holder="", stamp=stamp, write="released", metadata=NO_METADATA, resign_asked=False)


def asked_to_resign(record: Record) -> Record:
    """Return it with a request to its holder to step down. This is no renewal: the stamp stays the same."""
    return replace(record, write="asked to resign", resign_asked=True)

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
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tenure._election.store import NAME_MAX
from tenure._foreign import Unreadable, a_count, a_flag, a_text, read_object, read_or, seconds, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, TOKEN_MAX, Grant, Metadata

Write = Literal["acquired", "renewed", "released", "asked to resign"]

TTL_MIN, TTL_MAX = 0.1, 86_400.0
"""Seconds of the shortest and the longest lease."""

RECORD_MAX = 2**23
"""The longest record that is read: more than the server takes, unless told otherwise."""

STAMP_MAX = 64
"""Characters of the longest stamp that is read."""


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
    """Return the record in a message that has this *revision*; None if tenure can't have written it.

    Metadata, and a request to resign, that are unreadable are ignored: the lease doesn't depend on them.
    """
    try:
        found = read_object(body, RECORD_MAX)
        write: Any = found.get("write")
        if not isinstance(write, str) or write not in get_args(Write):
            return None
        is_new = write == "acquired"
        return Record(
            name=a_text(found.get("name"), NAME_MAX),
            holder=a_text(found.get("holder"), NAME_MAX),
            token=a_count(found.get("token_above"), most=TOKEN_MAX - 1) + 1
            if is_new
            else a_count(found.get("token"), most=TOKEN_MAX),
            ttl=seconds(found.get("ttl"), TTL_MIN, TTL_MAX),
            stamp=a_text(found.get("stamp"), STAMP_MAX),
            write=write,  # type: ignore[arg-type]  # it is one of them
            metadata=read_or(_metadata, found.get("metadata"), NO_METADATA),
            resign_asked=read_or(a_flag, found.get("resign_asked"), False),
        ).at(revision)
    except Unreadable:
        return None


def _metadata(value: object) -> Metadata:
    found = texts(value)
    return FrozenDict(found) if found else NO_METADATA


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

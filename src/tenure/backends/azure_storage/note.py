"""The text of a message in a Storage Queue: the body, and a note where there is something to say beside it.

The body stands in base64, as Azure Functions and most clients write it, and in most messages that is all. A Storage
Queue keeps nothing else with a message. So where something must be kept (an id, headers, who waits for an answer, a
failed attempt, a reason), a dot follows, and a note in JSON::

    SGVsbG8=
    SGVsbG8=.{"id": "order-17", "headers": {"tenant": "blue"}}

Whoever reads such a message with another client takes what stands before the dot. A text that is neither is a body
that somebody wrote as plain text.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from tenure.queue.message import HISTORY_MAX, NO_HEADERS, Attempt, Failure, Headers

TEXT_MAX = 65_536
"""The longest text that Azure takes."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is to be said of a message beside its body; what isn't said doesn't stand in the note."""

    id: str | None = None
    headers: Headers = field(default_factory=lambda: NO_HEADERS)
    reply_to: str | None = None
    correlation_id: str | None = None
    ttl: float | None = None
    """Seconds after it was sent in which it must be received; Azure's own would let it vanish."""
    uncounted: int = 0
    """So many deliveries were given back, and are taken off Azure's count."""
    history: tuple[Attempt, ...] = ()
    before: int = 0
    """So much of the history is from before it was redriven."""
    sequence: int = 0
    """Its number, if it has come from another queue and so would get another."""
    enqueued_at: float = 0.0
    deliveries: int = 0
    """How often a dead letter was delivered while it lived."""
    reason: str | None = None
    """Why it died."""
    description: str = ""
    dead_at: float = 0.0
    error: Failure | None = None

    def after(self, attempt: Attempt) -> Note:
        """Return the note with one attempt more."""
        return replace(self, history=(*self.history, attempt)[-HISTORY_MAX:])

    def in_short(self) -> Iterator[Note]:
        """Yield the note, then with less and less of what can be done without."""
        yield self
        brief = [replace(one, error=_brief(one.error)) for one in self.history]
        yield replace(self, history=tuple(brief))
        yield replace(self, history=tuple(brief[-3:]), error=_brief(self.error))
        yield replace(self, history=(), error=_brief(self.error), before=0)
        yield replace(self, history=(), error=None, description=self.description[:200], before=0)


def _brief(error: Failure | None) -> Failure | None:
    return None if error is None else Failure(error.type, error.message[:500])


_EMPTY = Note()


def written(body: bytes, note: Note) -> str:
    """Return the text of a message."""
    text = base64.b64encode(body).decode()
    said = {
        one.name: _plain(getattr(note, one.name))
        for one in fields(note)
        if getattr(note, one.name) != getattr(_EMPTY, one.name)
    }
    return f"{text}.{json.dumps(said)}" if said else text


def fitted(body: bytes, note: Note) -> str:
    """Return the text with as much of the note as fits; without any, if the body leaves no room."""
    for less in note.in_short():
        text = written(body, less)
        if len(text) <= TEXT_MAX:
            return text
    return written(body, Note())


def _plain(value: Any) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, Failure):
        return asdict(value)
    if isinstance(value, tuple):
        return [asdict(one) for one in value]
    return value


def read(text: str | None) -> tuple[bytes, Note]:
    """Return the body and the note in a text, whoever wrote it."""
    text = text or ""
    start, dot, rest = text.partition(".")
    try:
        return base64.b64decode(start, validate=True), _note(json.loads(rest)) if dot else _EMPTY
    except (binascii.Error, ValueError, TypeError, KeyError):
        return text.encode(), _EMPTY


def _note(said: dict[str, Any]) -> Note:
    if "headers" in said:
        said["headers"] = MappingProxyType(dict(said["headers"]))
    if said.get("error"):
        said["error"] = Failure(**said["error"])
    said["history"] = tuple(
        Attempt(one["number"], one["at"], one["outcome"], Failure(**one["error"]) if one["error"] else None)
        for one in said.get("history", ())
    )
    return Note(**said)

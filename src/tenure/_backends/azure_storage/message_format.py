"""The text of a message in a Storage Queue: the body, and a note where there is something to say beside it.

The body stands in base64, as Azure Functions and most clients write it, and in most messages that is all. A Storage
Queue keeps nothing else with a message. So where something must be kept (an id, headers, who waits for an answer, a
failed attempt, a reason), a dot follows, and a note in JSON::

    SGVsbG8=
    SGVsbG8=.{"id": "order-17", "headers": {"tenant": "blue"}}

Whoever reads such a message with another client takes what stands before the dot. A text that is neither is a body
that somebody wrote as plain text. One that is too long to be written in base64 stays plain, and its note stands in its
last line, behind a dot::

    a long text …
    .{"reason": "max_deliveries", "deliveries": 10}

A note that tenure would not have written is none: the whole text is a body.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tenure._queue.message import HISTORY_MAX, INT_MAX, NO_HEADERS, Attempt, Failure, Headers, Outgoing, checked
from tenure.errors import ConfigError

TEXT_MAX = 65_536
"""The longest text that Azure takes, in bytes."""


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
    text, said = base64.b64encode(body).decode(), _said(note)
    return f"{text}.{said}" if said else text


def fitted(text: str, body: bytes, note: Note) -> str | None:
    """Return *text*, whose *body* this is, with as much of the note as fits; None if there is no room for one."""
    for less in note.in_short():
        anew = written(body, less)
        if len(anew) <= TEXT_MAX:
            return anew
    if not text.encode().startswith(body):
        return None  # it is base64, and stays so for whoever else reads it
    for less in note.in_short():
        said = _said(less)
        if said and len(body) + len(_LAST_LINE) + len(said) <= TEXT_MAX:
            return body.decode() + _LAST_LINE + said
    return None


_LAST_LINE = "\n."


def _said(note: Note) -> str:
    said = {
        one.name: _plain(getattr(note, one.name))
        for one in fields(note)
        if getattr(note, one.name) != getattr(_EMPTY, one.name)
    }
    return json.dumps(said) if said else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        return asdict(value)
    if isinstance(value, tuple):
        return [asdict(one) for one in value]
    return value


def read(text: str | None) -> tuple[bytes, Note]:
    """Return the body and the note in a text, whoever wrote it: what can't be ours is a body as it stands."""
    text = text or ""
    start, dot, rest = text.partition(".")
    note = _note(rest) if dot else _EMPTY
    if note is not None:
        try:
            return base64.b64decode(start, validate=True), note
        except (binascii.Error, ValueError):
            pass
    start, line, rest = text.rpartition(_LAST_LINE)
    note = _note(rest) if line else None
    return (text.encode(), _EMPTY) if note is None or note == _EMPTY else (start.encode(), note)


def _note(text: str) -> Note | None:
    """Return the note that *text* is, if it is one that could be ours."""
    if not text.startswith("{"):
        return None
    try:
        said = json.loads(text)
        if any(name in said and not fits(said[name]) for name, fits in _FITS.items()):
            return None
        if "history" in said:
            said["history"] = tuple(Attempt(**{**one, "error": _failure(one["error"])}) for one in said["history"])
        if "error" in said:
            said["error"] = _failure(said["error"])
        note = Note(**said)
        sent = Outgoing(  # what a sender says must be what could be sent
            id=note.id,
            headers=note.headers,
            expires_in=note.ttl,
            reply_to=note.reply_to,
            correlation_id=note.correlation_id,
        )
        return replace(note, headers=checked([sent], 0)[0].headers)
    except (ValueError, TypeError, KeyError, RecursionError, ConfigError):
        return None


def _failure(said: dict[str, str] | None) -> Failure | None:
    return None if said is None else Failure(**said)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= INT_MAX


def _is_moment(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _YEAR_10000  # type: ignore[operator]


def _is_failure(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_text, value.values())))


def _is_history(value: object) -> bool:
    return isinstance(value, list) and all(
        _is_count(one["number"]) and _is_moment(one["at"]) and _is_text(one["outcome"]) and _is_failure(one["error"])
        for one in value
    )


_YEAR_10000 = 253_402_300_800
"""In Unix seconds. Whoever shows a moment can't go further."""

_FITS: Mapping[str, Callable[[object], bool]] = {
    "ttl": _is_moment,
    "uncounted": _is_count,
    "history": _is_history,
    "before": _is_count,
    "sequence": _is_count,
    "enqueued_at": _is_moment,
    "deliveries": _is_count,
    "reason": _is_text,
    "description": _is_text,
    "dead_at": _is_moment,
    "error": _is_failure,
}
"""What tenure itself says in a note, and how that is told from what another has written."""

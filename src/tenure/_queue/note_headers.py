"""Notes that are kept in the message itself: as the fields of an object or as headers, and shortened until they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from tenure._foreign import a_count, read_or, seconds
from tenure._queue.checks import COUNT_MAX, INT_MAX
from tenure._queue.failures import Failure
from tenure._queue.message import Attempt, Death
from tenure._queue.notes import Notes, read_attempts, read_deliveries, read_failure, read_history, read_reason

N = TypeVar("N", bound=Notes)
W = TypeVar("W")

Reader = Callable[[Any], Any]

SEQUENCE_MAX = INT_MAX - COUNT_MAX
"""The highest sequence that is read: of equal ones, each is counted up from it (see ``Receipts.add``)."""

UNKNOWN = "unknown"
"""The reason of a dead letter from another program."""


def read_sequence(value: object) -> int:
    """Return the sequence of a message in its queue."""
    return a_count(value, most=SEQUENCE_MAX)


def noted_death(notes: Notes, since: float) -> Death:
    """Return how a message died; *since* is when it was there already, if its death is not noted."""
    return Death(notes.reason or UNKNOWN, notes.description, notes.dead_at or since, notes.error, notes.history)


# --- as the fields of an object ----------------------------------------------------------------------------------

NOTED: Mapping[str, Reader] = {
    "deliveries": read_deliveries,
    "history": read_attempts,
    "before": read_deliveries,
    "reason": read_reason,
    "description": read_reason,
    "dead_at": seconds,
    "error": read_failure,
}
"""By note: what reads it."""


def read_fields(said: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return the notes in an object, each read by its reader; those that are unreadable are left out."""
    found: dict[str, Any] = {}
    for name, read in readers.items():
        one = read_or(read, said.get(name), None)
        if one is not None:
            found[name] = one
    if "before" in found:
        found["before"] = read_history(said.get("history"), found["before"])[1]
    return found


def fields_of(notes: Notes, nothing: Notes) -> dict[str, Any]:
    """Return what *notes* say and *nothing* does not, as the fields of an object that JSON takes."""
    given = ((one.name, getattr(notes, one.name)) for one in fields(notes))
    return {name: _plain(value) for name, value in given if value != getattr(nothing, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        return asdict(value)
    return plain_attempts(value) if isinstance(value, tuple) else value


def plain_attempts(history: tuple[Attempt, ...]) -> list[dict[str, Any]]:
    """Return a history as objects that JSON takes."""
    return [asdict(one) for one in history]


# --- shortened ---------------------------------------------------------------------------------------------------


def written_to_fit(notes: N, write: Callable[[N], W], fits: Callable[[W], bool]) -> W | None:
    """Return what *write* makes of as much of the notes as *fits*; None if not even the least of them does."""
    for less in shortened(notes):
        if fits(written := write(less)):
            return written
    return None


def shortened(notes: N) -> Iterator[N]:
    """Yield the notes in full, then with ever less of the history, errors and description."""
    yield notes
    brief = tuple(replace(one, error=_brief(one.error)) for one in notes.history)
    yield replace(notes, history=brief)
    yield replace(_with_newest(notes, brief[-3:]), error=_brief(notes.error))
    # Without its newest attempt, all before it would count as missing.
    least = _with_newest(notes, tuple(replace(one, error=None) for one in brief[-1:]))
    yield replace(least, error=_brief(notes.error))
    yield replace(least, error=None, description=notes.description[:200])
    yield replace(notes, history=(), before=0, error=None, description=notes.description[:200])
    yield replace(notes, history=(), before=0, error=None, description="")


def _with_newest(notes: N, history: tuple[Attempt, ...]) -> N:
    """Return the notes with no more than the end of their history."""
    return replace(notes, history=history, before=max(0, notes.before - (len(notes.history) - len(history))))


def _brief(error: Failure | None) -> Failure | None:
    return None if error is None else Failure(error.type, error.message[:500])

"""What a store notes with a message that failed, where it keeps nothing about deliveries by itself.

Whoever may write to the queue can write such notes. So they are read with :mod:`tenure._foreign`: counts are clipped,
the newest attempts are kept, and of what is unreadable, only that is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

from tenure._foreign import Unreadable, a_count, a_list, a_text, an_object, read_json, read_or, seconds
from tenure._queue.checks import COUNT_MAX
from tenure._queue.failures import MESSAGE_MAX, TRACEBACK_MAX, Failure
from tenure._queue.message import HISTORY_MAX, Attempt, Death, Outcome, newest_error
from tenure._queue.verdicts import DESCRIPTION_MAX

HISTORY_JSON_MAX = 2**23
"""The longest JSON of a history that is read: fifty attempts with their errors and tracebacks take less."""

UNREADABLE = "unreadable"
"""The reason of a dead letter that has none which can be read, although the store keeps one of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What is noted with a message."""

    deliveries: int = 0
    """How often it was handed out before it was written so; of a dead letter, how often in all."""
    history: tuple[Attempt, ...] = ()
    before: int = 0
    """The number of entries of the history from before it was redriven."""
    reason: str | None = None
    """The reason of a dead letter, or of a message that is being moved to the dead letters."""
    description: str = ""
    dead_at: float = 0.0
    """When it died, by the store's wall clock, in Unix seconds."""
    error: Failure | None = None

    def with_attempt(self, attempt: Attempt) -> Self:
        """Return the notes with one more attempt."""
        return self._with_history((*self.history, attempt))

    def with_expired_attempts(self, count: int, now: float) -> Self:
        """Return the notes with those of *count* attempts that are missing in the history: their locks have ended.

        Numbers below the first one that is there are not missing: they were left out, for want of room. It takes the
        same time whatever *count* is: no more attempts are made up than a history keeps.
        """
        recent = self.history[self.before :]
        recorded = {one.number for one in recent}
        first = max(1, count - HISTORY_MAX + 1, min(recorded, default=1))
        missing = [Attempt(number, now, "expired") for number in range(first, count + 1) if number not in recorded]
        ordered = sorted((*recent, *missing), key=lambda one: one.number)
        return self._with_history((*self.history[: self.before], *ordered))

    def _with_history(self, history: tuple[Attempt, ...]) -> Self:
        dropped = max(0, len(history) - HISTORY_MAX)
        return replace(self, history=history[dropped:], before=max(0, self.before - dropped))

    def dead(self, reason: str, description: str, count: int, now: float, error: Failure | None = None) -> Self:
        """Return the notes of it as a dead letter."""
        return replace(
            self,
            deliveries=count,
            reason=reason,
            description=description,
            dead_at=now,
            error=error or newest_error(self.history) or self.error,
        )

    def redriven(self) -> Self:
        """Return the notes of it as a message with all deliveries left. Its history is kept, as that from before."""
        return replace(
            self,
            deliveries=0,
            before=len(self.history),
            reason=None,
            description="",
            dead_at=0.0,
            error=None,
        )


# --- reading -----------------------------------------------------------------------------------------------------


def read_deliveries(value: object) -> int:
    """Return a delivery count; one that no store counts to is the highest that is counted."""
    return min(a_count(value), COUNT_MAX)


def read_reason(value: object) -> str:
    """Return a reason, or a description; of a longer one, its beginning."""
    return a_text(value)[:DESCRIPTION_MAX]


def read_attempts(value: object) -> tuple[Attempt, ...]:
    """Return the newest attempts in a list of objects or rows ``[number, at, outcome, error]``.

    An unreadable attempt is left out, and so are fields and columns of a newer version.
    """
    return read_history(a_list(value), 0)[0]


def read_history(value: object, before: object) -> tuple[tuple[Attempt, ...], int]:
    """Return the attempts in a list, and how many of them are among its first *before* entries.

    What is no list has none; see :func:`read_attempts`.
    """
    rows = read_or(a_list, value, [])
    dropped = max(0, len(rows) - HISTORY_MAX)
    found = [read_or(_read_attempt, one, None) for one in rows[dropped:]]
    earlier = found[: max(0, read_or(a_count, before, 0) - dropped)]
    return tuple(one for one in found if one is not None), sum(one is not None for one in earlier)


def read_history_text(text: object, before: object = None) -> tuple[tuple[Attempt, ...], int]:
    """Return the same of a list in JSON."""
    return ((), 0) if text is None else read_history(read_or(_read_json, text, None), before)


def _read_json(text: object) -> Any:
    return read_json(text, HISTORY_JSON_MAX)


def _read_attempt(value: object) -> Attempt:
    if isinstance(value, list):
        given = dict(zip(("number", "at", "outcome", "error"), value, strict=False))
    else:
        given = an_object(value)
    outcome: Any = given.get("outcome")
    if outcome not in get_args(Outcome):
        raise Unreadable("it is no outcome of an attempt")
    number = min(a_count(given.get("number"), least=1), COUNT_MAX)
    return Attempt(number, seconds(given.get("at")), outcome, read_failure(given.get("error")))


def read_failure(value: object) -> Failure | None:
    """Return the exception in an object, or in a list ``[type, message, traceback]``; None for null."""
    if value is None:
        return None
    if isinstance(value, list):
        given = dict(zip(("type", "message", "traceback"), value, strict=False))
    else:
        given = an_object(value)
    return Failure(
        a_text(given.get("type"))[:MESSAGE_MAX],
        a_text(given.get("message"))[: 2 * MESSAGE_MAX],
        a_text(given.get("traceback", ""))[-TRACEBACK_MAX - 1 :],
    )


def read_death(reason: object, description: object, at: float, history: tuple[Attempt, ...]) -> Death:
    """Return the death of a dead letter, with the newest error in its *history*."""
    return Death(
        read_or(read_reason, reason, UNREADABLE),
        read_or(read_reason, description, ""),
        at,
        newest_error(history),
        history,
    )


# --- writing -----------------------------------------------------------------------------------------------------


def rows_of(history: Iterable[Attempt]) -> list[tuple[object, ...]]:
    """Return a history as rows ``[number, at, outcome, error]`` that JSON takes."""
    return [(one.number, one.at, one.outcome, row_of(one.error)) for one in history]


def row_of(error: Failure | None) -> tuple[str, str, str] | None:
    """Return an exception as a row ``[type, message, traceback]``; None for none."""
    return None if error is None else (error.type, error.message, error.traceback)

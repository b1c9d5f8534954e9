"""What a store notes with a message that failed, where it keeps nothing about deliveries by itself.

Whoever may write to the queue can write such notes. So they are read with :mod:`tenure._foreign`: counts are clipped,
the newest attempts are kept, and of what is unreadable, only that is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, get_args

from tenure._foreign import Unreadable, a_count, a_list, a_text, an_object, read_or, seconds
from tenure._queue.checks import COUNT_MAX
from tenure._queue.failures import MESSAGE_MAX, TRACEBACK_MAX, Failure
from tenure._queue.message import HISTORY_MAX, Attempt, Outcome, newest_error
from tenure._queue.verdicts import DESCRIPTION_MAX

HISTORY_JSON_MAX = 2**23
"""The longest JSON of a history that is read: fifty attempts with their errors and tracebacks take less."""


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

    def shortened(self) -> Iterator[Self]:
        """Yield the notes in full, then with ever less of the history, errors and description."""
        yield self
        brief = tuple(replace(one, error=_shortened(one.error)) for one in self.history)
        yield replace(self, history=brief)
        fewer = self._with_newest(brief[-3:])
        yield replace(fewer, error=_shortened(self.error))
        # Without its newest attempt, all before it would count as missing.
        least = self._with_newest(tuple(replace(one, error=None) for one in brief[-1:]))
        yield replace(least, error=_shortened(self.error))
        yield replace(least, error=None, description=self.description[:200])
        yield replace(self, history=(), before=0, error=None, description=self.description[:200])
        yield replace(self, history=(), before=0, error=None, description="")

    def _with_newest(self, history: tuple[Attempt, ...]) -> Self:
        """Return the notes with no more than the end of their history."""
        return replace(self, history=history, before=max(0, self.before - (len(self.history) - len(history))))


def _shortened(error: Failure | None) -> Failure | None:
    return None if error is None else Failure(error.type, error.message[:500])


# --- reading and writing -----------------------------------------------------------------------------------------


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
    found = (read_or(_read_attempt, one, None) for one in a_list(value)[-HISTORY_MAX:])
    return tuple(one for one in found if one is not None)


def read_before(value: object, history: object) -> int:
    """Return how many attempts are read of the first *value* entries of *history*."""
    rows = a_list(history)
    return len(read_attempts(rows[max(0, len(rows) - HISTORY_MAX) : a_count(value)]))


def _read_attempt(value: object) -> Attempt:
    if isinstance(value, list):
        fields = dict(zip(("number", "at", "outcome", "error"), value, strict=False))
    else:
        fields = an_object(value)
    outcome: Any = fields.get("outcome")
    if outcome not in get_args(Outcome):
        raise Unreadable("it is no outcome of an attempt")
    number = min(a_count(fields.get("number"), least=1), COUNT_MAX)
    return Attempt(number, seconds(fields.get("at")), outcome, read_failure(fields.get("error")))


def read_failure(value: object) -> Failure | None:
    """Return the exception in an object, or in a list ``[type, message, traceback]``; None for null."""
    if value is None:
        return None
    if isinstance(value, list):
        fields = dict(zip(("type", "message", "traceback"), value, strict=False))
    else:
        fields = an_object(value)
    return Failure(
        a_text(fields.get("type"))[:MESSAGE_MAX],
        a_text(fields.get("message"))[: 2 * MESSAGE_MAX],
        a_text(fields.get("traceback", ""))[-TRACEBACK_MAX - 1 :],
    )


def plain_attempts(history: tuple[Attempt, ...]) -> list[dict[str, Any]]:
    """Return a history as objects that JSON takes."""
    return [asdict(one) for one in history]

"""The table of cases of how deliveries end, and what becomes of each message by the rule (``_queue.delivery_ends``).

Times are in locks. Time passes in rounds: in each, what is ready is received; at ``VERDICT_AT`` come the verdicts; and
when it is over, so are the locks without a verdict, and the delays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tenure._queue.delivery_ends import LOCK_ENDED, EndedDelivery, Ending, Outcome, Place, expired, noted, outcome_of
from tenure._queue.failures import Failure
from tenure._queue.notes import Notes
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, DeadLetter, Defer

ROUND: Final = 1.2
VERDICT_AT: Final = 0.6
EXPIRY_AT: Final = 0.3
"""When, in its round, a message expires that does so under its lock, or while it waits."""
EXPIRY_IN_DELAY: Final = 0.9
DELAY: Final = 0.5

MANY: Final = 9
"""More deliveries than any case has."""

EARLIER = Failure("FirstError", "the first time", "Traceback 1")
ERROR = Failure("ValueError", "no such customer: 'Ünïcödé-名前'", "Traceback …\nValueError")

ENDINGS: dict[str, Ending] = {
    "complete": COMPLETE,
    "abandon": Abandon(),
    "abandon with error": Abandon(0.0, ERROR),
    "abandon with delay": Abandon(DELAY, ERROR),
    "fail": Abandon(0.0, EARLIER),
    "give back": GIVE_BACK,
    "release": GIVE_BACK,
    "defer": Defer(),
    "reject": DeadLetter("odd"),
    "reject with error": DeadLetter("bad", "no such customer", ERROR),
    "lock ends": LOCK_ENDED,
    "look": DeadLetter("looked at"),
}
"""How a delivery ends, by name. ``release`` releases its session; ``look`` shows the history, in a dead letter."""

LAST = ("abandon", "abandon with error", "abandon with delay", "give back", "reject with error", "reject", "lock ends")

Life = Literal["first", "in a session", "deferred", "redriven", "dead"]

LIVES: tuple[Life, ...] = ("first", "in a session", "deferred", "redriven", "dead")

Step = Literal["receive", "wait", "redrive", "receive deferred", "receive dead", "look"]


@dataclass(frozen=True)
class Case:
    """One message: how its deliveries end."""

    life: Life
    earlier: tuple[str, ...]
    """How its deliveries before the last one end; of a dead letter, those by which it died."""
    end: str
    """How the last one ends; ``""`` if it waits in place of that."""
    most: int = MANY
    """``max_deliveries`` of its queue."""
    lowered: int = 0
    """``max_deliveries`` from then on when the last delivery begins, if it is lowered."""
    expires: Literal["", "under the lock", "in the delay", "waiting"] = ""

    @property
    def name(self) -> str:
        """The case in words."""
        parts = [
            self.life,
            *(f"{one or 'wait'}," for one in self.earlier),
            f"most {self.most}:" if self.most != MANY else "",
            f"lowered to {self.lowered}:" if self.lowered else "",
            f"expires {self.expires}:" if self.expires else "",
            self.end or "wait",
        ]
        return " ".join(part for part in parts if part)

    @property
    def steps(self) -> list[tuple[Step, str]]:
        """What is done with it, round after round, and how the delivery ends that begins then."""
        earlier: list[tuple[Step, str]] = [("receive", end) if end else ("wait", "") for end in self.earlier]
        if self.life == "redriven":
            earlier = [("receive", "fail"), ("receive", "reject"), ("redrive", ""), *earlier]
        if not self.end:
            return [*earlier, ("wait", ""), ("look", "look")]
        last: dict[Life, Step] = {"deferred": "receive deferred", "dead": "receive dead"}
        return [*earlier, (last.get(self.life, "receive"), self.end), ("look", "look")]

    @property
    def queue(self) -> tuple[object, ...]:
        """What messages have in common that can be in one queue: nobody receives from it while one has to wait."""
        waits = tuple(number for number, (step, _) in enumerate(self.steps) if step == "wait")
        return self.life, waits, self.most, self.lowered

    @property
    def expires_in(self) -> float | None:
        """When it expires."""
        if self.life == "dead":
            waits = [number for number, end in enumerate(self.earlier) if not end]
            return waits[0] * ROUND + EXPIRY_AT if waits else None
        if not self.expires:
            return None
        begins = len(self.earlier) * ROUND
        return begins + (EXPIRY_IN_DELAY if self.expires == "in the delay" else EXPIRY_AT)


def cases_of(life: Life) -> list[Case]:
    """Return the table of cases of one kind."""
    return list(dict.fromkeys(_CASES[life]()))


def _first() -> Iterator[Case]:
    earlier: tuple[str, ...]
    for earlier in (
        (),
        ("lock ends",),
        ("fail",),
        ("abandon",),
        ("give back",),
        ("lock ends", "fail"),
        ("abandon", "fail"),
        ("fail", "lock ends"),
    ):
        counted = sum(end != "give back" for end in earlier)
        for most, end in itertools.product((MANY, counted + 1), (*LAST, "complete")):
            yield Case("first", earlier, end, most)
    for earlier in ((), ("lock ends",)):
        for most in (MANY, len(earlier) + 1):
            yield from (Case("first", earlier, end, most, expires="under the lock") for end in LAST)
            yield Case("first", earlier, "abandon with delay", most, expires="in the delay")
    for earlier in ((), ("lock ends",), ("fail",), ("give back",), ("abandon",), ("lock ends", "fail")):
        yield Case("first", earlier, "", expires="waiting")
    for end in ("abandon with error", "give back", "lock ends"):
        yield Case("first", ("fail",) * 3, end, lowered=2)


def _in_a_session() -> Iterator[Case]:
    for earlier in ((), ("lock ends",), ("fail",)):
        for most, end in itertools.product((MANY, len(earlier) + 1), (*LAST, "release")):
            yield Case("in a session", earlier, end, most)
    for end in ("release", "give back", "abandon", "lock ends"):
        yield Case("in a session", (), end, expires="under the lock")


def _deferred() -> Iterator[Case]:
    for most, end in itertools.product((MANY, 2), (*LAST, "defer", "complete")):
        yield Case("deferred", (), end, most)
    for end in ("abandon", "give back", "lock ends"):
        yield Case("deferred", (), end, expires="under the lock")
    for earlier in ((), ("lock ends",)):
        yield from (Case("first", earlier, "defer", most) for most in (MANY, len(earlier) + 1))


def _redriven() -> Iterator[Case]:
    for earlier in ((), ("lock ends",), ("fail",)):
        for most, end in itertools.product((MANY, len(earlier) + 1), LAST):
            yield Case("redriven", earlier, end, most)


def _dead() -> Iterator[Case]:
    for earlier, most in (
        (("reject",), MANY),
        (("abandon with error",), 1),
        (("lock ends",), 1),
        (("fail", "abandon"), 2),
        (("",), MANY),
        (("lock ends", ""), MANY),
    ):
        yield from (Case("dead", earlier, end, most) for end in (*LAST, "complete"))


_CASES = {"first": _first, "in a session": _in_a_session, "deferred": _deferred, "redriven": _redriven, "dead": _dead}


class Expected:
    """What becomes of the message of one case by the rule, without a store."""

    def __init__(self, case: Case) -> None:
        self.most = MANY if case.life == "redriven" else case.most
        self.notes = Notes()
        self.place: Place = "ready"
        self.expires_at = math.inf if case.expires_in is None else case.expires_in
        self.due_at = 0.0
        self.reported: list[tuple[int, str | None]] = []
        """The count and the reason of a death that no answer to a verdict tells."""
        self._is_locked = self._was_deferred = False

    def lock(self) -> None:
        """Begin a delivery: until it ends, the message doesn't expire."""
        self._is_locked = True

    def wait(self, now: float) -> None:
        """Let time pass until *now*."""
        if self._is_locked:
            return
        if self.place in ("ready", "delayed") and self.expires_at <= now:
            self._apply(expired(self.notes.deliveries), self.expires_at, is_told=False)
        elif self.place == "delayed" and self.due_at <= now:
            self.place = "ready"

    def end(self, ending: Ending, now: float, *, is_told: bool = True) -> Outcome:
        """End a delivery; *is_told* if a verdict with an answer does."""
        is_dead = self.place == "dead"
        number = self.notes.deliveries + (not is_dead)
        delivered = EndedDelivery(number, self.expires_at <= now, self._was_deferred, is_dead)
        outcome = outcome_of(ending, delivered, self.most, now)
        self._apply(outcome, now, is_told=is_told)
        return outcome

    def redrive(self, most: int) -> None:
        """Put a dead letter back into its queue, of which *most* is ``max_deliveries`` from then on."""
        self.notes, self.place, self.expires_at, self.most = self.notes.redriven(), "ready", math.inf, most

    def _apply(self, outcome: Outcome, now: float, *, is_told: bool) -> None:
        self._is_locked, self._was_deferred = False, outcome.place == "deferred"
        self.place, self.due_at = outcome.place, now + outcome.delay
        self.notes = noted(self.notes, outcome, now)
        if outcome.answer.dead and not is_told:
            self.reported.append((outcome.deliveries, self.notes.reason))

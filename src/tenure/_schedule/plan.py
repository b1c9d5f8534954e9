"""What a schedule says (``Plan``), and what its store keeps of it (``Record``)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Literal, get_args

from tenure._checks import check_seconds
from tenure._foreign import Unreadable, a_flag, an_object, read_object, seconds
from tenure._queue.checks import check_text
from tenure.errors import ConfigError

Missed = Literal[
    "skip",  # a slot that comes too late is not sent
    "once",  # of several that are due, the newest is sent
    "all",  # each is sent, if there are not very many
]
"""What becomes of slots that could not be sent in time."""

EVERY_MIN = 0.1
"""The shortest interval in seconds."""

EXPRESSION_MAX = 100
"""Characters of a cron expression."""

FORMAT = 1

_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The slots of a schedule, and what becomes of those that are missed.

    Attributes:
        every: A cron expression, or an interval in seconds.
        timezone: The time zone of the cron expression.
        missed: See ``Missed``.
        missed_after: Seconds after which a slot counts as missed, for ``skip``.
    """

    every: str | float
    timezone: str = "UTC"
    missed: Missed = "once"
    missed_after: float = 60.0


def plan_of(every: object, timezone: object, missed: object, missed_after: object) -> Plan:
    """Return the plan that a program describes so.

    Raises:
        ConfigError: One of the values can't be part of a plan. (Whether a cron expression and a time zone can be read
            is found out by :func:`tenure._schedule.slots.slots_of`.)
    """
    if missed not in get_args(Missed):
        raise ConfigError(f"missed must be one of {', '.join(map(repr, get_args(Missed)))}, not {missed!r:.80}")
    check_seconds("missed_after", missed_after, above=0.0)
    check_text("timezone", timezone)
    assert isinstance(timezone, str)
    assert isinstance(missed_after, (int, float))
    return Plan(_every_of(every, timezone), timezone, missed, float(missed_after))  # type: ignore[arg-type]


def _every_of(every: object, timezone: str) -> str | float:
    if isinstance(every, str):
        text = " ".join(every.split())
        text = _NICKNAMES.get(text.lower(), text)
        if len(text) > EXPRESSION_MAX:
            raise ConfigError(
                f"the cron expression has {len(text)} characters, and may have {EXPRESSION_MAX}; use several schedules"
            )
        if not text.isascii():
            raise ConfigError(f"the cron expression {every!r:.120} has characters that are not ASCII")
        return text
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    check_seconds("every", seconds, least=EVERY_MIN, what="a cron expression, a timedelta, or a number of seconds")
    assert isinstance(seconds, (int, float))
    if round(seconds * 1_000) / 1_000 != seconds:
        raise ConfigError(f"every must be whole milliseconds, not {seconds!r} s; try {round(seconds, 3)}")
    if timezone != "UTC":
        raise ConfigError(
            f"timezone ({timezone!r}) is for cron expressions; an interval ({seconds:g} s) counts from the Unix epoch. "
            "Write a cron expression such as '0 3 * * *', or omit the time zone"
        )
    return float(seconds)


@dataclass(frozen=True, slots=True)
class Record:
    """What a store keeps of a schedule. Times in Unix seconds by the store's clock.

    Attributes:
        plan: The plan of the program that was started last; all that run go by it.
        settled_until: All slots up to here are settled: sent, or skipped.
        last: The newest slot that was sent; None if none was yet.
        paused: Whether slots are skipped until it is resumed.
    """

    plan: Plan
    settled_until: float
    last: float | None = None
    paused: bool = False

    def encoded(self) -> str:
        """Return it as text. Equal records have equal texts, because stores compare the texts."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def decoded(cls, text: str, schedule: str) -> Record:
        """Return the record that is kept as *text* for *schedule*.

        Raises:
            ConfigError: It is not of this version.
        """
        try:
            return cls._read(text)
        except (Unreadable, ConfigError):
            pass
        raise ConfigError(
            f"the store keeps of the schedule {schedule!r} what this tenure can't read: {text!r:.120}; a newer one may "
            "have written it. Use that one here, or remove the schedule"
        )

    @classmethod
    def _read(cls, text: str) -> Record:
        """Return the record in *text*; a field that is missing, unknown or impossible is Unreadable or ConfigError."""
        found = read_object(text)
        if found.keys() != _KEPT or found["format"] != FORMAT:
            raise Unreadable("it is not of this format")
        given = an_object(found["plan"])
        if given.keys() != _PLANNED:
            raise Unreadable("its plan is not of this format")
        last = found["last"]
        return cls(
            plan_of(given["every"], given["timezone"], given["missed"], given["missed_after"]),
            seconds(found["settled_until"]),
            None if last is None else seconds(last),
            a_flag(found["paused"]),
        )


_PLANNED = {one.name for one in fields(Plan)}
_KEPT = {"format", *(one.name for one in fields(Record))}

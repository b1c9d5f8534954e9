"""The slots of a plan: the moments at which a message is sent, as Unix seconds.

A cron expression is read by cronsim, which has the rules of Debian's cron also when clocks change: of an expression
with a fixed hour, a slot that falls into the hour that is left out comes right after it, and one that falls into the
hour that is repeated comes once. Intervals count from the Unix epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import Protocol

from tenure._checks import LONGEST
from tenure._schedule.plan import Plan
from tenure.errors import BackendNotInstalled, ConfigError

SPAN = 64.0
"""Seconds before a moment in which the newest slots are looked for first; then in four times as many, and so on."""

MANY = 1_000
"""How many slots are read at once in search of the newest: each takes some microseconds. More than are ever wanted."""


class Slots(Protocol):
    """The slots of one plan."""

    zone: tzinfo
    """The time zone in which they are shown."""

    def after(self, moment: float) -> Iterator[float]:
        """Yield the slots after *moment*, in order, up to the latest time. The first is found in milliseconds."""
        ...


class Intervals:
    """Slots at even intervals, from the Unix epoch."""

    zone: tzinfo = UTC

    def __init__(self, every: float) -> None:
        self._every = round(every * 1_000)

    def after(self, moment: float) -> Iterator[float]:
        number = int(moment * 1_000 // self._every)
        while number * self._every / 1_000 <= moment:
            number += 1
        while (slot := number * self._every / 1_000) <= LONGEST:
            yield slot
            number += 1


class CronSlots:
    """The slots of a cron expression."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._expression = expression
        self.zone = zone

    def after(self, moment: float) -> Iterator[float]:
        from cronsim import CronSim

        if moment >= LONGEST:
            return
        newest = moment
        for slot in CronSim(self._expression, datetime.fromtimestamp(moment, self.zone)):
            at = slot.timestamp()
            if at > LONGEST:
                return
            if at > newest:  # of a repeated hour, it may begin with the first pass, which is over
                newest = at
                yield at


@lru_cache(maxsize=1_000)
def slots_of(plan: Plan) -> Slots:
    """Return the slots of *plan*.

    Raises:
        ConfigError: The cron expression or the time zone can't be read, or there will never be a slot.
        BackendNotInstalled: It has a cron expression, and cronsim is not installed.
    """
    if not isinstance(plan.every, str):
        return Intervals(plan.every)
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise BackendNotInstalled(
            "cron expressions need the package 'cronsim', which is not installed; run: pip install 'tenure[cron]'"
        ) from error
    zone = _zone(plan.timezone)
    try:
        first = next(CronSim(plan.every, datetime(2024, 1, 1, tzinfo=zone)), None)
    except (CronSimError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the cron expression {plan.every!r} can't be read ({error}); five fields, as in '0 3 * * *', are minute, "
            "hour, day of the month, month, day of the week; a sixth before them would be the second"
        ) from error
    if first is None:
        raise ConfigError(f"the cron expression {plan.every!r} names no moment in the next 50 years")
    return CronSlots(plan.every, zone)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"there is no time zone {name!r} here; zones are called as in 'Europe/Berlin', and come with the system or "
            "with the package tzdata"
        ) from error


def newest(slots: Slots, after: float, until: float, most: int) -> list[float]:
    """Return the newest *most* slots after *after* and up to *until*, in order."""
    dense: float | None = None  # from here on, there are many
    sparse = until  # from here on, there are too few
    begin = max(after, until - SPAN)
    while True:
        found = list(islice(takewhile(lambda slot: slot <= until, slots.after(begin)), MANY))
        if len(found) == MANY:
            dense = begin
        elif len(found) >= most or begin <= after:
            return found[-most:]
        else:
            sparse = begin
        begin = max(after, until - (until - sparse) * 4) if dense is None else (dense + sparse) / 2


def first_after(slots: Slots, moment: float) -> float | None:
    """Return the first slot after *moment*, if there is one."""
    return next(islice(slots.after(moment), 1), None)


def id_of(schedule: str, slot: float) -> str:
    """Return the id of the message of a slot: ``nightly@2026-10-25T02:00:00Z``."""
    return f"{schedule}@{_utc(slot)}"


def _utc(slot: float) -> str:
    at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=round(slot * 1_000))
    return at.isoformat(timespec="milliseconds" if at.microsecond else "seconds").replace("+00:00", "Z")


def shown(slot: float, zone: tzinfo) -> datetime:
    """Return a slot as a moment in *zone*."""
    return (datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=round(slot * 1_000))).astimezone(zone)

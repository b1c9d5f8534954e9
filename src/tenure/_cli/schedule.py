"""``tenure schedule``: list the schedules of a store, pause and resume them, forget them; show the times of one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure._cli.completion import schedule_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import Branching, complete, connect_existing, duration, json_option, on_option
from tenure._cli.output import ALARM, Cell, print_json, print_line, print_table
from tenure._one_line import one_line
from tenure.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tenure import Backend, Schedules, ScheduleStatus

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

COLUMNS = ("SCHEDULE", "QUEUE", "EVERY", "TIMEZONE", "LAST", "NEXT", "MISSED")

COUNT_MAX = 1_000


def _name_argument(function: AnyFunction) -> AnyFunction:
    """Add NAME, and --queue for a name that several queues have."""
    function = click.option(
        "--queue", metavar="QUEUE", help="The queue to which it sends, if schedules of several queues have this name."
    )(function)
    return click.argument("name", metavar="NAME", shell_complete=schedule_names)(function)


@click.command("pause", cls=Command)
@_name_argument
@on_option
@json_option
def pause(name: str, queue: str | None, url: str, as_json: bool) -> int:
    """Skip the times of the schedule NAME, in all processes and at once, until it is resumed."""
    _print_one(complete(_change(url, name, queue, lambda schedules: schedules.pause(name))), as_json)
    return Exit.DONE


@click.command("resume", cls=Command)
@_name_argument
@on_option
@json_option
def resume(name: str, queue: str | None, url: str, as_json: bool) -> int:
    """Let the schedule NAME go on with its next time, in all processes.

    It also begins anew one whose last time is in the future, after the store's clock was wrong and was set back.
    """
    _print_one(complete(_change(url, name, queue, lambda schedules: schedules.resume(name))), as_json)
    return Exit.DONE


@click.command("remove", cls=Command)
@_name_argument
@on_option
def remove(name: str, queue: str | None, url: str) -> int:
    """Forget the schedule NAME, after it was removed from the program.

    A process that still runs it makes it anew within a minute. To stop it in running processes, pause it.
    """
    complete(_change(url, name, queue, lambda schedules: schedules.remove(name)))
    print_line(f"removed {one_line(name)}; a process that still runs it makes it anew within a minute")
    return Exit.DONE


@click.command("times", cls=Command)
@click.argument("every", metavar="EVERY")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="Of the cron expression.")
@click.option(
    "--count", type=click.IntRange(1, COUNT_MAX), default=5, show_default=True, metavar="N", help="How many times."
)
@json_option
def times(every: str, timezone: str, count: int, as_json: bool) -> int:
    """Show the next times of EVERY, a cron expression in quotes or an interval (90, 5m, 1d). No store is asked."""
    from tenure._schedule.plan import plan_of
    from tenure._schedule.slots import shown, slots_of

    slots = slots_of(plan_of(_every_of(every), timezone, "once", 60.0))
    found = [shown(slot, slots.zone).isoformat() for slot in islice(slots.after(time.time()), count)]
    if as_json:
        print_json(found)
    else:
        for one in found:
            print_line(one)
    return Exit.DONE


def _every_of(text: str) -> str | float:
    if " " in text.strip() or text.startswith("@"):
        return text
    try:
        return duration(text)
    except click.BadParameter as error:
        raise click.UsageError(
            f"EVERY is neither a cron expression, as '0 3 * * *' in quotes, nor an interval: {error.message}"
        ) from None


@click.command("schedule", cls=Branching, branches=(pause, resume, remove, times))
@click.argument("name", required=False, shell_complete=schedule_names)
@on_option
@json_option
def command(name: str | None, url: str, as_json: bool) -> int:
    """List the schedules of the store, or those called NAME: their last time that was sent, and their next one.

    A schedule is listed once a process has run it, and stays until it is removed. Times are in its time zone. LAST and
    NEXT are by the clock of the store; NEXT is in the past while no process runs it.

    Ends with 3 if there is no schedule NAME. A NAME that equals one of the commands below is given after --:
    tenure schedule -- NAME.
    """
    found = complete(_list(url, name))
    if as_json:
        print_json([_fields(one) for one in found])
    elif found:
        _print_table(found)
    return Exit.DONE


async def _list(url: str, name: str | None) -> list[ScheduleStatus]:
    async with connect_existing(url) as backend:
        found = await backend.schedules()
    if name is None:
        return found
    return _called(name, found)


def _called(name: str, found: list[ScheduleStatus], where: str = "") -> list[ScheduleStatus]:
    if named := [one for one in found if one.name == name]:
        return named
    hint = nearest(name, [one.name for one in found]) or "; list the schedules with: tenure schedule"
    raise Failure(Exit.VACANT, f"there is no schedule {name!r}{where or ' on this store'}{hint}")


async def _change(
    url: str, name: str, queue: str | None, change: Callable[[Schedules], Coroutine[Any, Any, ScheduleStatus | None]]
) -> ScheduleStatus | None:
    async with connect_existing(url) as backend:
        return await change(backend.queue(await _queue_of(backend, name, queue)).schedules)


async def _queue_of(backend: Backend, name: str, queue: str | None) -> str:
    """Return the queue of the only schedule called *name*; or *queue*, if it has one called so."""
    if queue is None:
        found = await backend.schedules()
    else:
        found = await backend.queue(queue).schedules.list()
    queues = [one.queue for one in _called(name, found, "" if queue is None else f" of the queue {queue!r}")]
    if len(queues) > 1:
        raise ConfigError(f"{len(queues)} queues have a schedule {name!r}; give --queue: {', '.join(queues)}")
    return queues[0]


def _print_one(status: ScheduleStatus | None, as_json: bool) -> None:
    assert status is not None
    if as_json:
        print_json(_fields(status))
    else:
        _print_table([status])


def _print_table(found: list[ScheduleStatus]) -> None:
    print_table(COLUMNS, [_row(one) for one in found], whole=("LAST", "NEXT"))


def _row(one: ScheduleStatus) -> tuple[str | Cell, ...]:
    following: str | Cell = _moment(one, one.next)
    if one.problem or one.paused:
        following = Cell("; ".join(filter(None, ("paused" if one.paused else "", one.problem))), ALARM)
    return (
        one.name,
        one.queue,
        one.every if isinstance(one.every, str) else f"{one.every:.15g} s",
        one.timezone,
        _moment(one, one.last),
        following,
        f"skip after {one.missed_after:.15g} s" if one.missed == "skip" else one.missed,
    )


def _fields(one: ScheduleStatus) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "last": _moment(one, one.last) or None, "next": _moment(one, one.next) or None}


def _moment(one: ScheduleStatus, moment: float | None) -> str:
    if moment is None:
        return ""
    timespec = "seconds" if moment == int(moment) else "milliseconds"
    return datetime.fromtimestamp(moment, _zone(one)).isoformat(timespec=timespec)


def _zone(one: ScheduleStatus) -> tzinfo:
    from zoneinfo import ZoneInfo

    try:
        return UTC if one.timezone == "UTC" else ZoneInfo(one.timezone)
    except (KeyError, ValueError, OSError):  # this machine doesn't have it
        return UTC

"""``tenure queue declare|pause|resume``: change the settings of a queue, for all its users."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import (
    complete,
    connect,
    connect_existing,
    duration,
    json_option,
    never_used,
    on_option,
    seconds_option,
)
from tenure._cli.output import ALARM, Cell, print_json, print_line, print_table
from tenure._cli.queue_commands import name_argument
from tenure._one_line import one_line

if TYPE_CHECKING:
    from tenure import QueueSettings, Rate

SETTINGS = ("LOCK", "MAX DELIVERIES", "DEDUPE WINDOW", "BODY MAX", "DEAD RETENTION")
LIMITS = ("MAX LOCKED", "RATE", "SESSION RATE", "")
"""The last one is the column of the pause."""


def _retention(text: str) -> float:
    return math.inf if text == "forever" else duration(text)


_retention.__name__ = "retention"


def _most(text: str) -> float:
    if text == "none":
        return math.inf
    if not re.fullmatch(r"[0-9]{1,12}", text) or not int(text):
        raise click.BadParameter(f"{text!r} is not a number of messages; write a whole number from 1 on, or none")
    return _checked("max_locked", int(text))


_most.__name__ = "number of messages"


def _rate(text: str) -> Rate:
    if text == "none":
        return math.inf
    count, slash, time = text.partition("/")
    if not slash or not re.fullmatch(r"[0-9]{1,12}", count):
        raise click.BadParameter(f"{text!r} is not a rate; write COUNT/TIME (100/1m: 100 in each minute), or none")
    return _checked("rate", (int(count), duration(time)))


_rate.__name__ = "rate"

T = TypeVar("T")


def _checked(setting: str, value: T) -> T:
    """Return *value* if a queue can have it."""
    from tenure import ConfigError, QueueSettings

    try:
        QueueSettings(**{setting: value})  # type: ignore[arg-type]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command("declare", cls=Command)
@name_argument
@on_option
@seconds_option("--lock", "How long a received message belongs to its consumer, unless its lock is renewed.")
@click.option(
    "--max-deliveries", type=click.IntRange(min=1), metavar="N", help="Dead-letter a message after N deliveries."
)
@seconds_option("--dedupe-window", "How long the id of a message is remembered.")
@click.option("--body-max", type=click.IntRange(min=1), metavar="BYTES", help="The largest body that may be sent.")
@click.option("--dead-retention", type=_retention, metavar="S", help="How long a dead letter is kept: 30d, or forever.")
@click.option(
    "--max-locked", type=_most, metavar="N", help="Let all consumers together have N messages at once; or none."
)
@click.option(
    "--rate",
    type=_rate,
    metavar="N/S",
    help="Let all consumers together receive N messages in that time: 100/1m, or none.",
)
@click.option("--session-rate", type=_rate, metavar="N/S", help="The same for each session by itself: 1/10s, or none.")
@json_option
def declare(name: str, url: str, as_json: bool, **options: Any) -> int:
    """Change settings of the queue NAME for all its users, and show all of them. Creates the queue if there is none.

    Other settings are not changed. A program that expects another value of a setting is refused at its next start.
    """
    changes = {setting: value for setting, value in options.items() if value is not None}
    if not changes:
        raise click.UsageError(
            f"give a setting to change, for example --lock 30; to show the settings: tenure queue {name}"
        )
    settings = complete(_declare(name, url, changes))
    if as_json:
        print_json({"queue": name, "settings": settings_record(settings)})
    else:
        print_settings(settings)
    return Exit.DONE


@click.command("pause", cls=Command)
@name_argument
@on_option
@json_option
def pause(name: str, url: str, as_json: bool) -> int:
    """Let no consumer of the whole fleet receive messages of the queue NAME, until it is resumed.

    Messages that were received stay with their consumers, and messages can be sent. Ends with 3 if there is no queue
    NAME.
    """
    return complete(_set_paused(name, url, as_json, paused=True))


@click.command("resume", cls=Command)
@name_argument
@on_option
@json_option
def resume(name: str, url: str, as_json: bool) -> int:
    """Let consumers receive messages of the queue NAME again. Ends with 3 if there is no queue NAME."""
    return complete(_set_paused(name, url, as_json, paused=False))


async def _set_paused(name: str, url: str, as_json: bool, *, paused: bool) -> int:
    async with connect_existing(url) as backend:
        if unused := await never_used(backend, name):
            raise Failure(Exit.VACANT, unused)
        queue = backend.queue(name)
        await queue.declare(paused=paused)
        stats = await queue.stats()
    if as_json:
        print_json({"queue": name, **dataclasses.asdict(stats)})
    else:
        print_line(f"{'paused' if paused else 'resumed'} {one_line(name)}; it holds {stats}")
    return Exit.DONE


async def _declare(name: str, url: str, changes: dict[str, Any]) -> QueueSettings:
    async with connect(url) as backend:
        return await backend.queue(name).declare(**changes)


def settings_record(settings: QueueSettings) -> dict[str, object]:
    """Return *settings* for JSON: null means for ever."""
    found = dataclasses.asdict(settings)
    return {name: None if value == math.inf else value for name, value in found.items()}


def rate_text(rate: Rate) -> str:
    """Return *rate* for people."""
    return f"{rate[0]:,} in {rate[1]:.15g} s" if isinstance(rate, tuple) else "none"


def print_settings(settings: QueueSettings) -> None:
    """Print *settings* for people."""
    kept = "forever" if settings.dead_retention == math.inf else f"{settings.dead_retention:.15g} s"
    row = (
        f"{settings.lock:.15g} s",
        str(settings.max_deliveries),
        f"{settings.dedupe_window:.15g} s",
        f"{settings.body_max:,} bytes",
        kept,
    )
    print_table(SETTINGS, [row], numbers=SETTINGS)
    if settings.is_limited:
        most = "none" if settings.max_locked == math.inf else f"{settings.max_locked:,}"
        paused = Cell("paused", ALARM) if settings.paused else ""
        limits = (most, rate_text(settings.rate), rate_text(settings.session_rate), paused)
        print_table(LIMITS, [limits], numbers=LIMITS)

"""``tenure queue declare``: change the settings of a queue, for all its users."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect, duration, json_option, on_option, seconds_option
from tenure._cli.output import print_json, print_table
from tenure._cli.queue_commands import name_argument

if TYPE_CHECKING:
    from tenure import QueueSettings

SETTINGS = ("LOCK", "MAX DELIVERIES", "DEDUPE WINDOW", "BODY MAX", "DEAD RETENTION")


def _retention(text: str) -> float:
    return math.inf if text == "forever" else duration(text)


_retention.__name__ = "retention"


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


async def _declare(name: str, url: str, changes: dict[str, Any]) -> QueueSettings:
    async with connect(url) as backend:
        return await backend.queue(name).declare(**changes)


def settings_record(settings: QueueSettings) -> dict[str, object]:
    """Return *settings* for JSON: null means for ever."""
    found = dataclasses.asdict(settings)
    return {name: None if value == math.inf else value for name, value in found.items()}


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

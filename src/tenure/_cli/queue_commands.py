"""``tenure queue peek|purge|delete``: show messages of a queue, remove them, or delete the queue."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure._cli.completion import queue_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect_existing, duration, json_option, never_used, on_option, with_queue
from tenure._cli.output import body_text, message_fields, print_json, print_line, print_table, seconds
from tenure._one_line import one_line

if TYPE_CHECKING:
    from tenure import LiveMessage

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

BODY_SHOWN, BODY_LEAST = 40, 12
"""Characters of a body in the table: at most, and on a narrow terminal."""

COLUMNS = ("SEQUENCE", "ID", "STATE", "DELIVERIES", "AGE", "ENDS IN", "LOCKED BY", "FOR", "SESSION", "BODY")


def name_argument(function: AnyFunction) -> AnyFunction:
    """Add NAME, which is required; the error explains how to count a queue that has the name of a command."""

    def check(ctx: click.Context, param: click.Parameter, name: str | None) -> str:
        if name is None and not ctx.resilient_parsing:
            word = (ctx.info_name or "").split()[-1]
            raise click.UsageError(
                f"name the queue: tenure queue {word} NAME (to count a queue called {word!r}: tenure queue -- {word})",
                ctx,
            )
        return name or ""

    return click.argument("name", required=False, metavar="NAME", callback=check, shell_complete=queue_names)(function)


def which(*states: str) -> Callable[[AnyFunction], AnyFunction]:
    """Add the options that choose messages, in one of these *states*."""

    def add(function: AnyFunction) -> AnyFunction:
        for option in (
            click.option(
                "--older-than",
                type=duration,
                metavar="S",
                help="Messages sent longer ago than this, by this machine's clock: 12h, 7d.",
            ),
            click.option("--session", metavar="TEXT", help="Messages of this session."),
            click.option(
                "--sequence",
                "sequences",
                type=int,
                multiple=True,
                metavar="N",
                help="Messages with these sequence numbers.",
            ),
            click.option("--id", "ids", multiple=True, metavar="TEXT", help="Messages with these ids."),
            click.option(
                "--state", "states", type=click.Choice(states), multiple=True, help="Messages in one of these states."
            ),
        ):
            function = option(function)
        return function

    return add


def given(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the *chosen* options as arguments of the library."""
    found = {key: value for key, value in chosen.items() if value not in (None, ())}
    if "older_than" in found:
        found["sent_before"] = max(0.0, time.time() - found.pop("older_than"))  # nothing is older than that clock
    return found


@click.command("peek", cls=Command)
@name_argument
@on_option
@which("ready", "locked", "delayed", "deferred")
@click.option(
    "--after", type=click.IntRange(min=0), default=0, metavar="N", help="Messages after the sequence number N."
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, metavar="N", help="At most N.")
@json_option
def peek(name: str, url: str, after: int, limit: int, as_json: bool, **chosen: Any) -> int:
    """Show the messages in the queue NAME, oldest first. They are neither locked nor counted as delivered.

    ENDS IN is the time until the lock of a locked message ends unless it is renewed, or until a delayed one can be
    received. LOCKED BY is the process that has it (HOST:PID), and FOR is how long that has had it, or its session. Long
    bodies are cut; --json has them whole. Dead letters: tenure dead list NAME.
    """
    shown = complete(with_queue(url, name, lambda queue: queue.peek(limit, after=after, **given(chosen))))
    if as_json:
        print_json([message_fields(one) for one in shown])
    elif shown:
        now = time.time()
        rows = [_row(one, now) for one in shown]
        filled = [place for place in range(len(COLUMNS)) if any(row[place] for row in rows)]
        lines = [[line[place] for place in filled] for line in (COLUMNS, *rows)]
        print_table(lines[0], _cut(lines)[1:])
    return Exit.DONE


@click.command("purge", cls=Command)
@name_argument
@on_option
@which("ready", "delayed", "deferred")
@click.option("--all", "every", is_flag=True, help="All messages that are not locked.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@json_option
def purge(name: str, url: str, every: bool, dry_run: bool, as_json: bool, **chosen: Any) -> int:
    """Remove messages from the queue NAME for good: those chosen, or --all. The queue may be in use meanwhile.

    Locked messages stay, because a consumer has them, and so do dead letters and messages sent meanwhile.
    """
    choices = "--state, --id, --sequence, --session or --older-than"
    if not every and not given(chosen):
        raise click.UsageError(f"no messages are chosen; choose with {choices}, or give --all")
    if every and given(chosen):
        raise click.UsageError(f"--all removes all, and {choices} choose some; give either")
    count = complete(with_queue(url, name, lambda queue: queue.purge(dry_run=dry_run, **given(chosen))))
    if as_json:
        print_json({"queue": name, "purged": 0 if dry_run else count, "would_be": count})
    else:
        print_line(f"{count} would be removed" if dry_run else f"{count} removed")
    return Exit.DONE


@click.command("delete", cls=Command)
@name_argument
@on_option
@click.option("--force", is_flag=True, help="Delete it even if it has messages or dead letters.")
@json_option
def delete(name: str, url: str, force: bool, as_json: bool) -> int:
    """Delete the queue NAME, with its settings, the states of its sessions and its remembered ids.

    Ends with 1, and changes nothing, if it has messages or dead letters, unless --force is given.
    """
    return complete(_delete(name, url, as_json, force=force))


async def _delete(name: str, url: str, as_json: bool, *, force: bool) -> int:
    from tenure import QueueNotEmpty

    async with connect_existing(url) as backend:
        if unused := await never_used(backend, name):
            raise Failure(Exit.VACANT, unused)
        try:
            deleted = await backend.queue(name).delete(force=force)
        except QueueNotEmpty as error:
            raise Failure(Exit.BROKEN, f"{error} (--force)") from error
    if as_json:
        print_json({"queue": name, "deleted": dataclasses.asdict(deleted)})
    else:
        print_line(f"deleted {one_line(name)}; it held {deleted}")
    return Exit.DONE


def _row(one: LiveMessage, now: float) -> tuple[str, ...]:
    ends = one.locked_until if one.locked_until is not None else one.due_at
    return (
        str(one.sequence),
        one.id,
        one.state,
        str(one.delivery_count),
        seconds(max(0.0, now - one.enqueued_at)),
        "" if ends is None else seconds(max(0.0, ends - now)),
        one.locked_by or "",
        "" if one.locked_since is None else seconds(max(0.0, now - one.locked_since)),
        one.session or "",
        body_text(one.body),
    )


def _cut(lines: list[list[str]]) -> list[list[str]]:
    """Cut the bodies, which stand last, so that a line fits the terminal if that is not very narrow."""
    shown = BODY_SHOWN
    if sys.stdout.isatty():
        others = sum(3 + max(len(line[place]) for line in lines) for place in range(len(lines[0]) - 1))
        shown = max(BODY_LEAST, shutil.get_terminal_size().columns - others)
    return [[*rest, body if len(body) <= shown else f"{body[: shown - 1]}…"] for *rest, body in lines]

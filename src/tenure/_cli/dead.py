"""``tenure dead``: list dead letters, show one, put them back, remove them."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure._cli.completion import queue_names
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import HelpfulGroup, complete, duration, json_option, on_option, with_queue
from tenure._cli.output import body_text, message_fields, print_json, print_line, print_table, timestamp
from tenure._one_line import one_line

if TYPE_CHECKING:
    from tenure import DeadMessage, Queue

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@click.group("dead", cls=HelpfulGroup)
def command() -> None:
    """List dead letters, put them back, or remove them. They are kept until they are put back or removed."""


def _which(function: AnyFunction) -> AnyFunction:
    """Add the options that choose letters."""
    for option in (
        click.option("--reason", metavar="TEXT", help="Dead letters with this reason."),
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
            "--older-than",
            type=duration,
            metavar="S",
            help="Messages dead-lettered longer ago than this, by this machine's clock: 12h, 7d.",
        ),
    ):
        function = option(function)
    return function


@command.command("list")
@click.argument("queue", shell_complete=queue_names)
@on_option
@_which
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="At most N.")
@json_option
def show_all(queue: str, url: str, limit: int, as_json: bool, **chosen: Any) -> int:
    """List the dead letters of QUEUE, oldest first."""
    letters = complete(with_queue(url, queue, lambda found: found.dead_letters.peek(limit, **_given(chosen))))
    if as_json:
        print_json([_record(letter) for letter in letters])
    elif letters:
        rows = [
            (str(one.sequence), one.id, one.reason, str(one.delivery_count), _died(one), _why(one)) for one in letters
        ]
        print_table(("SEQ", "ID", "REASON", "TRIES", "DIED", "WHY"), rows, numbers=("SEQ", "TRIES"), whole=("DIED",))
    return Exit.DONE


@command.command("show")
@click.argument("queue", shell_complete=queue_names)
@click.argument("letter")
@on_option
@json_option
@click.option("--body", "only_body", is_flag=True, help="Write only the body, byte for byte.")
def show_one(queue: str, letter: str, url: str, as_json: bool, only_body: bool) -> int:
    """Show everything about one dead letter of QUEUE. LETTER is its sequence, or its id."""
    found = complete(with_queue(url, queue, lambda found: _find(found, letter)))
    if found is None:
        raise Failure(
            Exit.VACANT, f"{queue!r} has no dead letter {letter!r}; see: tenure dead list {shlex.quote(queue)}"
        )
    if only_body:
        sys.stdout.buffer.write(found.body)
    elif as_json:
        print_json(_record(found))
    else:
        _describe(found)
    return Exit.DONE


@command.command("redrive")
@click.argument("queue", shell_complete=queue_names)
@on_option
@_which
@click.option("--to", metavar="QUEUE", help="Put them into this queue instead.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N, oldest first.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@json_option
def redrive(
    queue: str, url: str, to: str | None, limit: int | None, dry_run: bool, as_json: bool, **chosen: Any
) -> int:
    """Put dead letters back into QUEUE: those chosen, or all. They are delivered again.

    With --to they go into another queue, with their ids and history. None is lost: if the store has no transactions
    (Azure, a Redis Cluster), each is written to the other queue before it is removed from this one.
    """
    count = complete(
        with_queue(
            url, queue, lambda found: found.dead_letters.redrive(limit=limit, dry_run=dry_run, to=to, **_given(chosen))
        )
    )
    if as_json:
        print_json({"queue": queue, "to": to or queue, "redriven": 0 if dry_run else count, "would_be": count})
    else:
        where = "back" if to is None else f"into {one_line(to)}"
        print_line(f"{count} would be put {where}" if dry_run else f"{count} put {where}")
    return Exit.DONE


@command.command("purge")
@click.argument("queue", shell_complete=queue_names)
@on_option
@_which
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N, oldest first.")
@json_option
def purge(queue: str, url: str, every: bool, limit: int | None, as_json: bool, **chosen: Any) -> int:
    """Remove dead letters of QUEUE for good: those chosen, or --all."""
    if not every and not _given(chosen):
        raise click.UsageError("no messages are chosen; choose with --id, --sequence, --reason, --older-than, or --all")
    if every and _given(chosen):
        raise click.UsageError(
            "--all removes all, and --id, --sequence, --reason or --older-than choose some; give either"
        )
    count = complete(with_queue(url, queue, lambda found: found.dead_letters.purge(limit=limit, **_given(chosen))))
    if as_json:
        print_json({"queue": queue, "purged": count})
    else:
        print_line(f"{count} removed")
    return Exit.DONE


async def _find(queue: Queue, letter: str) -> DeadMessage | None:
    # An id may look like a number. The number is what `list` shows first, so it is tried first.
    if letter.isdecimal() and (found := await queue.dead_letters.peek(1, sequences=[int(letter)])):
        return found[0]
    found = await queue.dead_letters.peek(1, ids=[letter])
    return found[0] if found else None


def _given(chosen: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in chosen.items() if value not in (None, ())}
    if "older_than" in given:
        given["dead_before"] = max(0.0, time.time() - given.pop("older_than"))  # nothing is older than that clock
    return given


def _died(letter: DeadMessage) -> str:
    return timestamp(letter.dead_at, "seconds")  # a list is scanned; `show` has all of it


def _why(letter: DeadMessage) -> str:
    # The number of deliveries is in a column of its own.
    if letter.error and (letter.reason == "max_deliveries" or not letter.description):
        return f"{letter.error.type.rpartition('.')[2]}: {letter.error.message}"
    return letter.description


def _record(letter: DeadMessage) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **message_fields(letter),
        "error": asdict(letter.error) if letter.error else None,
        "history": [{**asdict(attempt), "at": timestamp(attempt.at)} for attempt in letter.history],
    }


def _describe(letter: DeadMessage) -> None:
    shown = {
        "id": letter.id,
        "sequence": letter.sequence,
        "reason": letter.reason,
        "description": letter.description,
        "died": timestamp(letter.dead_at),
        "sent": timestamp(letter.enqueued_at),
        "deliveries": letter.delivery_count,
        "session": letter.session,
        "priority": letter.priority,
        "reply to": letter.reply_to,
        "correlation id": letter.correlation_id,
        "headers": " ".join(f"{key}={value}" for key, value in letter.headers.items()),
        "body": body_text(letter.body),
    }
    for what, value in shown.items():
        if value not in (None, ""):
            print_line(f"{what:<15} {one_line(str(value))}")
    for attempt in letter.history:
        failure = f"  {attempt.error.type}: {attempt.error.message}" if attempt.error else ""
        print_line(
            f"{'delivery ' + str(attempt.number):<15} {timestamp(attempt.at)}  {attempt.outcome}{one_line(failure)}"
        )
    if letter.error and letter.error.traceback:
        for line in letter.error.traceback.splitlines():
            print_line(f"    {one_line(line)}")

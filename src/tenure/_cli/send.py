"""``tenure send``: put messages into a queue."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tenure import Outgoing
from tenure._cli.completion import queue_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect, exit_of, json_option, key_value, on_option, seconds_option
from tenure._cli.input import Source, Unreadable, body_source, file_source, standard_input
from tenure._cli.lines import LineOptions, send_lines
from tenure._cli.output import notice, print_json, print_line
from tenure._cli.progress import Bar, NoProgress, Progress
from tenure._one_line import one_line

_END = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"


def moment(text: str) -> datetime:
    """Read a time in ISO 8601; without an offset, it is local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time; write it as in 2030-01-31T12:00:00+01:00") from error


@click.command("send", cls=Command)
@click.argument("queue", shell_complete=queue_names)
@click.argument("body", required=False)
@on_option
@click.option(
    "--file", "-f", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read BODY from this file."
)
@click.option("--lines", is_flag=True, help="Send each line of the input as a message, as it comes.")
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="With --lines: skip the first N lines; a run that ends early prints the N to continue with.",
)
@click.option(
    "--id-prefix",
    metavar="TEXT",
    help="With --lines: line 17 gets the id TEXT-17. Within the queue's dedupe window (600 s, unless set "
    "otherwise) a repeated run stores each line once. Not on Azure, which remembers no ids.",
)
@click.option(
    "--id", metavar="TEXT", help="The message's id: a second one with this id is dropped within the dedupe window."
)
@click.option("--header", "-H", "headers", type=key_value, multiple=True, metavar="K=V", help="A header.")
@seconds_option("--delay", "Deliver it after this time.")
@click.option(
    "--at",
    type=moment,
    metavar="TIME",
    help="Deliver it at this time: 2030-01-31T12:00:00+01:00. Without an offset, it is local time.",
)
@seconds_option("--expires-in", "Dead-letter it if it is not received within this time.")
@click.option(
    "--session", metavar="TEXT", help="Messages of one session are received in order, by one consumer at a time."
)
@click.option("--priority", type=click.IntRange(0, 9), metavar="0-9", help="Higher ones are received first.")
@click.option("--reply-to", metavar="QUEUE", shell_complete=queue_names, help="The queue for a reply.")
@click.option("--correlation-id", metavar="TEXT", help="An id that the reply repeats.")
@click.option("--quiet", "-q", is_flag=True, help="Print no ids; on a terminal, show the progress.")
@json_option
def command(
    queue: str,
    body: str | None,
    url: str,
    file: Path | None,
    lines: bool,
    skip: int,
    id_prefix: str | None,
    headers: tuple[tuple[str, str], ...],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Send BODY to QUEUE, and print the message's id once the store has it.

    Without BODY, or with -, the body is read from the standard input; with --file, from that file.

    With --lines, each line is sent as soon as it is read, also from an endless input. The ids are printed as soon as
    the store has the messages; with --json, a line of JSON for each batch, with the number of its first line. If the
    command ends early, by a refused line or an interrupt, it prints how many were sent, and with which --skip to go on.
    """
    _check(body, file, lines, skip, id_prefix, options["id"])
    options_given = {key: value for key, value in options.items() if value is not None}
    if headers:
        options_given["headers"] = dict(headers)
    given_body = None if body is None or body == "-" else body.encode("utf-8", "surrogateescape")
    if lines:
        return complete(
            _lines(url, LineOptions(queue, options_given, skip, id_prefix), given_body, file, quiet, as_json)
        )
    complete(_send_one(url, queue, options_given, given_body, file, quiet, as_json))
    return Exit.DONE


def _check(body: str | None, file: Path | None, lines: bool, skip: int, id_prefix: str | None, id_: str | None) -> None:
    if body is not None and body != "-" and file is not None:
        raise click.UsageError("BODY and --file both give the body; give one of them")
    if lines and id_ is not None:
        raise click.UsageError("--id is for one message, and --lines may send many; use --id-prefix")
    if not lines and (skip or id_prefix is not None):
        raise click.UsageError(f"{'--skip' if skip else '--id-prefix'} needs --lines")
    if (body is None or body == "-") and file is None and sys.stdin is None:
        raise click.UsageError("the standard input is closed; give BODY or --file")


def _source(body: bytes | None, file: Path | None, said: str) -> Source:
    """Return what to read; of a terminal, say so first, as in *said*."""
    if body is not None:
        return body_source(body)
    source = standard_input() if file is None else file_source(file)
    if source.is_typed and file is None:
        notice(said)
    return source


# --- one message -------------------------------------------------------------------------------------------------


async def _send_one(
    url: str,
    name: str,
    options: dict[str, Any],
    body: bytes | None,
    file: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    source = _source(body, file, f"reading the message from the terminal; end it with {_END} on a line of its own")
    try:
        message = Outgoing(await source.read_all(), **options)
    except Unreadable as error:
        raise Failure(Exit.CONFIG, str(error)) from error
    async with connect(url) as backend:
        ids = await backend.queue(name).send_batch([message])
    if quiet:
        return
    try:
        if as_json:
            print_json({"queue": name, "ids": ids})
        else:
            print_line(ids[0])
    except OSError as error:
        code, why = exit_of(error)
        raise Failure(code, f"message {ids[0]} was sent, but {why}") from error


# --- lines -------------------------------------------------------------------------------------------------------


async def _lines(
    url: str, options: LineOptions, body: bytes | None, file: Path | None, quiet: bool, as_json: bool
) -> int:
    source = _source(body, file, f"reading lines from the terminal, each is sent when it is entered; end with {_END}")

    def print_ids(first: int, ids: list[str]) -> None:
        if as_json:
            print_json({"queue": options.queue, "line": first, "ids": ids}, lines=True)
        else:
            print_line("\n".join(ids))

    def print_nothing(first: int, ids: list[str]) -> None:
        pass

    on_sent = print_nothing if quiet else print_ids
    return await send_lines(url, options, source, on_sent, _progress(options, source, quiet))


def _progress(options: LineOptions, source: Source, quiet: bool) -> Progress:
    """Return a bar, but not where it would disturb typed input or ids on the same terminal."""
    if source.is_typed or not sys.stderr.isatty() or (sys.stdout.isatty() and not quiet):
        return NoProgress()
    return Bar(f"send to {one_line(options.queue)}", source.size)

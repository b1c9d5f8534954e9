"""``tenure send``: put messages into a queue."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit, Failure
from tenure.cli.group import complete, connect, json_option, key_value, on_option, seconds_option, told
from tenure.cli.output import say, say_json

BATCH = 500
"""Messages in one step at most, when each line is one."""

CHUNK = 65_536
"""Bytes that are read from the standard input at once, at most."""


def moment(text: str) -> datetime:
    """Read a moment as ISO 8601 writes it; without an offset, it is meant in local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a moment; write it as in 2030-01-31T12:00:00+01:00") from error


@click.command("send", cls=Command)
@click.argument("queue")
@click.argument("body", required=False)
@on_option
@click.option("--file", "-f", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Take BODY from here.")
@click.option("--lines", is_flag=True, help="Send each line of the input as a message of its own, as it comes.")
@click.option("--id", metavar="TEXT", help="Name it: a second one of that name is not kept for a while.")
@click.option("--header", "-H", "headers", type=key_value, multiple=True, metavar="K=V", help="Text beside the body.")
@seconds_option("--delay", "Deliver it so much later.")
@click.option(
    "--at",
    type=moment,
    metavar="TIME",
    help="Deliver it from then on: 2030-01-31T12:00:00+01:00. Without an offset, it is local time.",
)
@seconds_option("--ttl", "Dead-letter it if nobody has received it for so long.")
@click.option("--session", metavar="TEXT", help="Messages of one session are received in order, by one at a time.")
@click.option("--priority", type=click.IntRange(0, 9), metavar="0-9", help="Higher ones are received first.")
@click.option("--reply-to", metavar="QUEUE", help="Where an answer is to go.")
@click.option("--correlation-id", metavar="TEXT", help="What an answer will carry.")
@json_option
def command(
    queue: str,
    body: str | None,
    url: str,
    file: Path | None,
    lines: bool,
    headers: tuple[tuple[str, str], ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Send BODY to QUEUE, and print the message's id once it is kept.

    Without BODY, or with -, it is read from the standard input; with --file, from there.

    With --lines, each line is sent as soon as it has come, also from an endless input. The ids are printed step by
    step; with --json, a line of JSON for each step. A line that is refused ends it: the error names the line, and how
    many were sent.
    """
    if body is not None and body != "-" and file is not None:
        raise click.UsageError("BODY and --file both say what to send; give one of them")
    if lines and options["id"] is not None:
        raise click.UsageError("--id names one message, and --lines may send many; give one of them")
    given = {key: value for key, value in options.items() if value is not None}
    if headers:
        given["headers"] = dict(headers)
    given_here = None if body is None or body == "-" else body.encode("utf-8", "surrogateescape")
    if given_here is None and file is not None:
        given_here = file.read_bytes()
    if lines:
        complete(_send_lines(url, queue, _lines_of(given_here), given, as_json))
    else:
        whole = sys.stdin.buffer.read() if given_here is None else given_here
        complete(_send_one(url, queue, whole, given, as_json))
    return Exit.DONE


async def _send_one(url: str, name: str, body: bytes, options: dict[str, Any], as_json: bool) -> None:
    from tenure import Outgoing

    async with connect(url) as backend:
        _say(name, await backend.queue(name).send_batch([Outgoing(body, **options)]), as_json, lines=False)


def _say(name: str, ids: list[str], as_json: bool, *, lines: bool) -> None:
    if as_json:
        say_json({"queue": name, "ids": ids}, lines=lines)
    else:
        for each in ids:
            say(each)


# --- lines -------------------------------------------------------------------------------------------------------


async def _send_lines(
    url: str, name: str, batches: AsyncIterator[list[bytes]], options: dict[str, Any], as_json: bool
) -> None:
    """Send each line as it comes, and tell the ids of each step as soon as they are kept."""
    from tenure import ConfigError, Outgoing, TenureError

    sent = 0
    async with connect(url) as backend:
        queue = backend.queue(name)
        async for lines in batches:
            steps = [lines]
            while steps:
                step = steps.pop(0)
                try:
                    ids = await queue.send_batch([Outgoing(line, **options) for line in step])
                except ConfigError as error:
                    if len(step) == 1:
                        code, message = told(error)
                        raise Failure(code, _refused(sent, message)) from error
                    steps[:0] = [[line] for line in step]  # none of them was sent: go on up to the one that is meant
                except TenureError as error:
                    code, message = told(error)
                    raise Failure(code, _unanswered(sent, len(step), message)) from error
                else:
                    sent += len(ids)
                    _say(name, ids, as_json, lines=True)


def _refused(sent: int, why: str) -> str:
    before = f"the {sent} before it were sent" if sent != 1 else "the one before it was sent"
    return f"line {sent + 1} was refused: {why}; {before}, nothing after it was"


def _unanswered(sent: int, asked: int, why: str) -> str:
    which = f"line {sent + 1}" if asked == 1 else f"lines {sent + 1} to {sent + asked}"
    return f"{which} may have been sent or not: {why}; of those before, {sent} were sent, nothing after was"


async def _lines_of(given: bytes | None) -> AsyncIterator[list[bytes]]:
    """Yield the lines, up to ``BATCH`` at a time: of what is *given*, or of the standard input as they come."""
    if given is not None:
        lines = given.splitlines()
        for first in range(0, len(lines), BATCH):
            yield lines[first : first + BATCH]
        return
    rest = b""
    while chunk := await _read():
        *lines, rest = (rest + chunk).split(b"\n")
        for first in range(0, len(lines), BATCH):
            yield [line.rstrip(b"\r") for line in lines[first : first + BATCH]]
    if rest:
        yield [rest.rstrip(b"\r")]


async def _read() -> bytes:
    """Return what the standard input brings next, at once when it does; nothing at its end."""
    loop = asyncio.get_running_loop()
    coming: asyncio.Future[bytes] = loop.create_future()

    def tell(chunk: bytes, error: Exception | None) -> None:
        if coming.done():
            return
        if error is None:
            coming.set_result(chunk)
        else:
            coming.set_exception(error)

    def read() -> None:
        chunk, failure = b"", None
        try:
            chunk = _read_some()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(tell, chunk, failure)

    # A daemon: an interrupt must end the program although nothing comes.
    threading.Thread(target=read, name="tenure-send-stdin", daemon=True).start()
    return await coming


def _read_some() -> bytes:
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError):  # it stands for another stream
        return sys.stdin.buffer.read(CHUNK)
    return os.read(number, CHUNK)  # not from the buffer, whose lock a daemon must not hold at the program's end

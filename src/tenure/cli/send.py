"""``tenure send``: put messages into a queue."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tenure.cli.exits import Exit
from tenure.cli.group import complete, connect, json_option, key_value, on_option, seconds_option
from tenure.cli.output import say, say_json

BATCH = 500
"""Messages in one step, when each line is one."""


def moment(text: str) -> datetime:
    """Read a moment as ISO 8601 writes it; without an offset, it is meant in local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a moment; write it as in 2030-01-31T12:00:00+01:00") from error


@click.command("send")
@click.argument("queue")
@click.argument("body", required=False)
@on_option
@click.option("--file", "-f", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Take BODY from here.")
@click.option("--lines", is_flag=True, help="Send each line of the input as a message of its own.")
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
    """
    if body is not None and body != "-" and file is not None:
        raise click.UsageError("BODY and --file both say what to send; give one of them")
    if lines and options["id"] is not None:
        raise click.UsageError("--id names one message, and --lines may send many; give one of them")
    given = {key: value for key, value in options.items() if value is not None}
    if headers:
        given["headers"] = dict(headers)
    ids = complete(_send(url, queue, _bodies(body, file, lines), given))
    if as_json:
        say_json({"queue": queue, "ids": ids})
    else:
        for each in ids:
            say(each)
    return Exit.DONE


def _bodies(body: str | None, file: Path | None, lines: bool) -> Iterator[bytes]:
    if body is not None and body != "-" and file is None:
        whole = body.encode("utf-8", "surrogateescape")
    elif file is not None:
        whole = file.read_bytes()
    elif lines:  # line by line, so that an endless input is sent as it comes
        yield from (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
        return
    else:
        whole = sys.stdin.buffer.read()
    if lines:
        yield from whole.splitlines()
    else:
        yield whole


async def _send(url: str, name: str, bodies: Iterator[bytes], options: dict[str, Any]) -> list[str]:
    from itertools import islice

    from tenure import Outgoing

    ids: list[str] = []
    async with connect(url) as backend:
        queue = backend.queue(name)
        while batch := [Outgoing(body, **options) for body in islice(bodies, BATCH)]:
            ids += await queue.send_batch(batch)
    return ids

"""``tenure work``: a command, or a function, for every message of a queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit
from tenure.cli.group import complete, on_option, refuse_both, seconds_option
from tenure.cli.lead import require_runnable

ABANDON = 75
"""The exit code by which a command says "not now": EX_TEMPFAIL of sysexits."""


@dataclass(frozen=True)
class Order:
    """What was asked for on the command line."""

    queue: str
    command: tuple[str, ...]
    handler: str | None
    url: str = field(repr=False)
    settings: dict[str, Any]  # of the queue, as given
    concurrency: int
    sessions: bool
    timeout: float | None
    grace: float
    until_empty: bool
    verbosity: int


@click.command("work", cls=Command)
@click.argument("queue")
@click.argument("argv", nargs=-1, metavar="[-- CMD [ARGS]...]", type=click.UNPROCESSED)
@on_option
@click.option("--handler", metavar="MODULE:FUNCTION", help="Call this with each message, instead of CMD.")
@click.option(
    "--concurrency", "-c", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="At once."
)
@click.option("--sessions", is_flag=True, help="Take messages of sessions only: each session's in order, N at once.")
@seconds_option("--timeout", "Stop a CMD that runs for longer, and abandon its message. [default: an hour]")
@seconds_option("--lock", "How long a message is ours without renewal: it is back so soon after a crash. [default: 30]")
@click.option("--max-deliveries", type=click.IntRange(min=1), metavar="N", help="Then dead-letter it. [default: 10]")
@seconds_option("--grace", "How long what runs has to finish after INT or TERM. [default: 25]")
@click.option("--until-empty", is_flag=True, help="End when nothing is ready and nothing runs.")
@click.option("--verbose", "-v", count=True, help="Tell what happens.")
@click.option("--quiet", "-q", is_flag=True, help="Tell errors only.")
def command(
    queue: str,
    argv: tuple[str, ...],
    url: str,
    handler: str | None,
    concurrency: int,
    sessions: bool,
    until_empty: bool,
    verbose: int,
    quiet: bool,
    **options: Any,
) -> int:
    """Run CMD for every message of QUEUE, the body on its standard input. Many workers may share a queue.

    Exit code 0 completes the message. 75 abandons it, to be delivered again, later and later; so do a signal that ends
    CMD, and the time-out. Any other code dead-letters it, with the code as the reason.

    The environment of CMD holds TENURE_QUEUE, TENURE_MESSAGE_ID, TENURE_SEQUENCE, TENURE_DELIVERY_COUNT and, where the
    message has them, TENURE_SESSION, TENURE_CORRELATION_ID, TENURE_REPLY_TO and TENURE_HEADERS (JSON).

    INT or TERM: no more messages are taken, and what runs may finish within the grace; what doesn't is stopped, and its
    message given back uncounted. A second one stops it at once. Either way, and with --until-empty, it ends with 0,
    whatever CMD has returned.
    """
    if bool(argv) == bool(handler):
        raise click.UsageError("give either a command behind --, or --handler MODULE:FUNCTION")
    if handler and options["timeout"] is not None:
        raise click.UsageError("--timeout stops a command; a function has to look after its own time")
    if options["timeout"] == 0:
        raise click.UsageError("--timeout 0 would stop every command at once; give it some time, as in --timeout 10m")
    refuse_both(verbose, quiet)
    if argv:
        require_runnable(argv[0], "no message was received")
    timeout, grace = options.pop("timeout"), options.pop("grace")
    settings = {key: value for key, value in options.items() if value is not None}
    order = Order(
        queue,
        argv,
        handler,
        url,
        settings,
        concurrency,
        sessions,
        timeout,
        25.0 if grace is None else grace,
        until_empty,
        -1 if quiet else verbose,
    )
    from tenure.cli.working import Working  # asyncio and all: not needed for --help, nor for what went wrong above

    complete(Working(order).run())
    return Exit.DONE

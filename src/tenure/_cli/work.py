"""``tenure work``: a command, or a function, for every message of a queue."""

from __future__ import annotations

import re
from typing import Any

import click

import tenure
from tenure._cli.codes import exit_codes, rejecting
from tenure._cli.completion import files, queue_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, on_option, refuse_both, seconds_option
from tenure._cli.lead import require_runnable
from tenure._cli.retrying import wait_option

_FIELD = re.compile(r"\b(initial|factor|maximum|jitter)(?:=(?=\d)| (?=\(|must))")
"""A field of :class:`tenure.RetryPolicy` in an error message."""


@click.command("work", cls=Command)
@click.argument("queue", shell_complete=queue_names)
@click.argument("argv", nargs=-1, metavar="[-- CMD [ARGS]...]", type=click.UNPROCESSED, shell_complete=files)
@on_option
@click.option("--handler", metavar="MODULE:FUNCTION", help="Call this function for each message, instead of CMD.")
@click.option(
    "--concurrency",
    "-c",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Messages at once.",
)
@click.option("--sessions", is_flag=True, help="Consume sessions: each session in order, N sessions at once.")
@seconds_option("--timeout", "Stop a CMD that runs for longer, and abandon its message. [default: an hour]")
@seconds_option(
    "--lock", "Length of a message's lock: after a crash it is delivered again after this time. [default: 30]"
)
@click.option(
    "--reject-on", type=exit_codes, metavar="CODES", help="Dead-letter at once on these codes, besides 65: 2,64-70."
)
@click.option(
    "--retry-on",
    type=exit_codes,
    metavar="CODES",
    help="Retry on these codes; without --reject-on, reject on all others.",
)
@click.option(
    "--max-deliveries",
    type=click.IntRange(min=1),
    metavar="N",
    help="Dead-letter a message after N deliveries. [default: 10]",
)
@seconds_option("--retry-initial", "Delay of a failed message before its second delivery. [default: 0.5]")
@click.option("--retry-factor", type=float, metavar="X", help="Each further delay is X times longer. [default: 2]")
@seconds_option("--retry-maximum", "The longest delay. [default: 60]")
@click.option("--retry-jitter", type=float, metavar="SHARE", help="The random share of a delay, 0 to 1. [default: 0.2]")
@seconds_option("--grace", "Time for running commands to finish after INT or TERM. [default: 25]")
@click.option(
    "--until-empty",
    is_flag=True,
    help="End when no message is ready, no command runs, and no message that failed here waits for its retry.",
)
@wait_option
@click.option("--verbose", "-v", count=True, help="Print each start and end, with the time.")
@click.option("--quiet", "-q", is_flag=True, help="Print errors only.")
def command(
    queue: str,
    argv: tuple[str, ...],
    url: str,
    handler: str | None,
    concurrency: int,
    sessions: bool,
    until_empty: bool,
    wait: float | None,
    verbose: int,
    quiet: bool,
    **options: Any,
) -> int:
    """Run CMD for every message of QUEUE, with the body on its standard input. Many workers may share a queue.

    Exit code 0 completes the message. 65 rejects it: it is dead-lettered at once, with the code as the reason. Any
    other code fails the delivery, and so does a signal that ends CMD (128 + its number), the time-out, or a CMD that
    can't be started: the message is delivered again, with growing delays, and dead-lettered after --max-deliveries.
    --reject-on and --retry-on change the meaning of codes. The end of CMD's stderr is kept with the message: see
    tenure dead show.

    The environment of CMD has TENURE_QUEUE, TENURE_MESSAGE_ID, TENURE_SEQUENCE, TENURE_DELIVERY_COUNT; if the
    message has them, TENURE_SESSION, TENURE_CORRELATION_ID, TENURE_REPLY_TO and TENURE_HEADERS (JSON); and TENURE_URL
    if it holds no password. A message whose headers, or other texts, fit in no variable is dead-lettered at once.

    At the start it prints which queue it consumes, at the end how many deliveries were done, failed and given back; not
    with --quiet.

    After INT or TERM, no more messages are taken, and running commands may finish within --grace; the others are
    stopped, and their messages given back uncounted. A second signal stops them at once. Either way, and with
    --until-empty, the exit code is 0, whatever CMD has returned.
    """
    if bool(argv) == bool(handler):
        raise click.UsageError("give either a command after --, or --handler MODULE:FUNCTION")
    if handler and options["timeout"] is not None:
        raise click.UsageError("--timeout stops a command, not a function; limit the time inside the function")
    if handler and not options["reject_on"] is options["retry_on"] is None:
        raise click.UsageError(
            "--reject-on and --retry-on are for the exit codes of a command; "
            "a function raises tenure.Reject, or any other exception"
        )
    if options["timeout"] == 0:
        raise click.UsageError(
            "--timeout 0 would stop every command at once; give a longer time, such as --timeout 10m"
        )
    refuse_both(verbose, quiet)
    if argv:
        require_runnable(argv[0], "no message was received")
    rejects = rejecting(options.pop("reject_on"), options.pop("retry_on"))
    retry = _retry_policy({name: options.pop(f"retry_{name}") for name in ("initial", "factor", "maximum", "jitter")})
    timeout, grace = options.pop("timeout"), options.pop("grace")
    settings = {key: value for key, value in options.items() if value is not None}
    from tenure._cli.work_run import (  # imports asyncio: not needed for --help, nor for the errors above
        WorkOptions,
        WorkRun,
    )

    work_options = WorkOptions(
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
        rejects,
        retry,
        wait,
    )
    complete(WorkRun(work_options).run())
    return Exit.DONE


def _retry_policy(given: dict[str, Any]) -> tenure.RetryPolicy:
    try:
        return tenure.RetryPolicy(**{name: value for name, value in given.items() if value is not None})
    except tenure.ConfigError as error:  # a field in Python is an option here
        raise tenure.ConfigError(_FIELD.sub(lambda found: f"--retry-{found[1]} ", str(error))) from error

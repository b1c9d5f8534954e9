"""``tenure lead``: run a command only while leading, and stop it before another instance can lead."""

from __future__ import annotations

import os
from typing import Any

import click

from tenure._cli.completion import election_names, files
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, key_value, on_option, refuse_both, seconds_option, socket_option


@click.command("lead", cls=Command)
@click.argument("name", shell_complete=election_names)
@click.argument(
    "argv", nargs=-1, required=True, metavar="-- CMD [ARGS]...", type=click.UNPROCESSED, shell_complete=files
)
@on_option
@seconds_option(
    "--ttl", "Length of the lease: a dead leader's name is free after this time. [default: 15, if the store allows it]"
)
@seconds_option("--renew-every", "Time between renewals. [default: ttl/3]")
@seconds_option(
    "--retry-every",
    "Time until an unanswered request is repeated, and between requests while standing by. [default: 2]",
)
@seconds_option(
    "--grace", "Time from TERM to the end of a lost term; KILL follows when a quarter is left. [default: 2]"
)
@seconds_option("--stop-timeout", "Kill CMD this long after INT, TERM or QUIT. [default: only after a second signal]")
@click.option("--again", is_flag=True, help="When CMD ends, campaign again, and start it in the next term.")
@click.option(
    "--metadata",
    "-m",
    type=key_value,
    multiple=True,
    metavar="K=V",
    help="Shown by tenure status while this instance leads.",
)
@click.option("--label", metavar="TEXT", help="The readable part of the holder's name. [default: host name and pid]")
@socket_option
@click.option("--verbose", "-v", count=True, help="Print each start and end, with the time; twice: every renewal.")
@click.option("--quiet", "-q", is_flag=True, help="Print errors only.")
def command(name: str, argv: tuple[str, ...], url: str, again: bool, verbose: int, quiet: bool, **options: Any) -> int:
    """Run CMD only while leading NAME. Of all instances with the same NAME and store, one at a time runs its CMD.

    CMD is started without a shell, in a process group of its own, with TENURE_NAME, TENURE_TOKEN (the fencing token:
    higher in every term), TENURE_HOLDER and, if it holds no password, TENURE_URL in its environment.

    When CMD ends, the lease is released, and tenure ends with CMD's exit code. When the term is lost, CMD and all
    processes that it started get TERM, then KILL, before another instance can lead; then tenure campaigns again, for
    ever. Processes that a service (systemd, at, Docker) started for CMD are not stopped.

    While another instance leads, tenure prints the holder whenever it changes; not with --quiet. `tenure status NAME
    --me` asks this process whether it is live or ready, by a socket that only this user can use.

    INT, TERM, HUP, QUIT, USR1, USR2 and WINCH are passed on to CMD. After INT, TERM or QUIT the lease is kept until CMD
    has ended; a second one kills it. If no CMD is running, tenure ends at once.
    """
    refuse_both(verbose, quiet)
    require_runnable(argv[0], "no lease was taken")
    stop_timeout, socket_dir = options.pop("stop_timeout"), options.pop("socket_dir")
    settings = {key: value for key, value in options.items() if value is not None}
    settings["metadata"] = dict(options["metadata"])
    from tenure._cli.lead_run import (  # imports asyncio: not needed for --help, nor for the errors above
        LeadOptions,
        LeadRun,
    )

    lead_options = LeadOptions(name, argv, url, settings, again, stop_timeout, socket_dir, -1 if quiet else verbose)
    return complete(LeadRun(lead_options).run())


def require_runnable(program: str, undone: str) -> None:
    """Refuse a program that could never run; *undone* is the part of the message that says what was not done.

    Raises:
        Failure: With the exit code that a shell would give.
    """
    folders = [""] if os.sep in program else os.get_exec_path()
    paths = [os.path.join(folder, program) for folder in folders if program]
    found = [path for path in paths if os.path.exists(path)]
    if not found:
        where = "" if os.sep in program else " on PATH"
        hint = "; no shell is involved: for shell syntax use sh -c '…'" if " " in program else ""
        raise Failure(Exit.NOT_FOUND, f"no command {program!r}{where}{hint}; {undone}")
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        what = "a folder" if os.path.isdir(found[0]) else "not executable"
        raise Failure(Exit.NOT_RUNNABLE, f"{found[0]} can't be run: it is {what}; {undone}")

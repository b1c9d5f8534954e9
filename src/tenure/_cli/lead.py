"""``tenure lead``: run a command only while leading, and have it gone before anybody else leads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import click

from tenure._cli.completion import election_names, files
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, key_value, on_option, refuse_both, seconds_option


@dataclass(frozen=True)
class Order:
    """What was asked for on the command line."""

    name: str
    command: tuple[str, ...]
    url: str = field(repr=False)
    settings: dict[str, Any]  # of the election, as given
    again: bool
    stop_timeout: float | None
    verbosity: int


@click.command("lead", cls=Command)
@click.argument("name", shell_complete=election_names)
@click.argument(
    "argv", nargs=-1, required=True, metavar="-- CMD [ARGS]...", type=click.UNPROCESSED, shell_complete=files
)
@on_option
@seconds_option("--ttl", "Length of the lease: how long a dead leader's name stays taken. [default: 15, if it fits]")
@seconds_option("--renew-every", "From one renewal to the next. [default: ttl/3]")
@seconds_option("--retry-every", "From an unanswered question, or a look while standing by, to the next. [default: 2]")
@seconds_option("--grace", "From TERM to the end of a lost term; KILL comes when a quarter of it is left. [default: 2]")
@seconds_option("--stop-timeout", "KILL CMD so long after INT, TERM or QUIT. [default: a second one does]")
@click.option("--again", is_flag=True, help="When CMD ends, stand for election again, and start it in the next term.")
@click.option("--metadata", "-m", type=key_value, multiple=True, metavar="K=V", help="What others see of this leader.")
@click.option("--label", metavar="TEXT", help="The readable part of the holder's name. [default: host name and pid]")
@click.option("--verbose", "-v", count=True, help="Tell each start and end, with the time; twice: every renewal.")
@click.option("--quiet", "-q", is_flag=True, help="Tell errors only.")
def command(name: str, argv: tuple[str, ...], url: str, again: bool, verbose: int, quiet: bool, **options: Any) -> int:
    """Run CMD only while leading NAME. Of all who do this with the same NAME and store, one runs its CMD at a time.

    CMD is started without a shell, in a process group of its own, with TENURE_NAME, TENURE_TOKEN (the fencing token:
    higher in every term), TENURE_HOLDER and, if it holds no password, TENURE_URL in its environment.

    When CMD ends, the lease is handed back, and tenure ends with CMD's exit code. When the term is lost, CMD and all
    that it started get TERM, then KILL, before anybody else can lead; then tenure stands for election again, for ever.
    What it had a service start, such as systemd, at or Docker, is out of reach.

    While somebody else leads, tenure says so, once for each leader; --quiet silences that.

    INT, TERM, HUP, QUIT, USR1, USR2 and WINCH are passed on. After INT, TERM or QUIT the lease is kept until CMD has
    ended; a second one kills it. If no CMD is running, tenure ends at once.
    """
    refuse_both(verbose, quiet)
    require_runnable(argv[0], "no lease was taken")
    stop_timeout = options.pop("stop_timeout")
    settings = {key: value for key, value in options.items() if value is not None}
    settings["metadata"] = dict(options["metadata"])
    order = Order(name, argv, url, settings, again, stop_timeout, -1 if quiet else verbose)
    from tenure._cli.leading import Leading  # asyncio and all: not needed for --help, nor for what went wrong above

    return complete(Leading(order).run())


def require_runnable(program: str, harm: str) -> None:
    """Refuse what could never run before it does any *harm*.

    Raises:
        Failure: With the code that a shell would give.
    """
    folders = [""] if os.sep in program else os.get_exec_path()
    paths = [os.path.join(folder, program) for folder in folders if program]
    there = [path for path in paths if os.path.exists(path)]
    if not there:
        where = "" if os.sep in program else " on PATH"
        hint = "; no shell is involved: for shell syntax use sh -c '…'" if " " in program else ""
        raise Failure(Exit.NOT_FOUND, f"there is no command {program!r}{where}{hint}; {harm}")
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in there):
        what = "a folder" if os.path.isdir(there[0]) else "not executable"
        raise Failure(Exit.NOT_RUNNABLE, f"{there[0]} can't be run: it is {what}; {harm}")

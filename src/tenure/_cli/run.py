"""``tenure run``: the processes of a service, under a supervisor."""

from __future__ import annotations

import importlib
import math
import re

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, refuse_both, seconds_option
from tenure._cli.http_server import address, listening_at
from tenure.errors import BackendNotInstalled

HOPELESS = frozenset({Exit.USAGE, Exit.CONFIG, Exit.NOT_FOUND})

HUNG_AFTER = 30.0
"""Seconds without a sign of life after which a process hangs; or half of those after which it is killed, if less."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def processes(text: str) -> tuple[int, int]:
    """Read a number of processes, or a range of it, ``2..6``; to be used as the type of an option."""
    found = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", text, re.ASCII)
    if found is None:
        raise click.BadParameter(f"{text!r} is no number of processes, and no range of it; write for example 4 or 2..6")
    return int(found[1]), int(found[2] or found[1])


def size(text: str) -> float:
    """Read a number of bytes, ``512M``; to be used as the type of an option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)i?b?", text.strip().lower(), re.ASCII)
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no size in bytes; write for example 512M or 2G")
    return float(found[1]) * _UNITS[found[2]]


@click.command("run", cls=Command)
@click.argument("service", metavar="MODULE:SERVICE")
@click.option("--on", "url", metavar="URL", help="The store of a service that names none; instead of TENURE_URL.")
@click.option(
    "--processes",
    "-p",
    "number",
    type=processes,
    default="1",
    show_default=True,
    metavar="N|MIN..MAX",
    help="So many processes; with a range, as many as the backlog needs.",
)
@seconds_option("--grace", "Time for all processes to end after INT or TERM, before KILL. [default: 30]")
@seconds_option("--calm", "With a range: retire a process after fewer were enough for this time. [default: 60]")
@seconds_option("--look-every", "With a range: time between looks at the backlog. [default: 5]")
@seconds_option("--begin-within", "Kill a process that has not begun within this time. [default: 60]")
@seconds_option("--hung-max", "Kill a process that gives no sign of life for this time, 10 s or more. [default: 300]")
@seconds_option("--max-age", "Replace a process after this time, 10 % more or less.")
@click.option("--max-memory", type=size, metavar="SIZE", help="Replace a process with more resident memory: 512M.")
@click.option("--reload", is_flag=True, help="Replace all when a .py file below this folder changes; for development.")
@click.option("--uvloop", is_flag=True, help="Run the processes on uvloop, a faster event loop.")
@click.option("--until-empty", is_flag=True, help="End when no queue of a handler has anything ready.")
@click.option(
    "--http",
    "http",
    type=address,
    metavar="[HOST:]PORT",
    help="Answer probes, Prometheus and KEDA there: /live, /ready, /metrics, /keda/v1/queues/QUEUE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON, on standard output.")
@click.option("--verbose", "-v", count=True, help="Print the events of the service, too.")
@click.option("--quiet", "-q", is_flag=True, help="Print only crashes and errors.")
def command(
    service: str,
    url: str | None,
    number: tuple[int, int],
    grace: float | None,
    calm: float | None,
    look_every: float | None,
    begin_within: float | None,
    hung_max: float | None,
    max_age: float | None,
    max_memory: float | None,
    reload: bool,
    uvloop: bool,
    until_empty: bool,
    http: tuple[str, int] | None,
    as_json: bool,
    verbose: int,
    quiet: bool,
) -> int:
    """Run the processes of a service, MODULE:SERVICE, and keep them running.

    A process that crashes is started again, after a pause that grows. INT and TERM end all of them: handlers may
    finish for their grace; a second signal cancels them, a third kills. HUP replaces all processes one by one, TTIN and
    TTOU start one more and one less. If this process is killed, the others end by themselves.

    With --processes MIN..MAX, as many run as can hold the backlog at once: (ready + locked) / concurrency, for the
    queue that needs most. More are started at once; a process is retired slowly, and never while it handles a message.

    --http 9160 listens on this machine only, --http 0.0.0.0:9160 for others, too. If TENURE_HTTP_TOKEN is set, /metrics
    and /keda need it: Authorization: Bearer TOKEN.
    """
    from tenure._cli.output import log_to_stderr
    from tenure._cli.supervise import RunOptions, Supervision
    from tenure._supervisor.machine import Settings

    refuse_both(verbose, quiet)
    module, _, name = service.partition(":")
    if not module or not name:
        raise click.UsageError(f"{service!r} is not of the form module:service; write for example shop.worker:service")
    if reload:
        _require("watchfiles", "--reload", "reload")
    if uvloop:
        _require("uvloop", "--uvloop", "uvloop")
    listening = None
    if http is not None:
        _require_http()
        listening = listening_at(*http, "--http")
    verbosity = -1 if quiet else verbose
    log_to_stderr(verbosity)
    settings = Settings(
        least=number[0],
        most=number[1],
        grace=30.0 if grace is None else grace,
        calm=60.0 if calm is None else calm,
        look_every=5.0 if look_every is None else look_every,
        begin_within=60.0 if begin_within is None else begin_within,
        hung_after=HUNG_AFTER if hung_max is None else min(HUNG_AFTER, hung_max / 2),
        hung_max=300.0 if hung_max is None else hung_max,
        age_max=math.inf if max_age is None else max_age,
        memory_max=math.inf if max_memory is None else max_memory,
        hopeless=HOPELESS,
    )
    options = RunOptions(service, settings, until_empty, reload, uvloop, as_json, verbosity, url, listening)

    async def supervise() -> int:
        return await Supervision(options).run()

    return complete(supervise())


def _require_http() -> None:
    try:
        import uvicorn  # noqa: F401

        import tenure._http.app  # noqa: F401
    except (ModuleNotFoundError, BackendNotInstalled):
        raise Failure(
            Exit.CONFIG,
            "--http needs the packages starlette, uvicorn and prometheus-client, of which one is not installed; run: "
            "pip install 'tenure[http]'",
        ) from None


def _require(package: str, option: str, extra: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        raise Failure(
            Exit.CONFIG,
            f"{option} needs the package {package!r}, which is not installed; run: pip install 'tenure[{extra}]'",
        ) from None

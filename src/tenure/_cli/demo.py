"""``tenure demo``: demonstrates leader election and competing consumers, with two crashes."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

import tenure
from tenure import ConfigError, Timing
from tenure._cli.dashboard import LOOPBACK, address_of, token_for
from tenure._cli.demo_display import LineDisplay, LiveDisplay, show_summary
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, duration, json_option
from tenure._cli.http_server import address, listening_at, serve_until
from tenure._cli.live import can_be_live
from tenure._cli.output import notice, print_json
from tenure._demo.job import survey
from tenure._demo.processes import Failed
from tenure._demo.run import DemoSettings, run_demo
from tenure._demo.state import Display
from tenure._demo.summary import Summary

INSTANCES_MAX = 64
SECONDS_LEAST = 2.0
"""Seconds of work for each instance at least: enough to find one that handles a message, and to kill it."""


NOT_SHARED = {
    "memory": "memory: exists inside one process, and the instances are several processes",
    "peers": "each process of a peers: fleet is a member with an address of its own, and the instances share one URL",
}
"""Stores that the instances can't share, and why."""


@click.command("demo", cls=Command)
@click.option(
    "--input",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Count the files of this folder. [default: the Python sources of this installation]",
)
@click.option("--on", "url", metavar="URL", help="Use this store. [default: an SQLite file of its own]")
@click.option(
    "--instances",
    type=click.IntRange(3, INSTANCES_MAX),
    default=4,
    show_default=True,
    metavar="N",
    help="Number of processes. Two are killed, so at least three are needed.",
)
@click.option(
    "--ttl", type=duration, metavar="S", help="Length of a lease. [default: 2, or the shortest that the store allows]"
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep databases and logs in this folder, which must be new or empty.",
)
@click.option(
    "--dashboard",
    "listen",
    is_flag=False,
    flag_value="0",
    type=address,
    metavar="[HOST:]PORT",
    help="Show it in a browser, too, until Ctrl-C. Others than this machine need the token of tenure dashboard. "
    "[default: a free port of this machine]",
)
@json_option
def command(
    folder: Path | None,
    url: str | None,
    instances: int,
    ttl: float | None,
    keep: Path | None,
    listen: tuple[str, int] | None,
    as_json: bool,
) -> int:
    """Demonstrate leader election and competing consumers, with two crashes.

    Several processes elect a leader. It splits the counting of a folder's files into messages. All processes compete
    for them; the leader receives the results and writes them through a fence. A worker is killed with kill -9 while it
    handles a message: another process gets the message. The leader is killed half-way: another takes over. One message
    always fails, and becomes a dead letter. In the end, the result is compared with that of a plain run in one process.
    If the store has leases, but no queues, the messages are in an SQLite file of the demonstration's own.

    Ends with 0 if all of this worked, and with 1 if not; the last lines say why. TENURE_URL is ignored.
    """
    if ttl is not None:
        Timing(ttl)
    if url is not None and url.partition(":")[0] in NOT_SHARED:
        raise ConfigError(f"{NOT_SHARED[url.partition(':')[0]]}; try --on sqlite:///demo.db")
    token = None if listen is None else token_for(*listen, "--dashboard")
    job = survey(folder, at_least=SECONDS_LEAST * instances)
    console = Console(stderr=as_json, highlight=False)
    listening = None if listen is None else listening_at(*listen, "--dashboard")
    with _run_folder(keep) as run_folder:
        setting = DemoSettings(job, run_folder, url, instances, ttl)
        if listening is not None:
            return complete(_with_dashboard(setting, console, listening, token, as_json=as_json))
        with LiveDisplay(console) if can_be_live(console) else LineDisplay(console) as display:
            summary = complete(_interruptible(setting, display))
    return _show(console, summary, as_json=as_json)


def _show(console: Console, summary: Summary, *, as_json: bool) -> int:
    if as_json:
        print_json(summary.as_json())
    else:
        show_summary(console, summary)
    return Exit.BROKEN if summary.problems() else Exit.DONE


async def _with_dashboard(
    setting: DemoSettings, console: Console, listening: socket.socket, token: str | None, *, as_json: bool
) -> int:
    """Run the demonstration beside a dashboard of its store, which stays until an interrupt."""
    stop = asyncio.Event()
    address_, hosts = address_of(listening), {*LOOPBACK, listening.getsockname()[0]}
    async with tenure.connect(setting.store) as backend:
        app = tenure.dashboard.app(backend, show_bodies=True, hosts=hosts, token=token)
        serving = asyncio.create_task(serve_until(app, listening, stop))
        notice(f"watch it at {address_}")
        try:
            with LineDisplay(console) as display:
                summary = await _interruptible(setting, display)
            code = _show(console, summary, as_json=as_json)
            notice(f"the dashboard stays at {address_}; Ctrl-C ends it")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            await stop.wait()
        finally:
            stop.set()
            await serving
    return code


@contextmanager
def _run_folder(keep: Path | None) -> Iterator[Path]:
    """Provide a folder to write to; it is removed at the end unless *keep* names it."""
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            empty = not any(keep.iterdir())
        except OSError as error:
            raise ConfigError(f"{keep} can't be created: {error.strerror}; name another folder") from error
        if not empty:
            raise ConfigError(f"{keep} is not empty; name a new folder with --keep")
        yield keep.absolute()
        return
    temporary = Path(tempfile.mkdtemp(prefix="tenure-demo-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


async def _interruptible(setting: DemoSettings, display: Display) -> Summary:
    """Run to the end; when a signal comes, stop all processes, and then end with the signal's exit code."""
    loop, received = asyncio.get_running_loop(), list[int]()
    running = asyncio.create_task(run_demo(setting, display))

    def interrupt(number: int) -> None:
        received.append(number)
        if len(received) == 1:  # a second signal would only disturb the clean-up, which is short
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt, number)
    if isinstance(display, LiveDisplay) and signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGTSTP, display.stop)
    try:
        return await running
    except Failed as failure:
        raise Failure(Exit.BROKEN, str(failure)) from failure
    except asyncio.CancelledError:
        if received:
            raise Failure(Exit.SIGNAL + received[0], "interrupted; all processes have been stopped") from None
        raise

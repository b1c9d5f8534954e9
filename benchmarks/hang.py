"""Two processes that want to be the only one to act, and one of them hangs: tenure, beside the usual other ways.

Run by hand: ``python -m benchmarks hang [--only NAME …] [--faults NAME,…] [--rounds 5] [--write]``. It needs Redis,
PostgreSQL and ZooKeeper (tests/servers); Kubernetes is the double of its Lease API. In each trial, A leads, and B waits
for its turn; then A suffers a fault. Measured are the seconds from the fault to the first act of B, and the acts of A
that come after that. All orders are those of one file to which both append, or of one table.

- none: no fault, to see that there is one leader at all.
- stopped: A is stopped by SIGSTOP, as a virtual machine that is paused, and goes on when B has acted.
- stopped before an act: the same, between A's check that it leads and the act that follows.
- hangs: the work of A calls something that does not return before B has acted; the process lives. The call blocks the
  thread, or the event loop, in which the work runs.
- cut off: the connections of A to the store stay open, and carry nothing more.
- killed: kill -9.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tenure
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Kubernetes, Postgres, Redis, Server, ZooKeeper, private

PAGE = Path("docs/alternatives.md")
TTL = 3.0
BOUND = 5
"""Leases without an act of B after which it counts as one that never acts."""
LATE_BOUND = 2
"""Leases for which A is watched after the first act of B, if it goes on for so long."""
SETTLED = 1.0
"""Seconds that A leads, and B waits, at least before the fault; and that B leads before A goes on."""
POLL = 0.05
START_MAX = 60.0

FAULTS = {
    "none": "no fault",
    "stopped": "stopped (SIGSTOP)",
    "stopped before an act": "stopped before an act",
    "hangs": "its work hangs",
    "cut off": "cut off from the store",
    "killed": "kill -9",
}
"""The faults, each with the title of its column."""


@dataclass(frozen=True)
class Contender:
    """A way to have one leader."""

    name: str
    kind: str
    """One of benchmarks.acting."""
    store: str = ""
    """One of STORES; empty for a file on this machine, from which nobody can be cut off."""
    package: str = "tenure"
    row: str = ""
    """Its row in the short table, which may be that of several contenders; empty if it has none."""
    fenced: bool = False
    """Whether its acts are rows of a table, behind a fence."""


def in_both(name: str, kind: str, store: str, package: str) -> Contender:
    """Return a contender with a row of its own in the short table, too."""
    return Contender(name, kind, store, package, row=name)


STORES: Mapping[str, Callable[[], Server]] = {
    "Redis": lambda: private(Redis),
    "PostgreSQL": lambda: private(Postgres),
    "ZooKeeper": lambda: private(ZooKeeper),
    "Kubernetes": lambda: private(Kubernetes),
}

TENURE = "tenure"
CONTENDERS = [
    Contender("tenure on SQLite", "tenure", row=TENURE),
    Contender("tenure on Redis", "tenure", "Redis", row=TENURE),
    Contender("tenure on PostgreSQL", "tenure", "PostgreSQL", row=TENURE),
    Contender(
        "tenure on PostgreSQL, with its fence", "tenure_fenced", "PostgreSQL", "asyncpg", row=TENURE, fenced=True
    ),
    Contender("`tenure.sync` on Redis, with `stall_after`", "tenure_threads_beating", "Redis", row=TENURE),
    Contender("`tenure.sync` on Redis, without it", "tenure_threads", "Redis"),
    in_both("redis-py `Lock` with a timeout", "redis_lock", "Redis", "redis"),
    in_both("redis-py `Lock`, renewed by a thread", "redis_lock_renewed", "Redis", "redis"),
    Contender("redis-py `Lock`, the same with short time limits", "redis_lock_renewed_in_time", "Redis", "redis"),
    in_both("python-redis-lock, `auto_renewal`", "python_redis_lock", "Redis", "redis_lock"),
    in_both("kazoo `Election`", "kazoo_election", "ZooKeeper", "kazoo"),
    in_both("kazoo `Election`, with a listener", "kazoo_election_listening", "ZooKeeper", "kazoo"),
    in_both("PostgreSQL advisory lock", "postgres_advisory_lock", "PostgreSQL", "psycopg"),
    in_both("`flock` on one machine", "flock", "", "tenure"),
    Contender("`LeaderElection` of `kubernetes`", "kubernetes_election", "Kubernetes", "kubernetes"),
]
PEERS = ("redis", "python-redis-lock", "kazoo", "psycopg", "kubernetes")


# --- measured ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """An act, in the order of the resource."""

    holder: str
    at: float


@dataclass(frozen=True)
class Outcome:
    """What a fault of A has led to."""

    took: float | None
    """Seconds from the fault to the first act of B; None if there was none."""
    late: int
    """Acts of A after the first act of B."""
    goes_on: bool
    """Whether A still acted at the end."""
    refused: int = 0
    """Acts of A that a fence has refused."""


def outcome(acts: Sequence[Act], fault_at: float, *, ended_at: float, quiet: float, refused: int = 0) -> Outcome:
    """Judge what two processes have done; A goes on if it has acted in the last *quiet* seconds."""
    first = next((place for place, act in enumerate(acts) if act.holder == "B"), None)
    if first is None:
        return Outcome(None, 0, goes_on=False, refused=refused)
    late = [act.at for act in acts[first:] if act.holder == "A"]
    goes_on = bool(late) and late[-1] > ended_at - quiet
    return Outcome(max(0.0, acts[first].at - fault_at), len(late), goes_on, refused)


class Log:
    """The acts of a trial: a file in its folder, or rows of a table."""

    def __init__(self, folder: str, name: str, connection: Any = None) -> None:
        self._file = Path(folder, "acts")
        self._file.touch()
        self._name = name
        self._connection = connection
        self.refused = 0

    async def read(self) -> list[Act]:
        """Return the acts so far, in their order."""
        lines = [line.split() for line in self._file.read_text().splitlines()]
        self.refused = sum(what == "refused" and holder == "A" for holder, what, *_ in lines)
        if self._connection is None:
            return [Act(holder, float(at)) for holder, _, at, _ in lines]
        rows = await self._connection.fetch("SELECT holder, at FROM act WHERE name = $1 ORDER BY id", self._name)
        return [Act(row["holder"], row["at"]) for row in rows]

    async def has(self, holder: str, within: float) -> bool:
        """Wait until *holder* has acted; return whether it has."""
        give_up = time.monotonic() + within
        while not any(act.holder == holder for act in await self.read()):
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(POLL)
        return True

    async def until_quiet(self, holder: str, for_: float, within: float) -> None:
        """Wait until *holder* has not acted for so many seconds from now on, but no longer than *within*."""
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + within:
            last = max((act.at for act in await self.read() if act.holder == holder), default=begun)
            if now > max(last, begun) + for_:
                return
            await asyncio.sleep(POLL)


class Process:
    """A or B."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        pipe = asyncio.subprocess.PIPE
        line = [sys.executable, "-m", "benchmarks.acting", *arguments]
        quiet = asyncio.subprocess.DEVNULL
        return cls(await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe, stderr=quiet))

    async def until_ready(self) -> None:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), START_MAX)
        if line.strip() != b"ready":
            raise RuntimeError(f"a process has ended with {await self._process.wait()}")

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # one that has lost its lease may have ended by itself
            self._process.send_signal(number)

    async def end(self) -> None:
        self.signal(signal.SIGKILL)
        await self._process.wait()


async def trial(
    contender: Contender, fault: str, server: Server | None, ttl: float, number: int, rounds: int
) -> Outcome:
    """Let A lead and B wait; let A suffer the fault; return what came of it."""
    name = f"{contender.kind}-{contender.store}-{fault}-{number}".lower()
    name = re.sub(r"[ _]+", "-", name)  # a Lease accepts no others
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tenure-bench-"))
        proxy, urls, connection = None, [f"sqlite:///{folder}/leases.db"] * 2, None
        if server is not None:
            proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", server.port))
            urls = [address_of(contender, server, port) for port in (proxy.port, server.port)]
        if contender.fenced:
            connection = await connected(server)
            stack.push_async_callback(connection.close)
        log = Log(folder, name, connection)
        resource = server.url if server is not None else ""
        pair = []
        for holder, url in zip("AB", urls, strict=True):
            pair.append(await Process.start(contender.kind, url, name, str(ttl), folder, holder, resource))
            stack.push_async_callback(pair[-1].end)
        a, b = pair
        await a.until_ready()
        await b.until_ready()
        a.tell("campaign")
        if not await log.has("A", START_MAX):
            raise RuntimeError(f"A of {contender.name} does not act")
        b.tell("campaign")
        await asyncio.sleep(SETTLED + ttl / 3 * number / rounds)  # spread over the time between two renewals
        fault_at = time.monotonic()
        suffer(a, fault, proxy)
        if await log.has("B", ttl * (2 if fault == "none" else BOUND)):
            await asyncio.sleep(SETTLED)
            recover(a, fault)
            await log.until_quiet("A", ttl, ttl * LATE_BOUND)
        ended_at = time.monotonic()
        return outcome(await log.read(), fault_at, ended_at=ended_at, quiet=ttl / 2, refused=log.refused)


def suffer(a: Process, fault: str, proxy: FaultProxy | None) -> None:
    """Let A suffer *fault*."""
    match fault:
        case "stopped":
            a.signal(signal.SIGSTOP)
        case "stopped before an act":
            a.tell("freeze")
        case "hangs":
            a.tell("hang")
        case "cut off":
            assert proxy is not None
            proxy.stall()
        case "killed":
            a.signal(signal.SIGKILL)


def recover(a: Process, fault: str) -> None:
    """Let A go on, if it was stopped or hangs. A connection stays cut."""
    if fault.startswith("stopped"):
        a.signal(signal.SIGCONT)
    elif fault == "hangs":
        a.tell("release")


def address_of(contender: Contender, server: Server, port: int) -> str:
    """Return the address of *server* at this *port*, as the contender has it."""
    if contender.kind.startswith("tenure") or contender.store in ("Redis", "PostgreSQL"):
        return server.url.replace(f":{server.port}", f":{port}")
    return f"{'http://' if contender.store == 'Kubernetes' else ''}127.0.0.1:{port}"


async def connected(server: Server | None) -> Any:
    import asyncpg

    assert server is not None
    return await asyncpg.connect(server.url)


async def prepare(server: Server) -> None:
    """Create the schema of tenure, and the table of acts."""
    async with tenure.connect(server.url) as backend:
        await backend.migrate()
    connection = await connected(server)
    await connection.execute("CREATE TABLE act (id bigserial, name text, holder text, at float8, token bigint)")
    await connection.close()


def suffers(contender: Contender, fault: str) -> bool:
    """Return whether *contender* can suffer *fault*: nobody is cut off from a file of this machine."""
    return fault != "cut off" or contender.store != ""


Found = dict[tuple[str, str], list[Outcome]]
"""The outcomes of each contender, by its name and the fault."""


async def measure(chosen: Sequence[Contender], faults: Sequence[str], rounds: int, ttl: float, lanes: int) -> Found:
    """Let all of *chosen* suffer *faults*, several at once, as they mostly wait."""
    found: Found = {}
    free = asyncio.Semaphore(lanes)
    async with AsyncExitStack() as stack:
        servers = {store: stack.enter_context(STORES[store]()) for store in {each.store for each in chosen} if store}
        if "PostgreSQL" in servers:
            await prepare(servers["PostgreSQL"])

        async def one(contender: Contender, fault: str, number: int) -> None:
            async with free:
                result = await trial(contender, fault, servers.get(contender.store), ttl, number, rounds)
            found.setdefault((contender.name, fault), []).append(result)
            print(f"{contender.name}: {fault}: {result}", file=sys.stderr, flush=True)

        async with asyncio.TaskGroup() as group:
            for number in range(rounds):
                for fault in faults:
                    for contender in chosen:
                        if suffers(contender, fault):
                            group.create_task(one(contender, fault, number))
    return found


# --- shown -------------------------------------------------------------------------------------------------------


def seconds_of(outcomes: Sequence[Outcome]) -> str:
    """Return the seconds until B has acted: the median, and the maximum; or how often it never has."""
    took = [each.took for each in outcomes if each.took is not None]
    if not took:
        return "never"
    figure = f"{statistics.median(took):.1f} ({max(took):.1f})"
    return figure if len(took) == len(outcomes) else f"{figure}; {len(outcomes) - len(took)} of {len(outcomes)} never"


def late_acts_of(outcomes: Sequence[Outcome]) -> str:
    """Return the acts of A after the first of B: the median, and the maximum; or that it does not end."""
    if all(each.took is None for each in outcomes):
        return "—"
    if any(each.goes_on for each in outcomes):
        return "goes on"
    late = [each.late for each in outcomes]
    figure = f"{statistics.median(late):.0f} ({max(late)})" if max(late) else "0"
    refused = max(each.refused for each in outcomes)
    return f"{figure}; {refused} refused" if refused else figure


def in_short(outcomes: Sequence[Outcome]) -> str:
    """Return both in a few words."""
    if not outcomes:
        return "—"
    took = [each.took for each in outcomes if each.took is not None]
    if not took:
        return "B never acts"
    least, most = f"{min(took):.0f}", f"{max(took):.0f}"
    when = f"B after {least if least == most else f'{least}–{most}'} s" if max(took) >= 0.5 else "B at once"
    if len(took) < len(outcomes):
        when += f" in {len(took)} of {len(outcomes)}"
    late = max(each.late for each in outcomes)
    if any(each.goes_on for each in outcomes):
        return f"{when}, and A goes on"
    return f"{when}, {late} late" if late else when


def table_of(found: Found, cell: Callable[[Sequence[Outcome]], str]) -> list[str]:
    """Return a table in Markdown, a row for each contender, a column for each fault."""
    names = dict.fromkeys(name for name, _ in found)
    rows = []
    for contender in CONTENDERS:
        if contender.name in names:
            cells = [
                cell(found[contender.name, fault]) if (contender.name, fault) in found else "—" for fault in FAULTS
            ]
            rows.append(f"| {contender.name} | " + " | ".join(cells) + " |")
    return ["| | " + " | ".join(FAULTS.values()) + " |", "|---" * (len(FAULTS) + 1) + "|", *rows]


SHORT = ("stopped", "hangs", "cut off", "killed")
"""The faults of the short table."""


def short_table_of(found: Found) -> list[str]:
    """Return the table for the README: rows of contenders that do the same, and fewer faults."""
    rows = []
    for row in dict.fromkeys(contender.row for contender in CONTENDERS if contender.row):
        members = [contender.name for contender in CONTENDERS if contender.row == row]
        cells = [in_short([each for name in members for each in found.get((name, fault), [])]) for fault in SHORT]
        rows.append(f"| {row} | " + " | ".join(cells) + " |")
    return ["| | " + " | ".join(FAULTS[fault] for fault in SHORT) + " |", "|---" * (len(SHORT) + 1) + "|", *rows]


def about(rounds: int, ttl: float) -> str:
    """Describe the run in a sentence."""
    versions = ", ".join(f"{name} {version(name)}" for name in PEERS)
    return (
        f"Measured on {time.strftime('%Y-%m-%d')} by `python -m benchmarks hang --rounds {rounds} --write`, leases of "
        f"{ttl:g} s, on {os.cpu_count()} processors; Python {platform.python_version()}, {versions}."
    )


def write(parts: Mapping[str, Sequence[str]]) -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in parts.items():
        mark = re.escape(f"<!-- measured: {name} -->")
        before, after = re.split(rf"(?<={mark}\n).*?(?=<!-- end -->)", text, maxsplit=1, flags=re.DOTALL)
        text = before + "\n" + "\n".join(lines) + "\n\n" + after
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks hang", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", action="append", default=[], help="a part of a contender's name; all if unset")
    arguments.add_argument("--faults", default=",".join(FAULTS), help="some of %(default)s")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ttl", type=float, default=TTL, help="seconds of a lease (default: %(default)s)")
    arguments.add_argument("--lanes", type=int, default=4, help="trials at the same time (default: %(default)s)")
    arguments.add_argument("--write", action="store_true", help=f"write the tables into {PAGE}")
    given = arguments.parse_args()
    faults = given.faults.split(",")
    if unknown := [name for name in faults if name not in FAULTS]:
        arguments.error(f"there is no fault {unknown[0]!r} here; there are {', '.join(FAULTS)}")
    named = [each for each in CONTENDERS if not given.only or any(part in each.name for part in given.only)]
    chosen = [each for each in named if find_spec(each.package)]
    if given.write and (len(chosen) < len(CONTENDERS) or len(faults) < len(FAULTS)):
        arguments.error("--write needs all contenders, installed, and all faults")
    found = asyncio.run(measure(chosen, faults, given.rounds, given.ttl, given.lanes))
    parts = {"seconds": table_of(found, seconds_of), "late acts": table_of(found, late_acts_of)}
    if len(chosen) == len(CONTENDERS):
        parts |= {"about": [about(given.rounds, given.ttl)], "short": short_table_of(found)}
    if given.write:
        write(parts)
    for name, lines in parts.items():
        print(f"\n{name}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()

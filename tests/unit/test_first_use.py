"""A budget for first use: what a process imports and makes before its first message, as counts and not as seconds.

Each use runs in a process of its own. What it doesn't need has to be imported where it is needed; see the first lines
of ``tenure._backend``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import tenure

COUNTING = """
import asyncio, collections, dataclasses, json, os, sqlite3, sys, threading  # a program by hand has these, too

made, importers, plain = collections.Counter(), {}, dataclasses.dataclass

def dataclass(kind=None, /, **options):
    def make(kind):
        made[kind.__module__] += 1
        return plain(kind, **options)
    return make if kind is None else make(kind)

class Noting:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename or frame.f_code.co_name == "__getattr__":
            frame = frame.f_back
        importers[name] = frame.f_globals["__name__"], threading.current_thread().name

dataclasses.dataclass = dataclass
sys.meta_path.insert(0, Noting())
before = set(sys.modules)
report, program, sys.argv = sys.argv[1], sys.argv[2], ["tenure", *sys.argv[3:]]
try:
    exec(compile(program, "program", "exec"), {"__name__": "program"})
except SystemExit as ended:
    assert not ended.code, ended
found = []
for name in [name for name in sys.modules if name not in before]:
    file = getattr(sys.modules[name], "__file__", None)
    size = os.path.getsize(file) if file and file.endswith(".py") else 0
    found.append((name, *importers.get(name, ("", "")), made[name], size))
with open(report, "w") as file:
    json.dump(found, file)
"""

SEND = """
import asyncio, sys, tenure

async def main():
    async with tenure.connect("sqlite:///" + sys.argv[1]) as backend:
        await backend.queue("orders").send(b"two kettles")

asyncio.run(main())
"""

SERVE = """
import sys, tenure

service = tenure.Service("sqlite:///" + sys.argv[1])
handled = []

@service.on_startup
async def begin() -> None:
    await service.backend.queue("orders").send(b"two kettles")

@service.handler("orders")
async def handle(message: tenure.Message) -> None:
    handled.append(message.body)

service.run(until_empty=True)
assert handled == [b"two kettles"]
"""

MISS = """
import asyncio, sys, tenure, tenure.events
from tenure._backends.memory.queue import MemoryBroker

async def away(*_):
    raise tenure.Unavailable("away")

async def main():
    missed, before = asyncio.Event(), set()

    def note(event):
        if isinstance(event, tenure.events.BrokerUnanswered):
            missed.set()

    async def handle(message):
        before.update(sys.modules)
        MemoryBroker.renew = away
        await missed.wait()

    async with tenure.connect("memory:", on_event=note) as backend:
        queue = backend.queue("orders", lock=2.0)
        await queue.send(b"two kettles")
        await queue.consume(handle, until_empty=True)
        assert missed.is_set()
        late = [name for name in sys.modules if name not in before and name.startswith("tenure")]
        assert not late, late

asyncio.run(main())
"""
"""A consumer whose lock can't be renewed: by then, all is imported that tells so."""

LEAD = """
import asyncio, sys, tenure

async def lead(term):
    before, least = set(sys.modules), term.remaining()
    while (remaining := term.remaining()) <= least:  # until it is renewed
        least = remaining
        await asyncio.sleep(0.01)
    late = [name for name in sys.modules if name not in before and name.startswith("tenure")]
    assert not late, late

async def main():
    async with tenure.connect("memory:") as backend:
        await backend.election("chair", ttl=1.0).run(lead)

asyncio.run(main())
"""

BLOCK = """
import tenure, tenure.sync

with tenure.sync.connect("memory:", on_event=print) as backend:
    queue = backend.queue("orders", max_deliveries=1)
    queue.send(json={"kettles": 2})
    queue.peek(ids=["1"])
    queue.handled("1")
    [message] = queue.receive()
    message.json()
    message.abandon()
    queue.dead_letters.peek(reason="max_deliveries")
    queue.schedules.list()
    queue.purge()
    try:
        queue.request(timeout=0)
    except tenure.TimedOut:
        pass
    backend.election("chair").run(lambda term: None)
    backend.leaders(), backend.queues(), backend.schedules(), backend.diagnose(write=True)
"""
"""``tenure.sync``, whose calls run on the renewal thread."""

COMMAND = "from tenure.cli import main; main()"


class Budget(NamedTuple):
    """The most that a use may import and make, and what it has no use for at all."""

    modules: int
    """Modules of tenure."""
    dataclasses: int
    """Each takes as long as five modules: its methods are compiled when it is made."""
    kilobytes: int
    """The source of these modules: what is compiled, or read from the cache."""
    others: int | None
    """Modules of the standard library beside those of asyncio and sqlite3; None where other packages are imported."""
    without: tuple[str, ...]
    """Modules that must not be imported, with all that is in them."""


SLOW = ("importlib.metadata", "importlib.resources", "multiprocessing", "platform", "sysconfig", "tempfile", "zipfile")
NOT_BEGUN = ("tenure._election.driver", "tenure._election.elector", "tenure._election.machine", "tenure._partitions")
NOT_RECEIVED = (
    "tenure._queue.bodies",
    "tenure._queue.consumer",
    "tenure._queue.dead_letters",
    "tenure._queue.effects",
    "tenure._queue.received",
    "tenure._queue.requests",
    "tenure._queue.session",
    "tenure._queue.typed",
    "tenure._schedule",
    "tenure._telemetry.log",
    "tenure._telemetry.telemetry",
    "tenure.events",
)
NOT_SERVED = (
    "tenure._queue.processes",
    "tenure._queue.session_pump",
    "tenure._queue.typed",
    "tenure._schedule.schedule",
)
OTHER_FACES = ("tenure.dashboard", "tenure.http", "tenure.sync", "tenure.telemetry", "tenure.testing")

BUDGETS = {
    "import tenure": Budget(2, 0, 11, 1, ("tenure.errors",)),
    "send": Budget(73, 39, 524, 16, (*SLOW, *NOT_BEGUN, *NOT_RECEIVED, *OTHER_FACES, "tenure._service", "secrets")),
    "serve": Budget(119, 104, 842, 24, (*SLOW, *NOT_BEGUN, *NOT_SERVED, *OTHER_FACES)),
    "--help": Budget(11, 1, 62, None, ("asyncio", "sqlite3", "tenure._backend", "tenure._connection")),
    "status": Budget(89, 49, 610, None, (*NOT_BEGUN[:3], *NOT_RECEIVED[:8], *OTHER_FACES, "tenure._service")),
}
"""The uses with their limits. To raise one, say in the commit what the use gains by it."""


class Imported(NamedTuple):
    """A module that a use has imported."""

    name: str
    importer: str
    thread: str
    dataclasses: int
    size: int

    def __str__(self) -> str:
        made = f", dataclasses: {self.dataclasses}" if self.dataclasses else ""
        return f"{self.name} ({self.size / 1_000:.0f} kB{made}), by {self.importer}"


def imported(tmp_path: Path, program: str, *arguments: str) -> list[Imported]:
    """Run *program* in a process of its own; return what it imports, in order."""
    report = tmp_path / "report.json"
    line = [sys.executable, "-c", COUNTING, str(report), program, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [Imported(*each) for each in json.loads(report.read_text(encoding="utf-8"))]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def beyond(found: list[Imported], budget: Budget) -> list[str]:
    """Return what is beyond the *budget*, in words; and what was imported, if that is too much."""
    problems = [f"must not import {one}" for one in found for package in budget.without if is_within(one.name, package)]
    ours = [one for one in found if is_within(one.name, "tenure")]
    others = [one for one in found if not is_within(one.name, "tenure")]
    counts = [
        ("modules of tenure", len(ours), budget.modules, ours),
        ("dataclasses", sum(one.dataclasses for one in ours), budget.dataclasses, ours),
        ("kB of source", sum(one.size for one in ours) // 1_000, budget.kilobytes, ours),
    ]
    if budget.others is not None:
        counts.append(("other modules", len(others), budget.others, others))
    for what, count, most, which in counts:
        if count > most:
            dearest = sorted(which, key=lambda one: (-one.dataclasses, -one.size))
            problems.append(f"{count} {what} instead of {most} at most:\n    " + "\n    ".join(map(str, dearest)))
    return problems


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that was used before."""
    path = tmp_path_factory.mktemp("first-use") / "work.db"
    with tenure.sync.connect(f"sqlite:///{path}") as backend:
        backend.election("chair").run(lambda term: None)
    return str(path)


def used(use: str, tmp_path: Path, file: str) -> list[Imported]:
    """Run a process for this *use*; return what it imports."""
    match use:
        case "import tenure":
            return imported(tmp_path, use)
        case "send":
            return imported(tmp_path, SEND, str(tmp_path / "new.db"))
        case "serve":
            return imported(tmp_path, SERVE, str(tmp_path / "new.db"))
    for package in ("click", "rich"):
        pytest.importorskip(package)
    return imported(tmp_path, COMMAND, use, *(["--on", f"sqlite:///{file}"] if use == "status" else []))


@pytest.mark.parametrize("use", BUDGETS)
def test_first_use_keeps_to_its_budget(use: str, tmp_path: Path, file: str) -> None:
    problems = beyond(used(use, tmp_path, file), BUDGETS[use])
    assert not problems, "\n".join([f"{use}:", *problems])


@pytest.mark.parametrize("use", BUDGETS)
def test_no_budget_is_larger_than_its_use(use: str, tmp_path: Path, file: str) -> None:
    found = used(use, tmp_path, file)
    budget = BUDGETS[use]
    modules, dataclasses, kilobytes = (int(0.9 * most) for most in budget[:3])
    less = Budget(modules, dataclasses, kilobytes, None, ())
    assert len(beyond(found, less)) == sum(most > 0 for most in budget[:3]), "lower the limits, or they find nothing"


def test_what_is_beyond_a_budget_is_named(tmp_path: Path) -> None:
    found = imported(tmp_path, SEND + "import tenure.events, xml.dom, xml.sax", str(tmp_path / "new.db"))
    budget = BUDGETS["send"]
    forbidden, dataclasses, others = beyond(found, budget._replace(modules=999, kilobytes=999))
    assert forbidden == "must not import tenure.events (8 kB, dataclasses: 26), by program"
    assert dataclasses.startswith(f"{budget.dataclasses + 26} dataclasses instead of {budget.dataclasses} at most:\n")
    assert "tenure.events (8 kB, dataclasses: 26), by program" in dataclasses
    assert "xml.dom" in others


@pytest.mark.parametrize("budget", BUDGETS.values())
def test_what_must_not_be_imported_exists(budget: Budget) -> None:
    assert all(find_spec(name) for name in budget.without)


@pytest.mark.parametrize("program", [SEND, SERVE, MISS, LEAD, BLOCK], ids=["send", "serve", "miss", "lead", "block"])
def test_only_the_threads_of_the_program_import(program: str, tmp_path: Path) -> None:
    found = imported(tmp_path, program, str(tmp_path / "new.db"))
    # The renewal thread, on which leases and locks depend, must not wait for a disk.
    assert not [f"{one}, on {one.thread}" for one in found if one.name[:6] == "tenure" and one.thread != "MainThread"]


def test_whoever_receives_has_imported_what_tells_of_a_death(tmp_path: Path) -> None:
    """Also on a store that doesn't ask for it: PostgreSQL and Redis have that rule in their own languages."""
    names = {one.name for one in imported(tmp_path, "import tenure._queue.received")}
    assert "tenure._queue.delivery_ends" in names

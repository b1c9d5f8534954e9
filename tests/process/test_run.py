"""``tenure run`` with real processes: kills, signals, a burst with scaling, replacement, and no orphan."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import tenure.sync
from tenure._queue.pump import BACKLOG_MAX
from tenure.sync import Queue
from tests import warm
from tests.durations import PATIENCE, wait_until
from tests.long import LONG
from tests.process_states import is_alive

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

MESSAGES = 50_000 if LONG else 4_000

CONCURRENCY = 10

WORKER = f"""
import asyncio, os, sqlite3, time
import tenure, tenure.sync

service = tenure.Service("sqlite:///work.db")
orders = service.queue("orders", int, lock=float(os.environ["LOCK"]))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@service.on_startup
def start():
    global done
    done = sqlite3.connect("done.db", timeout=60, isolation_level=None)
    if os.path.exists("hang"):
        time.sleep(3600)

@service.handler(orders, concurrency={CONCURRENCY}, grace=50)
async def serve(number: int) -> None:
    if number < 0:
        say("begins", os.getpid())
    try:
        await asyncio.sleep(0.005 if number >= 0 else -number / 10)
    except asyncio.CancelledError:
        say("interrupted", number)
        raise
    done.execute("insert into done values (?, ?)", [number, os.getpid()])

@service.leader("chair", ttl=float(os.environ["LOCK"]))
async def lead(term: tenure.Term) -> None:
    await asyncio.sleep(3600)

if os.path.exists("broken"):
    raise KeyError("broken")
if os.path.exists("exits"):
    os._exit(9)
"""

PLAIN = """
import os, time
import tenure.sync

service = tenure.sync.Service()
orders = service.queue("orders", int)

@service.on_startup
def start():
    orders.send_batch([1, 2])

@service.handler(orders)
def serve(number: int) -> None:
    os.write(1, f"served {number}\\n".encode())
"""


LOOPS = """
from worker import asyncio, say, service

@service.on_startup
async def tell():
    say(type(asyncio.get_running_loop()).__module__)
"""


class Run:
    """One ``tenure run``."""

    def __init__(self, folder: Path, *arguments: str, service: str = "worker:service") -> None:
        self.folder = folder
        number = len(list(folder.glob("events-*")))
        self.events_file, self.output = folder / f"events-{number}", folder / f"output-{number}"
        self._out, self._err = self.events_file.open("wb"), self.output.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tenure", "run", service, "--json", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            process_group=0,
            env={**os.environ, "TENURE_URL": "sqlite:///plain.db"},
        )

    def lines(self) -> list[str]:
        """Return what the processes of the service have printed."""
        return [line for line in self.events_file.read_text().splitlines() if not line.startswith("{")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [line for line in self.events_file.read_text().splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def shown(self) -> str:
        return self.events_file.read_text() + self.output.read_text()

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.events(kind)) >= count, self.shown)
        return self.events(kind)

    def pids(self) -> set[int]:
        """Return the processes that have begun, and were not reported to have ended."""
        begun = {event["pid"] for event in self.events("begun")}
        return begun - {event["pid"] for kind in ("ended", "crashed") for event in self.events(kind)}

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.shown()) from None

    def close(self) -> None:
        for pid in {self.process.pid, *(event["pid"] for event in self.events("begun"))}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._out.close()
        self._err.close()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, lock: float) -> Iterator[Start]:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "plain.py").write_text(PLAIN)
    with closing(sqlite3.connect(tmp_path / "done.db")) as done:
        done.execute("pragma journal_mode=wal")
        done.execute("create table done (number integer, pid integer)")
    started: list[Run] = []

    def start(*arguments: str, **options: str) -> Run:
        started.append(Run(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def orders(tmp_path: Path, lock: float) -> Iterator[Queue]:
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        yield backend.queue("orders", lock=lock)


def done(folder: Path) -> Counter[int]:
    with closing(sqlite3.connect(folder / "done.db", timeout=60)) as database:
        return Counter(number for (number,) in database.execute("select number from done"))


def repeated(folder: Path) -> set[int]:
    """Return the processes that have handled a message that was handled once more later."""
    with closing(sqlite3.connect(folder / "done.db", timeout=60)) as database:
        later = "select 1 from done as later where later.number = done.number and later.rowid > done.rowid"
        database.execute("create index if not exists by_number on done (number)")
        return {pid for (pid,) in database.execute(f"select pid from done where exists ({later})")}


def test_so_many_processes_run_and_end_with_a_signal(start: Start, orders: Queue) -> None:
    run = start("--processes", "2")
    pids = {event["pid"] for event in run.wait_for("begun", 2)}
    orders.send(json=-10)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert orders.stats() == tenure.Stats()  # the handler has finished
    assert not any(map(is_alive, pids))
    assert [event["event"] for event in run.events("stopping")] == ["stopping"]


def test_a_process_that_is_killed_is_started_again_and_its_message_comes_back(start: Start, orders: Queue) -> None:
    run = start()
    run.wait_for("begun")
    orders.send(json=-15)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    (pid,) = run.pids()
    os.kill(pid, signal.SIGKILL)
    (crash,) = run.wait_for("crashed")
    assert (crash["pid"], "ended by signal 9" in crash["text"]) == (pid, True)
    run.wait_for("begun", 2)
    wait_until(lambda: done(run.folder)[-15] == 1, run.shown)
    run.send_signal(signal.SIGINT)
    assert run.ended() == 0


def test_a_process_that_somebody_stops_is_started_again(start: Start, orders: Queue) -> None:
    run = start()
    run.wait_for("begun")
    (pid,) = run.pids()
    os.kill(pid, signal.SIGTERM)
    run.wait_for("begun", 2)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_without_the_supervisor_the_processes_end_by_themselves(start: Start, orders: Queue) -> None:
    run = start("--processes", "3")
    run.wait_for("begun", 3)
    orders.send(json=-10)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    pids = run.pids()
    run.send_signal(signal.SIGKILL)
    run.ended()
    wait_until(lambda: not any(map(is_alive, pids)), run.shown)
    assert done(run.folder)[-10] == 1  # the handler has finished
    assert orders.stats() == tenure.Stats()


def test_a_second_signal_cancels_the_handlers(start: Start, orders: Queue) -> None:
    run = start()
    run.wait_for("begun")
    orders.send(json=-400)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    run.send_signal(signal.SIGTERM)
    run.wait_for("stopping")
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert "interrupted -400" in run.lines()
    (again,) = orders.receive(wait=PATIENCE)
    assert again.delivery_count == 1  # it was given back uncounted


def test_a_burst_with_kills_is_served_once_and_scaling_in_interrupts_nothing(
    start: Start, orders: Queue, tmp_path: Path
) -> None:
    for first in range(0, MESSAGES, 1_000):
        orders.send_batch([tenure.Outgoing.json(number) for number in range(first, first + 1_000)])
    scaled = ("--processes", "2..6", "--look-every", "0.5s", "--calm", "1s")
    run = start(*scaled)
    run.wait_for("begun", 4)
    killed = min(run.pids())
    os.kill(killed, signal.SIGKILL)
    run.wait_for("crashed")
    left = orders.stats().ready
    wait_until(lambda: orders.stats().ready <= max(left - 200, 0), run.shown)
    run.send_signal(signal.SIGTERM)  # in the middle, unless this process comes late
    assert run.ended() == 0
    run = start(*scaled)
    run.wait_for("begun", 2)
    if orders.stats().ready > 500:
        pids = run.pids()
        run.send_signal(signal.SIGKILL)
        run.ended()
        wait_until(lambda: not any(map(is_alive, pids)), run.shown)
        run = start(*scaled)
    wait_until(lambda: orders.stats() == tenure.Stats(), run.shown)
    orders.send_batch([tenure.Outgoing.json(-20 - number) for number in range(40)])  # they take two seconds and more
    wait_until(lambda: any(event["event"] == "retiring" for event in run.events("retiring")), run.shown)
    wait_until(lambda: orders.stats() == tenure.Stats(), run.shown)
    wait_until(lambda: len(run.pids()) == 2, run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert [line for line in run.lines() if line.startswith("interrupted")] == []
    counts = done(tmp_path)
    assert [number for number in range(MESSAGES) if not counts[number]] == []
    # Only what the killed process had not settled was done twice. It settles while handlers go on, many at a time.
    assert repeated(tmp_path) <= {killed}
    assert sum(count - 1 for count in counts.values() if count > 1) <= (BACKLOG_MAX + 1) * CONCURRENCY
    assert all(counts[-20 - number] == 1 for number in range(40))


def test_an_old_process_is_replaced_once_another_has_begun(start: Start, orders: Queue) -> None:
    run = start("--max-age", "2s")
    run.wait_for("begun")
    orders.send(json=-30)
    run.wait_for("retiring", 2)
    events = [json.loads(line) for line in run.events_file.read_text().splitlines() if line.startswith("{")]
    kinds = [event["event"] for event in events]
    assert kinds[: kinds.index("retiring")].count("begun") == 2  # on a busy machine, both may have started before
    wait_until(lambda: done(run.folder)[-30] == 1, run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert [line for line in run.lines() if line.startswith("interrupted")] == []


def test_hup_replaces_all_and_ttin_adds_one(start: Start) -> None:
    run = start("--processes", "2")
    run.wait_for("begun", 2)
    before = run.pids()
    run.send_signal(signal.SIGHUP)
    run.wait_for("ended", 2)
    wait_until(lambda: len(run.pids()) == 2, run.shown)
    assert not run.pids() & before
    run.send_signal(signal.SIGTTIN)
    wait_until(lambda: len(run.pids()) == 3, run.shown)
    run.send_signal(signal.SIGTTOU)
    wait_until(lambda: len(run.pids()) == 2, run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_a_change_of_a_file_replaces_the_process(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("watchfiles")
    run = start("--reload")
    run.wait_for("begun")

    def is_noticed() -> bool:
        (tmp_path / "other.py").write_text(f"x = {time.monotonic()}")
        return bool(run.events("reload"))

    wait_until(is_noticed, run.shown)
    run.wait_for("retiring")
    run.wait_for("begun", 2)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_on_uvloop_it_serves_leads_and_stops(start: Start, orders: Queue, tmp_path: Path) -> None:
    orders.send_batch([tenure.Outgoing.json(number) for number in range(100)])
    (tmp_path / "loops.py").write_text(LOOPS)
    run = start("--processes", "2", "--uvloop", service="loops:service")
    wait_until(lambda: len(set(done(tmp_path))) == 100 and "uvloop" in run.lines(), run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert set(run.lines()) == {"uvloop"}


def test_until_empty_it_ends_by_itself(start: Start, orders: Queue, tmp_path: Path) -> None:
    orders.send_batch([tenure.Outgoing.json(number) for number in range(100)])
    run = start("--processes", "2", "--until-empty")
    assert run.ended() == 0
    assert set(done(tmp_path)) == set(range(100))


def test_a_service_of_plain_functions_takes_its_store_from_the_command_line(start: Start, tmp_path: Path) -> None:
    run = start("--until-empty", "--on", "sqlite:///other.db", service="plain:service")
    assert run.ended() == 0
    assert sorted(run.lines()) == ["served 1", "served 2"]
    assert (tmp_path / "other.db").exists()
    assert not (tmp_path / "plain.db").exists()


def test_a_process_that_hangs_before_it_begins_is_killed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    run = start("--begin-within", "8s")
    (killed,) = run.wait_for("killed")
    assert killed["text"] == "it has not begun within 8 s"
    (tmp_path / "hang").unlink()
    run.wait_for("begun")
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_processes_that_can_not_begin_end_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "exits").touch()
    run = start()
    assert run.ended() == 9
    assert len(run.events("crashed")) == 5
    (tmp_path / "exits").unlink()
    (tmp_path / "broken").touch()
    run = start("--processes", "2")
    assert run.ended() == 78  # no retry mends it
    assert "the module 'worker' raised KeyError: 'broken'" in run.output.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["worker"], 2, "'worker' is not of the form module:service"),
        (["worker:servic"], 127, "the module 'worker' has no such service"),
        (["worker:orders"], 127, "has a TypedQueue there, not a tenure.Service"),
        (["wrker:service"], 127, "the module can't be imported: No module named 'wrker'"),
        (["worker.service:service"], 127, "the module can't be imported: No module named 'worker.service'"),
        (["worker:service", "--processes", "0"], 78, "at least one process must run, not 0"),
        (["worker:service", "--processes", "6..2"], 78, "try 2..6"),
        (["worker:service", "--processes", "many"], 2, "'many' is no number of processes, and no range of it"),
        (["worker:service", "--max-memory", "lots"], 2, "'lots' is no size in bytes; write for example 512M"),
        (["worker:service", "-v", "-q"], 2, "contradict each other"),
    ],
)
def test_wrong_inputs(start: Start, tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    done = warm.run(["run", *arguments], cwd=tmp_path)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


BROKEN = {
    "1 / 0\n": (
        78,
        "the module 'shop.models', which 'shop.worker' imports, raised ZeroDivisionError: division by zero",
    ),
    "import nosuch\n": (
        127,
        "the module 'shop.models', which 'shop.worker' imports, raised ModuleNotFoundError: No module named 'nosuch'",
    ),
    "def f(:\n": (78, "models.py, line 1 raised SyntaxError: invalid syntax"),
    "import json\njson.loads('{')\n": (
        78,
        "the module 'shop.models', which 'shop.worker' imports, raised JSONDecodeError: Expecting",
    ),
    "class Own(Exception): ...\nraise Own('a\\nb')\n": (78, "imports, raised Own: a b"),
    "class Mute(Exception):\n    def __str__(self): 1 / 0\nraise Mute\n": (
        78,
        "the module 'shop.models', which 'shop.worker' imports, raised Mute, which can't be printed",
    ),
    "raise RuntimeError('a\\ntenure: b')\n": (78, "imports, raised RuntimeError: a tenure: b"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_module_that_fails_is_named_with_its_traceback(start: Start, tmp_path: Path, text: str) -> None:
    code, says = BROKEN[text]
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "models.py").write_text(text)
    (tmp_path / "shop" / "worker.py").write_text(f"from shop import models\n{WORKER}")
    run = start(service="shop.worker:service")
    assert run.ended() == code
    *shown, error = run.output.read_text().splitlines()
    assert error.startswith("tenure: error: 'shop.worker:service': ")
    assert says in error
    assert shown[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in shown if line)
    assert any(f'{tmp_path}/shop/models.py", line ' in line for line in shown)
    assert not any("importlib" in line or "entry_points" in line for line in shown)


def test_an_order_that_comes_while_the_module_is_imported_is_obeyed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"import os, time\nopen('importing', 'w').close()\ntime.sleep(1)\n{WORKER}")
    for pause in (0.0, 0.3, 0.9):
        run = start("--grace", "20s")
        wait_until(lambda: (tmp_path / "importing").exists(), run.shown)
        time.sleep(pause)
        run.send_signal(signal.SIGTERM)
        assert run.ended() == 0
        assert run.events("killed") == []
        (tmp_path / "importing").unlink()


def test_a_process_that_is_retired_while_it_is_imported_ends(start: Start, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"import time\ntime.sleep(1)\n{WORKER}")
    run = start()
    run.wait_for("begun")
    for number in range(2, 5):
        run.send_signal(signal.SIGTTIN)
        run.wait_for("started", number)
        run.send_signal(signal.SIGTTOU)
        run.wait_for("retiring", number - 1)
    wait_until(lambda: len(run.events("ended")) == len(run.events("retiring")) > 0, run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert run.events("killed") == []


def test_without_the_supervisor_a_process_that_is_still_imported_ends(start: Start, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(3600)\n")
    run = start("--grace", "1s")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), run.shown)
    run.send_signal(signal.SIGKILL)
    run.ended()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), run.shown)


def test_a_signal_to_the_whole_group_of_a_service_manager_is_one_request(start: Start, orders: Queue) -> None:
    run = start()
    run.wait_for("begun")
    orders.send(json=-20)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    (pid,) = run.pids()
    run.send_signal(signal.SIGTERM)  # systemd sends it to each process of the unit
    os.kill(pid, signal.SIGTERM)
    assert run.ended() == 0
    assert done(run.folder)[-20] == 1


def test_with_a_range_it_also_ends_when_all_queues_are_empty(start: Start, orders: Queue, tmp_path: Path) -> None:
    orders.send_batch([tenure.Outgoing.json(-10 - number) for number in range(44)])
    run = start("--until-empty", "--processes", "1..4", "--look-every", "0.3s", "--calm", "0.5s")
    run.wait_for("begun", 2)
    run.send_signal(signal.SIGHUP)
    assert run.ended() == 0
    assert [line for line in run.lines() if line.startswith("interrupted")] == []
    assert set(done(tmp_path)) == {-10 - number for number in range(44)}


def test_it_ends_gracefully_when_its_output_is_not_read_any_more(start: Start, orders: Queue, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tenure", "run", "worker:service", "--json", "--processes", "2"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0)
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        text = process.stdout.readline().decode()
        if text.startswith("{") and (event := json.loads(text))["event"] == "begun":
            pids.append(event["pid"])
    orders.send(json=-10)
    wait_until(lambda: orders.stats().locked == 1, lambda: str(orders.stats()))
    process.stdout.close()
    os.kill(pids[0], signal.SIGKILL)  # what is to be told of that finds no reader
    assert process.wait(PATIENCE) == 141
    assert not any(map(is_alive, pids))


def test_what_else_is_written_to_its_pipe_is_ignored(start: Start, orders: Queue, tmp_path: Path) -> None:
    noise = """
import os, sys
for text in (b"hello\\n", b"5\\n", b"{}\\n", b'{"running": "x"}\\n', b"x" * 3_000_000):
    os.set_blocking(int(sys.argv[3]), True)
    os.write(int(sys.argv[3]), text)
os.write(int(sys.argv[3]), b"\\n")
os.set_blocking(int(sys.argv[3]), False)
"""
    (tmp_path / "worker.py").write_text(f"{noise}\n{WORKER}")
    run = start("--processes", "1")
    run.wait_for("begun")
    orders.send(json=-1)
    wait_until(lambda: done(run.folder)[-1] == 1, run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_a_supervisor_that_is_stopped_for_a_while_kills_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        f"{WORKER}\n@service.on_startup\ndef note(): open(f'at-{{os.getpid()}}', 'w')\n"
    )
    run = start("--begin-within", "8s", "--processes", "2")
    run.wait_for("started", 2)
    time.sleep(0.5)  # both are processes by now, and being imported
    run.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_until(lambda: len(list(tmp_path.glob("at-*"))) == 2 and time.monotonic() > stopped_at + 9, run.shown)
    run.send_signal(signal.SIGCONT)
    run.wait_for("begun", 2)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert run.events("killed") == []


def test_a_broken_change_does_not_end_what_works(start: Start, orders: Queue, tmp_path: Path) -> None:
    run = start()
    run.wait_for("begun")
    orders.send(json=-30)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    (tmp_path / "worker.py").write_text("this is no Python\n")
    run.send_signal(signal.SIGHUP)
    run.wait_for("crashed")
    (tmp_path / "worker.py").write_text(WORKER)
    run.wait_for("begun", 2)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert done(run.folder)[-30] == 1


def test_what_hangs_at_its_end_is_killed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"{WORKER}\n@service.on_shutdown\ndef hang():\n    time.sleep(3600)\n")
    run = start("--grace", "1s")
    run.wait_for("begun")
    before = run.pids()
    run.send_signal(signal.SIGHUP)
    run.wait_for("begun", 2)
    run.wait_for("killed")
    wait_until(lambda: not any(map(is_alive, before)), run.shown)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0

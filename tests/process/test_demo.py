"""``tenure demo``, for real: kills a worker and its leader, gets the right result, detects a wrong one, and leaves
nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests import warm
from tests.durations import until, wait_until
from tests.process_states import children_of, is_alive
from tests.servers import Azurite, Etcd, Kubernetes, Nats, Postgres, Redis, ZooKeeper, url_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

Start = Callable[..., subprocess.Popen[str]]
LONG_ENOUGH = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder: Python, text, an empty file, and an unreadable one."""
    made = tmp_path / "input"
    (made / "below").mkdir(parents=True)
    for number in range(20):
        (made / "below" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n")
    (made / "empty").touch()
    (made / "text").write_text("so much depends\n")
    (made / "unreadable").symlink_to("/proc/self/mem")  # not even root can read its beginning
    return made


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    made = tmp_path / "tmp"
    made.mkdir()
    return made


@pytest.fixture
def start(folder: Path, temporary: Path) -> Iterator[Start]:
    started = []

    def demo(*arguments: str, ttl: str | None = "1") -> subprocess.Popen[str]:
        lease = [] if ttl is None else ["--ttl", ttl]
        process = subprocess.Popen(
            [sys.executable, "-m", "tenure.cli", "demo", "--input", folder, *lease, "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        started.append(process)
        return process

    yield demo
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    output, happened = process.communicate(timeout=LONG_ENOUGH)
    assert output, happened
    return json.loads(output), happened


def wait_for_a_leader(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "is elected" in line:
            return
    raise AssertionError("no leader was elected:\n" + "".join(said))


def test_a_worker_and_the_leader_are_killed_and_the_result_is_right(
    start: Start, temporary: Path, tmp_path: Path
) -> None:
    process = start("--instances", "3", "--keep", str(tmp_path / "kept"))
    summary, happened = finish(process)
    assert process.returncode == 0, summary
    assert summary["ok"] is True
    assert summary["equals_plain_run"] is True
    assert summary["total"]["files"] == 23
    assert (summary["lost"], summary["counted_twice"]) == ([], [])
    assert summary["unreadable"] == {"unreadable": "Input/output error"}
    check_kills(summary, happened)
    check_messages(summary)
    assert {"store.db", "ledger.db", "poison.py"} <= {path.name for path in (tmp_path / "kept").iterdir()}
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "ttl"),
    [(Redis, 2.0), (Postgres, 2.0), (Nats, 2.0), (Azurite, 15.0)],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_it_runs_on_a_server_with_the_shortest_lease_that_this_allows(
    start: Start, kind: type[Redis | Postgres | Nats | Azurite], ttl: float
) -> None:
    url = url_of(kind)
    if kind is Postgres:
        subprocess.run([sys.executable, "-m", "tenure.cli", "migrate", url], check=True, stdout=subprocess.DEVNULL)
    process = start("--instances", "3", "--on", url, ttl=None)
    summary, happened = finish(process)
    assert process.returncode == 0, (summary["problems"], happened)
    assert (summary["ok"], summary["problems"]) == (True, [])
    assert (summary["ttl"], summary["lock"]) == (ttl, 3.0)
    assert summary["queue_url"] == summary["url"]
    assert summary["equals_plain_run"] is True
    assert (summary["lost"], summary["counted_twice"]) == ([], [])
    check_kills(summary, happened)
    check_messages(summary)


@pytest.mark.parametrize("kind", [Etcd, ZooKeeper, Kubernetes], ids=lambda kind: str(kind.__name__))
def test_on_a_store_without_queues_the_messages_are_in_a_file(
    start: Start, temporary: Path, tmp_path: Path, kind: type[Etcd | ZooKeeper | Kubernetes]
) -> None:
    url = url_of(kind)
    process = start("--instances", "3", "--on", url, "--keep", str(tmp_path / "kept"), ttl=None)
    summary, happened = finish(process)
    assert process.returncode == 0, (summary["problems"], happened)
    assert summary["url"] == url
    assert summary["queue_url"] == f"sqlite:///{tmp_path / 'kept' / 'queue.db'}"
    assert f"the leases are in {kind.scheme}, which has no queues" in happened
    assert summary["equals_plain_run"] is True
    assert (summary["lost"], summary["counted_twice"]) == ([], [])
    check_kills(summary, happened)
    assert list(temporary.iterdir()) == []


def check_kills(summary: dict[str, Any], happened: str) -> None:
    tokens = [term["token"] for term in summary["terms"]]
    assert len(tokens) >= 2
    assert tokens == sorted(set(tokens))
    worker, leader = summary["worker_killed"], summary["failover"]
    assert worker["again"] > 0
    assert 0 < leader["elected"] <= leader["wrote"]
    assert "too old" in leader["refusal"]
    assert worker["instance"] != leader["instance"]
    for killed in (worker, leader):
        assert f"kill -9 {killed['pid']}" in happened
        assert not is_alive(killed["pid"])


def check_messages(summary: dict[str, Any]) -> None:
    assert summary["messages"] == 24  # one for each file, and one for the one that always fails
    assert summary["redeliveries"] >= 2  # that of the killed worker's message, and some of the one that always fails
    assert summary["results_again"] >= 1
    [letter] = summary["dead_letters"]
    assert (letter["poison"], letter["reason"], letter["deliveries"]) == (True, "max_deliveries", 5)
    assert "TooDeep: " in letter["why"]


def test_a_result_that_differs_is_a_failure(start: Start, folder: Path, temporary: Path) -> None:
    (folder / "restless").symlink_to("/proc/sys/kernel/random/uuid")  # its content changes at each read
    process = start("--instances", "3", "--on", f"sqlite:///{folder.parent / 'given.db'}")
    summary, _ = finish(process)
    assert process.returncode == 1
    assert summary["ok"] is False
    assert summary["equals_plain_run"] is False
    assert summary["differing"] == ["restless"]
    assert "restless" in summary["problems"][0]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_ends_everything(start: Start, temporary: Path, number: signal.Signals) -> None:
    process = start()
    wait_for_a_leader(process)
    pids = children_of(process.pid)
    assert len(pids) >= 4
    process.send_signal(number)
    process.communicate(timeout=LONG_ENOUGH)
    assert process.returncode == 128 + number
    assert not any(is_alive(pid) for pid in pids)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "one stopped"])
async def test_no_process_outlives_a_killed_director(start: Start, stopped: bool) -> None:
    process = start()
    wait_for_a_leader(process)
    pids = children_of(process.pid)
    assert len(pids) >= 4
    if stopped:  # as the director itself does, before it kills a worker
        os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    await until(lambda: not any(is_alive(pid) for pid in pids), what="the end of all instances")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--instances", "2"], 2, "2 is not in the range"),
        (["--input", "/nowhere"], 78, "/nowhere is not a folder"),
        (["--on", "memory:"], 78, "the instances are several"),
        (["--keep", "."], 78, "is not empty"),
        (["--ttl", "0.001"], 78, "ttl"),
        (["--dashboard", "0.0.0.0:0"], 78, "a token is needed"),
    ],
)
def test_a_wrong_argument_gives_one_line(folder: Path, arguments: list[str], code: int, says: str) -> None:
    ended = warm.run(["demo", "--input", folder, "--ttl", "1", "--json", *arguments])
    assert ended.returncode == code
    assert ended.stdout == ""
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_it_can_be_watched_in_a_browser_until_an_interrupt(start: Start) -> None:
    pytest.importorskip("starlette")
    process = start("--instances", "3", "--dashboard")
    assert process.stderr is not None
    found = re.search(r"watch it at (http://127\.0\.0\.1:\d+)", process.stderr.readline())
    assert found is not None

    def page() -> str:
        with urlopen(found[1], timeout=30) as answer:
            return str(answer.read().decode())

    wait_until(lambda: "demo" in page())
    for line in process.stderr:
        if "the dashboard stays" in line:
            break
    assert "demo" in page()
    process.send_signal(signal.SIGINT)
    summary, _ = finish(process)
    assert (process.returncode, summary["ok"]) == (0, True)

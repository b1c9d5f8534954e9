"""The commands on etcd, ZooKeeper and Kubernetes: an election from its first leader to its end, as an operator sees
it; a leader that is another program; ``doctor``."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tenure._cli.exits import Exit
from tenure._cli.explanations import sections
from tenure.cli import main
from tests import warm
from tests.durations import PATIENCE, wait_until
from tests.process_states import is_alive
from tests.servers import Etcd, Kubernetes, Server, ZooKeeper, private, shared
from tests.servers.etcd import in_base64
from tests.servers.kubernetes import lease_path

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

Kind = type[Etcd | ZooKeeper | Kubernetes]
Captured = pytest.CaptureFixture[str]

each_kind = pytest.mark.parametrize("kind", [Etcd, ZooKeeper, Kubernetes], ids=lambda kind: str(kind.__name__))

LONG = ("--ttl", "30", "--retry-every", "2")
"""For a term that must not end by the load of the machine. 4 s after it was asked to resign, it stands by again."""
SHORT = ("--ttl", "6")
"""For a term whose end is waited for."""

REPORTING = "echo $TENURE_TOKEN $$; exec sleep 600"


class Started:
    """A command of tenure as a process; its output is in files, so that a test can wait for a line."""

    def __init__(self, folder: Path, label: str, *line: str) -> None:
        self._out, self._err = folder / f"{label}.out", folder / f"{label}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = warm.start(line, stdout=out.fileno(), stderr=err.fileno())

    def lines(self) -> list[str]:
        """Return the complete lines of its standard output."""
        return [line for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_warning(self, pattern: str) -> None:
        """Wait until its standard error has the *pattern*."""
        wait_until(lambda: re.search(pattern, self._err.read_text()), self.output)

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Wait until the last line of its standard output has the *pattern*."""
        wait_until(lambda: re.search(pattern, "".join(self.lines()[-1:])), self.output)
        found = re.search(pattern, "".join(self.lines()[-1:]))
        assert found, self.output()
        return found

    def wait_for_term(self, number: int = 1) -> tuple[int, int]:
        """Wait until its command runs in its term of this *number*; return the token and the command's process."""
        wait_until(lambda: len(self.lines()) >= number, self.output)
        token, pid = self.lines()[number - 1].split()
        return int(token), int(pid)

    def end(self, how: signal.Signals) -> int:
        self._process.send_signal(how)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def output(self) -> str:
        return f"it did not happen:\n{self._out.read_text()}\n{self._err.read_text()}"


Start = Callable[..., Started]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def name() -> str:
    return f"nightly-{secrets.token_hex(6)}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(label: str, *line: str) -> Started:
        started.append(Started(tmp_path, label, *line))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.fixture
def cli(capsys: Captured) -> Cli:
    """A command that ends, run in this process; it returns the exit code and both outputs."""

    def run(*line: str) -> tuple[int, str, str]:
        return (main(line), *capsys.readouterr())

    return run


# --- an election -------------------------------------------------------------------------------------------------


@each_kind
def test_an_election_from_its_first_leader_to_its_end(kind: Kind, start: Start, cli: Cli, name: str) -> None:
    on = ("--on", shared(kind).url)
    work = ("--", "sh", "-c", REPORTING)
    first = start("first", "lead", name, *on, *LONG, "--label", "first", "-m", "addr=10.0.0.1:80", *work)
    token, pid = first.wait_for_term()
    second = start("second", "lead", name, *on, *SHORT, "--label", "second", *work)
    second.wait_for_warning(rf"tenure: {name}: standing by; first-[0-9a-f]{{32}}#1 leads, term {token}\n")
    holder = status_of(cli, name, on, "first", token, "addr=10.0.0.1:80")
    watch = start("watch", "watch", name, *on)
    watch.wait_for_line(rf"\+00:00  {holder}  token {token}  addr=10\.0\.0\.1:80$")

    code, out, err = cli("resign", name, *on, "--wait", f"{PATIENCE:g}")
    assert (code, err) == (Exit.DONE, "")
    assert out.startswith(f"{holder} (token {token}) has stepped down from '{name}'; ")
    second_token, second_pid = second.wait_for_term()
    assert second_token > token
    assert not is_alive(pid)
    holder = status_of(cli, name, on, "second", second_token)
    watch.wait_for_line(rf"  {holder}  token {second_token}$")
    first.wait_for_warning(rf"standing by; {holder} leads, term {second_token}\n")

    assert second.end(signal.SIGKILL) == -signal.SIGKILL
    last_token, pid = first.wait_for_term(2)
    assert last_token > second_token
    assert not is_alive(second_pid)
    status_of(cli, name, on, "first", last_token, "addr=10.0.0.1:80")
    watch.wait_for_line(rf"  first-\w+#\d+  token {last_token}  addr=10\.0\.0\.1:80$")

    assert first.end(signal.SIGTERM) == Exit.SIGNAL + signal.SIGTERM
    assert not is_alive(pid)
    watch.wait_for_line(r"  \(none\)$")
    assert watch.end(signal.SIGINT) == Exit.DONE
    is_vacant(cli, name, on)


def status_of(cli: Cli, name: str, on: tuple[str, ...], label: str, token: int, metadata: str = "") -> str:
    """Check that every form of ``status`` shows this leader; return the holder."""
    code, out, err = cli("status", name, *on, "--json")
    assert (code, err) == (Exit.DONE, "")
    found = json.loads(out)
    holder = str(found["leader"])
    assert re.fullmatch(rf"{label}-[0-9a-f]{{32}}#\d+", holder)
    assert (found["name"], found["token"], found["vacant_for"]) == (name, token, None)
    assert found["metadata"] == dict(pair.split("=") for pair in metadata.split())
    for line in (["status", name], ["status"]):
        code, out, err = cli(*line, *on)
        (row,) = [row for row in out.splitlines() if row.startswith(f"{name} ")]
        assert (code, err) == (Exit.DONE, "")
        assert row.split()[:3] == [name, holder, str(token)]
        assert row.endswith(metadata)
    return holder


def is_vacant(cli: Cli, name: str, on: tuple[str, ...]) -> None:
    """Check that ``status`` and ``resign`` know the name, and find no leader."""
    assert cli("status", name, *on) == (Exit.VACANT, *table_without_leader(name))
    code, out, _ = cli("status", name, *on, "--json")
    assert (code, json.loads(out)["leader"]) == (Exit.VACANT, None)
    assert f"{name} (none)" in [" ".join(row.split()) for row in cli("status", *on)[1].splitlines()]
    says = f"tenure: error: {name!r} has no leader, so there is none to ask\n"
    assert cli("resign", name, *on) == (Exit.VACANT, "", says)


def table_without_leader(name: str) -> tuple[str, str]:
    return f"{'NAME'.ljust(len(name))}  LEADER  TOKEN  LEASE LEFT  METADATA\n{name}  (none)\n", ""


# --- a leader that is another program ----------------------------------------------------------------------------


@each_kind
def test_a_leader_that_is_another_program_is_shown_and_does_not_listen(kind: Kind, cli: Cli, name: str) -> None:
    server = shared(kind)
    on = ("--on", server.url)
    with led_by_another_program(server, name):
        code, out, _ = cli("status", name, *on, "--json")
        token = json.loads(out)["token"]
        assert (code, json.loads(out)["leader"]) == (Exit.DONE, "theirs")
        assert f"  theirs  token {token}\n" in cli("watch", name, *on, "--count", "1")[1]
        says = (
            f"tenure: error: theirs (token {token}) leads {name!r}, and can't be asked to step down: it is another "
            "program than tenure, and reads no such requests; stop it by its own means\n"
        )
        assert cli("resign", name, *on) == (Exit.BROKEN, "", says)
        assert name not in cli("status", *on)[1]  # it was never led by tenure
    assert cli("status", name, *on) == (Exit.VACANT, *table_without_leader(name))


@contextmanager
def led_by_another_program(server: Server, name: str) -> Iterator[None]:
    """Store what etcd's ``concurrency``, Curator's ``LeaderLatch`` or client-go stores for a leader named "theirs"."""
    match server:
        case Etcd():
            lease = server.call("lease/grant", {"TTL": "60"})["ID"]
            key = in_base64(f"tenure/{name}/{int(lease):x}")
            server.call("kv/put", {"key": key, "value": in_base64("theirs"), "lease": lease})
            yield
            server.call("lease/revoke", {"ID": lease})
        case ZooKeeper():
            with server.client() as client:
                client.create(f"/{name}/_c_x-latch-", b"theirs", ephemeral=True, sequence=True, makepath=True)
                yield
        case Kubernetes():
            now = "2026-11-23T06:00:00.000000Z"
            times = {"acquireTime": now, "renewTime": now, "leaseDurationSeconds": 60, "leaseTransitions": 3}
            server.put({"metadata": {"name": name}, "spec": {"holderIdentity": "theirs", **times}})
            yield
            server.delete(name)


# --- doctor ------------------------------------------------------------------------------------------------------

QUEUED = {"fencing": "native", "expiry": "store clock", "hints": "yes", "survives restart": "yes", "queued": "yes"}
OBSERVED = {**QUEUED, "fencing": "emulated", "expiry": "observed", "queued": "no", "names": "dns"}
RIGHTS = "get, create, update, list, watch on leases"
SHOWN: dict[Kind, dict[str, str]] = {
    Etcd: {**QUEUED, "shortest ttl": "1 s", "longest ttl": "86400 s", "alarms": "none"},
    ZooKeeper: {**QUEUED, "shortest ttl": "0.2 s", "ensemble": "one server"},
    Kubernetes: {**OBSERVED, "shortest ttl": "1 s", "namespace": "default", "rights": RIGHTS},
}
"""Of each store, traits and facts that ``doctor`` shows."""
ADVICE: dict[Kind, str] = {
    Etcd: "! members: if it stops, no candidate can lead until it is back; run three members [etcd-few-members]\n",
    ZooKeeper: "nobody can be elected; use an ensemble of three or five [zookeeper-standalone]\n",
    Kubernetes: "No warnings.\n",
}


@each_kind
@pytest.mark.parametrize("options", [[], ["--look-only"]], ids=["usual", "look-only"])
def test_doctor_names_traits_and_writes_nothing(kind: Kind, options: list[str], cli: Cli) -> None:
    with private(kind) as server:
        before = stored(server)
        code, out, err = cli("doctor", server.url, *options)
        assert stored(server) == before
    assert (code, err) == (Exit.DONE, "")
    table, _, advice = out.partition("\n\n")
    rows = dict(re.split("  +", row, maxsplit=1) for row in table.splitlines())
    assert rows["store"] == server.url
    assert rows["queues"] == "none"
    assert {row: rows.get(row) for row in SHOWN[kind]} == SHOWN[kind]
    assert ADVICE[kind] in advice
    codes = re.findall(r"^! .* \[([a-z-]+)\]$", advice, re.MULTILINE)
    assert len(codes) == advice.count("! ")
    assert set(codes) <= set(sections())


def stored(server: Server) -> object:
    """Return what each write to the store changes."""
    match server:
        case Etcd():
            return server.status()["header"]["revision"]
        case ZooKeeper():
            with server.client() as client:
                return sorted(nodes_below(client, "/"))
        case Kubernetes():
            _, leases = server.ask("GET", lease_path(""))
            return leases["metadata"]["resourceVersion"], leases["items"]
    raise AssertionError(f"{server} is none of these stores")


def nodes_below(client: Any, path: str) -> Iterator[tuple[str, int, int]]:
    """Yield each node at and below *path*, with the transactions that last changed it, and those below it."""
    stat = client.exists(path)
    yield path, stat.mzxid, stat.pzxid
    for child in client.get_children(path):
        yield from nodes_below(client, os.path.join(path, child))

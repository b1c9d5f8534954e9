"""The project fleet_without_store, installed for three hosts: killed, stopped and cut off, never two of them lead."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

import tenure
from tenure._cli.exits import Exit
from tenure._cli.group import SOCKET_VARIABLE, group
from tenure._url import Url
from tests.absent import skip_or_fail
from tests.durations import PATIENCE, wait_until
from tests.examples.project_pages import PROJECTS, blocks, commands, files_listed, files_of
from tests.process.netlab import NetLab, why_not

PROJECT = PROJECTS / "fleet_without_store"
PAGE = PROJECT / "README.md"
PROGRAMS = "/opt/poller/venv/bin/"
POLLED = re.compile(r"(?m)^term (\d+): polled at (\d+\.\d+)$")
LOOPBACK = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
LINES = (
    r"term \d+: polled at \d+\.\d+",
    r"tenure: poller: standing by; \S+ leads, term \d+",
    r"tenure: poller: elected, term \d+; the command is started",
)
"""The lines of a journal that the page shows."""
TTL = 3.0
A_MOMENT = 4.0
"""Seconds on a busy machine for an election and for the start of the poller, which is another Python."""

pytestmark = pytest.mark.timeout(240)


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder as it is copied to all hosts, with the key."""
    if shutil.which("make") is None or shutil.which("openssl") is None:
        skip_or_fail("make or openssl is not installed")
    folder = tmp_path_factory.mktemp("project") / "poller"
    shutil.copytree(PROJECT, folder)
    make(folder, "peers.key")
    return folder


def make(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run ``make`` as the page does, and return what it has printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a make above
    done = subprocess.run(
        ["make", "-C", str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(copied: Path, root: Path, me: str, members: Sequence[str]) -> Path:
    """Install the project for one host below *root*; return that."""
    env = copied / "poller.env"
    text = re.sub(r"(?m)^POLLER_MEMBERS=.*", f"POLLER_MEMBERS={','.join(members)}", env.read_text())
    text = re.sub(r"(?m)^POLLER_TTL=.*", f"POLLER_TTL={TTL:g}", text)
    env.write_text(re.sub(r"(?m)^POLLER_EVERY=.*", "POLLER_EVERY=0.05", text))
    make(copied, "install", f"ME={me}", f"DESTDIR={root}")
    return root


def settings(root: Path) -> dict[str, str]:
    """Return the variables in the environment file, as systemd reads them."""
    lines = (root / "etc/poller/poller.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def service(file: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]  # its names have capital letters
    parser.read_string(file.read_text().replace("\\\n", " "))
    return parser["Service"]


def command_line(unit: configparser.SectionProxy, variables: dict[str, str]) -> list[str]:
    """Return the words of ExecStart with the variables in them, as systemd passes them on."""
    return [re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word) for word in shlex.split(unit["ExecStart"])]


def parameters(words: list[str]) -> dict[str, Any]:
    """Return the parameters of a line of ``tenure lead``, as the command line reads them."""
    context = group.make_context("tenure", words[1:])
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert name == "lead"
    assert isinstance(command, click.Command)
    return command.make_context(name, rest, parent=context).params


def defaults() -> dict[str, str]:
    """Return the variables as the project has them, on a host with the key in this folder."""
    found = dict(re.findall(r"(?m)^(\w+)=(.*)$", (PROJECT / "poller.env").read_text()))
    return {**found, "CREDENTIALS_DIRECTORY": "/run/credentials/poller.service"}


def test_the_command_line_of_the_unit() -> None:
    unit, variables = service(PROJECT / "poller.service"), defaults()
    words = command_line(unit, variables)
    assert words[0] == f"{PROGRAMS}tenure"
    found = parameters(words)
    assert (found["name"], found["again"]) == ("poller", True)
    assert found["argv"] == (f"{PROGRAMS}python", "/opt/poller/poller.py")
    url = Url.parse(found["url"])
    members = variables["POLLER_MEMBERS"].split(",")
    assert (url.scheme, url.hosts.split(",")) == ("peers", members)
    assert len(members) == 3
    assert variables["POLLER_ME"] in members
    assert float(variables["POLLER_TTL"]) == found["ttl"]
    assert f"ttl_max={found['ttl']:g}&" in found["url"]
    assert found["url"].endswith("key_file=/run/credentials/poller.service/peers.key")
    assert unit["LoadCredential"] == "peers.key:/etc/poller/peers.key"


def test_systemd_waits_until_the_lease_is_released() -> None:
    unit = service(PROJECT / "poller.service")
    found = parameters(command_line(unit, defaults()))
    timing = tenure.Timing(ttl=found["ttl"])
    needed = found["stop_timeout"] + timing.grace + timing.ttl + timing.retry_every
    assert needed <= float(unit["TimeoutStopSec"]) <= needed + 5
    assert unit["KillMode"] == "mixed"


def test_no_restart_where_it_would_improve_nothing() -> None:
    codes = {int(code) for code in service(PROJECT / "poller.service")["RestartPreventExitStatus"].split()}
    assert codes == {Exit.USAGE, Exit.CONFIG, Exit.NOT_RUNNABLE, Exit.NOT_FOUND}


def test_systemd_can_read_the_unit(tmp_path: Path) -> None:
    if (systemd := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed; it is in the package systemd")
    unit = PROJECT / "poller.service"
    (tmp_path / unit.name).write_text(
        unit.read_text().replace(f"{PROGRAMS}tenure", sys.executable)
    )  # which exists here
    done = subprocess.run(
        [systemd, "verify", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_user_of_the_unit_is_created(copied: Path, tmp_path: Path) -> None:
    if (sysusers := shutil.which("systemd-sysusers")) is None:
        pytest.skip("systemd-sysusers is not installed; it is in the package systemd")
    root = installed(copied, tmp_path / "root", "a:1", ["a:1", "b:1", "c:1"])
    subprocess.run([sysusers, f"--root={root}"], check=True, capture_output=True, timeout=60)
    user = service(root / "etc/systemd/system/poller.service")["User"]
    assert re.search(rf"(?m)^{user}:", (root / "etc/passwd").read_text())


def test_make_installs_what_the_unit_names(copied: Path, tmp_path: Path) -> None:
    root = installed(copied, tmp_path, "10.0.0.2:7000", ["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])
    unit = service(root / "etc/systemd/system/poller.service")
    key = root / unit["LoadCredential"].partition(":/")[2]
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_text().strip()) == 64
    assert settings(root)["POLLER_ME"] == "10.0.0.2:7000"
    assert (root / unit["EnvironmentFile"].lstrip("/")).is_file()
    assert (root / shlex.split(unit["ExecStart"])[-1].lstrip("/")).is_file()
    steps = make(copied, "-n", "venv")
    assert f"python3 -m venv {PROGRAMS.removesuffix('/bin/')}\n" in steps
    assert f"{PROGRAMS}pip install '../../..[cli]'" in steps


def test_make_refuses_to_install_without_the_host_and_the_key(copied: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    refused = make(copied, "install", f"DESTDIR={root}", code=2)
    assert "make install ME=10.0.0.1:7000" in refused
    (copied / "peers.key").rename(tmp_path / "peers.key")
    refused = make(copied, "install", "ME=10.0.0.1:7000", f"DESTDIR={root}", code=2)
    (tmp_path / "peers.key").rename(copied / "peers.key")
    assert "copy peers.key from the first host" in refused
    assert not root.exists()


def test_the_page_shows_files_and_commands_that_exist() -> None:
    assert files_listed(PAGE) == files_of(PAGE) - {"peers.key"}
    for line in commands(PAGE):
        words = shlex.split(re.sub(r"^sudo (-u poller )?", "", line))
        if words[0] == "make":
            make(PROJECT, "-n", *words[1:])
        elif words[0] == f"{PROGRAMS}tenure":
            context = group.make_context("tenure", words[1:])
            name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            assert isinstance(command, click.Command)
            command.make_context(name, rest, parent=context)
        else:
            assert words[0] in ("scp", "systemctl", "journalctl"), line
    for line in blocks(PAGE, "text"):
        assert any(re.fullmatch(one, line) for one in LINES), line


# --- three hosts -----------------------------------------------------------------------------------------------------


class Poll(NamedTuple):
    at: float
    term: int
    host: int


class Host:
    """A host on which the project is installed: the unit's command, with the unit's environment."""

    def __init__(self, number: int, root: Path, sockets: Path) -> None:
        sockets.mkdir()
        self.number = number
        self.log = root / "journal"
        self.variables = {**settings(root), "CREDENTIALS_DIRECTORY": str(root / "etc/poller")}
        unit = service(root / "etc/systemd/system/poller.service")
        name, _, _ = unit["Environment"].partition("=")
        assert name == SOCKET_VARIABLE
        self.environment = {**os.environ, **self.variables, name: str(sockets)}
        program, *arguments = command_line(unit, self.variables)
        assert program == f"{PROGRAMS}tenure"
        ours = {f"{PROGRAMS}python": sys.executable, "/opt/poller/poller.py": str(root / "opt/poller/poller.py")}
        self.command = [sys.executable, "-m", "tenure.cli", *(ours.get(word, word) for word in arguments)]
        self.process: subprocess.Popen[Any]

    def start(self, lab: NetLab | None) -> None:
        with self.log.open("ab") as out:
            line = self.command if lab is None else lab.on(self.number, self.command)
            self.process = subprocess.Popen(line, env=self.environment, stdout=out, stderr=out)

    def stop(self) -> int:
        """Stop it as systemd does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def polls(self) -> list[Poll]:
        found = POLLED.findall(self.log.read_text())
        return [Poll(float(at), int(term), self.number) for term, at in found]

    def status(self) -> str:
        """Ask this host's process, as the page does."""
        line = [sys.executable, "-m", "tenure.cli", "status", "poller", "--me"]
        return subprocess.run(
            line, env=self.environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        ).stdout


class Hosts(list[Host]):
    """The three hosts."""

    def polls(self) -> list[Poll]:
        """Return what all have polled, by the clock of this machine."""
        return sorted(poll for host in self for poll in host.polls())

    def newer(self, term: int) -> Poll | None:
        """Return the first poll of a term above *term*."""
        return min((poll for poll in self.polls() if poll.term > term), default=None)

    def wait_for_newer(self, term: int) -> Poll:
        wait_until(lambda: self.newer(term), self.journal)
        found = self.newer(term)
        assert found is not None
        return found

    def wait_for_first(self) -> Poll:
        """Wait until one leads, and the others stand by."""
        found = self.wait_for_newer(0)
        wait_until(
            lambda: all("stands by" in host.status() for host in self if host.number != found.host), self.journal
        )
        return found

    def journal(self) -> str:
        return "\n".join(f"--- {host.number}\n{host.log.read_text()}" for host in self)


@contextmanager
def hosts(copied: Path, folder: Path, addresses: Sequence[str], lab: NetLab | None = None) -> Iterator[Hosts]:
    with ExitStack() as stack:
        sockets = Path(tempfile.mkdtemp(dir="/tmp", prefix="hosts"))  # the path of a socket must be short
        stack.callback(shutil.rmtree, sockets)
        started = Hosts()
        for number, me in enumerate(addresses):
            root = installed(copied, folder / f"host-{number}", me, addresses)
            started.append(Host(number, root, sockets / f"{number}"))
            started[-1].start(lab)
            stack.callback(started[-1].stop)
        yield started
        assert overlaps(started.polls()) == []


def overlaps(polls: Sequence[Poll]) -> list[Poll]:
    """Return each poll of a term that came after one of a newer term."""
    found, newest = [], 0
    for poll in sorted(polls):
        if poll.term < newest:
            found.append(poll)
        newest = max(newest, poll.term)
    return found


def test_an_overlap_is_detected() -> None:
    assert overlaps([Poll(1.0, 5, 0), Poll(2.0, 5, 0), Poll(3.0, 6, 1)]) == []
    assert overlaps([Poll(1.0, 5, 0), Poll(3.0, 6, 1), Poll(3.5, 5, 0)]) == [Poll(3.5, 5, 0)]


@pytest.fixture
def on_loopback(copied: Path, tmp_path: Path) -> Iterator[Hosts]:
    """Start three hosts at three addresses of this machine, with the same port."""
    with ExitStack() as stack:
        port = 0
        for address in LOOPBACK:
            reserved = stack.enter_context(socket.socket())  # it does not listen, so a host can
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reserved.bind((address, port))
            except OSError as error:
                skip_or_fail(f"{address}:{port} can't be used here: {error}")
            port = reserved.getsockname()[1]
        yield stack.enter_context(hosts(copied, tmp_path, [f"{address}:{port}" for address in LOOPBACK]))


@pytest.mark.process
def test_another_host_leads_when_the_leader_is_killed(on_loopback: Hosts) -> None:
    first = on_loopback.wait_for_first()
    killed_at = time.monotonic()
    on_loopback[first.host].kill()
    second = on_loopback.wait_for_newer(first.term)
    assert second.host != first.host
    assert second.at - killed_at <= TTL + A_MOMENT
    on_loopback[first.host].start(None)  # as systemd does
    wait_until(lambda: "stands by" in on_loopback[first.host].status(), on_loopback.journal)


@pytest.mark.process
def test_another_host_leads_when_the_leader_is_frozen(on_loopback: Hosts) -> None:
    first = on_loopback.wait_for_first()
    frozen_at = time.monotonic()
    on_loopback[first.host].process.send_signal(signal.SIGSTOP)
    second = on_loopback.wait_for_newer(first.term)
    assert second.host != first.host
    assert second.at - frozen_at <= TTL + A_MOMENT
    on_loopback[first.host].process.send_signal(signal.SIGCONT)
    wait_until(lambda: "stands by" in on_loopback[first.host].status(), on_loopback.journal)


@pytest.mark.process
def test_another_host_leads_at_once_when_the_leader_is_stopped(on_loopback: Hosts) -> None:
    first = on_loopback.wait_for_first()
    success = int(service(PROJECT / "poller.service")["SuccessExitStatus"])
    assert on_loopback[first.host].stop() == success
    second = on_loopback.wait_for_newer(first.term)
    assert second.host != first.host
    assert all(re.search(f"(?m)^{line}$", on_loopback.journal()) for line in LINES)
    (other,) = {0, 1, 2} - {first.host, second.host}
    assert on_loopback[other].stop() in (0, success)
    assert on_loopback[second.host].stop() == success


@pytest.mark.process
def test_a_host_that_is_cut_off_stops_and_the_majority_has_a_leader(copied: Path, tmp_path: Path) -> None:
    if (trouble := why_not()) is not None:
        skip_or_fail(trouble)
    with NetLab(3) as lab, hosts(copied, tmp_path, [f"{lab.address(host)}:7000" for host in range(3)], lab) as started:
        first = started.wait_for_first()
        cut_at = time.monotonic()
        lab.cut_off(first.host, ways="both")
        second = started.wait_for_newer(first.term)
        assert second.host != first.host
        assert second.at - cut_at <= TTL + A_MOMENT
        lab.heal()
        wait_until(lambda: "stands by" in started[first.host].status(), started.journal)

"""``tenure lead`` as real processes: stopped, killed, ignoring signals, forking; no two commands run at once.

The commands write what they do into one file opened for appending, so that its order is the true order. That
order is checked; durations have only generous upper bounds.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests import warm
from tests.durations import PATIENCE, wait_until
from tests.process_states import children_of, is_alive, send_signal_to, stop

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

TIMES = ("--ttl", "60", "--grace", "0.6")
SHORT = ("--ttl", "3")
"""For tests that wait for the end of a lease; others have one that no load of the machine can end."""

BEATS = """
echo start $TENURE_TOKEN $$ >> acts
while :; do echo beat $TENURE_TOKEN $$ >> acts; sleep 0.02; done
"""
"""A command that never ends by itself, and writes beats."""

IGNORING = f"trap '' TERM INT; {BEATS}"

FAMILY = f"""
sh -c {shlex.quote(IGNORING)} &
setsid sh -c {shlex.quote(f"setsid sh -c {shlex.quote(IGNORING)} & exit")}
{IGNORING}
"""
"""A command that ignores signals, with such a child in its group, and such a daemon outside its group and session."""

FORKING = f"""
{shlex.join([sys.executable, "-I", "-S", str(Path(__file__).parent / "forking_command.py")])} 0.003 acts &
{BEATS}
"""
"""A command that ends on signals, and has started one that ignores them and keeps forking."""

Line = tuple[str, int, int]


class LeadSetup:
    """A folder, the ``tenure`` processes in it, and what their commands have written there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[warm.Process] = []

    def lead(self, *line: str, stdin: int = subprocess.DEVNULL) -> warm.Process:
        """Start ``tenure lead job …``."""
        environment = {**os.environ, "TENURE_URL": f"sqlite:///{self.folder / 'work.db'}"}
        process = warm.start(["lead", "job", *TIMES, *line], cwd=self.folder, env=environment, stdin=stdin)
        self.processes.append(process)
        return process

    def sh(self, script: str, *options: str) -> warm.Process:
        return self.lead(*options, "--", "sh", "-c", script)

    def tenure(self, *line: str) -> subprocess.CompletedProcess[str]:
        """Run another command of tenure to its end."""
        return warm.run([*line, "--on", f"sqlite:///{self.folder / 'work.db'}"])

    def close(self) -> str:
        """End every process, the commands of a broken ``tenure`` too; return their stderr."""
        for process in self.processes:
            if process.poll() is None:
                guards = children_of(process.pid)
                process.kill()
                for guard in guards:  # a stopped one would stay for ever
                    with suppress(ProcessLookupError):
                        os.kill(guard, signal.SIGCONT)
            process.wait()
        for pid in self.pids():
            with suppress(OSError):  # it has ended meanwhile; by its folder we know that the number is still its own
                if is_alive(pid) and Path(f"/proc/{pid}/cwd").readlink() == self.folder.resolve():
                    os.kill(pid, signal.SIGKILL)
        return "".join(
            process.communicate()[1] for process in self.processes if process.stderr and not process.stderr.closed
        )

    def lines(self) -> list[Line]:
        path = self.folder / "acts"
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [re.fullmatch(r"(\w+) (\d+) (\d+)\n", row) for row in rows]
        return [(one[1], int(one[2]), int(one[3])) for one in found if one]

    def pids(self, of: int | None = None) -> set[int]:
        """Return the started processes, of all terms or of one."""
        return {pid for what, token, pid in self.lines() if what == "start" and of in (None, token)}

    def tokens(self) -> list[int]:
        """The terms whose command was started, in true order."""
        return [token for what, token, _ in self.lines() if what == "start"]

    def wait_for_start(self, after: int = 0, count: int = 1) -> int:
        """Wait until *count* processes of a newer term have begun to beat; return its token."""

        def beating() -> set[int]:
            return {pid for what, token, pid in self.lines() if what == "beat" and token > after}

        wait_until(lambda: len(beating()) >= count, self.errors)
        return max(self.tokens())

    def errors(self) -> str:
        """End everything, for the message of a test that fails."""
        return f"it did not happen: {self.lines()[-5:]}\n{self.close()}"

    def check_order(self) -> None:
        """Check that no process of an old term ran after a newer term had begun."""
        tokens = [token for _, token, _ in self.lines()]
        assert tokens == sorted(tokens)

    def check_that_nothing_forks(self) -> None:
        """Check that no generation of the forking command runs: they lock the file."""
        with (self.folder / "acts").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[LeadSetup]:
    setup = LeadSetup(tmp_path)
    try:
        yield setup
    finally:
        setup.close()


# --- a command like any other ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -USR2 $$", 140)]
)
def test_the_exit_code_is_the_commands(setup: LeadSetup, script: str, code: int) -> None:
    process = setup.sh(script)
    assert process.wait(PATIENCE) == code
    assert setup.tenure("status", "job").returncode == 3  # and the lease was released


def test_environment_and_standard_streams(setup: LeadSetup) -> None:
    script = "echo $TENURE_NAME $TENURE_TOKEN $TENURE_HOLDER $TENURE_URL; echo oops >&2; cat"
    process = setup.lead("-q", "--label", "me", "--", "sh", "-c", script, stdin=subprocess.PIPE)
    out, err = process.communicate("from stdin", timeout=PATIENCE)
    holder = r"me-[0-9a-f]{32}#1"
    assert re.fullmatch(rf"job 1 {holder} sqlite:///{setup.folder}/work\.db\nfrom stdin", out)
    assert err == "oops\n"


def test_arguments_reach_the_command_as_they_are(setup: LeadSetup) -> None:
    process = setup.lead("--", "printf", "%s|", "--ttl", "a b", "$HOME", "*", "")
    assert process.communicate(timeout=PATIENCE)[0] == "--ttl|a b|$HOME|*||"


def test_processes_that_the_command_leaves_are_stopped(setup: LeadSetup) -> None:
    process = setup.sh(f"sh -c {shlex.quote(IGNORING)} & until [ -s acts ]; do sleep 0.01; done; exit 4")
    assert process.wait(PATIENCE) == 4
    (left,) = setup.pids()
    assert not is_alive(left)


# --- a command that can't be run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "code", "says"),
    [
        (None, 0, 127, "no command"),
        ("#!/bin/sh\n", 0o644, 126, "not executable"),
        ("#!/nonexistent/interpreter\n", 0o755, 127, "could not be run: No such file"),
        ("neither script nor program", 0o755, 126, "could not be run: Exec format error"),
    ],
)
def test_a_command_that_can_not_be_run(setup: LeadSetup, content: str | None, mode: int, code: int, says: str) -> None:
    program = setup.folder / "program"
    if content is not None:
        program.write_text(content)
        program.chmod(mode)
    process = setup.lead("-q", "--again", "--", str(program))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert err.startswith("tenure: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert setup.tenure("status", "job").returncode in (3, 78)  # the lease is free, or was never requested


_NO_PROCESS = """
import os, runpy, sys

def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = fork
del sys.argv[:3]  # its own name, and Python's options: -I -S
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_system_that_gives_the_guard_no_process(setup: LeadSetup) -> None:
    python = setup.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$0.py" "$@"\n')
    python.chmod(0o755)
    python.with_suffix(".py").write_text(_NO_PROCESS)
    line = ["lead", "job", "-q", "--on", f"sqlite:///{setup.folder / 'work.db'}", "--", "touch", "acts"]
    script = f"import sys; from tenure._cli.entry import run; sys.executable = {str(python)!r}; sys.exit(run({line!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=setup.folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.stderr == (
        "tenure: error: 'touch' could not be run: Resource temporarily unavailable; the lease was released\n"
    )
    assert ended.returncode == 71
    assert not setup.lines()
    assert setup.tenure("status", "job").returncode == 3


# --- signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["INT", "TERM", "QUIT", "HUP", "USR1", "USR2", "WINCH"])
def test_signals_are_passed_on(setup: LeadSetup, name: str) -> None:
    process = setup.sh(f"trap 'echo caught 0 0 >> acts; exit 5' {name}; {BEATS}")
    setup.wait_for_start()
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.wait(PATIENCE) == 5
    assert ("caught", 0, 0) in setup.lines()
    assert setup.tenure("status", "job").returncode == 3


def test_the_lease_is_kept_until_a_command_that_is_stopped_has_ended(setup: LeadSetup) -> None:
    ends = "sleep 4; echo end $TENURE_TOKEN $$ >> acts; exit 6"  # longer than a lease
    process = setup.sh(f"trap '{ends}' TERM; {BEATS}", *SHORT)
    setup.wait_for_start()
    other = setup.sh(BEATS, *SHORT)
    process.terminate()
    assert process.wait(PATIENCE) == 6
    setup.wait_for_start(after=1)
    other.terminate()
    assert other.wait(PATIENCE) == 143
    setup.check_order()


def test_a_second_signal_kills(setup: LeadSetup) -> None:
    process = setup.sh(FAMILY)
    setup.wait_for_start(count=3)
    send_signal_to(process.pid, signal.SIGTERM)
    seen = len(setup.lines())
    wait_until(lambda: len(setup.lines()) > seen + 20)  # it ignores the signal
    process.terminate()
    assert process.wait(PATIENCE) == 137
    assert not any(map(is_alive, setup.pids()))


def test_a_second_signal_kills_although_the_guard_is_stopped(setup: LeadSetup) -> None:
    process = setup.sh(FAMILY)
    setup.wait_for_start(count=3)
    (guard,) = children_of(process.pid)
    os.kill(guard, signal.SIGSTOP)
    send_signal_to(process.pid, signal.SIGTERM)
    process.terminate()
    assert process.wait(20) == 137  # long before the lease ends
    assert not any(map(is_alive, setup.pids()))
    assert setup.tenure("status", "job").returncode == 3


def test_a_stop_timeout_kills(setup: LeadSetup) -> None:
    process = setup.sh(IGNORING, "--stop-timeout", "0.2")
    setup.wait_for_start()
    process.terminate()
    assert process.wait(PATIENCE) == 137


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_a_standby_ends_at_once(setup: LeadSetup, name: str) -> None:
    setup.sh(BEATS)
    setup.wait_for_start()
    other = setup.sh("echo never 0 0 >> acts", "-v")
    wait_until(lambda: "SigCgt" in Path(f"/proc/{other.pid}/status").read_text() and catches(other.pid, name))
    other.send_signal(signal.Signals[f"SIG{name}"])
    assert other.wait(PATIENCE) == 128 + signal.Signals[f"SIG{name}"]
    assert ("never", 0, 0) not in setup.lines()


def catches(pid: int, name: str) -> bool:
    caught = int(re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[0], 16)
    usr1 = 1 << (signal.SIGUSR1 - 1)  # Python itself does not handle this one, so tenure's handlers are installed
    return bool(caught & usr1) and bool(caught & (1 << (signal.Signals[f"SIG{name}"] - 1)))


def test_a_standby_prints_each_leader_once(setup: LeadSetup) -> None:
    first = setup.sh(BEATS, "--label", "first")
    setup.wait_for_start()
    other = setup.sh(BEATS, "--label", "other", "--retry-every", "300ms")
    assert other.stderr
    says = r"tenure: job: standing by; first-[0-9a-f]{32}#1 leads, term 1\n"
    assert re.fullmatch(says, other.stderr.readline())
    quiet = setup.sh(BEATS, "--label", "quiet", "--retry-every", "300ms", "--quiet")
    wait_until(lambda: catches(quiet.pid, "TERM"))
    first.terminate()
    first.wait(PATIENCE)
    setup.wait_for_start(after=1)
    winner, loser = (other, quiet) if "other" in setup.tenure("status", "job").stdout else (quiet, other)
    if winner is other:  # at random
        assert other.stderr.readline() == "tenure: job: elected, term 2; the command is started\n"
    else:
        assert "standing by; quiet-" in other.stderr.readline()
    loser.terminate()
    _, said = loser.communicate(timeout=PATIENCE)
    winner.terminate()
    assert said == winner.communicate(timeout=PATIENCE)[1] == ""


def test_verbose_prints_each_start_and_end_with_its_time(setup: LeadSetup) -> None:
    process = setup.sh("exit 3", "-v")
    lines = process.communicate(timeout=PATIENCE)[1].splitlines()
    assert all(re.match(r"tenure: \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 job: ", line) for line in lines)
    texts = [line.partition(" job: ")[2] for line in lines]
    assert "the command was started, term 1" in texts
    assert any(re.fullmatch(r"the command ended with code 3 after .*s, term 1", line) for line in texts)


# --- the command never outlives the term -------------------------------------------------------------------------


def test_kill_9_ends_everything(setup: LeadSetup) -> None:
    process = setup.sh(FAMILY, "--ttl", "1000")  # long before the lease ends
    setup.wait_for_start(count=3)
    process.kill()
    wait_until(lambda: not any(map(is_alive, setup.pids())))


def test_kill_9_of_the_guard_ends_everything(setup: LeadSetup) -> None:
    process = setup.sh(FAMILY)
    setup.wait_for_start(count=3)
    (guard,) = children_of(process.pid)
    os.kill(guard, signal.SIGKILL)
    assert process.wait(PATIENCE) == 137
    assert not any(map(is_alive, setup.pids()))
    assert setup.tenure("status", "job").returncode == 3


def test_kill_9_of_the_guard_ends_a_command_that_keeps_forking(setup: LeadSetup) -> None:
    process = setup.sh(FORKING)
    setup.wait_for_start(count=10)
    (guard,) = children_of(process.pid)
    os.kill(guard, signal.SIGKILL)
    assert process.wait(PATIENCE) == 137
    setup.check_that_nothing_forks()


def test_a_command_that_keeps_forking_does_not_outlive_its_term(setup: LeadSetup) -> None:
    first = setup.sh(FORKING, *SHORT)
    old = setup.wait_for_start(count=10)
    setup.sh(BEATS, *SHORT)
    stop(first.pid, setup.folder / "work.db")
    setup.wait_for_start(after=old)
    setup.check_that_nothing_forks()
    setup.check_order()


@pytest.mark.parametrize("script", [BEATS, FAMILY], ids=["tidy", "ignoring"])
def test_a_killed_leader_is_succeeded(setup: LeadSetup, script: str) -> None:
    first = setup.sh(script, *SHORT)
    token = setup.wait_for_start(count=3 if script is FAMILY else 1)
    setup.sh(BEATS, *SHORT)
    first.kill()
    setup.wait_for_start(after=token)
    setup.check_order()


@pytest.mark.parametrize("script", [BEATS, FAMILY], ids=["tidy", "ignoring"])
def test_a_leader_stopped_past_its_lease(setup: LeadSetup, script: str) -> None:
    first = setup.sh(script, *SHORT)
    old = setup.wait_for_start(count=3 if script is FAMILY else 1)
    second = setup.sh(BEATS, *SHORT)
    stop(first.pid, setup.folder / "work.db")
    new = setup.wait_for_start(after=old)
    assert not any(map(is_alive, setup.pids(old)))
    setup.check_order()
    first.send_signal(signal.SIGCONT)  # its term is over, and it campaigns again
    second.kill()
    setup.wait_for_start(after=new)
    assert first.poll() is None
    setup.check_order()


def test_a_stopped_guard_does_not_keep_the_command(setup: LeadSetup) -> None:
    first = setup.sh(FAMILY, *SHORT)
    token = setup.wait_for_start(count=3)
    setup.sh(BEATS)
    (guard,) = children_of(first.pid)
    os.kill(guard, signal.SIGSTOP)
    assert setup.tenure("resign", "job").returncode == 0
    setup.wait_for_start(after=token)
    assert not is_alive(guard)
    setup.check_order()


@pytest.mark.parametrize("script", [BEATS, FAMILY], ids=["tidy", "ignoring"])
def test_a_leader_that_is_asked_to_step_down(setup: LeadSetup, script: str) -> None:
    setup.sh(script, *SHORT)
    token = setup.wait_for_start(count=3 if script is FAMILY else 1)
    setup.sh(BEATS)
    assert setup.tenure("resign", "job", "--wait", "30").returncode == 0
    setup.wait_for_start(after=token)
    setup.check_order()


def test_a_store_that_stops_answering(setup: LeadSetup) -> None:
    process = setup.sh(IGNORING, *SHORT)
    token = setup.wait_for_start()
    (pid,) = setup.pids(token)
    with closing(sqlite3.connect(setup.folder / "work.db", isolation_level=None, timeout=PATIENCE)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        wait_until(lambda: not is_alive(pid))
        connection.execute("ROLLBACK")
    setup.wait_for_start(after=token)  # it campaigned again, and the command has the new token
    process.terminate()
    process.terminate()
    setup.check_order()


def test_a_store_that_says_no(setup: LeadSetup) -> None:
    setup.sh(IGNORING, *SHORT)
    token = setup.wait_for_start()
    (pid,) = setup.pids(token)
    with closing(sqlite3.connect(setup.folder / "work.db", isolation_level=None, timeout=PATIENCE)) as connection:
        connection.execute("UPDATE tenure_lease SET holder = NULL, token = token + 1")
    wait_until(lambda: not is_alive(pid))
    setup.wait_for_start(after=token + 1)
    setup.check_order()


# --- again and again ---------------------------------------------------------------------------------------------


def test_again_campaigns_with_a_new_token(setup: LeadSetup) -> None:
    process = setup.sh("echo start $TENURE_TOKEN $$ >> acts; exit 1", "--again")
    wait_until(lambda: len(setup.tokens()) >= 3, setup.errors)
    process.terminate()
    assert process.wait(PATIENCE) in (1, 143)
    tokens = setup.tokens()
    assert tokens == sorted(set(tokens))


def test_again_ends_when_the_terminal_hangs_up(setup: LeadSetup) -> None:
    process = setup.sh(BEATS, "--again")
    setup.wait_for_start()
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 129


# --- without what a forked process has imported already ----------------------------------------------------------


def test_cold_processes_import_what_they_need(setup: LeadSetup) -> None:
    command = [sys.executable, "-m", "tenure.cli"]
    environment = {**os.environ, "TENURE_URL": f"sqlite:///{setup.folder / 'work.db'}"}

    def run(*line: str) -> int:
        return subprocess.run([*command, *line], env=environment, timeout=PATIENCE, check=False).returncode

    line = [*command, "lead", "job", *TIMES, "--", "sh", "-c", BEATS]
    leading = subprocess.Popen(line, env=environment, cwd=setup.folder)
    try:
        setup.wait_for_start()
        assert run("status", "job", "--me", "--wait", f"{PATIENCE / 2}") == 0
        assert run("resign", "job") == 0
        leading.terminate()
        leading.wait(PATIENCE)
    finally:
        leading.kill()
        leading.wait()
    assert run("send", "orders", "x") == 0
    assert run("work", "orders", "--until-empty", "--", "true") == 0

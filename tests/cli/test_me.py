"""``tenure status --me``: sockets, verdicts and exit codes, with an answering process that the test makes up."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tenure import CandidateStatus
from tenure._cli import lead_sockets, me
from tenure._cli.exits import Exit, Failure
from tenure._cli.status_server import answering
from tenure.cli import main
from tenure.errors import Unavailable
from tests.durations import PATIENCE

Captured = pytest.CaptureFixture[str]

LEADING = CandidateStatus("job", "leading", 7, 12.34, 0.5, is_ready=True)
WAITING = CandidateStatus("job", "standing by", None, 0.0, 3.0, is_ready=True)
UNANSWERED = CandidateStatus("job", "standing by", problem="connection refused")
LATE = CandidateStatus("job", "standing by", answered_ago=40.0, problem="connection refused")
MISSED = replace(LEADING, problem="no answer within 2 s")
ENDING = CandidateStatus("job", "ending", 7, 1.0, 14.0)
OVERRAN = CandidateStatus("job", "ending", 7, 0.0, 14.0, overran=True, is_live=False)
RESTING = CandidateStatus("job")

pytestmark = pytest.mark.skipif(not lead_sockets.IS_SUPPORTED, reason="needs Unix sockets")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for the sockets with a short path, as theirs must be."""
    place = Path(tempfile.mkdtemp(dir="/tmp", prefix="me"))
    monkeypatch.setenv("TENURE_SOCKET_DIR", str(place))
    monkeypatch.delenv("TENURE_URL", raising=False)
    try:
        yield place
    finally:
        shutil.rmtree(place)


@asynccontextmanager
async def served(*statuses: CandidateStatus | Exception, name: str = "job") -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for status in statuses:

            async def get_status(status: CandidateStatus | Exception = status) -> CandidateStatus:
                if isinstance(status, Exception):
                    raise status
                return status

            listening = stack.enter_context(lead_sockets.listening(name, os.environ["TENURE_SOCKET_DIR"]))
            await stack.enter_async_context(answering(listening, get_status))
        yield


@contextmanager
def answered_by(*statuses: CandidateStatus | Exception, name: str = "job") -> Iterator[None]:
    """Answer with each of these statuses at a socket of its own, from another thread."""
    started, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with served(*statuses, name=name):
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield
    finally:
        done.set()
        thread.join()


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(["status", *arguments, "--wait", "30s"])
    return (code, *capsys.readouterr())


def text(line: str) -> str:
    return line.replace("PID", str(os.getpid()))


PASSED = [
    (LEADING, "process PID leads in term 7, trusted for 12.3 s; the store answered 0.5 s ago"),
    (
        MISSED,
        "process PID leads in term 7, trusted for 12.3 s; the store answered 0.5 s ago; since then: no answer with",
    ),
    (WAITING, "process PID stands by; the store answered 3.0 s ago"),
]
LIVE = [
    (UNANSWERED, "process PID stands by; the store has not answered yet: connection refused"),
    (LATE, "process PID stands by; the store answered 40.0 s ago; since then: connection refused"),
    (ENDING, "process PID is ending term 7, trusted for 1.0 s; the store answered 14.0 s ago"),
    (RESTING, "process PID does not campaign at present"),
]


@pytest.mark.parametrize(("status", "says"), PASSED + LIVE)
def test_a_process_that_answers_is_live(status: CandidateStatus, says: str, capsys: Captured) -> None:
    with answered_by(status):
        code, out, err = run_cli(capsys, "job", "--me")
    assert (code, err) == (0, "")
    assert out.startswith(text(f"job: {says}"))
    assert out.count("\n") == 1


@pytest.mark.parametrize(("status", "says"), PASSED)
def test_ready(status: CandidateStatus, says: str, capsys: Captured) -> None:
    with answered_by(status):
        code, out, err = run_cli(capsys, "job", "--me", "--ready")
    assert (code, err) == (0, "")
    assert out.startswith(text(f"job: {says}"))


@pytest.mark.parametrize(("status", "says"), LIVE)
def test_not_ready(status: CandidateStatus, says: str, capsys: Captured) -> None:
    with answered_by(status):
        code, out, err = run_cli(capsys, "job", "--me", "--ready")
    assert (code, out) == (1, "")
    assert err == text(f"tenure: error: job is not ready: {says}\n")


@pytest.mark.parametrize("option", ["--me", "--ready"])
def test_a_command_beyond_its_term_is_neither_live_nor_ready(option: str, capsys: Captured) -> None:
    with answered_by(OVERRAN):
        code, out, err = run_cli(capsys, "job", "--me", option)
    assert (code, out) == (1, "")
    says = "process PID still runs the work of term 7, whose lease is over; the store answered 14.0 s ago"
    assert err == text(f"tenure: error: job is not live: {says}\n")


def test_all_processes_of_the_name_must_pass(capsys: Captured) -> None:
    with answered_by(LEADING, WAITING, LATE):
        code, out, _ = run_cli(capsys, "job", "--me")
        assert (code, out.count("job: process ")) == (0, 3)
        code, out, err = run_cli(capsys, "job", "--me", "--ready")
        assert (code, out.count("job: process "), err.count("is not ready")) == (1, 2, 1)


def test_a_process_of_another_name_is_not_asked(capsys: Captured) -> None:
    with answered_by(LEADING), answered_by(replace(LATE, name="jobs"), name="jobs"):
        assert run_cli(capsys, "job", "--me", "--ready")[0] == 0
        code, out, err = run_cli(capsys, "--me", "--ready")  # without a name, all are
        assert (code, out.count("\n")) == (1, 1)
        assert err.startswith("tenure: error: jobs is not ready: process")
    code, _, err = run_cli(capsys, "job", "--me")
    assert code == 3
    assert "`tenure lead job`" in err


def test_for_programs(capsys: Captured) -> None:
    with answered_by(LATE):
        code, out, err = run_cli(capsys, "job", "--me", "--ready", "--json")
    assert code == 1
    assert err.startswith("tenure: error: job is not ready")
    assert json.loads(out) == [
        {
            "pid": os.getpid(),
            "answered": True,
            "name": "job",
            "state": "standing by",
            "token": None,
            "trusted_for": 0.0,
            "answered_ago": 40.0,
            "problem": "connection refused",
            "overran": False,
            "is_live": True,
            "is_ready": False,
        }
    ]


def test_a_problem_with_control_characters_is_one_line(capsys: Captured) -> None:
    with answered_by(replace(LEADING, problem="two\nlines \x1b[31m")):
        out = run_cli(capsys, "job", "--me")[1]
    assert out.endswith(r"since then: two\nlines \x1b[31m" + "\n")


ODD = [
    *(b"x", b"\xff", b"7", b"[]", b'"job"', b"{}", b"[" * 100_000, b'{"name":"job","token":' + b"9" * 5_000 + b"}"),
    *(b'{"name":7}', b'{"name":null}', b'{"name":"job","token":"7"}', b'{"name":"job","token":1.5}'),
    *(b'{"name":"job","state":7}', b'{"name":"job","state":["leading"]}', b'{"name":"job","problem":7}'),
    *(
        b'{"name":"job","trusted_for":"long"}',
        b'{"name":"job","trusted_for":1e400}',
        b'{"name":"job","trusted_for":NaN}',
    ),
    *(b'{"name":"job","answered_ago":-1}', b'{"name":"job","is_live":1}', b'{"name":"job","overran":"no"}'),
    b'{"name":"job","problem":"' + b"x" * 300_000 + b'"}',
]


@pytest.mark.parametrize("answer", ODD, ids=lambda answer: ascii(answer[:40]))
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_answer_that_can_not_be_read_is_none(answer: bytes, options: list[str], capsys: Captured) -> None:
    with lead_sockets.listening("job", os.environ["TENURE_SOCKET_DIR"]) as listening:

        def serve() -> None:
            asked, _ = listening.accept()
            with asked, suppress(OSError):  # it reads no more than it may be
                asked.sendall(answer)

        listening.settimeout(PATIENCE)
        serving = threading.Thread(target=serve)
        serving.start()
        code, out, err = run_cli(capsys, "job", "--me", *options)
        serving.join()
    assert code == Exit.UNAVAILABLE
    assert "gave an answer that can't be read; if tenure was upgraded, restart the process" in err
    assert (json.loads(out) if options else out) == ([{"pid": os.getpid(), "answered": False}] if options else "")


def test_an_answer_of_another_version_is_read() -> None:
    assert me._read(b'{"name": "job", "state": "leading", "token": 7, "colour": "red"}') == CandidateStatus(
        "job", "leading", 7
    )
    assert me._read(rb'{"name": "job", "problem": "a\u0000\ud800"}') == CandidateStatus("job", problem="a\0\ud800")


# --- no answer ---------------------------------------------------------------------------------------------------


def test_no_process(place: Path, capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "job", "--me")
    assert (code, out) == (3, "")
    where = place / f"tenure-{os.geteuid()}"
    expected = f"no process `tenure lead job` of this user runs here: none has a socket in {where}"
    assert err == f"tenure: error: {expected}\n"


def test_a_process_that_takes_the_question_and_is_silent(place: Path, capsys: Captured) -> None:
    with lead_sockets.listening("job", str(place)):
        code = main(["status", "job", "--me", "--wait", "0.1"])
        err = capsys.readouterr().err
        assert code == 69
        assert err == text(
            "tenure: error: job: process PID did not answer within 0.1 s: it is stopped, or its event loop is blocked\n"
        )
        main(["status", "job", "--me", "--wait", "0.1", "--json"])
        assert json.loads(capsys.readouterr().out) == [{"pid": os.getpid(), "answered": False}]


def test_one_silent_process_does_not_hide_the_others(place: Path, capsys: Captured) -> None:
    with lead_sockets.listening("job", str(place)), answered_by(LEADING), lead_sockets.listening("job", str(place)):
        code = main(["status", "job", "--me", "--wait", "2s"])
    out, err = capsys.readouterr()
    assert (code, out.count("leads in term 7"), err.count("did not answer within 2.0 s")) == (69, 1, 2)


def test_a_process_whose_queue_of_questions_is_full(
    place: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead_sockets, "BACKLOG", 1)
    with lead_sockets.listening("job", str(place)):
        codes = [main(["status", "job", "--me", "--wait", "0.01"]) for _ in range(5)]
    assert codes == [69] * 5


def test_a_process_that_is_ending(capsys: Captured) -> None:
    with answered_by(Unavailable("closed")):
        code, _, err = run_cli(capsys, "job", "--me")
    assert code == 69
    assert err == text("tenure: error: job: process PID closed the connection without an answer: it is ending\n")


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (b'{"name": "job", "state": "leading", "token": 7, "new": 1}', 0, "leads in term 7"),
        (b'{"name": "job", "sta', 69, "can't be read; if tenure was upgraded, restart the process"),
        (b"[]", 69, "can't be read"),
    ],
)
def test_an_answer_of_another_version(answer: bytes, code: int, says: str, place: Path, capsys: Captured) -> None:
    with lead_sockets.listening("job", str(place)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        found, *shown = run_cli(capsys, "job", "--me")
        thread.join()
    assert (found, says in "".join(shown)) == (code, True)


def test_the_socket_of_a_killed_process_is_ignored_and_removed_by_the_next(place: Path, capsys: Captured) -> None:
    folder = Path(lead_sockets.folder_in(str(place)))
    with lead_sockets.listening("job", str(place)):
        (path,) = folder.iterdir()
        left = folder / path.name.replace(f"-{os.getpid()}-", "-999999999-")
        path.rename(left)
    assert left.exists()
    code, _, err = run_cli(capsys, "job", "--me")
    assert (code, "no process" in err) == (3, True)
    with answered_by(LEADING):
        assert not left.exists()
        assert run_cli(capsys, "job", "--me")[0] == 0
    assert list(folder.iterdir()) == []


def test_a_process_of_another_container_keeps_its_socket(place: Path) -> None:
    folder = Path(lead_sockets.folder_in(str(place)))
    with lead_sockets.listening("job", str(place)):
        (path,) = folder.iterdir()
        other = folder / path.name.replace(f"-{os.getpid()}-", "-999999999-")
        path.rename(other)  # its number is of another namespace, so no process has it here
        with lead_sockets.listening("job", str(place)):
            assert other.exists()
            assert len(lead_sockets.found("job", str(place))) == 2


# --- the folder --------------------------------------------------------------------------------------------------


def test_only_this_user_can_use_the_socket(place: Path) -> None:
    place.chmod(0o777)  # a volume that all may write
    umask = os.umask(0)
    try:
        with lead_sockets.listening("job", str(place)):
            folder = Path(lead_sockets.folder_in(str(place)))
            (path,) = folder.iterdir()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)


@pytest.mark.parametrize("plant", ["mode", "link", "file"])
def test_a_folder_that_others_may_write_is_refused(plant: str, place: Path, capsys: Captured) -> None:
    folder = place / f"tenure-{os.geteuid()}"
    match plant:
        case "mode":
            folder.mkdir()
            folder.chmod(0o770)
        case "link":
            (place / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(place / "elsewhere")
        case "file":
            folder.touch(0o600)
    expected = f"{folder} must be a folder that belongs to this user and has mode 700; name another"
    code, _, err = run_cli(capsys, "job", "--me")
    assert (code, expected in err) == (78, True)
    with pytest.raises(Failure, match=re.escape(expected)), lead_sockets.listening("job", str(place)):
        pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(place: Path, capsys: Captured) -> None:
    folder = place / "tenure-0"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    assert run_cli(capsys, "job", "--me")[0] == 78


def test_a_path_that_is_too_long_is_refused(place: Path) -> None:
    long = place / ("x" * 60)
    long.mkdir()
    with (
        pytest.raises(Failure, match=r"is too long: a socket's path has 100 bytes at most; name another folder with"),
        lead_sockets.listening("job", str(long)),
    ):
        pass


@pytest.mark.parametrize("name", ["a/b", "..", "x" * 400, "名", "two words", "a-b"])
def test_any_name_has_a_socket(name: str, place: Path, capsys: Captured) -> None:
    with answered_by(replace(LEADING, name=name), name=name):
        assert run_cli(capsys, name, "--me")[0] == 0
        assert run_cli(capsys, f"{name}x", "--me")[0] == 3


def test_without_a_descriptor(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(Failure, match=r"no socket can be made: Too many"), lead_sockets.listening("job", str(place)):
        pass


def test_a_place_that_does_not_exist(place: Path, capsys: Captured) -> None:
    line = ["lead", "job", "--on", f"sqlite:///{place}/work.db", "--socket-dir", str(place / "none"), "--", "true"]
    assert main(line) == 78
    assert f"no socket can be made in {place}/none/tenure-" in capsys.readouterr().err


# --- the command line --------------------------------------------------------------------------------------------

WRONG = [
    (["--me", "--all"], "--all lists the names of a store, and --me asks none; give one of them"),
    (["job", "--me", "--on", "sqlite:///work.db"], "--me asks processes of this machine, and no store; leave out --on"),
    (["job", "--ready", "--on", "sqlite:///work.db"], "--ready is about the processes of this machine; add --me"),
    (["job", "--wait", "1", "--on", "sqlite:///work.db"], "--wait is about the processes of this machine; add --me"),
    (["job", "--socket-dir", "/tmp", "--on", "sqlite:///work.db"], "--socket-dir is about the processes of this mach"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_options_that_contradict(line: list[str], says: str, capsys: Captured) -> None:
    assert main(["status", *line]) == 2
    assert says in capsys.readouterr().err


def test_a_system_without_unix_sockets(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(lead_sockets, "IS_SUPPORTED", False)
    code, _, err = run_cli(capsys, "job", "--me")
    assert (code, err) == (2, "tenure: error: --me needs Unix sockets, and this system has none\n")


def test_a_store_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("TENURE_URL", "memory:")
    with answered_by(LEADING):
        assert run_cli(capsys, "job", "--me")[0] == 0


def test_it_imports_no_loop_and_no_driver() -> None:
    code = "import sys; from tenure.cli import main; main(['status', 'job', '--me']); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines())
    assert "tenure._cli.me" in loaded
    assert not loaded & {"asyncio", "sqlite3", "rich.console", "tenure._backend", "tenure._election.machine"}


def test_a_client_that_does_not_read_stops_nothing(place: Path, capsys: Captured) -> None:
    with answered_by(LEADING):
        (found,) = lead_sockets.found("job", str(place))
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(found.path)
            assert run_cli(capsys, "job", "--me")[0] == 0
        assert run_cli(capsys, "job", "--me")[0] == 0

"""``tenure work`` as a real process: exit codes decide, time-outs and signals are obeyed, nothing outlives its worker.

A lock is so long that no load of the machine can cost it, but where its end is what is waited for; and there, what a
command does depends on what was done before, and not on the number of its delivery, which may rise more than once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tenure._cli.work import command as work
from tests.durations import PATIENCE
from tests.ports import ports_held
from tests.process.worker_setup import ONCE, WorkerSetup
from tests.process_states import is_alive, send_signal_to

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[WorkerSetup]:
    setup = WorkerSetup(tmp_path)
    try:
        yield setup
    finally:
        setup.close()


def test_the_exit_code_decides(setup: WorkerSetup) -> None:
    setup.send("good", "later", "bad")
    script = """
        body=$(cat); echo "$body $TENURE_DELIVERY_COUNT $TENURE_MESSAGE_ID" >> said
        case $body$TENURE_DELIVERY_COUNT in later1) exit 1;; bad*) exit 65;; esac
    """
    worker = setup.work("--retry-initial", "10ms", "--", "sh", "-c", script)
    setup.wait(lambda: setup.stats() == tenure.Stats(dead=1))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    assert sorted(setup.said()) == ["bad 1 bad", "good 1 good", "later 1 later", "later 2 later"]
    with tenure.sync.connect(setup.url) as backend:
        [letter] = backend.queue("orders").dead_letters.peek()
        assert (letter.id, letter.reason) == ("bad", "exit 65")


@pytest.mark.parametrize(("wait", "said"), [("0", "can't be reached"), ("50ms", "there was no answer within 0.05 s")])
def test_an_unavailable_store_is_not_waited_for_with_a_short_wait(setup: WorkerSetup, wait: str, said: str) -> None:
    pytest.importorskip("asyncpg")
    with ports_held(1) as [port]:
        worker = setup.work("--wait", wait, "--on", f"postgresql://postgres@127.0.0.1:{port}/work", "--", "true")
        _, err = worker.communicate(timeout=PATIENCE)
    assert (worker.returncode, "tenure: error: " in err) == (69, True)
    assert said in err


def test_the_codes_that_reject_can_be_chosen(setup: WorkerSetup) -> None:
    setup.send("3", "7", "65")
    script = "body=$(cat); echo $body >> said; exit $body"
    fast = ("--retry-initial", "0", "--retry-maximum", "0", "--max-deliveries", "2", "--")
    setup.work("--reject-on", "2-3", "--retry-on", "65", *fast, "sh", "-c", script)
    setup.wait(lambda: setup.stats() == tenure.Stats(dead=3))
    assert sorted(setup.said()) == ["3", "65", "65", "7", "7"]
    assert setup.reasons() == {"3": "exit 3", "7": "max_deliveries", "65": "max_deliveries"}


def test_with_codes_to_retry_alone_all_others_reject(setup: WorkerSetup) -> None:
    setup.send("3", "7", "137")
    script = "body=$(cat); echo $body >> said; exit $body"
    fast = ("--retry-initial", "0", "--retry-maximum", "0", "--max-deliveries", "2", "--")
    setup.work("--retry-on", "7", *fast, "sh", "-c", script)
    setup.wait(lambda: setup.stats() == tenure.Stats(dead=3))
    assert setup.reasons() == {"3": "exit 3", "7": "max_deliveries", "137": "exit 137"}


def test_a_command_that_can_not_be_run_is_tried_again(setup: WorkerSetup) -> None:
    program = setup.folder / "program"
    program.write_text("#!/nonexistent/interpreter\n")
    program.chmod(0o755)
    setup.send("one")
    setup.work("--retry-on", "7", "--max-deliveries", "2", "--retry-initial", "10ms", "--", str(program))
    setup.wait(lambda: setup.stats() == tenure.Stats(dead=1))
    with tenure.sync.connect(setup.url) as backend:
        [letter] = backend.queue("orders").dead_letters.peek()
    assert (letter.reason, letter.delivery_count) == ("max_deliveries", 2)
    assert letter.error
    assert letter.error.message == f"{str(program)!r} could not be run: No such file or directory"


def test_the_command_may_send_to_the_same_store(setup: WorkerSetup) -> None:
    setup.send("one")
    worker = setup.work("--until-empty", "--", sys.executable, "-m", "tenure.cli", "send", "results", "done")
    assert worker.wait(PATIENCE) == 0
    with tenure.sync.connect(setup.url) as backend:
        assert [message.body for message in backend.queue("results").receive()] == [b"done"]


def test_what_a_message_says_reaches_the_command_as_data(setup: WorkerSetup) -> None:
    hostile = "$(touch made); touch made; `touch made` 'x' \"x\"\nTENURE_TOKEN=1"
    headers = dict.fromkeys(("LD_PRELOAD", "PATH", "MADE_UP", "TENURE_QUEUE", "TENURE_MADE_UP"), hostile)
    with tenure.sync.connect(setup.url) as backend:
        backend.queue("orders").send(
            hostile.encode(), session="s", correlation_id=hostile, reply_to="answers", headers=headers
        )
    code = "import json, os, sys; json.dump([sys.stdin.read(), dict(os.environ)], open('found', 'w'))"
    worker = setup.work("--sessions", "--until-empty", "--", sys.executable, "-c", code)
    assert worker.wait(PATIENCE) == 0
    body, found = json.loads((setup.folder / "found").read_text())
    assert body == found["TENURE_CORRELATION_ID"] == hostile
    assert json.loads(found["TENURE_HEADERS"]) == headers
    assert not (setup.folder / "made").exists()
    [told] = [one for one in (work.help or "").split("\n\n") if "environment of CMD" in one]
    documented = set(re.findall(r"TENURE_\w+", told))
    assert documented <= set(found)
    assert found["TENURE_QUEUE"] == "orders"
    of_python = {"LC_CTYPE"}  # which it sets for itself where there is no locale
    others, own = ({name: env[name] for name in env.keys() - documented - of_python} for env in (found, os.environ))
    assert others == own


@pytest.mark.skipif(sys.platform != "linux", reason="no limit of one variable")
def test_headers_that_fit_in_no_variable_fail_their_own_message_alone(setup: WorkerSetup) -> None:
    room = 32 * os.sysconf("SC_PAGE_SIZE") - len("TENURE_HEADERS=") - 1
    fills = room - len(json.dumps({"a": ""}))
    with tenure.sync.connect(setup.url) as backend:
        queue = backend.queue("orders")
        # As JSON, each of these characters has six bytes.
        for name, more in (("fits", 0), ("large", 1)):
            sixes, ones = divmod(fills + more, 6)
            queue.send(name.encode(), id=name, headers={"a": "\x01" * sixes + "x" * ones})
        queue.send(b"small")
    worker = setup.work("--until-empty", "--", "sh", "-c", "cat >> said")
    assert worker.wait(PATIENCE) == 0
    assert setup.said() == ["fitssmall"]
    with tenure.sync.connect(setup.url) as backend:
        [letter] = backend.queue("orders").dead_letters.peek()
    assert (letter.id, letter.delivery_count, letter.reason) == ("large", 1, "unfit_variable")
    told = f"the variable TENURE_HEADERS of the command would have {room + 1:,} bytes, and can have {room:,}; "
    assert letter.description.startswith(told)


def test_texts_of_another_program_that_fit_in_no_variable_fail_their_own_message_alone(setup: WorkerSetup) -> None:
    setup.send("one", "two", "three")
    with closing(sqlite3.connect(setup.folder / "work.db")) as file, file:
        for body, text in ((b"one", "a\0b"), (b"two", "x" * 200_000)):
            file.execute("UPDATE tenure_message SET correlation_id = ? WHERE body = ?", (text, body))
    worker = setup.work("--until-empty", "--", "sh", "-c", "cat >> said")
    assert worker.wait(PATIENCE) == 0
    assert setup.said() == ["three"]
    with tenure.sync.connect(setup.url) as backend:
        letters = backend.queue("orders").dead_letters.peek()
    assert [(one.delivery_count, one.reason) for one in letters] == [(1, "unfit_variable")] * 2
    assert "TENURE_CORRELATION_ID of the command would have a NUL, and can have none; " in letters[0].description
    assert "TENURE_CORRELATION_ID of the command would have 200,000 bytes, and " in letters[1].description


# --- what a command writes to stderr -----------------------------------------------------------------------------


def test_stderr_is_passed_on_at_once_and_its_end_is_kept(setup: WorkerSetup) -> None:
    setup.send("one")
    script = (
        r"printf 'first\377\n' >&2; until [ -e go ]; do sleep 0.02; done; printf 'a\0b\nno \033[31mway' >&2; exit 9"
    )
    worker = setup.work("--quiet", "--max-deliveries", "1", "--", "sh", "-c", script)
    assert worker.stderr
    assert os.read(worker.stderr.fileno(), 100) == b"first\xff\n"  # while the command still runs
    (setup.folder / "go").touch()
    setup.wait(lambda: setup.stats() == tenure.Stats(dead=1))
    assert os.read(worker.stderr.fileno(), 100).startswith(b"a\0b\nno \x1b[31mway")
    with tenure.sync.connect(setup.url) as backend:
        [letter] = backend.queue("orders").dead_letters.peek()
    assert letter.error
    assert letter.error.message == "the command ended with code 9: no \x1b[31mway"
    assert letter.error.traceback.endswith("first\\xff\na\\x00b\nno \x1b[31mway\n")
    shown = setup.tenure("dead", "show", "orders", "one")
    assert "    first\\xff\n    a\\x00b\n    no \\x1b[31mway\n" in shown
    assert "no \\u001b[31mway" in setup.tenure("dead", "show", "orders", "one", "--json")


@pytest.mark.parametrize("code", [1, 65])
def test_much_on_stderr_is_all_passed_on_and_little_of_it_kept(setup: WorkerSetup, code: int) -> None:
    setup.send("one")
    script = f"i=0; while [ $i -lt 200 ]; do printf '%08000d\n' $i >&2; i=$((i+1)); done; echo last >&2; exit {code}"
    worker = setup.work("--quiet", "--max-deliveries", "1", "--until-empty", "--", "sh", "-c", script)
    _, passed_on = worker.communicate(timeout=PATIENCE)
    assert passed_on.startswith("0" * 8000 + "\n")
    assert passed_on.count("\n") > 200
    with tenure.sync.connect(setup.url) as backend:
        [letter] = backend.queue("orders").dead_letters.peek()
    assert letter.error
    assert letter.error.traceback.endswith("\nlast\n")
    assert 16_000 < len(letter.error.traceback) < 17_000


def test_a_stderr_held_beyond_the_end_of_a_command_does_not_delay_its_message(setup: WorkerSetup) -> None:
    setup.send("one")
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('held'); socket.send_fds(s, [b'x'], [2])"
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(setup.folder / "held"))
        listening.listen()
        worker = setup.work("--quiet", "--", sys.executable, "-c", script)
        with closing(listening.accept()[0]) as connection:
            _, [held], _, _ = socket.recv_fds(connection, 1, 1)
    with os.fdopen(held, "wb", buffering=0) as stderr:
        setup.wait(lambda: setup.stats() == tenure.Stats())
        stderr.write(b"afterwards\n")
        assert worker.stderr
        assert worker.stderr.readline() == "afterwards\n"


@pytest.mark.parametrize("verbosity", ["--quiet", "--verbose"])
def test_an_unread_stderr_delays_neither_messages_nor_the_end(setup: WorkerSetup, verbosity: str) -> None:
    setup.send("one", "two", "three", "four")
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as full:
        os.set_blocking(full.fileno(), False)
        with suppress(BlockingIOError):
            while True:
                os.write(full.fileno(), b"x" * 4096)
        os.set_blocking(full.fileno(), True)
        script = "echo said >&2; [ $(cat) != four ] || { echo waits > said; sleep 600; }"
        worker = setup.work(verbosity, "--grace", "100ms", "--", "sh", "-c", script, stderr=full.fileno())
        setup.wait(lambda: setup.said() and setup.stats() == tenure.Stats(locked=1))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
        assert setup.stats().ready == 1


def test_a_second_signal_ends_the_wait_for_an_unread_stderr(setup: WorkerSetup) -> None:
    setup.send("one")
    script = "head -c 200000 /dev/zero >&2; echo done > said"
    worker = setup.work("--grace", "10m", "--until-empty", "--", "sh", "-c", script)
    setup.wait(lambda: setup.said() and setup.stats() == tenure.Stats())
    send_signal_to(worker.pid, signal.SIGTERM)
    assert worker.poll() is None  # its output may still be read
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0


def test_a_worker_without_stderr(setup: WorkerSetup) -> None:
    setup.send("one")
    line = ["sh", "-c", 'exec "$@" 2>&-', "-", sys.executable, "-m", "tenure.cli", "work", "orders", "--until-empty"]
    command = ["--max-deliveries", "1", "--", "sh", "-c", "echo oops >&2; exit 1"]
    environment = {**os.environ, "TENURE_URL": setup.url}
    assert subprocess.run([*line, *command], env=environment, check=False, timeout=PATIENCE).returncode == 0
    with tenure.sync.connect(setup.url) as backend:
        [letter] = backend.queue("orders").dead_letters.peek()
    assert letter.error
    assert letter.error.message == "the command ended with code 1: oops"


def test_a_command_that_takes_too_long_is_stopped_and_tried_again(setup: WorkerSetup) -> None:
    setup.send("slow")
    script = f"echo $TENURE_DELIVERY_COUNT $$ >> said; {ONCE} {{ trap '' TERM; sleep 600; sleep 600; }}"
    setup.work("--timeout", "1s", "--", "sh", "-c", script)
    setup.wait(lambda: len(setup.said()) > 1)
    (first, pid), (second, _), *_ = (line.split() for line in setup.said())
    assert not is_alive(int(pid))
    assert int(first) < int(second)
    setup.wait(lambda: setup.stats() == tenure.Stats())


def test_term_lets_the_command_finish(setup: WorkerSetup) -> None:
    setup.send("one", "two")
    worker = setup.work("--", "sh", "-c", "cat >> said; until [ -e go ]; do sleep 0.05; done; echo ' done' >> said")
    setup.wait(lambda: setup.said() == ["one"])
    worker.send_signal(signal.SIGTERM)
    setup.wait(lambda: setup.stats().locked == 1)
    (setup.folder / "go").touch()
    assert worker.wait(PATIENCE) == 0
    assert setup.said() == ["one done"]
    assert setup.stats().ready == 1


def test_a_command_that_outlasts_the_grace_is_stopped_and_given_back_uncounted(setup: WorkerSetup) -> None:
    setup.send("one")
    worker = setup.work("--grace", "200ms", "--", "sh", "-c", "echo $TENURE_DELIVERY_COUNT $$ >> said; sleep 600")
    setup.wait(setup.said)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(PATIENCE) == 0
    assert not is_alive(int(setup.said()[0].split()[1]))
    with tenure.sync.connect(setup.url) as backend:
        [message] = backend.queue("orders").receive(wait=PATIENCE)
        assert message.delivery_count == 1


def test_at_the_end_it_prints_the_outcomes_of_the_messages(setup: WorkerSetup) -> None:
    setup.send("good", "bad", "worse", "slow")
    script = """
        body=$(cat); echo $body >> said; until [ $(wc -l < said) = 4 ]; do sleep 0.02; done
        case $body in bad) exit 1;; worse) exit 65;; slow) sleep 600;; esac
    """
    worker = setup.work("-c", "4", "--grace", "200ms", "--retry-initial", "1m", "--", "sh", "-c", script)
    setup.wait(lambda: setup.stats() == tenure.Stats(locked=1, delayed=1, dead=1))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    assert worker.stderr
    lines = worker.stderr.read().splitlines()
    assert lines[0] == f"tenure: orders: consuming from {setup.url}, 4 messages at once"
    # The store has a verdict before it is logged, so that the signal may come between the two.
    stopping = "stopping; 1 running, with 0.2 s to finish; a second signal stops them at once"
    assert f"tenure: orders: {stopping}" in lines[1:-1]
    assert re.fullmatch("tenure: orders: 1 done, 2 failed, 1 given back, 1 dead-lettered, in .* s", lines[-1])
    assert [line[:28] for line in lines[1:-1]].count("tenure: warning: orders: mes") == 1
    assert [line[:26] for line in lines[1:-1]].count("tenure: error: orders: mes") == 1


def test_verbose_prints_each_start_and_end(setup: WorkerSetup) -> None:
    (setup.folder / "shop.py").write_text("def sell(message):\n    if message.body == b'two':\n        1 / 0\n")
    setup.send("one", "two")
    lines = (
        setup.work("--handler", "shop:sell", "--until-empty", "--max-deliveries", "1", "-v")
        .communicate(timeout=PATIENCE)[1]
        .splitlines()
    )
    texts = [line.partition("+00:00 ")[2] for line in lines]
    assert "orders: message 'one', delivery 1: started" in texts
    assert any(re.fullmatch(r"orders: message 'one', delivery 1: done after .*s", line) for line in texts)
    assert any(re.fullmatch(r"orders: message 'two', delivery 1: failed after .*s", line) for line in texts)


def test_sessions_are_consumed_in_order_and_concurrently(setup: WorkerSetup) -> None:
    with tenure.sync.connect(setup.url) as backend:
        for number in range(3):
            for session in ("a", "b"):
                backend.queue("orders").send(f"{session}{number}".encode(), session=session)
    script = """
        line="$(cat) $TENURE_SESSION $TENURE_DELIVERY_COUNT"; echo "$line" >> said
        until [ $(grep -c '0 . 1' said) = 2 ]; do sleep 0.05; done
        case $line in a0*1) exit 75;; esac
    """
    worker = setup.work("--sessions", "-c", "2", "--", "sh", "-c", script)
    setup.wait(lambda: setup.stats() == tenure.Stats())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    assert [line for line in setup.said() if " a " in line] == ["a0 a 1", "a0 a 2", "a1 a 1", "a2 a 1"]
    assert [line for line in setup.said() if " b " in line] == ["b0 b 1", "b1 b 1", "b2 b 1"]


def test_a_function_of_this_folder(setup: WorkerSetup) -> None:
    (setup.folder / "shop.py").write_text("async def sell(message):\n    print(message.body, file=open('said', 'a'))\n")
    setup.send("one", "two")
    worker = setup.work("--handler", "shop:sell", "--until-empty")
    assert worker.wait(PATIENCE) == 0
    assert sorted(setup.said()) == ["b'one'", "b'two'"]


def test_processes_that_a_function_leaves_are_not_adopted(setup: WorkerSetup) -> None:
    orphan = "echo $$ > said; until [ -e go ]; do sleep 0.05; done"
    script = f"sh -c {shlex.quote(orphan)} & exit"
    (setup.folder / "shop.py").write_text(
        f"import subprocess\ndef sell(message):\n    subprocess.run(['sh', '-c', {script!r}])\n"
    )
    setup.send("one")
    worker = setup.work("--handler", "shop:sell")
    setup.wait(lambda: setup.said() and setup.stats() == tenure.Stats())
    parent = int(Path(f"/proc/{setup.said()[0]}/stat").read_text().rpartition(")")[2].split()[1])
    (setup.folder / "go").touch()
    assert parent != worker.pid  # which would never reap it


def test_a_failure_of_a_function_has_a_traceback_and_of_a_command_none(setup: WorkerSetup) -> None:
    (setup.folder / "shop.py").write_text("def sell(message):\n    return 1 / len(message.body[5:])\n")
    retries = ["--until-empty", "--max-deliveries", "3", "--retry-initial", "10ms"]
    setup.send("order")
    _, err = setup.work(*retries, "--handler", "shop:sell").communicate(timeout=PATIENCE)
    lines = err.splitlines()
    assert (
        sum("its handler failed (ZeroDivisionError: division by zero, at shop.py:2 in sell)" in one for one in lines)
        == 3
    )
    assert err.count("Traceback (most recent call last):") == 1
    at = lines.index("    Traceback (most recent call last):")
    assert lines[at + 1] == f'      File "{setup.folder}/shop.py", line 2, in sell'
    setup.send("other")
    _, err = setup.work(*retries, "--", "sh", "-c", "exit 3").communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert err.count("its handler failed (CommandFailed: the command ended with code 3); it may") == 3

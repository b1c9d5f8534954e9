"""The commands of queues, run on an SQLite file: their output, exit codes and effects."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tenure._runtime.process_name import process_name
from tenure.cli import main

Captured = pytest.CaptureFixture[str]

MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    monkeypatch.chdir(tmp_path)
    return url


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return (code, *capsys.readouterr())


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def received(url: str) -> list[tenure.sync.Message]:
    with tenure.sync.connect(url) as backend:
        return backend.queue("orders").receive(max=100)


# --- send --------------------------------------------------------------------------------------------------------


def test_send_with_all_options(url: str, capsys: Captured) -> None:
    sent = run_cli(
        capsys, "send", "orders", "hello", "--id", "a", "-H", "kind=test", "--priority", "3", "--expires-in", "1h",
        "--reply-to", "answers", "--correlation-id", "c",
    )  # fmt: skip
    assert sent == (0, "a\n", "")
    [message] = received(url)
    assert (message.body, message.headers, message.priority) == (b"hello", {"kind": "test"}, 3)
    assert (message.reply_to, message.correlation_id) == ("answers", "c")


def test_send_an_empty_body(url: str, capsys: Captured) -> None:
    assert run_cli(capsys, "send", "orders", "")[0] == 0
    assert [message.body for message in received(url)] == [b""]


@pytest.mark.parametrize("dash", [(), ("-",)])
def test_send_from_the_standard_input(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, dash: tuple[str, ...]
) -> None:
    stdin(monkeypatch, b"\x00\xff\n")
    assert run_cli(capsys, "send", "orders", *dash)[0] == 0
    assert [message.body for message in received(url)] == [b"\x00\xff\n"]


def test_send_a_file_and_lines(url: str, capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\r\ntwo\n")
    code, out, _ = run_cli(capsys, "send", "orders", "--file", "lines", "--lines", "--json")
    assert code == 0
    assert len(json.loads(out)["ids"]) == 2
    assert [message.body for message in received(url)] == [b"one", b"two"]


def test_a_queue_is_paused_and_resumed(url: str, capsys: Captured) -> None:
    run_cli(capsys, "send", "orders", "two kettles")
    code, out, _ = run_cli(capsys, "queue", "pause", "orders")
    assert (code, out) == (0, "paused orders; it holds 1 ready (paused)\n")
    assert received(url) == []
    line = run_cli(capsys, "queue")[1].splitlines()[1]
    assert line.endswith("s paused")
    shown = run_cli(capsys, "queue", "orders")[1].splitlines()
    assert shown[-1].split() == ["none", "none", "none", "paused"]
    code, out, _ = run_cli(capsys, "queue", "resume", "orders", "--json")
    found = json.loads(out)
    assert (code, found["queue"], found["ready"], found["paused"]) == (0, "orders", 1, False)
    assert [message.body for message in received(url)] == [b"two kettles"]
    assert "MAX LOCKED" not in run_cli(capsys, "queue", "orders")[1]


def test_a_worker_of_a_paused_queue_warns_and_works_once_it_is_resumed(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        backend.queue("orders").send(b"x")
        backend.queue("orders").declare(paused=True)
        command = [sys.executable, "-m", "tenure", "work", "orders", "--until-empty", "--", "true"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
            assert worker.stderr is not None
            warned = worker.stderr.readline()
            backend.queue("orders").declare(paused=False)
            rest = worker.stderr.read()
    assert warned == (
        "tenure: warning: orders is paused: nothing is received until it is resumed (tenure queue resume orders)\n"
    )
    assert "orders: 1 done" in rest
    assert worker.returncode == 0


@pytest.mark.parametrize("word", ["pause", "resume"])
def test_a_pause_of_no_queue_is_refused(url: str, capsys: Captured, word: str) -> None:
    run_cli(capsys, "send", "orders", "two kettles")
    code, _, err = run_cli(capsys, "queue", word, "oders")
    assert code == 3
    assert "did you mean 'orders'" in err
    assert [line.split()[0] for line in run_cli(capsys, "queue")[1].splitlines()[1:]] == ["orders"]
    code, _, err = run_cli(capsys, "queue", word)
    assert code == 2
    assert f"name the queue: tenure queue {word} NAME" in err


def test_limits_are_declared_and_lifted(url: str, capsys: Captured) -> None:
    given = ("--max-locked", "1000", "--rate", "1000/1m", "--session-rate", "1/500ms")
    code, out, _ = run_cli(capsys, "queue", "declare", "orders", *given)
    assert code == 0
    assert out.splitlines()[2:] == [
        "MAX LOCKED           RATE  SESSION RATE",
        "     1,000  1,000 in 60 s    1 in 0.5 s",
    ]
    settings = json.loads(run_cli(capsys, "queue", "declare", "orders", "--lock", "30", "--json")[1])["settings"]
    assert (settings["max_locked"], settings["rate"], settings["session_rate"]) == (1_000, [1_000, 60.0], [1, 0.5])
    lifted = ("--max-locked", "none", "--rate", "none", "--session-rate", "none")
    settings = json.loads(run_cli(capsys, "queue", "declare", "orders", *lifted, "--json")[1])["settings"]
    assert (settings["max_locked"], settings["rate"], settings["session_rate"]) == (None, None, None)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-locked", "0", "'0' is not a number of messages; write a whole number from 1 on, or none"),
        ("--max-locked", "-3", "'-3' is not a number of messages"),
        ("--max-locked", "many", "'many' is not a number of messages"),
        ("--rate", "100", "'100' is not a rate; write COUNT/TIME (100/1m: 100 in each minute), or none"),
        ("--rate", "1.5/1m", "'1.5/1m' is not a rate"),
        ("--rate", "100/minute", "'minute' is not a duration"),
        ("--rate", "0/1m", "the count of rate must be a whole number of at least 1, not 0"),
        ("--session-rate", "1/0", "'--session-rate': the time of rate must be at least 0.001, not 0"),
        ("--max-locked", "99999999999", "max_locked must not be more than 2,147,483,647"),
    ],
)
def test_limits_that_can_not_be_are_refused(url: str, capsys: Captured, option: str, value: str, said: str) -> None:
    code, _, err = run_cli(capsys, "queue", "declare", "orders", option, value)
    assert code == 2
    assert said in err


def test_declare_changes_the_settings_for_all_processes(url: str, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "queue", "declare", "orders", "--lock", "5", "--dead-retention", "1h", "--json")
    settings = {"lock": 5.0, "max_deliveries": 10, "dedupe_window": 600.0, "body_max": 1_048_576}
    unlimited = {"max_locked": None, "rate": None, "session_rate": None, "paused": False}
    found = {**settings, "dead_retention": 3_600.0, **unlimited}
    assert (code, json.loads(out)) == (0, {"queue": "orders", "settings": found})
    code, out, _ = run_cli(capsys, "queue", "declare", "orders", "--dead-retention", "forever")
    assert out.splitlines()[0].split("  ") != out.splitlines()[1].split("  ")
    assert "forever" in out
    assert json.loads(run_cli(capsys, "queue", "orders", "--json")[1])["settings"]["dead_retention"] is None
    assert "1,048,576 bytes" in run_cli(capsys, "queue", "orders")[1]
    with tenure.sync.connect(url) as backend, pytest.raises(tenure.ConfigError, match="lock is 5, not 30"):
        backend.queue("orders", lock=30).receive()


def test_work_that_expects_other_settings_is_refused(capsys: Captured) -> None:
    run_cli(capsys, "queue", "declare", "orders", "--lock", "5")
    code, _, err = run_cli(capsys, "work", "orders", "--lock", "30", "--until-empty", "--", "true")
    assert code == 78
    assert "lock is 5, not 30" in err
    assert "tenure queue declare orders --lock 30" in err


def test_declare_needs_a_setting(capsys: Captured) -> None:
    code, _, err = run_cli(capsys, "queue", "declare", "orders")
    assert code == 2
    assert "give a setting to change, for example --lock 30" in err


def test_send_later(capsys: Captured) -> None:
    run_cli(capsys, "send", "orders", "x", "--delay", "1h")
    run_cli(capsys, "send", "orders", "x", "--at", "2100-01-01T00:00:00+00:00")
    assert json.loads(run_cli(capsys, "queue", "orders", "--json")[1])["delayed"] == 2


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (("send", "", "x"), 78, "the queue's name must not be empty; give it at least one character"),
        (("send", "orders", "x", "--id", ""), 78, "id must not be empty; leave it out instead"),
        (("send", "orders", "x", "--reply-to", ""), 78, "reply_to must not be empty; leave it out instead"),
        (("send", "a$b", "x"), 78, "must not contain '$'"),
        (("send", "a$dead", "x"), 78, "the dead letters of 'a' are queue('a').dead_letters, and tenure dead on"),
        (("send", "orders", "x", "--priority", "10"), 2, "10 is not in the range"),
        (("send", "orders", "x", "--at", "tomorrow"), 2, "'tomorrow' is not a time; write it as in 2030-01-31T"),
        (("send", "orders", "x", "--delay", "soon"), 2, "'soon' is not a duration"),
        (("send", "orders", "x", "--file", "nowhere"), 2, "'nowhere' does not exist"),
        (
            ("send", "orders", "--lines", "--id", "a"),
            2,
            "--id is for one message, and --lines may send many; use --id-p",
        ),
        (("send", "orders", "x", "--skip", "2"), 2, "--skip needs --lines"),
        (("send", "orders", "x", "--id-prefix", "a"), 2, "--id-prefix needs --lines"),
        (("send", "orders", "--lines", "--skip", "-1"), 2, "-1 is not in the range"),
        (("send", "orders", "x", "-H", "nothing"), 2, "not of the form key=value"),
        (("send", "orders", "x", "--delay", "1s", "--at", "2100-01-01"), 78, "can't both be given"),
        (("work", "orders"), 2, "give either a command after --, or --handler"),
        (("work", "orders", "--handler", "json:loads", "--", "cat"), 2, "give either a command"),
        (("work", "orders", "--", "no-such-command"), 127, "no command 'no-such-command' on PATH"),
        (("work", "orders", "--handler", "json"), 2, "not of the form module:function"),
        (("work", "orders", "--handler", "no_such_module:f"), 127, "the module can't be imported"),
        (("work", "orders", "--handler", "json:no_such"), 127, "has no such function"),
        (("work", "orders", "--handler", "json:loads", "--timeout", "3"), 2, "--timeout stops a command"),
        (("work", "orders", "--timeout", "0", "--", "cat"), 2, "--timeout 0 would stop every command at once"),
        (("work", "orders", "-v", "-q", "--", "cat"), 2, "--verbose and --quiet contradict"),
        (("queue", "--watch", "--every", "0"), 2, "--every 0 is too short; give at least 0.01 s"),
        (("queue", "--watch", "--every", "9ms"), 2, "--every 0.009 is too short"),
        (("queue", "--every", "1"), 2, "need --watch"),
        (("queue", "--count", "1"), 2, "need --watch"),
        (("queue", "--wait", "1"), 2, "need --watch"),
        (("queue", "--watch", "--wait", "soon"), 2, "'soon' is not a duration"),
        (("dead", "purge", "orders", "--all", "--sequence", "1"), 2, "--all removes all"),
        (("dead", "purge", "orders"), 2, "no messages are chosen"),
        (("dead", "bury", "orders"), 2, "No such command 'bury'"),
        (("dead", "list", "orders", "--reason"), 2, "requires an argument; see: tenure dead list --help"),
        (("send", "orders", "--id"), 2, "requires an argument; see: tenure send --help"),
    ],
)
def test_wrong_input(capsys: Captured, line: tuple[str, ...], code: int, message: str) -> None:
    output = run_cli(capsys, *line)
    assert output[0] == code
    assert message in output[2]
    assert output[2].startswith("tenure: error: ")
    assert len(output[2].splitlines()) == 1


def test_a_handler_whose_module_raises(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "misspelt.py").write_text("def sell(:\n")
    code, out, err = run_cli(capsys, "work", "orders", "--handler", "broken:sell")
    assert (code, out) == (78, "")
    assert err.splitlines()[0].strip() == "Traceback (most recent call last):"
    assert err.splitlines()[-1] == (
        "tenure: error: --handler 'broken:sell': the module 'broken' raised RuntimeError: broken"
    )
    code, _, err = run_cli(capsys, "work", "orders", "--handler", "misspelt:sell")
    assert code == 78
    assert "misspelt.py, line 1 raised SyntaxError: " in err.splitlines()[-1]


ODD = {
    "class Own(Exception):\n    def __str__(self): raise KeyError\nraise Own": (
        "the module 'odd' raised Own, which can't be printed"
    ),
    "raise SyntaxError(5)": "the module 'odd' raised SyntaxError: 5",
    "import ast\nast.literal_eval('{')": "the module 'odd' raised SyntaxError: '{' was never closed",
    "raise ImportError": "the module 'odd' raised ImportError",
    "raise SystemExit('no DSN')": "the module 'odd' raised SystemExit: no DSN",
    "def __getattr__(name): raise ImportError('late')": "the module 'odd' raised ImportError: late",
    "raise ValueError('a\\n\\x1b[2Jtenure: error: b')": (
        "the module 'odd' raised ValueError: a \\x1b[2Jtenure: error: b"
    ),
    "raise ValueError('x' * 9_000)": f"the module 'odd' raised ValueError: {'x' * 4_000}",
}


@pytest.mark.parametrize("text", ODD)
def test_a_handler_whose_module_raises_an_odd_error(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text(text)
    code, out, err = run_cli(capsys, "work", "orders", "--handler", "odd:sell")
    *shown, said = err.splitlines()
    assert (code, out) == (127 if "ImportError" in text else 78, "")
    assert said.startswith(f"tenure: error: --handler 'odd:sell': {ODD[text]}")
    assert len(said) < 5_000
    assert shown
    assert all(line.startswith("    ") and line.isprintable() for line in shown)


def test_a_handler_whose_module_names_a_wrong_store_shows_no_secret(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text("import tenure\nservice = tenure.Service('rdis://:hunter2@h')\n")
    code, out, err = run_cli(capsys, "work", "orders", "--handler", "odd:sell")
    assert (code, out) == (78, "")
    assert err.startswith("tenure: error: --handler 'odd:sell': line 2 of the module 'odd' raised ConfigError: ")
    assert "hunter2" not in err


@pytest.mark.parametrize("end", ["sys.stderr = None", "sys.stderr = open('log', 'w'); sys.stderr.close()"])
def test_a_handler_whose_module_takes_stderr_away_and_raises(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text(f"import sys\n{end}\n1 / 0")
    assert run_cli(capsys, "work", "orders", "--handler", "odd:sell") == (78, "", "")


# --- queue, dead -------------------------------------------------------------------------------------------------


def test_queue_counts_one_or_all(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend:
        backend.queue("orders").send(b"x")
        backend.queue("bills").send(b"x", delay=60)
    code, out, _ = run_cli(capsys, "queue")
    assert code == 0
    title, bills, orders = out.splitlines()
    assert title.split() == ["QUEUE", "READY", "LOCKED", "DELAYED", "DEFERRED", "DEAD", "OLDEST"]
    assert bills.split() == ["bills", "0", "0", "1", "0", "0"]
    assert orders.split()[:6] == ["orders", "1", "0", "0", "0", "0"]
    plain = run_cli(capsys, "queue", "--watch", "--every", "10ms", "--count", "2")[1].splitlines()
    assert [line.split()[1] for line in plain] == ["QUEUE", "bills", "orders", "bills", "orders"]
    assert all(re.fullmatch(MOMENT, line.split()[0]) for line in plain[1:])
    assert len({line.index(" 0 ") for line in plain[1::2]} | {line.index(" 1 ") for line in plain[2::2]}) == 1
    lines = run_cli(capsys, "queue", "--watch", "--every", "10ms", "--count", "2", "--json")[1].splitlines()
    assert [len(json.loads(line)["queues"]) for line in lines] == [2, 2]


NEVER = "tenure: error: there is no queue 'ordres' on this store; did you mean 'orders'?\n"
WARNED = NEVER.replace("error", "warning")
LISTED = "list the queues with: tenure queue"


@pytest.mark.parametrize(
    "line", ["queue ordres", "queue ordres --json", "dead list ordres", "dead list ordres --json", "dead show ordres 1",
             "dead redrive ordres", "dead redrive ordres --dry-run", "dead purge ordres --all"],
)  # fmt: skip
def test_a_command_for_a_missing_queue_reports_it(capsys: Captured, line: str) -> None:
    run_cli(capsys, "send", "orders", "x")
    assert run_cli(capsys, *line.split()) == (3, "", NEVER)
    output = run_cli(capsys, *line.replace("ordres", "zebra").split())
    assert output == (3, "", NEVER.replace("ordres", "zebra").replace("did you mean 'orders'?", LISTED))


@pytest.mark.parametrize("line", ["queue orders", "dead list orders", "dead redrive orders", "dead purge orders --all"])
def test_an_empty_queue_that_was_used_is_no_error(url: str, capsys: Captured, line: str) -> None:
    run_cli(capsys, "send", "orders", "x")
    with tenure.sync.connect(url) as backend:
        for message in backend.queue("orders").receive():
            message.complete()
    assert run_cli(capsys, *line.split())[::2] == (0, "")


def test_a_worker_of_a_missing_queue_warns_and_works(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_cli(capsys, "send", "orders", "x")
    worker = ["--until-empty", "--handler", "builtins:repr"]  # for a command, this process would adopt orphans
    code, out, err = run_cli(capsys, "work", "ordres", *worker)
    assert (code, out, err.splitlines(keepends=True)[0]) == (0, "", WARNED)
    assert run_cli(capsys, "work", "ordres", *worker, "--quiet") == (0, "", "")
    code, out, err = run_cli(capsys, "work", "orders", *worker, "-c", "3")
    consuming, summary = err.splitlines()
    assert (code, out, consuming) == (0, "", f"tenure: orders: consuming from {url}, 3 messages at once")
    assert re.fullmatch(r"tenure: orders: 1 done, 0 failed, 0 given back, in .*s", summary)
    assert received(url) == []


def test_watching_a_missing_queue_warns_and_goes_on(capsys: Captured) -> None:
    run_cli(capsys, "send", "orders", "x")
    code, out, err = run_cli(capsys, "queue", "ordres", "--watch", "--every", "10ms", "--count", "2")
    assert (code, len(out.splitlines()), err) == (0, 3, WARNED)


def test_delete_a_queue(url: str, capsys: Captured) -> None:
    run_cli(capsys, "send", "orders", "x")
    assert run_cli(capsys, "queue", "delete", "ordres")[0] == 3
    code, out, err = run_cli(capsys, "queue", "delete", "orders")
    assert (code, out) == (1, "")
    assert err == (
        "tenure: error: could not delete 'orders': it holds 1 ready; consume, redrive or purge them, or delete it "
        "by force (--force)\n"
    )
    assert run_cli(capsys, "queue", "delete", "orders", "--force") == (0, "deleted orders; it held 1 ready\n", "")
    assert run_cli(capsys, "queue", "--json")[1] == "[]\n"
    with tenure.sync.connect(url) as backend:
        backend.queue("orders").send(b"x")
        backend.queue("orders").receive()[0].complete()
    assert json.loads(run_cli(capsys, "queue", "delete", "orders", "--json")[1])["deleted"]["ready"] == 0


@pytest.fixture
def filled(url: str) -> dict[str, int]:
    """Fill a queue; return the sequences of its messages by id."""
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders")
        queue.send(b"\xff\x00", id="bytes", headers={"kind": "x"}, priority=2)
        queue.receive()
        queue.send("ä\x1b[31m".encode() * 30, id="text")
        queue.send(b"later", id="later", delay=3_600)
        return {one.id: one.sequence for one in queue.peek()}


def test_peek_shows_the_messages(filled: dict[str, int], capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "queue", "peek", "orders")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    titles, *rows = [line.split() for line in out.splitlines()]
    columns = ("SEQUENCE", "ID", "STATE", "DELIVERIES", "AGE", "ENDS", "IN", "LOCKED", "BY", "FOR", "BODY")
    assert titles == list(columns)
    assert [row[:4] for row in rows] == [
        [str(filled["bytes"]), "bytes", "locked", "1"],
        [str(filled["text"]), "text", "ready", "0"],
        [str(filled["later"]), "later", "delayed", "0"],
    ]
    assert process_name() in rows[0]
    assert rows[0][-4:] == ["/wA=", "(base64,", "2", "bytes)"]
    assert rows[1][-1].endswith("…")
    locked, ready, delayed = json.loads(run_cli(capsys, "queue", "peek", "orders", "--json")[1])
    assert (locked["body"], locked["body_encoding"], ready["body_encoding"]) == ("/wA=", "base64", "utf-8")
    assert (locked["headers"], locked["priority"], locked["state"]) == ({"kind": "x"}, 2, "locked")
    assert locked["locked_until"] > locked["enqueued_at"]
    assert locked["locked_until"].endswith("+00:00")
    assert locked["locked_by"] == process_name()
    assert locked["enqueued_at"] <= locked["locked_since"] < locked["locked_until"]
    assert (ready["locked_until"], ready["due_at"], locked["due_at"]) == (None, None, None)
    assert delayed["due_at"] > delayed["enqueued_at"]
    assert set(locked) == {
        *("queue", "sequence", "id", "body", "body_encoding", "headers", "state", "delivery_count", "enqueued_at"),
        *("locked_until", "due_at", "session", "priority", "reply_to", "correlation_id", "locked_by", "locked_since"),
    }
    for chosen, ids in (
        ("--state ready --state delayed", ["text", "later"]),
        (f"--after {filled['bytes']} --limit 1", ["text"]),
        (f"--id later --sequence {filled['later']}", ["later"]),
        ("--older-than 1h", []),
        ("--session s", []),
    ):
        found = json.loads(run_cli(capsys, "queue", "peek", "orders", "--json", *chosen.split())[1])
        assert [one["id"] for one in found] == ids
    assert run_cli(capsys, "queue", "peek", "orders", "--older-than", "1h") == (0, "", "")


def test_purge_removes_the_chosen_messages(filled: dict[str, int], capsys: Captured) -> None:
    purge = ("queue", "purge", "orders")
    assert run_cli(capsys, *purge, "--all", "--dry-run") == (0, "2 would be removed\n", "")
    assert run_cli(capsys, *purge, "--older-than", "1h") == (0, "0 removed\n", "")
    assert json.loads(run_cli(capsys, *purge, "--id", "text", "--dry-run", "--json")[1]) == {
        "queue": "orders", "purged": 0, "would_be": 1,
    }  # fmt: skip
    assert run_cli(capsys, *purge, "--state", "delayed") == (0, "1 removed\n", "")
    assert json.loads(run_cli(capsys, *purge, "--all", "--json")[1]) == {"queue": "orders", "purged": 1, "would_be": 1}
    assert json.loads(run_cli(capsys, "queue", "orders", "--json")[1])["locked"] == 1


def test_queues_with_the_names_of_commands(url: str, capsys: Captured) -> None:
    for word in ("peek", "purge", "delete"):
        run_cli(capsys, "send", word, "x")
        assert run_cli(capsys, "queue", "--", word)[1].splitlines()[1].split()[:2] == [word, "1"]
        assert run_cli(capsys, "queue", "--json", "--", word)[0] == 0
        assert run_cli(capsys, "queue", "peek", word)[1].splitlines()[1].split()[2] == "ready"
        code, _, err = run_cli(capsys, "queue", word)
        assert code == 2
        assert f"name the queue: tenure queue {word} NAME (to count a queue called '{word}'" in err
        assert f"tenure queue -- {word}); see: tenure queue {word} --help" in err
    assert run_cli(capsys, "queue", "delete", "peek", "--force")[0] == 0
    assert run_cli(capsys, "queue", "purge", "purge", "--all")[1] == "1 removed\n"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("peek ordres", 3, "there is no queue 'ordres' on this store; did you mean 'orders'"),
        ("peek orders --state dead", 2, "'dead' is not one of"),
        ("peek orders --limit 0", 2, "0 is not in the range"),
        ("peek orders --id", 2, "Option '--id' requires an argument; see: tenure queue peek --help"),
        ("purge orders", 2, "no messages are chosen; choose with --state, --id, --sequence, --session or"),
        ("purge orders --all --id a", 2, "--all removes all, and --state, --id, --sequence, --session or --older-than"),
        ("purge orders --state locked", 2, "'locked' is not one of"),
        ("purge orders --older-than soon", 2, "'soon' is not a duration"),
        ("purge ordres --all", 3, "there is no queue 'ordres' on this store"),
        ("delete", 2, "name the queue: tenure queue delete NAME"),
        ("delete orders --watch", 2, "No such option"),
        ("orders --delete", 2, "No such option"),
    ],
)
def test_wrong_input_to_the_commands_of_a_queue(capsys: Captured, line: str, code: int, message: str) -> None:
    run_cli(capsys, "send", "orders", "x")
    answer, out, err = run_cli(capsys, "queue", *line.split())
    assert (answer, out) == (code, "")
    assert message in err


def test_list_show_redrive_and_purge_dead_letters(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders")
        queue.send_batch([tenure.Outgoing(b"%d" % n, id=f"m{n}") for n in range(3)])
        for message in queue.receive(max=3):
            message.dead_letter("unreadable", "says \x1b[31mnothing")
    code, out, _ = run_cli(capsys, "dead", "list", "orders")
    assert code == 0
    assert [row.split()[1] for row in out.splitlines()] == ["ID", "m0", "m1", "m2"]
    assert "\x1b" not in out
    [letter] = json.loads(run_cli(capsys, "dead", "list", "orders", "--id", "m1", "--json")[1])
    assert (letter["reason"], letter["body"]) == ("unreadable", "1")
    sequence = str(letter["sequence"])
    assert "m1" in run_cli(capsys, "dead", "show", "orders", sequence)[1]
    assert json.loads(run_cli(capsys, "dead", "show", "orders", "m1", "--json")[1]) == letter
    none = "tenure: error: 'orders' has no dead letter '700'; see: tenure dead list orders\n"
    assert run_cli(capsys, "dead", "show", "orders", "700") == (3, "", none)
    assert run_cli(capsys, "dead", "redrive", "orders", "--dry-run")[1] == "3 would be put back\n"
    assert run_cli(capsys, "dead", "redrive", "orders", "--sequence", sequence)[1] == "1 put back\n"
    assert run_cli(capsys, "dead", "purge", "orders", "--reason", "other")[1] == "0 removed\n"
    assert run_cli(capsys, "dead", "purge", "orders", "--older-than", "7d")[1] == "0 removed\n"
    assert json.loads(run_cli(capsys, "dead", "list", "orders", "--older-than", "1h", "--json")[1]) == []
    assert run_cli(capsys, "dead", "purge", "orders", "--older-than", "1ms", "--id", "m0")[1] == "1 removed\n"
    assert json.loads(run_cli(capsys, "dead", "purge", "orders", "--all", "--json")[1])["purged"] == 1
    assert [message.id for message in received(url)] == ["m1"]


def test_the_list_of_dead_letters_shows_their_reasons(url: str, capsys: Captured) -> None:
    def handle(message: tenure.sync.Message) -> None:
        raise (
            ValueError(f"no customer {message.body.decode()}")
            if message.id == "failed"
            else tenure.Reject("old", "2019")
        )

    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders", max_deliveries=2)
        queue.send_batch([tenure.Outgoing(b"17", id="failed"), tenure.Outgoing(b"18", id="rejected")])
        queue.consume(handle, until_empty=True, retry=tenure.RetryPolicy(initial=0.01))
    _, out, _ = run_cli(capsys, "dead", "list", "orders")
    why = {row.split()[1]: row for row in out.splitlines()}
    assert why["failed"].endswith("  ValueError: no customer 17")
    assert why["rejected"].endswith("  2019")


def test_dead_letters_go_to_another_queue(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders")
        queue.send_batch([tenure.Outgoing(b"%d" % n, id=f"m{n}") for n in range(3)])
        for message in queue.receive(max=3):
            message.dead_letter("unreadable")
    redrive = ("dead", "redrive", "orders", "--to", "fixed")
    assert run_cli(capsys, *redrive, "--dry-run") == (0, "3 would be put into fixed\n", "")
    assert run_cli(capsys, *redrive, "--id", "m1") == (0, "1 put into fixed\n", "")
    output = json.loads(run_cli(capsys, *redrive, "--json")[1])
    assert output == {"queue": "orders", "to": "fixed", "redriven": 2, "would_be": 2}
    assert [one["id"] for one in json.loads(run_cli(capsys, "queue", "peek", "fixed", "--json")[1])] == [
        "m1",
        "m0",
        "m2",
    ]
    code, out, err = run_cli(capsys, "dead", "redrive", "orders", "--to", "a$b")
    assert (code, out) == (78, "")
    assert err.startswith("tenure: error: to ('a$b') must not contain '$'")
    assert run_cli(capsys, "dead", "redrive", "orders", "--to", "")[0] == 78
    assert run_cli(capsys, "dead", "redrive", "ordres", "--to", "fixed")[0] == 3


@pytest.mark.parametrize(
    ("body", "written", "encoding", "shown"),
    [
        (b"\x00\xff\n", "AP8K", "base64", "AP8K (base64, 3 bytes)"),
        ("gr\u00fcn".encode(), "gr\u00fcn", "utf-8", "gr\u00fcn"),
        (b"", "", "utf-8", None),
    ],
)
def test_bodies_and_times_for_programs(
    url: str, capsys: Captured, body: bytes, written: str, encoding: str, shown: str | None
) -> None:
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders", max_deliveries=1)
        queue.send(body, id="a")
        queue.receive()[0].abandon()
    [letter] = json.loads(run_cli(capsys, "dead", "list", "orders", "--json")[1])
    assert json.loads(run_cli(capsys, "dead", "show", "orders", "a", "--json")[1]) == letter
    assert (letter["body"], letter["body_encoding"]) == (written, encoding)
    for moment in (letter["enqueued_at"], letter["dead_at"], letter["history"][0]["at"]):
        assert re.fullmatch(MOMENT, moment)
    out = run_cli(capsys, "dead", "show", "orders", "a")[1]
    output = {line[:15].rstrip(): line[16:] for line in out.splitlines()}
    assert output.get("body") == shown
    assert output["died"] == letter["dead_at"]
    assert f"{letter['dead_at'][:19]}+00:00" in run_cli(capsys, "dead", "list", "orders")[1]

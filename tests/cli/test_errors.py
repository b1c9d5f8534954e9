"""Errors on the command line: one line with advice, a documented code, no traceback, no password."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tenure
import tenure.sync
from tenure._cli.exits import Exit
from tenure.cli import main

Captured = pytest.CaptureFixture[str]
SECRET = "hunter2"
STORE = "sqlite:///work.db"


@pytest.fixture(autouse=True)
def no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENURE_URL", raising=False)
    monkeypatch.chdir(tmp_path)


WRONG = [
    (["stauts"], 2, "there is no command 'stauts'; did you mean 'status'?"),
    (["status"], 2, "add --on URL or set TENURE_URL, for example --on sqlite:///work.db"),
    (["doctor"], 2, "tenure doctor sqlite:///work.db"),
    (["status", "--on", STORE, "--jsno"], 2, "'--json'"),
    (["lead", "job", "--on", STORE, "--agian", "--", "true"], 2, "Did you mean '--again'?"),
    (["lead", "job", "--on", STORE], 2, "Missing argument '-- CMD [ARGS]...'"),
    (["lead", "job", "--on", STORE, "--ttl", "15 parsecs", "--", "true"], 2, "'15 parsecs' is not a duration"),
    (["lead", "job", "--on", STORE, "--ttl", "nan", "--", "true"], 2, "'nan' is not a duration"),
    (["lead", "job", "--on", STORE, "--metadata", "v", "--", "true"], 2, "'v' is not of the form key=value"),
    (["lead", "job", "--on", STORE, "--ttl", "1", "--grace", "5", "--", "true"], 78, "try --grace "),
    (["lead", "job", "--on", STORE, "--", "no-such-command"], 127, "no command 'no-such-command' on PATH"),
    (["lead", "job", "--on", STORE, "--", "echo hello"], 127, "for shell syntax use sh -c"),
    (["lead", "job", "--on", STORE, "--", "/"], 126, "it is a folder"),
    (["lead", "", "--on", STORE, "--", "true"], 78, "''"),
    (["status", "x" * 2000, "--on", STORE], 78, "at most"),
    (["status", "not\udcffutf8", "--on", STORE], 78, r"not\udcffutf8"),
    (["lead", "job", "--on", STORE, "-v", "-q", "--", "true"], 2, "--verbose and --quiet contradict"),
    (["sim", "--seed", "1", "--jobs", "2"], 2, "--seed is one run, in one process; leave out --jobs"),
    (["doctor", STORE, "--on", STORE], 2, "URL and --on both name a store"),
    (["watch", "job", "--on", STORE, "--count", "0"], 2, "--count"),
    (["resign", "job", "--on", STORE, "--wait", "-1"], 2, "'-1' is not a duration"),
    (["status", "--on", "sqlit:///x"], 78, "did you mean 'sqlite'?"),
    (["status", "--on", "work.db"], 78, "sqlite:///work.db"),
    (["status", "--on", "sqlite:///x.db?bsy=1"], 78, "did you mean 'busy'?"),
]


@pytest.mark.parametrize(("line", "code", "says"), WRONG, ids=[" ".join(line)[:40] for line, _, _ in WRONG])
def test_one_line_and_a_documented_code(line: list[str], code: int, says: str, capsys: Captured) -> None:
    assert main(line) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tenure: error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("how", ["option", "environment"])
@pytest.mark.parametrize(
    "line",
    ["lead job -- true", "status", "watch job", "resign job", "send q x", "work q -- true", "queue", "dead list q"],
)
def test_a_store_of_one_process_is_refused_by_commands_for_several(
    line: str, how: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, dashes, after = line.partition(" -- ")
    given = ["--on", "memory:"] if how == "option" else []
    if how == "environment":
        monkeypatch.setenv("TENURE_URL", "memory:")
    assert main([*before.split(), *given, *dashes.split(), *after.split()]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tenure: error: memory: exists inside one process")
    assert "sqlite:///work.db" in err


def test_the_demonstration_needs_a_store_that_several_processes_share(capsys: Captured) -> None:
    for url, why in (("memory:", "exists inside one process"), ("peers://a:1,b:1?me=a:1", "an address of its own")):
        assert main(["demo", "--on", url]) == Exit.CONFIG
        out, err = capsys.readouterr()
        assert out == ""
        assert why in err
        assert "try --on sqlite:///demo.db" in err


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://u:{SECRET}@host/db",
        f"sqlite://u:{SECRET}@host/x.db",
        f"sqlite:///x.db?password={SECRET}",
        f"sqlite:///x.db?busy=1&busy=2&token={SECRET}",
        f"sqlite:///no/such/folder/x.db?secret={SECRET}",
        f"redis://:{SECRET}@host:notaport",
        f"u:{SECRET}@host",
        f"://u:{SECRET}@host",
        f"redis://u:{SECRET}/with/slashes@host",
        f"redis://u:{SECRET}@[::1",
        f"redis://u:p@ss/{SECRET}@host",
        f"redis://u/{SECRET}@host",
        f"redis:u:{SECRET}@host",
        f"redis:/u:{SECRET}@host",
        f"redis://host?pwd={SECRET}",
        f"redis://host?a=1&a=2&auth={SECRET}",
        f"redis://u:[{SECRET}]@host",
        f"postgresql://u:{SECRET}/with/slashes@host",
        f"azure://u:p/{SECRET}@host",
        f"peers://u:p/{SECRET}@host",
        f"peers://u:{SECRET}@host:1",
        f"peers://u:{SECRET}@host:x",
        f"sqlite://u:p/{SECRET}@host",
        f"sqlite:u:{SECRET}@host",
    ],
)
@pytest.mark.parametrize("how", ["option", "environment"])
def test_no_password_is_ever_shown(url: str, how: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--on", url] if how == "option" else []
    if how == "environment":
        monkeypatch.setenv("TENURE_URL", url)
    lines = [["status", "--json"], ["doctor"], ["watch", "n"], ["resign", "n"], ["lead", "n", "-vv"]]
    for line in lines:
        command = ["--", "env"] if line[0] == "lead" else []
        assert main([*line, *given, *command]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert out == ""
    assert err.count("\n") == len(lines)


def test_help_documents_every_exit_code(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    out, _ = capsys.readouterr()
    assert [str(int(code)) for code in Exit] == [
        line.split()[0]
        for line in out.partition("Exit codes:")[2].splitlines()
        if line[:3].strip() and line[2].isdigit()
    ]


def test_no_summary_of_a_command_is_cut(capsys: Captured) -> None:
    assert main(["dead", "--help"]) == 0
    assert "..." not in capsys.readouterr()[0].partition("Commands:")[2]


def test_help_lists_queues_and_the_exit_codes_of_work(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    output = " ".join(capsys.readouterr()[0].split())
    assert "Queues: send, work, queue, dead." in output
    assert "work: ended by INT or TERM, or the queue was empty" in output
    assert "work: CMD's code decides about its message" in output


@pytest.mark.parametrize("line", [[], ["dead"]])
def test_without_a_command_the_whole_help_is_shown(line: list[str], capsys: Captured) -> None:
    assert main([*line, "--help"]) == 0
    shown, _ = capsys.readouterr()
    assert main(line) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err == shown


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_click_or_rich_it_names_the_pip_command(missing: str, tmp_path: Path) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('no', name={missing!r})")
    run = subprocess.run(
        [sys.executable, "-m", "tenure.cli", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "pip install 'tenure[cli]'" in run.stderr


@pytest.mark.parametrize("arguments", ["status", ["status", 3], [b"status"]])
def test_a_command_line_that_is_no_list_of_words_is_refused(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"main\(\) takes a list of words"):
        main(arguments)


def test_help_and_usage_errors_are_quick() -> None:
    """Neither imports asyncio, tables of rich, or sqlite3."""
    code = (
        "import sys; from tenure.cli import main; "
        "main(['--help']); main(['lead', 'x', '--on', 'sqlite:///x.db', '--', '/no']); "
        "sys.exit(' '.join({'asyncio', 'rich.table', 'sqlite3'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_an_interrupt_taken_by_another_thread_wakes_the_loop() -> None:
    """As with one that comes just before the loop waits: only a wake-up interrupts the wait."""
    code = """if True:
        import asyncio, signal, threading
        from tenure._cli.group import complete
        async def wait():
            loop = asyncio.get_running_loop()
            threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
            loop.call_later(60, print, "no interrupt")
            await loop.create_future()
        try:
            complete(wait())
        except KeyboardInterrupt:
            print("interrupted")
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("interrupted\n", "")


def test_a_pipe_closed_early_by_its_reader_is_no_error() -> None:
    line = f"{sys.executable} -m tenure.cli --help | head -1; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] in ("0", "141")  # all output may fit into the pipe


def test_a_closed_pipe_ends_it_with_the_code_of_sigpipe(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with tenure.sync.connect(url) as backend:
        backend.queue("orders").send(b"x")
    reader, out = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "tenure.cli", "queue", "--on", url]
    run = subprocess.run(line, stdout=out, stderr=subprocess.PIPE, check=False)
    os.close(out)
    assert (run.returncode, run.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("status >&-", 3, ""),
        ("status nobody >&- 2>&- <&-", 3, ""),
        ("queue nothing 2>&-", 3, ""),
        ("queue nothing 2>/dev/full", 3, ""),
        ("send orders x >&-", 0, ""),
        ("send orders <&-", 2, "the standard input is closed; give BODY or --file"),
        (
            "send orders x >/dev/full",
            74,
            r"message \w+--1 was sent, but the standard output can't be written: No space",
        ),
        (
            "status nobody >/dev/full",
            74,
            "tenure: error: the standard output can't be written: No space left on device",
        ),
        ("--help >/dev/full", 74, "tenure: error: the standard output can't be written: No space left on device"),
    ],
)
def test_standard_streams_that_are_closed_or_full(line: str, code: int, says: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with tenure.sync.connect(url) as backend:
        backend.queue("other").stats()
    run = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m tenure.cli {line}"],
        env={**os.environ, "TENURE_URL": url},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr.count("\n")) == (code, 1 if says else 0), run.stderr
    assert re.search(says, run.stderr)
    with tenure.sync.connect(url) as backend:
        backend.queue("other").stats()  # no output was written into the file


def test_names_that_the_encoding_of_the_output_lacks(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with tenure.sync.connect(url) as backend:
        backend.queue("Körbe").send(b"x")
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}

    def say(*arguments: str) -> tuple[int, str]:
        run = subprocess.run(
            [sys.executable, "-m", "tenure.cli", *arguments],
            env={**os.environ, "TENURE_URL": url, **ascii_only},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return run.returncode, run.stdout.decode("ascii")

    code, out = say("queue")
    assert (code, "K\\xf6rbe" in out) == (0, True), out
    code, out = say("queue", "Körbe")
    assert code == 78
    assert out.endswith("; the locale is not UTF-8, set LC_ALL=C.UTF-8 or PYTHONUTF8=1\n")

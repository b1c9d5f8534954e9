"""The commands that read, run in this process on an SQLite file: their output and exit codes."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tenure.sync
from tenure._cli.exits import Exit
from tenure.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    return url


@pytest.fixture
def store(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        backend.leaders()


@pytest.fixture
def leader(url: str) -> Iterator[tenure.sync.Term]:
    metadata = {"addr": "10.0.0.1:80", "note": "[bold]\x1b[31m"}
    with tenure.sync.connect(url) as backend, backend.election("job", metadata=metadata).campaign() as term:
        yield term


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return (code, *capsys.readouterr())


# --- status ------------------------------------------------------------------------------------------------------


def test_status_of_a_name(leader: tenure.sync.Term, capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "status", "job")
    assert (code, err) == (0, "")
    title, row = out.splitlines()
    assert title.split("  ")[0] == "NAME"
    assert row.split()[:3] == ["job", leader.holder, "1"]
    assert row.index(" 1 ") + 2 == title.index("TOKEN") + len("TOKEN")  # to the right
    assert row.endswith(r"addr=10.0.0.1:80 note=[bold]\x1b[31m")  # shown escaped


def test_status_for_programs(leader: tenure.sync.Term, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "status", "job", "--json")
    output = json.loads(out)
    assert code == 0
    assert 0 < output.pop("remaining") <= 15
    assert output == {
        "name": "job",
        "leader": leader.holder,
        "token": 1,
        "vacant_for": None,
        "metadata": {"addr": "10.0.0.1:80", "note": "[bold]\x1b[31m"},
    }


@pytest.mark.parametrize("line", ["status job --json", "status --json", "watch job --json --count 1"])
def test_metadata_in_any_encoding_of_stdout(url: str, line: str) -> None:
    with tenure.sync.connect(url) as backend, backend.election("job", metadata={"k": "é"}).campaign():
        for encoding, bare in [("utf-8:strict", "utf-8"), ("ascii:strict", "ascii")]:
            run = subprocess.run(
                [sys.executable, "-m", "tenure.cli", *line.split()],
                env={**os.environ, "PYTHONIOENCODING": encoding},
                capture_output=True,
                check=False,
            )
            assert (run.returncode, run.stderr) == (0, b"")
            output = json.loads(run.stdout.decode(bare))
            assert (output if isinstance(output, dict) else output[0])["metadata"] == {"k": "é"}


def test_status_of_a_vacant_and_of_an_unknown_name(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend, backend.election("job").campaign():
        pass
    assert run_cli(capsys, "status", "job")[:2] == (3, "NAME  LEADER  TOKEN  LEASE LEFT  METADATA\njob   (none)\n")
    code, out, _ = run_cli(capsys, "status", "never", "--json")
    assert code == Exit.VACANT
    assert json.loads(out)["leader"] is None


def test_status_of_all_names(url: str, store: None, capsys: Captured) -> None:
    assert run_cli(capsys, "status") == (3, "", "")
    assert run_cli(capsys, "status", "--json")[1] == "[]\n"
    with tenure.sync.connect(url) as backend, backend.election("b").campaign():
        with backend.election("a").campaign():
            pass
        code, out, _ = run_cli(capsys, "status")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == ["NAME", "a", "b"]
        output = json.loads(run_cli(capsys, "status", "--json")[1])
        assert [(each["name"], each["token"]) for each in output] == [("a", None), ("b", 1)]


def test_status_omits_names_that_had_no_leader_for_long(url: str, capsys: Captured) -> None:
    with tenure.sync.connect(url) as backend:
        for name in ("old", "older", "free", "crashed"):
            with backend.election(name).campaign():
                pass
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            file.execute("UPDATE tenure_lease SET expires_at = expires_at - 8 * 86400 WHERE name LIKE 'old%'")
            file.execute("UPDATE tenure_lease SET holder = 'somebody' WHERE name = 'crashed'")
        assert backend.vacancies()["old"] == pytest.approx(8 * 86_400, abs=600)
        assert backend.vacancies("crashed", "never")["crashed"] == pytest.approx(0, abs=600)
        code, out, err = run_cli(capsys, "status")
        assert (code, [line.split()[0] for line in out.splitlines()]) == (3, ["NAME", "crashed", "free"])
        assert err == "tenure: 2 names without a leader for 7 days not shown; add --all to see them\n"
        code, out, err = run_cli(capsys, "status", "--all")
        assert ([line.split()[0] for line in out.splitlines()[1:]], err) == (["crashed", "free", "old", "older"], "")
        output = {each["name"]: each["vacant_for"] for each in json.loads(run_cli(capsys, "status", "--json")[1])}
        assert output["older"] == pytest.approx(8 * 86_400, abs=600)
        assert set(output) == {"crashed", "free", "old", "older"}
        assert run_cli(capsys, "status", "old") == (3, "NAME  LEADER  TOKEN  LEASE LEFT  METADATA\nold   (none)\n", "")
        assert json.loads(run_cli(capsys, "status", "never", "--json")[1])["vacant_for"] is None
        with backend.election("old").campaign() as term:
            assert term.token == 2
            assert "old" in [line.split()[0] for line in run_cli(capsys, "status")[1].splitlines()]
    code, _, err = run_cli(capsys, "status", "old", "--all")
    assert (code, err) == (
        2,
        "tenure: error: --all lists all names; give either NAME or --all; see: tenure status --help\n",
    )


@pytest.mark.parametrize(
    "line",
    ["status", "status job", "watch job", "resign job", "doctor", "queue", "queue orders", "queue --watch",
     "dead list orders", "dead redrive orders"],
)  # fmt: skip
def test_a_command_that_only_reads_creates_no_file(url: str, capsys: Captured, line: str) -> None:
    code, out, err = run_cli(capsys, *line.split())
    assert (code, out) == (Exit.CONFIG, "")
    assert "there is no file" in err
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_errors_quote_the_url_as_it_was_written(capsys: Captured) -> None:
    for line in ("status", "queue", "doctor", "watch job"):
        assert main([*line.split(), "--on", "sqlite://host/x.db"]) == Exit.CONFIG
    _, err = capsys.readouterr()
    assert err.count("'sqlite://host/x.db' has a host") == 4


@pytest.mark.parametrize("name", ["work.db?", "create=1.db", "work.db?busy=1"])
def test_a_missing_file_in_any_form_of_url(tmp_path: Path, capsys: Captured, name: str) -> None:
    code, _, err = run_cli(capsys, "status", "--on", f"sqlite:///{tmp_path}/{name}")
    assert code == Exit.CONFIG
    assert "there is no file" in err
    assert list(tmp_path.iterdir()) == []


# --- watch -------------------------------------------------------------------------------------------------------


def test_watch_counts(leader: tenure.sync.Term, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "watch", "job", "--count", "1", "--json")
    output = json.loads(out)
    assert code == 0
    assert (output["leader"], output["token"]) == (leader.holder, 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", output["at"])


def test_watch_shows_changes_and_ends_cleanly_when_interrupted(url: str, store: None) -> None:
    line = [sys.executable, "-m", "tenure.cli", "watch", "job"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout
            assert watch.stdout.readline().endswith("  (none)\n")
            with tenure.sync.connect(url) as backend, backend.election("job").campaign() as term:
                assert f"  {term.holder}  token 1" in watch.stdout.readline()
            assert watch.stdout.readline().endswith("  (none)\n")
            watch.send_signal(2)
            assert watch.communicate(timeout=60) == ("", "")
            assert watch.returncode == 0
        finally:
            watch.kill()


# --- resign ------------------------------------------------------------------------------------------------------


def test_resign_without_a_leader(store: None, capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "resign", "job")
    assert (code, out) == (3, "")
    assert err == "tenure: error: 'job' has no leader, so there is none to ask\n"


def test_resign_asks(leader: tenure.sync.Term, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "resign", "job")
    assert code == 0
    assert out == f"asked {leader.holder} (token 1) to step down from 'job'\n"
    assert leader.lost.wait(60)


def test_resign_waits_until_it_has_happened(url: str, capsys: Captured) -> None:
    line = [sys.executable, "-m", "tenure.cli", "lead", "job", "--ttl", "6", "--", "sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as lead:
        try:
            assert lead.stdout
            lead.stdout.readline()
            code, out, _ = run_cli(capsys, "resign", "job", "--wait", "60", "--json")
            assert code == 0
            assert json.loads(out)["changed"] is True
        finally:
            lead.kill()


def test_resign_gives_up_waiting(leader: tenure.sync.Term, capsys: Captured) -> None:
    code, _, err = run_cli(capsys, "resign", "job", "--wait", "10ms")
    assert code == Exit.NOT_YET
    assert err.startswith(
        f"tenure: error: {leader.holder} was asked to step down from 'job', and has not done so within "
    )


# --- doctor ------------------------------------------------------------------------------------------------------


def test_doctor_on_a_good_store(url: str, store: None, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "doctor", url)
    assert code == 0
    for expected in (url, "round trip", "fencing", "queues: fencing", "SQLite", "clock"):
        assert expected in out
    assert re.search(r"^queues: shortest lock +0.1 s$", out, re.MULTILINE)
    assert re.search(r"^queues: largest body +268,435,456 bytes$", out, re.MULTILINE)
    assert re.search(r"^queues: transactions +yes$", out, re.MULTILINE)
    code, out, _ = run_cli(capsys, "doctor", "--json")
    output = json.loads(out)
    assert code == 0
    assert output["url"] == url
    assert output["traits"]["fencing"] == "native"
    assert output["queues"]["body_max"] == 2**28
    assert output["round_trip"] > 0
    assert "SQLite" in output["facts"]
    code, out, _ = run_cli(capsys, "doctor", "--json", "--strict")
    assert code == (1 if json.loads(out)["advice"] else 0)


def test_doctor_warns_about_a_memory_store(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "doctor", "memory:", "--strict")
    assert code == Exit.BROKEN
    assert "! survives restart: " in out


ON_A_FULL_DISK = """
import resource, sys
from tenure.cli import main
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (33 * 1024, limit[1]))  # SQLite's shared memory takes 32
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def test_doctor_on_a_full_disk(url: str, store: None, capsys: Captured) -> None:
    assert "works: " in json.loads(run_cli(capsys, "doctor", "--json")[1])["facts"]["writing"]
    assert json.loads(run_cli(capsys, "queue", "--json")[1]) == []  # the trial queue was deleted

    def on_a_full_disk(*more: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", ON_A_FULL_DISK, *more]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    assert on_a_full_disk("--look-only").returncode == 0
    run = on_a_full_disk()
    assert run.returncode == Exit.UNAVAILABLE
    assert "All is well" not in run.stdout
    assert "! writing: " in run.stdout
    assert "tenure: error: the store answers, but a message could not be sent and completed: " in run.stderr
    assert json.loads(run_cli(capsys, "doctor", "--json")[1])["facts"]["writing"] != "fails"


def test_doctor_on_a_file_that_is_no_store(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text").write_text("this is not a database, and is long enough to be looked at" * 20)
    code, out, err = run_cli(capsys, "doctor", f"sqlite:///{tmp_path / 'text'}")
    assert (code, out) == (Exit.CONFIG, "")
    assert "is not an SQLite database" in err
    assert err.count("\n") == 1


def test_doctor_on_a_locked_store(tmp_path: Path, capsys: Captured) -> None:
    import sqlite3

    with closing(sqlite3.connect(tmp_path / "locked.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        code, _, err = run_cli(capsys, "doctor", f"sqlite:///{tmp_path / 'locked.db'}?busy=0")
    assert code == Exit.UNAVAILABLE
    assert "stayed locked" in err

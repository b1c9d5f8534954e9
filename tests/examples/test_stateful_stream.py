"""The project stateful_stream: owners are killed and join, and the balances are those of a plain computation."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import tenure
import tenure.sync
from examples.projects.stateful_stream import stream
from tests.durations import PATIENCE, wait_until
from tests.examples.project_pages import blocks, commands, files_listed, files_of
from tests.servers import Redis, private

PROGRAM = Path(stream.__file__)
PAGE = PROGRAM.with_name("README.md")
APPLIED = re.compile(r"(?m)^(partition-\d), term (\d+), move (\d+): (\S+) ([+-]\d+), has (\d+)$")
OTHER_LINES = (r"process \d+ takes part", r"partition-\d, term \d+: \d+ accounts")

pytestmark = pytest.mark.timeout(240)


class Shell:
    """A process of the program, with what it has printed."""

    def __init__(self, output: Path, environment: dict[str, str], *arguments: str) -> None:
        self.output = output
        with output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments], cwd=output.parent, env=environment, stdout=out, stderr=out
            )

    def applied(self) -> list[tuple[str, int, int]]:
        """Return the partition, the term and the number of each move that it has applied."""
        found = APPLIED.findall(self.output.read_text())
        return [(partition, int(term), int(sequence)) for partition, term, sequence, *_ in found]

    def ended(self) -> int:
        return self.process.wait(PATIENCE)


@contextmanager
def shells(folder: Path, url: str) -> Iterator[list[Shell]]:
    """Yield a list; what is in it at the end is ended."""
    started: list[Shell] = []
    try:
        yield started
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.kill()
                one.ended()


def plain(*moves: stream.Move) -> dict[str, tuple[int, int]]:
    """Return the balance of each account, and how many moves it refused, without any of the program's code."""
    balances: dict[str, int] = defaultdict(int)
    refused: dict[str, int] = defaultdict(int)
    for move in moves:
        if balances[move.account] + move.amount < 0:
            refused[move.account] += 1
        else:
            balances[move.account] += move.amount
    return {account: (balances[account], refused[account]) for account in balances}


def balances_in(text: str) -> dict[str, tuple[int, int]]:
    found = re.findall(r"(?m)^(\S+): (\d+), (\d+) moves refused$", text)
    return {account: (int(balance), int(refused)) for account, balance, refused in found}


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield "sqlite:///stream.db"
        return
    with private(Redis) as server:
        yield server.url


@pytest.mark.process
def test_balances_are_right_although_an_owner_is_killed_and_another_joins(url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TENURE_URL": url}
    is_file = url.startswith("sqlite:")
    with (
        tenure.sync.connect(f"sqlite:///{tmp_path}/stream.db" if is_file else url) as backend,
        shells(tmp_path, url) as started,
    ):
        moves = backend.queue("moves", lock=5)

        def start(*arguments: str) -> Shell:
            started.append(Shell(tmp_path / f"shell-{len(started)}", environment, *arguments))
            return started[-1]

        def output() -> str:
            return "\n".join(one.output.read_text() for one in started)

        owners = [start("own", "--pause", "0.05") for _ in range(3)]
        wait_until(lambda: all("term" in one.output.read_text() for one in owners), output)  # each owns a partition
        assert start("send", "600", "--seed", "1").ended() == 0, output()
        moves.send(b"no move", session="partition-0")
        wait_until(lambda: all(one.applied() for one in owners), output)
        killed = owners[0]
        killed.process.kill()
        killed.ended()
        assert moves.stats().backlog > 0, "it was killed too late to show anything"
        newcomer = start("own", "--pause", "0.01")
        assert start("send", "600", "--seed", "2").ended() == 0, output()
        wait_until(lambda: newcomer.applied() and not moves.stats().backlog, output)
        for one in (*owners[1:], newcomer):
            one.process.send_signal(signal.SIGTERM)
            assert one.ended() == 0, output()
        assert start("balances").ended() == 0
        assert balances_in(started[-1].output.read_text()) == plain(
            *stream.random_moves(600, 1), *stream.random_moves(600, 2)
        )
        assert [letter.reason for letter in moves.dead_letters.peek()] == ["undecodable"]
        applied = [line for one in (*owners, newcomer) for line in one.applied()]
        assert disorder(applied) == []
        assert all(re.search(f"(?m)^{line}$", output()) for line in OTHER_LINES)  # which the page shows
        lost = {partition for partition, _, _ in killed.applied()}
        taken_over = {partition for one in (*owners[1:], newcomer) for partition, _, _ in one.applied()}
        assert lost <= taken_over


def test_the_page_shows_files_commands_and_lines_that_exist() -> None:
    assert files_listed(PAGE) == files_of(PAGE)
    shown = [shlex.split(line) for line in commands(PAGE)]
    ours = [stream.parsed(words[2:]).command for words in shown if words[:2] == ["python", "stream.py"]]
    others = [words for words in shown if words[:2] != ["python", "stream.py"]]
    assert ours == ["send", "own", "balances"]
    assert others == [["tenure", "partitions", "accounts", "--on", stream.URL]]
    for line in blocks(PAGE, "text"):
        assert APPLIED.fullmatch(line) or any(re.fullmatch(one, line) for one in OTHER_LINES), line


def disorder(applied: list[tuple[str, int, int]]) -> list[str]:
    """Return each move that an owner applied after a later one, or that an older owner applied after a newer one.

    A process may die, or be told to end, between the print and the completion; so one move may be printed twice.
    """
    found = []
    newest: dict[str, tuple[int, int]] = {}
    for partition, term, sequence in sorted(applied):  # of each partition, term after term
        _, last = newest.get(partition, (0, 0))
        if sequence < last:
            found.append(f"{partition}: term {term} applied move {sequence} after {last}")
        newest[partition] = term, sequence
    return found


def test_disorder_is_detected() -> None:
    assert disorder([("partition-1", 1, 5), ("partition-1", 1, 7), ("partition-1", 2, 7), ("partition-1", 2, 8)]) == []
    assert disorder([("partition-1", 1, 5), ("partition-1", 1, 9), ("partition-1", 2, 7)]) != []


async def terms(count: int) -> list[tenure.PartitionTerm]:
    """Return so many terms of one partition, the oldest first."""
    found: list[tenure.PartitionTerm] = []
    async with tenure.connect("memory:") as backend:
        for _ in range(count):
            member = backend.partitions("accounts", 1)

            async def note(term: tenure.PartitionTerm, member: tenure.Partitions = member) -> None:
                found.append(term)
                raise InterruptedError

            with pytest.raises(InterruptedError):
                await member.run(note, sigterm=False)
    return found


async def test_a_move_that_is_delivered_again_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = await terms(2)
    with closing(stream.open_database()) as database:
        stream.Balances(database, first).apply(stream.Move("anna", 5), sequence=1)  # and dies before it completes it
        balances = stream.Balances(database, second)
        assert balances.apply(stream.Move("anna", 5), sequence=1).balance == 5
        assert balances.apply(stream.Move("anna", 5), sequence=2).balance == 10


async def test_a_former_owner_writes_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = await terms(2)
    with closing(stream.open_database()) as database, closing(stream.open_database()) as other:
        former, owner = stream.Balances(database, first), stream.Balances(other, second)
        with pytest.raises(tenure.TermLost):
            former.apply(stream.Move("anna", 5), sequence=1)
        assert owner.apply(stream.Move("anna", 7), sequence=1).balance == 7
    with closing(sqlite3.connect("balances.db")) as database:
        assert database.execute("SELECT name, balance FROM account").fetchall() == [("anna", 7)]

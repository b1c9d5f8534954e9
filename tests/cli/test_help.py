"""The help of every command: it ends with two examples, which are valid, and run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click
import pytest

import tenure.sync
from tenure._cli.examples import EXAMPLES, Examples
from tenure._cli.group import Branching, group
from tenure.cli import main
from tests.sharing import sharing

Captured = pytest.CaptureFixture[str]

LED = ("status", "watch", "resign")
"""Commands that need a leader."""

WITHOUT_END = {
    "tenure lead nightly-report --on sqlite:///work.db -- sleep 60": "a minute is long",
    "tenure watch nightly-report": "goes on",
    "tenure queue orders --watch --every 10s": "goes on",
    "tenure top": "goes on",
    "tenure dashboard": "goes on",
    "tenure dashboard --allow-changes --show-bodies": "goes on",
    "tenure work orders --concurrency 4 -- python serve.py": "goes on",
    "tenure run shop.worker:service --processes 2..6": "goes on",
    "tenure run worker:service --reload": "goes on",
    "tenure migrate postgresql://localhost/orders": "needs a server there",
    "tenure sim --queues --seeds 0-99": "takes a while",
    "tenure demo": "kills processes for half a minute",
    "tenure demo --instances 6 --on redis://localhost": "needs a server there",
}
"""Examples that are not run, and the reason; their options are checked all the same."""

SHELL = set("|&;<>$")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("store") / "work.db"
    with tenure.sync.connect(f"sqlite:///{file}") as backend:
        orders = backend.queue("orders")
        orders.send_batch([tenure.Outgoing(b"a kettle")] * 18)
        for message in orders.receive(max=17):
            message.dead_letter("max_deliveries")
        begun = threading.Event()
        tidy = backend.schedule("tidy", "0 3 * * *", queue="tidy")
        running = threading.Thread(target=lambda: tidy.run(stop=begun))
        running.start()
        while not backend.schedules():
            time.sleep(0.01)
        begun.set()
        running.join()
    return file


@pytest.fixture(autouse=True)
def place(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(store, tmp_path)
    (tmp_path / "report.py").write_text("print('a page')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENURE_URL", "sqlite:///work.db")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def commands(path: str = "", command: click.Command = group) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name="tenure")
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(f"{path} {name}".strip(), child)
    if isinstance(command, Branching):
        for name, child in command.branches.items():
            yield f"{path} {name}", child


COMMANDS = dict(commands())
LINES = [(path, line) for path, examples in EXAMPLES.items() for _, line in examples]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path or "tenure")
def test_the_help_ends_with_two_examples(path: str, capsys: Captured) -> None:
    examples: Examples | None = EXAMPLES.get(path)
    assert examples is not None, f"give `tenure {path}` two examples in src/tenure/_cli/examples.py"
    shown = "".join(f"  # {comment}\n  {line}\n" for comment, line in examples)
    assert main([*path.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\n\nExamples:\n{shown}"), f"make `tenure {path}` with cls=Command"
    assert max(map(len, shown.splitlines())) <= 80


def test_each_example_is_of_an_existing_command() -> None:
    assert set(EXAMPLES) <= set(COMMANDS)


@pytest.mark.parametrize(("path", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_calls_its_command_with_options_that_it_has(path: str, line: str) -> None:
    words = shlex.split(line, posix=True)
    words = words[words.index("tenure") + 1 :]
    ends = [place for place, word in enumerate(words) if set(word) & SHELL and " " not in word]
    arguments = words[: ends[0]] if ends else words
    assert arguments[: len(path.split())] == path.split()
    context = group.make_context("tenure", arguments)
    command: click.Command = group
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("path", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_runs(path: str, line: str, capfd: Captured) -> None:
    if line in WITHOUT_END:
        return
    with leading() if path in LED else sharing() if path == "partitions" else nullcontext():
        code = run(line)
    lines = capfd.readouterr().err.splitlines()
    assert (code, [line for line in lines if not line.startswith("tenure: orders: ")]) == (0, [])  # without notices


@contextmanager
def leading() -> Iterator[None]:
    """Lead in a thread until it is asked to resign."""
    began = threading.Event()

    def work(term: tenure.sync.Term) -> None:
        began.set()
        term.lost.wait()

    stop = threading.Event()
    with tenure.sync.connect("sqlite:///work.db") as backend:
        election = backend.election("nightly-report")
        thread = threading.Thread(target=election.run, args=[work], kwargs={"stop": stop})
        thread.start()
        try:
            assert began.wait(30)
            yield
        finally:
            stop.set()
            election.resign()
            thread.join()


def run(line: str) -> int:
    if set(line) & SHELL:
        return subprocess.run(line, shell=True, timeout=60, check=False).returncode
    return main(shlex.split(line)[1:])

"""``tenure sim``: one seed, a search over many, and a broken promise with the line that replays it."""

from __future__ import annotations

import json
import shlex

import pytest

from tenure._cli.exits import Exit
from tenure.cli import main

Captured = pytest.CaptureFixture[str]


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(["sim", *arguments])
    return (code, *capsys.readouterr())


def test_one_seed(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "--seed", "7")
    assert code == 0
    assert out.startswith("seed 7: ")
    assert out.count("\n") == 1
    code, traced, _ = run_cli(capsys, "--seed", "7", "--trace")
    assert code == 0
    assert traced.endswith(out)
    assert traced.count("\n") > 10


def test_many_seeds(capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "--seeds", "3-5", "--jobs", "1")
    assert (code, err) == (0, "")
    assert " in 3 seeds, " in out
    code, out, _ = run_cli(capsys, "--elections", "30", "--jobs", "1", "--json")
    output = json.loads(out)
    assert code == 0
    assert output["elections"] >= 30
    assert output["broken"] is None


def test_queues(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "--queues", "--seed", "7", "--trace")
    assert code == 0
    assert " messages, delivered " in out.splitlines()[-1]
    assert "broker  " in out
    code, out, _ = run_cli(capsys, "--queues", "--messages", "300", "--jobs", "1", "--json")
    output = json.loads(out)
    assert code == 0
    assert output["messages"] >= 300
    code, out, _ = run_cli(capsys, "--queues", "--seeds", "0-9", "--jobs", "1", "--mutant", "counts-give-back")
    assert code == Exit.BROKEN
    assert out.splitlines()[-1].startswith("replay: tenure sim --queues --seed ")


def test_a_broken_promise_is_shown_with_the_line_that_replays_it(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "--seeds", "0-50", "--jobs", "1", "--mutant", "counts-from-answer")
    assert code == Exit.BROKEN
    replay = out.splitlines()[-1].removeprefix("replay: tenure sim ")
    code, again, _ = run_cli(capsys, *shlex.split(replay))
    assert code == Exit.BROKEN
    assert again in out
    code, out, _ = run_cli(capsys, *shlex.split(replay), "--json")
    assert code == Exit.BROKEN
    assert json.loads(out)["violations"]


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (["--seeds", "5"], 2, "'5' is not a range of seeds"),
        (["--seeds", "9-3"], 2, "'9-3' is not a range of seeds"),
        (["--trace"], 2, "name it with --seed"),
        (["--seed", "1", "--elections", "5"], 2, "--seed is one run"),
        (["--queues", "--elections", "5"], 2, "--messages with it"),
        (["--queues", "--seed", "1", "--mutant", "ignores-on"], 78, "did you mean 'ignores-no'?"),
        (["--seed", "1", "--mutant", "no-margn"], 78, "did you mean 'no-margin'?"),
    ],
)
def test_invalid_options_are_refused(line: list[str], code: int, says: str, capsys: Captured) -> None:
    got, out, err = run_cli(capsys, *line)
    assert (got, out) == (code, "")
    assert says in err
    assert err.count("\n") == 1

"""The commands about elections on a store that has queues only."""

from __future__ import annotations

import pytest

from tenure._cli.exits import Exit
from tenure.cli import main
from tests.servers import RabbitMQ, url_of


@pytest.mark.parametrize("line", ["status", "status n", "watch n", "resign n", "lead n -- true"])
def test_a_command_about_elections_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = url_of(RabbitMQ)
    before, dashes, after = line.partition(" -- ")
    assert main([*before.split(), "--on", url, *dashes.split(), *after.split()]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    shown = url.replace("guest:guest", "guest:***")
    assert err == f"tenure: error: {shown} has queues, but no elections; use another store for them\n"


def test_the_doctor_examines_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url_of(RabbitMQ)]) == Exit.DONE
    out, _ = capsys.readouterr()
    assert "elections" in out
    assert "RabbitMQ 3." in out
    assert "works: a message went through" in out

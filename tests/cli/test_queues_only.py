"""The commands about elections on a store that has queues only, and those about queues."""

from __future__ import annotations

import json

import pytest

from tenure._cli.exits import Exit
from tenure.cli import main
from tests.servers import RabbitMQ, ServiceBus, url_of


@pytest.fixture(params=[RabbitMQ, ServiceBus], ids=lambda kind: str(kind.__name__))
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request.param)


@pytest.mark.parametrize(
    "line", ["lead name -- true", "status", "status name", "watch name --count 1", "resign name", "demo"]
)
def test_a_command_about_elections_is_refused(line: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, dashes, after = line.partition(" -- ")
    assert main([*before.split(), "--on", url, *dashes.split(), *after.split()]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert "has queues, but no elections" in err


def test_doctor_shows_its_queues(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == Exit.DONE
    out, _ = capsys.readouterr()
    assert "elections" in out
    assert "works: a message went through" in out
    assert main(["doctor", url, "--json"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["traits"] is None
    assert found["queues"]["priorities"] == "impossible"


def test_messages_are_sent_shown_and_purged(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["send", "--on", url, "cli-orders", "one"]) == Exit.DONE
    capsys.readouterr()
    assert main(["queue", "--on", url, "cli-orders"]) == Exit.DONE
    assert "1" in capsys.readouterr().out
    assert main(["queue", "peek", "--on", url, "cli-orders"]) == Exit.DONE
    assert "one" in capsys.readouterr().out

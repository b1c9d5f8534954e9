"""The commands about queues on a store that has elections only."""

from __future__ import annotations

import pytest

from tenure._cli.exits import Exit
from tenure.cli import main
from tests.servers import Kubernetes, url_of


@pytest.mark.parametrize(
    "line",
    ["queue", "queue q", "queue --watch --count 1", "queue peek q", "dead list q", "send q x", "work q -- true"],
)
def test_a_command_about_queues_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = url_of(Kubernetes)
    before, dashes, after = line.partition(" -- ")
    assert main([*before.split(), "--on", url, *dashes.split(), *after.split()]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"tenure: error: {url} has elections, but no queues; use another store for them\n"

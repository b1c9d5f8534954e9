"""What the commands of ``tenure lead`` and ``tenure work`` are given of a store with a password."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("redis")

import tenure
import tenure.sync
from tests import warm
from tests.servers import Redis, private

PASSWORD = "hush-hush"


def test_neither_command_gets_the_password_of_its_store(tmp_path: Path) -> None:
    with private(Redis, password=PASSWORD) as server:
        with tenure.sync.connect(server.url) as backend:
            backend.queue("orders").send(b"one")
        environment = {**os.environ, "TENURE_URL": server.url}
        for line in (["lead", "job"], ["work", "orders", "--until-empty"]):
            ended = warm.run([*line, "--", "sh", "-c", "env > given"], cwd=tmp_path, env=environment)
            given = (tmp_path / "given").read_text()
            (tmp_path / "given").unlink()
            assert (ended.returncode, "TENURE_" in given) == (0, True)
            assert "TENURE_URL" not in given
            assert PASSWORD not in given + ended.stdout + ended.stderr

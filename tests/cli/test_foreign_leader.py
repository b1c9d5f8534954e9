"""The commands on a name that another program leads, through the store's own protocol: here a lock of redis-py."""

from __future__ import annotations

import secrets

import pytest
import redis

from tenure._cli.exits import Exit
from tenure.cli import main
from tests.servers import Redis, url_of

Captured = pytest.CaptureFixture[str]


def test_a_leader_that_reads_no_requests_can_not_be_asked_to_resign(capsys: Captured) -> None:
    url, name = url_of(Redis), f"job-{secrets.token_hex(4)}"
    with redis.Redis.from_url(url) as client:
        client.set(f"tenure:lease:{name}", "their-lock", px=60_000)
        assert main(["resign", name, "--on", url]) == Exit.BROKEN
        out, err = capsys.readouterr()
        assert out == ""
        assert err == (
            f"tenure: error: their-lock (token 0) leads {name!r}, and can't be asked to step down: it is another "
            "program than tenure, and reads no such requests; stop it by its own means\n"
        )
        client.delete(f"tenure:lease:{name}")
    assert main(["resign", name, "--on", url]) == Exit.VACANT

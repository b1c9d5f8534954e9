"""Fixtures for the tests of one backend."""

from __future__ import annotations

import time

import pytest

from tests.backends.postgresql import migrated
from tests.servers import Postgres, shared


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name that no other test, and no other run of this one, has used."""
    return f"{request.node.name}-{time.time_ns()}"


@pytest.fixture
async def turnable() -> Postgres:
    """Return a PostgreSQL whose clock can be put forward, so that no test has to be quicker than a lock."""
    return await migrated(shared(Postgres, turnable=True))

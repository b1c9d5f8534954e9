"""Fixtures for the tests of PostgreSQL."""

from __future__ import annotations

import pytest

from tests.servers import Postgres, shared
from tests.stores.postgres.migrated import migrated


@pytest.fixture
async def turnable() -> Postgres:
    """Return a PostgreSQL whose clock can be put forward, so that no test has to be quicker than a lock."""
    return await migrated(shared(Postgres, turnable=True))

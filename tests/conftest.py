"""Fixtures for all tests: the servers."""

from __future__ import annotations

import pytest

from tests.servers import Azurite, Postgres, Redis, url_of


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Return the URL of a Redis for all tests; use names that no other test uses."""
    return url_of(Redis)


@pytest.fixture(scope="session")
def postgresql_url() -> str:
    """Return the URL of a PostgreSQL for all tests; use a schema or names that no other test uses."""
    return url_of(Postgres)


@pytest.fixture(scope="session")
def azure_url() -> str:
    """Return the URL of an Azurite for all tests; use names that no other test uses."""
    return url_of(Azurite)

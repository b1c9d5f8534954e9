"""Fixtures for the tests of one store."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name that no other test, and no other run of this one, has used."""
    return f"{request.node.name}-{time.time_ns()}"

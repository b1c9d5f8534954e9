"""Fixtures for the tests of one store."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name that no other test, and no other run of this one, has used."""
    return f"{request.node.name}-{time.time_ns()}"


@pytest.fixture
def silent() -> Iterator[str]:
    """The host and port of a server that accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield "{}:{}".format(*listening.getsockname())

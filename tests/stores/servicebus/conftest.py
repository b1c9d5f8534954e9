"""A look-alike of Service Bus that the tests of this folder share, and a queue for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import ServiceBus, shared
from tests.stores.servicebus.opened import heal, queue_of


@pytest.fixture
def server() -> Iterator[ServiceBus]:
    server = shared(ServiceBus)
    yield server
    heal(server)


@pytest.fixture
def queue(name: str) -> str:
    return queue_of(name)

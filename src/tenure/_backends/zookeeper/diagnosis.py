"""The facts that ``tenure doctor`` shows of an ensemble: its servers, its ticks, and the sessions that it gives."""

from __future__ import annotations

from tenure._backends.zookeeper.client import Client
from tenure._opened import Fact


async def diagnose(client: Client) -> list[Fact]:
    return [Fact("server", str(client.address))]

"""Elections in ZooKeeper 3.5 and later, in the queues of Apache Curator or of kazoo.

``zookeeper://host:2181[,host…]/path?dialect=latch``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._backends.zookeeper.address import Options, address_of
from tenure._backends.zookeeper.client import Client
from tenure._backends.zookeeper.diagnosis import diagnose
from tenure._backends.zookeeper.leases import TRAITS, ZooKeeperLeases
from tenure._logins import Source, names_source
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._url import Url

__all__ = ["TRAITS", "Options", "ZooKeeperBackend", "ZooKeeperLeases", "open"]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> ZooKeeperBackend:
    """Open the ensemble that *url* names; the first request connects.

    Raises:
        ConfigError: The URL names no server, or an option is unknown or doesn't fit.
    """
    options = url.options(Options)
    address = address_of(url, has_source=names_source(options, credentials))
    return ZooKeeperBackend(Client(address, options, clock or SystemClock(), credentials))


class ZooKeeperBackend:
    """An ensemble in use."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.warnings: Sequence[Fact] = client.warnings
        self.leases: ZooKeeperLeases = ZooKeeperLeases(client)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report certificates that were replaced by what can't be used."""
        if (tls := self.client.context) is not None:
            tls.report_to(report)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the servers and the sessions that they give."""
        return await diagnose(self.client)

    async def close(self) -> None:
        """Close every connection, and end every thread."""
        await self.leases.close()

"""Leases in etcd 3.4 and later: ``etcd://host:2379,host:2379/?prefix=tenure/``, and ``etcds://`` for TLS.

They are in the dialect of etcd's own package ``concurrency``, so programs in Go and ``etcdctl`` stand in the same
elections. It has no queues of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._backends.etcd.address import Options, address_of
from tenure._backends.etcd.client import CONNECTIONS_MAX, Client
from tenure._backends.etcd.diagnosis import diagnose, shortest_lease
from tenure._backends.etcd.leases import TRAITS, EtcdLeases
from tenure._logins import Source, names_source
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.closing import close_in_order
from tenure._url import Url
from tenure.errors import ConfigError

__all__ = ["TRAITS", "EtcdBackend", "EtcdLeases", "Options", "open"]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> EtcdBackend:
    """Open the etcd that *url* names; the first request connects.

    Raises:
        ConfigError: The URL names no server, or an option is unknown or doesn't fit.
    """
    options = url.options(Options)
    address = address_of(url, has_source=names_source(options, credentials))
    if not address.is_tls and (options.ca or options.cert or options.key):
        raise ConfigError(f"{str(url)!r} has options for TLS, but doesn't use TLS; write etcds://")
    return EtcdBackend(Client(address, options, credentials), clock or SystemClock())


class EtcdBackend:
    """An etcd in use."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self.warnings: Sequence[Fact] = client.warnings
        self.connections_max: int = len(client.members) * CONNECTIONS_MAX + 1  # that one has the watches
        self.leases: EtcdLeases = EtcdLeases(client, clock)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report certificates that were replaced by what can't be used."""
        if (tls := self._client.tls) is not None:
            tls.report_to(report)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the members of the cluster."""
        return await diagnose(self._client)

    async def describe_by_writing(self) -> Sequence[Fact]:
        """Return the shortest lease that the cluster grants, by asking for one."""
        return [await shortest_lease(self._client)]

    async def close(self) -> None:
        """End the places of candidates that wait, and close every connection."""
        await close_in_order(self.leases.close, self._client.close)

"""Leases and queues in NATS JetStream 2.9 and later: ``nats://host:4222/?prefix=tenure``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._backends.nats.address import Options, address_of
from tenure._backends.nats.client import Client
from tenure._backends.nats.diagnosis import diagnose
from tenure._backends.nats.leases import TRAITS, NatsLeases
from tenure._backends.nats.queue import QUEUE_TRAITS, NatsBroker
from tenure._logins import Source, names_source
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.closing import close_in_order
from tenure._url import Url

__all__ = ["QUEUE_TRAITS", "TRAITS", "NatsBackend", "NatsBroker", "NatsLeases", "Options", "open"]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> NatsBackend:
    """Open the NATS that *url* names; the first request connects.

    Raises:
        ConfigError: The URL names no server, or an option is unknown or doesn't fit.
    """
    options = url.options(Options)
    address = address_of(url, has_source=names_source(options, credentials))
    return NatsBackend(Client(address, options, credentials), clock or SystemClock())


class NatsBackend:
    """A NATS in use."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self.warnings: Sequence[Fact] = client.warnings
        self.leases: NatsLeases = NatsLeases(client, clock)
        self.broker: NatsBroker = NatsBroker(client, clock)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report facts that are found while it is used."""
        self.broker.report_to(report)
        if (tls := self._client.tls) is not None:
            tls.report_to(report)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the servers."""
        return await diagnose(self._client)

    async def close(self) -> None:
        """Close every connection."""
        await close_in_order(self.leases.close, self.broker.close, self._client.close)

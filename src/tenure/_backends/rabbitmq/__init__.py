"""Queues in RabbitMQ 3.10 and later: ``amqp://user:password@host/vhost``, and ``amqps://`` for TLS.

There are no elections on it: it has nothing that a lease could be kept in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._backends.rabbitmq.address import Options, address_of
from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.diagnosis import diagnose
from tenure._backends.rabbitmq.queue import QUEUE_TRAITS, RabbitBroker
from tenure._logins import Source, names_source
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.closing import close_in_order
from tenure._url import Url
from tenure.errors import ConfigError

__all__ = ["QUEUE_TRAITS", "Options", "RabbitBackend", "RabbitBroker", "open"]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> RabbitBackend:
    """Open the RabbitMQ that *url* names; the first request connects.

    Raises:
        ConfigError: The URL names no server, or an option is unknown or doesn't fit.
    """
    options = url.options(Options)
    address = address_of(url, has_source=names_source(options, credentials))
    if not address.is_tls and (options.ca or options.cert or options.key):
        raise ConfigError(f"{str(url)!r} has options for TLS, but doesn't use TLS; write amqps://")
    return RabbitBackend(Client(url, address, options, credentials), clock or SystemClock())


class RabbitBackend:
    """A RabbitMQ in use."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self.warnings: Sequence[Fact] = client.warnings
        self.broker: RabbitBroker = RabbitBroker(client, clock)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report certificates that were replaced by what can't be used."""
        if (tls := self._client.tls) is not None:
            tls.report_to(report)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the server."""
        return await diagnose(self._client, self.broker)

    async def migrate(self) -> str:
        """Declare what delayed messages go through; else, each sender declares what it needs."""
        await self.broker.make_delays()
        return f"{self._client.url} has all that delayed messages go through: exchanges and queues named tenure:delay:…"

    async def close(self) -> None:
        """Close every connection."""
        await close_in_order(self.broker.close, self._client.close)

"""Queues on Azure Service Bus: ``servicebus://NAMESPACE``."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.servicebus.address import Options, address_of
from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.diagnosis import diagnose
from tenure._backends.servicebus.queue import QUEUE_TRAITS, ServiceBusBroker
from tenure._logins import Source
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._url import Url

__all__ = ["QUEUE_TRAITS", "Options", "ServiceBusBackend", "ServiceBusBroker", "open"]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> ServiceBusBackend:
    """Open the namespace that *url* names; the first request connects.

    Raises:
        ConfigError: The address can't be read, or an option is unknown or doesn't fit.
    """
    address, options = address_of(url, given=credentials)
    return ServiceBusBackend(Namespace(url, address, options, clock or SystemClock(), credentials))


class ServiceBusBackend:
    """A namespace in use. It has queues, and no leases."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.warnings: Sequence[Fact] = namespace.logins.warnings
        self.broker: ServiceBusBroker = ServiceBusBroker(namespace)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the namespace."""
        return await diagnose(self._namespace, self.broker)

    async def close(self) -> None:
        """Close every connection, and end the thread."""
        self.broker.close()
        await self._namespace.close()

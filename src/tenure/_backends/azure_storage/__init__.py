"""Leases on blobs and queues in Azure Storage: ``azure://account``, or ``azurite://127.0.0.1:10000`` on one's own."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.azure_storage.address import DEVELOPMENT_ACCOUNT, Options, address_of
from tenure._backends.azure_storage.client import Account
from tenure._backends.azure_storage.fence import Fence
from tenure._backends.azure_storage.leases import FOREIGN_HOLDER, TRAITS, AzureLeases, lease_id
from tenure._backends.azure_storage.queue import QUEUE_TRAITS, AzureBroker
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._url import Url
from tenure.errors import TenureError

__all__ = [
    "FOREIGN_HOLDER",
    "QUEUE_TRAITS",
    "TRAITS",
    "AzureBackend",
    "AzureBroker",
    "AzureLeases",
    "Fence",
    "Options",
    "lease_id",
    "open",
]


def open(url: Url, *, clock: Clock | None = None) -> AzureBackend:
    """Open the account that *url* names; it is first reached by the first question.

    Raises:
        ConfigError: The address can't be read, or an option is unknown or doesn't fit.
    """
    address, options = address_of(url)
    blobs, queues = Account(url, address, options), Account(url, address, options)
    return AzureBackend(blobs, queues, clock or SystemClock())


class AzureBackend:
    """An account in use. Its two services have connections of their own, and a login may open one of them only."""

    def __init__(self, blobs: Account, queues: Account, clock: Clock) -> None:
        self._account = blobs
        self._queues = queues
        self.leases: AzureLeases = AzureLeases(blobs)
        self.broker: AzureBroker = AzureBroker(queues, clock)

    async def describe(self) -> Sequence[Fact]:
        """Tell what is known of the account."""
        address, options = self._account.address, self._account.options
        local = address.account == DEVELOPMENT_ACCOUNT
        key = "a key opens the whole account; an identity with two roles (azure://ACCOUNT) opens what is needed"
        return [
            Fact("account", address.account, "an emulator, which loses what it was told last when it dies" * local),
            Fact("login", address.login, "" if local or address.key is None else key),
            Fact("container", f"{options.container}; names in it: {len(await self.leases.names())}"),
            await self._queues_fact(),
            Fact(
                "polling", "Azure tells of nothing", "followers look every retry_every, idle consumers ever less often"
            ),
        ]

    async def _queues_fact(self) -> Fact:
        """Try the other service: it has an address of its own, and a login may open one of them only."""
        try:
            return Fact("queues", str(len(await self.broker.names())))
        except TenureError as error:
            return Fact("queues", "can't be used", str(error))

    async def close(self) -> None:
        """Close every connection."""
        self.leases.close()
        await self.broker.close()
        await self._account.close()
        await self._queues.close()

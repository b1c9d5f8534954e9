"""Leases on blobs and queues in Azure Storage: ``azure://account``, or ``azurite://127.0.0.1:10000`` on one's own."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.backends import Fact
from tenure.backends.azure_storage.address import Options, address_of
from tenure.backends.azure_storage.client import Account
from tenure.backends.azure_storage.leases import STRANGER, TRAITS, AzureLeases, lease_id
from tenure.backends.azure_storage.queue import AzureBroker
from tenure.clock import Clock, SystemClock
from tenure.url import Url

__all__ = ["STRANGER", "TRAITS", "AzureBackend", "AzureBroker", "AzureLeases", "Options", "lease_id", "open"]


def open(url: Url, *, clock: Clock | None = None) -> AzureBackend:
    """Open the account that *url* names; it is first reached by the first question.

    Raises:
        ConfigError: The address can't be read, or an option is unknown or doesn't fit.
    """
    address, options = address_of(url)
    return AzureBackend(Account(url, address, options), clock or SystemClock())


class AzureBackend:
    """An account in use: two clients for each loop."""

    def __init__(self, account: Account, clock: Clock) -> None:
        self._account = account
        self.leases: AzureLeases = AzureLeases(account)
        self.broker: AzureBroker = AzureBroker(account, clock)

    async def describe(self) -> Sequence[Fact]:
        """Tell what is known of the account."""
        return [Fact("account", self._account.address.account)]

    async def close(self) -> None:
        """Close every connection."""
        self.leases.close()
        self.broker.close()
        await self._account.close()

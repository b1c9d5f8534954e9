"""Leases on blobs and queues in Azure Storage: ``azure://account``, or ``azurite://127.0.0.1:10000`` for Azurite."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.azure_storage.address import Options, address_of
from tenure._backends.azure_storage.client import Account
from tenure._backends.azure_storage.diagnosis import diagnose
from tenure._backends.azure_storage.fence import Fence
from tenure._backends.azure_storage.leases import FOREIGN_HOLDER, TRAITS, AzureLeases, lease_id
from tenure._backends.azure_storage.login import check_login
from tenure._backends.azure_storage.queue import QUEUE_TRAITS, AzureBroker
from tenure._logins import Source, logins_of
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.closing import close_in_order
from tenure._url import Url

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


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> AzureBackend:
    """Open the account that *url* names; the first request connects.

    Raises:
        ConfigError: The address can't be read, or an option is unknown or doesn't fit.
    """
    address, options = address_of(url, given=credentials)
    logins = logins_of(url, options, credentials, user=None, password=None, check=check_login)
    blobs, queues = Account(url, address, options, logins), Account(url, address, options, logins)
    return AzureBackend(blobs, queues, clock or SystemClock())


class AzureBackend:
    """An account in use. Its two services have separate connections, as a login may have access to one of them only."""

    def __init__(self, blobs: Account, queues: Account, clock: Clock) -> None:
        self._account = blobs
        self._queues = queues
        self.warnings: Sequence[Fact] = blobs.logins.warnings
        self.leases: AzureLeases = AzureLeases(blobs)
        self.broker: AzureBroker = AzureBroker(queues, clock)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the account, from both services."""
        return await diagnose(self._account, self.leases, self.broker)

    async def close(self) -> None:
        """Close every connection."""
        self.leases.close()
        await close_in_order(self.broker.close, self._account.close, self._queues.close)

"""The facts that ``describe()`` and ``tenure doctor`` show of an account."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from tenure._backends.azure_storage.address import DEVELOPMENT_ACCOUNT, Address
from tenure._backends.azure_storage.client import Account
from tenure._backends.azure_storage.leases import AzureLeases
from tenure._backends.azure_storage.queue import AzureBroker
from tenure._opened import Fact
from tenure._tls_facts import tls_fact
from tenure.errors import TenureError


async def diagnose(account: Account, leases: AzureLeases, broker: AzureBroker) -> Sequence[Fact]:
    """Return facts about *account*, from both services."""
    address, options = account.address, account.options
    places = [urlsplit(one) for one in (address.blobs, address.queues) if one]
    hosts = [one.hostname or "" for one in places]
    is_local = address.account == DEVELOPMENT_ACCOUNT
    emulator = "an emulator, which loses its newest writes when it is killed"
    polling = "followers poll every retry_every, idle consumers ever less often"
    return [
        Fact("account", address.account, emulator * is_local, "azure-emulator"),
        tls_fact("certificate and name" if all(one.scheme == "https" for one in places) else None, hosts),
        _login(address, await account.login_kind(), account.logins.source),
        Fact("container", f"{options.container}; names in it: {len(await leases.names())}"),
        await _queues(broker),
        Fact("polling", "Azure sends no hints", polling, "no-hints"),
    ]


def _login(address: Address, kind: str, source: str = "") -> Fact:
    advice = "a key gives access to the whole account; an identity with two roles (azure://ACCOUNT) is enough"
    is_safe = address.account == DEVELOPMENT_ACCOUNT or kind != "account key"
    return Fact("login", f"{kind}, from {source}" if source else kind, "" if is_safe else advice, "azure-account-key")


async def _queues(broker: AzureBroker) -> Fact:
    """Check the other service: it has an address of its own, and a login may have access to one of them only."""
    try:
        return Fact("queues", str(len(await broker.names())))
    except TenureError as error:
        return Fact("queues", "can't be used", str(error), error.code)

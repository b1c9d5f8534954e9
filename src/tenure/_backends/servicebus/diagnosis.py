"""The facts that ``describe()`` and ``tenure doctor`` show of a namespace."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.servicebus.administration import NoRights
from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.library import INSTALLED, TESTED
from tenure._backends.servicebus.places import LOCK_LEAST
from tenure._backends.servicebus.queue import ServiceBusBroker
from tenure._opened import Fact
from tenure._tls_facts import tls_fact


async def diagnose(namespace: Namespace, broker: ServiceBusBroker) -> Sequence[Fact]:
    """Return facts about *namespace*; it only reads."""
    address, options = namespace.address, namespace.options
    is_emulator = "an emulator: for tests only" if address.emulator else ""

    async def look() -> tuple[str, list[tuple[str, str]]] | None:
        try:
            return await broker.administration.tier(), await broker.administration.queues()
        except NoRights:
            return None

    found = await namespace.run(look)
    facts = [
        Fact("namespace", address.host, is_emulator, "servicebus-emulator"),
        tls_fact(None if address.emulator else "certificate and name", [address.name]),
        Fact(
            "login", f"{address.login} (from {namespace.logins.source})" if namespace.logins.source else address.login
        ),
        Fact("library", f"azure-servicebus {INSTALLED}{_untested(INSTALLED)}"),
    ]
    if found is None:
        lock = options.lock or LOCK_LEAST
        advice = (
            ""
            if options.lock
            else "name the lock duration of the queues: ?lock=30; until then, locks are renewed often"
        )
        value = f"no Manage: locks are taken to last {lock:g} s, and settings are not shown"
        facts.append(Fact("rights", value, advice, "servicebus-lock-unknown"))
    else:
        tier, queues = found
        facts += [Fact("tier", tier), Fact("queues", str(len(queues)))]
    facts.append(
        Fact("entities", "created, changed and deleted (create=yes)" if options.create else "never created or changed")
    )
    return facts


def _untested(version: str) -> str:
    """Return what to say of a version of the library that came after the tests of this release."""
    return "" if version.startswith(f"{TESTED}.") else f" (tenure was tested with {TESTED})"

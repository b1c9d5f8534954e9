"""Leases of Kubernetes, as client-go's leader election uses them: ``kubernetes://NAMESPACE``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._backends.kubernetes.address import Options, address_of
from tenure._backends.kubernetes.client import CONNECTIONS_MAX, Client
from tenure._backends.kubernetes.diagnosis import diagnose
from tenure._backends.kubernetes.leases import TRAITS, KubernetesLeases
from tenure._backends.kubernetes.observations import Observations
from tenure._backends.kubernetes.watch import Renewals, Watches
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.closing import close_in_order
from tenure._url import Url

__all__ = ["TRAITS", "KubernetesBackend", "KubernetesLeases", "Options", "open"]


def open(url: Url, *, clock: Clock | None = None) -> KubernetesBackend:
    """Open the namespace that *url* names; the first request connects. *clock* judges expiry.

    Raises:
        ConfigError: No cluster is found, its kubeconfig can't be used, or an option is unknown or doesn't fit.
    """
    options = url.options(Options)
    return KubernetesBackend(Client(url, address_of(url, options), options), clock or SystemClock())


class KubernetesBackend:
    """A namespace in use."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self.warnings: Sequence[Fact] = client.warnings
        self.connections_max: int = CONNECTIONS_MAX + client.options.watches + 1  # that one has the renewals
        observations = Observations(clock)
        self._watches = Watches(client, observations)
        self._renewals = Renewals(client, observations)
        self.leases: KubernetesLeases = KubernetesLeases(client, observations, self._watches, self._renewals)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report certificates that were replaced by what can't be used."""
        self._client.report = report

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the API server, this user's rights, and the namespace."""
        return await diagnose(self._client)

    async def close(self) -> None:
        """End all watches, and close every connection."""
        await close_in_order(self._watches.close, self._renewals.close, self._client.close)

"""Elections without a store: the instances themselves vote for one of them.

``peers://a:7000,b:7000,c:7000?me=a``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._backends.peers.address import Settings
from tenure._backends.peers.client import Member
from tenure._backends.peers.diagnosis import diagnose, keys_of, tls_of, warnings_of
from tenure._backends.peers.leases import TRAITS, PeersLeases
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._url import Url

__all__ = ["TRAITS", "PeersBackend", "PeersLeases", "open"]


def open(url: Url, *, clock: Clock | None = None) -> PeersBackend:
    """Open the fleet that *url* names.

    Raises:
        ConfigError: The URL names no members, or an option is unknown or doesn't fit.
    """
    settings = Settings.of(url)
    member = Member(settings.fleet, settings.transport, clock or SystemClock())
    return PeersBackend(PeersLeases(member, traits=settings.traits), member, settings)


class PeersBackend:
    """A fleet in use."""

    def __init__(self, leases: PeersLeases, member: Member, settings: Settings) -> None:
        self.leases = leases
        self.member = member
        self.warnings: Sequence[Fact] = warnings_of(settings)
        self._settings = settings

    async def describe(self) -> Sequence[Fact]:
        """Return the members that are alive, as seen from here, and the fleet's rules."""
        return [*await diagnose(self.member), *keys_of(self._settings), tls_of(self._settings)]

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report certificates and keys that were replaced by what can't be used."""
        if self._settings.key_file is not None:
            self._settings.key_file.report_to(report)
        if (tls := self._settings.to_dial) is not None:  # the other side has the same files
            tls.report_to(report)

    async def close(self) -> None:
        """Leave the fleet."""
        await self.member.close()

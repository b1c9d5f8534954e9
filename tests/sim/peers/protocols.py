"""The run, as its parts see it: each protocol is as much of a simulation as one of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tenure._backends.peers import machine as peers
from tenure._backends.peers.wire import Message
from tenure.testing._sim.world import SkewedClock, World
from tests.sim.peers.plan import Plan


class FleetChecks(Protocol):
    """The checkers, as a member reports to them; see :class:`tests.sim.peers.checkers.Checkers`."""

    def violated(self, kind: str, what: str) -> None: ...
    def began(self, candidate: Any, work: Any) -> None: ...
    def believes(self, candidate: Any, work: Any) -> None: ...
    def left(self, candidate: Any) -> None: ...


class MemberParts(Protocol):
    """The machine of a member."""

    @property
    def machine(self) -> type[peers.Machine]: ...


class Sender(Protocol):
    """The network, as a member sees it."""

    def send(self, source: int, to: int, message: Message) -> None: ...


class MemberRun(Protocol):
    """The run, as a member sees it."""

    @property
    def world(self) -> World: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def parts(self) -> MemberParts: ...
    @property
    def clocks(self) -> Sequence[SkewedClock]: ...
    @property
    def network(self) -> Sender: ...
    @property
    def checkers(self) -> FleetChecks: ...


class Receiver(Protocol):
    """A member, as the network sees it."""

    def do(self, call: Callable[..., object], *args: Any) -> None: ...
    def feed(self, event: peers.Input) -> None: ...


class NetworkRun(Protocol):
    """The run, as the network sees it."""

    @property
    def world(self) -> World: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def members(self) -> Sequence[Receiver | None]: ...

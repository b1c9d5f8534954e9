"""The suites for leases, on five members over TCP: for a candidate, a fleet is a store of leases."""

from __future__ import annotations

import random
import socket
from contextlib import AbstractAsyncContextManager

from tenure._backends.peers.client import Member
from tenure._backends.peers.fleet import Fleet, Strategy
from tenure._backends.peers.leases import PeersLeases
from tenure._backends.peers.machine import Tick
from tenure._backends.peers.seal import SharedKey
from tenure._backends.peers.tcp import TcpTransport
from tenure._election.store import LeaseStore, LeaseTraits
from tenure._lease import Granted, HeldBy
from tenure.testing import until
from tenure.testing._conformance.leases.steps import claim
from tenure.testing.conformance import FaultyLeaseStore, GiveUp, LeaseFaultSuite, LeaseHarness, LeaseStoreSuite
from tests.clocks import TurnedClock

SIZE = 5
HEARTBEAT = 10.0
"""A request lasts two of these: long enough for a busy machine to answer three hundred."""
TRAITS = LeaseTraits(
    ttl_min=6.0,
    ttl_max=60.0,
    fencing="emulated",
    expiry="store clock",
    hints=True,
    survives_restart=False,
    takes_back=True,
    tells_vacancy=False,
)


class PeersHarness(LeaseHarness):
    traits = TRAITS
    ttl = 60.0  # longer than any test takes: the clock is moved
    faults = frozenset({"lose_answer", "late"})
    strategy: Strategy = "lowest"
    first = 0  # the one that claims without asking others

    async def start(self) -> None:
        self._clock = TurnedClock()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(SIZE)]
        addresses = tuple(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)
        self._members = [self._member(addresses, number, listener) for number, listener in enumerate(listeners)]
        self._opened = 0
        for member in self._members:
            await member.open()
        members = self._members
        await until(
            lambda: all(one.running()[1].voter.awake for one in members), within=60, what="the end of the silence"
        )

    def _member(self, addresses: tuple[str, ...], me: int, listener: socket.socket) -> Member:
        fleet = Fleet(addresses, me, self.strategy, ttl_max=TRAITS.ttl_max, heartbeat=HEARTBEAT, patience=0.05)

        async def find_fleet() -> Fleet:
            return fleet

        def make_transport(fleet: Fleet) -> TcpTransport:
            return TcpTransport(fleet, SharedKey.of(b"secret", fleet.terms), random.Random(me), listener=listener)

        return Member(find_fleet, make_transport, self._clock)

    async def open(self) -> FaultyLeaseStore:
        self._opened += 1
        return FaultyLeaseStore(PeersLeases(self._members[(self.first + self._opened - 1) % SIZE], traits=TRAITS))

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    async def pass_time(self, seconds: float) -> None:
        # A claim that is still on its way to a member would get its vote there when it is over everywhere else.
        await until(self._all_have_answered, within=60)
        self._clock.turned += seconds
        for member in self._members:  # after so long a time, members count as dead until their next heartbeats
            member.feed(Tick())
        await until(self._all_are_connected, within=60)

    def _all_have_answered(self) -> bool:
        return not any(member.running()[1]._rounds for member in self._members)

    def _all_are_connected(self) -> bool:
        machines = [member.running()[1] for member in self._members]
        return all(len(machine.liveness.alive(self._clock.now())) == SIZE for machine in machines)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.lose_answer()

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        assert isinstance(store, FaultyLeaseStore)
        return store.late()


class BullyHarness(PeersHarness):
    strategy: Strategy = "bully"
    first = SIZE - 1


class RingHarness(PeersHarness):
    strategy: Strategy = "ring"


class PeersSuite(LeaseStoreSuite):
    async def test_acquiring_again_gives_the_same_grant(self, harness: LeaseHarness, name: str) -> None:
        # Repeated through the same member only: the holder is a member, so another member is another candidate.
        store, other = await harness.open(), await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        assert await store.acquire(name, "ann#1", harness.ttl) == Granted(grant)
        assert isinstance(await other.acquire(name, "ann#1", harness.ttl), HeldBy)


class TestLowestLeases(PeersSuite):
    harness = PeersHarness


class TestBullyLeases(PeersSuite):
    harness = BullyHarness


class TestRingLeases(PeersSuite):
    harness = RingHarness


class TestPeersLeaseFaults(LeaseFaultSuite):
    harness = PeersHarness

"""A member at work: the machine of the fleet, its timer and its transport, as a store of leases.

``tenure.connect("peers://a:7000,b:7000,c:7000?me=a").election(name)`` stands on it as on any other store, so that
terms, threads and the command line are the same. The first question starts the member; from then on it votes, whether
it campaigns itself or not, until the backend is closed. Without ``me``, no member is started, and the others are asked.

What is promised with ``quorum="majority"`` is what every store promises: who leads is out before another is in, and the
token rises. With ``quorum="none"``, it isn't: on both sides of a partition, somebody leads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tenure._backends.peers.address import Settings
from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.machine import (
    Acquire,
    Answer,
    AskToResign,
    Drop,
    Hint,
    Input,
    Inspect,
    Machine,
    Names,
    Outcome,
    Received,
    Release,
    Renew,
    Send,
    Tick,
)
from tenure._backends.peers.transport import CROWDED, Transport
from tenure._backends.peers.wire import METADATA_MAX, Message, metadata_size
from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.notifier import Notifier
from tenure._telemetry.callbacks import run_callback
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable

_log = logging.getLogger("tenure")

T = TypeVar("T")
U = TypeVar("U")

TRAITS = LeaseTraits(
    ttl_min=3.0,
    ttl_max=15.0,
    fencing="emulated",
    expiry="store clock",
    hints=True,
    survives_restart=False,
)
"""With the times as they are if nothing is said; ``ttl_max`` and ``heartbeat`` in the URL change the limits."""

COMPARE = "compare key, member list, quorum and ttl_max of all members"

CLOCK_MIN = 946_684_800_000
"""The year 2000, in ms: a wall clock that stands earlier was never set."""


AHEAD_MAX = 60.0
"""Seconds by which tokens may be ahead of the wall clock before that is worth a warning."""


def open(url: Url, *, clock: Clock | None = None) -> PeersBackend:
    """Open the fleet that *url* names.

    Raises:
        ConfigError: The URL names no members, or an option is unknown or doesn't fit.
    """
    settings = Settings.of(url)
    if not settings.has_key:
        reached = "whoever reaches the members' ports" if settings.options.insecure else "every user of this machine"
        run_callback(_log.warning, "%s: the members have no key, so %s may vote and lead; see key_file", url, reached)
    return PeersBackend(Member(settings.fleet, settings.transport, clock or SystemClock(), traits=settings.traits))


class Member:
    """A ``LeaseStore`` whose leases are given by a majority of the members, of which this may be one.

    Args:
        find_fleet: Tells who the members are; asked once.
        make_transport: Makes the way to them, once they are known.
        clock: Measures promises.
        traits: What this fleet can do.
    """

    def __init__(
        self,
        find_fleet: Callable[[], Awaitable[Fleet]],
        make_transport: Callable[[Fleet], Transport],
        clock: Clock,
        *,
        traits: LeaseTraits = TRAITS,
    ) -> None:
        self.traits = traits
        self._find_fleet = find_fleet
        self._make_transport = make_transport
        self._clock = clock
        self._notifier = Notifier()
        self._opening = asyncio.Lock()
        self._fleet: Fleet | None = None
        self._machine: Machine | None = None
        self._transport: Transport | None = None
        self._aside: Member | None = None
        self._asks = 0
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0
        self._closed = False

    # --- a store of leases ---

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Stand for *name*; a holder that asks again gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, self.traits)
        if (size := metadata_size(metadata)) > METADATA_MAX:
            raise ConfigError(f"metadata must take at most {METADATA_MAX} bytes as JSON, and takes {size}")
        told = FrozenDict(metadata)
        await self._open()
        if self._fleet is not None and self._fleet.me is None:
            raise ConfigError(
                f"to lead, this must be one of the members {', '.join(self._fleet.members)}, and the URL does not say "
                f"which; add me={self._fleet.members[0]}, or whichever it is"
            )
        return _expect(await self._ask(lambda ask: Acquire(ask, name, holder, ttl, told)), Granted, HeldBy)

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Ask all members to vouch for these claims for *ttl* seconds more."""
        require_ttl(ttl, self.traits)
        await self._open()
        return list(await asyncio.gather(*(self._renew(grant, ttl) for grant in grants)))

    async def _renew(self, grant: Grant, ttl: float) -> Granted | Lost | NoAnswer:
        try:
            return _expect(await self._ask(lambda ask: Renew(ask, grant, ttl)), Granted, Lost)
        except Unavailable as error:  # too few vouched for this name; of others they may
            return NoAnswer(str(error))

    async def release(self, grant: Grant) -> Released | Lost:
        """Let all members know that the name is free."""
        await self._open()
        return _expect(await self._ask(lambda ask: Release(ask, grant)), Released, Lost)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Ask the members whom they vouch for."""
        require_name(name)
        asked = await self._or_aside()
        return _expect(await asked._ask(lambda ask: Inspect(ask, name)), HeldBy, Vacant)

    async def names(self) -> Sequence[str]:
        """List every name that a majority remembers, sorted."""
        asked = await self._or_aside()
        return _expect(await asked._ask(Names), tuple, tuple)

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none."""
        require_name(name)
        asked = await self._or_aside()
        return _expect(await asked._ask(lambda ask: AskToResign(ask, name)), bool, bool)

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when a vote for *name* changed here, or, for who only looks on, when another leads."""
        require_name(name)
        return _Hints(self, name)

    # --- what an operator sees ---

    async def describe(self) -> Sequence[Fact]:
        """Tell who lives, as seen from here."""
        asked = await self._or_aside()
        fleet, machine, transport = asked._running()
        now = self._clock.now()
        me = "looks on" if fleet.me is None else fleet.members[fleet.me]
        alive = [fleet.members[member] for member in machine.liveness.alive(now)]
        facts = [Fact("members", ", ".join(fleet.members)), Fact("me", me)]
        if fleet.me is not None:
            facts.append(Fact("alive", ", ".join(alive)))
        facts.append(Fact("strategy", fleet.strategy))
        rule = f"{fleet.needed} of {fleet.size} must vouch"
        if fleet.quorum == "none":
            facts.append(
                Fact("quorum", "none", "a partition may give two leaders; use quorum=majority if that matters")
            )
        else:
            facts.append(Fact("quorum", f"majority: {rule}"))
        if fleet.me is not None:
            facts.append(_clock_fact(machine.voter.newest))
        dropped = ", ".join(f"{count} {why}" for why, count in sorted(transport.counts.dropped.items()))
        advice = COMPARE if set(transport.counts.dropped) - {CROWDED} else ""
        facts.append(Fact("dropped frames", dropped or "none", advice))
        return facts

    # --- at work ---

    async def _open(self) -> None:
        """Start the member, if it isn't running.

        Raises:
            Unavailable: Its address is taken, or the members' names can't be resolved; the next call tries again.
        """
        async with self._opening:
            if self._closed:
                raise Unavailable("the backend was closed")
            if self._machine is not None:
                return
            fleet = await self._find_fleet()
            transport = self._make_transport(fleet)
            try:
                await transport.open(self._deliver)
            except BaseException:
                await transport.close()
                raise
            floor = int(time.time() * 1000)
            if floor < CLOCK_MIN and fleet.me is not None:
                await transport.close()
                raise ConfigError("the wall clock stands before the year 2000; set it: tokens begin there")
            nonce, now = secrets.randbits(50), self._clock.now()
            self._fleet, self._transport = fleet, transport
            self._machine = Machine(fleet, random.Random(), floor=floor, nonce=nonce, now=now)
            self._feed(Tick())

    async def _or_aside(self) -> Member:
        """Return whom to ask: ourselves, or, if another process is the member that we would be, an onlooker."""
        if self._aside is not None:
            return self._aside
        try:
            await self._open()
        except Unavailable:
            fleet = await self._find_fleet()
            if fleet.me is None or self._closed:
                raise
            onlooker = replace(fleet, me=None)
            aside = Member(_already(onlooker), self._make_transport, self._clock, traits=self.traits)
            await aside._open()
            self._aside = aside
            return aside
        return self

    def _running(self) -> tuple[Fleet, Machine, Transport]:
        assert self._fleet is not None
        assert self._machine is not None
        assert self._transport is not None
        return self._fleet, self._machine, self._transport

    async def _ask(self, question: Callable[[int], Input]) -> Outcome:
        self._asks += 1
        ask = self._asks
        waiting: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = waiting
        self._feed(question(ask))
        try:
            answer = await waiting
        finally:
            if self._waiting.pop(ask, None) is not None:
                self._feed(Drop(ask))
        if isinstance(answer, NoAnswer):
            raise Unavailable(f"the fleet did not answer: {answer.why}{self._refusals()}")
        return answer

    def _refusals(self) -> str:
        """Say who refuses to hear us, and what to do about it."""
        if self._transport is None or self._fleet is None or not self._transport.counts.refused:
            return ""
        refused = ", ".join(self._fleet.members[member] for member in sorted(self._transport.counts.refused))
        return f"; {refused} refused us: {COMPARE}"

    def _deliver(self, sender: int, message: Message) -> None:
        self._feed(Received(sender, message))

    def _tick(self) -> None:
        self._timer = None
        self._feed(Tick())

    def _feed(self, event: Input) -> None:
        """Give *event* to the machine, do what it says, and wake it when it wants."""
        if self._closed or self._machine is None or self._transport is None:
            return
        for effect in self._machine.handle(event, self._clock.now()):
            match effect:
                case Send(to, message):
                    self._transport.send(to, message)
                case Answer(ask, answer):
                    waiting = self._waiting.pop(ask, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
                case Hint(name):
                    self._notifier.notify(name)
        self._arm(self._machine.wake_at)

    def _arm(self, wake_at: float) -> None:
        if self._timer is not None and wake_at == self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = wake_at
        wait = max(0.0, wake_at - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(wait, self._tick) if wait < 1e9 else None

    async def close(self) -> None:
        """Vote no more, and answer nobody. A second time does nothing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(NoAnswer("the backend was closed"))
        self._notifier.close()
        if self._transport is not None:
            await self._transport.close()
        if self._aside is not None:
            await self._aside.close()


class _Hints(AsyncIterator[None]):
    """Yield when something may have changed for a name; a wait that was cancelled can be taken up again."""

    def __init__(self, member: Member, name: str) -> None:
        self._member = member
        self._name = name
        self._rings = member._notifier.listen(name)
        self._seen: HeldBy | Vacant | None = None

    async def __anext__(self) -> None:
        asked = await self._member._or_aside()
        fleet, _, _ = asked._running()
        if fleet.me is not None:
            return await anext(self._rings)
        while True:  # nobody tells an onlooker, so it looks
            await asyncio.sleep(fleet.heartbeat)
            with suppress(Unavailable):
                found = await asked.inspect(self._name)
                before, self._seen = self._seen, found
                if before is None or _who(found) != _who(before):
                    return None


class PeersBackend:
    """A fleet in use."""

    def __init__(self, member: Member) -> None:
        self.leases = member

    async def describe(self) -> Sequence[Fact]:
        """Tell who lives, as seen from here."""
        return await self.leases.describe()

    async def close(self) -> None:
        """Leave the fleet."""
        await self.leases.close()


def _clock_fact(newest: int) -> Fact:
    """Tell how far tokens are ahead of our wall clock, above which they would go on if nobody remembered them."""
    ahead = newest / 1000 - time.time()
    if ahead < AHEAD_MAX:
        return Fact("tokens", "not ahead of the clock")
    advice = "set the clocks of all members: by a clock that is behind, tokens might not rise after restarts"
    return Fact("tokens", f"{ahead:.0f} s ahead of the clock", advice)


def _who(found: HeldBy | Vacant) -> tuple[str, int]:
    return (found.holder, found.token) if isinstance(found, HeldBy) else ("", found.token)


def _already(fleet: Fleet) -> Callable[[], Awaitable[Fleet]]:
    async def find() -> Fleet:
        return fleet

    return find


def _expect(found: Outcome, one: type[T], other: type[U]) -> T | U:
    if not isinstance(found, (one, other)):
        raise AssertionError(f"the fleet's machine answered {found!r}")
    return found

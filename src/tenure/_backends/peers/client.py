"""A running member of the fleet, or a client of one: the machine, its timer and its transport.

The first question starts it. From then on a member votes, whether it campaigns itself or not, until it is closed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.machine import (
    Answer,
    Drop,
    Hint,
    Input,
    Machine,
    Outcome,
    Received,
    Send,
    Tick,
)
from tenure._backends.peers.transport import Transport
from tenure._backends.peers.wire import Message
from tenure._lease import NoAnswer
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import ConfigError, Unavailable

COMPARE = "compare key, member list, quorum and ttl_max of all members"

CLOCK_MIN = 946_684_800_000
"""The year 2000, in ms: an earlier wall clock was never set."""


class Member:
    """One member at work; where the fleet has no ``me``, a client, which only asks the members.

    Args:
        find_fleet: Returns the fleet; called once.
        make_transport: Makes the transport to its members.
        clock: Measures promises.
    """

    def __init__(
        self,
        find_fleet: Callable[[], Awaitable[Fleet]],
        make_transport: Callable[[Fleet], Transport],
        clock: Clock,
    ) -> None:
        self._find_fleet = find_fleet
        self._make_transport = make_transport
        self._clock = clock
        self._notifier = Notifier()
        self._opening = asyncio.Lock()
        self._fleet: Fleet | None = None
        self._machine: Machine | None = None
        self._transport: Transport | None = None
        self._client: Member | None = None
        self._asks = 0
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0
        self._closed = False

    async def open(self) -> None:
        """Start the member, if it isn't running.

        Raises:
            Unavailable: Its address is taken, or the members' names can't be resolved. The next call tries again.
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
                raise ConfigError("the wall clock is before the year 2000; set it, because tokens begin at its time")
            nonce, now = secrets.randbits(50), self._clock.now()
            self._fleet, self._transport = fleet, transport
            self._machine = Machine(fleet, random.Random(), floor=floor, nonce=nonce, now=now)
            self.feed(Tick())

    async def or_client(self) -> Member:
        """Return what to ask: this member, or a client of the fleet if another process runs as this member already."""
        if self._client is not None:
            return self._client
        try:
            await self.open()
        except Unavailable:
            fleet = await self._find_fleet()
            if fleet.me is None or self._closed:
                raise
            as_client = replace(fleet, me=None)
            client = Member(_already(as_client), self._make_transport, self._clock)
            await client.open()
            self._client = client
            return client
        return self

    def running(self) -> tuple[Fleet, Machine, Transport]:
        """Return the parts of this member; it was opened before."""
        assert self._fleet is not None
        assert self._machine is not None
        assert self._transport is not None
        return self._fleet, self._machine, self._transport

    async def ask(self, question: Callable[[int], Input]) -> Outcome:
        """Return the machine's answer to *question*, which is made with a number of its own.

        Raises:
            Unavailable: There was no answer.
        """
        self._asks += 1
        ask = self._asks
        waiting: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = waiting
        self.feed(question(ask))
        try:
            answer = await waiting
        finally:
            if self._waiting.pop(ask, None) is not None:
                self.feed(Drop(ask))
        if isinstance(answer, NoAnswer):
            raise Unavailable(f"the fleet did not answer: {answer.why}{self._refusals()}")
        return answer

    def _refusals(self) -> str:
        """Return which members can't be reached, or refuse this one, and what to do about it."""
        if self._transport is None or self._fleet is None:
            return ""
        counts = self._transport.counts
        told = "".join(f"; {why}" for _, why in sorted(counts.unreached.items()))
        if counts.refused:
            refused = ", ".join(self._fleet.members[member] for member in sorted(counts.refused))
            told += f"; {refused} refused this member: {COMPARE}"
        return told

    def _deliver(self, sender: int, message: Message) -> None:
        self.feed(Received(sender, message))

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    def feed(self, event: Input) -> None:
        """Give *event* to the machine, perform its effects, and set the timer for ``wake_at``."""
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

    def listen(self, name: str) -> AsyncIterator[None]:
        """Yield when a vote for *name* changed here."""
        return self._notifier.listen(name)

    @property
    def now(self) -> float:
        """The present moment, by the clock that measures promises."""
        return self._clock.now()

    async def close(self) -> None:
        """Stop voting and answering. A second call does nothing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(NoAnswer("the backend was closed"))
        self._notifier.close()
        if self._transport is not None:
            await self._transport.close()
        if self._client is not None:
            await self._client.close()


def _already(fleet: Fleet) -> Callable[[], Awaitable[Fleet]]:
    async def find() -> Fleet:
        return fleet

    return find

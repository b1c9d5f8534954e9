"""The harnesses that a backend brings to its suites: how to open it, let time pass, and make faults."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, cast

import pytest

from tenure._election.store import FollowedLeaseStore, Hint, LeaseStore, LeaseTraits, QueuedLeaseStore
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._queue.broker import Broker, Claim, PushingBroker, QueueTraits
from tenure.errors import Unavailable
from tenure.testing._conformance.cost import Scale
from tenure.testing.faultproxy import Begin, Direction, Kill, begun

T = TypeVar("T")

LATE = 1.05  # by which share longer than a ttl to wait before it is surely over

Fault = Literal["lose_answer", "cut", "cut_one", "late", "hold", "away", "restart", "full", "slow", "kill"]
"""What a harness can do to the connection or the store."""

GiveUp = Callable[[Awaitable[object]], Awaitable[None]]
"""Sends a request and gives it up before it arrives."""


@dataclass(frozen=True)
class Deviation:
    """What a store does otherwise than the rule of how deliveries end; see ``OutcomeTests``."""

    name: str
    """What it does, in a few words."""
    why: str
    """Why it is so, or what has to be done."""
    fields: tuple[str, ...]
    """The fields that differ, as the test names them."""
    cases: str
    """A regular expression that finds something in the names of the cases in which they may differ."""


def needs_fault(harness: LeaseHarness | QueueHarness, fault: Fault) -> None:
    """Skip the test if this fault can't be made here."""
    if fault not in harness.faults:
        pytest.skip(f"this harness can't make the fault {fault!r}")


class LeaseHarness(ABC):
    """One test's storage, with as many clients as the test opens. Made without arguments, once for each test."""

    traits: ClassVar[LeaseTraits]
    """The traits of the store; tests of what it can not do are skipped."""
    ttl: ClassVar[float] = 10.0
    """The length of a lease in the tests, in seconds; short where time is real, as tests wait for its end."""
    long_ttl: ClassVar[float] = 600.0
    """The length of a lease, in seconds, that is not renewed early during a test which takes a moment."""
    ends_within: ClassVar[float] = 0.0
    """The seconds after its end within which the store has ended a lease; where it looks once a second, say, one."""
    has_sessions: ClassVar[bool] = False
    """Whether a claim belongs to the client that made it: no other client can renew it."""
    keeps_unanswered: ClassVar[bool] = True
    """Whether a renewal whose answer was lost extends a claim; or its client gives it up as if that had not come."""
    answer_within: ClassVar[float] = 10.0
    """The longest time of a request, in real seconds, while the store is unreachable."""
    is_exact: ClassVar[bool] = False
    """Whether time passes only in ``pass_time``, and exactly as much as given."""
    faults: ClassVar[frozenset[Fault]] = frozenset()
    """The faults that this harness can make; tests that need another one are skipped."""
    foreign: ClassVar[tuple[str, ...]] = ()
    """Ways in which others can make the record of a lease unreadable; see ``write_foreign``."""
    scale: ClassVar[Scale | None] = None
    """The unit in which this harness counts the work of the storage, and the depths; None if it can't count."""
    hintless: ClassVar[tuple[str, ...]] = ()
    """Conditions in which requests are answered, and no hints come; see ``open_without_hints``."""

    async def start(self) -> None:  # noqa: B027  # most have nothing to start
        """Make the storage ready; nothing need be in it under the random names of the tests."""

    @abstractmethod
    async def open(self) -> LeaseStore:
        """Return a new client of the same storage, which stands for another process."""

    async def open_without_hints(self, how: str) -> LeaseStore:
        """Return a new client to which no hints come, or only for a few names; *how* is of ``hintless``."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """Close every client, and remove the storage."""

    async def pass_time(self, seconds: float) -> None:
        """Let *seconds* pass for the store: real ones, unless its clock can be set."""
        await asyncio.sleep(seconds)

    async def outlast_lease(self, share: float = 1.0) -> None:
        """Let enough time pass that a lease of ``ttl`` is surely over, of which *share* is left."""
        await self.pass_time(self.ttl * (share + LATE - 1) + self.ends_within)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        """Inside the block, requests of *store* are carried out, and the answers are lost: ``Unavailable``."""
        raise NotImplementedError

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        """Inside the block, no request of *store* that changes anything arrives."""
        raise NotImplementedError

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        """Inside the block, no request of *store* about *name* arrives; those about names stored apart do."""
        raise NotImplementedError

    def stored_apart(self, name: str, other: str) -> bool:
        """Return whether ``cut_one`` of *name* leaves *other* reachable."""
        return name != other

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        """Yield a function that gives up a request of *store*; it is carried out when the block ends, if at all.

        One request in each block, of a client that is connected; its other requests are not delayed.
        """
        raise NotImplementedError

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        """Yield a function that sends a request of *store*, whose answer is held back until the block ends.

        With *up*, the request itself is held back, after the client has sent it. One request in each block; others of
        the same client may have to wait. Time that passes inside the block passes for the client, too.
        """
        raise NotImplementedError

    def away(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, the tables, keys or containers of the leases are missing or can't be used."""
        raise NotImplementedError

    async def write_foreign(self, name: str, how: str) -> None:
        """Change what is stored of *name*, which was acquired before, as others could; *how* is of ``foreign``."""
        raise NotImplementedError

    async def restart(self) -> None:
        """Close every client, and stop and start the storage's own process if it has one.

        If claims belong to their client (``has_sessions``), the clients stay open.
        """
        raise NotImplementedError

    def full(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, the storage can't grow."""
        raise NotImplementedError

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Return the answer to *ask*, and how many units of work it cost the storage; see ``scale``."""
        raise NotImplementedError


class _HeldRequests:
    """Holds a request back after its caller has given it up."""

    def __init__(self) -> None:
        self._holding: asyncio.Event | None = None  # set when the next request is held
        self._released = asyncio.Event()
        self._requests: list[asyncio.Future[object]] = []

    @asynccontextmanager
    async def late(self, clock: AbstractContextManager[None] | None = None) -> AsyncIterator[GiveUp]:
        """Yield a function that gives up a request; when the block ends, carry it out, inside *clock*."""
        self._released.clear()
        try:
            yield self._give_up
        finally:
            with clock or nullcontext():
                self._released.set()
                await asyncio.gather(*self._requests, return_exceptions=True)
            self._requests.clear()

    async def _give_up(self, request: Awaitable[object]) -> None:
        self._holding = asyncio.Event()
        self._requests.append(asyncio.ensure_future(request))
        await self._holding.wait()

    async def hold(self) -> None:
        """Wait until the end of the block if this is the request that was given up."""
        if self._holding is not None:
            self._holding.set()
            self._holding = None
            await self._released.wait()


class _FaultyConnection:
    """A connection that can be cut, lose answers or hold a request back; for stores without a network."""

    def __init__(self) -> None:
        self._losing = False
        self._is_cut = False
        self._held = _HeldRequests()
        self.late = self._held.late
        self._holding: tuple[Direction, asyncio.Event, asyncio.Event] | None = None

    @asynccontextmanager
    async def lose_answer(self) -> AsyncIterator[None]:
        """Lose every answer inside the block."""
        self._losing = True
        try:
            yield
        finally:
            self._losing = False

    @asynccontextmanager
    async def cut(self) -> AsyncIterator[None]:
        """Let no request through inside the block."""
        self._is_cut = True
        try:
            yield
        finally:
            self._is_cut = False

    @asynccontextmanager
    async def hold(self, direction: Direction = "down") -> AsyncIterator[Begin]:
        """Yield a function that sends a request; hold it back (*up*) or its answer (*down*) until the block ends."""
        withheld, released = asyncio.Event(), asyncio.Event()

        async def begin(request: Awaitable[Any]) -> asyncio.Future[Any]:
            self._holding = direction, withheld, released
            return await begun(request, withheld)

        try:
            yield begin
        finally:
            self._holding = None
            released.set()

    async def _pass(self, passing: Direction) -> None:
        """Wait for the end of the block that holds back what is *passing* now."""
        if self._holding is not None and self._holding[0] == passing:
            _, withheld, released = self._holding
            withheld.set()
            await released.wait()

    def _before_request(self, *, is_cut_off: bool = False) -> None:
        if self._is_cut or is_cut_off:
            raise Unavailable("the connection was cut by the test")

    async def _before_answer(self) -> None:
        await self._pass("down")
        if self._losing:
            raise Unavailable("the answer was lost by the test")


class FaultyLeaseStore(_FaultyConnection):
    """A wrapper of a ``LeaseStore`` that can be cut off or lose its answers."""

    def __init__(self, store: LeaseStore) -> None:
        super().__init__()
        self.store = store
        self._cut_off: set[str] = set()

    @asynccontextmanager
    async def cut_one(self, name: str) -> AsyncIterator[None]:
        """Let no request about *name* through inside the block."""
        self._cut_off.add(name)
        try:
            yield
        finally:
            self._cut_off.discard(name)

    def _before_request_for(self, name: str) -> None:
        self._before_request(is_cut_off=name in self._cut_off)

    @property
    def traits(self) -> LeaseTraits:
        """The traits of the wrapped store."""
        return self.store.traits

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Pass the request on."""
        await self._held.hold()
        await self._pass("up")
        self._before_request_for(name)
        answer = await self.store.acquire(name, holder, ttl, metadata)
        await self._before_answer()
        return answer

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Pass the request on."""
        await self._held.hold()
        await self._pass("up")
        asked = [grant for grant in grants if not self._is_cut and grant.name not in self._cut_off]
        if grants and not asked:
            self._before_request_for(grants[0].name)
        answers = iter(await self.store.renew(asked, ttl))
        await self._before_answer()
        cut = NoAnswer("the connection was cut by the test")
        return [cut if grant.name in self._cut_off else next(answers) for grant in grants]

    async def release(self, grant: Grant) -> Released | Lost:
        """Pass the request on."""
        await self._held.hold()
        await self._pass("up")
        self._before_request_for(grant.name)
        answer = await self.store.release(grant)
        await self._before_answer()
        return answer

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Pass the request on."""
        await self._pass("up")
        self._before_request_for(name)
        answer = await self.store.inspect(name)
        await self._before_answer()
        return answer

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Pass the request on, if none of *names* is cut off."""
        for name in names:
            self._before_request_for(name)
        answer = await self.store.inspect_many(names)
        await self._before_answer()
        return answer

    async def names(self) -> Sequence[str]:
        """Pass the request on."""
        self._before_request()
        answer = await self.store.names()
        await self._before_answer()
        return answer

    async def ask_to_resign(self, name: str) -> bool:
        """Pass the request on."""
        self._before_request_for(name)
        answer = await self.store.ask_to_resign(name)
        await self._before_answer()
        return answer

    async def withdraw(self, name: str, holder: str) -> None:
        """Pass the request on, if the wrapped store has a queue."""
        await self._held.hold()
        await self._pass("up")
        self._before_request_for(name)
        await cast(QueuedLeaseStore, self.store).withdraw(name, holder)
        await self._before_answer()

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Follow the hints of the wrapped store."""
        return self.store.hints(name)

    def follow_renewals(self, prefix: str) -> AsyncIterator[object]:
        """Let the wrapped store note renewals, if it follows them."""
        return cast(FollowedLeaseStore, self.store).follow_renewals(prefix)


class QueueHarness(ABC):
    """One test's queues, with as many clients as the test opens. Made without arguments, once for each test."""

    traits: ClassVar[QueueTraits]
    """The traits of the broker; tests of what it can not do are skipped."""
    lock: ClassVar[float] = 10.0
    """The length of a lock in the tests, in seconds; short where time is real, as tests wait for its end."""
    lock_in_rounds: ClassVar[float | None] = None
    """The length of a lock where many messages go through rounds of locks; None for ``lock``.

    Longer than that where the server's clock is turned, but also runs by itself while a test asks for much.
    """
    long: ClassVar[float] = 20.0
    """How many times as long as a lock a test waits to see that nothing happens; little where time is real."""
    answer_within: ClassVar[float] = 10.0
    """The longest time of a request, in real seconds, while the broker is unreachable."""
    backlog: ClassVar[int] = 3_000
    """More messages than the broker processes in one step when all of them are due."""
    counts_bytes: ClassVar[bool] = False
    """Whether a claim ends with the body that brings it to ``CLAIM_BYTES``."""
    slack: ClassVar[int] = 0
    """The bytes of messages that a full broker may still accept, from a reserve."""
    copies_after_kill: ClassVar[Mapping[str, int]] = {}
    """By its act: how many of five messages may be there twice, by the store's page, if a client is killed in it."""
    drains_when_full: ClassVar[bool] = True
    """Whether a full broker still delivers and settles its messages; else it may refuse, and change nothing."""
    any_client_settles: ClassVar[bool] = True
    """Whether a lock is the store's alone: any client can settle the delivery, also after a restart of the broker."""
    uses: ClassVar[int] = 100
    """How often a test uses a queue shortly: more where it takes little, less where each use takes long."""
    spare: ClassVar[int] = 4
    """How much more there may be of anything after many short uses than after the first ones: a pool may open more."""
    receives_in_order: ClassVar[bool] = True
    """Whether messages that were never received before come in the order in which they were sent."""
    keeps_whole_history: ClassVar[bool] = True
    """Whether the newest fifty attempts are kept with all that is told of them; else as many as there is room for."""
    is_exact: ClassVar[bool] = False
    """Whether time passes for locks only in ``pass_time``, and exactly as much as given."""
    faults: ClassVar[frozenset[Fault]] = frozenset()
    """The faults that this harness can make; tests that need another one are skipped."""
    deviations: ClassVar[tuple[Deviation, ...]] = ()
    """What becomes of messages otherwise than by the rule; one that doesn't happen any more fails its test."""
    foreign: ClassVar[tuple[str, ...]] = ()
    """Ways in which others can make a message unreadable; see ``write_foreign``."""
    edits: ClassVar[tuple[str, ...]] = ()
    """What an administrator can do to a queue by the store's own means; see ``edit``."""
    forwards: ClassVar[bool] = False
    """Whether others can pass a message on to another queue with all that is stored with it; see ``forward``."""
    scale: ClassVar[Scale | None] = None
    """The unit in which this harness counts the work of the storage, and the depths; None if it can't count."""

    async def start(self) -> None:  # noqa: B027  # most have nothing to start
        """Make the storage ready; nothing need be in it under the random names of the tests."""

    @abstractmethod
    async def open(self) -> Broker:
        """Return a new client of the same storage, which stands for another process."""

    @abstractmethod
    async def close(self) -> None:
        """Close every client, and remove the storage."""

    async def pass_time(self, seconds: float) -> None:
        """Let *seconds* pass for the broker: real ones, unless its clock can be set."""
        await asyncio.sleep(seconds)

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """Inside the block, requests of *broker* are carried out, and the answers are lost: ``Unavailable``."""
        raise NotImplementedError

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """Inside the block, no request of *broker* that changes anything arrives."""
        raise NotImplementedError

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        """Yield a function that gives up a request of *broker*; it is carried out when the block ends, if at all.

        One request in each block, of a client that is connected; its other requests are not delayed.
        """
        raise NotImplementedError

    def hold(self, broker: Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        """Yield a function that sends a request of *broker*, whose answer is held back until the block ends.

        With *up*, the request itself is held back, after the client has sent it. One request in each block; others of
        the same client may have to wait. Time that passes inside the block passes for the client, too.
        """
        raise NotImplementedError

    def away(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, the tables, keys or containers of the messages are missing or can't be used."""
        raise NotImplementedError

    async def left_behind(self) -> Mapping[str, int]:
        """Count what clients have in the store now, by what it is: connections, consumers, records; not messages."""
        return {}

    async def write_foreign(self, queue: str, how: str) -> None:
        """Write a message to *queue* as another program could; *how* is of ``foreign``.

        Its body begins with ``foreign``. The queue may be one of dead letters.
        """
        raise NotImplementedError

    async def edit(self, queue: str, how: str) -> None:
        """Do *how* to what the store has of *queue*, by the store's own means; it is of ``edits``.

        ``delete`` removes the queue itself, and ``forget`` what is kept of its settings.
        """
        raise NotImplementedError

    async def standing(self, broker: Broker, queue: str) -> None:
        """Return when the storage knows that *broker* waits for messages of *queue*; soon, unless it tells that."""
        await asyncio.sleep(0)

    async def forward(self, source: str, target: str) -> None:
        """Write the only message of *source* to *target* as another program could, with all that is stored with it.

        It may stay in *source*, which may be a queue of dead letters.
        """
        raise NotImplementedError

    async def restart(self) -> None:
        """Close every client, and stop and start the storage's own process if it has one."""
        raise NotImplementedError

    def full(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, the storage can't grow."""
        raise NotImplementedError

    def kill(self, broker: Broker, after: int) -> Kill:
        """Let *after* more writes of *broker* reach the store, and then nothing, as if its process was killed."""
        raise NotImplementedError

    def slow(self, broker: Broker, round_trip: float) -> AbstractAsyncContextManager[None]:
        """Inside the block, each request of *broker* and its answer take so many seconds together."""
        raise NotImplementedError

    async def reset(self, broker: Broker) -> None:
        """Break every open connection of *broker*; new ones work."""
        raise NotImplementedError

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Return the answer to *ask*, and how many units of work it cost the storage; see ``scale``."""
        raise NotImplementedError


class FaultyBroker(_FaultyConnection):
    """A wrapper of a ``Broker`` that can be cut off or lose its answers."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._wrapped = broker
        self._killing: Kill | None = None

    def kill(self, after: int) -> Kill:
        """Let requests take *after* more steps of the loop, and then none, as if the process was killed."""
        self._killing = Kill((), after)
        return self._killing

    @classmethod
    def around(cls, broker: Broker) -> Broker:
        """Return a wrapper of *broker*, typed as a broker."""
        return cast(Broker, cls(broker))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        return found if name in ("traits", "hints", "generations") else partial(self._ask, found)

    def receive_arrived(self, queue: str, limit: int, lock: float) -> Claim | None:
        """Return what has arrived; while the connection is disturbed, nothing has."""
        if self._is_cut or self._losing or self._holding is not None:
            return None
        return cast(PushingBroker, self._wrapped).receive_arrived(queue, limit, lock)

    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        await self._held.hold()
        await self._pass("up")
        self._before_request()
        answer = await (request(*args, **options) if self._killing is None else self._step(request(*args, **options)))
        await self._before_answer()
        return answer

    async def _step(self, request: Awaitable[T]) -> T:
        """Let *request* go on step by step, until it has its answer or is killed."""
        assert self._killing is not None
        asking = asyncio.ensure_future(request)
        while not asking.done():
            if not self._killing.lets_through():
                asking.cancel()
                raise Unavailable("the client was killed by the test")
            await asyncio.sleep(0)
        return await asking

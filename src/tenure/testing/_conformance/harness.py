"""What a backend brings to its suites: how to open it, how time passes for it, and how to hurt it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, cast

from tenure._election.store import LeaseStore, LeaseTraits
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._queue.broker import Broker, QueueTraits
from tenure.errors import Unavailable
from tenure.testing._conformance.cost import Scale

T = TypeVar("T")

Fault = Literal["lose_answer", "cut", "cut_one", "late", "away", "restart", "full", "slow"]

GiveUp = Callable[[Awaitable[object]], Awaitable[None]]
"""Ask a question, and give it up on its way."""


class LeaseHarness(ABC):
    """One test's storage, with as many clients as the test opens. Made without arguments, once for each test."""

    traits: ClassVar[LeaseTraits]
    ttl: ClassVar[float] = 10.0
    """The length of a lease in the tests, in seconds; short where time is real, for it is waited out."""
    patience: ClassVar[float] = 10.0
    """How many real seconds a question may take at most, the store being out of reach."""
    is_exact: ClassVar[bool] = False
    """Whether no time passes but in ``pass_time``, and there just what is asked for."""
    faults: ClassVar[frozenset[Fault]] = frozenset()
    """What can be done to this store; tests that need another fault are skipped."""
    scale: ClassVar[Scale | None] = None
    """How this harness counts what the storage does for a question; None if it can't."""

    async def start(self) -> None:  # noqa: B027  # most have nothing to start
        """Make the storage ready, and empty as far as the tests' random names go."""

    @abstractmethod
    async def open(self) -> LeaseStore:
        """Return a new client of the same storage: it stands for another process."""

    @abstractmethod
    async def close(self) -> None:
        """Close every client, and do away with the storage."""

    async def pass_time(self, seconds: float) -> None:
        """Let *seconds* pass for the store. Real ones, unless it has a clock that can be turned."""
        await asyncio.sleep(seconds)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        """Inside the block, what *store* is asked is done, and its answers are lost: ``Unavailable``."""
        raise NotImplementedError

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        """Inside the block, *store* can't be asked to change anything."""
        raise NotImplementedError

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        """Inside the block, *store* can't ask about *name*, and about names that lie apart from it, it can."""
        raise NotImplementedError

    def lie_apart(self, name: str, other: str) -> bool:
        """Tell whether ``cut_one`` of *name* leaves *other* as it is."""
        return name != other

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        """Yield what gives up a question of *store* on its way; it is carried out when the block ends, if at all.

        One question in each block, of a client that has asked before; what else is asked meanwhile goes its way.
        """
        raise NotImplementedError

    def away(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, what the storage keeps leases in is not in its place, or not to be used, for a while."""
        raise NotImplementedError

    async def restart(self) -> None:
        """Close every client, and stop and start the storage's own process if it has one."""
        raise NotImplementedError

    def full(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, the storage can't grow."""
        raise NotImplementedError

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Return the answer to *ask*, and how many units of work the storage has done for it; see ``scale``."""
        raise NotImplementedError


class _Gate:
    """Where a question waits after its asker has given up."""

    def __init__(self) -> None:
        self._catching: asyncio.Event | None = None
        self._opened = asyncio.Event()
        self._caught: list[asyncio.Future[object]] = []

    @asynccontextmanager
    async def late(self, clock: AbstractContextManager[None] | None = None) -> AsyncIterator[GiveUp]:
        """Yield what gives up a question on its way; when the block ends, carry it out, inside *clock*."""
        self._opened.clear()
        try:
            yield self._give_up
        finally:
            with clock or nullcontext():
                self._opened.set()
                await asyncio.gather(*self._caught, return_exceptions=True)
            self._caught.clear()

    async def _give_up(self, question: Awaitable[object]) -> None:
        self._catching = asyncio.Event()
        self._caught.append(asyncio.ensure_future(question))
        await self._catching.wait()

    async def leave(self) -> None:
        """Wait if this is the question that is given up."""
        if self._catching is not None:
            self._catching.set()
            self._catching = None
            await self._opened.wait()


class _Link:
    """The way to a store and back, which can be cut, lose answers or keep a question; for stores without a network."""

    def __init__(self) -> None:
        self._losing = False
        self._is_cut = False
        self._gate = _Gate()
        self.late = self._gate.late

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
        """Let no question through inside the block."""
        self._is_cut = True
        try:
            yield
        finally:
            self._is_cut = False

    def _leave(self, *, is_cut_off: bool = False) -> None:
        if self._is_cut or is_cut_off:
            raise Unavailable("the way there is cut, as the test wants it")

    def _arrive(self) -> None:
        if self._losing:
            raise Unavailable("the answer was lost on its way, as the test wants it")


class Lossy(_Link):
    """A ``LeaseStore`` around another, which can be cut off, or lose its answers on their way."""

    def __init__(self, store: LeaseStore) -> None:
        super().__init__()
        self.store = store
        self._cut_off: set[str] = set()

    @asynccontextmanager
    async def cut_one(self, name: str) -> AsyncIterator[None]:
        """Let nothing about *name* through inside the block."""
        self._cut_off.add(name)
        try:
            yield
        finally:
            self._cut_off.discard(name)

    def _leave_for(self, name: str) -> None:
        self._leave(is_cut_off=name in self._cut_off)

    @property
    def traits(self) -> LeaseTraits:
        """What the store inside can do."""
        return self.store.traits

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Ask the store inside."""
        await self._gate.leave()
        self._leave_for(name)
        answer = await self.store.acquire(name, holder, ttl, metadata)
        self._arrive()
        return answer

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Ask the store inside."""
        await self._gate.leave()
        asked = [grant for grant in grants if not self._is_cut and grant.name not in self._cut_off]
        if grants and not asked:
            self._leave_for(grants[0].name)
        answers = iter(await self.store.renew(asked, ttl))
        self._arrive()
        cut = NoAnswer("the way there is cut, as the test wants it")
        return [cut if grant.name in self._cut_off else next(answers) for grant in grants]

    async def release(self, grant: Grant) -> Released | Lost:
        """Ask the store inside."""
        await self._gate.leave()
        self._leave_for(grant.name)
        answer = await self.store.release(grant)
        self._arrive()
        return answer

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Ask the store inside."""
        answer = await self.store.inspect(name)
        self._arrive()
        return answer

    async def names(self) -> Sequence[str]:
        """Ask the store inside."""
        answer = await self.store.names()
        self._arrive()
        return answer

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the store inside."""
        answer = await self.store.ask_to_resign(name)
        self._arrive()
        return answer

    def hints(self, name: str) -> AsyncIterator[None]:
        """Listen to the store inside."""
        return self.store.hints(name)


class QueueHarness(ABC):
    """One test's queues, with as many clients as the test opens. Made without arguments, once for each test."""

    traits: ClassVar[QueueTraits]
    lock: ClassVar[float] = 10.0
    """The length of a lock in the tests, in seconds; short where time is real, for it is waited out."""
    patience: ClassVar[float] = 10.0
    """How many real seconds a question may take at most, the broker being out of reach."""
    backlog: ClassVar[int] = 3_000
    """More messages than the broker deals with in one step when time has come for all of them."""
    counts_bytes: ClassVar[bool] = False
    """Whether a claim ends with the body that brings it to ``CLAIM_BYTES``."""
    slack: ClassVar[int] = 0
    """How many bytes a full broker may still take in messages: what it had kept free for them."""
    drains_when_full: ClassVar[bool] = True
    """Whether a full broker hands out and settles all that it has; else it may refuse that, too, and change nothing."""
    is_exact: ClassVar[bool] = False
    """Whether no time passes for locks but in ``pass_time``, and there just what is asked for."""
    faults: ClassVar[frozenset[Fault]] = frozenset()
    """What can be done to this broker; tests that need another fault are skipped."""
    scale: ClassVar[Scale | None] = None
    """How this harness counts what the storage does for a question; None if it can't."""

    async def start(self) -> None:  # noqa: B027  # most have nothing to start
        """Make the storage ready, and empty as far as the tests' random names go."""

    @abstractmethod
    async def open(self) -> Broker:
        """Return a new client of the same storage: it stands for another process."""

    @abstractmethod
    async def close(self) -> None:
        """Close every client, and do away with the storage."""

    async def pass_time(self, seconds: float) -> None:
        """Let *seconds* pass for the broker. Real ones, unless it has a clock that can be turned."""
        await asyncio.sleep(seconds)

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """Inside the block, what *broker* is asked is done, and its answers are lost: ``Unavailable``."""
        raise NotImplementedError

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """Inside the block, *broker* can't be asked to change anything."""
        raise NotImplementedError

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        """Yield what gives up a question of *broker* on its way; it is carried out when the block ends, if at all.

        One question in each block, of a client that has asked before; what else is asked meanwhile goes its way.
        """
        raise NotImplementedError

    def away(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, what the storage keeps messages in is not in its place, or not to be used, for a while."""
        raise NotImplementedError

    async def restart(self) -> None:
        """Close every client, and stop and start the storage's own process if it has one."""
        raise NotImplementedError

    def full(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, the storage can't grow."""
        raise NotImplementedError

    def slow(self, broker: Broker, round_trip: float) -> AbstractAsyncContextManager[None]:
        """Inside the block, each question of *broker* and its answer are under way for so many seconds together."""
        raise NotImplementedError

    async def reset(self, broker: Broker) -> None:
        """Break every connection of *broker* that stands; new ones work."""
        raise NotImplementedError

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Return the answer to *ask*, and how many units of work the storage has done for it; see ``scale``."""
        raise NotImplementedError


class LossyBroker(_Link):
    """A ``Broker`` around another, which can be cut off, or lose its answers on their way."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._inside = broker

    @classmethod
    def around(cls, broker: Broker) -> Broker:
        """Return one around *broker*, as what it is to its users."""
        return cast(Broker, cls(broker))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inside, name)
        return found if name in ("traits", "hints") else partial(self._ask, found)

    async def _ask(self, question: Any, *args: Any, **options: Any) -> Any:
        await self._gate.leave()
        self._leave()
        answer = await question(*args, **options)
        self._arrive()
        return answer

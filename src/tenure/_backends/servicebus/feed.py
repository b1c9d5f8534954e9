"""The messages of one queue on their way to this process: claims, and the wait for the next message.

A claim gives the service leave for some messages, takes what comes, and takes the rest of the leave back: no message is
locked that nobody asked for. While a consumer waits, there is leave for one message. It is a hint; the next claim takes
it. If none does, it is handed back, uncounted: a lock never ends in the buffer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from tenure._backends.servicebus.client import LOST, Namespace
from tenure._backends.servicebus.codec import array_of
from tenure._backends.servicebus.driver import FAILURES, NOT_FOUND, RELEASED, Outcome, Refused
from tenure._backends.servicebus.links import DRAIN_MAX, Arrived, ReceiveLink
from tenure._backends.servicebus.lock_times import LockTimes
from tenure._backends.servicebus.names import Path
from tenure._queue.broker import CLAIM_BYTES
from tenure._runtime.backoff import Backoff
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

LOOK = 0.25
"""Seconds that a claim waits for a first message: the service needs a moment to look."""

FIRST_LOOK = 1.0
"""The same on a new link, and where an empty answer ends something: the service may have to load the queue first."""

CREDIT_MAX = 2_000
"""The most messages that a claim asks for."""

HOLD = 1.0
"""Seconds for which a message that gave a hint waits for a claim."""

ASK_AGAIN = 0.05
"""Seconds after which those that wait for a hint have leave again, unless a claim has given some."""

REOPEN = 1.0
"""Seconds until a lost link is opened again for those that wait for a hint, at first."""


class Taken(NamedTuple):
    """What a claim has brought."""

    link: ReceiveLink | None
    messages: list[Arrived]
    may_be_more: bool = False
    """Whether it was only looked at what had come already."""


class Feed:
    """The link of one queue, or of its dead letters. All of it belongs to the library's thread."""

    def __init__(
        self,
        namespace: Namespace,
        path: Callable[[], Awaitable[Path]],
        waits_for_sessions: Callable[[], Awaitable[bool]],
        lock: Callable[[], float],
        note_sessions: Callable[[], None],
        forget: Callable[[], None],
        hint: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._path = path
        self._waits_for_sessions = waits_for_sessions
        self._lock = lock
        self._note_sessions = note_sessions
        self._forget = forget
        self._hint = hint
        self._turn = asyncio.Lock()
        self._link: ReceiveLink | None = None
        self._releasing: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None
        self._opened_at = -math.inf
        self._backoff = Backoff(REOPEN)
        self._asking: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._claiming = False
        self._is_idle = False
        self.times = LockTimes()
        self.listeners = 0
        """How many wait for hints."""

    @property
    def has_ready(self) -> bool:
        """Whether a message has come that nobody has claimed; on any thread."""
        link = self._link
        return link is not None and bool(link.ready)

    def take_ready(self, limit: int) -> Taken:
        """Take up to *limit* messages that have come already; on any thread."""
        link = self._link
        return Taken(link, [] if link is None else _take(link, limit), may_be_more=True)

    def ask_later(self) -> None:
        """See to it that those that wait for a hint get the next one, also if nobody claims until then."""
        if self._asking is None and self.listeners:
            self._asking = asyncio.get_running_loop().call_later(ASK_AGAIN, self._ask_again)

    def _ask_again(self) -> None:
        self._asking = None
        if self._lacks_leave(self._link):
            self._tasks.spawn(self._ask_for_one())

    async def _ask_for_one(self) -> None:
        async with self._turn:
            link = self._link
            if link is not None and self._lacks_leave(link):
                with suppress(*FAILURES):
                    await link.ask(1)

    def _lacks_leave(self, link: ReceiveLink | None) -> bool:
        if link is None or link.lost is not None or not self.listeners:
            return False
        return link.credit == 0 and not link.ready

    def settle_soon(self, link: ReceiveLink, verdicts: list[tuple[Arrived, Outcome]]) -> None:
        """Settle messages of *link* that are not delivered."""
        self._tasks.spawn(link.settle(verdicts))

    async def claim(self, limit: int, *, is_thorough: bool = False) -> Taken:
        """Take up to *limit* messages, and wait for none longer than the service needs to look.

        The look *is thorough* where an empty answer ends something.
        """
        await self._turn.acquire()
        try:
            link = self._link = await self._opened()
        except BaseException:
            self._turn.release()
            raise
        try:
            taken = await self._claim(link, limit, is_thorough=is_thorough)
        except BaseException:
            self._tasks.spawn(self._give_up_turn(link))  # the next claim waits for that, and this one does not
            raise
        self._turn.release()
        return taken

    async def claim_certainly(self, limit: int) -> Taken:
        """Claim once more while an answer is empty although there may be more."""
        while True:
            taken = await self.claim(limit, is_thorough=True)
            if taken.messages or not taken.may_be_more:
                return taken

    async def _claim(self, link: ReceiveLink, limit: int, *, is_thorough: bool) -> Taken:
        if link.ready:  # what gave a hint: it is handed on at once, and the next claim looks for more
            return self._taken(link, limit, may_be_more=True)
        most = min(limit, CREDIT_MAX, max(1, CLAIM_BYTES // max(1, link.largest)))
        self._claiming = True
        try:
            await link.ask(most)
            is_new, link.is_new = link.is_new, False
            is_first = await link.until_more(FIRST_LOOK if is_thorough or is_new else LOOK)
            if is_first and self.listeners and self._is_idle and not is_thorough:
                # One that waits gets the first at once; the leave for the others stays until the next claim.
                self._release_later()
                return self._taken(link, limit, may_be_more=True)
            is_certain = await link.drain(self._drain_within())
        finally:
            self._claiming = False
        found = self._taken(link, limit, may_be_more=not is_certain)
        self._is_idle = not found.messages
        if len(found.messages) < most and self.listeners and not link.ready:
            await link.ask(1)
        return found._replace(may_be_more=found.may_be_more or len(found.messages) == most < limit)

    def _drain_within(self) -> float:
        """Return how long to wait for a drain: a part of a request, and of the locks of what has come."""
        return min(DRAIN_MAX, self._namespace.options.timeout / 4, self._lock() / 4)

    def _taken(self, link: ReceiveLink, limit: int, *, may_be_more: bool) -> Taken:
        messages = _take(link, limit)
        self.ask_later()
        if link.ready:  # too large for one claim
            self._release_later()
        return Taken(link, messages, may_be_more or bool(link.ready))

    def begin_listening(self) -> None:
        """Let one more wait for hints."""
        self.listeners += 1
        self._tasks.spawn(self._wait_for_one())

    def end_listening(self) -> None:
        """Let one less wait for hints."""
        self.listeners -= 1
        if self.listeners == 0 and self._link is not None and self._link.lost is None:
            self._tasks.spawn(self._release_in_turn(self._link))

    async def _wait_for_one(self) -> None:
        async with self._turn:
            try:
                async with asyncio.timeout(self._namespace.options.timeout):
                    waits_for_sessions = await self._waits_for_sessions()
                    if not waits_for_sessions:
                        link = self._link = await self._opened()
                        if link.credit == 0 and not link.ready:
                            await link.ask(1)
            except (*FAILURES, TenureError) as error:
                if isinstance(error, Refused) and error.condition == "amqp:not-allowed":
                    self._note_sessions()
                elif isinstance(error, Refused) and error.condition == NOT_FOUND:
                    self._forget()
                self._open_later()
            else:
                if waits_for_sessions:
                    self._backoff.reset()  # that has pauses of its own
                else:
                    self._hint()  # after an interruption, there may be messages that were missed

    async def _opened(self) -> ReceiveLink:
        link = await self._namespace.receiver(await self._path(), self._on_arrival)
        if link is not self._link:
            self._opened_at = asyncio.get_running_loop().time()
        return link

    def _on_arrival(self) -> None:
        """A message has come, or the link is gone."""
        link = self._link
        if link is None:
            return
        if link.lost is not None:
            if link.ready:
                self._tasks.spawn(self._abandon(_take_all(link)))
            self._backoff.reset_after(asyncio.get_running_loop().time() - self._opened_at)
            if self.listeners and not self._namespace.is_closed:
                self._open_later()
            return
        if not self._claiming:
            self._hint()
            self._release_later()

    def _open_later(self) -> None:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().call_later(self._backoff.next(), self._open_again)

    def _open_again(self) -> None:
        self._opening = None
        if self.listeners and not self._namespace.is_closed:
            self._tasks.spawn(self._wait_for_one())

    def _release_later(self) -> None:
        if self._releasing is None:
            self._releasing = asyncio.get_running_loop().call_later(HOLD, self._release)

    def _stop_releasing(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None

    def _release(self) -> None:
        """Hand back what has waited for a claim for too long; what came later waits for its own turn."""
        self._releasing = None
        link = self._link
        first = None if link is None else link.first_ready
        if link is None or first is None:
            return
        if self._namespace.clock.now() - first.at < HOLD / 2:
            self._release_later()
        else:
            self._tasks.spawn(self._release_in_turn(link))

    async def _release_in_turn(self, link: ReceiveLink) -> None:
        await self._turn.acquire()
        await self._give_up_turn(link)

    async def _give_up_turn(self, link: ReceiveLink) -> None:
        try:
            await self._give_up(link)
        finally:
            self._turn.release()

    async def _give_up(self, link: ReceiveLink) -> None:
        """Take the leave back, and hand back what came for it."""
        self._stop_releasing()
        with suppress(*FAILURES):
            async with asyncio.timeout(self._namespace.options.timeout):
                for _ in range(2):  # what has come is not to wait for what still comes
                    if link.lost is None:
                        await link.settle([(one, RELEASED) for one in _take_all(link)])
                    if link.lost is None:
                        await link.drain(self._drain_within())
                if link.ready:
                    self._release_later()
        if link.lost is not None:
            await self._abandon(_take_all(link))

    async def _abandon(self, messages: list[Arrived]) -> None:
        """Give messages of a lost link back by their lock tokens, which counts: else they stay locked."""
        if not messages or self._namespace.is_closed:
            return
        with suppress(*FAILURES, TenureError):
            async with asyncio.timeout(self._namespace.options.timeout):
                path = await self._path()
                try:
                    await self._abandon_tokens(path, messages)
                except Refused as refused:
                    if refused.condition not in LOST:
                        raise
                    for one in messages:  # the lock of one is over: each by itself
                        with suppress(Refused):
                            await self._abandon_tokens(path, [one])

    async def _abandon_tokens(self, path: Path, messages: list[Arrived]) -> None:
        body = {"disposition-status": "abandoned", "lock-tokens": array_of([one.token for one in messages])}
        await self._namespace.ask(path, "update-disposition", body)

    async def close(self) -> None:
        """Cancel the timers, and hand back what waits for a claim."""
        self._stop_releasing()
        for timer in (self._opening, self._asking):
            if timer is not None:
                timer.cancel()
        await self._tasks.cancel_all()
        if self._link is not None and self._link.lost is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._give_up(self._link)


def _take(link: ReceiveLink, limit: int) -> list[Arrived]:
    """Take up to *limit* messages, or fewer if they are large; another thread may take some, too."""
    found: list[Arrived] = []
    size = 0
    with suppress(IndexError):
        while len(found) < limit and size < CLAIM_BYTES:
            found.append(link.ready.popleft())
            size += found[-1].size
    return found


def _take_all(link: ReceiveLink) -> list[Arrived]:
    found: list[Arrived] = []
    with suppress(IndexError):
        while True:
            found.append(link.ready.popleft())
    return found

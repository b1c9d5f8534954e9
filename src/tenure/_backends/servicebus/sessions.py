"""Sessions: each is a link of its own, which has it locked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tenure._backends.servicebus.client import LOST, NO_RIGHTS, NO_SESSION, Namespace
from tenure._backends.servicebus.codec import moment_of, state_in
from tenure._backends.servicebus.driver import FAILURES, NOT_FOUND, RELEASED, Connection, Disconnected, Refused
from tenure._backends.servicebus.feed import CREDIT_MAX, FIRST_LOOK, HOLD, LOOK, REOPEN
from tenure._backends.servicebus.links import DRAIN_MAX, ReceiveLink
from tenure._backends.servicebus.names import Path
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.receipts import HeldSession, Receipts
from tenure._queue.broker import NoSession
from tenure._queue.message import SessionLock
from tenure._queue.verdicts import LAPSED, SETTLED, Lapsed, Settled
from tenure._runtime.backoff import STEADY, Backoff
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

WAIT_LONG = 60.0
"""Seconds that the service keeps a consumer waiting for a free session."""

_LASTING = NO_RIGHTS | {"amqp:not-allowed"}
"""Refusals that don't pass by themselves."""

WAIT = 0.5
"""Seconds that the service looks for a free session."""


class Sessions:
    """Accepts, renews and releases sessions. All of it belongs to the library's thread."""

    def __init__(self, namespace: Namespace, places: Places, receipts: Receipts) -> None:
        self._namespace = namespace
        self._places = places
        self._receipts = receipts
        self._ready: dict[str, ReceiveLink] = {}  # by queue: a session that gave a hint
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    def wait(self, queue: str, hint: Callable[[], None]) -> None:
        """Wait for the next session that is free; give a *hint* when there is one, and keep it for a moment."""
        if queue not in self._waiting and queue not in self._ready:
            task = self._waiting[queue] = self._tasks.spawn(self._wait(queue, hint))
            task.add_done_callback(partial(self._stopped, queue))

    def stop_waiting(self, queue: str) -> None:
        """Wait no more for sessions of *queue*."""
        if (task := self._waiting.pop(queue, None)) is not None:
            task.cancel()

    def _stopped(self, queue: str, task: asyncio.Task[None]) -> None:
        if self._waiting.get(queue) is task:
            del self._waiting[queue]

    async def close(self) -> None:
        """Wait no more for sessions."""
        with suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await self._tasks.cancel_all()

    async def _wait(self, queue: str, hint: Callable[[], None]) -> None:
        backoff, now = Backoff(REOPEN), asyncio.get_running_loop().time
        while True:
            asked_at = now()
            try:
                path = await self._places.existing(queue)
                if path is None:
                    return
                link = await self._namespace.session(path, None, WAIT_LONG)
            except (*FAILURES, TenureError) as error:
                if isinstance(error, Refused) and error.condition in NO_SESSION:
                    backoff.reset_after(waited := now() - asked_at)
                    if waited < STEADY:  # and not as long as it was asked to
                        await backoff.rest()
                    continue
                if isinstance(error, Refused) and error.condition in _LASTING:
                    return  # a claim says why
                await backoff.rest()
                hint()  # after an interruption, there may be sessions that were missed
                continue
            break
        self._ready[queue] = link
        hint()
        try:
            await asyncio.sleep(HOLD)
        finally:
            if self._ready.get(queue) is link:
                del self._ready[queue]
                await self._namespace.end_session(link)

    async def accept(self, queue: str, name: str | None) -> SessionLock | NoSession:
        """Lock a session: the one called *name*, or the next that is free."""
        try:
            return await self._accept(queue, name)
        except Refused as refused:
            if refused.condition != NOT_FOUND:
                raise
            self._places.forget(queue)
            return await self._accept(queue, name)

    async def _accept(self, queue: str, name: str | None) -> SessionLock | NoSession:
        path = await self._places.path_of(queue, sessions=True)
        ready = self._ready.pop(queue, None)
        if ready is not None:
            self.stop_waiting(queue)  # so that the next one may be waited for
        if ready is not None and (ready.lost is not None or name not in (None, ready.session and ready.session[0])):
            await self._namespace.end_session(ready)
            ready = None
        try:
            link = ready or await self._namespace.session(path, name, WAIT)
        except Refused as refused:
            if refused.condition in NO_SESSION:
                return NoSession()
            raise
        assert link.session is not None
        self._places.note_sessions(queue)
        found, until = link.session
        try:
            if ready is not None:  # its lock has begun before this question
                renewed = await self._ask(path, link, "renew-session-lock", {"session-id": found})
                until = moment_of(renewed["expiration"])
            answer = await self._ask(path, link, "get-session-state", {"session-id": found})
        except BaseException:
            await self._namespace.end_session(link)
            raise
        token = self._receipts.new_token()
        self._receipts.add_session(token, HeldSession(found, queue, path, link, until))
        return SessionLock(queue, found, token, until, state_in(answer))

    async def renew(self, lock: SessionLock) -> float | None:
        """Extend a session's lock; return its end by the service's clock, or None if it is over."""
        answer = await self.ask(lock, "renew-session-lock")
        held = self._receipts.find_session(lock)
        if isinstance(answer, Lapsed) or held is None:
            return None
        held.locked_until = moment_of(answer["expiration"])
        return held.locked_until

    async def release(self, lock: SessionLock) -> Settled | Lapsed:
        """Unlock a session; its unsettled deliveries are given back uncounted."""
        if isinstance(await self.ask(lock, "renew-session-lock"), Lapsed):
            return LAPSED
        held = self._receipts.find_session(lock)
        if held is None:
            return LAPSED
        given_back = [one.arrived for one in held.delivered.values() if one.arrived is not None]
        self._receipts.forget_session(lock)
        await self._give_back(held.link, given_back)
        return SETTLED

    async def _give_back(self, link: ReceiveLink, given_back: list[Any]) -> None:
        try:
            with suppress(*FAILURES):
                await link.drain(self._drain_within)
                given_back += [link.ready.popleft() for _ in range(len(link.ready))]
                await link.settle([(one, RELEASED) for one in given_back])
        finally:
            await self._namespace.end_session(link)

    async def ask(self, lock: SessionLock, operation: str, body: dict[str, Any] | None = None) -> Any | Lapsed:
        """Send a request about a session; return the answer, or ``Lapsed`` if it is not ours any more."""
        held = self._receipts.find_session(lock)
        if held is None:
            await self.expire(lock)
            return LAPSED
        try:
            return await self._ask(held.path, held.link, operation, {"session-id": held.name, **(body or {})}) or {}
        except Refused as refused:
            if refused.condition not in LOST:
                raise
        except Disconnected:
            if held.link.lost is None:
                raise
        await self.expire(lock)
        return LAPSED

    async def expire(self, lock: SessionLock) -> None:
        """Forget a session whose lock is over."""
        held = self._receipts.session_of(lock)
        if held is not None:
            self._receipts.forget_session(lock)
            await self._namespace.end_session(held.link)

    async def claim(self, held: HeldSession, limit: int) -> list[Any]:
        """Take up to *limit* messages of a session."""
        link = held.link
        if len(link.ready) < limit:
            await link.ask(min(limit, CREDIT_MAX) - len(link.ready))
            is_new, link.is_new = link.is_new, False
            await link.until_more(FIRST_LOOK if is_new else LOOK)
            await link.drain(self._drain_within)
        return [link.ready.popleft() for _ in range(min(limit, len(link.ready)))]

    @property
    def _drain_within(self) -> float:
        """Seconds to wait for a drain: a part of a request."""
        return min(DRAIN_MAX, self._namespace.options.timeout / 4)

    async def _ask(self, path: Path, link: Connection, operation: str, body: dict[str, Any]) -> Any:
        return await self._namespace.ask(path, operation, body, link)

"""Claims: of ready messages, of deferred ones, of sessions and of their messages."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from functools import partial

from tenure._backends.servicebus.client import LOST, Namespace
from tenure._backends.servicebus.codec import array_of, array_of_longs, received_in, uint_of
from tenure._backends.servicebus.driver import FAILURES, NOT_FOUND, RELEASED, Disconnected, Outcome, Refused, rejected
from tenure._backends.servicebus.feed import Feed, Taken
from tenure._backends.servicebus.feeds import Feeds
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.message_format import buried, received
from tenure._backends.servicebus.names import Path
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.receipts import Held, Receipts
from tenure._backends.servicebus.sessions import Sessions
from tenure._queue.broker import Claim, NoSession, QueueSettings
from tenure._queue.delivery_ends import found_dead
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import LAPSED, Lapsed
from tenure._runtime.notifier import Notifier
from tenure._runtime.remote_clock import RemoteClock
from tenure._runtime.tasks import Tasks
from tenure.errors import ConfigError


class Claiming:
    """Takes locks, and keeps what proves them. All of it belongs to the library's thread, but for ``receive_ready``."""

    def __init__(
        self,
        namespace: Namespace,
        places: Places,
        receipts: Receipts,
        sessions: Sessions,
        feeds: Feeds,
        clock: RemoteClock,
        notifier: Notifier,
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._receipts = receipts
        self._sessions = sessions
        self._feeds = feeds
        self._clock = clock
        self._notifier = notifier
        self._tasks = Tasks()

    async def receive(self, queue: str, limit: int) -> Claim:
        """Claim up to *limit* messages."""
        asked_at = self._namespace.clock.now()
        try:
            return await self._claim(queue, limit, asked_at)
        except Refused as refused:
            if refused.condition != NOT_FOUND:
                raise
            self._places.forget(queue)
            return await self._claim(queue, limit, asked_at)

    def receive_ready(self, queue: str, limit: int) -> Claim | None:
        """Claim what has come already for those that wait; None if nothing has. It may be called on any thread."""
        feed, path = self._feeds.known(queue), self._places.known_path(queue)
        settings = self._places.known_settings(queue)
        if feed is None or path is None or settings is None or not feed.has_ready:
            return None
        asked_at = self._namespace.clock.now()
        taken = feed.take_ready(limit)
        self._namespace.post(feed.ask_later)
        claim, refused = self._delivered(queue, path, feed, taken, settings, asked_at)
        if refused and (link := taken.link) is not None:
            self._namespace.post(lambda: feed.settle_soon(link, refused))
        return claim if taken.messages else None

    async def _claim(self, queue: str, limit: int, asked_at: float) -> Claim:
        feed, path = self._feeds.of(queue), await self._places.path_of(queue)
        settings = await self._places.settings(queue)
        taken = await feed.claim(limit)
        claim, refused = self._delivered(queue, path, feed, taken, settings, asked_at)
        if refused and taken.link is not None:
            feed.settle_soon(taken.link, refused)  # not here, where the caller may give up what is delivered
        return claim

    def _delivered(
        self, queue: str, path: Path, feed: Feed, taken: Taken, settings: QueueSettings, asked_at: float
    ) -> tuple[Claim, list[tuple[Arrived, Outcome]]]:
        """Return what was taken as a claim, and what is not delivered, each with its outcome. On any thread."""
        token = Receipts.new_token()
        most = settings.max_deliveries if self._places.knows_deliveries else math.inf
        now, age, deliveries = self._clock.now(), 0.0, []
        refused: list[tuple[Arrived, Outcome]] = []
        for one in taken.messages:
            held = self._hold(queue, path, one, taken.link, feed, settings.lock)
            since = asked_at - (held.ends_at - settings.lock)
            found = held.received
            # The service counts the deliveries of a copy anew.
            died = None if path.is_dead else found_dead(found.count, found.notes, most, now, is_expired=False)
            if died is not None:
                refused.append((one, rejected(*buried(found, died, now))))
            elif since > settings.lock / 2:  # this process was suspended, perhaps
                refused.append((one, RELEASED))
            else:
                age = max(age, since)
                deliveries.append(self._receipts.add(found.delivery(queue, token, is_dead=path.is_dead), held))
        self._receipts.expire()
        return Claim(tuple(deliveries), 0.0 if taken.may_be_more or refused else None, (), age), refused

    def _hold(self, queue: str, path: Path, one: Arrived, link: ReceiveLink | None, feed: Feed, lock: float) -> Held:
        found = received(queue, one.message)
        began = one.asked_at
        if found.locked_until > 0.0:
            if self._places.may_read:  # else the lock's length is not known
                self._clock.learn(found.locked_until - lock, one.asked_at)
            began = feed.times.began(found.locked_until, one.asked_at, one.at)
            feed.times.learn(found.locked_until, one.asked_at, one.at)
        return Held(queue, path, one.token, found, one.message, began + lock, one, link)

    async def receive_deferred(self, queue: str, sequences: list[int]) -> Claim:
        """Claim deferred messages, each by a request of its own: one that is missing must not refuse the others."""
        path = await self._places.path_of(queue)
        if await self._places.has_sessions(queue):
            raise ConfigError(
                f"deferred messages of {queue!r} belong to sessions, and Service Bus gives them only under the lock of "
                "theirs; abandon them with a delay instead"
            )
        settings = await self._places.settings(queue)
        asked_at = self._namespace.clock.now()
        token = Receipts.new_token()

        got: list[Delivery] = []

        async def ask(sequence: int) -> None:
            body = {"sequence-numbers": array_of_longs([sequence]), "receiver-settle-mode": uint_of(1)}
            try:
                answer = received_in(await self._namespace.ask(path, "receive-by-sequence-number", body))
            except Refused as refused:
                if refused.condition in LOST:
                    return
                raise
            for message, lock_token in answer:
                found = received(queue, message)
                held = Held(queue, path, lock_token, found, message, asked_at + settings.lock)
                got.append(self._receipts.add(found.delivery(queue, token), held))

        try:
            answers = await asyncio.gather(*map(ask, sequences), return_exceptions=True)
        except asyncio.CancelledError:
            self._tasks.spawn(self._return_deferred(path, got))
            raise
        if failed := [one for one in answers if isinstance(one, BaseException)]:
            await self._return_deferred(path, got)  # the caller gets nothing, and asks for all of them again
            raise failed[0]
        order = {sequence: place for place, sequence in enumerate(sequences)}
        return Claim(tuple(sorted(got, key=lambda one: order[one.sequence])))

    async def _return_deferred(self, path: Path, got: list[Delivery]) -> None:
        """Give deferred messages back that no caller gets."""
        for one in got:
            with suppress(*FAILURES):
                held = self._receipts.forget(one)
                body = {"disposition-status": "abandoned", "lock-tokens": array_of([held.token] if held else [])}
                await self._namespace.ask(path, "update-disposition", body)

    # --- sessions ---

    async def accept(self, queue: str, session: str | None) -> SessionLock | NoSession:
        """Lock a session; if none is free, begin to wait for one that is, for those that wait for hints."""
        answer = await self._sessions.accept(queue, session)
        if isinstance(answer, NoSession) and session is None and self._feeds.of(queue).listeners:
            self._sessions.wait(queue, partial(self._notifier.notify, queue))
        return answer

    async def unlock(self, answer: SessionLock | NoSession) -> None:
        """Unlock a session that nobody has taken."""
        if isinstance(answer, SessionLock):
            await self._sessions.release(answer)

    async def receive_session(self, lock: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        held = self._receipts.find_session(lock)
        if held is None:
            await self._sessions.expire(lock)
            return LAPSED
        wait = held.blocked_until - self._namespace.clock.now()
        if wait > 0:
            return Claim((), wait)
        try:
            messages = await self._sessions.claim(held, limit)
        except (Refused, Disconnected):
            if not held.is_lost:
                raise
            await self._sessions.expire(lock)
            return LAPSED
        # The service says by detaching the link that a lock is over, which may come later than an empty answer.
        if not messages and isinstance(await self._sessions.ask(lock, "get-session-state"), Lapsed):
            return LAPSED
        deliveries = []
        for one in messages:
            found = received(lock.queue, one.message)
            kept = Held(lock.queue, held.path, one.token, found, one.message, math.inf, one, held.link, held)
            deliveries.append(self._receipts.add(found.delivery(lock.queue, lock.token), kept))
            held.delivered[found.sequence] = kept
        return Claim(tuple(deliveries))

    async def put_back(self, answer: Claim | Lapsed) -> None:
        """Let the next claim of a session take what nobody has taken, first and in order: its lock is the session's."""
        if isinstance(answer, Lapsed):
            return
        for one in reversed(answer.deliveries):
            held = self._receipts.known(one)
            if held is not None and held.arrived is not None and held.link is not None:
                self._receipts.forget(one)
                held.link.ready.appendleft(held.arrived)

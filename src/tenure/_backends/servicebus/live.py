"""Live messages: peek, purge and statistics, as far as Service Bus shows them: it doesn't show which are locked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tenure._backends.servicebus.administration import Administration, NoRights
from tenure._backends.servicebus.client import LOST, Namespace
from tenure._backends.servicebus.codec import array_of, array_of_longs, received_in, uint_of
from tenure._backends.servicebus.driver import Refused
from tenure._backends.servicebus.feeds import Feeds
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.looking import ACTIVE, DEFERRED, SCHEDULED, looked_at
from tenure._backends.servicebus.message_format import Received
from tenure._backends.servicebus.names import Path
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.receipts import Held, Receipts
from tenure._backends.servicebus.removal import Source, remove, renew
from tenure._backends.servicebus.sessions import Sessions
from tenure._queue.broker import LiveSelection, NoSession
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import STATES, LiveMessage, State, Stats, live_message_of
from tenure._runtime.remote_clock import RemoteClock

LOOKED_AT = 1_000
"""Messages that statistics look at; of more, they take the service's own counts."""

CHUNK = 100


class LiveMessages:
    """The live messages of every queue. All of it belongs to the library's thread."""

    def __init__(
        self,
        namespace: Namespace,
        places: Places,
        receipts: Receipts,
        sessions: Sessions,
        feeds: Feeds,
        administration: Administration,
        clock: RemoteClock,
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._administration = administration
        self._receipts = receipts
        self._sessions = sessions
        self._clock = clock
        self._feeds = feeds

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages in order of sequence. One that another process has locked is shown as ready."""
        path = await self._places.existing(queue)
        locked = self._receipts.locked(queue)
        shown: list[LiveMessage] = []
        async for found, _ in looked_at(self._namespace, path, queue, which.after):
            if len(shown) >= limit:
                break
            if self._is_over(found, locked):
                continue
            state = state_of(found, locked)
            if which.wants(state) and fits(which, found):
                shown.append(self._shown(queue, found, state, locked))
        return shown

    def _shown(self, queue: str, found: Received, state: State, locked: dict[int, Held]) -> LiveMessage:
        delivery = found.delivery(queue, "")
        if state != "locked":
            delivery = delivery._replace(delivery_count=found.count)
        held = locked.get(found.sequence)
        until = held.received.locked_until if held is not None else None
        return live_message_of(delivery, state, locked_until=until, due_at=found.due_at if state == "delayed" else None)

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*: those that others have locked count as ready."""
        path = await self._places.existing(queue)
        if path is None:
            return Stats()
        locked = self._receipts.locked(queue)
        counts = dict.fromkeys(STATES, 0)
        oldest: float | None = None
        seen = 0
        async for found, _ in looked_at(self._namespace, path, queue):
            seen += 1
            if self._is_over(found, locked):
                continue
            state = state_of(found, locked)
            counts[state] += 1
            if state == "ready":
                oldest = found.sent_at if oldest is None else min(oldest, found.sent_at)
            if seen >= LOOKED_AT:
                break
        dead = await self._dead(queue, path)
        if seen >= LOOKED_AT:
            await self._count_all(path, counts)
        age = 0.0 if oldest is None else max(0.0, self._clock.now() - oldest)
        return Stats(counts["ready"], counts["locked"], counts["delayed"], counts["deferred"], dead, age)

    def _is_over(self, found: Received, locked: dict[int, Held]) -> bool:
        """Return whether a message that is still shown has expired: the service looks when messages are received."""
        if found.state != ACTIVE or found.ttl is None or found.sequence in locked:
            return False
        return found.expires_at <= self._clock.now()

    async def _dead(self, queue: str, path: Path) -> int:
        if self._administration.may_manage is not False:
            try:
                found = await self._administration.counts(path)
                return 0 if found is None else found.dead
            except NoRights:
                pass
        count = 0
        async for _ in looked_at(self._namespace, path._replace(is_dead=True), dead_letters_of(queue)):
            count += 1
            if count >= LOOKED_AT:
                break
        return count

    async def _count_all(self, path: Path, counts: dict[State, int]) -> None:
        """Put the service's own counts in place of those looked at; without the right to them, these stay too low."""
        if self._administration.may_manage is False:
            return
        try:
            found = await self._administration.counts(path)
        except NoRights:
            return
        if found is not None:
            counts["delayed"] = found.scheduled
            counts["ready"] = max(0, found.active - counts["locked"] - counts["deferred"])

    async def purge(self, queue: str, which: LiveSelection, *, dry_run: bool) -> int:
        """Remove live messages: scheduled ones are cancelled, deferred and ready ones are received and completed."""
        path = await self._places.existing(queue)
        if path is None:
            return 0
        began = self._clock.now()
        count = 0
        aside: dict[int, list[int]] = {SCHEDULED: [], DEFERRED: []}
        sessions: list[str] = []
        locked = self._receipts.locked(queue)
        highest = 0
        async for found, _ in looked_at(self._namespace, path, queue, which.after):
            state = state_of(found, locked)
            if state == "locked" or not which.wants(state) or not fits(which, found):
                continue
            if found.enqueued_at > began + 1.0:
                continue
            if found.state in aside:
                aside[found.state].append(found.sequence)
                continue
            highest = found.sequence
            if found.session is not None and found.session not in sessions:
                sessions.append(found.session)
        if highest:
            if await self._places.has_sessions(queue):
                for name in sessions:
                    count += await self._purge_session(queue, name, which, highest, dry_run=dry_run)
            else:
                feed = self._feeds.of(queue)

                async def claim(most: int) -> tuple[ReceiveLink | None, list[Arrived]]:
                    taken = await feed.claim_certainly(most)
                    return taken.link, taken.messages

                renewing = partial(renew, self._namespace, path)
                source = Source(queue, claim, renewing, self._places.lock_known(queue), highest)
                count += await remove(source, _selected(which, highest), dry_run=dry_run)
        if dry_run:
            return count + sum(map(len, aside.values()))
        count += await self._cancel(path, aside[SCHEDULED])
        return count + await self._drop_deferred(path, aside[DEFERRED])

    async def _purge_session(self, queue: str, name: str, which: LiveSelection, highest: int, *, dry_run: bool) -> int:
        ours = self._receipts.session_named(queue, name)
        lock = None if ours is not None else await self._sessions.accept(queue, name)
        if isinstance(lock, NoSession):
            return 0  # locked to another process, and so are its messages
        held = ours if lock is None else self._receipts.find_session(lock)
        if held is None:
            return 0

        async def claim(most: int) -> tuple[ReceiveLink | None, list[Arrived]]:
            return held.link, await self._sessions.claim(held, most)

        async def renew_session(_: list[Arrived]) -> None:
            await self._namespace.ask(held.path, "renew-session-lock", {"session-id": name}, held.link)

        try:
            source = Source(queue, claim, renew_session, self._places.lock_known(queue), highest)
            return await remove(source, _selected(which, highest), dry_run=dry_run)
        finally:
            if lock is not None:
                await self._sessions.release(lock)

    async def _cancel(self, path: Path, sequences: list[int]) -> int:
        count = 0
        for chunk in _chunks(sequences):
            for portion in [chunk] if len(chunk) == 1 else [chunk, *([one] for one in chunk)]:
                try:
                    body = {"sequence-numbers": array_of_longs(portion)}
                    await self._namespace.ask(path, "cancel-scheduled-message", body)
                except Refused as refused:
                    if refused.condition not in LOST:
                        raise
                    continue  # one of them is due by now: one by one
                count += len(portion)
                if portion is chunk:
                    break
        return count

    async def _drop_deferred(self, path: Path, sequences: list[int]) -> int:
        count = 0
        for sequence in sequences:
            try:
                body = {"sequence-numbers": array_of_longs([sequence]), "receiver-settle-mode": uint_of(1)}
                found = received_in(await self._namespace.ask(path, "receive-by-sequence-number", body))
                tokens = array_of([token for _, token in found])
                settled = {"disposition-status": "completed", "lock-tokens": tokens}
                await self._namespace.ask(path, "update-disposition", settled)
            except Refused as refused:
                if refused.condition not in LOST:
                    raise
                continue
            count += 1
        return count


def state_of(found: Received, locked: dict[int, Held]) -> State:
    """Return where a message is, as far as it is known here."""
    if found.sequence in locked:
        return "locked"
    if found.state == ACTIVE:
        return "ready"
    return "deferred" if found.state == DEFERRED else "delayed"


def fits(which: LiveSelection, found: Received) -> bool:
    """Whether a message is meant, by everything but its state."""
    return which.fits(found.sequence, lambda: found.id, found.session, found.sent_at)


def _selected(which: LiveSelection, highest: int) -> Callable[[Received], bool]:
    return lambda found: found.sequence <= highest and fits(which, found)


def _chunks(sequences: list[int]) -> list[list[int]]:
    return [sequences[at : at + CHUNK] for at in range(0, len(sequences), CHUNK)]

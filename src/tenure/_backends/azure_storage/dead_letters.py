"""Dead letters: a second queue for each queue, as in Azure Functions.

Azure has no transactions. So a verdict first writes the death into the message itself, and renews its lock; then a copy
is put among the dead letters, and the message is removed. From the first step on, the message is not delivered any
more: after a crash in between, the next process that receives it finishes the move. So nothing is lost, and no message
that was completed is dead-lettered. The copy may be put twice; copies of one message are equal in all that a consumer
gets of it, and are shown, redriven and purged as one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from tenure._backends.azure_storage.background import Background
from tenure._backends.azure_storage.client import Account, LoopConnections, unless_refused
from tenure._backends.azure_storage.message_format import Properties, encode_to_fit
from tenure._backends.azure_storage.receipts import Receipts
from tenure._backends.azure_storage.records import (
    FoundMessage,
    HeldMessage,
    dead_letter_properties,
    dead_message,
    is_selected_dead,
)
from tenure._backends.azure_storage.removal import MOVE_LOCK, drop, remove_selected
from tenure._backends.azure_storage.requests import NOT_OURS, PAGE, client_of, count, peek, put
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._queue.broker import EVERYTHING, Selection
from tenure._queue.delivery_ends import Outcome
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage, Died
from tenure._queue.note_headers import UNKNOWN
from tenure._queue.verdicts import LAPSED, Lapsed, Settled
from tenure._runtime.notifier import Notifier
from tenure.errors import Unavailable

Request: TypeAlias = Callable[[LoopConnections], Coroutine[Any, Any, None]]

DEATHS_MAX = 10_000
"""The newest deaths of a queue that are kept at most until a claim reports them."""


class DeadLetters:
    """The dead letters of every queue of the account."""

    def __init__(
        self, account: Account, clock: ServiceClock, receipts: Receipts, background: Background, notifier: Notifier
    ) -> None:
        self._account = account
        self._clock = clock
        self._receipts = receipts
        self._background = background
        self._notifier = notifier
        self._deaths: dict[str, deque[Died]] = {}  # by queue: found by a claim, and not reported yet

    async def move(
        self,
        connections: LoopConnections,
        held: HeldMessage,
        properties: Properties,
        body: bytes,
        *,
        renews: bool = False,
    ) -> Settled | Lapsed:
        """Move a message to the dead letters. *renews* first renews its lock, which proves that it still holds."""
        if renews and not await self._decide(connections, held, properties, body):
            return LAPSED
        dead = dead_letters_of(held.queue)
        if held.copy is None:
            text = encode_to_fit(held.text, body, properties) or held.text
            held.copy = await put(connections, queue=dead, text=text, delay=0)
        answer = await self._receipts.delete(connections, held)
        if isinstance(answer, Lapsed):  # another process has received the message, and settles it
            client = client_of(connections, dead)
            await unless_refused(client.delete_message(held.copy.id, held.copy.pop_receipt), *NOT_OURS)
        self._notifier.notify(dead)
        return answer

    async def _decide(
        self, connections: LoopConnections, held: HeldMessage, properties: Properties, body: bytes
    ) -> bool:
        """Write the death into the message and renew its lock; False if the lock is lost."""
        text = encode_to_fit(held.text, body, replace(properties, moving=True))  # None if there is no room for it
        if await self._receipts.update(connections, held, MOVE_LOCK, text) is None:
            return False
        if text is not None:
            held.dead = properties
        return True

    # --- messages found dead when they are received ---

    def move_found(self, held: HeldMessage, one: FoundMessage, outcome: Outcome | None) -> Request:
        """Return the request that moves a message that dies with this *outcome*, or whose move was begun already."""
        return partial(self._move_found, held=held, one=one, outcome=outcome)

    def start(self, moves: Sequence[Request]) -> list[asyncio.Task[None]]:
        """Begin *moves* in the background; return the task to wait for, if there are any."""

        async def move_all() -> None:
            with suppress(Unavailable):  # when its lock has ended, it is received and moved again
                await self._account.run_all(moves)

        if not moves:
            return []
        task = asyncio.get_running_loop().create_task(move_all(), name="tenure-azure-dead-letters")
        self._background.keep(task)
        return [task]

    async def _move_found(
        self, connections: LoopConnections, held: HeldMessage, one: FoundMessage, outcome: Outcome | None
    ) -> None:
        if one.properties.moving:
            await self._finish(connections, held, one)
            return
        assert outcome is not None
        assert outcome.cause is not None
        dead = dead_letter_properties(one, held.properties, outcome, one.now)
        answer = await self.move(connections, held, dead, one.body)
        if isinstance(answer, Settled):
            self._record_death(held.queue, Died(one.sequence, one.id, outcome.deliveries, outcome.cause.reason))

    async def _finish(self, connections: LoopConnections, held: HeldMessage, one: FoundMessage) -> None:
        """Finish a move that another process, or a verdict without an answer, has begun."""
        dead = replace(one.properties, moving=False)
        copies = await peek(connections, queue=dead_letters_of(held.queue))
        if any(_is_same_death(copy, one) for copy in copies):
            answer = await self._receipts.delete(connections, held)
        else:
            answer = await self.move(connections, held, dead, one.body)
        if isinstance(answer, Settled):  # else the process that began it has finished meanwhile, and reports it
            self._record_death(held.queue, Died(one.sequence, one.id, dead.deliveries, dead.reason or UNKNOWN))

    def _record_death(self, queue: str, died: Died) -> None:
        self._deaths.setdefault(queue, deque(maxlen=DEATHS_MAX)).append(died)

    def take_deaths(self, queue: str) -> Sequence[Died]:
        """Return the deaths that claims of this process have found since the last call."""
        deaths, taken = self._deaths.get(queue), []
        with suppress(IndexError):  # moves on another loop may add to it meanwhile
            while deaths:
                taken.append(deaths.popleft())
        return tuple(taken)

    # --- peek, redrive, purge ---

    async def peek(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters: of the 32 that Azure shows without locking."""
        found = await self._account.run(partial(peek, queue=dead_letters_of(queue)))
        which = which.at(self._clock.now())
        letters = {one.key: one for one in found if is_selected_dead(one, which)}
        return [dead_message(queue, letters[key]) for key in sorted(letters)[:limit]]

    async def redrive(self, queue: str, which: Selection, limit: int | None, *, dry_run: bool, to: str | None) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""
        if dry_run:
            shown = len(await self.peek(queue, which, PAGE))
            if which == EVERYTHING:
                shown = max(shown, await self._account.run(partial(count, queue=dead_letters_of(queue))))
            return shown if limit is None else min(shown, limit)

        async def put_back(connections: LoopConnections, one: FoundMessage) -> None:
            properties = replace(
                one.properties.redriven(),
                id=one.id,
                sequence=one.sequence if to is None else 0,
                enqueued_at=one.enqueued_at if to is None else 0.0,
                ttl=None,
                uncounted=0,
            )
            text = one.raw.content or ""
            await put(connections, queue=to or queue, text=encode_to_fit(text, one.body, properties) or text, delay=0)

        moved = await self._remove(queue, which, limit, put_back)
        self._notifier.notify(to or queue)
        return moved

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._remove(queue, which, limit, drop)

    async def _remove(
        self,
        queue: str,
        which: Selection,
        limit: int | None,
        act: Callable[[LoopConnections, FoundMessage], Awaitable[None]],
    ) -> int:
        def is_selected(one: FoundMessage) -> bool:
            return is_selected_dead(one, which.at(self._clock.now()))

        return await remove_selected(self._account, self._clock, dead_letters_of(queue), is_selected, limit, act)


def _is_same_death(copy: FoundMessage, one: FoundMessage) -> bool:
    """Return whether a dead letter is what the move of *one* has put: another program may write an equal message."""
    died, dies = copy.properties, one.properties
    return copy.key == one.key and (died.reason, died.dead_at) == (dies.reason, dies.dead_at)

"""Dead letters: a queue beside the queue, as with Azure Functions.

Azure has no transactions. A message is put among the dead letters first and removed then, under a lock taken anew: a
crash in between leaves it in both places, never in none.
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
    with_expired_attempts,
)
from tenure._backends.azure_storage.removal import MOVE_LOCK, drop, remove_selected
from tenure._backends.azure_storage.requests import NOT_OURS, PAGE, client_of, count, peek, put
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._queue.broker import EVERYTHING, Selection
from tenure._queue.message import (
    EXPIRED,
    EXPIRED_DESCRIPTION,
    LAPSED,
    MAX_DELIVERIES,
    DeadMessage,
    Died,
    Lapsed,
    Settled,
    dead_letters_of,
    exhausted_description,
)
from tenure._runtime.notifier import Notifier
from tenure.errors import Unavailable

Request: TypeAlias = Callable[[LoopConnections], Coroutine[Any, Any, None]]

DEATHS_MAX = 10_000
"""How many deaths are remembered for a queue until a claim reports them."""


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
        self._deaths: dict[str, deque[Died]] = {}  # by queue: by time, and not yet reported by a claim

    async def move(
        self,
        connections: LoopConnections,
        held: HeldMessage,
        properties: Properties,
        body: bytes,
        *,
        renews: bool = False,
    ) -> Settled | Lapsed:
        """Move a message to the dead letters. *renews* takes its lock once more, which proves that it is ours."""
        if renews and await self._receipts.update(connections, held, MOVE_LOCK) is None:
            return LAPSED
        dead = dead_letters_of(held.queue)
        text = encode_to_fit(held.text, body, properties) or held.text
        copy = await put(connections, queue=dead, text=text, delay=0)
        answer = await self._receipts.delete(connections, held)
        if isinstance(answer, Lapsed):  # another process has received it, so it is not dead
            client = client_of(connections, dead)
            await unless_refused(client.delete_message(copy.id, copy.pop_receipt), *NOT_OURS)
        self._notifier.notify(dead)
        return answer

    # --- messages found dead when they are received ---

    def move_found(self, held: HeldMessage, one: FoundMessage) -> Request:
        """Return the request that moves a message that has expired, or was delivered too often before this time."""
        return partial(self._move_found, held=held, one=one)

    def start(self, moves: Sequence[Request]) -> list[asyncio.Task[None]]:
        """Begin *moves* in the background; return the task to wait for, if there is any."""

        async def move_all() -> None:
            with suppress(Unavailable):  # when its lock has ended, it is received and moved again
                await self._account.ask_all(moves)

        if not moves:
            return []
        task = asyncio.get_running_loop().create_task(move_all(), name="tenure-azure-dead-letters")
        self._background.keep(task)
        return [task]

    async def _move_found(self, connections: LoopConnections, held: HeldMessage, one: FoundMessage) -> None:
        deliveries = one.count - 1
        reason = EXPIRED if one.is_expired else MAX_DELIVERIES
        description = EXPIRED_DESCRIPTION if one.is_expired else exhausted_description(deliveries)
        properties = with_expired_attempts(held.properties, deliveries, one.now)
        dead = dead_letter_properties(one, properties, reason, description, deliveries, one.now)
        answer = await self.move(connections, held, dead, one.body)
        if isinstance(answer, Settled):
            died = Died(one.sequence, one.id, deliveries, reason)
            self._deaths.setdefault(held.queue, deque(maxlen=DEATHS_MAX)).append(died)

    def take_deaths(self, queue: str) -> Sequence[Died]:
        """Return the deaths by time that were found here since the last call."""
        deaths, taken = self._deaths.get(queue), []
        with suppress(IndexError):  # moves on another loop may add to it meanwhile
            while deaths:
                taken.append(deaths.popleft())
        return tuple(taken)

    # --- peek, redrive, purge ---

    async def peek(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters: of the 32 that Azure shows without locking."""
        found = await self._account.ask(partial(peek, queue=dead_letters_of(queue)))
        which = which.at(self._clock.now())
        letters = sorted((one for one in found if is_selected_dead(one, which)), key=lambda one: one.sequence)
        return [dead_message(queue, one) for one in letters[:limit]]

    async def redrive(self, queue: str, which: Selection, limit: int | None, *, dry_run: bool, to: str | None) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""
        if dry_run:
            shown = len(await self.peek(queue, which, PAGE))
            if which == EVERYTHING:
                shown = max(shown, await self._account.ask(partial(count, queue=dead_letters_of(queue))))
            return shown if limit is None else min(shown, limit)

        async def put_back(connections: LoopConnections, one: FoundMessage) -> None:
            properties = replace(
                one.properties,
                id=one.id,
                sequence=one.sequence if to is None else 0,
                enqueued_at=one.enqueued_at if to is None else 0.0,
                before=len(one.properties.history),
                ttl=None,
                uncounted=0,
                deliveries=0,
                reason=None,
                description="",
                dead_at=0.0,
                error=None,
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

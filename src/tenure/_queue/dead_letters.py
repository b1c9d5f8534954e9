"""The dead letters of a queue: look at them, receive them, send them back, remove them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from tenure._queue.broker import EVERYTHING, Claim, PagingBroker, Selection
from tenure._queue.checks import COUNT_MAX, check_count, check_name, check_sequences
from tenure._queue.context import QueueContext
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage
from tenure._queue.page_size import PageSize
from tenure._queue.received import Message
from tenure._queue.selections import select_dead

PAGE = 100
"""The dead letters that a filter is shown at once, at most."""

Filter = Callable[[DeadMessage], bool]
"""``filter(dead)``: tells whether a dead letter is meant."""


class DeadLetters:
    """A queue's dead letters: ``queue.dead_letters``. None leaves by itself, unless ``dead_retention`` is set.

    The conditions of :meth:`peek`, :meth:`redrive` and :meth:`purge` are the same, and all that are given must hold:
    ``ids`` and ``sequences`` name letters, ``reason`` is why they died, ``dead_before`` a moment in Unix seconds,
    and ``where`` a function that is called with each :class:`DeadMessage`.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self.name: str = dead_letters_of(context.name)

    def __repr__(self) -> str:
        return f"<DeadLetters of {self._context.name!r}>"

    async def peek(
        self,
        limit: int = 100,
        *,
        ids: Collection[str] | None = None,
        sequences: Collection[int] | None = None,
        reason: str | None = None,
        dead_before: float | None = None,
        after: int = 0,
        where: Filter | None = None,
    ) -> list[DeadMessage]:
        """Return up to *limit* dead letters in order of their sequence, without locking them.

        Args:
            limit: The most to return.
            ids, sequences, reason, dead_before, where: Which ones; see the class.
            after: Begin behind this sequence.
        """
        check_count("limit", limit)
        check_sequences("after", [after])
        which = replace(select_dead(ids, sequences, reason, dead_before), after=after)
        if where is None:
            return list(await self._context.broker.peek_dead(self._context.name, which, limit))
        found: list[DeadMessage] = []
        async with aclosing(self._all(which)) as pages:
            async for page in pages:
                found = sorted([*found, *filter(where, page)], key=lambda one: one.sequence)[:limit]
                if len(found) == limit and not self._is_unordered:
                    break
        return found

    async def receive(self, max: int = 1, *, wait: float = 0.0) -> list[Message]:  # noqa: A002  # as Queue.receive
        """Lock up to *max* dead letters and return them; to ``complete()`` one removes it for good.

        Args:
            max: The most to return.
            wait: How many seconds to wait for the first.
        """
        check_count("max", max)
        context = self._context
        await context.ready()

        async def look() -> tuple[list[Message] | None, float | None]:
            claim = await context.claim(lambda: context.broker.receive(self.name, max, context.settings.lock))
            assert isinstance(claim, Claim)
            return [Message(one, context) for one in claim.deliveries] or None, claim.due_in

        return await context.wait_for(look, wait, self.name) or []

    async def redrive(
        self,
        *,
        ids: Collection[str] | None = None,
        sequences: Collection[int] | None = None,
        reason: str | None = None,
        dead_before: float | None = None,
        where: Filter | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        to: str | None = None,
    ) -> int:
        """Put dead letters back into the queue, or into another one, to be delivered anew; return how many.

        They keep their ids and their history. No letter is lost: one moves to another queue in one step where the store
        has transactions; elsewhere (Azure, a Redis Cluster) it is written there first, and after a failure in between
        it is in both places.

        Args:
            ids, sequences, reason, dead_before, where: Which ones; see the class. All, if nothing is given.
            limit: The most to put back, oldest first.
            dry_run: Only count them.
            to: The name of the queue to put them into, with the settings that it has; the one they come from, if unset.
        """
        if limit is not None:
            check_count("limit", limit)
        if to is not None:
            to = check_name(to, "to", optional=True)
        which = await self._chosen(select_dead(ids, sequences, reason, dead_before), where, limit)
        to = None if to == self._context.name else to
        return await self._context.broker.redrive(self._context.name, which, limit, dry_run=dry_run, to=to)

    async def purge(
        self,
        *,
        ids: Collection[str] | None = None,
        sequences: Collection[int] | None = None,
        reason: str | None = None,
        dead_before: float | None = None,
        where: Filter | None = None,
        limit: int | None = None,
    ) -> int:
        """Remove dead letters for good; return how many.

        Args:
            ids, sequences, reason, dead_before, where: Which ones; see the class. All, if nothing is given.
            limit: The most to remove, oldest first.
        """
        if limit is not None:
            check_count("limit", limit)
        which = await self._chosen(select_dead(ids, sequences, reason, dead_before), where, limit)
        return await self._context.broker.purge(self._context.name, which, limit)

    async def _chosen(self, which: Selection, where: Filter | None, limit: int | None) -> Selection:
        if where is None:
            return which
        meant: list[tuple[int, str]] = []
        async with aclosing(self._all(which)) as pages:
            async for page in pages:
                meant += [(letter.sequence, letter.id) for letter in page if where(letter)]
                if limit is not None and len(meant) >= limit and not self._is_unordered:
                    break
        meant = sorted(meant)[:limit]
        # By both: where notes of others are believed, two letters may have one sequence.
        return replace(EVERYTHING, sequences=frozenset(one for one, _ in meant), ids=frozenset(one for _, one in meant))

    @property
    def _is_unordered(self) -> bool:
        """Whether a later dead letter may have a lower sequence, or an equal one."""
        return self._context.broker.traits.order == "impossible"

    async def _all(self, which: Selection) -> AsyncGenerator[Sequence[DeadMessage], None]:
        """Yield those that *which* selects, page by page; no page is held while the next one is read."""
        broker, name = self._context.broker, self._context.name
        if broker.traits.dead_pages:
            async with aclosing(cast(PagingBroker, broker).dead_pages(name, which)) as pages:
                async for page in pages:
                    yield page
                    del page
        elif self._is_unordered:
            yield await broker.peek_dead(name, which, COUNT_MAX)
        else:
            size = PageSize(PAGE)
            while shown := await broker.peek_dead(name, which, size.messages):
                size.learn(len(one.body) for one in shown)
                which = replace(which, after=shown[-1].sequence)
                yield shown
                del shown  # before the next one is read

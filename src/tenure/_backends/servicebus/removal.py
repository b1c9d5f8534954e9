"""Removal of selected messages. Service Bus can't select: messages are received in turn, and the others handed back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from tenure._backends.servicebus.client import GONE, LOST, Namespace
from tenure._backends.servicebus.codec import array_of
from tenure._backends.servicebus.driver import ACCEPTED, FAILURES, RELEASED, Outcome, Refused
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.message_format import Received, received
from tenure._backends.servicebus.names import Path
from tenure._queue.checks import INT_MAX
from tenure._queue.page_size import PageSize
from tenure.errors import Unavailable

ROUND = 200
"""Messages that are received and looked at together, at most."""

Act = Callable[[list[tuple[Received, Arrived]], Callable[[int], None]], Awaitable[None]]
"""What is done with the selected messages before they are removed. It tells for how many more of them it is done."""


@dataclass(frozen=True, slots=True)
class Source:
    """The messages among which some are selected."""

    queue: str
    claim: Callable[[int], Awaitable[tuple[ReceiveLink | None, list[Arrived]]]]
    """Lock so many more."""
    renew: Callable[[list[Arrived]], Awaitable[None]]
    """Extend locks."""
    lock: float
    """Their length in seconds."""
    highest: int = INT_MAX
    """The sequence of the last message that is looked at."""


async def remove(
    source: Source,
    is_selected: Callable[[Received], bool],
    limit: int | None = None,
    act: Act | None = None,
    *,
    dry_run: bool = False,
) -> int:
    """Receive the messages of *source*; call *act* for the selected ones and remove them, hand back the others.

    The others stay locked until all were looked at: handed back earlier, they would be received again before the rest.
    Return how many were removed; or would have been, on a dry run.
    """
    count, seen, size = 0, set[int](), PageSize(ROUND)
    others: list[tuple[ReceiveLink, Arrived]] = []
    renewed_at = time.monotonic()
    try:
        while limit is None or count < limit:
            link, page = await source.claim(size.messages)
            if link is None or not page:
                break
            size.learn(one.size for one in page)
            found = [(received(source.queue, one.message), one) for one in page]
            chosen = [(one, arrived) for one, arrived in found if one.sequence not in seen and is_selected(one)]
            chosen = chosen if limit is None else chosen[: limit - count]
            if dry_run:
                count, chosen = count + len(chosen), []
            taken = {arrived.delivery_id for _, arrived in chosen}
            others += [(link, arrived.emptied()) for _, arrived in found if arrived.delivery_id not in taken]
            count += await _remove(link, chosen, act, others)
            sequences = {one.sequence for one, _ in found}
            if sequences & seen or min(sequences) > source.highest:
                break  # those that come a second time have lost their locks: no more can be kept
            seen |= sequences
            if time.monotonic() - renewed_at > source.lock / 3:
                renewed_at = time.monotonic()
                await source.renew([arrived for _, arrived in others])
        return count
    finally:
        for link in {one for one, _ in others}:  # a failure must not keep the rest locked
            with suppress(*FAILURES, Unavailable):
                await _settle(link, [arrived for one, arrived in others if one is link], RELEASED)


async def renew(namespace: Namespace, path: Path, messages: list[Arrived]) -> None:
    """Extend the locks of messages of an entity; those that are over come again, which is noticed."""
    for start in range(0, len(messages), ROUND):
        tokens = [one.token for one in messages[start : start + ROUND]]
        try:
            await namespace.ask(path, "renew-lock", {"lock-tokens": array_of(tokens)})
        except Refused as refused:
            if refused.condition in LOST:  # one of them is over: each by itself
                asked = [namespace.ask(path, "renew-lock", {"lock-tokens": array_of([one])}) for one in tokens]
                await asyncio.gather(*asked, return_exceptions=True)
        except FAILURES:
            pass


async def _remove(
    link: ReceiveLink,
    chosen: list[tuple[Received, Arrived]],
    act: Act | None,
    others: list[tuple[ReceiveLink, Arrived]],
) -> int:
    """Act for *chosen*, and remove them; if that fails on the way, only those for which it is done."""
    messages = [arrived for _, arrived in chosen]
    if act is None or not chosen:
        return await _settle(link, messages, ACCEPTED)
    done = 0

    def more(number: int) -> None:
        nonlocal done
        done += number

    try:
        await act(chosen, more)
    except BaseException:
        others += [(link, one) for one in messages[done:]]
        await _settle(link, messages[:done], ACCEPTED)
        raise
    return await _settle(link, messages, ACCEPTED)


async def _settle(link: ReceiveLink, messages: list[Arrived], outcome: Outcome) -> int:
    """Settle *messages*; return how many were still ours."""
    errors = [error for error in await link.settle([(one, outcome) for one in messages]) if error is not None]
    for error in errors:
        if not (isinstance(error, Refused) and error.condition in GONE):
            raise error if outcome is ACCEPTED else Unavailable(str(error))
    return len(messages) - len(errors)

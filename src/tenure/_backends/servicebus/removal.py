"""Removal of selected messages. Service Bus can't select: messages are received in turn, and the others handed back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tenure._backends.servicebus.client import LOST
from tenure._backends.servicebus.driver import ACCEPTED, RELEASED, Outcome, Refused
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.message_format import Received, received
from tenure.errors import Unavailable

ROUND = 200
"""Messages that are received and looked at together."""

Claim = Callable[[int], Awaitable[tuple[ReceiveLink | None, list[Arrived]]]]
Act = Callable[[list[tuple[Received, Arrived]]], Awaitable[None]]


async def nothing(chosen: list[tuple[Received, Arrived]]) -> None:
    """Do nothing before messages are removed."""


async def remove(
    queue: str,
    claim: Claim,
    is_selected: Callable[[Received], bool],
    limit: int | None,
    act: Act = nothing,
    *,
    dry_run: bool = False,
) -> int:
    """Receive all messages of *queue*; call *act* for the selected ones and remove them, hand back the others.

    The others stay locked until all were looked at: handed back earlier, they would be received again before the rest.
    Return how many were removed; or would have been, on a dry run.
    """
    count = 0
    others: list[tuple[ReceiveLink, Arrived]] = []
    try:
        while limit is None or count < limit:
            link, page = await claim(ROUND)
            if link is None or not page:
                break
            found = [(received(queue, one.message), one) for one in page]
            chosen = [(one, arrived) for one, arrived in found if is_selected(one)]
            chosen = chosen if limit is None else chosen[: limit - count]
            taken = {arrived.delivery_id for _, arrived in chosen}
            others += [(link, arrived) for _, arrived in found if arrived.delivery_id not in taken or dry_run]
            if dry_run:
                count += len(chosen)
                continue
            try:
                await act(chosen)
            except BaseException:
                others += [(link, arrived) for _, arrived in chosen]
                raise
            count += await _settle(link, [arrived for _, arrived in chosen], ACCEPTED)
        return count
    finally:
        for link in {one for one, _ in others}:
            await _settle(link, [arrived for one, arrived in others if one is link], RELEASED)


async def _settle(link: ReceiveLink, messages: list[Arrived], outcome: Outcome) -> int:
    """Settle *messages*; return how many were still ours."""
    errors = [error for error in await link.settle([(one, outcome) for one in messages]) if error is not None]
    for error in errors:
        if not (isinstance(error, Refused) and error.condition in LOST):
            raise error if outcome is ACCEPTED else Unavailable(str(error))
    return len(messages) - len(errors)

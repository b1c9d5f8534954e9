"""Removal of selected messages: Azure can't select, so all messages are locked, a round at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from tenure._backends.azure_storage.client import Account, LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.message_format import encode_to_fit
from tenure._backends.azure_storage.records import FoundMessage, Key
from tenure._backends.azure_storage.requests import NOT_OURS, PAGE, client_of, lock_page
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._queue.checks import DEAD_SUFFIX

ROUND = 1_024
"""Messages that are locked and checked at once."""

MOVE_LOCK = 60
"""Seconds for which a message is locked while it is removed, or moved to or from the dead letters."""


async def drop(connections: LoopConnections, one: FoundMessage) -> None:
    """Do nothing before a message is removed."""


async def remove_selected(
    account: Account,
    clock: ServiceClock,
    queue: str,
    is_selected: Callable[[FoundMessage], bool],
    limit: int | None,
    act: Callable[[LoopConnections, FoundMessage], Awaitable[None]],
) -> int:
    """Lock all visible messages of *queue*; call *act* for the selected ones and remove them, unlock the others.

    The others stay locked until all were checked: unlocked earlier, they would be received again before the rest.
    Copies of one dead letter are removed with it, and not counted. Return the number of removed messages.
    """
    count = 0
    others: dict[str, tuple[str, str | None]] = {}  # the receipts, and what is to be written, if anything is

    async def unlock(connections: LoopConnections, one: str) -> None:
        receipt, text = others[one]
        client = client_of(connections, queue)
        await unless_refused(client.update_message(one, receipt, content=text, visibility_timeout=0), *NOT_OURS)

    async def remove(connections: LoopConnections, one: FoundMessage, *, is_copy: bool) -> bool:
        if not is_copy:
            await act(connections, one)
        client = client_of(connections, queue)
        answer = await unless_refused(client.delete_message(one.raw.id, one.raw.pop_receipt), *NOT_OURS)
        return not is_copy and not isinstance(answer, Refused)  # else another process has received or removed it

    try:
        while True:
            found: list[FoundMessage] = []
            while len(found) < ROUND:
                page = await account.run(partial(lock_page, queue=queue, limit=PAGE, seconds=MOVE_LOCK, clock=clock))
                found += page
                if len(page) < PAGE:
                    break
            selected = sorted((one for one in found if is_selected(one)), key=lambda one: one.sequence)
            groups: dict[Key | str, list[FoundMessage]] = {}  # each is a message and its copies
            for one in selected:
                groups.setdefault(one.key if queue.endswith(DEAD_SUFFIX) else str(one.raw.id), []).append(one)
            taken = list(groups.values())[: None if limit is None else limit - count]
            chosen = {one.raw.id for group in taken for one in group}
            # If all were checked before, there are so many that the first locks have ended.
            has_more = len(found) >= ROUND and not all(one.raw.id in others for one in found)
            for one in found:
                if one.raw.id not in chosen:
                    text = None if queue.endswith(DEAD_SUFFIX) else _without_this_delivery(one)
                    others[str(one.raw.id)] = str(one.raw.pop_receipt), text
            count += sum(await account.run_all([partial(remove, one=group[0], is_copy=False) for group in taken]))
            copies = [one for group in taken for one in group[1:]]
            await account.run_all([partial(remove, one=one, is_copy=True) for one in copies])
            if not has_more or count == limit:
                return count
    finally:
        await account.run_all([partial(unlock, one=one) for one in others])


def _without_this_delivery(one: FoundMessage) -> str | None:
    """Return the text with this delivery subtracted from the count, if there is room for it."""
    properties = replace(one.properties, uncounted=one.properties.uncounted + 1)
    return encode_to_fit(one.raw.content or "", one.body, properties)

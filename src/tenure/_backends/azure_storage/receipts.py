"""The locks of this process: pop receipts of messages, and the requests under them.

Azure locks with a *pop receipt*, and each update of a message returns a new one. So a delivery has a token of tenure's,
and the newest receipt is kept here under it: only the process that received a message can renew and settle it.

Azure accepts a late verdict as long as no other process has received the message. tenure doesn't: a lock that has ended
by the local clock, counted from before the request that began it, is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from azure.storage.queue import QueueMessage

from tenure._backends.azure_storage.client import LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.records import HeldMessage
from tenure._backends.azure_storage.requests import NOT_OURS, client_of
from tenure._queue import receipts
from tenure._queue.verdicts import LAPSED, SETTLED, Lapsed, Settled
from tenure._runtime.clock import Clock

T = TypeVar("T")


class Receipts(receipts.Receipts[HeldMessage]):
    """The messages that this process has locked."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._lock = threading.Lock()  # renewals and verdicts come from two threads

    async def make_visible(
        self, connections: LoopConnections, held: HeldMessage, delay: int, text: str | None
    ) -> Settled | Lapsed:
        """Let a message be received again, by any process, after *delay* seconds."""
        return SETTLED if await self.update(connections, held, delay, text, settles=True) else LAPSED

    async def update(
        self,
        connections: LoopConnections,
        held: HeldMessage,
        seconds: int,
        text: str | None = None,
        *,
        settles: bool = False,
    ) -> QueueMessage | None:
        """Set the seconds for which a message is invisible, and its text if given; None if its lock is lost."""
        client = client_of(connections, held.queue)
        asked_at = 0.0

        async def update(receipt: str) -> QueueMessage | Refused:
            nonlocal asked_at
            asked_at = self._clock.now()  # it may be asked for again, with a newer receipt
            return await unless_refused(
                client.update_message(held.message, receipt, content=text, visibility_timeout=seconds), *NOT_OURS
            )

        answer = await self.with_receipt(held, update, settles=settles)
        if isinstance(answer, Refused):
            return None
        held.ends_at = asked_at + seconds
        return answer

    async def delete(self, connections: LoopConnections, held: HeldMessage) -> Settled | Lapsed:
        """Remove a message."""
        client = client_of(connections, held.queue)

        async def delete(receipt: str) -> Refused | None:
            return await unless_refused(client.delete_message(held.message, receipt), *NOT_OURS)

        return LAPSED if isinstance(await self.with_receipt(held, delete), Refused) else SETTLED

    async def with_receipt(
        self, held: HeldMessage, act: Callable[[str], Awaitable[T | Refused]], *, settles: bool = False
    ) -> T | Refused:
        """Call *act* with the newest receipt; again, if it was refused and a concurrent renewal gets a newer one.

        The receipt of an act that *settles* is not used again: Azure would accept it, but the lock has ended.
        """
        while True:
            with self._lock:
                if held.is_settled:
                    return Refused("PopReceiptMismatch")
                receipt = held.receipt
                held.open_requests += 1
            try:
                answer = await act(receipt)
                if not isinstance(answer, Refused):
                    with self._lock:
                        if settles:
                            held.is_settled = True
                        held.receipt = str(getattr(answer, "pop_receipt", receipt))
            finally:
                with self._lock:
                    held.open_requests -= 1
            if not isinstance(answer, Refused) or answer.code != "PopReceiptMismatch":
                return answer
            if held.receipt == receipt:
                if not held.open_requests:
                    return answer
                await asyncio.sleep(0.01)

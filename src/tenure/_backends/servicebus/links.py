"""Links to and from entities: messages that are sent and received, and verdicts, many of them on their way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast
from uuid import UUID

from azure.core.exceptions import AzureError

from tenure._backends.servicebus.codec import Encoded, Incoming, incoming, transfer_of
from tenure._backends.servicebus.driver import (
    RELEASED,
    Connection,
    Disconnected,
    Outcome,
    Payload,
    Refused,
    error_in,
    readable,
    refusal,
)
from tenure._backends.servicebus.library import Link, SendingLink

DRAIN_MAX = 5.0
"""Seconds that a claim waits until the service has taken credit back; under load, it does so late or never."""

BATCH_STANDARD, BATCH_PREMIUM = 262_144, 1_048_576
"""The most that a transfer of several messages may have, by the namespace's tier, where the service doesn't say."""

UNANSWERED_MAX = 100
"""Verdicts that are on their way at once."""


NOTHING = Incoming((), {}, (), {}, (), {})


class Arrived(NamedTuple):
    """A message that came on a link."""

    delivery_id: int
    tag: bytes
    message: Incoming
    asked_at: float
    """When the credit for it was given: its lock can't have begun before."""
    at: float
    """When it was read."""

    @property
    def size(self) -> int:
        """The bytes of its body."""
        return self.message.size

    def emptied(self) -> Arrived:
        """Return it without the message: what it takes to settle it, or to renew its lock."""
        return self._replace(message=NOTHING)

    @property
    def token(self) -> UUID:
        """The token of its lock."""
        return UUID(bytes_le=self.tag)


class SendLink(Connection):
    """A link to an entity."""

    def __init__(self, owner: Any, clock: Callable[[], float]) -> None:
        super().__init__(owner, clock)
        self._link = cast(SendingLink, self._wire.link)
        self._free = asyncio.Semaphore(100)

    @property
    def size_max(self) -> int:
        """The largest message in bytes, its headers included."""
        return self._link.message_max or BATCH_STANDARD

    @property
    def batch_max(self) -> int:
        """The largest transfer of several messages in bytes, which may be smaller."""
        said = self._link.properties.get("com.microsoft:max-message-batch-size")
        if isinstance(said, int) and said > 0:
            return said
        return BATCH_PREMIUM if self.size_max >= BATCH_PREMIUM else BATCH_STANDARD

    async def send(self, messages: Sequence[Encoded]) -> None:
        """Send encoded messages in one transfer, and wait until it is accepted.

        Raises:
            Refused: It was not.
        """
        transfer = transfer_of(messages)
        async with self._free:
            answer = self._future()

            def settled(state: Mapping[str, Any] | None) -> None:
                if not answer.done():
                    answer.set_result(state)

            try:
                await self._link.send(transfer, settled)
                state = await answer
            finally:
                answer.cancel()  # it may have been given up before it was awaited
        if state is None:
            raise Disconnected("the link was detached before the answer came")
        if "accepted" not in state:
            raise refusal(state)


class ReceiveLink(Connection):
    """A link from an entity. It has credit only while messages are asked for, or waited for."""

    def __init__(self, owner: Any, clock: Callable[[], float], arrived: Callable[[], None]) -> None:
        super().__init__(owner, clock)
        self._link = cast(Link, self._wire.link)
        self._arrived = arrived
        self.ready: deque[Arrived] = deque()
        """Messages that have come, and that nobody has taken yet."""
        self.largest = 0
        """The bytes of the largest body that has come, of late."""
        self._asked_at = clock()
        self._more: asyncio.Future[None] | None = None  # done when a message comes
        self._drained: asyncio.Future[None] | None = None
        self._outcomes: dict[int, asyncio.Future[Any]] = {}
        self.unsettled: set[int] = set()
        """The deliveries that can be settled on this link."""
        self._wanted = 0
        """For how many messages there should be leave."""
        self.owes_answer = False
        """Whether leave was to be taken back, and the service has not answered yet."""
        self.is_new = True
        """Whether it was not looked for messages yet."""
        self._payload = Payload()
        self._link.on_transfer(self._on_transfer)
        self._link.on_flow(self._on_flow)
        self._link.on_disposition(self._on_disposition)

    @property
    def session(self) -> tuple[str, float] | None:
        """The name of the session that this link has locked, and until when."""
        return self._wire.session

    @property
    def first_ready(self) -> Arrived | None:
        """The first message that nobody has taken yet; on any thread."""
        try:
            return self.ready[0]
        except IndexError:
            return None

    @property
    def credit(self) -> int:
        """For how many messages the service has leave."""
        return max(0, self._link.credit)  # more may come than is asked for anew

    async def ask(self, count: int) -> None:
        """Give leave for *count* messages, in place of what was given before."""
        self.check_alive()
        if self.credit == 0:
            self._asked_at = self._now()
        self._wanted = count
        await self._link.give_leave(count)

    async def until_more(self, seconds: float) -> bool:
        """Wait until a message comes; return whether one did."""
        if self.ready:
            return True
        self._more = self._future(is_question=False)
        try:
            async with asyncio.timeout(seconds):
                await self._more
        except TimeoutError:
            return bool(self.ready)
        finally:
            self._more = None
        return True

    async def drain(self, within: float = DRAIN_MAX) -> bool:
        """Take all leave back: the service sends at once what it has for it, and then nothing more.

        It may be late, or not answer. Then some leave stays, and what comes for it is as if it had been waited for.
        Return whether nothing is left for certain.
        """
        self._wanted = 0
        if self.credit == 0:
            return not self.owes_answer
        drained = self._drained = self._future(is_question=False)
        was_owing, self.owes_answer = self.owes_answer, True
        try:
            await self._link.give_leave(self.credit, drain=True)
            async with asyncio.timeout(within):
                await drained
        except TimeoutError:
            return False
        finally:
            self._drained = None
        self.owes_answer = False
        return not was_owing  # else this may have been the answer to an earlier one

    async def settle(self, verdicts: Sequence[tuple[Arrived, Outcome]]) -> list[Exception | None]:
        """Pass verdicts, many of them before the first answer; return for each None, or why it was not accepted."""
        found: list[Exception | None] = []
        for start in range(0, len(verdicts), UNANSWERED_MAX):
            found += await self._settle(verdicts[start : start + UNANSWERED_MAX])
        return found

    async def _settle(self, verdicts: Sequence[tuple[Arrived, Outcome]]) -> list[Exception | None]:
        futures: list[asyncio.Future[Any] | Exception] = []
        try:
            await self._write(verdicts, futures)
            return await self._answers(verdicts, futures)
        finally:
            for each in futures:
                if not isinstance(each, Exception):
                    each.cancel()  # it may have been given up before it was awaited
            for one, _ in verdicts:
                self._outcomes.pop(one.delivery_id, None)

    async def _write(
        self, verdicts: Sequence[tuple[Arrived, Outcome]], futures: list[asyncio.Future[Any] | Exception]
    ) -> None:
        for one, outcome in verdicts:
            try:
                future = self._future()
            except Exception as error:
                futures.append(readable(error))
                continue
            futures.append(future)
            self._outcomes[one.delivery_id] = future
            self.unsettled.discard(one.delivery_id)
            try:
                await self._wire.settle(one.delivery_id, outcome.state)
            except Exception as error:
                future.cancel()
                futures[-1] = readable(error)

    @staticmethod
    async def _answers(
        verdicts: Sequence[tuple[Arrived, Outcome]], futures: list[asyncio.Future[Any] | Exception]
    ) -> list[Exception | None]:
        answers: list[Exception | None] = []
        for (_, outcome), each in zip(verdicts, futures, strict=True):
            if isinstance(each, Exception):
                answers.append(each)
                continue
            try:
                state = await each
                is_accepted = bool(state) and outcome.name in state and not error_in(state)
                answers.append(None if is_accepted else refusal(state or {}))
            except (Refused, Disconnected, OSError, AzureError) as error:
                answers.append(error)
        return answers

    async def drop(self, one: Arrived) -> None:
        """Settle a delivery whose lock is over, without an answer: the service counts those that are not settled."""
        if self.lost is None and one.delivery_id in self.unsettled:
            self.unsettled.discard(one.delivery_id)
            with suppress(Exception):  # the link may be lost by now
                await self._wire.settle(one.delivery_id, RELEASED.state, settled=True)

    # --- called by the library, from the reading task ---

    async def _on_transfer(self, frame: Any) -> None:
        """Take a frame of a message."""
        found, is_last = self._payload.add(frame)
        if not is_last:
            return
        self._link.count += 1  # an aborted one has used leave, too
        self._link.credit -= 1
        if found is None:
            await self._on_aborted()
        else:
            self._on_message(self._payload.first, incoming(found))

    async def _on_aborted(self) -> None:
        """Give the leave anew that a message has used which the service has begun, and aborted: it is settled."""
        self._end_drain()
        if self._drained is None and self._wanted > self.credit:
            await self._link.give_leave(self._wanted)

    def _on_message(self, frame: Any, message: Incoming) -> None:
        self.unsettled.add(frame[1])
        self._wanted = max(0, self._wanted - 1)
        one = Arrived(frame[1], bytes(frame[2]), message, self._asked_at, self._now())
        self.largest = max(one.size, self.largest * 99 // 100)
        self.ready.append(one)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        self._end_drain()  # if all leave was used, the service doesn't say so
        self._arrived()

    def _end_drain(self) -> None:
        if self._drained is not None and self.credit == 0 and not self._drained.done():
            self._drained.set_result(None)

    async def _on_flow(self, frame: Any) -> None:
        if frame[5] is None:
            return
        # The service takes leave back by counting on without a message. It may do so late, when more was given.
        under_way = 1 if self._payload.has_begun else 0  # a message that the service has counted, and not yet we
        taken_back = (frame[5] - under_way - self._link.count) % 2**32
        if 0 < taken_back < 2**31:
            self._link.count = frame[5] - under_way
            self._link.credit = max(0, self.credit - taken_back)
            self.owes_answer = self._drained is not None and self.owes_answer
            if self._drained is None and self._wanted > self.credit:  # late: it took what was given since
                await self._link.give_leave(self._wanted)
        self._end_drain()

    async def _on_disposition(self, frame: Any) -> None:
        if frame[0] or not frame[3]:  # from a receiver, or not settled yet
            return
        first, last = frame[1], frame[1] if frame[2] is None else frame[2]
        for number in [one for one in self._outcomes if first <= one <= last]:
            future = self._outcomes.pop(number)
            if not future.done():
                future.set_result(frame[4])

    def _ended(self) -> None:
        self.unsettled.clear()
        self._arrived()

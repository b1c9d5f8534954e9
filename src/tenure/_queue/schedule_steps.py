"""Schedules in stores where to compare, to keep and to send can't be one step: ``advance`` in three steps.

House rules:

- *Claim, send, note.* The first step replaces what is kept by a text that says that the messages are being sent, if it
  is what the caller expects. The second sends them. The third replaces that text by the new record, if it is still
  there. So nothing is sent that another sends, and nothing is noted that is not sent.
- Until the third step, readers see the record as it was before.
- A claim is left behind when its process dies, or doesn't learn what became of it. Others take it over, and send the
  messages again, under the same ids: a store that remembers ids keeps one of them.
- A claim is over when a process has seen it for ``KEEP_OUT`` seconds on its own clock. Its owner sends for
  ``SEND_WITHIN`` seconds at most, counted from before it was written. No two machines' clocks are compared.
- Every text names the call that has written it, so that no two are equal, and a call recognises its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tenure._foreign import Unreadable, a_text, read_object, seconds
from tenure._queue.broker import Advanced, Schedules
from tenure._queue.outgoing import Outgoing
from tenure._runtime.clock import Clock
from tenure.errors import Unavailable

T = TypeVar("T")

KEEP_OUT = 5.0
"""Seconds for which others don't take over a claim, from when they have seen it first."""

KEEP_OUT_MAX = 60.0
"""The same of a claim that says another time, at most: a newer version may need longer, and anybody can write one."""

SEND_WITHIN = 4.0
"""Seconds after which the owner of a claim doesn't send any more, from before the claim was written."""

Send = Callable[[str, Sequence[Outgoing]], Awaitable[Sequence[str]]]

Act = Callable[[str | None, float], tuple[str | None, T]]
"""Gets the text that is kept of a schedule, and the store's wall clock; returns the text to be kept, and an answer."""


class ScheduleStore(Protocol):
    """What a store must be able to do. Each method may raise ``Unavailable``: it was carried out, or not."""

    async def kept(self, queue: str) -> Schedules:
        """Return the texts that are kept of the schedules of *queue*, by their names."""
        ...

    async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
        """Replace the text of one schedule by that of *act*, in one step; return the answer of *act*.

        *act* is called again if the text has changed since it was read, and nothing is written if it is to stay. None:
        no text. *queue* comes into being when a text is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """What the text of a schedule says."""

    record: str | None
    """The record, as readers see it."""
    by: str
    """The call that has written the text."""
    keep_out: float | None = None
    """It is a claim: that call is sending the messages that follow the record, and others keep out for so long."""

    @classmethod
    def read(cls, text: str) -> Kept:
        """Return what *text* says. One that is unreadable is a record as a whole: its reader says what is wrong."""
        try:
            given = read_object(text)
            record, keep_out = given.get("record"), given.get("keep_out")
            return cls(
                None if record is None else a_text(record),
                a_text(given.get("by")),
                None if keep_out is None else min(seconds(keep_out), KEEP_OUT_MAX),
            )
        except Unreadable:
            return cls(text, "")

    def written(self) -> str:
        """Return its text."""
        given = {"record": self.record, "by": self.by, "keep_out": self.keep_out}
        return json.dumps({name: value for name, value in given.items() if value is not None})


@dataclass(slots=True)
class _Wish:
    """What a caller asks for."""

    queue: str
    schedule: str
    expected: str | None
    record: str | None
    not_before: float
    asked_at: float
    written_at: float = -math.inf
    """A moment before what it asks for was written."""


class ScheduleSteps:
    """The schedules of a store.

    Args:
        store: Where the schedules are kept.
        send: Sends messages to a queue, as ``Broker.send`` does.
        clock: This process's clock.
    """

    def __init__(self, store: ScheduleStore, send: Send, clock: Clock) -> None:
        self._store = store
        self._send = send
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[str, float]] = {}  # claims of others, and when they were seen first

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        texts, now = await self._store.kept(queue)
        for schedule in [one for home, one in list(self._seen) if home == queue and one not in texts]:
            self._seen.pop((queue, schedule), None)
        for schedule, text in texts.items():
            self._observe(queue, schedule, text)
        records = {schedule: Kept.read(text).record for schedule, text in texts.items()}
        return Schedules({schedule: record for schedule, record in records.items() if record is not None}, now)

    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing],
        not_before: float,
    ) -> Advanced:
        """Keep *record* of a schedule in place of *expected*, and send *messages* before."""
        by = secrets.token_hex(8)
        noted = None if record is None else Kept(record, by).written()
        wish = _Wish(queue, schedule, expected, record, not_before, self._clock.now())
        if not messages:
            return await self._begin(wish, noted)
        claim = Kept(expected, by, KEEP_OUT).written()
        begun = await self._begin(wish, claim)
        if not begun.is_done:
            return begun
        left = wish.written_at + SEND_WITHIN - self._clock.now()
        if left <= 0:  # this process was suspended, perhaps: another may be sending
            unclaimed = None if expected is None else Kept(expected, by).written()
            return (await self._replace(wish, claim, unclaimed))._replace(is_done=False)
        try:
            async with asyncio.timeout(left):
                await self._send(queue, messages)
        except TimeoutError:
            raise Unavailable(
                f"the messages of the schedule {schedule!r} were not sent to {queue!r} within {SEND_WITHIN:g} s"
            ) from None
        return await self._replace(wish, claim, noted)

    async def _begin(self, wish: _Wish, wanted: str | None) -> Advanced:
        """Keep the text *wanted* if the record is as expected, and nobody is sending."""
        seen = self._seen.get((wish.queue, wish.schedule))

        def act(text: str | None, now: float) -> tuple[str | None, tuple[str | None, Advanced]]:
            if text is not None and text == wanted:  # the store asks again, and has carried out the first request
                return text, (None, Advanced(True, wish.record, now))
            kept = Kept(None, "") if text is None else Kept.read(text)
            is_over = seen is not None and seen[0] == text and wish.asked_at - seen[1] >= (kept.keep_out or 0.0)
            if kept.record != wish.expected or now < wish.not_before or (kept.keep_out is not None and not is_over):
                return text, (text, Advanced(False, kept.record, now))
            wish.written_at = self._clock.now()
            return wanted, (None, Advanced(True, wish.record, now))

        text, answer = await self._store.change(wish.queue, wish.schedule, act)
        self._observe(wish.queue, wish.schedule, text)
        return answer

    async def _replace(self, wish: _Wish, claim: str, wanted: str | None) -> Advanced:
        """Keep the text *wanted* in place of our *claim*, if that is still there."""

        def act(text: str | None, now: float) -> tuple[str | None, Advanced]:
            is_ours = text in (claim, wanted)
            kept = wanted if is_ours else text
            return kept, Advanced(is_ours, None if kept is None else Kept.read(kept).record, now)

        return await self._store.change(wish.queue, wish.schedule, act)

    def _observe(self, queue: str, schedule: str, text: str | None) -> None:
        """Note when a claim was seen first; None: there is none."""
        key = queue, schedule
        if text is None or Kept.read(text).keep_out is None:
            self._seen.pop(key, None)
        elif key not in self._seen or self._seen[key][0] != text:
            self._seen[key] = text, self._clock.now()

"""Receipts of the messages that this process holds, and the ends of their locks.

RabbitMQ has no locks with an end: a message belongs to a channel until it is settled, or the channel is over. So the
end is kept here. A message whose lock isn't renewed in time is given up by this process, and counted; if this process
hangs or dies, so does its connection, and the server does the same. A verdict of an old lock can't touch a new one, as
a message is settled by its number on a channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.errors import AmqpError
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.message_format import FoundMessage
from tenure._queue import receipts
from tenure._queue.verdicts import Lapsed, Settled, Verdict
from tenure._runtime.alarms import Alarm
from tenure._runtime.clock import Clock

TIMEOUT_MARGIN = 1.0
"""Seconds by which a lock ends before the server would close the channel for it."""


@dataclass(slots=True, eq=False)
class HeldMessage(receipts.Held):
    """A message that this process holds."""

    found: FoundMessage
    channels: HeldChannels
    ends_at: float
    """The end of its lock, by the local clock."""
    last_end: float
    """The end of the longest lock that the server allows."""
    settling: int = 0
    """How many verdicts are being passed; meanwhile, its lock doesn't end."""
    verdict: Verdict | None = None
    """The verdict whose effect is written, but not proven to be complete."""
    ending: asyncio.Future[Any] | None = None
    """Its acknowledgement or rejection, once it is ordered: done when it is proven. A second one would be an error."""
    passing: tuple[Verdict, asyncio.Future[Settled | Lapsed]] | None = None
    """The verdict of several steps that was begun last; it goes on if it is given up."""

    def is_over(self, now: float) -> bool:
        """Return whether its lock has ended *now*."""
        return self.channels.lost is not None or (now >= self.ends_at and not self.settling)


class Receipts(receipts.Receipts[HeldMessage]):
    """The messages that this process holds. They are added on any thread; all else is done on the connections' loop."""

    def __init__(self, client: Client, clock: Clock) -> None:
        super().__init__(clock)
        self._client = client
        self._alarm: Alarm | None = None  # made when it is first needed, on the loop of the connections
        self._is_closed = False
        self.put_back: Callable[[HeldMessage], None] = _reject
        """Puts a copy of a message back whose lock has ended."""

    def watch(self, until: float) -> None:
        """Look after the locks that end at *until*; on any thread."""
        if self._alarm is None or until < self._alarm.at:
            self._client.call_home(self._wake_at, until)

    def renew(self, held: HeldMessage, until: float) -> bool:
        """Extend a lock up to *until*; return whether the server allows that: if not, it ends when it would have."""
        if held.settling or held.ending is not None:  # it doesn't end
            return True
        if until > held.last_end:
            return False
        held.ends_at = max(held.ends_at, until)
        return True

    def lose(self, channels: HeldChannels) -> None:
        """Forget all deliveries of channels that are over."""
        self.forget_all(lambda held: held.channels is channels)

    def lose_queue(self, queue: str) -> None:
        """Forget all deliveries of a queue that was deleted."""
        self.forget_all(lambda held: held.found.queue == queue)

    def count(self, queue: str) -> int:
        """Return how many messages of *queue* are held."""
        return len(self.of(queue))

    def is_settling(self, queue: str) -> bool:
        """Return whether a verdict on a message of *queue* is being passed."""
        return any(held.settling for held in self.of(queue))

    def _wake_at(self, at: float) -> None:
        if self._is_closed:
            return
        if self._alarm is None:
            self._alarm = Alarm(self._clock, self._expire)
        if at < self._alarm.at:
            self._alarm.set(at)

    def _expire(self) -> None:
        """Give up what wasn't renewed in time."""
        now = self._clock.now()
        for held in self.forget_all(lambda held: held.ends_at <= now and not held.settling):
            self._give_up(held)
        # One that is being settled is looked at again soon.
        next_end = min((max(held.ends_at, now + 0.05) for held in self._held.copy().values()), default=None)
        if next_end is not None:
            self._wake_at(next_end)

    def _give_up(self, held: HeldMessage) -> None:
        if held.ending is not None or held.channels.lost is not None:
            return
        found = held.found
        # The server doesn't tell how often a message was delivered that it dead-letters: then a copy must. And dead
        # letters are not counted, but a policy may let the server drop what was counted too often.
        needs_copy = found.returned if found.is_dead else found.facts.expires_at is not None
        (self.put_back if needs_copy else _reject)(held)

    def close(self) -> None:
        """End the alarm."""
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.end()


def _reject(held: HeldMessage) -> None:
    with suppress(AmqpError):  # the channel is over: the server has done it
        held.channels.begin_reject(held.found.raw.tag)

"""The verdicts of a consumer on their way to the broker: a part of its pump."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure._queue.effects import Settle
from tenure._queue.lock_group import NEVER
from tenure._queue.message import Delivery
from tenure._queue.verdicts import Settlement

SETTLE_MAX = 1_000
"""Verdicts in one request: enough to be cheap, few enough not to delay a claim."""


class Settling:
    """Keep each verdict until it is answered; without an answer, pass it again.

    Args:
        requests_max: The most requests at a time; verdicts passed meanwhile go out together.
        now: The present moment.
    """

    def __init__(self, requests_max: int, *, now: float) -> None:
        self._waiting: list[Settlement] = []
        self._asked: dict[int, Sequence[Settlement]] = {}
        self._requests_max = requests_max
        self._not_before = now  # the broker did not answer the last time
        self.add: Callable[[Settlement], None] = self._waiting.append
        """Pass a verdict, with the next request."""

    def __len__(self) -> int:
        """Return how many verdicts are not answered yet."""
        return len(self._waiting) + sum(map(len, self._asked.values()))

    def __contains__(self, settlement: object) -> bool:
        """Return whether *settlement* itself, not an equal one, waits to be passed."""
        return any(one is settlement for one in self._waiting)

    @property
    def unanswered(self) -> list[Settlement]:
        """The verdicts that may stand or not."""
        return [*(one for batch in self._asked.values() for one in batch), *self._waiting]

    @property
    def wake_at(self) -> float:
        """When the next request is due; infinity for never."""
        return self._not_before if self._waiting and len(self._asked) < self._requests_max else NEVER

    def next_request(self, number: int) -> Settle:
        """Return the next request, which has this *number*; it is due."""
        batch = self._waiting[:SETTLE_MAX]
        del self._waiting[:SETTLE_MAX]
        self._asked[number] = batch
        return Settle(number, batch)

    def asked(self, number: int) -> Sequence[Settlement]:
        """Return the verdicts of the request with this *number*; none if it is unknown."""
        return self._asked.get(number, ())

    def answered(self, number: int) -> Sequence[Settlement] | None:
        """Forget the request with this *number*, and return its verdicts; None if it is unknown."""
        return self._asked.pop(number, None)

    def ask_again(self, settlements: Sequence[Settlement], at: float) -> None:
        """Pass *settlements* again, before all others, and nothing before *at*."""
        self._waiting[:0] = settlements
        self._not_before = at

    def withdraw(self, delivery: Delivery) -> bool:
        """Drop the verdict on *delivery* if no request has passed it yet; return whether there was one."""
        for index, settlement in enumerate(self._waiting):
            if settlement.delivery is delivery:
                del self._waiting[index]
                return True
        return False

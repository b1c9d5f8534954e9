"""The deliveries at a consumer and their stages, seen from outside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from tenure._queue.message import Delivery, Token
from tenure._queue.verdicts import Verdict

Key = tuple[Token, int, int]


def delivery_key(delivery: Delivery) -> Key:
    """Return what names *delivery* alone: in a session, a message may be received twice under one token."""
    return delivery.token, delivery.sequence, delivery.delivery_count


class Stage(Enum):
    """The stage of a delivery, seen from outside."""

    WAITING = "waiting"
    RUNNING = "running"
    KEPT = "kept"  # its handler has ended without a verdict, and one follows later
    ENDED = "ended"  # its handler has ended, with a verdict that is to be passed, or without one
    PASSED = "passed"  # a verdict was passed, and is not answered yet
    LOST = "lost"  # a renewal said no


@dataclass(slots=True, eq=False)
class TrackedDelivery:
    """A delivery at its consumer, seen from outside."""

    delivery: Delivery
    stage: Stage = Stage.WAITING
    verdict: Verdict | None = None
    began: float = 0.0
    is_settling: bool = False
    """Whether its handler has asked the broker to complete it, so that its lock may be over."""
    is_asking: bool = False
    """Whether that request is not answered yet."""
    is_settled: bool = False
    """Whether it was completed that way, in a session, and its handler runs on."""
    is_denied: bool = False
    """Whether a renewal said no."""
    trusted: float = -math.inf
    """Until when its lock may be believed, by the consumer's clock: as the answers so far allow."""
    cancelled_until: float | None = None
    """Until when its lock was believed when its handler was cancelled; None before."""


class TrackedDeliveries:
    """The deliveries of one consumer, by token."""

    def __init__(self) -> None:
        self._by_token: dict[Token, dict[tuple[int, int], TrackedDelivery]] = {}

    def __iter__(self) -> Iterator[TrackedDelivery]:
        return (tracked for group in self._by_token.values() for tracked in group.values())

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Track *deliveries*, which have come."""
        for delivery in deliveries:
            group = self._by_token.setdefault(delivery.token, {})
            group[delivery.sequence, delivery.delivery_count] = TrackedDelivery(delivery)

    def drop(self, delivery: Delivery) -> None:
        """Track *delivery* no longer."""
        group = self._by_token.get(delivery.token, {})
        group.pop((delivery.sequence, delivery.delivery_count), None)
        if not group:
            self._by_token.pop(delivery.token, None)

    def find(self, delivery: Delivery) -> TrackedDelivery | None:
        """Return *delivery* as it is tracked; None if it was settled, or never came."""
        group = self._by_token.get(delivery.token)
        return group.get((delivery.sequence, delivery.delivery_count)) if group is not None else None

    def under(self, token: Token) -> list[TrackedDelivery]:
        """Return those that came under *token*."""
        return list(self._by_token.get(token, {}).values())

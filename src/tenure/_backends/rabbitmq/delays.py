"""Delays: queues in which messages stay until their time to live is over, and which nobody receives from.

A time to live ends in order of the queue only, so a queue is for one time. The delay of a message is a sum of powers of
two of ``STEP``, and there is a queue for each. A message goes through those of its sum, from the longest to the
shortest, by topic exchanges that look at one bit of its routing key each::

    0.0. … .1.0.1.orders        4 steps, then 1, then the queue "orders"

The exchange of a level sends it into the queue of the level if its bit is set, and else on to the next exchange; and a
queue dead-letters it, at least once, to the next exchange. The last one knows the queues.

A message whose queue was deleted meanwhile goes to a queue in which it ends: without one, the server would try again
and again to dead-letter it, and behind 32 such, all others of the level would wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from aiormq import spec

from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.names import DUE, GONE, amqp_name, delay_name
from tenure.errors import ConfigError

STEP = 0.05
"""Seconds of the shortest delay; every other one is rounded up to a multiple."""

GONE_KEPT, GONE_MAX = 86_400, 1_000
"""Seconds for which messages whose queue was deleted are kept, for an operator to look at, and how many of them."""

LEVELS = 24
DELAY_MAX = STEP * (2**LEVELS - 1)


def steps_of(delay: float) -> int:
    """Return how many steps *delay* takes.

    Raises:
        ConfigError: It is longer than the longest.
    """
    steps = math.ceil(delay / STEP - 1e-9)
    if steps >= 2**LEVELS:
        raise ConfigError(
            f"delay ({delay:,.0f} s) must not be more than {DELAY_MAX / 86_400:.1f} days ({DELAY_MAX:,.0f} s) on this "
            "backend"
        )
    return steps


def routing_key(steps: int, queue: str) -> str:
    """Return the routing key of a message for *queue* that is delayed by so many *steps*."""
    return ".".join([*f"{steps:0{LEVELS}b}", amqp_name(queue)])


class Delays:
    """The exchanges and queues of delays, declared when they are first needed. On the loop of the connections."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._levels: set[int] = set()  # whose queues are declared
        self._top = -1  # up to which the exchanges are declared

    async def ready(self, queue: str, steps: Collection[int]) -> dict[int, str]:
        """Declare what messages for *queue* need that are delayed by so many *steps*; return where to publish each.

        Raises:
            ChannelLost: There is no such queue.
        """
        top = max(steps).bit_length() - 1
        methods: list[Any] = []
        if self._top < 0:
            gone: dict[str, Any] = {
                "x-queue-type": "quorum",
                "x-message-ttl": GONE_KEPT * 1_000,
                "x-max-length": GONE_MAX,
            }
            methods += [
                spec.Exchange.Declare(0, GONE, "fanout", durable=True),
                spec.Queue.Declare(0, GONE, durable=True, arguments=gone),
                spec.Queue.Bind(0, GONE, GONE),
                spec.Exchange.Declare(0, DUE, "topic", durable=True, arguments={"alternate-exchange": GONE}),
            ]
        for level in range(self._top + 1, top + 1):
            name = delay_name(level)
            methods += [
                spec.Exchange.Declare(0, name, "topic", durable=True),
                spec.Exchange.Bind(0, _next(level), name, _pattern(level, 0)),
            ]
        levels = {level for level in range(top + 1) if any(one >> level & 1 for one in steps)}
        for level in levels - self._levels:
            name = delay_name(level)
            arguments: dict[str, Any] = {
                "x-queue-type": "quorum",
                "x-message-ttl": int(STEP * 1_000) << level,
                "x-dead-letter-exchange": _next(level),
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
            methods += [
                spec.Queue.Declare(0, name, durable=True, arguments=arguments),
                spec.Queue.Bind(0, name, name, _pattern(level, 1)),
            ]
        # Each time: its binding is deleted with a queue, and another process may do that.
        name = amqp_name(queue)
        methods.append(spec.Queue.Bind(0, name, DUE, "*." * LEVELS + name))  # not "#.": a name may end with another
        await self._client.request(*methods)
        self._top = max(self._top, top)
        self._levels |= levels
        return {one: delay_name(one.bit_length() - 1) for one in steps}

    def forget(self) -> None:
        """Note that exchanges and queues may be gone."""
        self._levels.clear()
        self._top = -1


def _next(level: int) -> str:
    return delay_name(level - 1) if level else DUE


def _pattern(level: int, bit: int) -> str:
    return "*." * (LEVELS - 1 - level) + f"{bit}.#"

"""Delays: queues in which messages stay until their time to live is over, and which nobody receives from.

A time to live ends in order of the queue only, so a queue is for one time. The delay of a message is a sum of powers of
two of ``STEP``, and there is a queue for each. A message goes through those of its sum, from the longest to the
shortest, by topic exchanges that look at one bit of its routing key each::

    0.0. … .1.0.1.orders        4 steps, then 1, then the queue "orders"

The exchange of a level sends it into the queue of the level if its bit is set, and else on to the next exchange; and a
queue dead-letters it, at least once, to the next exchange. The last one knows the queues.

A message whose queue was deleted meanwhile goes to a queue in which it ends: without one, the server would try again
and again to dead-letter it, and behind 32 such, all others of the level would wait.

Who may declare and bind these queues may also delete them, and read what is in them, of all queues. So a user without
these rights uses what another one has made, completely: the last that is made is an exchange which says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from aiormq import spec

from tenure._backends.rabbitmq.address import granting
from tenure._backends.rabbitmq.client import ACCESS_REFUSED, NOT_FOUND, Client
from tenure._backends.rabbitmq.errors import ChannelLost
from tenure._backends.rabbitmq.names import ALL_DELAYS, DUE, GONE, amqp_name, delay_name, is_queue
from tenure.errors import ConfigError, Unavailable

STEP = 0.05
"""Seconds of the shortest delay; every other one is rounded up to a multiple."""

GONE_KEPT, GONE_MAX = 86_400, 1_000
"""Seconds for which messages whose queue was deleted are kept, for an operator to look at, and how many of them."""

RIGHTS = "^tenure:(delay:[0-9]+|delays|due|gone)$"
"""The names of all exchanges and queues of delays, as a pattern of RabbitMQ's."""

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
        if not is_queue(name := amqp_name(queue)):
            raise ChannelLost(NOT_FOUND, f"no queue can have the name {name!r}")
        top = max(steps).bit_length() - 1
        levels = {level for level in range(top + 1) if any(one >> level & 1 for one in steps)}
        if missing := self._missing(top, levels):
            try:
                await self._client.request(*missing)
            except ChannelLost as error:
                if error.code != ACCESS_REFUSED:
                    raise
                await self._require_all(error)
                top, levels = LEVELS - 1, set(range(LEVELS))
            self._note(top, levels)
        # Each time: its binding is deleted with a queue, and another process may do that.
        bind = spec.Queue.Bind(0, name, DUE, "*." * LEVELS + name)  # not "#.": a name may end with another
        await self._client.request(bind)
        return {one: delay_name(one.bit_length() - 1) for one in steps}

    async def make(self, level: int) -> None:
        """Declare a *level*, and the exchanges below it; with the highest one, note that all are there.

        To be called for one level after the other.

        Raises:
            ConfigError: This user may not.
        """
        methods = self._missing(level, {level})
        if level == LEVELS - 1:
            methods.append(_all_are_made(passive=False))
        try:
            await self._client.request(*methods)
        except ChannelLost as error:
            if error.code != ACCESS_REFUSED:
                raise
            # Also if requests worked before: the first of these may be permitted, and nothing is tried again.
            raise ConfigError(
                f"{self._client.url} refuses to make what delayed messages go through: {error.text}; "
                f"{granting(self._client.user, repr(RIGHTS))}"
            ) from error
        self._note(level, {level})

    async def _require_all(self, refused: ChannelLost) -> None:
        """Check that all exchanges and queues are there, which this user may not declare: that was *refused*.

        Raises:
            ChannelLost: They were never made.
            Unavailable: One of them isn't there just now.
        """
        advice = "for delays, a user with all rights must run 'tenure migrate' once"
        try:
            await self._client.request(_all_are_made(passive=True))
        except ChannelLost as error:
            if error.code != NOT_FOUND:
                raise
            raise ChannelLost(refused.code, f"{refused.text} ({advice})") from error
        levels = [delay_name(level) for level in range(LEVELS)]
        methods = [
            *(spec.Exchange.Declare(0, name, passive=True) for name in (DUE, GONE, *levels)),
            *(spec.Queue.Declare(0, name, passive=True) for name in (GONE, *levels)),
        ]
        try:
            await self._client.request(*methods)
        except ChannelLost as error:
            if error.code != NOT_FOUND:
                raise
            # A queue whose node is away may be told so, too. 404 would mean here that the queue of the message is gone.
            raise Unavailable(f"{error.text}; unless a server of the cluster is away: {advice}") from error

    def _missing(self, top: int, levels: Collection[int]) -> list[Any]:
        """Return what declares the exchanges up to *top*, and the queues of *levels*, that aren't known to be there."""
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
        for level in sorted(set(levels) - self._levels):
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
        return methods

    def _note(self, top: int, levels: Collection[int]) -> None:
        self._top = max(self._top, top)
        self._levels |= set(levels)

    def forget(self) -> None:
        """Note that exchanges and queues may be gone."""
        self._levels.clear()
        self._top = -1


def _all_are_made(*, passive: bool) -> spec.Exchange.Declare:
    return spec.Exchange.Declare(0, ALL_DELAYS, "fanout", passive=passive, durable=True, internal=True)


def _next(level: int) -> str:
    return delay_name(level - 1) if level else DUE


def _pattern(level: int, bit: int) -> str:
    return "*." * (LEVELS - 1 - level) + f"{bit}.#"

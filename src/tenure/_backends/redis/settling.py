"""Renewing and settling: many messages in one script; in a cluster, one script for each slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tenure._backends.redis.client import Client, patience
from tenure._backends.redis.message_format import bounded, encoded, encoded_failure, milliseconds
from tenure._backends.redis.queue_scripts import QueueScripts, is_dead
from tenure._backends.redis.scripts import NOTE, Argument
from tenure._lease import NoAnswer
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    SETTLED_EXHAUSTED,
    SETTLED_EXPIRED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    GiveBack,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")
A = TypeVar("A")

_ANSWERS = (LAPSED, SETTLED, SETTLED_EXHAUSTED, SETTLED_EXPIRED)
_GROUPED = {Complete: "C", GiveBack: "G", Defer: "F"}


class Settling:
    """Renews locks and settles deliveries. *send* sends messages to a queue of another slot."""

    def __init__(
        self,
        client: Client,
        scripts: QueueScripts,
        send: Callable[[str, Sequence[Outgoing]], Awaitable[object]],
    ) -> None:
        self._client = client
        self._scripts = scripts
        self._send = send

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now."""
        if not held:
            return []
        if self._client.is_cluster:
            return await self._slot_by_slot(held, [one.queue for one in held], lambda part: self._renew(part, lock))
        return await self._renew(held, lock)

    async def _renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> list[Renewed | Lapsed]:
        keys = _Keys(self._scripts)
        arguments: list[Argument] = [milliseconds(lock)]
        for one in held:
            number = keys.number(one.queue)
            if isinstance(one, SessionLock):
                arguments += (number, "s", one.token, one.session)
            else:
                arguments += (number, "d" if is_dead(one.queue) else "q", one.token, one.sequence)
        answers = await self._scripts.run_on("renew", keys.bases, *arguments, within=patience(lock))
        return [Renewed(until / 1_000) if until else LAPSED for until in answers]

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Settle many deliveries."""
        if not settlements:
            return []
        if self._client.is_cluster:
            queues = [delivery.queue for delivery, _ in settlements]
            return await self._slot_by_slot(settlements, queues, self._settle_in_slot)
        return await self._settle(settlements)

    async def _settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        keys = _Keys(self._scripts)
        arguments: list[Argument] = []
        for group in runs(settlements, _go_together):
            arguments += self._encoded(group, keys)
        sent_to = {queue for _, verdict in settlements if type(verdict) is Complete for queue, _ in verdict.sends}
        answers = await self._scripts.run_listed(sent_to, NOTE, self._scripts.call("settle", keys.bases, arguments))
        return [_ANSWERS[answer] for answer in answers]

    def _encoded(self, group: Sequence[Settlement], keys: _Keys) -> Iterator[Argument]:
        """Encode a group of equal verdicts for the script."""
        (first, verdict), size = group[0], len(group)
        is_letter = is_dead(first.queue)
        letter, more = _verdict_arguments(verdict, first.id, keys)
        if is_letter and letter == "F":
            raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
        yield from (keys.number(first.queue), "d" if is_letter else "q", first.token, letter, size)
        yield from (delivery.sequence for delivery, _ in group)
        yield from more

    # --- in a cluster ---

    async def _slot_by_slot(
        self, items: Sequence[T], queues: Sequence[str], ask: Callable[[Sequence[T]], Awaitable[Sequence[A]]]
    ) -> list[A | NoAnswer]:
        """Ask about *items* in parts whose *queues* share their keys' slot; return the answers in order.

        A part whose node can't be asked gives ``NoAnswer``; ``Unavailable`` is raised if none can be asked.
        """
        parts: dict[str, list[int]] = {}
        for number, queue in enumerate(queues):
            parts.setdefault(self._scripts.base(queue), []).append(number)
        results = await asyncio.gather(
            *(ask([items[number] for number in part]) for part in parts.values()), return_exceptions=True
        )
        failures = [answer for answer in results if isinstance(answer, BaseException)]
        # A permanent error is raised first; then Unavailable, if no part was answered.
        failures.sort(key=lambda error: isinstance(error, Unavailable))
        if failures and (len(failures) == len(results) or not isinstance(failures[0], Unavailable)):
            raise failures[0]
        answers: dict[int, A | NoAnswer] = {}
        for part, result in zip(parts.values(), results, strict=True):
            if isinstance(result, BaseException):
                answers.update(dict.fromkeys(part, NoAnswer(str(result))))
            else:
                answers.update(zip(part, result, strict=True))
        return [answers[number] for number in range(len(items))]

    async def _settle_in_slot(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Settle messages of one queue. If one is still locked, its sends to other queues come first."""
        base = self._scripts.base(settlements[0].delivery.queue)
        plain, asked = list(settlements), []
        for number, (delivery, verdict) in enumerate(settlements):
            if type(verdict) is Complete and any(self._scripts.base(queue) != base for queue, _ in verdict.sends):
                plain[number] = Settlement(delivery, replace(verdict, sends=()))
                asked.append(number)
        if asked:
            deliveries = [settlements[number].delivery for number in asked]
            answer = await self._scripts.run_on("holds", [base], *_held(deliveries))
            for number, holds in zip(asked, answer, strict=True):
                verdict = settlements[number].verdict
                assert isinstance(verdict, Complete)
                if holds:
                    for queue, message in verdict.sends:
                        await self._send(queue, [message])
        return await self._settle(plain)


class _Keys:
    """The queues that a script is run on, numbered in the order in which they are first named."""

    def __init__(self, scripts: QueueScripts) -> None:
        self._scripts = scripts
        self._numbers: dict[str, int] = {}
        self.bases: list[str] = []

    def number(self, queue: str) -> int:
        """Return the number of the key of *queue*."""
        number = self._numbers.get(queue)
        if number is None:
            self.bases.append(self._scripts.base(queue))
            number = self._numbers[queue] = len(self.bases)
        return number


def _held(deliveries: Sequence[Delivery]) -> Iterator[Argument]:
    for delivery in deliveries:
        yield from ("d" if is_dead(delivery.queue) else "q", delivery.token, delivery.sequence)


def runs(items: Sequence[T], same: Callable[[T, T], bool]) -> Iterator[Sequence[T]]:
    """Cut *items* into runs of equal neighbours."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or not same(items[start], items[end]):
            yield items[start:end]
            start = end


def _go_together(first: Settlement, other: Settlement) -> bool:
    """Tell whether two settlements can be encoded as one group."""
    (held, verdict), (other_held, other_verdict) = first, other
    return (
        (verdict is other_verdict or verdict == other_verdict)
        and held.token == other_held.token
        and held.queue == other_held.queue
        and not (type(verdict) is Complete and (verdict.sends or verdict.remember))
    )


def _verdict_arguments(verdict: Verdict, known_as: str, keys: _Keys) -> tuple[str, list[Argument]]:
    match verdict:
        case Complete(sends, remember) if sends or remember:
            more: list[Argument] = [bounded(remember), known_as, len(sends)]
            for queue, message in sends:
                more += (keys.number(queue), *encoded(message))
            return "X", more
        case Abandon(delay, error):
            return "A", [bounded(delay), encoded_failure(error)]
        case DeadLetter(reason, description, error):
            return "D", [reason, description, encoded_failure(error)]
        case _:
            return _GROUPED[type(verdict)], []

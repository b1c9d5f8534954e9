"""Renewals: of many locks in one request, over the management link, whatever link brought the messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tenure._backends.servicebus.client import LOST, Namespace
from tenure._backends.servicebus.codec import array_of, moment_of
from tenure._backends.servicebus.driver import FAILURES, Refused
from tenure._backends.servicebus.feeds import Feeds
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.receipts import Held, Receipts
from tenure._backends.servicebus.sessions import Sessions
from tenure._lease import NoAnswer
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import LAPSED, Lapsed, Renewed
from tenure.errors import Unavailable

Answer = Renewed | Lapsed | NoAnswer


class Renewing:
    """Extends locks. All of it belongs to the library's thread."""

    def __init__(
        self, namespace: Namespace, places: Places, receipts: Receipts, sessions: Sessions, feeds: Feeds
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._receipts = receipts
        self._sessions = sessions
        self._feeds = feeds

    async def renew(self, held: Sequence[Delivery | SessionLock]) -> list[Answer]:
        """Extend many locks: those of a queue in one request, as long as none of them is over."""
        answers: dict[int, Answer] = {}
        by_queue: dict[str, list[tuple[int, Held]]] = {}
        sessions: list[tuple[int, SessionLock]] = []
        for index, one in enumerate(held):
            if isinstance(one, SessionLock):
                sessions.append((index, one))
                continue
            found = self._receipts.find(one)
            if found is None:
                answers[index] = LAPSED
            elif found.session is not None:
                answers[index] = Renewed(found.session.locked_until)  # its lock is that of the session
            else:
                by_queue.setdefault(found.queue, []).append((index, found))
        tasks = [self._renew_session(index, one, answers) for index, one in sessions]
        await asyncio.gather(*tasks, *(self._renew_queue(rows, answers) for rows in by_queue.values()))
        for index, one in enumerate(held):
            if isinstance(one, Delivery) and answers[index] is LAPSED:
                self._receipts.forget(one)
        found_all = [answers[index] for index in range(len(held))]
        unanswered = [one for one in found_all if isinstance(one, NoAnswer)]
        if unanswered and len(unanswered) == len(found_all):
            raise Unavailable(unanswered[0].why)
        return found_all

    async def _renew_session(self, index: int, lock: SessionLock, answers: dict[int, Answer]) -> None:
        try:
            until = await self._sessions.renew(lock)
        except FAILURES as error:
            answers[index] = NoAnswer(str(self._namespace.translated(error)))
        else:
            answers[index] = LAPSED if until is None else Renewed(until)

    async def _renew_queue(self, rows: list[tuple[int, Held]], answers: dict[int, Answer]) -> None:
        held = [one for _, one in rows]
        path, asked_at = held[0].path, self._namespace.clock.now()
        lock = self._places.lock_known(held[0].queue)
        try:
            body = {"lock-tokens": array_of([one.token for one in held])}
            ends = (await self._namespace.ask(path, "renew-lock", body))["expirations"]
        except Refused as refused:
            if refused.condition not in LOST:
                ends = self._namespace.translated(refused)
            elif len(rows) > 1:  # one of them is over: each by itself
                await asyncio.gather(*(self._renew_queue([row], answers) for row in rows))
                return
            else:
                await self._lapse(*rows[0], answers)
                return
        except FAILURES as error:
            ends = self._namespace.translated(error)
        if isinstance(ends, Exception):
            answers.update((index, NoAnswer(str(ends))) for index, _ in rows)
            return
        for (index, one), end in zip(rows, ends, strict=True):
            until = moment_of(end)
            self._feeds.of(one.queue).times.learn(until, asked_at, self._namespace.clock.now())
            one.ends_at = asked_at + lock
            answers[index] = Renewed(until)

    @staticmethod
    async def _lapse(index: int, held: Held, answers: dict[int, Answer]) -> None:
        answers[index] = LAPSED
        if held.link is not None and held.arrived is not None:
            await held.link.drop(held.arrived)

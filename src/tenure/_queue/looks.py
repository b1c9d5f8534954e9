"""Looks at empty queues, shared: one request tells of all queues of a backend which of them hold messages.

A consumer looks now and then whether it has missed a hint. A thousand consumers would send a thousand requests for
that; so, when one looks, all others on its loop whose look is due soon join it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from tenure._queue.broker import Broker, SurveyingBroker
from tenure._queue.checks import DEAD_SUFFIX
from tenure._runtime.tasks import Tasks
from tenure.errors import Unavailable

T = TypeVar("T")


class SharedLooks:
    """The looks of one backend, by event loop."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Looks] = WeakKeyDictionary()

    def join(self, look_along: Callable[[], None]) -> None:
        """Call *look_along* whenever a consumer on this loop looks, until :meth:`leave`."""
        self._here().members[look_along] = None

    def leave(self, look_along: Callable[[], None]) -> None:
        """Undo :meth:`join`; may be called twice."""
        self._here().members.pop(look_along, None)

    async def holds(self, broker: Broker, queue: str) -> bool:
        """Return whether *queue* holds a message; asked together with those that others ask about at the same time.

        Where that can't be asked, it may hold one as soon as *broker* has given an answer.
        """
        if broker.traits.surveys and not queue.endswith(DEAD_SUFFIX):
            return await self._here().ask(cast(SurveyingBroker, broker), queue)
        await _answer(broker.settings(queue.removesuffix(DEAD_SUFFIX)))  # each consumer may, and it locks nothing
        return True

    def _here(self) -> _Looks:
        loop = asyncio.get_running_loop()
        looks = self._loops.get(loop)
        if looks is None:
            looks = self._loops[loop] = _Looks()
        return looks


class _Looks:
    """The looks on one loop."""

    def __init__(self) -> None:
        self.members: dict[Callable[[], None], None] = {}
        self._asked: dict[str, list[asyncio.Future[bool]]] = {}  # in the request that goes out next
        self._asking = Tasks()

    def ask(self, broker: SurveyingBroker, queue: str) -> asyncio.Future[bool]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()
        if not self._asked:
            loop.call_soon(self._gather, broker)
        self._asked.setdefault(queue, []).append(answer)
        return answer

    def _gather(self, broker: SurveyingBroker) -> None:
        """Let the others join; the tasks that ask for them run before the request is sent."""
        try:
            for look_along in list(self.members):
                look_along()
        finally:  # what was asked is answered, whatever happens here
            asyncio.get_running_loop().call_soon(self._send, broker)

    def _send(self, broker: SurveyingBroker) -> None:
        asked, self._asked = self._asked, {}
        self._asking.spawn(self._survey(broker, asked), "tenure-looks")

    async def _survey(self, broker: SurveyingBroker, asked: dict[str, list[asyncio.Future[bool]]]) -> None:
        try:
            found = await _holding(broker, list(asked))
        except BaseException as error:
            for answer in chain.from_iterable(asked.values()):
                if not answer.done():
                    answer.set_exception(error)
            if not isinstance(error, Unavailable):
                raise
            return
        for answers, holds in zip(asked.values(), found, strict=True):
            for answer in answers:
                if not answer.done():  # its caller has given up
                    answer.set_result(holds)


async def _holding(broker: SurveyingBroker, queues: Sequence[str]) -> Sequence[bool]:
    """Return whether each of *queues* holds messages: yes, if that can't be asked, and not for the store's absence.

    One queue may be the cause, and must not end the consumers of the others: each finds out by a claim of its own.
    """
    found = await _answer(broker.holding(queues))
    return found if found is not None and len(found) == len(queues) else [True] * len(queues)


async def _answer(asked: Awaitable[T]) -> T | None:
    """Return the answer to what was *asked*; None if that is a refusal, which says no more than that one was given."""
    try:
        return await asked
    except Unavailable:
        raise
    except Exception:
        return None

"""The suites must find queues that keep what comes after their caller was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import Claim, NoSession
from tenure._queue.context import QueueContext
from tenure._queue.message import SessionLock
from tenure._queue.session import Session
from tenure._queue.verdicts import Lapsed
from tenure.testing._conformance.queues.unclaimed import UnclaimedTests
from tests.conformance.planted import failing_tests, queues_with


class AnswersLater(MemoryBroker):
    """As a broker behind a network: what is asked for is locked before the answer is here."""

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        await _on_its_way()
        return claim

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        answer = await super().accept(queue, session, lock)
        await _on_its_way()
        return answer


async def _on_its_way() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def _ask_and_forget(context: QueueContext, ask: Callable[[], Coroutine[Any, Any, Claim | Lapsed]]) -> Any:
    return await ask()


PLANTED: dict[str, tuple[type, str, Any]] = {
    "a claim is forgotten with its caller": (QueueContext, "claim", _ask_and_forget),
    "a session is forgotten with its caller": (Session, "_release", lambda session, asked: None),
}


def findings() -> set[str]:
    return failing_tests(queues_with(AnswersLater), UnclaimedTests)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings() == set()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[plant])
    assert len(findings()) == 1

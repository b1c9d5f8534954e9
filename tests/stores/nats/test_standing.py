"""The pull of a queue that waits for a message: its pauses while nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import pytest

from tenure._backends.nats import standing
from tenure._backends.nats.standing import PAUSE_MAX, Standing, _Failed, _Pull
from tenure._runtime.backoff import FIRST, STEADY, Backoff
from tenure.testing.loop import run

Answer = Callable[[_Pull], Awaitable[None]]


async def silence(pull: _Pull) -> None:
    raise _Failed


async def empty(pull: _Pull) -> None:
    pull.begins()


async def cut_at_once(pull: _Pull) -> None:
    pull.begins()
    raise _Failed


async def cut_later(pull: _Pull) -> None:
    pull.begins()
    await asyncio.sleep(STEADY)
    raise _Failed


class Answers:
    """What becomes of one pull after the other; when each begins, and ends."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._answers = iter(answers)
        self.over = asyncio.Event()
        self.pauses: list[float] = []
        self._ended_at: float | None = None

    async def pull_one(self, pull: _Pull) -> None:
        now = asyncio.get_running_loop().time
        if self._ended_at is not None:
            self.pauses.append(now() - self._ended_at)
        answer = next(self._answers, None)
        if answer is None:
            self.over.set()
            await asyncio.Event().wait()
        else:
            try:
                await answer(pull)
            finally:
                self._ended_at = now()

    def failed(self, queue: str) -> None:
        pass


def pauses_between(*answers: Answer) -> list[float]:
    """Return the pauses after each of *answers*, in seconds."""

    async def main() -> list[float]:
        given = Answers(answers)
        pull = _Pull(cast(Standing, given), "orders")
        await given.over.wait()
        pull.close()
        await asyncio.gather(pull.ended, return_exceptions=True)
        return [round(pause, 9) for pause in given.pauses]

    return run(main(), seed=1)


GROWN = [FIRST, 2 * FIRST, 4 * FIRST]
ENOUGH = 9
ANEW = [(empty, [0.0, *GROWN[:2]]), (cut_later, GROWN)]
"""What ends the silence, and the pauses after it and after two more silences."""


@pytest.fixture(autouse=True)
def unshortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: most)


def test_they_double_up_to_the_longest() -> None:
    assert pauses_between(*[silence] * ENOUGH)[:3] == GROWN
    assert pauses_between(*[silence] * ENOUGH)[-1] == PAUSE_MAX
    assert pauses_between(*[cut_at_once] * ENOUGH)[-1] == PAUSE_MAX


def pauses_after(answer: Answer) -> list[float]:
    return pauses_between(*[silence] * ENOUGH, answer, silence, silence)[ENOUGH:]


@pytest.mark.parametrize(("answer", "wanted"), ANEW)
def test_they_begin_anew_after(answer: Answer, wanted: list[float]) -> None:
    assert pauses_after(answer) == wanted


class NeverAnew(Backoff):
    def reset(self) -> None:
        pass


class OnlyAfterAnswers(Backoff):
    def reset_after(self, lasted: float) -> None:
        pass


@pytest.mark.parametrize(("bug", "answer", "wanted"), [(NeverAnew, *ANEW[0]), (OnlyAfterAnswers, *ANEW[1])])
def test_a_planted_bug_is_found(bug: Any, answer: Answer, wanted: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "Backoff", bug)
    assert pauses_after(answer) != wanted

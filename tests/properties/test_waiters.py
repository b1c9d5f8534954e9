"""Properties of waking: whatever becomes of those who are woken, no message is left while somebody waits for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenure._queue.waiters import Waiters


@dataclass(eq=False)
class Asker:
    """A call of receive(), or a consumer with so much room, and where its question is."""

    hall: Hall
    room: int
    is_call: bool
    question: int | None = None  # -1: on its way; else what the answer brings
    limit: int = 0  # so many it asked for
    is_told: bool = False
    is_to_retry: bool = False
    is_paused: bool = False

    def __post_init__(self) -> None:
        self.waiter = self.hall.waiters.join(self.wake)
        self.begin()

    def wake(self) -> bool:
        if self.is_call:
            self.is_told = True  # it asks when its task runs, unless that is cancelled before
            return True
        return self.begin() or self.is_noted()

    def is_noted(self) -> bool:
        self.is_told = True
        return False

    def begin(self) -> bool:
        if self.question is not None or not self.can_ask:
            return False
        self.is_told = self.is_to_retry = False
        self.question, self.limit = -1, self.room
        self.hall.questions += 1
        self.hall.waiters.asks(self.waiter)
        return True

    @property
    def can_ask(self) -> bool:
        return self.room > 0 and not self.is_paused

    def pause(self) -> None:
        self.is_paused = not self.is_call

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self.is_told = True
            self.begin()

    def execute(self) -> None:
        if self.question == -1:
            self.question = min(self.limit, self.hall.messages)
            self.hall.messages -= self.question

    def arrive(self) -> None:
        if self.question is None or self.question < 0:
            return
        got = self.question
        self.question = None
        self.hall.waiters.answered(self.waiter, found=got > 0)
        if self.is_call and got:
            self.leave()
            return
        self.room -= got
        if not self.is_call and (self.is_told or got == self.limit):
            self.is_told = True
            self.begin()

    def fail(self) -> None:
        if self.question == -1:
            self.question = None
            self.hall.waiters.failed(self.waiter)
            if self.is_call:
                self.leave()
            else:
                self.is_to_retry = True

    def leave(self) -> None:
        """Go: what a question brings then is given back, and told of."""
        brought, self.question = max(self.question or 0, 0), None
        self.hall.askers.remove(self)
        self.hall.waiters.leave(self.waiter)
        if brought:
            self.hall.send(brought)

    def finish(self) -> None:
        """End a handler."""
        if not self.is_call and self.room < 2:
            self.room += 1
            if self.is_told:
                self.begin()

    def run(self) -> None:
        """Let its task run, if it was woken, or has to ask again."""
        if self.question is None and (self.is_to_retry or (self.is_call and self.is_told)):
            self.begin()


@dataclass
class Hall:
    """A store with so many messages, and those who wait for them."""

    waiters: Waiters = field(default_factory=Waiters)
    askers: list[Asker] = field(default_factory=list)
    messages: int = 0
    questions: int = 0

    def send(self, count: int) -> None:
        self.messages += count
        self.waiters.hint()

    def seen(self) -> object:
        """Return what changes as long as anything happens."""
        return self.questions, [(one.question, one.is_told, one.is_to_retry) for one in self.askers]

    def come_to_rest(self, *, retries: bool = True) -> None:
        """Let happen what happens by itself, with no handler ending; *retries*: also what only time brings."""
        for _ in range(1_000):
            before = self.seen()
            for step in (Asker.run, Asker.execute, Asker.arrive):
                for one in list(self.askers):
                    if retries or not one.is_to_retry:
                        step(one)
            if before == self.seen():
                return
        pytest.fail("they never come to rest")


STEPS: dict[str, Callable[[Asker], None]] = {
    "run": Asker.run,
    "execute": Asker.execute,
    "arrive": Asker.arrive,
    "fail": Asker.fail,
    "leave": Asker.leave,
    "finish": Asker.finish,
    "pause": Asker.pause,
    "resume": Asker.resume,
}
MOVES = st.tuples(st.sampled_from([*STEPS, "send", "call", "consume"]), st.integers(0, 9))


FAILED_WITH_A_HINT = [
    ("consume", 0),
    ("execute", 0),
    ("arrive", 0),
    ("consume", 0),
    ("execute", 1),
]  # one is idle, one asks
FAILED_WITH_A_HINT += [("send", 0), ("fail", 0), ("arrive", 1)]


@settings(max_examples=300, deadline=None)
@example(FAILED_WITH_A_HINT)
@given(st.lists(MOVES, max_size=60))
def test_no_message_is_left_while_somebody_waits_who_has_room(moves: list[tuple[str, int]]) -> None:
    hall = Hall()
    for move, number in moves:
        if move == "send":
            hall.send(1 + number % 4)
        elif move == "call":
            hall.askers.append(Asker(hall, 1, is_call=True))
        elif move == "consume":
            hall.askers.append(Asker(hall, 1 + number % 2, is_call=False))
        elif hall.askers:
            STEPS[move](hall.askers[number % len(hall.askers)])
    hall.come_to_rest(retries=False)
    assert not hall.messages or not [one for one in hall.askers if one.can_ask and not one.is_to_retry]
    hall.come_to_rest()
    assert not hall.messages or not [one for one in hall.askers if one.can_ask]
    for _ in range(2 * len(hall.askers)):  # nor does it wait for the next look, once a handler has ended
        for one in list(hall.askers):
            if not one.is_call and hall.messages:
                one.finish()
                hall.come_to_rest()
                assert not hall.messages or not [one for one in hall.askers if one.can_ask]


@pytest.mark.parametrize("is_call", [True, False], ids=["calls", "consumers"])
def test_one_message_costs_a_few_questions_however_many_wait(is_call: bool) -> None:
    hall = Hall()
    hall.askers += [Asker(hall, 1, is_call=is_call) for _ in range(100)]
    hall.come_to_rest()
    assert hall.questions == 100
    hall.send(1)
    hall.come_to_rest()
    assert hall.questions <= 103
    hall.send(99 if is_call else 60)
    hall.come_to_rest()
    assert hall.messages == 0
    assert hall.questions <= 100 + 3 * 100


def test_failures_are_not_passed_round_in_a_circle() -> None:
    hall = Hall()
    hall.askers += [Asker(hall, 1, is_call=False) for _ in range(3)]
    hall.come_to_rest()
    hall.send(1)
    for _ in range(10):
        for one in hall.askers:
            one.fail()
    assert hall.questions == 3 + 3
    hall.come_to_rest()  # each asks again in its own time
    assert hall.messages == 0


def test_a_hint_outlasts_a_question_that_did_not_get_through() -> None:
    waiters = Waiters()
    woken: list[str] = []

    def wake(name: str) -> Callable[[], bool]:
        def wakes() -> bool:
            woken.append(name)
            return True

        return wakes

    first, second = (waiters.join(wake(name)) for name in ("first", "second"))
    for one in (first, second):
        waiters.asks(one)
        waiters.answered(one, found=False)
    waiters.hint()
    assert woken == ["first"]
    waiters.asks(first)
    waiters.answered(first, found=False, again=True)
    waiters.asks(first)  # by itself, and still for the hint
    waiters.answered(first, found=True)
    assert woken == ["first", "second"]

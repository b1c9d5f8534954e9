"""Properties of waking: no message is left while a waiter has free slots, whatever becomes of the woken waiters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenure._queue.waiters import Waiter, Waiters


@dataclass(eq=False)
class Requester:
    """A call of receive(), or a consumer with free slots, and the state of its request."""

    model: QueueModel
    free_slots: int
    is_call: bool
    request: int | None = None  # -1: sent; otherwise the number of messages in the answer
    limit: int = 0  # the number requested
    is_woken: bool = False
    is_to_retry: bool = False
    is_paused: bool = False

    def __post_init__(self) -> None:
        self.waiter = self.model.waiters.join(self.wake)
        self.begin()

    def wake(self) -> bool:
        if self.is_call:
            self.is_woken = True  # it asks when its task runs, unless it is cancelled before
            return True
        return self.begin() or self.note_hint()

    def note_hint(self) -> bool:
        self.is_woken = True
        return False

    def begin(self) -> bool:
        if self.request is not None or not self.can_ask:
            return False
        self.is_woken = self.is_to_retry = False
        self.request, self.limit = -1, self.free_slots
        self.model.requests += 1
        self.model.waiters.asks(self.waiter)
        return True

    @property
    def can_ask(self) -> bool:
        return self.free_slots > 0 and not self.is_paused

    def pause(self) -> None:
        self.is_paused = not self.is_call

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self.is_woken = True
            self.begin()

    def execute(self) -> None:
        if self.request == -1:
            self.request = min(self.limit, self.model.messages)
            self.model.messages -= self.request

    def arrive(self) -> None:
        if self.request is None or self.request < 0:
            return
        got = self.request
        self.request = None
        self.model.waiters.answered(self.waiter, found=got > 0)
        if self.is_call and got:
            self.leave()
            return
        self.free_slots -= got
        if not self.is_call and (self.is_woken or got == self.limit):
            self.is_woken = True
            self.begin()

    def fail(self) -> None:
        if self.request == -1:
            self.request = None
            self.model.waiters.failed(self.waiter)
            if self.is_call:
                self.leave()
            else:
                self.is_to_retry = True

    def leave(self) -> None:
        """Leave: messages that its request still brings are given back, with a hint."""
        brought, self.request = max(self.request or 0, 0), None
        self.model.requesters.remove(self)
        self.model.waiters.leave(self.waiter)
        if brought:
            self.model.send(brought)

    def finish(self) -> None:
        """End a handler."""
        if not self.is_call and self.free_slots < 2:
            self.free_slots += 1
            if self.is_woken:
                self.begin()

    def run(self) -> None:
        """Let its task run, if it was woken, or has to ask again."""
        if self.request is None and (self.is_to_retry or (self.is_call and self.is_woken)):
            self.begin()


@dataclass
class QueueModel:
    """A store with messages, and the waiters for them."""

    waiters: Waiters = field(default_factory=Waiters)
    requesters: list[Requester] = field(default_factory=list)
    messages: int = 0
    requests: int = 0

    def send(self, count: int) -> None:
        self.messages += count
        self.waiters.hint()

    def seen(self) -> object:
        """Return a value that changes with every step."""
        return self.requests, [(one.request, one.is_woken, one.is_to_retry) for one in self.requesters]

    def run_until_idle(self, *, retries: bool = True) -> None:
        """Run all steps that need no handler to end; with *retries*, also those that wait for a time."""
        for _ in range(1_000):
            before = self.seen()
            for step in (Requester.run, Requester.execute, Requester.arrive):
                for one in list(self.requesters):
                    if retries or not one.is_to_retry:
                        step(one)
            if before == self.seen():
                return
        pytest.fail("they never become idle")


STEPS: dict[str, Callable[[Requester], None]] = {
    "run": Requester.run,
    "execute": Requester.execute,
    "arrive": Requester.arrive,
    "fail": Requester.fail,
    "leave": Requester.leave,
    "finish": Requester.finish,
    "pause": Requester.pause,
    "resume": Requester.resume,
}
MOVES = st.tuples(st.sampled_from([*STEPS, "send", "call", "consume"]), st.integers(0, 9))


FAILED_WITH_A_HINT = [
    ("consume", 0),
    ("execute", 0),
    ("arrive", 0),
    ("consume", 0),
    ("execute", 1),
]  # one is idle, one has sent a request
FAILED_WITH_A_HINT += [("send", 0), ("fail", 0), ("arrive", 1)]


@settings(max_examples=300, deadline=None)
@example(FAILED_WITH_A_HINT)
@given(st.lists(MOVES, max_size=60))
def test_no_message_is_left_while_a_waiter_has_free_slots(moves: list[tuple[str, int]]) -> None:
    model = QueueModel()
    for move, number in moves:
        if move == "send":
            model.send(1 + number % 4)
        elif move == "call":
            model.requesters.append(Requester(model, 1, is_call=True))
        elif move == "consume":
            model.requesters.append(Requester(model, 1 + number % 2, is_call=False))
        elif model.requesters:
            STEPS[move](model.requesters[number % len(model.requesters)])
    model.run_until_idle(retries=False)
    assert not model.messages or not [one for one in model.requesters if one.can_ask and not one.is_to_retry]
    model.run_until_idle()
    assert not model.messages or not [one for one in model.requesters if one.can_ask]
    for _ in range(2 * len(model.requesters)):  # nor does it wait for the next poll, once a handler has ended
        for one in list(model.requesters):
            if not one.is_call and model.messages:
                one.finish()
                model.run_until_idle()
                assert not model.messages or not [one for one in model.requesters if one.can_ask]


@pytest.mark.parametrize("is_call", [True, False], ids=["calls", "consumers"])
def test_one_message_costs_a_few_requests_with_any_number_of_waiters(is_call: bool) -> None:
    model = QueueModel()
    model.requesters += [Requester(model, 1, is_call=is_call) for _ in range(100)]
    model.run_until_idle()
    assert model.requests == 100
    model.send(1)
    model.run_until_idle()
    assert model.requests <= 103
    model.send(99 if is_call else 60)
    model.run_until_idle()
    assert model.messages == 0
    assert model.requests <= 100 + 3 * 100


def test_failures_cause_no_endless_circle() -> None:
    model = QueueModel()
    model.requesters += [Requester(model, 1, is_call=False) for _ in range(3)]
    model.run_until_idle()
    model.send(1)
    for _ in range(10):
        for one in model.requesters:
            one.fail()
    assert model.requests == 3 + 3
    model.run_until_idle()  # each retries at its own time
    assert model.messages == 0


def test_a_hint_is_kept_when_a_request_fails() -> None:
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
    waiters.asks(first)  # a retry, still for the hint
    waiters.answered(first, found=True)
    assert woken == ["first", "second"]


def test_a_waiter_that_is_answered_at_once_lets_others_be_woken_once() -> None:
    """What has come already is claimed within the wake-up itself."""
    waiters = Waiters()
    woken: list[int] = []

    def join(number: int, *, at_once: bool) -> Waiter:
        def wake() -> bool:
            woken.append(number)
            waiters.asks(waiter)
            if at_once:
                waiters.answered(waiter, found=True)
            return not waiter.has_hint

        waiter = waiters.join(wake)
        waiters.asks(waiter)
        waiters.answered(waiter, found=False)
        return waiter

    join(1, at_once=True)
    waiters.hint()
    assert woken == [1]
    others = [join(number, at_once=False) for number in (2, 3, 4, 5)]
    waiters.hint()
    assert woken == [1, 1, 2, 3]  # those that look for more
    waiters.answered(others[0], found=True)
    assert woken == [1, 1, 2, 3, 4, 5]  # and not once more those that ask

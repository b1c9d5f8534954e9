"""Properties of the machines of a consumer of sessions: whatever comes, in whatever order, at whatever time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure._lease import NoAnswer
from tenure._queue.effects import (
    Accept,
    Accepted,
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Hint,
    LocksEffect,
    LocksEnded,
    MessagesGivenBack,
    NothingLeft,
    Pause,
    PumpEffect,
    ReceiveSession,
    Release,
    Renew,
    Resume,
    Settle,
    Tick,
)
from tenure._queue.lock_group import NEVER, LockGroup
from tenure._queue.locks import Locks
from tenure._queue.message import NO_HEADERS, Delivery, SessionLock, Token
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.session_pump import SessionPump
from tenure._queue.stopping import State
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    SETTLED,
    Abandon,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._timing import Timing

LOCK = 30.0
TIMING = Timing(LOCK)


class Broker:
    """A broker of sessions that is too simple to be wrong; its time is true time.

    As in the stores, a session that is locked hands out its next message whether or not the ones before are settled.
    """

    def __init__(self, sessions: int, messages: int) -> None:
        self.now = 0.0
        self.waiting: dict[str, list[int]] = {}
        for number in range(sessions):
            self.waiting[f"s{number}"] = [number * 100 + one for one in range(messages)]
        self.deliveries: Counter[int] = Counter()
        self.locked: dict[str, tuple[Token, float]] = {}
        self.received: dict[int, Token] = {}  # sequence: the token under which it is with a consumer
        self.completed: dict[str, list[int]] = {name: [] for name in self.waiting}
        self.tokens = 0

    def holds(self, session: str, token: Token) -> bool:
        held, until = self.locked.get(session, (0, 0.0))
        return held == token and self.now < until

    def accept(self) -> SessionLock | None:
        for session, messages in self.waiting.items():
            if messages and self.now >= self.locked.get(session, (0, 0.0))[1]:
                self.tokens += 1
                self.locked[session] = (self.tokens, self.now + LOCK)
                return SessionLock("q", session, self.tokens, 0.0)
        return None

    def receive(self, lock: SessionLock) -> list[Delivery] | None:
        if not self.holds(lock.session, lock.token):
            return None
        for one in self.waiting[lock.session]:
            if self.received.get(one) != lock.token:
                self.received[one] = lock.token
                self.deliveries[one] += 1
                count = self.deliveries[one]
                return [Delivery("q", one, lock.token, str(one), b"", NO_HEADERS, count, 0.0, 0.0, lock.session)]
        return []

    def before(self, delivery: Delivery) -> list[int]:
        """Return the messages before *delivery* in its session that are with the same consumer, and not settled."""
        waiting = self.waiting[delivery.session or ""]
        return [one for one in waiting if one < delivery.sequence and self.received.get(one) == delivery.token]

    def release(self, lock: SessionLock) -> Settled | Lapsed:
        if not self.holds(lock.session, lock.token):
            return LAPSED
        del self.locked[lock.session]
        for one, token in list(self.received.items()):
            if token == lock.token:
                self.give_back(one)
        return SETTLED

    def give_back(self, one: int) -> None:
        """Take a message back, uncounted."""
        del self.received[one]
        self.deliveries[one] -= 1

    def renew(self, held: Sequence[SessionLock]) -> list[Renewed | Lapsed]:
        answers: list[Renewed | Lapsed] = []
        for one in held:
            if self.holds(one.session, one.token):
                self.locked[one.session] = (one.token, self.now + LOCK)
                answers.append(Renewed(0.0))
            else:
                answers.append(LAPSED)
        return answers

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        answers: list[Settled | Lapsed] = []
        for one, verdict in settlements:
            assert one.session is not None
            if not self.holds(one.session, one.token) or self.received.get(one.sequence) != one.token:
                answers.append(LAPSED)
                continue
            if verdict is GIVE_BACK:
                self.give_back(one.sequence)
            else:
                del self.received[one.sequence]
            if verdict is COMPLETE:
                self.waiting[one.session].remove(one.sequence)
                self.completed[one.session].append(one.sequence)
            answers.append(SETTLED)
        return answers


@dataclass
class Node:
    """A consumer: its machines, its handlers, its questions under way. Its clock runs at *rate*."""

    broker: Broker
    rng: random.Random
    rate: float
    loss: float
    slow: float
    settings: PumpSettings
    kind: type[SessionPump] = SessionPump
    groups: dict[Token, LockGroup] = field(default_factory=dict)
    running: dict[tuple[Token, int], tuple[Delivery, float]] = field(default_factory=dict)
    road: list[tuple[float, Any, Any]] = field(default_factory=list)  # (arrives at, machine, event)
    violations: list[str] = field(default_factory=list)
    blocked_until: float = 0.0
    cut_until: float = 0.0
    nothing_left_at: float = NEVER

    def __post_init__(self) -> None:
        args: tuple[Any, ...] = ("q", "me", self.settings, self.rng, self.groups)
        self.pump = self.kind(*args, now=self.now)
        self.locks = Locks(*args, now=self.now)

    @property
    def now(self) -> float:
        return self.broker.now * self.rate + 1_000.0

    def feed(self, event: Any) -> None:
        self.perform(self.pump, self.pump.handle(event, self.now))

    def step(self) -> None:
        """Do what is due at this moment."""
        now = self.broker.now
        for one in [one for one in self.road if one[0] <= now]:
            self.road.remove(one)
            if one[1] is self.pump and now < self.blocked_until:
                self.road.append((self.blocked_until, *one[1:]))
            else:
                self.perform(one[1], one[1].handle(one[2], self.now))
        if self.now >= self.locks.wake_at:
            self.perform(self.locks, self.locks.handle(Tick(), self.now))
        if now >= self.blocked_until:
            self._tick_now()

    def _tick_now(self) -> None:
        for key, (delivery, until) in list(self.running.items()):
            if self.broker.now >= until:
                del self.running[key]
                self._done(delivery, COMPLETE if self.rng.random() < 0.8 else Abandon())
        while len(self.running) < self.settings.concurrency:
            taken = self.pump.take(self.now)
            if taken is None:
                break
            if not self.believes(taken):
                self.violations.append(f"took {taken.sequence} when its lock was not sure")
            if any(one.token == taken.token for one, _ in self.running.values()):
                self.violations.append(f"took {taken.sequence} while another of its session was handled")
            if before := self.broker.before(taken):
                self.violations.append(f"took {taken.sequence} before {before} were settled")
            seconds = self.rng.choice([0.0, 0.1, 3.0, 50.0, 300.0])
            self.running[taken.token, taken.sequence] = (taken, self.broker.now + seconds)
        self.feed(Tick())

    def _done(self, delivery: Delivery, verdict: Verdict) -> None:
        if self.rng.random() < 0.05:  # a thread runs on: its session is left
            self.pump.let_expire(delivery)
        else:
            self.pump.done(delivery, verdict)

    def perform(self, machine: Any, effects: Sequence[PumpEffect | LocksEffect]) -> None:
        for effect in effects:
            match effect:
                case Accept(request_id):
                    self.ask(
                        machine, request_id, self.broker.accept, lambda request_id, answer: Accepted(request_id, answer)
                    )
                case ReceiveSession(request_id, lock):
                    self.ask(machine, request_id, lambda lock=lock: self.broker.receive(lock), _claimed)
                case Release(request_id, lock):
                    self.ask(machine, request_id, lambda lock=lock: [self.broker.release(lock)], Answered)
                case Settle(request_id, settlements):
                    self.ask(
                        machine, request_id, lambda settlements=settlements: self.broker.settle(settlements), Answered
                    )
                case Renew(request_id, held):
                    self.ask(machine, request_id, lambda held=held: self.broker.renew(held), Answered)
                case CancelHandler(delivery, _):
                    if self.rng.random() < 0.9:  # others run on
                        self._cancel(delivery, Abandon())
                case CancelAll():
                    for delivery, _until in list(self.running.values()):
                        self._cancel(delivery, GIVE_BACK)
                case LocksEnded() | MessagesGivenBack():
                    self.road.append((self.broker.now, self.pump, effect))
                case NothingLeft():
                    self.nothing_left_at = min(self.nothing_left_at, self.broker.now)

    def _cancel(self, delivery: Delivery, verdict: Verdict) -> None:
        if self.running.pop((delivery.token, delivery.sequence), None) is not None:
            self.pump.done(delivery, verdict)

    def ask(self, machine: Any, request_id: int, question: Any, event: Any) -> None:
        """Send a question: it arrives or not, its answer comes or not, sooner or later."""
        delay = self.rng.choice([0.0, 0.01, self.slow])
        fate = self.rng.random()
        if fate < self.loss or self.broker.now < self.cut_until:
            answer: Any = Answered(request_id, NoAnswer("lost on its way there"))
        else:
            answer = event(request_id, question())
            if fate < 2 * self.loss:
                answer = Answered(request_id, NoAnswer("lost on its way back"))
        self.road.append((self.broker.now + delay, machine, answer))

    def believes(self, delivery: Delivery) -> bool:
        """Whether the machines believe in this lock now."""
        return self.now < self.pump.trusted_until(delivery)

    def sure(self) -> set[str | None]:
        return {one.session for one, _ in self.running.values() if self.believes(one)}


def _claimed(request_id: int, found: list[Delivery] | None) -> Any:
    return Answered(request_id, [LAPSED]) if found is None else Claimed(request_id, found)


def check(nodes: list[Node]) -> None:
    sure = Counter(session for node in nodes for session in node.sure())
    assert not [session for session, count in sure.items() if count > 1], "two are sure of one session"
    for node in nodes:
        assert not node.violations
        for delivery, _ in node.running.values():
            if node.believes(delivery):
                assert node.broker.holds(delivery.session or "", delivery.token), "it is believed and not ours"


def live(seed: int, loss: float, slow: float, kind: type[SessionPump] = SessionPump) -> None:
    """Live through a stretch of trouble, then demand that everything is handled."""
    rng = random.Random(seed)
    broker = Broker(sessions=8, messages=5)
    nodes = []
    for rate in (1.0, 0.96, 1.05):
        settings = PumpSettings(TIMING, concurrency=rng.choice([1, 3]), max_hold=120.0)
        nodes.append(Node(broker, random.Random(rng.random()), rate, loss, slow, settings, kind))
    step = 0.5
    for _ in range(600):
        broker.now += rng.choice([0.01, step])
        for node in nodes:
            if rng.random() < 0.01:  # user code blocks this node's loop; its locks are kept all the same
                node.blocked_until = broker.now + rng.choice([1.0, 40.0])
            if rng.random() < 0.005:  # this node's way to the broker is cut
                node.cut_until = broker.now + rng.choice([5.0, 60.0])
            if rng.random() < 0.01:
                node.feed(rng.choice([Pause(), Resume(), Hint()]))
            node.step()
        check(nodes)
    for node in nodes:  # faults stop, and progress is demanded
        node.loss, node.slow, node.cut_until = 0.0, 0.01, 0.0
        node.feed(Resume())
    for _ in range(8_000):
        broker.now += step
        for node in nodes:
            node.step()
        check(nodes)
        if not any(broker.waiting.values()):
            break
    for messages in broker.completed.values():
        assert len(messages) == 5, "not all is handled"
        assert messages == sorted(messages), "out of order"
    for node in nodes:
        node.feed(Drain(node.now + 5.0, NEVER))
        for _ in range(400):
            broker.now += step
            node.step()
        assert node.pump.state is State.STOPPED
        assert not node.groups
        assert node.locks.settled


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([0.5, 5.0, 25.0]))
def test_sessions_are_held_by_one_and_handled_in_order(seed: int, loss: float, slow: float) -> None:
    live(seed, loss, slow)


class _CountsFromAnswer(SessionPump):
    def _accepted(self, event: Accepted, asked_at: float, now: float, effects: list[PumpEffect]) -> None:
        super()._accepted(event, now, now, effects)


class _ReceivesAtOnce(SessionPump):
    """Receives the next message while a handler runs."""

    def take(self, now: float) -> Delivery | None:
        delivery = super().take(now)
        if delivery is not None:
            session = self._sessions[delivery.token]
            session.is_serving = False
            self._ready.append(session)
            session.group.running.clear()
        return delivery


class _GoesOnUnanswered(SessionPump):
    """Keeps a session though nobody knows what was handed out, and overtakes it."""

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        session = self._receiving.get(request_id)
        super()._unanswered(request_id, why, now, effects)
        if session is not None:
            session.must_release = False


class _ReceivesBeforeSettled(SessionPump):
    """Receives the next message when a verdict is passed, and not when it is answered."""

    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        passed = super().done(delivery, verdict)
        if (session := self._sessions.get(delivery.token)) is not None:
            session.group.running.pop(delivery.sequence, None)
            self._advance_if_idle(session)
        return passed


class _ForgetsToRelease(SessionPump):
    def _advance(self, session: Any, now: float, effects: list[PumpEffect]) -> None:
        if self.state is not State.DRAINING:
            super()._advance(session, now, effects)


class _NeverLooksAgain(SessionPump):
    """Takes a question without an answer for the last one."""

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        super()._unanswered(request_id, why, now, effects)
        self._claim_times.next_at = NEVER


@pytest.mark.parametrize(
    "bug",
    [
        _CountsFromAnswer,
        _ReceivesAtOnce,
        _GoesOnUnanswered,
        _ReceivesBeforeSettled,
        _ForgetsToRelease,
        _NeverLooksAgain,
    ],
)
def test_planted_bugs_are_found(bug: type[SessionPump]) -> None:
    for seed in range(60):
        try:
            live(seed, loss=0.3 if seed % 2 else 0.05, slow=25.0, kind=bug)
        except AssertionError:
            return
    pytest.fail("nothing was found: a checker that can't fail proves nothing")


def lone(concurrency: int = 2, **more: Any) -> tuple[SessionPump, Locks, dict[Token, LockGroup]]:
    groups: dict[Token, LockGroup] = {}
    given = PumpSettings(TIMING, concurrency, **more)
    args: tuple[Any, ...] = ("q", "me", given, random.Random(1), groups)
    return SessionPump(*args, now=0.0), Locks(*args, now=0.0), groups


def of(kind: Callable[..., Any], effects: Sequence[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]  # type: ignore[arg-type]


def test_accepting_begins_with_one_question_and_doubles() -> None:
    pump, _, _ = lone(concurrency=5)
    asked = of(Accept, pump.handle(Tick(), 0.0))
    counts = [len(asked)]
    for token in range(2):
        effects = pump.handle(Accepted(asked[0].request_id, SessionLock("q", f"s{token}", token, 0.0)), 0.0)
        asked = [*asked[1:], *of(Accept, effects)]
        counts.append(len(asked))
    assert counts == [1, 2, 3]  # no more than there is room for
    for one in asked:
        effects = pump.handle(Accepted(one.request_id, None), 0.0)
        assert not of(Accept, effects)


def test_what_is_left_is_judged_when_all_questions_are_answered() -> None:
    """A question that finds nothing says nothing as long as a session is held: its messages may come back."""
    pump, _, _ = lone(until_empty=True)
    [first] = of(Accept, pump.handle(Tick(), 0.0))
    effects = pump.handle(Accepted(first.request_id, SessionLock("q", "s", 1, 0.0)), 0.0)
    [receive], [second] = of(ReceiveSession, effects), of(Accept, effects)
    effects = pump.handle(Accepted(second.request_id, None), 0.0)
    assert not of(NothingLeft, effects)
    effects = pump.handle(Claimed(receive.request_id, ()), 1.0)
    [release] = of(Release, effects)
    effects = pump.handle(Answered(release.request_id, [SETTLED]), 2.0)
    [again] = of(Accept, effects)
    assert of(NothingLeft, pump.handle(Accepted(again.request_id, None), 3.0))


def test_a_message_that_its_session_holds_up_is_waited_for() -> None:
    """The answer that brings the last message allowed says so: a later one may be lost."""
    pump, _, _ = lone(until_empty=True)
    [first] = of(Accept, pump.handle(Tick(), 0.0))
    effects = pump.handle(Accepted(first.request_id, SessionLock("q", "s", 1, 0.0)), 0.0)
    [receive], [second] = of(ReceiveSession, effects), of(Accept, effects)
    pump.handle(Accepted(second.request_id, None), 0.0)
    one = Delivery("q", 1, 1, "a", b"", NO_HEADERS, 1, 0.0, 0.0, "s")
    pump.handle(Claimed(receive.request_id, [one], held_up_for=20.0), 0.0)
    taken = pump.take(0.0)
    assert taken is not None
    pump.done(taken)
    [settle] = of(Settle, pump.handle(Tick(), 0.1))
    [receive] = of(ReceiveSession, pump.handle(Answered(settle.request_id, [SETTLED]), 0.2))
    effects = pump.handle(Answered(receive.request_id, NoAnswer("lost")), 0.3)
    [release] = of(Release, [*effects, *pump.handle(Tick(), 0.4)])
    effects = [*pump.handle(Answered(release.request_id, [SETTLED]), 0.5), *pump.handle(Tick(), 5.0)]
    at = 5.0
    while at < 20.0:
        [again] = of(Accept, effects)
        assert not of(NothingLeft, pump.handle(Accepted(again.request_id, None), at))
        at = pump.wake_at
        effects = pump.handle(Tick(), at)
    [again] = of(Accept, effects)
    assert of(NothingLeft, pump.handle(Accepted(again.request_id, None), at))


def test_a_session_in_which_a_handler_was_stopped_is_released_and_not_received_in_again() -> None:
    pump, locks, groups = lone(max_hold=5.0)
    [first] = of(Accept, pump.handle(Tick(), 0.0))
    [receive] = of(ReceiveSession, pump.handle(Accepted(first.request_id, SessionLock("q", "s", 1, 0.0)), 0.0))
    one = Delivery("q", 1, 1, "a", b"", NO_HEADERS, 1, 0.0, 0.0, "s")
    pump.handle(Claimed(receive.request_id, [one]), 0.0)
    assert pump.take(0.0) is one
    [ended] = of(LocksEnded, locks.handle(Tick(), 5.0))
    assert of(CancelHandler, pump.handle(ended, 5.0))
    assert pump.done(one, Abandon())
    [settle] = of(Settle, pump.handle(Tick(), 5.0))
    effects = pump.handle(Answered(settle.request_id, [SETTLED]), 5.0)
    assert of(Release, effects)
    assert not of(ReceiveSession, effects)
    assert groups == {}


def test_a_session_is_released_when_a_receive_in_it_gets_no_answer() -> None:
    """The receive may have locked a message that nobody knows of: later ones would overtake it."""
    pump, _, groups = lone(concurrency=1)
    [first] = of(Accept, pump.handle(Tick(), 0.0))
    [receive] = of(ReceiveSession, pump.handle(Accepted(first.request_id, SessionLock("q", "s", 1, 0.0)), 0.0))
    effects = pump.handle(Answered(receive.request_id, NoAnswer("timed out")), 1.0)
    assert [one.session.token for one in of(Release, effects)] == [1]
    assert not of(ReceiveSession, effects)
    assert groups == {}


def test_a_handler_that_runs_on_keeps_its_session_from_others_until_the_lock_ends() -> None:
    pump, locks, groups = lone(max_hold=5.0)
    [first] = of(Accept, pump.handle(Tick(), 0.0))
    [receive] = of(ReceiveSession, pump.handle(Accepted(first.request_id, SessionLock("q", "s", 1, 0.0)), 0.0))
    one = Delivery("q", 1, 1, "a", b"", NO_HEADERS, 1, 0.0, 0.0, "s")
    pump.handle(Claimed(receive.request_id, [one]), 0.0)
    pump.take(0.0)
    now = 5.0
    while now < LOCK:
        for effect in locks.handle(Tick(), now):
            if isinstance(effect, Renew):
                locks.handle(Answered(effect.request_id, [Renewed(0.0)]), now)
            if isinstance(effect, LocksEnded):
                pump.handle(effect, now)
        now = max(now + 0.1, locks.wake_at)
    assert groups[1].over
    pump.let_expire(one)
    assert not of(Release, pump.handle(Tick(), now))
    assert groups == {}


class _LookedAt(dict[int, tuple[Delivery, float]]):
    """What runs in a session. After the other thread has looked at it for the first time, the pump goes on."""

    def __init__(self, go_on: Callable[[], object]) -> None:
        super().__init__()
        self._go_on: Callable[[], object] | None = go_on

    def values(self) -> Any:
        found = list(super().values())
        if found and self._go_on is not None:
            go_on, self._go_on = self._go_on, None
            go_on()
        return found


@pytest.mark.parametrize(("verdict", "next_count"), [(Abandon(), 2), (GIVE_BACK, 1)])
def test_a_message_that_is_received_again_while_the_locks_look_at_its_last_delivery_is_watched_by_itself(
    verdict: Verdict, next_count: int
) -> None:
    pump, locks, groups = lone(concurrency=1, max_hold=5.0)
    [first] = of(Accept, pump.handle(Tick(), 0.0))
    [receive] = of(ReceiveSession, pump.handle(Accepted(first.request_id, SessionLock("q", "s", 1, 0.0)), 0.0))
    one, two = (Delivery("q", 1, 1, "a", b"", NO_HEADERS, count, 0.0, 0.0, "s") for count in (1, next_count))

    def abandon_and_receive_again() -> None:
        assert pump.done(one, verdict)
        [settle] = of(Settle, pump.handle(Tick(), 5.0))
        [again] = of(ReceiveSession, pump.handle(Answered(settle.request_id, [SETTLED]), 5.0))
        pump.handle(Claimed(again.request_id, [two]), 5.0)
        assert pump.take(5.0) is two

    groups[1].running = _LookedAt(abandon_and_receive_again)
    pump.handle(Claimed(receive.request_id, [one]), 0.0)
    assert pump.take(0.0) is one
    [late] = of(LocksEnded, locks.handle(Tick(), 5.0))
    assert not of(CancelHandler, pump.handle(late, 5.0))
    assert pump.trusted_until(two) == groups[1].trusted_until
    [ended] = of(LocksEnded, locks.handle(Tick(), 10.0))
    assert [stopped.delivery for stopped in of(CancelHandler, pump.handle(ended, 10.0))] == [two]

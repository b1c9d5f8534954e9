"""What an outage costs: the requests of everything that asks again by itself, counted at a proxy in virtual time.

A loop that has lost its back-off still passes every test of its results: it asks, and is right when the store is back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

import tenure
from tenure import Backend, Timing
from tenure._election.acquire_times import AcquireTimes, outage_pause
from tenure._election.driver import Driver
from tenure._election.machine import Machine
from tenure._partitions.machine import PartitionMachine
from tenure._queue.context import POLL
from tenure._queue.hints import LISTEN_AGAIN
from tenure._queue.pump import Pump
from tenure._queue.requests import Requests
from tenure._queue.retry import RetryPolicy
from tenure._queue.settling import Settling
from tenure._queue.startup import PAUSE_MAX
from tenure._queue.waiters import Waiters
from tenure._schedule.machine import RETRY_MAX, ScheduleMachine
from tenure.testing import connect_here
from tenure.testing.loop import run
from tests.application.outages import TIMEOUT, Answers, proxies

TIMING = Timing()
MINUTE = 60.0
MINUTES = 4
OFTEN = 0.1
"""Seconds between hints that come all the while, also while nothing is answered."""


# --- what asks ---


async def lead(backend: Backend) -> None:
    await backend.election("chair").run(for_ever)


async def campaign_together(backend: Backend) -> None:
    await asyncio.gather(*(lead(backend) for _ in range(2)))


async def observe(backend: Backend) -> None:
    async for _ in backend.election("chair").observe():
        pass


async def share(backend: Backend) -> None:
    both = (backend.partitions("shards", 4).run(for_ever) for _ in range(2))
    await asyncio.gather(*both)


async def consume(backend: Backend) -> None:
    await backend.queue("orders").consume(handle)


async def consume_sessions(backend: Backend) -> None:
    await backend.queue("orders").consume(handle, sessions=True)


async def settle(backend: Backend) -> None:
    queue = backend.queue("orders")
    await queue.send(b"a")
    await queue.consume(handle_after_a_while)


async def send_slots(backend: Backend) -> None:
    await backend.schedule("beat", 30.0, queue="slots").run()


async def wait_for_replies(backend: Backend) -> None:
    await backend.queue("orders").request(b"a", timeout=1e6)


async def for_ever(_: object) -> None:
    await asyncio.Event().wait()


async def handle(_: tenure.Message) -> None: ...


async def handle_after_a_while(_: tenure.Message) -> None:
    await asyncio.sleep(BEGUN_AFTER + 5.0)


async def remember(backend: Backend) -> None:
    queue = backend.queue("orders", max_deliveries=1_000_000)
    await queue.send(b"a", delay=BEGUN_AFTER)
    await queue.consume(handle, inbox_window=3_600.0, retry=RetryPolicy(initial=0.0, maximum=0.0))


BEGUN_AFTER = 20.0
"""Seconds after which everything has begun."""


class Loop(NamedTuple):
    """Something that asks again by itself, and how often at most. All is without jitter."""

    begin: Callable[[Backend], Awaitable[None]]
    every: float
    """The seconds between two requests, of whatever kind, once there was no answer for long."""
    first: float
    """How many requests it may send in the first minute, at the shorter pauses of its begin."""
    hint_share: float = 1.0
    """The share of ``every`` that is left if hints come all the while; 0 if that isn't tried, as these are answered."""
    read_only_share: float = 1.0
    """The share of ``every`` that is left if it reads, and what it writes then has no answer."""
    has_hints: bool = True
    begins_before: bool = True
    """Whether it has begun when the outage does; else it begins in it."""
    only: tuple[str, ...] = ()
    """The requests that have no answer; all, if there are none."""


LOOPS = {
    "a candidate": Loop(lead, outage_pause(TIMING), first=85, hint_share=1 / 2, read_only_share=1 / 2),
    "a candidate without hints": Loop(lead, outage_pause(TIMING), first=60, read_only_share=1 / 2, has_hints=False),
    "an observer": Loop(observe, TIMING.retry_every, first=32, only=("inspect",)),
    "two members": Loop(share, TIMING.retry_every / 2, first=260, hint_share=1 / 2, read_only_share=1 / 2),
    "a consumer": Loop(consume, 5.0, first=30, read_only_share=1 / 2),
    "a consumer without hints": Loop(consume, 5.0, first=30, read_only_share=1 / 2, has_hints=False),
    "a consumer of sessions": Loop(consume_sessions, 5.0, first=30, read_only_share=1 / 2),
    "a consumer that begins": Loop(consume, PAUSE_MAX, first=45, begins_before=False),
    "a consumer with a verdict": Loop(settle, 5.0 / 2, first=50, read_only_share=2 / 3),
    "a consumer with an inbox": Loop(remember, TIMING.retry_every / 3, first=95, hint_share=0.0, only=("handled",)),
    "a schedule": Loop(send_slots, RETRY_MAX, first=16, read_only_share=1 / 2),
    "a request": Loop(wait_for_replies, POLL, first=20),
    "a request without hints": Loop(wait_for_replies, POLL, first=30, has_hints=False),
}


class Counted(NamedTuple):
    """What the proxies have counted of an outage."""

    by_minute: list[int]
    """The requests in each minute."""
    subscriptions: int
    """How often hints were asked for."""
    back_within: float
    """The seconds from the end of the outage to the first request."""


async def counted(loop: Loop, answers: Answers, hints_every: float | None) -> Counted:
    """Let the store be away for long, and return what was counted of *loop*."""
    time = asyncio.get_running_loop().time
    with proxies(has_hints=loop.has_hints) as stores:
        async with connect_here() as backend:
            (store,) = stores
            asking = None
            if loop.begins_before:
                asking = asyncio.ensure_future(loop.begin(backend))
                await asyncio.sleep(BEGUN_AFTER)
            began = time()
            store.set(answers, *loop.only)
            store.hint_every(hints_every)
            asking = asking or asyncio.ensure_future(loop.begin(backend))
            await asyncio.sleep(MINUTES * MINUTE)
            minutes = Counter(int((one.at - began) // MINUTE) for one in store.requests(since=began))
            subscriptions = len(store.requests("hints", since=began))
            store.hint_every(None)
            store.set("fine")
            ended = time()
            while not (later := store.requests(since=ended)):
                await asyncio.sleep(0.1)
            assert not asking.done()
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
    by_minute = [minutes[minute] for minute in range(MINUTES)]
    return Counted(by_minute, subscriptions, later[0].at - ended)


def complaint(name: str, answers: Answers, hints_every: float | None) -> str | None:
    """Return what is wrong with the requests of a loop in an outage; None if nothing is."""
    loop = LOOPS[name]
    found = run(counted(loop, answers, hints_every), seed=1)
    shortest = loop.every * (loop.hint_share if hints_every else 1.0)
    shortest *= loop.read_only_share if answers == "read only" else 1.0
    longest = max(8.0, 1.3 * loop.every) + (TIMEOUT if answers == "silent" else 0.0)
    first, *others = found.by_minute
    if first > loop.first:
        return f"{first} requests in the first minute"
    if max(others) > MINUTE / shortest + 2:
        return f"{max(others)} requests in a minute"
    if min(others) < 2:
        return f"{min(others)} requests in a minute: it does not go on"
    if found.subscriptions > (MINUTES + 1) * MINUTE / LISTEN_AGAIN:
        return f"hints were asked for {found.subscriptions} times"
    if found.back_within > longest:
        return f"it came back after {found.back_within:.1f} s"
    return None


def outages(name: str) -> list[tuple[Answers, float | None]]:
    """Return the outages that a loop can meet."""
    loop = LOOPS[name]
    kinds: tuple[Answers, ...] = ("fails", "silent") if loop.only else ("fails", "silent", "read only")
    hints = (None, OFTEN) if loop.has_hints and loop.hint_share else (None,)
    return [(kind, every) for kind in kinds for every in hints]


@pytest.mark.parametrize(("name", "answers", "hints_every"), [(name, *one) for name in LOOPS for one in outages(name)])
def test_a_store_that_is_away_is_asked_rarely_and_on(name: str, answers: Answers, hints_every: float | None) -> None:
    assert complaint(name, answers, hints_every) is None


FOLLOWERS = {
    # The leader, and one that stands by.
    "two candidates": (Loop(campaign_together, 0, 0), MINUTE / TIMING.retry_every * (4 + 10)),
    # Both look, and renew their leases together.
    "two members": (Loop(share, 0, 0), MINUTE / TIMING.retry_every * 2 * (10 + 4)),
}
"""What follows hints that may be wrong, and how often it may ask in a minute."""


def followed(name: str) -> str | None:
    """Return what is wrong with the requests of a loop if the store answers, and there are hints all the while."""
    loop, most = FOLLOWERS[name]
    found = max(run(counted(loop, "fine", OFTEN / 5), seed=1).by_minute)
    return f"{found} requests in a minute" if found > most + 5 else None


@pytest.mark.parametrize("name", FOLLOWERS)
def test_hints_are_followed_at_a_limited_rate(name: str) -> None:
    assert followed(name) is None


# --- planted bugs ---


def candidates_never_ask_less(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("tenure._election.acquire_times.outage_pause", lambda timing: timing.retry_every)
    return "a candidate"


def candidates_follow_every_hint(patch: pytest.MonkeyPatch) -> str:
    def hinted(self: AcquireTimes, now: float) -> None:
        self.due = min(self.due, now)

    patch.setattr(AcquireTimes, "hinted", hinted)
    return "a candidate"


def observers_do_not_wait(patch: pytest.MonkeyPatch) -> str:
    watch = Driver.watch
    patch.setattr(Driver, "watch", lambda self, name, poll, longest: watch(self, name, poll / 10, longest))
    return "an observer"


def candidates_subscribe_again_at_once(patch: pytest.MonkeyPatch) -> str:
    follow = Driver.follow_hints
    patch.setattr(Driver, "follow_hints", lambda self, name, on_hint, pause: follow(self, name, on_hint, pause / 100))
    return "a candidate"


def leaders_renew_at_every_hint(patch: pytest.MonkeyPatch) -> str:
    def renew_early(self: Machine, term: Any, now: float) -> None:
        term.renew_at = now

    patch.setattr(Machine, "_renew_early", renew_early)
    return "two candidates"


def members_look_at_every_hint(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(PartitionMachine, "hinted", lambda self, now: self._look_by(now))
    return "two members"


def members_look_again_too_soon(patch: pytest.MonkeyPatch) -> str:
    failed = PartitionMachine.look_failed

    def look_failed(self: PartitionMachine, now: float) -> None:
        failed(self, now)
        self._look_by(now + self.timing.retry_every / 10)

    patch.setattr(PartitionMachine, "look_failed", look_failed)
    return "two members"


def members_claim_a_slot_again_too_soon(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(PartitionMachine, "_pause_after_refusals", lambda self: self.timing.retry_every / 4)
    return "two members"


def consumers_never_ask_less(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Pump, "_retry_in", lambda self, misses: self.settings.timing.retry_every / 4)
    return "a consumer"


def verdicts_are_repeated_too_soon(patch: pytest.MonkeyPatch) -> str:
    ask_again = Settling.ask_again
    patch.setattr(Settling, "ask_again", lambda self, settlements, at: ask_again(self, settlements, at - 5.0))
    return "a consumer with a verdict"


def consumers_that_failed_are_idle(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Waiters, "failed", lambda self, waiter: self.answered(waiter, found=False))
    return "a consumer"


def consumers_subscribe_again_at_once(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("tenure._queue.hints.LISTEN_AGAIN", 0.05)
    return "a consumer"


def consumers_begin_without_pauses(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("tenure._queue.startup.PAUSE_MAX", 0.2)
    return "a consumer that begins"


def inboxes_are_asked_again_at_once(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("tenure._queue.judge.later", lambda wait, rng: wait / 10)
    return "a consumer with an inbox"


def schedules_never_ask_less(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("tenure._schedule.machine.RETRY_MAX", 2.0)
    return "a schedule"


def schedules_take_a_look_for_a_success(patch: pytest.MonkeyPatch) -> str:
    unanswered = ScheduleMachine.unanswered

    def forgetful(self: ScheduleMachine, now: float) -> None:
        unanswered(self, now)
        self._has_failed_to_advance = False

    patch.setattr(ScheduleMachine, "unanswered", forgetful)
    return "a schedule"


def requests_never_ask_less(patch: pytest.MonkeyPatch) -> str:
    pause = Requests._pause
    patch.setattr(Requests, "_pause", lambda self, misses: pause(self, 0))
    return "a request without hints"


PLANTED = [
    candidates_never_ask_less,
    candidates_follow_every_hint,
    candidates_subscribe_again_at_once,
    observers_do_not_wait,
    members_look_at_every_hint,
    members_look_again_too_soon,
    members_claim_a_slot_again_too_soon,
    consumers_never_ask_less,
    consumers_that_failed_are_idle,
    consumers_subscribe_again_at_once,
    consumers_begin_without_pauses,
    verdicts_are_repeated_too_soon,
    inboxes_are_asked_again_at_once,
    schedules_never_ask_less,
    schedules_take_a_look_for_a_success,
    requests_never_ask_less,
]
"""Each plants a bug, and returns the loop that has it."""


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_of_an_outage_is_found(
    plant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = plant(monkeypatch)
    assert any(complaint(name, *outage) for outage in outages(name))


@pytest.mark.parametrize(
    "plant", [candidates_follow_every_hint, leaders_renew_at_every_hint, members_look_at_every_hint]
)
def test_a_planted_bug_of_hints_is_found(
    plant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(followed, FOLLOWERS))

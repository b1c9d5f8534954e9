"""Shared hints: each source is followed once, again when it ends, and no more when nobody listens; none is lost."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from tenure._election.store import Hint
from tenure._runtime.backoff import LONGEST, STEADY
from tenure._runtime.shared_hints import DEAF, SILENT_AFTER, UNUSED_AFTER, SharedHints, Source
from tenure.testing import until
from tenure.testing.loop import run as run_in_virtual_time


class Store:
    """Topics such as ``a/1`` that change; changes are reported to those who are subscribed to ``a``, and no others."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.changes: list[str] = []
        self.kept_from = 0
        """The first change that can still be reported again."""
        self.subscribed: list[Feed] = []
        self.attempts: list[float] = []
        self.is_away = self.is_mute = False
        self.answers = 0.0
        """Seconds until a subscription is confirmed; it is subscribed after half of them."""

    def change(self, topic: str) -> None:
        self.versions[topic] = self.versions.get(topic, 0) + 1
        self.changes.append(topic)
        for feed in self.subscribed:
            if feed.key == topic.partition("/")[0]:
                feed.reported(topic)

    def cut(self) -> None:
        for feed in self.subscribed:
            feed.lost.set()
        self.subscribed = []


class Feeds(SharedHints[str, "Feed"]):
    def __init__(self, store: Store, feed: type[Feed] | None = None) -> None:
        super().__init__()
        self.store = store
        self._feed = feed or Feed
        self.looks_up = 0.0

    async def keys_of(self, topic: str) -> Collection[str]:
        await asyncio.sleep(self.looks_up)
        return (topic.partition("/")[0],)

    def source(self, key: str) -> Feed:
        return self._feed(self, key)


class Feed(Source):
    def __init__(self, hints: Feeds, key: str) -> None:
        super().__init__(hints)
        self.key, self._store, self._hints = key, hints.store, hints
        self.lost = asyncio.Event()
        self.left_topics: list[str] = []

    async def follow(self) -> None:
        store = self._store
        store.attempts.append(asyncio.get_running_loop().time())
        self.lost.clear()
        await asyncio.sleep(store.answers / 2)
        if store.is_away:
            raise ConnectionError("there is no store")
        if store.is_mute:
            self.deaf()
            return
        store.subscribed.append(self)
        try:
            await self.go_on()
            await self.lost.wait()
        finally:
            with suppress(ValueError):
                store.subscribed.remove(self)
            await asyncio.sleep(store.answers)  # until the end is confirmed

    async def go_on(self) -> None:
        await asyncio.sleep(self._store.answers / 2)
        self.live()

    def reported(self, topic: str) -> None:
        self._notifier.notify(topic)

    def left(self, topics: Collection[str]) -> None:
        self.left_topics += topics


class Resumed(Feed):
    """It goes on with the change that it has not seen, unless the store has forgotten that."""

    next_change: int | None = None

    async def go_on(self) -> None:
        store = self._store
        missed = store.changes[self.next_change :] if (self.next_change or -1) >= store.kept_from else None
        for topic in missed or ():
            self.reported(topic)
        self.next_change = len(store.changes)
        self.live(anew=missed is None)

    def reported(self, topic: str) -> None:
        super().reported(topic)
        self.next_change = len(self._store.changes)


class Listening:
    """A task that looks at a topic after each hint, as a candidate does."""

    def __init__(self, hints: Feeds, topic: str, iterator: AsyncIterator[Hint] | None = None) -> None:
        self.iterator = iterator if iterator is not None else hints.listen(topic)
        self.count = 0
        self.told: list[Hint] = []
        self.seen = hints.store.versions.get(topic, 0)  # it looks before it waits, and needs hints from then on
        self._store, self.topic = hints.store, topic
        self.task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        async for hint in self.iterator:
            self.count += 1
            self.told.append(hint)
            self.seen = self._store.versions.get(self.topic, 0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_in_virtual_time(test(), limit=100_000.0)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# --- who is followed, and for how long ---------------------------------------------------------------------------


@in_virtual_time
async def test_listeners_of_all_topics_of_a_source_share_it() -> None:
    store = Store()
    hints = Feeds(store)
    one, same, other, elsewhere = (Listening(hints, topic) for topic in ("a/1", "a/1", "a/2", "b/1"))
    await asyncio.sleep(1.0)
    assert sorted(feed.key for feed in store.subscribed) == ["a", "b"]
    counts = [listening.count for listening in (one, same, other, elsewhere)]
    store.change("a/1")
    await asyncio.sleep(0.1)
    assert [listening.count for listening in (one, same, other, elsewhere)] == [
        counts[0] + 1,
        counts[1] + 1,
        counts[2],
        counts[3],
    ]
    await hints.close()


@in_virtual_time
async def test_nothing_is_followed_before_a_listener_waits() -> None:
    store = Store()
    hints = Feeds(store)
    iterator = hints.listen("a/1")
    await asyncio.sleep(10.0)
    assert not store.attempts
    await anext(iterator)
    assert len(store.subscribed) == 1
    await hints.close()


@in_virtual_time
async def test_a_source_ends_some_time_after_its_last_listener_however_that_left() -> None:
    store = Store()
    hints = Feeds(store)
    cancelled, closed, dropped = Listening(hints, "a/1"), Listening(hints, "a/2"), hints.listen("a/3")
    await anext(dropped)
    await cancelled.stop()
    await closed.iterator.aclose()  # type: ignore[attr-defined]
    await closed.task
    del dropped
    gc.collect()
    assert len(store.subscribed) == 1
    await asyncio.sleep(2 * UNUSED_AFTER)
    assert not store.subscribed
    assert not list(hints.sources())
    assert not list(hints.tasks)


@in_virtual_time
async def test_a_listener_that_comes_back_soon_finds_its_source_still_followed() -> None:
    store = Store()
    hints = Feeds(store)
    for _ in range(200):
        listening = Listening(hints, "a/1")
        await asyncio.sleep(UNUSED_AFTER / 50)
        await listening.stop()
    assert len(store.attempts) <= 2  # a look may find it unused between two
    await hints.close()


@in_virtual_time
async def test_a_topic_that_nobody_listens_for_is_left_while_others_go_on() -> None:
    store = Store()
    hints = Feeds(store)
    one, other = Listening(hints, "a/1"), Listening(hints, "a/2")
    await asyncio.sleep(1.0)
    await one.stop()
    await asyncio.sleep(2 * UNUSED_AFTER)
    (feed,) = store.subscribed
    assert feed.left_topics == ["a/1"]
    assert list(feed.topics) == ["a/2"]
    count = other.count
    store.change("a/2")
    await asyncio.sleep(0.1)
    assert other.count == count + 1
    await hints.close()


@in_virtual_time
async def test_at_rest_nothing_is_asked() -> None:
    store = Store()
    hints = Feeds(store)
    listening = Listening(hints, "a/1")
    await asyncio.sleep(3_600.0)
    assert len(store.attempts) == 1
    assert listening.count == 1
    await hints.close()


# --- sources that end, or bring nothing --------------------------------------------------------------------------


@in_virtual_time
async def test_a_source_that_was_lost_is_followed_again_and_gives_a_hint() -> None:
    store = Store()
    hints = Feeds(store)
    listening = Listening(hints, "a/1")
    await asyncio.sleep(10.0)
    store.cut()
    store.change("a/1")  # nobody is told
    await asyncio.sleep(1.0)
    assert listening.seen == 1
    await hints.close()


@in_virtual_time
async def test_pauses_grow_in_an_outage_and_begin_anew_after_it() -> None:
    store = Store()
    store.is_away = True
    hints = Feeds(store)
    listening = Listening(hints, "a/1")
    await asyncio.sleep(600.0)
    assert len(store.attempts) <= 600.0 / (LONGEST / 2) + 10
    assert listening.told == ["absent"]
    store.is_away = False
    await asyncio.sleep(2 * LONGEST)
    assert listening.told == ["absent", None]
    made = len(store.attempts)
    store.cut()
    await asyncio.sleep(0.1)
    assert len(store.attempts) == made + 1
    await hints.close()


@in_virtual_time
async def test_a_source_that_ends_at_once_is_followed_ever_less_often() -> None:
    class Brief(Feed):
        async def follow(self) -> None:
            self._store.attempts.append(0.0)
            self.live()

    store = Store()
    hints = Feeds(store, Brief)
    listening = Listening(hints, "a/1")
    await asyncio.sleep(600.0)
    assert len(store.attempts) <= 600.0 / (LONGEST / 2) + 10
    assert 1 <= listening.told.index("absent") == len(listening.told) - 1 <= 10
    await hints.close()


class Moving(Feeds):
    """Its topics are at one source, and then at another one; the first may be one of which nothing can come."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.key, self.deaf_at = "a", {"a"}

    async def keys_of(self, topic: str) -> Collection[str]:
        return (self.key,)

    def source(self, key: str) -> Feed:
        return DeafAtTimes(self, key)


class DeafAtTimes(Feed):
    _hints: Moving

    async def follow(self) -> None:
        if self.key in self._hints.deaf_at:
            self.deaf()
        else:
            await super().follow()


@in_virtual_time
async def test_a_topic_that_moves_while_its_source_is_silent_is_heard_at_the_other_one() -> None:
    store = Store()
    hints = Moving(store)
    one = Listening(hints, "b/1")
    await asyncio.sleep(DEAF[1])
    assert one.told == ["absent"]
    hints.key = "b"
    hints.here()["a"].notify()  # as the source does when it finds that its topic is elsewhere
    await asyncio.sleep(1.0)
    before = len(one.told)
    assert one.told == ["absent"] + (before - 1) * [None] != ["absent"]
    store.change("b/1")
    await asyncio.sleep(1.0)
    assert one.told[before:] == [None]
    await hints.close()


@in_virtual_time
async def test_a_source_that_hears_again_once_its_topic_has_moved_tells_nobody_that_hints_are_absent() -> None:
    store = Store()
    hints = Moving(store)
    one = Listening(hints, "b/1")
    await asyncio.sleep(0.1)
    assert one.told == ["absent"]
    hints.key, old = "b", hints.here()["a"]
    old.notify()
    hints.deaf_at.clear()
    await until(lambda: old.is_live, within=DEAF[0])
    await asyncio.sleep(2 * STEADY)
    before = len(one.told)
    store.change("b/1")
    await asyncio.sleep(1.0)
    assert one.told == ["absent"] + before * [None]
    await hints.close()


@in_virtual_time
async def test_listeners_of_a_deaf_source_are_told_once_until_it_hears() -> None:
    store = Store()
    store.is_mute = True
    hints = Feeds(store)
    before = [Listening(hints, topic) for topic in ("a/1", "a/1", "a/2")]
    await asyncio.sleep(1.0)
    after = [Listening(hints, topic) for topic in ("a/1", "a/3")]
    await asyncio.sleep(3_600.0)
    assert [one.told for one in before + after] == 5 * [["absent"]]
    store.is_mute = False
    await asyncio.sleep(DEAF[1] + STEADY)
    assert [one.told for one in before + after] == 5 * [["absent", None]]
    store.change("a/1")
    await asyncio.sleep(1.0)
    assert [one.told[2:] for one in before + after] == [[None], [None], [], [None], []]
    await hints.close()


@in_virtual_time
async def test_listeners_of_a_source_that_fails_are_told_after_some_seconds() -> None:
    store = Store()
    hints = Feeds(store)
    listening = Listening(hints, "a/1")
    await asyncio.sleep(1.0)
    assert listening.told == [None]
    store.is_away = True
    store.cut()
    await asyncio.sleep(SILENT_AFTER)
    assert listening.told == [None]
    await asyncio.sleep(2 * LONGEST)
    assert listening.told == [None, "absent"]
    store.is_away = False
    await asyncio.sleep(LONGEST + STEADY)
    assert listening.told == [None, "absent", None]
    await hints.close()


@in_virtual_time
async def test_a_deaf_source_is_followed_again_ever_more_rarely() -> None:
    store = Store()
    store.is_mute = True
    hints = Feeds(store)
    Listening(hints, "a/1")
    await asyncio.sleep(60.0)
    assert 4 <= len(store.attempts) <= 8
    await asyncio.sleep(3_600.0)
    assert len(store.attempts) <= 3_600.0 / (DEAF[1] / 2) + 16
    store.is_mute = False  # when it could be heard for a while, the pauses begin anew
    await asyncio.sleep(DEAF[1])
    store.is_mute = True
    store.cut()
    made = len(store.attempts)
    await asyncio.sleep(10.0)
    assert 2 <= len(store.attempts) - made <= 5
    await hints.close()


@in_virtual_time
async def test_a_listener_whose_wait_was_cancelled_is_told_what_has_changed_meanwhile() -> None:
    store = Store()
    hints = Feeds(store)
    stays, leaves = Listening(hints, "a/1"), Listening(hints, "a/1")
    await asyncio.sleep(1.0)
    assert leaves.told == [None]
    await leaves.stop()
    store.is_mute = True
    store.cut()
    await asyncio.sleep(1.0)
    again = Listening(hints, "a/1", leaves.iterator)
    await asyncio.sleep(1.0)
    assert stays.told == [None, "absent"]
    assert again.told == ["absent"]
    await again.stop()
    store.is_mute = False
    await asyncio.sleep(DEAF[1])
    last = Listening(hints, "a/1", leaves.iterator)
    await asyncio.sleep(2 * STEADY)
    assert last.told == [None]
    await hints.close()


@in_virtual_time
async def test_a_source_that_fails_disturbs_no_other() -> None:
    class Failing(Feed):
        async def follow(self) -> None:
            if self.key == "bad":
                raise ValueError("it can't be read")
            await super().follow()

    store = Store()
    hints = Feeds(store, Failing)
    bad, good = Listening(hints, "bad/1"), Listening(hints, "good/1")
    await asyncio.sleep(1.0)
    store.change("good/1")
    await asyncio.sleep(1.0)
    assert good.seen == 1
    assert bad.count == 0
    assert not bad.task.done()
    await hints.close()


async def told_of_what_was_missed_before_an_outage(feed: type[Feed]) -> bool:
    store = Store()
    hints = Feeds(store, feed)
    Listening(hints, "a/1")
    interrupted = Listening(hints, "a/2")
    await asyncio.sleep(1.0)
    await interrupted.stop()
    await asyncio.sleep(2 * UNUSED_AFTER)
    store.cut()
    store.change("a/2")
    store.kept_from = len(store.changes) + 1  # nobody is told of that change
    await asyncio.sleep(UNUSED_AFTER)
    store.change("b/1")
    store.change("a/1")
    store.is_away = True
    store.cut()
    again = Listening(hints, "a/2", interrupted.iterator)
    again.seen = interrupted.seen
    await asyncio.sleep(1.0)
    store.is_away = False
    await asyncio.sleep(UNUSED_AFTER)
    await hints.close()
    return again.seen == 1


def test_a_topic_that_joins_in_an_outage_gets_a_hint_after_it_even_if_the_source_goes_on() -> None:
    assert run_in_virtual_time(told_of_what_was_missed_before_an_outage(Resumed))


async def is_kept_while_the_last_one_ends(feed: type[Feed]) -> bool:
    store = Store()
    store.answers = 4.0
    hints = Feeds(store, feed)
    await anext(hints.listen("a/1"))
    gc.collect()
    while list(hints.sources()):
        await asyncio.sleep(0.1)
    listening = Listening(hints, "a/1")  # that the last one has ended isn't confirmed yet
    await asyncio.sleep(2 * store.answers)
    store.change("a/1")
    await asyncio.sleep(0.1)
    is_kept = list(hints.sources()) == store.subscribed and listening.seen == 1
    await hints.close()
    assert not store.subscribed
    return is_kept


def test_a_source_that_begins_while_the_last_one_ends_is_not_forgotten_with_it() -> None:
    assert run_in_virtual_time(is_kept_while_the_last_one_ends(Feed))


# --- the end -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_close_ends_iterators_and_sources_also_those_that_begin_meanwhile() -> None:
    store = Store()
    hints = Feeds(store)
    waiting = Listening(hints, "a/1")
    await asyncio.sleep(1.0)
    hints.looks_up = 1.0
    looking_up = Listening(hints, "b/1")
    await asyncio.sleep(0.5)
    await hints.close()
    await asyncio.sleep(10.0)
    assert waiting.task.done()
    assert looking_up.task.done()
    assert [at for at in store.attempts if at > 1.0] == []
    assert not store.subscribed
    assert not list(hints.tasks)
    assert [hint async for hint in hints.listen("a/1")] == []


@in_virtual_time
async def test_close_waits_no_longer_than_it_may_for_a_source_that_does_not_end() -> None:
    store = Store()
    hints = Feeds(store)
    Listening(hints, "a/1")
    await asyncio.sleep(1.0)
    store.answers = 1_000.0
    began = asyncio.get_running_loop().time()
    await hints.close(within=2.0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)


async def test_each_loop_follows_its_own_source_and_close_ends_them_all() -> None:
    store = Store()
    hints = Feeds(store)
    here = Listening(hints, "a/1")
    there: list[Listening] = []

    async def elsewhere() -> None:
        there.append(Listening(hints, "a/1"))
        await there[0].task

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    await until(lambda: len(store.subscribed) == 2 and bool(there))
    store.change("a/1")
    await until(lambda: here.seen == there[0].seen == 1)
    await hints.close()
    await asyncio.to_thread(thread.join)
    assert not store.subscribed
    assert here.task.done()


def test_a_loop_that_was_closed_is_forgotten() -> None:
    hints = Feeds(Store())

    async def listen() -> None:
        await anext(hints.listen("a/1"))

    for _ in range(3):
        asyncio.run(listen())
    assert len(hints._loops) == 1


# --- no hint is lost ---------------------------------------------------------------------------------------------


async def told_of_everything(seed: int, feed: type[Feed] = Feed) -> bool:
    """Let listeners come, go and be interrupted while the store is cut, away or mute; return whether all know in the
    end what changed last, and nothing is followed when all have left."""
    rng = random.Random(seed)
    store = Store()
    store.answers = rng.choice([0.0, 0.2, 3.0])
    hints = Feeds(store, feed)
    hints.looks_up = rng.choice([0.0, 0.3])
    topics = ["a/1", "a/2", "a/3", "a/4", "a/5", "b/1"]
    listening: list[Listening] = []
    interrupted: list[Listening] = []

    def take(some: list[Listening]) -> Listening:
        return some.pop(rng.randrange(len(some)))

    def go_on(one: Listening) -> None:
        listening.append(Listening(hints, one.topic, one.iterator))
        listening[-1].seen = one.seen

    for _ in range(60):
        await asyncio.sleep(rng.choice([0.0, 0.05, 1.0, UNUSED_AFTER]) * rng.random())
        match rng.randrange(9):
            case 0 | 1:
                store.change(rng.choice(topics))
            case 2:
                listening.append(Listening(hints, rng.choice(topics)))
            case 3 if listening:
                interrupted.append(take(listening))
                await interrupted[-1].stop()
            case 4 if interrupted:
                go_on(take(interrupted))
            case 5 if listening:
                await take(listening).stop()
            case 6:
                store.cut()
                if rng.random() < 0.5:
                    store.kept_from = len(store.changes) + 1
            case 7:
                store.is_away = not store.is_away
                store.cut()
            case 8:
                store.is_mute = not store.is_mute
                store.cut()
            case _:
                pass
    settles = 2 * LONGEST + DEAF[1] + STEADY + 2 * store.answers + hints.looks_up
    store.is_away = store.is_mute = False
    await asyncio.sleep(rng.choice([0.0, settles]))
    while interrupted:
        go_on(take(interrupted))
    store.change(rng.choice(topics))
    await asyncio.sleep(settles)
    quiet = [one.count for one in listening]
    knows = all(one.seen == store.versions.get(one.topic, 0) for one in listening)
    for topic in topics:
        store.change(topic)
    await asyncio.sleep(0.01)
    knows &= all(one.seen == store.versions.get(one.topic, 0) for one in listening)
    knows &= all(one.count == before + 1 for one, before in zip(listening, quiet, strict=True))
    knows &= all(one.told[-1:] == [None] for one in listening)
    for one in listening:
        await one.stop()
    await asyncio.sleep(2 * UNUSED_AFTER + 2 * store.answers)
    is_left = not store.subscribed and not list(hints.sources()) and not list(hints.tasks)
    await hints.close()
    return knows and is_left


def findings(feed: type[Feed]) -> int:
    return sum(not run_in_virtual_time(told_of_everything(seed, feed), seed=seed, limit=1e6) for seed in range(100))


@pytest.mark.parametrize("feed", [Feed, Resumed])
def test_no_hint_is_lost_and_nothing_is_followed_in_vain(feed: type[Feed]) -> None:
    assert findings(feed) == 0


class SilentAtFirst(Feed):
    def live(self, *, anew: bool = True) -> None:
        super().live(anew=False)


class SilentToNewTopics(Feed):
    def joined(self, topic: str) -> None:
        pass


class SilentToTopicsOfAnOutage(Resumed):
    def joined(self, topic: str) -> None:
        if self.is_live:
            self._notifier.notify(topic)


class FollowedOnce(Feed):
    was_followed = False

    async def follow(self) -> None:
        if self.was_followed:
            await asyncio.Event().wait()
        self.was_followed = True
        await super().follow()


class IgnoresLeaving(Feed):
    def end(self) -> None:
        self._forget()


class ForgetsTheNext(Feed):
    def end(self) -> None:
        self._hints.here().pop(self.key, None)
        super().end()


@pytest.mark.parametrize("planted", [SilentAtFirst, SilentToNewTopics, FollowedOnce, IgnoresLeaving])
def test_a_planted_bug_of_a_source_is_found(planted: type[Feed]) -> None:
    assert findings(planted)


@pytest.mark.parametrize(
    ("planted", "scenario"),
    [
        (ForgetsTheNext, is_kept_while_the_last_one_ends),
        (SilentToTopicsOfAnOutage, told_of_what_was_missed_before_an_outage),
    ],
)
def test_a_planted_bug_of_a_source_is_found_in_its_scenario(
    planted: type[Feed], scenario: Callable[[type[Feed]], Coroutine[Any, Any, bool]]
) -> None:
    assert not run_in_virtual_time(scenario(planted))

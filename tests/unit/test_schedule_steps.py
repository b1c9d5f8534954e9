"""The three steps of a slot, interrupted at every point: no slot is lost, and none is sent twice without need."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Literal, TypeVar

import pytest

from tenure._queue import schedule_steps
from tenure._queue.broker import Advanced, Schedules
from tenure._queue.outgoing import Outgoing
from tenure._queue.schedule_steps import KEEP_OUT, KEEP_OUT_MAX, Act, Kept, ScheduleSteps, _Wish
from tenure.errors import Unavailable
from tests.clocks import TurnedClock

T = TypeVar("T")

LONG = 4 * KEEP_OUT
"""Seconds for which a process is paused."""

Fault = Literal["crash", "pause", "unanswered", "repeated"]


class World:
    """A store, and the time that everybody shares."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.texts: dict[str, str] = {}
        self.version = 0
        self.sent: list[str] = []
        self.noted_unsent = False

    def write(self, schedule: str, text: str | None) -> None:
        """Replace a text."""
        self.version += 1
        if text is None:
            self.texts.pop(schedule, None)
        else:
            self.texts[schedule] = str(text)
            kept = Kept.read(text)
            if kept.keep_out is None and kept.record != "1" and f"s@{kept.record}" not in self.sent:
                self.noted_unsent = True

    @property
    def record(self) -> str | None:
        """What readers see."""
        text = self.texts.get("s")
        return None if text is None else Kept.read(text).record


class Process:
    """A process that advances the schedule ``s``; it stops at every gate until it is told to go on."""

    def __init__(self, world: World, steps: type[ScheduleSteps] = ScheduleSteps) -> None:
        self.world = world
        self.steps = steps(self, self.send, self)
        self.gate_of: str | None = None
        self.repeats = False
        self.sent = 0
        self._go: asyncio.Future[None]
        self._offset = random.random() * 1e6  # its clock has nothing to do with others' clocks
        self._task: asyncio.Task[Advanced] | None = None

    def now(self) -> float:
        """Return the time on its own clock."""
        return self.world.now + self._offset

    async def _gate(self, name: str) -> None:
        self.gate_of = name
        self._go = asyncio.get_running_loop().create_future()
        await self._go

    # --- what a store can do ---

    async def kept(self, queue: str) -> Schedules:
        return Schedules(dict(self.world.texts), self.world.now)

    async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
        while True:
            await self._gate("read")
            before, version = self.world.texts.get(schedule), self.world.version
            text, answer = act(before, self.world.now)
            if text == before:
                return answer
            await self._gate("write")
            if version == self.world.version:
                self.world.write(schedule, text)
                await self._gate("written")
                if not self.repeats:
                    return answer
                self.repeats = False

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        await self._gate("send")
        self.world.sent += [str(one.id) for one in messages]
        self.sent += len(messages)
        await self._gate("sent")
        return [str(one.id) for one in messages]

    # --- what the test does ---

    def begin(self, expected: str | None = "1", record: str | None = "2", not_before: float = 0.0) -> None:
        """Begin to advance from one record to the next, with a message."""
        self.gate_of = None
        message = Outgoing(b"", id=f"s@{record}")
        self._task = asyncio.ensure_future(self.steps.advance("q", "s", expected, record, [message], not_before))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def stopped(self) -> str | None:
        """Return the gate at which it waits; None if it has ended."""
        assert self._task is not None
        while self.gate_of is None and not self._task.done():
            await asyncio.sleep(0)
        return None if self._task.done() else self.gate_of

    def go_on(self, error: Exception | None = None) -> None:
        """Let it pass its gate, or fail there."""
        self.gate_of = None
        if error is None:
            self._go.set_result(None)
        else:
            self._go.set_exception(error)

    async def finish(self) -> Advanced | None:
        """Let it pass all gates; return its answer, None if it doesn't know."""
        while await self.stopped() is not None:
            self.go_on()
        assert self._task is not None
        try:
            return await self._task
        except Unavailable:
            return None

    async def end(self) -> None:
        """Let it vanish."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def persist(self, expected: str = "1", record: str = "2") -> list[Advanced]:
        """Repeat it until the slot is over, once a second; return what it was told."""
        answers = []
        for _ in range(20):
            self.begin(expected, record)
            answer = await self.finish()
            if answer is not None:
                answers.append(answer)
                if answer.record != expected:
                    break
            self.world.now += 1.0
        return answers


def begun() -> World:
    """Return a world in which the schedule has its first record."""
    world = World()
    world.write("s", Kept("1", "begin").written())
    return world


GATES = ("read", "write", "written", "send", "sent", "read", "write", "written")
"""Those of a slot that nothing interrupts."""


async def violations_of_fault(steps: type[ScheduleSteps], place: int, fault: Fault, *, alone: bool) -> list[str]:
    """Interrupt one process at a gate; then another one goes on, or the same one if it is *alone*."""
    world = begun()
    first, second = Process(world, steps), Process(world, steps)
    first.begin()
    for _ in range(place):
        if await first.stopped() is not None:
            first.go_on()
    gate = await first.stopped()
    has_sent = bool(world.sent) or gate == "send"  # or is about to: the time can't be checked any later
    told: list[Advanced] = []
    match fault:
        case "crash":
            await first.end()
        case "pause":
            world.now += LONG
        case "unanswered" if gate is not None:
            first.go_on(Unavailable("lost"))
            await first.finish()
        case "repeated":
            first.repeats = True
            told += [one for one in [await first.finish()] if one is not None]
    found = ["was refused for what it has written"] if fault == "repeated" and not told[0].is_done else []
    if fault == "pause" and alone:
        told += [one for one in [await first.finish()] if one is not None]
    if not (told and told[-1].is_done):
        successor = Process(world, steps) if fault == "crash" else first if alone else second
        told += await successor.persist()
    if fault == "pause" and not alone:
        told += [one for one in [await first.finish()] if one is not None]
    found += common_violations(world)
    may_be_twice = has_sent and fault in ("crash", "pause", "unanswered")
    if len(world.sent) > (2 if may_be_twice else 1):
        found.append(f"sent {len(world.sent)} times")
    is_unheard = place == len(GATES) - 1 and fault in ("crash", "unanswered")
    if sum(one.is_done for one in told) != (0 if is_unheard else 1):
        found.append(f"{sum(one.is_done for one in told)} were told that it is done")
    for one in (first, second):
        await one.end()
    return [f"{fault} at gate {place} ({gate}), {alone=}: {text}" for text in found]


def common_violations(world: World, record: str = "2") -> list[str]:
    """Return what must never be, whatever was interrupted."""
    found = []
    if world.record != record:
        found.append(f"the slot is not noted: {world.record}")
    if not world.sent:
        found.append("the slot is lost")
    if world.noted_unsent:
        found.append("the slot was noted before it was sent")
    return found


async def violations_of_race(steps: type[ScheduleSteps], seed: int) -> list[str]:
    """Let three processes advance at the same time, three times each, in a random order; and then the next slot."""
    rng = random.Random(seed)
    world = begun()
    processes = [Process(world, steps) for _ in range(3)]
    found = []
    for slot in range(1, 3):
        tries = dict.fromkeys(processes, 3)
        answers: list[Advanced | None] = []
        for one in processes:
            one.begin(str(slot), str(slot + 1))
        while tries:
            one = rng.choice(list(tries))
            if await one.stopped() is not None:
                one.go_on()
            else:
                answers.append(await one.finish())
                tries[one] -= 1
                if tries[one]:
                    one.begin(str(slot), str(slot + 1))
                else:
                    del tries[one]
            world.now += rng.choice((0.0, 0.01))
        if sum(one is not None and one.is_done for one in answers) != 1:
            found.append(f"seed {seed}: {answers}")
            if world.record != str(slot + 1):
                break
        if world.sent.count(f"s@{slot + 1}") != 1:
            found.append(f"seed {seed}: sent {world.sent}")
    for one in processes:
        await one.end()
    return found + common_violations(world, "3")


async def violations_of_storm(steps: type[ScheduleSteps], seed: int) -> list[str]:
    """Let processes vanish, pause and lose answers at random; then one goes on undisturbed."""
    rng = random.Random(seed)
    world = begun()
    processes = [Process(world, steps) for _ in range(3)]
    hurts = 0  # after each of them, one more may send
    for one in processes:
        one.begin()
    for _ in range(40):
        one = rng.choice(processes)
        gate = await one.stopped()
        if gate is None:
            if world.record == "1":
                one.begin()
            continue
        roll = rng.random()
        if roll < 0.05:
            hurts += 1
            await one.end()
            fresh = processes[processes.index(one)] = Process(world, steps)
            fresh.begin()
        elif roll < 0.12:
            hurts += 1
            one.go_on(Unavailable("lost"))
        elif roll < 0.2:
            hurts += 1
            world.now += rng.choice((1.0, KEEP_OUT, LONG))
        else:
            one.go_on()
    for one in processes:
        await one.finish()
    if world.record == "1":
        await Process(world, steps).persist()
    found = common_violations(world)
    if len(world.sent) > 1 + hurts:
        found.append(f"sent {len(world.sent)} times")
    return [f"seed {seed}: {text}" for text in found]


async def violations_of_succession(steps: type[ScheduleSteps]) -> list[str]:
    """Let several processes claim and vanish, one after the other: each claim is another one for those that wait."""
    world = begun()
    watcher, *others = [Process(world, steps) for _ in range(4)]
    found = []
    for one in others:
        for _ in range(10):
            one.begin()
            while await one.stopped() not in (None, "send"):
                one.go_on()
            if await one.stopped() == "send":
                break
            world.now += 1.0
        await one.end()
        for _ in range(2):
            watcher.begin()
            if not is_refused(await watcher.finish()):
                found.append("a claim was taken over as soon as it was seen")
    world.now += KEEP_OUT
    watcher.begin()
    if is_refused(await watcher.finish()):
        found.append("the last claim is not taken over")
    return found + common_violations(world)


def is_refused(answer: Advanced | None) -> bool:
    """Return whether nothing was done."""
    return answer is not None and not answer.is_done


async def violations(steps: type[ScheduleSteps], *, races: int) -> list[str]:
    """Return what is found by all of it."""
    found: list[str] = []
    faults: tuple[Fault, ...] = ("crash", "pause", "unanswered", "repeated")
    for fault in faults:
        for place, gate in enumerate(GATES):
            if fault == "repeated" and gate != "written":
                continue
            for alone in (False, True):
                found += await violations_of_fault(steps, place, fault, alone=alone)
    found += await violations_of_succession(steps)
    for seed in range(races):
        found += await violations_of_race(steps, seed)
        found += await violations_of_storm(steps, seed)
    return found


async def test_nothing_is_lost_or_sent_twice_without_need() -> None:
    assert await violations(ScheduleSteps, races=400) == []


async def test_these_are_all_gates() -> None:
    process = Process(begun())
    process.begin()
    gates = []
    while (gate := await process.stopped()) is not None:
        gates.append(gate)
        process.go_on()
    assert tuple(gates) == GATES


async def test_a_message_is_repeated_under_its_id() -> None:
    world = begun()
    first, second = Process(world), Process(world)
    first.begin()
    while await first.stopped() != "sent":
        first.go_on()
    await first.end()
    assert [one.is_done for one in await second.persist()] == [False] * 5 + [True]
    assert world.sent == ["s@2", "s@2"]


async def test_readers_see_what_was_before_until_it_is_noted() -> None:
    world = begun()
    process, reader = Process(world), Process(world)
    process.begin()
    while await process.stopped() is not None:
        assert (await reader.steps.schedules("q")).records == {"s": world.record}
        if world.sent and process.gate_of != "written":
            assert world.record == "1"
        process.go_on()
    assert (await reader.steps.schedules("q")).records == {"s": "2"}


async def test_a_first_record_is_not_there_until_it_is_noted() -> None:
    world = World()
    process, reader = Process(world), Process(world)
    process.begin(None, "1")
    while await process.stopped() != "send":
        process.go_on()
    assert world.texts
    assert (await reader.steps.schedules("q")).records == {}
    reader.begin(None, "1")
    assert (await reader.finish()) == Advanced(False, None, world.now)
    assert (await process.finish()) == Advanced(True, "1", world.now)


async def test_a_reader_takes_over_a_claim_that_it_has_seen_before() -> None:
    world = begun()
    process, reader = Process(world), Process(world)
    process.begin()
    while await process.stopped() != "send":
        process.go_on()
    await process.end()
    await reader.steps.schedules("q")
    world.now += KEEP_OUT
    reader.begin()
    assert (await reader.finish()) == Advanced(True, "2", world.now)


async def test_nothing_is_claimed_too_early() -> None:
    world = begun()
    process = Process(world)
    process.begin(not_before=world.now + 1.0)
    assert (await process.finish()) == Advanced(False, "1", world.now)
    assert not world.sent
    world.now += 1.0
    process.begin(not_before=world.now)
    assert (await process.finish()) == Advanced(True, "2", world.now)


@pytest.mark.parametrize("record", ["2", None])
async def test_what_is_removed_meanwhile_is_not_noted(record: str | None) -> None:
    world = begun()
    process = Process(world)
    process.begin("1", "2")
    while await process.stopped() != "sent":
        process.go_on()
    world.write("s", None)
    assert (await process.finish()) == Advanced(False, None, world.now)
    assert not world.texts


async def test_a_record_without_messages_takes_one_step() -> None:
    world = begun()
    process = Process(world)
    process._task = asyncio.ensure_future(process.steps.advance("q", "s", "1", None, (), 0.0))
    assert (await process.finish()) == Advanced(True, None, world.now)
    assert not world.texts


async def test_a_message_that_is_refused_is_not_noted() -> None:
    world = begun()

    class Refusing(Process):
        async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
            raise ValueError("too large")

    process = Refusing(world)
    process.begin()
    with pytest.raises(ValueError, match="too large"):
        await process.finish()
    assert world.record == "1"


async def test_a_send_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_steps, "SEND_WITHIN", 0.05)
    world = begun()

    class Hanging(Process):
        async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
            await asyncio.Event().wait()
            return []

    process = Hanging(world)
    process.begin()
    for _ in range(3):
        await process.stopped()
        process.go_on()
    assert process._task is not None
    with pytest.raises(Unavailable, match="not sent to 'q' within"):
        await process._task
    assert world.record == "1"


# --- planted bugs: each is found ---


class NotesBeforeItSends(ScheduleSteps):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing],
        not_before: float,
    ) -> Advanced:
        answer = await super().advance(queue, schedule, expected, record, (), not_before)
        if answer.is_done:
            await self._send(queue, messages)
        return answer


class SendsBeforeItClaims(ScheduleSteps):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing],
        not_before: float,
    ) -> Advanced:
        if (await self.schedules(queue)).records.get(schedule) != expected:
            return await super().advance(queue, schedule, expected, record, messages, not_before)
        await self._send(queue, messages)
        return await super().advance(queue, schedule, expected, record, (), not_before)


class ReplacesAnyClaim(ScheduleSteps):
    async def _replace(self, wish: _Wish, claim: str, wanted: str | None) -> Advanced:
        def act(text: str | None, now: float) -> tuple[str | None, Advanced]:
            return wanted, Advanced(True, wish.record, now)

        return await self._store.change(wish.queue, wish.schedule, act)


class TakesOverAtOnce(ScheduleSteps):
    def _observe(self, queue: str, schedule: str, text: str | None) -> None:
        super()._observe(queue, schedule, text)
        if (queue, schedule) in self._seen:
            self._seen[queue, schedule] = str(text), -1e9

    async def _begin(self, wish: _Wish, wanted: str | None) -> Advanced:
        await self.schedules(wish.queue)
        return await super()._begin(wish, wanted)


class NeverTakesOver(ScheduleSteps):
    def _observe(self, queue: str, schedule: str, text: str | None) -> None:
        pass


class RemembersTheFirstClaim(ScheduleSteps):
    def _observe(self, queue: str, schedule: str, text: str | None) -> None:
        if text is not None and (queue, schedule) in self._seen:
            self._seen[queue, schedule] = text, self._seen[queue, schedule][1]
        else:
            super()._observe(queue, schedule, text)


class SendsHoweverLate(ScheduleSteps):
    async def _begin(self, wish: _Wish, wanted: str | None) -> Advanced:
        answer = await super()._begin(wish, wanted)
        wish.written_at = self._clock.now()
        return answer


class DoesNotKnowItsOwnClaim(ScheduleSteps):
    async def _begin(self, wish: _Wish, wanted: str | None) -> Advanced:
        return await super()._begin(wish, None if wanted is None else Different(wanted))


class Different(str):
    """A text that is not equal to itself when it comes back."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


PLANTED: list[type[ScheduleSteps]] = [
    plant for plant in list(globals().values()) if isinstance(plant, type) and plant.__base__ is ScheduleSteps
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
async def test_a_planted_bug_is_found(plant: type[ScheduleSteps]) -> None:
    assert await violations(plant, races=100) != []


@pytest.mark.parametrize(
    "text",
    ["", "7", "[]", "{}", '{"by": 7}', '{"by": "x", "record": 7}', '{"by": "x", "keep_out": -1}', "[" * 100_000],
)
def test_a_text_of_another_form_is_a_record_that_its_reader_refuses(text: str) -> None:
    assert Kept.read(text) == Kept(text, "")


def test_a_claim_of_others_keeps_out_for_a_minute_at_most() -> None:
    assert Kept.read(Kept("1", "x", 1e9).written()) == Kept("1", "x", KEEP_OUT_MAX)


def test_a_schedule_with_an_unreadable_text_hides_no_other_and_can_be_removed() -> None:
    async def scenario() -> None:
        texts: dict[str, str] = {"bad": "{", "good": Kept("1", "x").written()}

        class Store:
            async def kept(self, queue: str) -> Schedules:
                return Schedules(dict(texts), 1.0)

            async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
                text, answer = act(texts.get(schedule), 1.0)
                if text is None:
                    texts.pop(schedule, None)
                return answer

        async def send(queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
            raise AssertionError

        steps = ScheduleSteps(Store(), send, TurnedClock())
        assert (await steps.schedules("q")).records == {"bad": "{", "good": "1"}
        assert (await steps.advance("q", "bad", "{", None, [], 0.0)).is_done
        assert (await steps.schedules("q")).records == {"good": "1"}

    asyncio.run(scenario())

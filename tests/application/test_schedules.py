"""Schedules of a backend: what they send, how they begin and end, and what becomes of them when the store fails."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure import Backend, ConfigError, Outgoing, Schedule, Unavailable
from tenure._queue.broker import Broker
from tenure._schedule import machine
from tenure._schedule import schedule as module
from tenure._schedule.plan import Plan, Record
from tenure.errors import MessageRefused
from tenure.events import BrokerUnanswered, Event, SlotSent, SlotsSkipped, SlotsWithheld
from tests.application.queue_setup import QueueSetup, in_virtual_time
from tests.durations import PATIENCE, until

OFTEN = 0.1
RARELY = "0 0 29 2 *"


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory:{uuid4().hex}" if request.param == "memory" else f"sqlite:///{tmp_path / 'work.db'}"


@asynccontextmanager
async def running(*schedules: Schedule) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(one.run()) for one in schedules]
    try:
        yield tasks
    finally:
        for one in schedules:
            one.drain()
        await asyncio.wait(tasks, timeout=PATIENCE)
    for task in tasks:
        task.result()


async def received(backend: Backend, queue: str, count: int) -> list[tenure.Message]:
    """Return the next *count* messages, completed."""
    found: list[tenure.Message] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < count:
            for one in await backend.queue(queue).receive(count - len(found), wait=PATIENCE):
                await one.complete()
                found.append(one)
    return found


async def kept(backend: Backend, name: str, queue: str = "q") -> Record | None:
    text = (await broker_of(backend, queue).schedules(queue)).records.get(name)
    return None if text is None else Record.decoded(text, name)


def broker_of(backend: Backend, queue: str = "q") -> Broker:
    return backend.queue(queue)._context.broker


async def keep(backend: Backend, name: str, text: str, queue: str = "q") -> None:
    """Let the store keep *text* of a schedule, as if another program had written it."""
    broker = broker_of(backend, queue)
    before = (await broker.schedules(queue)).records.get(name)
    assert (await broker.advance(queue, name, before, text)).is_done


# --- what it sends ---


async def test_each_slot_is_sent_once_by_many(url: str) -> None:
    async with tenure.connect(url) as one, tenure.connect(url) as other:
        schedules = [backend.schedule("beat", OFTEN, queue="q") for backend in (one, other, one)]
        async with running(*schedules):
            found = await received(one, "q", 6)
    slots = [datetime.fromisoformat(str(message.headers["slot"])).timestamp() for message in found]
    assert slots == sorted(set(slots))
    assert all(round(slot * 1_000) % 100 == 0 for slot in slots)
    assert all(slot <= message.enqueued_at for slot, message in zip(slots, found, strict=True))


async def test_the_message_names_its_schedule_and_its_slot(url: str) -> None:
    async with tenure.connect(url) as backend:
        async with running(backend.schedule("beat", "* * * * * *", queue="q", timezone="Asia/Kathmandu")):
            [message] = await received(backend, "q", 1)
        slot = str(message.headers["slot"])
        assert slot.endswith("+05:45")
        assert message.headers["schedule"] == "beat"
        utc = datetime.fromisoformat(slot).astimezone(UTC)
        assert message.id == f"beat@{utc:%Y-%m-%dT%H:%M:%SZ}"
        assert json.loads(message.body) == slot
        assert message.decode(datetime) == utc


async def test_the_message_has_the_properties_that_are_given(url: str) -> None:
    template = Outgoing(b"tidy up", headers={"kind": "test", "slot": "mine"}, priority=7, correlation_id="c")
    async with (
        tenure.connect(url) as backend,
        running(backend.schedule("beat", OFTEN, queue="q", message=template)),
    ):
        [message] = await received(backend, "q", 1)
    assert (message.body, message.priority, message.correlation_id) == (b"tidy up", 7, "c")
    assert message.headers["kind"] == "test"
    assert message.headers["slot"] != "mine"


async def test_a_message_that_is_changed_later_changes_nothing(url: str) -> None:
    headers: dict[str, Any] = {"kind": "test"}
    template = Outgoing(b"tidy up", headers=headers)
    async with tenure.connect(url) as backend:
        schedule = backend.schedule("beat", OFTEN, queue="q", message=template)
        headers["kind"] = object()
        template.body, template.at = b"x" * 10_000_000, 4e9
        async with running(schedule):
            [message] = await received(backend, "q", 1)
    assert (message.body, message.headers["kind"]) == (b"tidy up", "test")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("text", "must be an Outgoing"),
        (Outgoing(id="x"), "must not have id="),
        (Outgoing(at=5), "must not have at="),
        (Outgoing("text"), "body must be bytes"),  # type: ignore[arg-type]
        (Outgoing(headers={"x": "y" * 70_000}), "headers .* must not be larger"),
        (Outgoing(headers={"x": object()}), "the header 'x' must be text"),  # type: ignore[dict-item]
        (Outgoing(priority=77), "priority must be"),
    ],
    ids=["no message", "id", "at", "text", "long headers", "bad header", "priority"],
)
async def test_a_message_that_can_never_be_sent_is_refused_at_once(url: str, message: Any, said: str) -> None:
    async with tenure.connect(url) as backend:
        with pytest.raises(ConfigError, match=said):
            backend.schedule("beat", RARELY, queue="q", message=message)


async def test_a_body_that_the_queue_does_not_take_is_refused_before_the_first_slot(url: str) -> None:
    async with tenure.connect(url) as backend:
        await backend.queue("q").declare(body_max=1_000)
        schedule = backend.schedule("yearly", RARELY, queue="q", message=Outgoing(b"x" * 1_001))
        with pytest.raises(MessageRefused, match="body_max"):
            await asyncio.wait_for(schedule.run(), PATIENCE)
        assert await backend.schedules() == []


@pytest.mark.parametrize("name", ["", "a$b", "x" * 201, " ", "a\nb", 5, None, "\ud800"])
async def test_a_name_that_can_not_be_kept_is_refused(name: Any) -> None:
    async with tenure.connect("memory:") as backend:
        with pytest.raises(ConfigError, match="the schedule's name"):
            backend.schedule(name, OFTEN, queue="q")


@pytest.mark.parametrize("name", ["😀" * 200, "pause", "a/b {c}", "-x"])
async def test_a_long_or_odd_name_is_as_good_as_any(url: str, name: str) -> None:
    async with tenure.connect(url) as backend:
        async with running(backend.schedule(name, OFTEN, queue="q")):
            found = await received(backend, "q", 2)
        assert {message.headers["schedule"] for message in found} == {name}
        assert [one.name for one in await backend.schedules()] == [name]


# --- its beginning and its end ---


async def test_a_new_schedule_begins_with_its_next_slot(url: str) -> None:
    async with tenure.connect(url) as backend:
        async with running(backend.schedule("yearly", RARELY, queue="q")):
            await until(lambda: kept(backend, "yearly"))
        [status] = await backend.schedules()
        assert (status.last, status.paused, status.problem) == (None, False, "")
        assert status.next is not None
        assert status.next > (await broker_of(backend).schedules("q")).now
        assert (await backend.queue("q").stats()).ready == 0


async def test_an_event_ends_it_also_one_that_is_set_before(url: str) -> None:
    async with tenure.connect(url) as backend:
        schedule, stop = backend.schedule("yearly", RARELY, queue="q"), asyncio.Event()
        task = asyncio.create_task(schedule.run(stop))
        await until(lambda: kept(backend, "yearly"))
        stop.set()
        await asyncio.wait_for(task, PATIENCE)
        await asyncio.wait_for(schedule.run(stop), PATIENCE)
        assert schedule.seen() is None


async def test_it_can_be_cancelled_and_leaves_no_task(url: str) -> None:
    async with tenure.connect(url) as backend:
        schedule = backend.schedule("beat", OFTEN, queue="q")
        before = asyncio.all_tasks()
        for waits in range(5):  # at several stages
            task = asyncio.create_task(schedule.run())
            for _ in range(waits * 2):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before
        async with running(schedule):
            await received(backend, "q", 1)


async def test_one_object_runs_once_at_a_time(url: str) -> None:
    async with tenure.connect(url) as backend:
        schedule = backend.schedule("yearly", RARELY, queue="q")
        async with running(schedule):
            await until(schedule.seen)
            with pytest.raises(ConfigError, match="runs already"):
                await schedule.run()
            assert schedule.seen() is not None


async def test_it_ends_with_its_backend_and_can_not_be_run_after_it(url: str) -> None:
    async with tenure.connect(url) as backend:
        schedule = backend.schedule("beat", OFTEN, queue="q")
        task = asyncio.create_task(schedule.run())
        await received(backend, "q", 1)
    await asyncio.wait_for(task, PATIENCE)
    with pytest.raises(ConfigError, match="closed"):
        await asyncio.wait_for(schedule.run(), PATIENCE)


class Hanging:
    """A broker that answers nothing while *hangs* is set, or raises *error*."""

    def __init__(self, broker: Broker) -> None:
        self._wrapped = broker
        self.hangs = False
        self.error: BaseException | None = None
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if name in ("traits", "hints", "generations"):
            return found

        async def ask(*args: Any, **options: Any) -> Any:
            self.asked += 1
            if self.error is not None:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
            return await found(*args, **options)

        return ask


def made_hanging(schedule: Schedule) -> Hanging:
    hanging = Hanging(schedule._context.broker)
    schedule._context.broker = hanging
    return hanging


@pytest.mark.parametrize("closes", [False, True], ids=["drained", "closed"])
async def test_a_store_that_never_answers_holds_up_no_end(
    url: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENDING", 0.1)
    backend = await tenure.connect(url).open()
    try:
        schedule = backend.schedule("beat", OFTEN, queue="q")
        hanging = made_hanging(schedule)
        task = asyncio.create_task(schedule.run())
        await received(backend, "q", 1)
        hanging.hangs, asked = True, hanging.asked
        await until(lambda: hanging.asked > asked)
        if closes:
            await asyncio.wait_for(backend.aclose(), PATIENCE)
        else:
            schedule.drain()
        await asyncio.wait_for(task, PATIENCE)
    finally:
        await backend.aclose()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_a_forked_child_is_told_to_connect_again(tmp_path: Path) -> None:
    async with tenure.connect(f"sqlite:///{tmp_path / 'work.db'}") as backend:
        runs, rests = (backend.schedule(name, OFTEN, queue="q") for name in ("runs", "rests"))
        async with running(runs):
            await received(backend, "q", 1)
            if (pid := os.fork()) == 0:
                os._exit(in_child(runs, rests))
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            await received(backend, "q", 2)


def in_child(*schedules: Schedule) -> int:
    """Return 0 if none of *schedules* can be run, and the error says why."""

    async def main() -> int:
        for one in schedules:
            try:
                await asyncio.wait_for(one.run(), PATIENCE)
            except ConfigError as error:
                if "connect again after the fork" in str(error):
                    continue
            return 1
        return 0

    asyncio.events._set_running_loop(None)
    try:
        return asyncio.run(main())
    except BaseException:
        return 2


# --- faults ---


@pytest.mark.parametrize("is_first", [True, False], ids=["at the start", "later"])
@pytest.mark.parametrize(
    "error", [Unavailable("away"), asyncio.CancelledError("of the driver")], ids=["away", "driver"]
)
async def test_a_store_that_does_not_answer_is_asked_again(
    url: str, error: BaseException, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "RETRY_MIN", 0.05)
    events: list[Event] = []
    async with tenure.connect(url, on_event=events.append) as backend:
        schedule = backend.schedule("beat", OFTEN, queue="q")
        hanging = made_hanging(schedule)
        hanging.error = error if is_first else None
        async with running(schedule):
            if not is_first:
                await received(backend, "q", 1)
                hanging.error = error
            await until(lambda: any(isinstance(one, BrokerUnanswered) for one in events))
            hanging.error = None
            await received(backend, "q", 2)


async def test_an_error_that_asking_again_does_not_mend_is_raised(url: str) -> None:
    async with tenure.connect(url) as backend:
        schedule = backend.schedule("beat", OFTEN, queue="q")
        made_hanging(schedule).error = ConfigError("no rights")
        with pytest.raises(ConfigError, match="no rights"):
            await asyncio.wait_for(schedule.run(), PATIENCE)


async def test_a_hook_that_raises_ends_nothing(url: str) -> None:
    calls: list[Event] = []

    def hook(event: Event) -> None:
        calls.append(event)
        raise SystemExit(5)

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with tenure.connect(url, on_event=hook) as backend, running(backend.schedule("beat", OFTEN, queue="q")):
        await received(backend, "q", 3)
    assert len(calls) >= 3
    assert any(isinstance(one, SystemExit) for one in reported)


async def test_a_deleted_queue_gets_its_schedule_anew(url: str) -> None:
    async with tenure.connect(url) as backend, running(backend.schedule("beat", OFTEN, queue="q")):
        await received(backend, "q", 1)
        await backend.queue("q").delete(force=True)
        await received(backend, "q", 2)
        assert [one.name for one in await backend.schedules()] == ["beat"]


async def test_a_plan_whose_time_zone_is_missing_here_is_replaced(url: str) -> None:
    events: list[Event] = []
    async with tenure.connect(url, on_event=events.append) as backend:
        await keep(backend, "beat", Record(Plan("0 3 * * *", "Mars/Base"), 1.7e9).encoded())
        [before] = await backend.schedules()
        assert "no time zone 'Mars/Base'" in before.problem
        async with running(backend.schedule("beat", OFTEN, queue="q")):
            await received(backend, "q", 1)
        [after] = await backend.schedules()
        assert (after.every, after.problem) == (OFTEN, "")
    assert [one.why for one in events if isinstance(one, SlotsWithheld)] == [before.problem]


async def test_a_record_of_a_newer_version_is_left_alone_and_reported(url: str) -> None:
    events: list[Event] = []
    text = '{"format":99,"new":1}'
    async with tenure.connect(url, on_event=events.append) as backend:
        await keep(backend, "beat", text)
        async with running(backend.schedule("beat", OFTEN, queue="q")):
            await until(lambda: events)
        assert (await broker_of(backend).schedules("q")).records == {"beat": text}
        [status] = await backend.schedules()
        assert "can't read" in status.problem
        for change in (backend.queue("q").schedules.pause, backend.queue("q").schedules.resume):
            with pytest.raises(ConfigError, match="can't read"):
                await change("beat")
        await backend.queue("q").schedules.remove("beat")
        assert await backend.schedules() == []
    [withheld] = events
    assert isinstance(withheld, SlotsWithheld)
    assert withheld.why == status.problem


# --- pause, resume, remove ---


async def test_a_pause_holds_at_once_and_after_it_the_next_slot_is_sent(url: str) -> None:
    events: list[Event] = []
    async with tenure.connect(url, on_event=events.append) as backend:
        schedules = backend.queue("q").schedules
        async with running(backend.schedule("beat", OFTEN, queue="q")):
            await received(backend, "q", 1)
            paused = await schedules.pause("beat")
            sent = (await backend.queue("q").stats()).ready
            assert (paused.paused, paused.next) == (True, None)
            passed = (await broker_of(backend).schedules("q")).now + 3 * OFTEN
            await until(lambda: is_later(backend, passed))
            assert (await backend.queue("q").stats()).ready == sent
            assert (await schedules.pause("beat")).paused  # again
        resumed = await schedules.resume("beat")
        assert resumed.next is not None
        assert resumed.next > passed
        events.clear()
        async with running(backend.schedule("beat", OFTEN, queue="q")):
            await until(lambda: events)
        assert not any(isinstance(one, SlotSent) and one.slot <= passed for one in events)


async def is_later(backend: Backend, moment: float) -> bool:
    return (await broker_of(backend).schedules("q")).now > moment


async def test_a_plan_that_is_changed_while_it_is_paused_stays_paused(url: str) -> None:
    async with tenure.connect(url) as backend:
        await keep(backend, "beat", Record(Plan(OFTEN), 1.7e9, paused=True).encoded())
        schedule = backend.schedule("beat", 2 * OFTEN, queue="q")
        async with running(schedule):
            await until(lambda: is_followed(schedule, 2 * OFTEN))
        record = await kept(backend, "beat")
        assert record is not None
        assert record.paused
        assert (await backend.queue("q").stats()).ready == 0


def is_followed(schedule: Schedule, every: float) -> bool:
    seen = schedule.seen()
    return seen is not None and seen.every == every


async def test_a_schedule_that_is_removed_while_it_runs_begins_anew(url: str) -> None:
    async with tenure.connect(url) as backend:
        async with running(backend.schedule("beat", OFTEN, queue="q")):
            await received(backend, "q", 1)
            await backend.queue("q").schedules.remove("beat")
            await received(backend, "q", 2)
        await backend.queue("q").schedules.remove("beat")
        assert await backend.schedules() == []


@pytest.mark.parametrize("verb", ["pause", "resume", "remove"])
async def test_an_unknown_schedule_is_refused_with_the_nearest_name(url: str, verb: str) -> None:
    async with tenure.connect(url) as backend:
        await keep(backend, "beat", Record(Plan(OFTEN), 1.7e9).encoded())
        change: Callable[[str], Awaitable[object]] = getattr(backend.queue("q").schedules, verb)
        with pytest.raises(ConfigError, match="no schedule 'baet'; did you mean 'beat'"):
            await change("baet")
        with pytest.raises(ConfigError, match="a process that runs it creates it"):
            await getattr(backend.queue("never").schedules, verb)("beat")
        assert await backend.queues() == ["q"]


async def test_schedules_of_one_name_in_two_queues_are_two(url: str) -> None:
    async with tenure.connect(url) as backend:
        async with running(*(backend.schedule("beat", OFTEN, queue=queue) for queue in ("b", "a"))):
            await received(backend, "a", 1)
            await received(backend, "b", 1)
            await backend.queue("a").schedules.pause("beat")
            await received(backend, "b", 4)
        assert [(one.queue, one.paused) for one in await backend.schedules()] == [("a", True), ("b", False)]


# --- the clock of the store, in virtual time ---


MINUTE = 1.7e9 - 20.0
"""A slot of an interval of 60 s."""


def set_clock(setup: QueueSetup, wall: float) -> None:
    """Set the clock of the store, in Unix seconds."""
    setup.broker._wall_offset = wall - setup.clock.now()


def scheduled(setup: QueueSetup, every: Any = 60.0) -> Schedule:
    """Return the schedule ``tidy``, 5 s after a full minute."""
    set_clock(setup, MINUTE + 5)
    return Schedule(setup.queue("q"), "tidy", Plan(every), None)


async def ended(schedule: Schedule, task: asyncio.Task[None]) -> None:
    schedule.drain()
    await task


@in_virtual_time
async def test_a_clock_that_is_set_back_sends_nothing_twice_and_resume_goes_on_within_a_minute(
    setup: QueueSetup,
) -> None:
    schedule = scheduled(setup)
    task = asyncio.create_task(schedule.run())
    await asyncio.sleep(600)
    before = [one.slot for one in setup.emitted(SlotSent)]
    assert before == [MINUTE + 60 * n for n in range(1, 11)]
    setup.broker._wall_offset -= 86_400
    await asyncio.sleep(600)
    assert [one.slot for one in setup.emitted(SlotSent)] == before
    [withheld] = setup.emitted(SlotsWithheld)
    assert "tenure schedule resume tidy" in withheld.why
    await setup.queue("q").schedules.resume("tidy")
    await asyncio.sleep(600)
    after = [one.slot for one in setup.emitted(SlotSent)][len(before) :]
    assert len(after) in (9, 10)
    assert max(after) < min(before)
    await ended(schedule, task)


@in_virtual_time
async def test_after_a_clock_that_was_set_back_has_caught_up_slots_come_again(setup: QueueSetup) -> None:
    schedule = scheduled(setup)
    task = asyncio.create_task(schedule.run())
    await asyncio.sleep(600)
    setup.broker._wall_offset -= 300
    await asyncio.sleep(1_000)
    slots = [one.slot for one in setup.emitted(SlotSent)]
    assert slots == [MINUTE + 60 * n for n in range(1, 22)]
    await ended(schedule, task)


@in_virtual_time
async def test_a_clock_that_is_set_forward_is_noticed_within_a_minute(setup: QueueSetup) -> None:
    schedule = scheduled(setup, every="0 0 * * *")
    task = asyncio.create_task(schedule.run())
    await asyncio.sleep(1)
    setup.broker._wall_offset += 86_400
    await asyncio.sleep(61)
    assert len(setup.emitted(SlotSent)) == 1
    await ended(schedule, task)


@in_virtual_time
async def test_a_schedule_that_waits_or_is_paused_asks_once_a_minute(setup: QueueSetup) -> None:
    schedule = scheduled(setup, every=RARELY)
    hanging = made_hanging(schedule)
    task = asyncio.create_task(schedule.run())
    await asyncio.sleep(1)
    for _ in range(2):
        hanging.asked = 0
        await asyncio.sleep(3_600)
        assert 58 <= hanging.asked <= 68
        await setup.queue("q").schedules.pause("tidy")
    await ended(schedule, task)


@in_virtual_time
async def test_a_slot_is_noted_once_although_all_answers_are_lost(setup: QueueSetup) -> None:
    schedule = scheduled(setup)
    task = asyncio.create_task(schedule.run())
    await asyncio.sleep(1)
    context, broker = schedule._context, schedule._context.broker

    class Losing:
        """Carries out what it is asked, and tells nothing of it, every second time."""

        asked = 0

        def __getattr__(self, name: str) -> Any:
            found = getattr(broker, name)
            if name != "advance":
                return found

            async def ask(*args: Any) -> Any:
                answer = await found(*args)
                self.asked += 1
                if self.asked % 2:
                    raise Unavailable("the answer was lost")
                return answer

            return ask

    context.broker = Losing()
    await asyncio.sleep(600)
    found = await setup.queue("q").receive(100)
    slots = [datetime.fromisoformat(str(message.headers["slot"])).timestamp() for message in found]
    assert slots == [MINUTE + 60 * n for n in range(1, 11)]
    await ended(schedule, task)


MISSED: list[tuple[Plan, float, list[float], list[tuple[float, float]]]] = [
    # a plan, the seconds since its last slot, the slots that are sent then, and the first and last that are not
    (Plan(10.0, missed="once"), 5.0, [], []),
    (Plan(10.0, missed="once"), 12.0, [10.0], []),
    (Plan(10.0, missed="once"), 1_005.0, [1_000.0], [(10.0, 990.0)]),
    (Plan(10.0, missed="skip", missed_after=3.0), 1_002.0, [1_000.0], [(10.0, 990.0)]),
    (Plan(10.0, missed="skip", missed_after=3.0), 1_005.0, [], [(10.0, 1_000.0)]),
    (Plan(10.0, missed="all"), 35.0, [10.0, 20.0, 30.0], []),
    (Plan(10.0, missed="all"), 1_205.0, [210.0 + 10.0 * n for n in range(100)], [(10.0, 200.0)]),
    (Plan("0 0 1 1 *", missed="all"), 86_400.0, [], []),
]


@in_virtual_time
async def test_slots_that_were_missed_are_sent_as_the_plan_says(setup: QueueSetup) -> None:
    for number, (plan, late, sent, skipped) in enumerate(MISSED):
        setup.events.clear()
        set_clock(setup, 1.7e9 + late)
        queue = setup.queue(f"q{number}")
        await setup.broker.advance(queue.name, "tidy", None, Record(plan, 1.7e9).encoded())
        schedule = Schedule(queue, "tidy", plan, None)
        task = asyncio.create_task(schedule.run())
        await asyncio.sleep(0.5)
        assert [one.slot - 1.7e9 for one in setup.emitted(SlotSent)] == sent, plan
        assert [(one.first - 1.7e9, one.last - 1.7e9) for one in setup.emitted(SlotsSkipped)] == skipped, plan
        assert (await queue.stats()).ready == len(sent)
        await ended(schedule, task)


@in_virtual_time
async def test_a_plan_that_is_changed_begins_with_its_next_slot_after_what_was_due_by_the_one_before(
    setup: QueueSetup,
) -> None:
    schedule = scheduled(setup, every=7.0)
    old = Record(Plan(10.0), MINUTE - 40.0)
    await setup.broker.advance("q", "tidy", None, old.encoded())
    task = asyncio.create_task(schedule.run())
    await asyncio.sleep(20)
    new = [slot for slot in range(int(MINUTE) + 6, int(MINUTE) + 25) if slot % 7 == 0]
    assert [one.slot for one in setup.emitted(SlotSent)] == [MINUTE, *new]
    await ended(schedule, task)


# --- threads ---


def test_threads_have_the_same(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        schedule = backend.schedule("beat", timedelta(seconds=OFTEN), queue="q")
        assert "'beat', 0.1 s, to 'q'" in repr(schedule)
        stop = threading.Event()
        thread = threading.Thread(target=lambda: schedule.run(stop=stop), daemon=True)
        thread.start()
        messages = backend.queue("q").receive(wait=PATIENCE)
        assert messages[0].headers["schedule"] == schedule.name == "beat"
        with pytest.raises(ConfigError, match="runs already"):
            schedule.run()
        schedules = backend.queue("q").schedules
        assert schedules.pause("beat").paused
        assert [one.paused for one in schedules.list()] == [True]
        assert not schedules.resume("beat").paused
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        schedules.remove("beat")
        assert backend.schedules() == []


def test_a_blocking_run_ends_with_its_backend(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        schedule = backend.schedule("beat", OFTEN, queue="q")
        thread = threading.Thread(target=schedule.run, daemon=True)
        thread.start()
        assert backend.queue("q").receive(wait=PATIENCE)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    with pytest.raises(ConfigError, match="was closed"):
        schedule.run()


# --- what is installed ---


async def test_without_cronsim_a_cron_expression_is_refused_and_intervals_work(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    async with tenure.connect(url) as backend:
        with pytest.raises(tenure.BackendNotInstalled, match=r"tenure\[cron\]"):
            backend.schedule("tidy", "7 5 3 2 *", queue="q")
        await keep(backend, "tidy", Record(Plan("8 5 3 2 *"), 1.7e9).encoded())
        [status] = await backend.schedules()
        assert "tenure[cron]" in status.problem
        async with running(backend.schedule("beat", OFTEN, queue="q")):
            await received(backend, "q", 1)

"""Handlers of a service that are called at times: what they take, what they are called, and how they run."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure import ConfigError, Service
from tests.durations import PATIENCE, until

OFTEN = 0.1
RARELY = "0 0 29 2 *"

Log = list[tuple[Any, ...]]


@pytest.fixture
def url() -> str:
    return f"memory:{uuid4().hex}"


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    task = asyncio.create_task(service.serve(stop=stop, sigterm=False))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=PATIENCE)
    task.result()


async def calls(service: Service, log: Log, count: int = 1) -> None:
    """Run *service* until its functions were called *count* times."""
    async with serving(service) as task:
        await until(lambda: len(log) >= count or task.done())
    assert len(log) >= count


# --- what they take ---


class Nothing:
    def __init__(self, log: Log) -> None:
        self._log = log

    async def __call__(self) -> None:
        self._log.append(())

    async def both(self, slot: datetime, message: tenure.Message) -> None:
        self._log.append((slot, message))


def takes_nothing(log: Log) -> Callable[..., Any]:
    async def tidy() -> None:
        log.append(())

    return tidy


def takes_the_slot(log: Log) -> Callable[..., Any]:
    async def tidy(slot: datetime) -> None:
        log.append((slot,))

    return tidy


def takes_a_date(log: Log) -> Callable[..., Any]:
    async def tidy(slot: date) -> None:
        log.append((slot,))

    return tidy


def takes_the_message(log: Log) -> Callable[..., Any]:
    async def tidy(message: tenure.Message) -> None:
        log.append((message,))

    return tidy


def takes_both(log: Log) -> Callable[..., Any]:
    async def tidy(slot: datetime, message: tenure.Message) -> None:
        log.append((slot, message))

    return tidy


def has_no_types(log: Log) -> Callable[..., Any]:
    async def tidy(slot, message) -> None:  # type: ignore[no-untyped-def]
        log.append((slot, message))

    return tidy


def is_plain(log: Log) -> Callable[..., Any]:
    def tidy(slot: datetime, message: tenure.sync.Message) -> None:
        assert threading.current_thread() is not threading.main_thread()
        log.append((slot, message))

    return tidy


def is_partial(log: Log) -> Callable[..., Any]:
    async def tidy(into: Log, slot: datetime) -> None:
        into.append((slot,))

    return functools.partial(tidy, log)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (takes_nothing, ()),
        (Nothing, ()),
        (takes_the_slot, (datetime,)),
        (takes_a_date, (datetime,)),
        (is_partial, (datetime,)),
        (takes_the_message, (tenure.Message,)),
        (takes_both, (datetime, tenure.Message)),
        (has_no_types, (datetime, tenure.Message)),
        (lambda log: Nothing(log).both, (datetime, tenure.Message)),
        (is_plain, (datetime, tenure.sync.Message)),
    ],
    ids=["nothing", "object", "slot", "date", "partial", "message", "both", "no types", "method", "plain"],
)
async def test_a_function_is_called_with_what_it_takes(
    url: str, make: Callable[[Log], Callable[..., Any]], kinds: tuple[type, ...]
) -> None:
    log: Log = []
    service, function = Service(url), make(log)
    assert service.every(OFTEN)(function) is function
    await calls(service, log, 2)
    assert [type(one) for one in log[0]] == list(kinds)
    for slot in (one for arguments in log for one in arguments if isinstance(one, datetime)):
        assert slot.tzinfo is not None
        assert round(slot.timestamp() * 1_000) % 100 == 0


async def test_the_slot_is_in_the_time_zone_of_the_schedule(url: str) -> None:
    log: Log = []
    service = Service(url)
    service.every("* * * * * *", timezone="Asia/Kathmandu")(takes_the_slot(log))
    await calls(service, log)
    [[slot], *_] = log
    assert slot.utcoffset() == timedelta(hours=5, minutes=45)


async def of_a_number(slot: int) -> None: ...


async def by_keyword(*, slot: datetime) -> None: ...


async def with_three(a: datetime, b: int, c: int) -> None: ...


async def twice(slot: datetime, other: datetime) -> None: ...


async def of_threads(message: tenure.sync.Message) -> None: ...


def of_a_loop(message: tenure.Message) -> None: ...


async def yields(slot: datetime) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (None, "takes the time of the slot, the message, both, or nothing"),
        (by_keyword, "needs slot; a handler that is called at times takes nothing"),
        (with_three, "needs a, b, c; a handler that is called at times takes nothing"),
        (yields, "has a yield in it"),
        (of_a_number, "slot of the handler of_a_number is int, but the bodies of its queue are datetime"),
        (twice, "takes slot and other, both as the body"),
        (of_threads, "gets a tenure.Message, not a tenure.sync.Message"),
        (of_a_loop, "gets a tenure.sync.Message, not a tenure.Message"),
    ],
)
async def test_a_function_that_can_not_be_called_so_is_refused_before_it_runs(
    url: str, function: Any, said: str
) -> None:
    service = Service(url)
    with pytest.raises(ConfigError, match=said):
        await asyncio.wait_for(service.every(OFTEN)(function) and service.serve(), PATIENCE)


# --- names ---


def test_the_name_is_the_functions_or_the_one_that_is_given(url: str) -> None:
    service = Service(url)
    service.every(OFTEN)(takes_nothing([]))
    service.every(OFTEN, name="other of ün ïcödé")(takes_nothing([]))
    service.every(OFTEN)(Nothing([]))
    service.every(OFTEN)(Nothing([]).both)
    assert [one.name for one in service._schedules] == ["tidy", "other of ün ïcödé", "Nothing", "both"]


@pytest.mark.parametrize("name", ["", " ", "a$b", "x" * 201, "a\nb", 5])
def test_a_name_that_can_not_be_kept_is_refused_where_it_is_declared(url: str, name: Any) -> None:
    with pytest.raises(ConfigError, match="the schedule's name"):
        Service(url).every(OFTEN, name=name)(takes_nothing([]))


def test_a_lambda_needs_a_name(url: str) -> None:
    service = Service(url)
    with pytest.raises(ConfigError, match=r"has no name .* give name="):
        service.every(OFTEN)(lambda: None)
    service.every(OFTEN, name="tidy")(lambda: None)


@pytest.mark.parametrize("sessions", [False, True])
def test_a_name_is_taken_once(url: str, sessions: bool) -> None:
    service = Service(url)
    service.every(OFTEN)(takes_nothing([]))
    with pytest.raises(ConfigError, match="the schedule 'tidy' is declared twice"):
        service.every(RARELY, sessions=sessions)(takes_nothing([]))
    with pytest.raises(ConfigError, match="the queue 'tidy' has a handler"):
        service.handler("tidy")(takes_the_message([]))
    assert len(service._schedules) == 1


def test_a_queue_with_a_handler_takes_no_schedule(url: str) -> None:
    service = Service(url)
    service.handler("tidy")(takes_the_message([]))
    with pytest.raises(ConfigError, match="the queue 'tidy' has a handler"):
        service.every(OFTEN)(takes_nothing([]))
    assert service._schedules == []


# --- options ---


@pytest.mark.parametrize(
    ("every", "options", "said"),
    [
        ("61 * * * *", {}, "can't be read"),
        (0, {}, "at least 0.1"),
        (None, {}, "a cron expression, a timedelta"),
        ("@daily", {"timezone": "Mars/Base"}, "no time zone 'Mars/Base'"),
        ("@daily", {"missed": "never"}, "missed must be one of"),
        ("@daily", {"missed_after": 0}, "missed_after must be"),
    ],
)
def test_times_that_can_not_be_read_are_refused_where_they_are_declared(
    url: str, every: Any, options: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Service(url).every(every, **options)


@pytest.mark.parametrize("option", ["concurency", "sigterm", "until_empty", "queue"])
def test_there_are_no_other_options(url: str, option: str) -> None:
    options: Any = {option: 1}
    with pytest.raises(TypeError, match=rf"every\(\) has no option '{option}'"):
        Service(url).every(OFTEN, **options)


async def test_a_handler_that_raises_is_tried_again_and_its_slot_is_a_dead_letter_in_the_end(url: str) -> None:
    tries: list[int] = []
    service = Service(url)
    service.queue("tidy", datetime, max_deliveries=3)

    @service.every("* * * * * *", retry=tenure.RetryPolicy(initial=0.0, maximum=0.0))
    async def tidy(slot: datetime, message: tenure.Message) -> None:
        tries.append(message.delivery_count)
        raise KeyError("broken")

    async with serving(service):
        await until(lambda: has_dead(service))
        [dead, *_] = await service.backend.queue("tidy").dead_letters.peek()
        assert dead.id.startswith("tidy@")
        assert dead.delivery_count == 3
    assert {1, 2, 3} <= set(tries)


async def has_dead(service: Service) -> bool:
    try:
        return (await service.backend.queue("tidy").stats()).dead > 0
    except ConfigError:  # it is not open yet
        return False


async def test_with_sessions_slots_are_handled_one_after_the_other(url: str) -> None:
    running, most, slots = 0, 0, []
    service = Service(url)

    @service.every(OFTEN, sessions=True)
    async def tidy(slot: datetime) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        slots.append(slot)
        await asyncio.sleep(2.5 * OFTEN)
        running -= 1

    async with serving(service):
        await until(lambda: len(slots) >= 4)
    assert most == 1
    assert slots == sorted(slots)


async def test_without_sessions_runs_may_overlap(url: str) -> None:
    began: list[datetime] = []
    may_end = asyncio.Event()
    service = Service(url)

    @service.every(OFTEN)
    async def tidy(slot: datetime) -> None:
        began.append(slot)
        await asyncio.wait_for(may_end.wait(), PATIENCE)

    async with serving(service):
        await until(lambda: len(began) >= 2)
        may_end.set()


def in_a_process(slot: datetime, message: tenure.Received) -> None:
    (Path("runs") / f"{os.getpid()}").write_text(f"{slot.isoformat()} {message.headers['schedule']}")


async def test_plain_functions_run_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    service = Service(f"sqlite:///{tmp_path / 'work.db'}")
    service.every(OFTEN, name="outside", run_in="process", concurrency=1)(in_a_process)
    async with serving(service):
        await until(lambda: list((tmp_path / "runs").iterdir()))
    [one, *_] = (tmp_path / "runs").iterdir()
    assert int(one.name) != os.getpid()
    assert one.read_text().endswith(" outside")


# --- running ---


async def test_of_two_services_each_slot_is_handled_once(url: str) -> None:
    log: Log = []
    services = [Service(url), Service(url)]
    for service in services:
        service.every(OFTEN)(takes_the_slot(log))
    async with serving(services[0]), serving(services[1]):
        await until(lambda: len(log) >= 10)
    assert len(set(log)) == len(log)


async def test_the_status_has_the_schedules_that_run(url: str) -> None:
    service = Service(url)
    service.every(RARELY, timezone="Europe/Berlin")(takes_nothing([]))
    assert (await service.status()).schedules == ()

    async def is_shown() -> bool:
        return len((await service.status()).schedules) == 1

    async with serving(service):
        await until(is_shown)
        [status] = (await service.status()).schedules
        assert (status.name, status.queue, status.every, status.timezone) == ("tidy", "tidy", RARELY, "Europe/Berlin")
        assert (status.last, status.paused) == (None, False)
        assert [status] == await service.backend.schedules()
    assert (await service.status()).schedules == ()


async def test_it_ends_with_stop_and_can_be_run_again(url: str) -> None:
    log: Log = []
    service = Service(url)
    service.every(OFTEN)(takes_nothing(log))
    for grace in (None, 0.0):
        log.clear()
        before = asyncio.all_tasks()
        task = asyncio.create_task(service.serve(sigterm=False))
        await until(lambda: log)
        service.stop(grace)
        await asyncio.wait_for(task, PATIENCE)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


async def test_a_schedule_that_can_not_go_on_ends_the_service_with_its_error(url: str) -> None:
    service = Service(url)
    service.every(RARELY)(takes_nothing([]))
    async with tenure.connect(url) as backend:
        await backend.queue("tidy").declare(body_max=1)
    with pytest.raises(ConfigError, match="body_max"):
        await asyncio.wait_for(service.serve(sigterm=False), PATIENCE)


async def test_until_empty_handles_what_is_there_and_sends_nothing(url: str) -> None:
    log: Log = []
    service = Service(url)
    service.every(OFTEN)(takes_the_slot(log))
    async with tenure.connect(url) as backend:
        await backend.queue("tidy").send(json="2026-11-26T03:00:00+01:00")
        await asyncio.wait_for(service.serve(until_empty=True), PATIENCE)
        assert log == [(datetime.fromisoformat("2026-11-26T03:00:00+01:00"),)]
        assert await backend.schedules() == []


async def test_what_is_no_slot_in_its_queue_is_a_dead_letter(url: str) -> None:
    log: Log = []
    service = Service(url)
    service.every(OFTEN)(takes_the_slot(log))
    async with tenure.connect(url) as backend:
        queue = backend.queue("tidy")
        await queue.send(b"now!")
        await asyncio.wait_for(service.serve(until_empty=True), PATIENCE)
        [dead] = await queue.dead_letters.peek()
    assert dead.reason == "undecodable"
    assert log == []


# --- plain functions ---


def test_a_service_of_threads_has_the_same(url: str) -> None:
    log: Log = []
    enough = threading.Event()
    service = tenure.sync.Service(url)

    @service.every(OFTEN)
    def tidy(slot: datetime, message: tenure.sync.Message) -> None:
        log.append((slot, message))
        [status] = service.status().schedules
        if status.last is not None and len(log) >= 3:
            enough.set()

    def stop() -> None:
        assert enough.wait(PATIENCE)
        loops[0].call_soon_threadsafe(service.service.stop)

    loops: list[asyncio.AbstractEventLoop] = []
    stopping = threading.Thread(target=stop, daemon=True)

    @service.service.on_startup
    async def begin() -> None:
        loops.append(asyncio.get_running_loop())
        stopping.start()

    with service:
        service.run()
    stopping.join(PATIENCE)
    assert enough.is_set()
    assert len({slot for slot, _ in log}) == len(log)
    assert isinstance(log[0][1], tenure.sync.Message)

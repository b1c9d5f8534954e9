"""A service from its start to its end: openings, hooks, handlers beside leaders, failures, and the ways to stop it."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure import ConfigError, Service, Stats
from tenure.events import Event, TermBegan
from tests.durations import PATIENCE, stretched, until

TTL = 30.0


@dataclass
class Order:
    item: str


async def wait(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE)


@asynccontextmanager
async def serving(service: Service, **options: Any) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Event]]:
    stop = asyncio.Event()
    task = asyncio.create_task(service.serve(stop=stop, sigterm=False, **options))
    try:
        yield task, stop
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=PATIENCE)


@pytest.fixture
def url() -> str:
    return f"memory:{uuid4().hex}"


# --- its order ---


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_hooks_and_lifespan_are_around_all_the_work(url: str, plain: bool) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(service: Service) -> AsyncIterator[None]:
        log.append("enter")
        assert await orders.queue.stats() == Stats()
        yield
        log.append(f"leave {(await orders.queue.stats()).ready}")

    @contextmanager
    def plain_lifespan(service: Service) -> Iterator[None]:
        log.append("enter")
        yield
        log.append(f"leave {len(orders.queue.name) - 6}")

    service = Service(url, lifespan=plain_lifespan if plain else lifespan)
    orders = service.queue("orders", Order)

    @service.on_startup
    async def first() -> None:
        await orders.send(Order("tea"))
        log.append("first up")

    @service.on_startup
    def second() -> None:
        log.append("second up")

    @service.handler(orders)
    async def serve(order: Order) -> None:
        log.append(order.item)

    @service.on_shutdown
    def late() -> None:
        log.append("late down")

    @service.on_shutdown
    async def early() -> None:
        await orders.queue.stats()
        log.append("early down")

    expected = ["enter", "first up", "second up", "tea", "early down", "late down", "leave 0"]
    for _ in range(2):  # it can be run again
        await service.serve(until_empty=True)
        assert log == expected
        log.clear()


async def test_a_service_that_does_not_start_calls_no_shutdown_hook_and_closes(url: str) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(service: Service) -> AsyncIterator[None]:
        try:
            yield
        finally:
            log.append("left")

    service = Service(url, lifespan=lifespan)
    service.on_shutdown(lambda: log.append("down"))
    service.handler("orders")(ignore)

    @service.on_startup
    async def fail() -> None:
        raise KeyError("no database")

    with pytest.raises(KeyError, match="no database"):
        await service.serve()
    assert log == ["left"]
    assert "not open" in repr(service)


async def test_all_shutdown_hooks_are_called_although_one_raises(url: str) -> None:
    log: list[str] = []
    service = Service(url)
    service.handler("orders")(ignore)
    service.on_shutdown(lambda: log.append("first"))

    @service.on_shutdown
    def fail() -> None:
        raise KeyError("broken")

    service.on_shutdown(lambda: log.append("last"))
    with pytest.raises(KeyError, match="broken"):
        await service.serve(until_empty=True)
    assert log == ["last", "first"]


async def ignore(message: tenure.Message) -> None: ...


# --- leaders ---


async def test_leaders_on_the_loop_and_in_a_thread_are_cancelled_at_the_end(url: str) -> None:
    log: list[str] = []
    both = asyncio.Event()
    service = Service(url)
    loop = asyncio.get_running_loop()

    def note(text: str) -> None:
        log.append(text)
        if len(log) == 2:
            loop.call_soon_threadsafe(both.set)

    @service.leader("chair", ttl=TTL)
    async def chair(term: tenure.Term) -> None:
        note("chair")
        try:
            await asyncio.Event().wait()
        finally:
            term.check()
            log.append("chair ends")

    @service.leader("clerk", ttl=TTL, metadata={"at": "here"})
    def clerk(term: tenure.sync.Term) -> None:
        assert threading.current_thread() is not threading.main_thread()
        note("clerk")
        term.lost.wait()
        log.append("clerk ends")

    async with serving(service) as (task, _):
        await wait(both)
        leader = await service.backend.election("clerk").leader()
        assert leader is not None
        assert leader.metadata == {"at": "here"}
    await task
    assert sorted(log[2:]) == ["chair ends", "clerk ends"]
    async with tenure.connect(url) as backend:
        assert await backend.leaders() == {"chair": None, "clerk": None}  # both have released


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_leader_that_returns_leads_again_only_if_it_is_to(url: str, plain: bool) -> None:
    terms: list[int] = []
    thrice = asyncio.Event()
    loop = asyncio.get_running_loop()
    service = Service(url)

    def note(term: tenure.Term | tenure.sync.Term) -> None:
        terms.append(term.token)
        if len(terms) == 3:
            loop.call_soon_threadsafe(thrice.set)

    async def lead(term: tenure.Term) -> None:
        note(term)

    def lead_in_thread(term: tenure.sync.Term) -> None:
        note(term)

    service.leader("often", again=True, ttl=TTL, retry_every=0.1)(lead_in_thread if plain else lead)
    async with serving(service) as (task, _):
        await wait(thrice)
    await task
    assert terms[:3] == [1, 2, 3]

    once = Service(url)
    once.leader("once", ttl=TTL)(lead_in_thread if plain else lead)
    await asyncio.wait_for(once.serve(), PATIENCE)  # there is nothing else to run


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_leader_that_raises_stops_the_service_gracefully(url: str, plain: bool) -> None:
    began, handled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    service = Service(url)
    orders = service.queue("orders", Order)
    may_fail = threading.Event()

    @service.handler(orders)
    async def serve(order: Order) -> None:
        began.set()
        may_fail.set()
        await wait_for_failure()
        handled.set()

    failed = asyncio.Event()

    async def wait_for_failure() -> None:
        await wait(failed)

    async def lead(term: tenure.Term) -> None:
        await wait(began)
        failed.set()
        raise KeyError("no chair")

    def lead_in_thread(term: tenure.sync.Term) -> None:
        may_fail.wait(PATIENCE)
        loop.call_soon_threadsafe(failed.set)
        raise KeyError("no chair")

    service.leader("chair", ttl=TTL)(lead_in_thread if plain else lead)

    @service.on_startup
    async def fill() -> None:
        await orders.send(Order("tea"))

    with pytest.raises(KeyError, match="no chair"):
        await asyncio.wait_for(service.serve(), PATIENCE)
    assert handled.is_set()  # it was not cancelled


async def test_the_first_of_several_failures_is_raised_and_tells_of_the_others(url: str) -> None:
    service = Service(url)

    @service.leader("chair", ttl=TTL)
    async def chair(term: tenure.Term) -> None:
        raise KeyError("first")

    @service.leader("clerk", ttl=TTL)
    async def clerk(term: tenure.Term) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("second")

    with pytest.raises((KeyError, ValueError)) as caught:
        await asyncio.wait_for(service.serve(), PATIENCE)
    if isinstance(caught.value, KeyError):  # else the clerk was not elected yet
        assert getattr(caught.value, "__notes__", [""])[0] in (
            "",
            "while it stopped, there was also ValueError: second",
        )


async def test_a_system_exit_of_a_leader_comes_out_when_all_has_ended(url: str) -> None:
    service = Service(url)
    log: list[str] = []
    service.on_shutdown(lambda: log.append("down"))

    @service.leader("chair", ttl=TTL)
    async def chair(term: tenure.Term) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        await service.serve()
    assert log == ["down"]


# --- until all is done ---


async def test_until_empty_waits_for_what_handlers_send_to_each_other(url: str) -> None:
    service = Service(url)
    numbers = service.queue("numbers", int)
    halves = service.queue("halves", int)
    seen: list[int] = []

    @service.handler(halves)
    async def halve(number: int) -> None:
        if number > 1:
            await numbers.send(number // 2)

    @service.handler(numbers)
    async def forward(number: int) -> None:
        seen.append(number)
        await halves.send(number)

    @service.leader("chair", ttl=TTL)
    async def lead(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    async with service:
        await numbers.send(64)
        await asyncio.wait_for(service.serve(until_empty=True), PATIENCE)
        assert await numbers.queue.stats() == await halves.queue.stats() == Stats()
    assert seen == [64, 32, 16, 8, 4, 2, 1]


async def test_until_empty_does_not_wait_for_sessions_that_no_handler_consumes(url: str) -> None:
    service = Service(url)
    orders = service.queue("orders", Order)
    served: list[str] = []

    @service.handler(orders)
    async def serve(order: Order) -> None:
        served.append(order.item)

    async with service:
        await orders.send(Order("of a session"), session="s")
        await orders.send(Order("tea"))
        await asyncio.wait_for(service.serve(until_empty=True), PATIENCE)
    assert served == ["tea"]


# --- the ways to stop it ---


async def test_a_cancelled_service_gives_back_and_closes(url: str) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()
    service = Service(url)
    orders = service.queue("orders", Order)

    @service.handler(orders)
    async def serve(order: Order) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(service.serve())
    async with service:
        await orders.send(Order("tea"))
        await wait(began)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled.is_set()
        (again,) = await orders.queue.receive()
        assert again.delivery_count == 1  # it was given back uncounted
        await again.complete()
    assert "not open" in repr(service)


async def test_stopped_before_it_runs_it_runs_nothing(url: str) -> None:
    service = Service(url)
    orders = service.queue("orders", Order)
    stop = asyncio.Event()
    served: list[Order] = []
    service.on_startup(stop.set)

    @service.handler(orders)
    async def serve(order: Order) -> None:
        served.append(order)

    async with service:
        await orders.send(Order("tea"))
        await asyncio.wait_for(service.serve(stop=stop), PATIENCE)
        assert (await orders.queue.stats()).ready == 1
    assert served == []


async def test_running_beside_a_block_that_ends_lets_handlers_finish(url: str) -> None:
    began, done = asyncio.Event(), asyncio.Event()
    service = Service(url)
    orders = service.queue("orders", Order)

    @service.handler(orders)
    async def serve(order: Order) -> None:
        began.set()
        await asyncio.sleep(0.3)
        done.set()

    async with service.running() as same:
        assert same is service
        assert "running" in repr(service)
        await orders.send(Order("tea"))
        await wait(began)
    assert done.is_set()
    began.clear()
    done.clear()
    with pytest.raises(KeyError, match="the block"):
        async with service.running():
            await orders.send(Order("tea"))
            await wait(began)
            raise KeyError("the block")
    assert done.is_set()


async def test_a_block_beside_a_failure_is_cancelled_and_raises_it(url: str) -> None:
    service = Service(url)
    left: list[str] = []

    @service.leader("chair", ttl=TTL)
    async def chair(term: tenure.Term) -> None:
        raise KeyError("no chair")

    with pytest.raises(KeyError, match="no chair"):
        async with service.running():
            try:
                await asyncio.Event().wait()
            finally:
                left.append("block")
    assert left == ["block"]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_block_that_is_cancelled_is_left_gracefully(url: str) -> None:
    began, done = asyncio.Event(), asyncio.Event()
    service = Service(url)
    orders = service.queue("orders", Order)

    @service.handler(orders)
    async def serve(order: Order) -> None:
        began.set()
        await asyncio.sleep(0.3)
        done.set()

    async def block() -> None:
        async with service.running():
            await orders.send(Order("tea"))
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await wait(began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


@pytest.mark.parametrize("where", ["hook", "lifespan"])
async def test_stopped_while_it_starts_it_goes_no_further(url: str, where: str) -> None:
    log: list[str] = []
    waits = asyncio.Event()

    @asynccontextmanager
    async def lifespan(service: Service) -> AsyncIterator[None]:
        if where == "lifespan":
            waits.set()
            await asyncio.Event().wait()
        yield
        log.append("left")

    service = Service(url, lifespan=lifespan)
    service.handler("orders")(ignore)

    @service.on_startup
    async def hang() -> None:
        waits.set()
        await asyncio.Event().wait()

    service.on_shutdown(lambda: log.append("down"))
    stop = asyncio.Event()
    task = asyncio.create_task(service.serve(stop=stop))
    await wait(waits)
    stop.set()
    await asyncio.wait_for(task, PATIENCE)
    assert log == []
    assert "not open" in repr(service)
    waits.clear()
    stop.clear()
    task = asyncio.create_task(service.serve(stop=stop))
    await wait(waits)
    task.cancel()  # by somebody else
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_hooks_do_not_run_beside_work_however_often_it_is_cancelled(url: str, plain: bool) -> None:
    log: list[str] = []
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    service = Service(url)

    async def lead(term: tenure.Term) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
            log.append("ended")

    def lead_in_thread(term: tenure.sync.Term) -> None:
        loop.call_soon_threadsafe(began.set)
        term.lost.wait()
        log.append("ended")

    service.leader("chair", ttl=TTL)(lead_in_thread if plain else lead)
    service.on_shutdown(lambda: log.append("down"))
    task = asyncio.create_task(service.serve())
    await wait(began)
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["ended", "down"]


async def test_a_busy_pool_of_threads_does_not_keep_a_leader_from_stopping(url: str) -> None:
    service = Service(url)
    leads = threading.Event()
    may_end = threading.Event()

    @service.leader("chair", ttl=TTL)
    def lead(term: tenure.sync.Term) -> None:
        leads.set()
        term.lost.wait()

    async with serving(service) as (task, stop):
        await until(leads.is_set)
        jobs = [asyncio.create_task(asyncio.to_thread(may_end.wait, PATIENCE)) for _ in range(50)]
        await asyncio.sleep(0)
        stop.set()
        await asyncio.wait_for(service_ended(task), PATIENCE)
        assert not may_end.is_set()
        may_end.set()
        await asyncio.gather(*jobs)


async def service_ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


async def test_a_thread_that_never_ends_does_not_hold_up_a_cancelled_service(url: str) -> None:
    service = Service(url)
    began, may_end = threading.Event(), threading.Event()

    @service.leader("chair", ttl=TTL, grace=0.2)
    def lead(term: tenure.sync.Term) -> None:
        began.set()
        may_end.wait(PATIENCE)

    task = asyncio.create_task(service.serve())
    await until(began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE)
    async with tenure.connect(url) as backend:
        assert await backend.election("chair").leader() is not None  # the lease is left to run out
    may_end.set()


async def test_an_event_of_another_loop_ends_it_with_the_error(url: str) -> None:
    service = Service(url)
    service.handler("orders")(ignore)
    stop = asyncio.Event()

    async def elsewhere() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.01)  # binds it to that loop

    await asyncio.to_thread(asyncio.run, elsewhere())
    with pytest.raises(RuntimeError, match="is bound to a different event loop"):
        await asyncio.wait_for(service.serve(stop=stop), PATIENCE)


# --- openings ---


async def test_openings_are_counted(url: str) -> None:
    service = Service(url)
    orders = service.queue("orders", Order)
    service.handler("mails")(ignore)
    async with service:
        queue = orders.queue
        async with service.running():
            assert orders.queue is queue
            await orders.send(Order("tea"))
        assert (await orders.queue.stats()).ready == 1
    assert await service.open() is service
    assert orders.queue is not queue
    await service.aclose()
    await service.aclose()  # once too often
    async with service:
        assert (await orders.queue.stats()).ready == 1


async def test_a_backend_that_is_given_stays_open(url: str) -> None:
    async with tenure.connect(url) as backend:
        service = Service(backend)
        service.handler("orders")(ignore)
        orders = service.queue("orders", Order)
        async with service:
            await orders.send(Order("tea"))
        await service.serve(until_empty=True)
        assert await backend.queue("orders").stats() == Stats()
        with pytest.raises(ConfigError, match="has on_event of its own"):
            Service(backend, on_event=print)


async def test_two_services_share_the_work(url: str) -> None:
    taken: dict[int, int] = {0: 0, 1: 0}
    leads: list[int] = []
    services = [Service(url), Service(url)]
    for number, service in enumerate(services):

        @service.handler("orders", concurrency=2)
        async def serve(order: Order, me: int = number) -> None:
            taken[me] += 1
            await asyncio.sleep(0.001)

        @service.leader("chair", ttl=TTL)
        async def lead(term: tenure.Term, me: int = number) -> None:
            leads.append(me)
            await asyncio.Event().wait()

    async with serving(services[0]) as (first, _), serving(services[1]) as (second, _):
        await until(lambda: bool(leads))
        async with tenure.connect(url) as backend:
            orders = backend.queue("orders")
            await orders.send_batch([tenure.Outgoing.json(Order("tea")) for _ in range(200)])
            await until(lambda: sum(taken.values()) == 200)
    await first
    await second
    assert min(taken.values()) > 0
    assert len(leads) <= 2


async def test_events_of_all_parts_reach_the_hook(url: str) -> None:
    threads: dict[str, threading.Thread] = {}

    def note(event: Event) -> None:
        if isinstance(event, TermBegan):
            threads[event.name] = threading.current_thread()

    service = Service(url, on_event=note)

    @service.leader("chair", ttl=TTL)
    async def chair(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    @service.leader("clerk", ttl=TTL)
    def clerk(term: tenure.sync.Term) -> None:
        term.lost.wait()

    async with serving(service):
        await until(lambda: len(threads) == 2)
    assert threads["chair"] is threading.current_thread()
    assert threads["clerk"] is not threading.current_thread()


async def test_a_plain_handler_sends_through_the_blocking_queue(url: str) -> None:
    service = Service(url)
    orders = service.queue("orders", Order)
    mails = service.queue("mails", str)
    sent: list[str] = []

    @service.handler(orders)
    def serve(order: Order) -> None:
        mails.blocking.send(order.item)
        assert mails.blocking.queue.stats().ready == 1
        assert service.blocking.queue("orders").stats().locked == 1

    @service.on_startup
    async def fill() -> None:
        await orders.send(Order("tea"))

    @service.on_shutdown
    async def look() -> None:
        sent.extend([message.text() for message in await mails.queue.receive(10)])

    await asyncio.wait_for(service.serve(until_empty=True), PATIENCE)
    assert sent == ["tea"]


# --- its status ---


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_the_status_says_what_runs(url: str, plain: bool) -> None:
    may_end = asyncio.Event()
    began = asyncio.Event()
    service = Service(url)
    orders = service.queue("orders", Order)
    assert await service.status() == tenure.ServiceStatus()

    @service.handler(orders, concurrency=3)
    async def serve(order: Order) -> None:
        began.set()
        await wait(may_end)

    async def lead(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    def lead_in_thread(term: tenure.sync.Term) -> None:
        term.lost.wait()

    @service.leader("once", ttl=TTL)
    async def once(term: tenure.Term) -> None: ...

    service.leader("chair", ttl=TTL)(lead_in_thread if plain else lead)
    async with serving(service):

        async def is_ready() -> bool:
            status = await service.status()
            return status.is_ready and [(one.name, one.state) for one in status.leaders] == [("chair", "leading")]

        await until(is_ready)
        await orders.send(Order("tea"))
        await wait(began)
        status = await service.status()
        assert status.handlers == (tenure.HandlerStatus("orders", 3, 1, True),)
        assert status.is_live
        may_end.set()
    assert await service.status() == tenure.ServiceStatus()


async def test_a_service_is_not_ready_while_its_store_does_not_answer(tmp_path: Path) -> None:
    service = Service(f"sqlite:///{tmp_path}/work.db")
    service.handler("orders", poll_every=0.1)(ignore)
    async with serving(service):

        async def is_ready(expected: bool) -> bool:
            return (await service.status()).is_ready is expected

        await until(lambda: is_ready(True))
        await service.backend.aclose()  # as if the store had gone
        await until(lambda: is_ready(False))


async def test_a_service_pauses_and_drains_with_its_queue(url: str) -> None:
    served: list[str] = []
    service = Service(url)
    orders = service.queue("orders", Order)

    @service.handler(orders)
    async def serve(order: Order) -> None:
        served.append(order.item)

    async def is_ready() -> bool:
        return (await service.status()).is_ready

    async with serving(service) as (task, _):
        await until(is_ready)
        orders.queue.pause()
        await orders.send(Order("tea"))
        await asyncio.sleep(stretched(0.1))
        assert served == []
        orders.queue.resume()
        await until(lambda: served == ["tea"])
        await orders.queue.drain()
        await asyncio.wait_for(task, PATIENCE)  # its only handler has ended


# --- what is refused ---


async def test_what_can_not_run_is_refused(url: str) -> None:
    service = Service(url)
    with pytest.raises(ConfigError, match="the service has nothing to run: declare a handler or a leader"):
        await service.serve()
    with pytest.raises(ConfigError, match=r"an event loop runs here.*await service.serve\(\)"):
        service.run()

    @service.leader("chair", ttl=TTL)
    async def lead(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ConfigError, match="until_empty is for services with handlers"):
        await service.serve(until_empty=True)
    async with serving(service):
        await until(lambda: "running" in repr(service))
        with pytest.raises(ConfigError, match="the service runs already"):
            await service.serve()


async def test_what_can_not_be_declared_is_refused(url: str) -> None:
    service = Service(url)

    async def lead(term: tenure.Term) -> None: ...

    async def for_two(term: tenure.Term, shop: str) -> None: ...

    async def hook(order: Order) -> None: ...

    service.leader("chair")(lead)
    with pytest.raises(ConfigError, match=r"the name 'chair' has a leader in this service: .*lead; they would compete"):
        service.leader("chair")(lead)
    with pytest.raises(ConfigError, match="for_two must take the term and nothing else"):
        service.leader("clerk")(for_two)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="leader must be a function that takes a term, not 7"):
        service.leader("clerk")(7)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"on_startup must be a function that takes nothing, and .*hook needs order"):
        service.on_startup(hook)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="lifespan must be a function that takes the service"):
        Service(url, lifespan=7)  # type: ignore[arg-type]

    def decorated(term: tenure.Term) -> Any:
        return lead(term)

    functools.update_wrapper(decorated, lead)
    with pytest.raises(ConfigError, match=r"lead is a plain function around an async one, whose coroutine would never"):
        service.leader("clerk")(decorated)

    async def of_threads(term: tenure.sync.Term) -> None: ...

    def of_a_loop(term: tenure.Term) -> None: ...

    with pytest.raises(ConfigError, match=r"of_threads is async, and gets a tenure\.Term, not a tenure\.sync\.Term"):
        service.leader("clerk")(of_threads)
    with pytest.raises(ConfigError, match=r"of_a_loop is a plain function, and gets a tenure\.sync\.Term, not"):
        service.leader("clerk")(of_a_loop)  # type: ignore[type-var]
    service = Service(url, lifespan=lambda service: service)  # it is a block, by itself
    service.leader("chair")(lead)
    await asyncio.wait_for(service.serve(), PATIENCE)
    service = Service(url, lifespan=lambda service: 7)  # type: ignore[arg-type, return-value]
    service.leader("chair")(lead)
    with pytest.raises(ConfigError, match=r"lifespan must return a block, and .* returned int; decorate it"):
        await service.serve()


async def test_the_store_is_named_when_it_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TENURE_URL", raising=False)
    service = Service()  # a module that declares one can be imported
    with pytest.raises(ConfigError, match="no store is named"):
        await service.open()
    monkeypatch.setenv("TENURE_URL", f"sqlite:///{tmp_path}/work.db")
    async with service:
        assert str(service.backend.url).startswith("sqlite:")
    with pytest.raises(ConfigError, match="no backend serves 'sqllite'; did you mean 'sqlite'"):
        Service("sqllite:///work.db")

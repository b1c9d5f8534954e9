"""tenure.sync.Service: plain functions, blocking queues; opened by threads, and in forked children."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure import ConfigError, Stats
from tenure.sync import Service, Term
from tests.durations import wait_until

TTL = 30.0


@dataclass
class Order:
    item: str


@pytest.fixture
def url() -> str:
    return f"memory:{uuid4().hex}"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = threading.enumerate()
    yield
    left = [one for one in threading.enumerate() if one.name.startswith("tenure") and one not in before]
    for one in left:
        one.join(60.0)
        assert not one.is_alive()


def test_a_service_of_plain_functions(url: str) -> None:
    log: list[str] = []
    hooks_on: list[threading.Thread] = []
    served: list[str] = []

    @contextmanager
    def lifespan(given: Service) -> Iterator[None]:
        assert given is service
        log.append("enter")
        hooks_on.append(threading.current_thread())
        yield
        hooks_on.append(threading.current_thread())
        log.append("leave")

    service = Service(url, lifespan=lifespan)
    orders = service.queue("orders", Order)
    mails = service.queue("mails", str)
    may_ask = threading.Event()

    @service.on_startup
    def fill() -> None:
        hooks_on.append(threading.current_thread())
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        orders.send_batch([Order("tea"), orders.outgoing(Order("cup"), id="cup")])

    @service.handler(orders, concurrency=1)
    def serve(order: Order, message: tenure.sync.Message) -> str:
        assert orders.decode(message) == order
        if order.item != "asked":
            mails.send(order.item)
            served.append(order.item)
        if len(served) == 2 and order.item != "asked":
            may_ask.set()
            wait_until(lambda: orders.queue.stats().ready)  # else no handler would be left to answer
        return order.item.upper()

    @service.handler(mails)
    def mail(text: str) -> None:
        log.append(text)

    @service.leader("chair", ttl=TTL)
    def lead(term: Term) -> None:
        may_ask.wait(60.0)
        log.append(orders.request(Order("asked"), str, timeout=60.0))
        log.append(f"term {term.token}")

    @service.on_shutdown
    def look() -> None:
        assert service.backend.queue("orders").stats() == orders.queue.stats() == Stats()
        log.append("down")
        hooks_on.append(threading.current_thread())

    run_until_led(service, log)
    assert log[0] == "enter"
    assert sorted(log[1:5]) == ["ASKED", "cup", "tea", "term 1"]
    assert log.index("ASKED") < log.index("term 1")
    assert len(hooks_on) == 4
    assert len(set(hooks_on)) == 1  # so that a connection of SQLite, say, may be made and closed by them
    assert log[5:] == ["down", "leave"]


def run_until_led(service: Service, log: list[str]) -> None:
    """Run until the leader has asked, and all queues are empty."""
    service.run(until_empty=True)
    assert "ASKED" in log


def test_any_number_of_threads_may_open_it(url: str) -> None:
    service = Service(url)
    orders = service.queue("orders", Order)
    with pytest.raises(ConfigError, match="the service is not open"):
        orders.send(Order("tea"))

    def open_and_send(number: int) -> str:
        service.open()
        return orders.send(Order(f"{number}"))

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(open_and_send, range(50)))
    assert len(set(ids)) == 50
    with service:  # it stays open until it is closed
        assert orders.queue.stats().ready == 50
    with pytest.raises(ConfigError, match="the service is not open"):
        orders.send(Order("tea"))
    service.close()
    service.open()
    assert orders.queue.stats().ready == 50
    service.close()


@pytest.mark.process
def test_a_forked_child_opens_it_anew(tmp_path: Path) -> None:
    service = Service(f"sqlite:///{tmp_path}/work.db")
    orders = service.queue("orders", Order)
    with service:
        orders.send(Order("of the parent"))
        if (child := os.fork()) == 0:
            code = 1
            try:
                try:
                    orders.send(Order("not open"))
                except ConfigError as error:
                    if "the service is not open" in str(error):
                        service.open()
                        orders.send(Order("of the child"))
                        code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert orders.queue.stats().ready == 2


def test_all_shutdown_hooks_are_called_and_nothing_starts_after_a_failure(url: str) -> None:
    log: list[str] = []
    service = Service(url)
    service.leader("chair", ttl=TTL)(lambda term: log.append("led"))
    service.on_shutdown(lambda: log.append("down"))

    @service.on_startup
    def fail() -> None:
        if not log:
            raise KeyError("no database")

    with pytest.raises(KeyError, match="no database"):
        service.run()
    assert log == []
    log.append("now")
    service.run()
    assert log == ["now", "led", "down"]
    with pytest.raises(ConfigError, match="the service is not open"):
        _ = service.backend


@pytest.mark.parametrize("where", ["startup", "shutdown", "enter", "exit"])
def test_a_hook_that_raises_what_a_future_can_not_ends_the_service(url: str, where: str) -> None:
    def fail(at: str) -> None:
        if where == at:
            raise StopIteration

    class Block:
        def __enter__(self) -> None:
            fail("enter")

        def __exit__(self, *_: object) -> None:
            fail("exit")

    service = Service(url, lifespan=lambda _: Block())
    service.leader("chair", ttl=TTL)(lambda term: None)
    service.on_startup(lambda: fail("startup"))
    service.on_shutdown(lambda: fail("shutdown"))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        service.run()


def test_a_lifespan_that_is_entered_while_the_service_is_stopped_is_left(url: str) -> None:
    log: list[str] = []
    entering, may_enter = threading.Event(), threading.Event()

    @contextmanager
    def lifespan(service: Service) -> Iterator[None]:
        entering.set()
        may_enter.wait(60.0)
        log.append("entered")
        yield
        log.append("left")

    service = Service(url, lifespan=lifespan)
    service.leader("chair", ttl=TTL)(lambda term: log.append("led"))

    async def main() -> None:
        stop = asyncio.Event()
        serving = asyncio.create_task(service.service.serve(stop=stop, sigterm=False))
        await asyncio.to_thread(entering.wait, 60.0)
        stop.set()
        await asyncio.sleep(0.1)
        may_enter.set()
        await serving

    asyncio.run(main())
    assert log == ["entered", "left"]


def test_wrong_inputs(url: str) -> None:
    service = Service(url)

    async def hook() -> None: ...

    with pytest.raises(
        ConfigError, match=r"on_startup of a tenure.sync.Service must be a plain function, and .*hook is"
    ):
        service.on_startup(hook)
    with pytest.raises(ConfigError, match="on_shutdown must be a function that takes nothing, not 7"):
        service.on_shutdown(7)  # type: ignore[type-var]
    orders = service.queue("orders", Order)
    with pytest.raises(ConfigError, match="<TypedQueue 'orders' of Order> is a queue of another service"):
        Service(url).handler(orders)
    with pytest.raises(ConfigError, match="the service has nothing to run"):
        service.run()

    @service.handler(orders)
    def serve(order: Order, message: tenure.Message) -> None: ...

    with pytest.raises(
        ConfigError, match=r"is a plain function, and gets a tenure\.sync\.Message, not a tenure\.Message"
    ):
        service.run()
    with service, pytest.raises(ConfigError, match="the body must be Order, not str: 'tea'"):
        orders.send("tea")  # type: ignore[arg-type]

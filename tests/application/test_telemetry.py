"""What telemetry is told by consumers of every kind, producers, messages by hand and elections; and its errors."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure import Message, Outgoing, Reject, Retry, RetryPolicy, Stats
from tenure._queue.message import Delivery
from tenure._queue.verdicts import Verdict
from tenure.events import Event, MessageFailed, TermBegan, TermEnded
from tenure.telemetry import Handled, Histogram, Metrics, Outcome, Telemetry, Tracing
from tenure.testing import connect_here
from tenure.testing.loop import VirtualLoop, run
from tests.durations import PATIENCE, until

LOCK = 30.0
AT_ONCE = RetryPolicy(initial=0.0, maximum=0.0)


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory:{uuid4().hex}" if request.param == "memory" else f"sqlite:///{tmp_path}/work.db"


def values(metrics: Metrics, *names: str) -> dict[tuple[str, ...], float]:
    """Return the numbers of the metrics called *names*, without their prefix, by name and labels."""
    return {
        (name.removeprefix("tenure_"), *labels): value
        for (name, labels), value in metrics.snapshot().items()
        if name.removeprefix("tenure_") in names and not isinstance(value, Histogram)
    }


def count_of(metrics: Metrics, name: str, *labels: str) -> int:
    """Return how many values a histogram has."""
    found = metrics.snapshot()[f"tenure_{name}", labels]
    assert isinstance(found, Histogram)
    return sum(found.counts)


COUNTS = (
    "messages_sent",
    "messages_received",
    "messages_redelivered",
    "messages_handled",
    "messages_failed",
    "messages_dead",
    "messages_given_back",
)


# --- messages ---


async def test_what_is_sent_is_counted_by_step_and_by_message(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders")
        await queue.send(b"one")
        await queue.send_batch([Outgoing(b"two"), Outgoing(b"three")])
        await queue.send_batch([])
        with pytest.raises(tenure.ConfigError, match="body"):
            await queue.send(b"x" * 2_000_000)
    assert values(metrics, *COUNTS) == {("messages_sent", "orders"): 3.0}
    assert count_of(metrics, "send_seconds", "orders") == 2


async def test_each_outcome_of_an_async_handler_is_counted(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders", max_deliveries=3)
        acts = ["return", "raise", "retry", "reject", "invented", "complete", "abandon", "defer", "dead", "give back"]
        await queue.send_batch([Outgoing(one.encode()) for one in acts])

        async def handler(message: Message) -> object:
            act = message.body.decode() if message.delivery_count == 1 else "return"
            match act:
                case "raise":
                    raise ValueError("broken")
                case "retry":
                    return Retry(0.0)
                case "reject":
                    raise Reject("undecodable")
                case "invented":
                    return Reject("no such customer")
                case "complete":
                    await message.complete()
                case "abandon":
                    await message.abandon()
                case "defer":
                    await message.defer()
                case "dead":
                    await message.dead_letter("expired")
                case "give back" if message.id not in given_back:
                    given_back.add(message.id)
                    await message.give_back()
            return None

        given_back: set[str] = set()
        await queue.consume(handler, until_empty=True, retry=AT_ONCE)
        found = values(metrics, *COUNTS)
    handled = {
        outcome: number for (name, _, *rest), number in found.items() if name == "messages_handled" for outcome in rest
    }
    assert handled["abandoned"] == 2.0  # what was raised, and Retry
    assert handled["dead_lettered"] == 2.0
    assert sum(handled.values()) == 14.0
    assert set(handled) <= {"abandoned", "dead_lettered", "completed", "kept"}
    assert {key: number for key, number in found.items() if key[0] != "messages_handled"} == {
        ("messages_sent", "orders"): 10.0,
        ("messages_received", "orders"): 14.0,
        ("messages_redelivered", "orders"): 3.0,  # raised, Retry and abandoned; one given back counts as new
        ("messages_failed", "orders"): 2.0,
        ("messages_dead", "orders", "undecodable"): 1.0,
        ("messages_dead", "orders", "rejected"): 1.0,
        ("messages_dead", "orders", "expired"): 1.0,
    }
    assert count_of(metrics, "handler_seconds", "orders") == 14
    assert count_of(metrics, "message_wait_seconds", "orders") == 11


async def test_the_last_delivery_dies_and_one_that_expires_does_too(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders", max_deliveries=2)
        await queue.send(b"x")

        async def handler(message: Message) -> None:
            raise ValueError("broken")

        await queue.consume(handler, until_empty=True, retry=AT_ONCE)
        (dead,) = await queue.dead_letters.receive()
        await dead.complete()
        assert values(metrics, "messages_received")["messages_received", "orders"] == 2.0  # of the queue only
        await queue.send(b"late", expires_in=0.01)
        await asyncio.sleep(0.05)  # it is over then, and noticed by the next claim
        assert await queue.receive() == []
        assert values(metrics, *COUNTS) == {
            ("messages_sent", "orders"): 2.0,
            ("messages_received", "orders"): 2.0,
            ("messages_redelivered", "orders"): 1.0,
            ("messages_handled", "orders", "abandoned"): 2.0,
            ("messages_failed", "orders"): 2.0,
            ("messages_dead", "orders", "max_deliveries"): 1.0,
            ("messages_dead", "orders", "expired"): 1.0,
        }


def plain(message: Any) -> None:
    if message.delivery_count == 1:
        raise ValueError("broken")


@pytest.mark.parametrize("run_in", ["thread", pytest.param("process", marks=pytest.mark.process)])
async def test_handlers_in_threads_and_processes_are_counted(url: str, run_in: Any) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x") for _ in range(5)])
        await queue.consume(plain, run_in=run_in, until_empty=True, retry=AT_ONCE)
    assert values(metrics, *COUNTS) == {
        ("messages_sent", "orders"): 5.0,
        ("messages_received", "orders"): 10.0,
        ("messages_redelivered", "orders"): 5.0,
        ("messages_handled", "orders", "abandoned"): 5.0,
        ("messages_handled", "orders", "completed"): 5.0,
        ("messages_failed", "orders"): 5.0,
    }


async def test_messages_of_sessions_are_counted(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x", session=name) for name in "aabbc"])

        async def handler(message: Message) -> None: ...

        await queue.consume(handler, sessions=True, until_empty=True)
        await queue.send(b"x", session="by hand")
        async with queue.session("by hand") as session:
            (message,) = await session.receive()
            await message.complete()
    assert values(metrics, *COUNTS) == {
        ("messages_sent", "orders"): 6.0,
        ("messages_received", "orders"): 6.0,
        ("messages_redelivered", "orders"): 0.0,
        ("messages_handled", "orders", "completed"): 5.0,
    }


async def test_messages_by_hand_are_received_and_not_handled(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders")
        assert await queue.receive() == []
        await queue.send_batch([Outgoing(b"x"), Outgoing(b"y")])
        first, second = await queue.receive(2)
        await first.dead_letter("a reason of its own")
        await second.complete()
    assert values(metrics, *COUNTS) == {
        ("messages_sent", "orders"): 2.0,
        ("messages_received", "orders"): 2.0,
        ("messages_dead", "orders", "rejected"): 1.0,
    }


async def test_what_waits_when_consuming_ends_is_given_back(url: str) -> None:
    metrics = Metrics()
    begun = asyncio.Event()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x") for _ in range(10)])

        async def handler(message: Message) -> None:
            begun.set()
            await asyncio.sleep(3_600)

        consuming = asyncio.create_task(queue.consume(handler, concurrency=1, grace=0.0))
        await asyncio.wait_for(begun.wait(), PATIENCE)
        await queue.drain(0.0)
        await consuming
        assert (await queue.stats()).ready == 10
    received = values(metrics, "messages_received")["messages_received", "orders"]
    given_back = {("messages_given_back", "orders"): received - 1.0} if received > 1.0 else {}
    assert values(metrics, "messages_given_back") == given_back
    assert values(metrics, "messages_handled") == {("messages_handled", "orders", "given_back"): 1.0}


def test_a_lock_that_is_lost_is_counted_once() -> None:
    metrics = Metrics()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with connect_here(telemetry=metrics) as backend:
            queue = backend.queue("orders", lock=LOCK)
            await queue.send(b"x")

            async def handler(message: Message) -> None:
                if message.delivery_count == 1:
                    loop.block(2 * LOCK)

            await queue.consume(handler, until_empty=True)

    run(main(), limit=100_000)
    assert values(metrics, "locks_lost") == {("locks_lost", "orders", "stalled"): 1.0}
    assert count_of(metrics, "handler_seconds", "orders") == 2


async def test_what_asyncless_programs_do_is_counted(tmp_path: Path) -> None:
    metrics = Metrics()

    def main() -> None:
        with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db", telemetry=metrics) as backend:
            queue = backend.queue("orders")
            queue.send(b"x")
            queue.consume(plain, until_empty=True, retry=AT_ONCE)

    await asyncio.to_thread(main)
    assert values(metrics, *COUNTS) == {
        ("messages_sent", "orders"): 1.0,
        ("messages_received", "orders"): 2.0,
        ("messages_redelivered", "orders"): 1.0,
        ("messages_handled", "orders", "abandoned"): 1.0,
        ("messages_handled", "orders", "completed"): 1.0,
        ("messages_failed", "orders"): 1.0,
    }


async def test_requests_and_their_answers_are_counted(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        queue = backend.queue("orders")

        async def handler(message: Message) -> None:
            await message.reply(b"done")

        consuming = asyncio.create_task(queue.consume(handler))
        answer = await queue.request(b"please", timeout=PATIENCE)
        assert answer.body == b"done"
        await queue.drain()
        await consuming
    assert values(metrics, "messages_sent", "messages_handled") == {
        ("messages_sent", "orders"): 1.0,
        ("messages_handled", "orders", "completed"): 1.0,
    }


# --- elections ---


async def test_a_term_is_counted_and_leader_is_one_while_it_lasts(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url, telemetry=metrics) as backend:
        election = backend.election("chair", ttl=1.5)

        async def lead(term: tenure.Term) -> None:
            assert values(metrics, "leader", "terms") == {("leader", "chair"): 1.0, ("terms", "chair"): 1.0}
            await until(lambda: ("term_seconds_left", "chair") in values(metrics, "term_seconds_left"))
            assert 0.0 <= values(metrics, "term_seconds_left")["term_seconds_left", "chair"] <= 1.5

        await election.run(lead)
        await until(lambda: values(metrics, "leader") == {("leader", "chair"): 0.0})
    assert values(metrics, "leader", "terms", "terms_ended", "term_seconds_left") == {
        ("leader", "chair"): 0.0,
        ("terms", "chair"): 1.0,
        ("terms_ended", "chair", "ended"): 1.0,
    }


# --- a telemetry of one's own ---


class Told(Telemetry):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def sent(self, queue: str, count: int, seconds: float) -> None:
        assert seconds >= 0.0
        self.calls.append(("sent", queue, count))

    def received(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        self.calls.append(("received", queue, len(deliveries)))

    def handling(self, queue: str) -> Handled:
        self.calls.append(("handling", queue, threading.get_ident()))

        def handled(delivery: Delivery, seconds: float, outcome: Outcome) -> None:
            assert seconds >= 0.0
            self.calls.append(("handled", delivery.body, outcome, threading.get_ident()))

        return handled

    def event(self, event: Event) -> None:
        self.calls.append(("event", type(event)))


async def test_handling_is_asked_for_once_by_each_consumer_on_its_loop(url: str) -> None:
    told = Told()
    here = threading.get_ident()
    async with tenure.connect(url, telemetry=told) as backend:
        queue = backend.queue("orders")
        for _ in range(2):
            await queue.send_batch([Outgoing(b"x") for _ in range(20)])

            async def handler(message: Message) -> None:
                await asyncio.sleep(0.01)

            await queue.consume(handler, concurrency=10, until_empty=True)
    assert [call for call in told.calls if call[0] == "handling"] == [("handling", "orders", here)] * 2
    assert Counter(call for call in told.calls if call[0] == "handled") == {("handled", b"x", "completed", here): 40}
    assert [call for call in told.calls if call[0] == "sent"] == [("sent", "orders", 20)] * 2
    assert sum(call[2] for call in told.calls if call[0] == "received") == 40


async def test_several_are_all_told_the_same(url: str) -> None:
    several = [Told(), Told(), Told()]
    async with tenure.connect(url, telemetry=several[:2]) as backend:
        backend.observe(several[2])
        queue = backend.queue("orders")
        await queue.send(b"x")
        await queue.consume(plain, until_empty=True, retry=AT_ONCE)
    assert several[0].calls == several[1].calls == several[2].calls
    assert ("event", MessageFailed) in several[0].calls


async def test_events_go_to_the_hook_of_the_program_too(url: str) -> None:
    told, events = Told(), list[Event]()
    async with tenure.connect(url, telemetry=told, on_event=events.append) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        await queue.consume(plain, until_empty=True, retry=AT_ONCE)

        async def lead(term: tenure.Term) -> None: ...

        await backend.election("chair").run(lead)
        await until(lambda: any(isinstance(one, TermEnded) for one in events))
    assert [("event", type(one)) for one in events] == [call for call in told.calls if call[0] == "event"]
    assert {MessageFailed, TermBegan, TermEnded} <= {type(one) for one in events}


class Raising(Telemetry):
    """Raises wherever it is called."""

    def __init__(self, error: Callable[[str], BaseException] = KeyError) -> None:
        self.calls: Counter[str] = Counter()
        self._error = error

    def _fail(self, where: str) -> BaseException:
        self.calls[where] += 1
        return self._error(where)

    def sent(self, queue: str, count: int, seconds: float) -> None:
        raise self._fail("sent")

    def received(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        raise self._fail("received")

    def handling(self, queue: str) -> Handled:
        raise self._fail("handling")

    def event(self, event: Event) -> None:
        raise self._fail("event")

    def tracing(self) -> Tracing:
        raise self._fail("tracing")


class RaisingLater(Raising):
    """Raises in what its methods return."""

    def handling(self, queue: str) -> Handled:
        def handled(delivery: Delivery, seconds: float, outcome: Outcome) -> None:
            raise self._fail("handled")

        return handled

    def tracing(self) -> Tracing:
        return RaisingTracing(self._fail)


class RaisingTracing:
    """Raises instead of each block."""

    def __init__(self, fail: Callable[[str], BaseException]) -> None:
        self.fail = fail

    def sending(self, queue: str, messages: list[Outgoing]) -> AbstractContextManager[list[Outgoing]]:
        raise self.fail("sending")

    def received(self, queue: str, deliveries: Sequence[Delivery], seconds: float) -> None:
        raise self.fail("received by hand")

    def handling(self, delivery: Delivery) -> AbstractContextManager[Callable[[BaseException], object]]:
        raise self.fail("handling a message")

    def settling(self, delivery: Delivery, verdict: Verdict) -> AbstractContextManager[Any]:
        raise self.fail("settling")


class RaisingAtEnds(RaisingLater):
    """Raises when its blocks are left, and when they are told of an exception."""

    def tracing(self) -> Tracing:
        return RaisingBlocks(self._fail)


class RaisingBlocks(RaisingTracing):
    @contextmanager
    def sending(self, queue: str, messages: list[Outgoing]) -> Iterator[list[Outgoing]]:
        with suppress(BaseException):
            yield messages
        raise self.fail("sending")

    @contextmanager
    def handling(self, delivery: Delivery) -> Iterator[Callable[[BaseException], object]]:
        def fail(error: BaseException) -> None:
            raise self.fail("told of an exception")

        with suppress(BaseException):
            yield fail
        raise self.fail("handling a message")

    @contextmanager
    def settling(self, delivery: Delivery, verdict: Verdict) -> Iterator[None]:
        with suppress(BaseException):
            yield
        raise self.fail("settling")


@pytest.mark.parametrize("kind", [Raising, RaisingLater, RaisingAtEnds])
@pytest.mark.parametrize("others", [0, 1])
async def test_one_that_raises_changes_nothing_and_is_reported_once_for_each_call(
    url: str, kind: type[Raising], others: int, caplog: pytest.LogCaptureFixture
) -> None:
    raising = kind()
    metrics = [Metrics() for _ in range(others)]
    served: list[bytes] = []

    async with tenure.connect(url, telemetry=[raising, *metrics]) as backend:
        queue = backend.queue("orders")
        await queue.send(b"a")
        await queue.send_batch([Outgoing(b"b"), Outgoing(b"c")])

        async def handler(message: Message) -> None:
            if message.delivery_count == 1:
                raise ValueError("broken")
            served.append(message.body)
            if message.body == b"b":
                await message.complete()

        def in_thread(message: tenure.sync.Message) -> None:
            served.append(message.body)
            if message.delivery_count == 1:
                raise ValueError("broken")

        await queue.consume(handler, until_empty=True, retry=AT_ONCE)
        assert sorted(served) == [b"a", b"b", b"c"]
        await queue.send(b"d")
        await queue.consume(in_thread, until_empty=True, retry=AT_ONCE)
        assert served[3:] == [b"d", b"d"]
        await queue.send(b"e", id="e")
        (message,) = await queue.receive()
        assert message.body == b"e"
        await message.complete()
        assert await queue.stats() == Stats()
        with pytest.raises(tenure.LockLost):
            await message.complete()

        async def lead(term: tenure.Term) -> None: ...

        await backend.election("chair").run(lead)
        await until(lambda: raising.calls["event"] >= 6)
    reports = [one for one in caplog.records if one.message == "telemetry of tenure failed"]
    assert {one.levelno for one in reports} == {logging.ERROR}
    told = Counter(str(one.exc_info[1].args[0]) for one in reports if one.exc_info and one.exc_info[1])
    assert told == raising.calls
    expected = {"sent", "received", "event"}
    expected |= {"handling", "tracing"} if kind is Raising else {"handled", "sending", "handling a message", "settling"}
    if kind is not Raising:
        expected |= {"received by hand"}
    if kind is RaisingAtEnds:
        expected |= {"told of an exception"}
    assert set(told) == expected
    for one in metrics:
        assert values(one, "messages_sent") == {("messages_sent", "orders"): 5.0}
        assert sum(values(one, "messages_handled").values()) == 8.0


async def test_a_log_that_fails_beside_it_changes_nothing(url: str, request: pytest.FixtureRequest) -> None:
    log = logging.getLogger("tenure")

    def refuse(record: logging.LogRecord) -> bool:
        raise OSError("no space left")

    log.addFilter(refuse)
    request.addfinalizer(lambda: log.removeFilter(refuse))
    async with tenure.connect(url, telemetry=RaisingLater()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"a")
        served: list[bytes] = []

        async def handler(message: Message) -> None:
            served.append(message.body)

        await queue.consume(handler, until_empty=True)
        assert served == [b"a"]
        assert await queue.stats() == Stats()


async def test_a_telemetry_that_says_nothing_is_fine(url: str) -> None:
    async with tenure.connect(url, telemetry=Telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"a")
        await queue.consume(plain, until_empty=True, retry=AT_ONCE)
        assert await queue.stats() == Stats()


class Tracer(Telemetry):
    """Gives each message that is sent a header."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tracing(self) -> Tracing:
        return Headers(self.name)


class Headers(RaisingTracing):
    def __init__(self, name: str) -> None:
        super().__init__(KeyError)
        self.name = name

    @contextmanager
    def sending(self, queue: str, messages: list[Outgoing]) -> Iterator[list[Outgoing]]:
        for one in messages:
            one.headers = {**one.headers, self.name: queue}
        yield messages

    def received(self, queue: str, deliveries: Sequence[Delivery], seconds: float) -> None: ...


async def test_at_most_the_first_of_several_is_around_the_work(url: str) -> None:
    async with tenure.connect(url, telemetry=[Metrics(), Tracer("one"), Tracer("other")]) as backend:
        queue = backend.queue("orders")
        await queue.send(b"a")
        (message,) = await queue.receive()
        assert dict(message.headers) == {"one": "orders"}


# --- observe, and wrong inputs ---


async def test_what_is_added_later_is_told_of_queues_that_are_made_later(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url) as backend:
        before = backend.queue("before")
        backend.observe(metrics)
        backend.observe()
        await before.send(b"x")
        await backend.queue("after").send(b"x")
    assert values(metrics, "messages_sent") == {("messages_sent", "after"): 1.0}


@pytest.mark.parametrize("how", ["argument", "list", "observe", "from the environment", "both"])
async def test_a_service_is_measured(url: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, other = Metrics(), Metrics()
    monkeypatch.setenv("TENURE_URL", url)
    service = tenure.Service(
        None if how in ("from the environment", "both") else url,
        telemetry=metrics if how == "argument" else [metrics] if how == "list" else other if how == "both" else None,
    )
    if how in ("observe", "from the environment", "both"):
        service.observe(metrics)
    orders = service.queue("orders", int)

    @service.on_startup
    async def fill() -> None:
        await orders.send(1)

    @service.handler(orders)
    async def serve(number: int) -> None: ...

    for runs in (1.0, 2.0):
        await service.serve(until_empty=True)
        for one in (metrics, other) if how == "both" else (metrics,):
            assert values(one, "messages_sent", "messages_handled") == {
                ("messages_sent", "orders"): runs,
                ("messages_handled", "orders", "completed"): runs,
            }


async def test_a_service_on_a_backend_measures_that(url: str) -> None:
    metrics = Metrics()
    async with tenure.connect(url) as backend:
        service = tenure.Service(backend, telemetry=metrics)
        async with service:
            await service.queue("orders", int).send(1)
    assert values(metrics, "messages_sent") == {("messages_sent", "orders"): 1.0}


WRONG: list[Any] = ["x", 3, [1], [Metrics(), "x"], Metrics, {"a": Metrics()}, object()]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_telemetry_is_refused_where_it_is_given(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", "memory:")
    says = r"telemetry must be a tenure\.telemetry\.Telemetry, or a list of them, not .*telemetry=tenure"
    makers: list[Callable[[], object]] = [
        lambda: tenure.connect("memory:", telemetry=wrong),
        lambda: tenure.sync.connect("memory:", telemetry=wrong),
        lambda: tenure.Service("memory:", telemetry=wrong),
        lambda: tenure.Service(telemetry=wrong),
        lambda: tenure.sync.Service("memory:", telemetry=wrong),
        lambda: tenure.connect("memory:").observe(wrong),
        lambda: tenure.Service("memory:").observe(wrong),
        lambda: tenure.Service().observe(wrong),
        lambda: tenure.sync.Service().observe(wrong),
    ]
    for make in makers:
        with pytest.raises(tenure.ConfigError, match=says):
            make()


def test_a_backend_for_threads_takes_none_beside_that_of_the_backend_behind_it() -> None:
    with pytest.raises(tenure.ConfigError, match="telemetry of its own"):
        tenure.sync.Backend(tenure.connect("memory:"), telemetry=Metrics())


def test_nothing_is_imported_for_it_when_it_is_off() -> None:
    script = """
import asyncio, sys
import tenure, tenure.sync, tenure.telemetry

async def main():
    async with tenure.connect("memory:", telemetry=METRICS) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        async def handler(message): ...
        await queue.consume(handler, until_empty=True)

asyncio.run(main())
foreign = ("opentelemetry", "prometheus_client", "starlette", "uvicorn")
print(sorted(name for name in sys.modules if name.split(".")[0] in foreign))
"""
    for metrics in ("None", "tenure.telemetry.Metrics()"):
        program = script.replace("METRICS", metrics)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == "[]\n"

"""Consumers whose handlers and hooks misbehave, on every broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from tenure._queue import context, hooks
from tenure._queue.broker import Broker, Claim, QueueOptions, QueueSettings
from tenure._queue.context import QueueContext
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._queue.retry import Retry, RetryPolicy
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.events import Event, MessageDied
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import QueueSuite, needs
from tenure.testing._misbehaving import ODD_ERRORS, Unprintable

WITHIN = 60.0
"""Seconds for a consumer to finish, on a busy machine."""


class WithoutClass:
    """An object whose ``__class__`` raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise LookupError("no class")


def _raises(make: Callable[[], BaseException]) -> Callable[[], object]:
    def misbehave() -> object:
        raise make()

    return misbehave


def _cancels_its_task() -> object:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise ValueError("cancelled by itself")


FAILURES: dict[str, Callable[[], object]] = {
    **{kind: _raises(make) for kind, make in ODD_ERRORS.items()},
    "returned": Unprintable,
}
"""The failure of a handler, in a coroutine or in a thread, by the body of its message."""

ON_LOOPS: dict[str, Callable[[], object]] = {"cancels its task": _cancels_its_task}

IN_THREADS: dict[str, Callable[[], object]] = {"interrupt": _raises(KeyboardInterrupt)}


class ConsumerSuite(QueueSuite):
    """A misbehaving handler or hook costs one delivery at most; many messages take few claims, one wakes few."""

    @pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
    @pytest.mark.parametrize("where", ["loop", "thread"])
    async def test_a_handler_that_misbehaves_costs_one_delivery(
        self, harness: QueueHarness, name: str, where: str, sessions: bool
    ) -> None:
        if sessions:
            needs(harness.traits.sessions)
        observed = ObservedQueue(await harness.open(), name, harness.lock)
        failures = {**FAILURES, **(ON_LOOPS if where == "loop" else IN_THREADS)}
        await observed.send([*failures, "good"], sessions=sessions)
        handled: list[str] = []

        def work(message: Any) -> object:
            kind = message.body.decode()
            if kind == "good":
                handled.append(kind)
                return WithoutClass()
            return failures[kind]()

        async def work_on_the_loop(message: Message) -> object:
            return work(message)

        hooked: list[type[BaseException]] = []
        async with asyncio.timeout(WITHIN):
            await observed.queue.consume(
                work_on_the_loop if where == "loop" else work,
                concurrency=1,
                sessions=sessions,
                until_empty=True,
                on_error=lambda _, error: hooked.append(type(error)),
            )
        assert handled == ["good"]
        assert await observed.queue.stats() == Stats(dead=len(failures))
        assert len(hooked) == len(failures)
        assert len(observed.events_of(MessageDied)) == len(failures)

    @pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
    async def test_an_error_hook_that_misbehaves_costs_nothing(
        self, harness: QueueHarness, name: str, sessions: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if sessions:
            needs(harness.traits.sessions)
        monkeypatch.setattr(hooks, "HOOK_MAX", 0.02)
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        observed = ObservedQueue(await harness.open(), name, harness.lock)
        plain = [one for one in FAILURES if one not in ("returned", "reject without reason")]
        kinds = [*plain, *(f"async {one}" for one in plain), "async for ever", "async stubborn"]
        await observed.send([*kinds, "good"], sessions=sessions)
        handled: list[str] = []

        async def work(message: Message) -> None:
            if message.body != b"good":
                raise ValueError(message.body)
            handled.append("good")

        async def late(kind: str) -> None:
            if kind in FAILURES:
                FAILURES[kind]()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if kind == "stubborn":
                    await asyncio.sleep(0.05)
                raise

        def hook(message: Message, error: BaseException) -> Any:
            kind = message.body.decode()
            return late(kind.removeprefix("async ")) if kind.startswith("async ") else FAILURES[kind]()

        async with asyncio.timeout(WITHIN):
            await observed.queue.consume(work, concurrency=1, sessions=sessions, until_empty=True, on_error=hook)
        assert handled == ["good"]
        assert await observed.queue.stats() == Stats(dead=len(kinds))
        assert len(reported) == len(kinds)

    @pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
    @pytest.mark.parametrize("where", ["plain", "async"])
    async def test_an_interrupt_that_meets_an_error_hook_ends_the_consumer(
        self, harness: QueueHarness, name: str, where: str, sessions: bool
    ) -> None:
        if sessions:
            needs(harness.traits.sessions)
        observed = ObservedQueue(await harness.open(), name, harness.lock)
        await observed.send(["a", "b"], sessions=sessions)

        def hook(message: Message, error: BaseException) -> None:
            raise KeyboardInterrupt

        async def late(message: Message, error: BaseException) -> None:
            hook(message, error)

        on_error = hook if where == "plain" else late
        async with asyncio.timeout(WITHIN):
            with pytest.raises(KeyboardInterrupt):
                await observed.queue.consume(_fail, concurrency=1, sessions=sessions, on_error=on_error)

        async def are_back() -> bool:
            found = await observed.queue.stats()
            return (found.ready + found.dead, found.locked) == (2, 0)

        await until(are_back, within=0.0 if harness.traits.exact_stats else WITHIN)

    @pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
    async def test_until_empty_waits_for_retries(self, harness: QueueHarness, name: str, sessions: bool) -> None:
        if sessions:
            needs(harness.traits.sessions)
        observed = ObservedQueue(await harness.open(), name, harness.lock, max_deliveries=3)
        await observed.send(["one", "two"], sessions=sessions)

        async def fail_once(message: Message) -> None:
            if message.delivery_count == 1:
                raise ValueError("not yet")

        async def are_delayed() -> bool:
            return (await observed.queue.stats()).delayed == 2

        async def pass_time() -> None:
            if harness.is_exact and harness.traits.exact_stats:  # then no time passes by itself, for delays neither
                await until(are_delayed, within=WITHIN)
                await harness.pass_time(1.0)

        policy = RetryPolicy(initial=0.201, jitter=0.0)  # rounded up by far, where a store has steps
        async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
            group.create_task(pass_time())
            group.create_task(observed.queue.consume(fail_once, sessions=sessions, until_empty=True, retry=policy))
        assert await observed.queue.stats() == Stats()

    async def test_an_observer_that_misbehaves_costs_nothing(self, harness: QueueHarness, name: str) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        observed = ObservedQueue(await harness.open(), name, harness.lock)
        await observed.send(["a", "b"])
        seen: list[Event] = []

        def observe(event: Event) -> None:
            seen.append(event)
            raise asyncio.CancelledError

        class FailingLogHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise asyncio.CancelledError

        observed.context.on_event = observe
        log_handler, log = FailingLogHandler(), logging.getLogger("tenure")
        log.addHandler(log_handler)
        try:
            async with asyncio.timeout(WITHIN):
                await observed.queue.consume(_fail, concurrency=1, until_empty=True)
        finally:
            log.removeHandler(log_handler)
        assert await observed.queue.stats() == Stats(dead=2)
        assert seen

    async def test_a_backlog_is_claimed_many_at_a_time(self, harness: QueueHarness, name: str) -> None:
        """Also by a consumer that waited for its first message: a hint may come with one, and no more of them so."""
        counting = _CountingBroker(await harness.open())
        observed = ObservedQueue(cast(Broker, counting), name, harness.lock)
        handled, is_sent = 0, asyncio.Event()

        async def handle(message: Message) -> None:
            nonlocal handled
            await is_sent.wait()  # a consumer that is faster than the sender rightly claims a few at a time
            handled += 1

        consuming = asyncio.ensure_future(observed.queue.consume(handle, sigterm=False))
        is_sent.set()
        await observed.send(["first"])
        await until(lambda: handled == 1)
        is_sent.clear()
        before = counting.asked
        await observed.send([f"{number}" for number in range(400)])
        is_sent.set()
        await until(lambda: handled == 401, within=WITHIN)
        assert counting.asked - before <= 100
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)

    async def test_a_message_wakes_a_few_of_many_that_wait(
        self, harness: QueueHarness, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not harness.traits.hints:
            pytest.skip("this broker gives no hints")
        monkeypatch.setattr(context, "POLL", 600.0)  # a consumer that gets a message here was woken
        broker, other = await harness.open(), await harness.open()
        counting = _CountingBroker(broker)
        observed = ObservedQueue(cast(Broker, counting), name, harness.lock)

        async def get() -> None:
            [message] = await observed.queue.receive(1, wait=WITHIN)
            await message.complete()

        async def send_one() -> None:
            expected = sum(task.done() for task in waiting) + 1
            await other.send(name, [Outgoing(b"a")])
            await until(lambda: sum(task.done() for task in waiting) == expected)
            await until(observed.all_idle)  # a hint that finds all of them asking lets each ask again

        waiting = [asyncio.ensure_future(get()) for _ in range(40)]
        await until(lambda: counting.asked >= len(waiting) and observed.all_idle())
        await send_one()
        before = counting.asked
        for _ in range(3):
            await send_one()
        assert counting.asked <= before + 3 * 8  # a store may give two hints for a message, each costs three requests
        await other.send(name, [Outgoing(b"a") for _ in range(36)])
        await asyncio.gather(*waiting)


async def _fail(message: Message) -> None:
    raise Retry


class _CountingBroker:
    """A broker that counts calls of ``receive``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.asked = 0

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self.asked += 1
        return await self._broker.receive(queue, limit, lock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


class ObservedQueue:
    """A queue on a broker, all on the running loop, with its events recorded."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        lock: float,
        *,
        max_deliveries: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.broker = broker
        self.events: list[Event] = []
        given: QueueOptions = {"lock": lock, "max_deliveries": max_deliveries}
        self.context = QueueContext(
            name,
            broker,
            RenewalThread.here(),
            clock or SystemClock(),
            QueueSettings(lock=lock, max_deliveries=max_deliveries),
            "me",
            self.events.append,
            given,
        )
        self.queue = Queue(self.context)

    async def send(self, bodies: list[str], *, sessions: bool = False) -> None:
        """Send messages with these *bodies*, each in a session of its own if they are to be."""
        await self.queue.send_batch([Outgoing(one.encode(), session=one if sessions else None) for one in bodies])

    def all_idle(self) -> bool:
        """Return whether each one that waits for a hint has had its answer, and would ask when a hint comes."""
        queues = self.context.hints._loops[asyncio.get_running_loop()].values()
        groups = [group for queue in queues for group in queue._groups.values()]
        return all(waiter.idle for group in groups for waiter in group.waiters._all)

    def events_of(self, kind: type[Event]) -> list[Any]:
        """Return the events of this *kind*, in order."""
        return [event for event in self.events if isinstance(event, kind)]

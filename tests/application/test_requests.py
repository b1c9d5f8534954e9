"""Requests and replies; the inbox."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

import tenure
from tenure._queue.broker import Claim
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.producer import Producer
from tenure._queue.received import Message, Received
from tenure._queue.requests import IDLE, Requests
from tenure.errors import ConfigError, Unavailable
from tenure.events import (
    BrokerUnanswered,
    MessageDied,
)
from tenure.testing import until
from tests.application.queue_setup import LOCK, Log, QueueSetup, in_virtual_time


@in_virtual_time
async def test_the_inbox_skips_messages_that_were_handled(setup: QueueSetup) -> None:
    queue = setup.queue(dedupe_window=1.0)
    log = Log()
    async with setup.consuming(queue, log, inbox_window=1_000.0):
        for _ in range(3):
            await queue.send(b"a", id="a")
            await asyncio.sleep(100.0)  # the dedupe window is over, the inbox window is not
        assert log.ended == [b"a"]
        assert await queue.handled("a", "b") == [True, False]
        await asyncio.sleep(1_000.0)
        await queue.send(b"a", id="a")
    assert await queue.handled("a") == [False]


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize(("noted", "sent"), [("orders$17", "orders--17"), ("orders--17", "orders$17")])
def test_the_inbox_knows_an_id_in_both_forms(session: str | None, noted: str, sent: str) -> None:
    """One has the form of an older release."""

    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        queue = setup.queue()
        log = Log()
        async with setup.consuming(queue, log, inbox_window=1_000.0, sessions=session is not None):
            for named in (noted, sent, "orders--18"):
                await queue.send(named.encode(), id=named, session=session)
                await asyncio.sleep(100.0)
        assert log.ended == [noted.encode(), b"orders--18"]
        assert await queue.handled(sent, "orders--1", noted, "orders--18") == [True, False, True, True]

    test()


@in_virtual_time
async def test_an_inbox_that_can_not_be_asked_is_no_failure_of_the_message(setup: QueueSetup) -> None:
    for session in (None, "s"):
        queue, log, hooked = setup.queue(max_deliveries=2), Log(), list[BaseException]()
        counts: list[int] = []

        async def handler(message: Message, log: Log = log, counts: list[int] = counts) -> None:
            counts.append(message.delivery_count)
            await log(message)

        await queue.send(b"a", id=f"a of {session}", session=session)
        setup.broker.inbox_answers = False

        def note(message: Message, error: BaseException, hooked: list[BaseException] = hooked) -> None:
            hooked.append(error)

        options: dict[str, Any] = {"inbox_window": 1_000.0, "sessions": session is not None, "concurrency": 2}
        async with setup.consuming(queue, handler, on_error=note, **options):
            await asyncio.sleep(3 * LOCK)
            assert counts == []
            assert len([one for one in setup.broker.requests if one == "handled"]) < 300
            setup.broker.inbox_answers = True
            await asyncio.sleep(10.0)
            assert counts == [1]
        assert hooked == []
        assert setup.emitted(BrokerUnanswered)[0].what == "read the inbox"
        assert await queue.stats() == Stats()


@in_virtual_time
async def test_complete_may_send_in_the_same_step(setup: QueueSetup) -> None:
    queue, results = setup.queue(), setup.queue("results")
    await queue.send(b"2")
    [message] = await queue.receive()
    with pytest.raises(ConfigError, match="body"):
        await message.complete(sends=[("results", Outgoing("4"))])  # type: ignore[arg-type]
    await message.complete(sends=[("results", Outgoing(b"4"))], remember=10.0)
    [result] = await results.receive()
    assert result.body == b"4"


@in_virtual_time
async def test_a_reply_that_no_request_waits_for_is_reported_during_closing(setup: QueueSetup) -> None:
    queue = setup.queue()
    with pytest.raises(tenure.TimedOut):
        await queue.request(b"?", timeout=1.0)
    [asked] = await queue.receive()
    setup.broker.delay = 1.0
    replying = asyncio.ensure_future(asked.reply(b"late"))
    async with asyncio.timeout(60.0):
        while setup.broker.requests.count("settle 1") < 2:  # the second is the verdict on the answer
            await asyncio.sleep(0.01)
    await queue.close()
    await replying
    assert [one.reason for one in setup.emitted(MessageDied)] == ["request_ended"]


@in_virtual_time
async def test_a_request_gets_its_reply(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def square(message: Message) -> None:
        await asyncio.sleep(int(message.body) % 3)
        await message.reply(b"%d" % int(message.body) ** 2)

    async with setup.consuming(queue, square):
        answers = await asyncio.gather(*(queue.request(b"%d" % number, timeout=60) for number in range(20)))
        assert [one.body for one in answers] == [b"%d" % number**2 for number in range(20)]
        assert setup.clock.now() < 5.0
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_request_ends_with_its_queue(setup: QueueSetup) -> None:
    queue = setup.queue()
    requesting = asyncio.ensure_future(queue.request(b"?", timeout=60))
    await asyncio.sleep(1.0)
    (requests,) = queue._requests
    await requests.close()  # as closing the backend does
    with pytest.raises(Unavailable, match=r"request .* on 'orders' got no answer before it was closed"):
        await requesting


@in_virtual_time
async def test_a_reply_may_be_any_json_but_not_that_and_a_body(setup: QueueSetup) -> None:
    queue, refused = setup.queue(), list[str]()

    async def say_nothing(message: Message) -> None:
        try:
            await message.reply(b"null", json=None)
        except ConfigError as error:
            refused.append(str(error))
        await message.reply(json=None)

    async with setup.consuming(queue, say_nothing):
        answer = await queue.request(json={"question": 1}, timeout=60)
    assert (answer.body, answer.json(), len(refused)) == (b"null", None, 1)


@in_virtual_time
async def test_a_reply_that_no_request_waits_for_is_kept(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def late(message: Message) -> None:
        await asyncio.sleep(10.0)
        await message.reply(b"at last")

    async with setup.consuming(queue, late):
        with pytest.raises(tenure.TimedOut, match="no answer to request 'mine' on 'orders' within 5 s"):
            await queue.request(b"?", timeout=5.0, correlation_id="mine")
        await asyncio.sleep(10.0)
        [name] = [one for one in await setup.broker.names() if "replies" in one]
        [dead] = await setup.queue(name).dead_letters.peek()
        assert (dead.body, dead.reason, dead.correlation_id) == (b"at last", "request_ended", "mine")
        await asyncio.sleep(100.0)
        [died] = setup.emitted(MessageDied)
        assert (died.name, died.id, died.reason, died.delivery_count) == (name, dead.id, "request_ended", 1)
    with pytest.raises(ConfigError, match="reply queue of its own"):
        await queue.request(b"?", reply_to="elsewhere")
    await queue.send(b"no answer wanted")
    [message] = await queue.receive()
    with pytest.raises(ConfigError, match="its sender expects no answer"):
        await message.reply(b"x")


@in_virtual_time
async def test_a_reply_that_comes_twice_was_waited_for(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def answers(message: Message) -> None:
        setup.broker.settling = False
        assert message.reply_to is not None
        await setup.queue(message.reply_to).send(b"yes", correlation_id=message.correlation_id)

    async with setup.consuming(queue, answers):
        assert (await queue.request(b"?", timeout=20.0)).body == b"yes"
        setup.broker.settling = True
        await asyncio.sleep(3 * LOCK)  # it is delivered again, as its verdict got no answer
        [name] = [one for one in await setup.broker.names() if "replies" in one]
        assert await setup.queue(name).stats() == Stats()


@in_virtual_time
async def test_a_reply_that_was_taken_after_its_lock_had_ended_was_waited_for(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def answers(message: Message) -> None:
        await message.reply(b"yes")

    async with setup.consuming(queue, answers):
        await queue.request(b"?", timeout=20.0)  # its verdict has passed, and the next claim is under way
        setup.broker.settle_late = 2 * LOCK
        assert (await queue.request(b"?", timeout=20.0)).body == b"yes"
        await asyncio.sleep(5 * LOCK)
        [name] = [one for one in await setup.broker.names() if "replies" in one]
        assert await setup.queue(name).stats() == Stats()
    assert setup.emitted(MessageDied) == []


@in_virtual_time
async def test_a_reply_that_comes_at_the_last_moment_is_not_lost(setup: QueueSetup) -> None:
    context = setup.queue()._context
    requests = Requests(context)
    [delivery] = (await _claimed(setup, b"yes")).deliveries
    setup.loop.call_at(setup.loop.time() + 5.0, lambda: requests._waiting["x"].set_result(Received(delivery)))
    answer = await requests.ask(Producer(context), Outgoing(b"?", correlation_id="x"), 5.0)
    assert answer.body == b"yes"
    await requests.close()


async def _claimed(setup: QueueSetup, body: bytes) -> Claim:
    await setup.broker.send("elsewhere", [Outgoing(body)])
    return await setup.broker.receive("elsewhere", 1, LOCK)


@in_virtual_time
async def test_a_reply_queue_goes_with_its_process(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def answer(message: Message) -> None:
        await message.reply(b"yes")

    async def replies() -> list[str]:
        return [one for one in await setup.broker.names() if "replies" in one]

    async with setup.consuming(queue, answer):
        await queue.request(b"?", timeout=20.0)
        assert len(await replies()) == 1
        await asyncio.sleep(3 * IDLE)  # the process runs, so its queue is kept
        assert len(await replies()) == 1
        await queue.request(b"?", timeout=20.0)
        await queue.close()
        assert await replies() == []


@in_virtual_time
async def test_the_reply_queue_of_a_process_that_died_is_deleted_by_the_next(setup: QueueSetup) -> None:
    queue = setup.queue()
    dead, letter, alive = (Requests(queue._context) for _ in range(3))
    for one in (dead, letter):
        await setup.broker.delete_when_idle(one.reply_to, IDLE)  # as it does when it begins
    await setup.broker.send(letter.reply_to, [Outgoing(b"late")])
    await setup.broker.delete_when_idle("orders.replies.of.a.user", 1.0)
    listening = asyncio.ensure_future(alive._receive_all())
    await asyncio.sleep(IDLE * 1.5)
    names = await setup.broker.names()
    assert dead.reply_to not in names
    assert letter.reply_to in names  # not with a message in it
    assert alive.reply_to in names
    assert "orders.replies.of.a.user" in names
    listening.cancel()


def test_reply_queues_are_listed_only_if_something_is_in_them() -> None:
    async def main() -> None:
        async with tenure.connect("memory:") as backend:
            queue = backend.queue("orders", lock=5)

            async def handler(message: tenure.Message) -> None:
                await message.reply(b"yes")

            consuming = asyncio.ensure_future(queue.consume(handler))
            answer = await queue.request(b"?")
            assert answer.body == b"yes"
            assert answer.queue.startswith("orders.replies.")

            async def queues() -> list[str]:
                return await backend.queues()

            await until(lambda: _is(queues, ["orders"]))
            await backend.queue(answer.queue).send(b"no request waits for this", correlation_id="x")
            await until(lambda: _is(queues, ["orders", answer.queue]))
            await queue.drain()
            await consuming

    asyncio.run(main())


async def _is(ask: Callable[[], Coroutine[Any, Any, Any]], wanted: object) -> bool:
    return bool(await ask() == wanted)


@in_virtual_time
async def test_reply_queues_that_are_not_empty_hide_no_others(setup: QueueSetup) -> None:
    left = [f"rpc.replies.{number:016x}" for number in range(150)]
    for name in left[:120]:
        await setup.broker.send(name, [Outgoing(b"late")])
        await setup.broker.delete_when_idle(name, 0.0)
    await asyncio.sleep(1.0)
    for name in left[120:]:
        await setup.broker.delete_when_idle(name, 0.0)
    queue = setup.queue("rpc")

    async def answer(message: Message) -> None:
        await message.reply(b"yes")

    async with setup.consuming(queue, answer):
        await queue.request(b"?")
        await asyncio.sleep(IDLE)
    assert [name for name in await setup.broker.names() if name in left] == left[:120]


# --- requests of other loops ---


class Elsewhere:
    """A loop on a thread of its own, with a request that waits there."""

    def __init__(self, backend: tenure.Backend) -> None:
        self.loop = asyncio.new_event_loop()
        self.ended: list[BaseException] = []
        self._backend = backend
        self._thread = threading.Thread(target=self._run)
        self._stopped = threading.Event()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._asking = self.loop.create_task(self._backend.queue("orders").request(b"?", timeout=60))
        self.loop.run_forever()
        self._stopped.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        assert self._stopped.wait(60.0)

    def result(self) -> BaseException | None:
        """Run the loop again until the request has ended; return its error."""
        self._thread.join(60.0)
        try:
            self.loop.run_until_complete(asyncio.wait_for(asyncio.shield(self._asking), 30.0))
        except BaseException as error:
            return error
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
        return None


@pytest.mark.parametrize("stops", [False, True], ids=["running", "stopped"])
async def test_a_backend_that_is_closed_ends_the_requests_of_other_loops(stops: bool) -> None:
    async with tenure.connect("memory:") as backend:
        elsewhere = Elsewhere(backend)
        elsewhere.start()
        queue = backend.queue("orders")
        await until(lambda: _is_asked(queue))
        if stops:
            elsewhere.stop()
        await asyncio.wait_for(backend.aclose(), 30.0)
    if not stops:
        elsewhere.stop()
    error = await asyncio.to_thread(elsewhere.result)
    assert isinstance(error, Unavailable)
    assert "got no answer before it was closed" in str(error)


async def _is_asked(queue: tenure.Queue) -> bool:
    return (await queue.stats()).ready == 1


async def test_a_loop_that_ends_while_the_backend_is_closed_disturbs_nothing() -> None:
    def ask(backend: tenure.Backend, seconds: float) -> None:
        async def main() -> None:
            with suppress(TimeoutError, Unavailable, ConfigError):
                async with asyncio.timeout(seconds):
                    await backend.queue("orders").request(b"?", timeout=60)

        asyncio.run(main())

    for number in range(20):
        async with tenure.connect("memory:") as backend:
            asking = asyncio.create_task(asyncio.to_thread(ask, backend, 0.05))
            await asyncio.sleep(0.045 + number / 2_000)
            await asyncio.wait_for(backend.aclose(), 30.0)
            await asking

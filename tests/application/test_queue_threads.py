"""tenure.sync's queues: the same queues, from threads."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure._runtime.loop_thread
import tenure.sync
from tenure._runtime.loop_thread import LoopThread
from tests.durations import PATIENCE, stretched, wait_until


@pytest.fixture
def backend() -> Iterator[tenure.sync.Backend]:
    with tenure.sync.connect(f"memory:{uuid4().hex}") as backend:
        yield backend


def test_send_receive_complete(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    assert queue.send(b"one", id="1", headers={"kind": "test"}) == "1"
    assert len(queue.send_batch([tenure.Outgoing(b"two"), tenure.Outgoing(b"three")])) == 2
    messages = queue.receive(max=10, wait=PATIENCE)
    assert [message.body for message in messages] == [b"one", b"two", b"three"]
    for message in messages:
        message.complete()
    with pytest.raises(tenure.LockLost):
        messages[0].complete()
    assert queue.stats() == tenure.Stats()
    assert backend.queues() == ["orders"]


def test_peek_and_purge(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send(b"one")
    queue.send(b"two", delay=60)
    assert [(one.body, one.state) for one in queue.peek(5)] == [(b"one", "ready"), (b"two", "delayed")]
    assert queue.purge(states=["delayed"], dry_run=True) == 1
    assert queue.purge() == 2
    assert queue.stats() == tenure.Stats()


def test_a_handler_on_threads(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send_batch([tenure.Outgoing(b"%d" % n) for n in range(50)])
    seen: list[bytes] = []
    names: set[str] = set()

    def handle(message: tenure.sync.Message) -> None:
        names.add(threading.current_thread().name)
        seen.append(message.body)

    queue.consume(handle, concurrency=3, until_empty=True)
    assert sorted(seen, key=int) == [b"%d" % n for n in range(50)]
    assert threading.current_thread().name not in names


def test_stop_from_a_handler(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    stop = threading.Event()
    queue.send(b"last")
    queue.consume(lambda message: stop.set(), stop=stop)
    assert queue.stats() == tenure.Stats()


def test_sigterm_drains(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send(b"first")
    handled: list[bytes] = []

    def handle(message: tenure.sync.Message) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        handled.append(message.body)

    queue.consume(handle)
    assert handled == [b"first"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert queue.stats() == tenure.Stats()


def test_dead_letters(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders", max_deliveries=1)
    queue.send(b"bad", id="bad")

    def handle(message: tenure.sync.Message) -> None:
        raise ValueError("can't read it")

    queue.consume(handle, until_empty=True)
    [letter] = queue.dead_letters.peek()
    assert letter.id == "bad"
    assert letter.error is not None
    assert letter.error.message == "can't read it"
    assert queue.dead_letters.redrive(dry_run=True) == 1
    assert queue.dead_letters.redrive() == 1
    [message] = queue.receive()
    message.dead_letter("rejected", "as agreed")
    [letter_again] = queue.dead_letters.receive()
    letter_again.complete()
    assert queue.dead_letters.purge() == 0


def test_a_session(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    for n in range(3):
        queue.send(b"%d" % n, session="ann")
    with queue.session(wait=PATIENCE) as session:
        assert session.name == "ann"
        assert session.state is None
        session.set_state(b"begun")
        for message in session:
            message.complete()
        assert not session.is_lost
    with queue.session("ann", wait=PATIENCE) as session:
        assert session.state == b"begun"
        assert session.receive() == []


def test_ask_and_answer(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("sums")
    stop = threading.Event()

    def add(message: tenure.sync.Message) -> None:
        message.reply(json=sum(message.json()))

    answering = threading.Thread(target=lambda: queue.consume(add, stop=stop))
    answering.start()
    try:
        assert queue.request(json=[1, 2, 3], timeout=PATIENCE).json() == 6
    finally:
        stop.set()
        answering.join(PATIENCE)
    assert not answering.is_alive()


def test_deferred(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send(b"later")
    [message] = queue.receive()
    message.defer()
    assert queue.receive() == []
    [again] = queue.receive_deferred(message.sequence)
    again.complete()
    assert queue.peek_deferred() == []


def test_a_hook_that_blocks_delays_no_renewal(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send(b"bad")
    blocked, go_on = threading.Event(), threading.Event()

    def handle(message: tenure.sync.Message) -> None:
        raise LookupError

    def hook(message: tenure.Message, error: BaseException) -> None:
        blocked.set()
        go_on.wait(PATIENCE)

    consuming = threading.Thread(target=lambda: queue.consume(handle, on_error=hook, until_empty=True))
    ttl = stretched(2.0)
    with backend.election("chair", ttl=ttl).campaign() as term:
        consuming.start()
        assert blocked.wait(PATIENCE)
        until = time.monotonic() + 1.2 * ttl

        def is_over() -> bool:
            term.check()
            return time.monotonic() > until

        wait_until(is_over)  # longer than a lease
        queue.pause()
        go_on.set()
        queue.drain()
    consuming.join()


def test_a_hook_that_never_returns_costs_no_handler(
    backend: tenure.sync.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure._queue.hooks.HOOK_MAX", 0.05)
    queue = backend.queue("orders", max_deliveries=1)
    queue.send_batch([tenure.Outgoing(b"bad"), tenure.Outgoing(b"good")])
    go_on, handled = threading.Event(), []

    def handle(message: tenure.sync.Message) -> None:
        if message.body == b"bad":
            raise StopIteration
        handled.append(message.body)

    def hook(message: tenure.Message, error: BaseException) -> None:
        go_on.wait(PATIENCE)

    try:
        queue.consume(handle, on_error=hook, concurrency=1, until_empty=True)
    finally:
        go_on.set()
    assert handled == [b"good"]
    assert queue.stats() == tenure.Stats(dead=1)


def test_a_handler_may_drain_and_does_not_wait_for_itself(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send_batch([tenure.Outgoing(b"%d" % n) for n in range(3)])
    handled: list[bytes] = []

    def handle(message: tenure.sync.Message) -> None:
        queue.drain()
        handled.append(message.body)

    queue.consume(handle, concurrency=1, grace=PATIENCE)
    assert handled == [b"0"]
    assert queue.stats().ready == 2


def test_drain_waits_for_what_runs(backend: tenure.sync.Backend) -> None:
    queue = backend.queue("orders")
    queue.send(b"one")
    begun, drained = threading.Event(), threading.Event()
    handled: list[bytes] = []

    def handle(message: tenure.sync.Message) -> None:
        begun.set()
        assert not drained.wait(stretched(0.2))
        handled.append(message.body)

    consuming = threading.Thread(target=lambda: queue.consume(handle))
    consuming.start()
    assert begun.wait(PATIENCE)
    queue.drain()
    drained.set()
    assert handled == [b"one"]
    assert queue.stats() == tenure.Stats()
    consuming.join()


def test_a_sigterm_before_the_beginning_counts(backend: tenure.sync.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = backend.queue("orders")
    begin = queue._consumer_thread

    def slowly() -> LoopThread:
        os.kill(os.getpid(), signal.SIGTERM)
        return begin()

    monkeypatch.setattr(queue, "_consumer_thread", slowly)
    queue.send(b"one")
    queue.consume(lambda message: None)
    assert queue.stats().ready == 1


def test_a_hook_may_drain_and_does_not_wait(backend: tenure.sync.Backend) -> None:
    one, other = backend.queue("one"), backend.queue("other")
    one.send(b"bad")

    def handle(message: tenure.sync.Message) -> None:
        raise LookupError

    def hook(message: tenure.Message, error: BaseException) -> None:
        other.drain()
        one.drain()

    consuming = threading.Thread(target=lambda: other.consume(handle))
    consuming.start()
    wait_until(lambda: other._behind._running)
    one.consume(handle, on_error=hook)
    consuming.join()


@pytest.mark.parametrize("grace", ["5", -1, float("nan"), True])
def test_a_grace_that_is_none_is_refused_and_nothing_ends(backend: tenure.sync.Backend, grace: Any) -> None:
    queue = backend.queue("orders")
    consuming = threading.Thread(target=lambda: queue.consume(lambda message: None))
    consuming.start()
    wait_until(lambda: queue._behind._running)
    with pytest.raises(tenure.ConfigError, match="grace must be"):
        queue.drain(grace=grace)
    assert consuming.is_alive()
    queue.drain()
    consuming.join()


def test_a_handler_that_catches_its_cancellation_does_not_keep_the_block_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenure._runtime.loop_thread, "ENDING", 0.1)
    begun, done = threading.Event(), threading.Event()

    async def stubborn(message: tenure.Message) -> None:
        begun.set()
        while not done.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING, logger="tenure"), tenure.sync.connect("memory:") as backend:
        queue = backend.queue("orders", lock=1)
        queue.send(b"x")
        consuming = threading.Thread(target=lambda: queue.consume(stubborn, grace=0.1))
        consuming.start()
        assert begun.wait(PATIENCE)
        queue.drain()
        consuming.join()
    done.set()
    assert "ignored its cancellation and was abandoned" in caplog.text

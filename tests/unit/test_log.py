"""Log records that wait while a log handler blocks."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

from tenure._queue.tracebacks import told_of
from tenure._telemetry.callbacks import CallbackThread
from tenure._telemetry.log import TRACES_MAX, log_event
from tenure.events import MessageFailed


class Body:
    """A large object in the frame of a handler that fails."""


class Blocking(logging.Handler):
    """A handler that blocks until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.may_go_on.wait(60)
        self.records.append(record)


def test_of_many_failures_that_wait_only_some_are_kept_with_their_frames() -> None:
    bodies: list[weakref.ref[Body]] = []

    def fail() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        raise ValueError("as ever")

    def send_many() -> None:
        callbacks.serve_current_thread()
        for _ in range(3 * TRACES_MAX):
            try:
                fail()
            except ValueError as error:
                log_event(MessageFailed(0.0, "orders", "me", "a", 1, 1, "ValueError", 1.0, "here"), told_of(error))

    callbacks, handler, log = CallbackThread(), Blocking(), logging.getLogger("tenure")
    log.addHandler(handler)
    callbacks.start("callbacks")
    try:
        sending = threading.Thread(target=send_many)
        sending.start()
        sending.join()
        gc.collect()
        assert len([body for body in bodies if body() is not None]) <= TRACES_MAX + 2
    finally:
        handler.may_go_on.set()
        callbacks.end()
        log.removeHandler(handler)
    assert len(handler.records) == 3 * TRACES_MAX
    assert all(record.exc_info or "in fail\n" in record.getMessage() for record in handler.records)

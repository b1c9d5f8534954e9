"""``Telemetry``: what a backend tells about each message; and ``Tracing``, which is around what it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import NoneType, TracebackType
from typing import Any, Literal, Protocol, TypeVar

from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, Complete, DeadLetter, Defer, GiveBack, Verdict
from tenure._telemetry.callbacks import logger, run_callback
from tenure.errors import ConfigError
from tenure.events import Event

T = TypeVar("T")

Outcome = Literal[
    "completed",  # it is removed for good
    "abandoned",  # it is delivered again, or dead-lettered if this was its last delivery
    "dead_lettered",  # it is among the dead letters
    "given_back",  # it is delivered again, and this delivery is not counted
    "deferred",  # it is set aside
    "lapsed",  # its lock is over, and so the result of its handler is discarded
    "kept",  # other code settles it
]
"""What becomes of a message whose handler has ended, as far as its consumer decides."""


Handled = Callable[[Delivery, float, Outcome], object]
"""``handled(delivery, seconds, outcome)``: a handler has ended, after so many seconds."""


class Telemetry:
    """What a backend tells about messages, beside its events: given to :func:`tenure.connect` as ``telemetry=``.

    Its methods are called on the loops and threads that do the work, so they must be quick and never block. All of them
    do nothing here; a class of your own overrides some. If one raises, that is reported, and changes nothing.
    :class:`tenure.telemetry.Metrics` and :class:`tenure.telemetry.OpenTelemetry` are two that exist.
    """

    def sent(self, queue: str, count: int, seconds: float) -> None:
        """Note that *count* messages were sent to *queue* in one step, which took so many seconds."""

    def received(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        """Note that a claim of this process brought *deliveries* of *queue*."""

    def handling(self, queue: str) -> Handled | None:
        """Return a function that is called whenever a handler of *queue* has ended, on the loop of its consumer.

        It is asked for once by each consumer, on its loop. None: nothing is to be called.
        """
        return None

    def event(self, event: Event) -> None:
        """Note an event, as ``on_event`` of :func:`tenure.connect` does; on the same thread."""

    def tracing(self) -> Tracing | None:
        """Return what is to be around sends, receives, handlers and verdicts; None for nothing."""
        return None


class Tracing(Protocol):
    """Blocks around the operations of a backend, as for spans."""

    def sending(self, queue: str, messages: list[Outgoing]) -> AbstractContextManager[list[Outgoing]]:
        """Return a block around one step of sending; it yields the messages to be sent, perhaps with more headers."""
        ...

    def received(self, queue: str, deliveries: Sequence[Delivery], seconds: float) -> None:
        """Note that a receive by hand has brought *deliveries* of *queue* just now, after so many seconds."""
        ...

    def handling(self, delivery: Delivery) -> AbstractContextManager[Callable[[BaseException], object]]:
        """Return a block around the handler of a message; it is left with the exception that the handler raises.

        It yields a function that is called with an exception that is not raised there, because a thread or a process
        has brought it.
        """
        ...

    def settling(self, delivery: Delivery, verdict: Verdict) -> AbstractContextManager[Any]:
        """Return a block around a verdict that is passed by hand."""
        ...


class Guarded(Telemetry):
    """Several in place of one: an error in one of them is reported, and changes nothing. At most one of them traces."""

    def __init__(self, telemetry: Iterable[Telemetry]) -> None:
        self.each: list[Telemetry] = list(telemetry)

    def sent(self, queue: str, count: int, seconds: float) -> None:
        for one in self.each:
            try:
                one.sent(queue, count, seconds)
            except Exception as error:
                report_telemetry(error)

    def received(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        for one in self.each:
            try:
                one.received(queue, deliveries)
            except Exception as error:
                report_telemetry(error)

    def handling(self, queue: str) -> Handled | None:
        found: list[Handled] = []
        for one in self.each:
            try:
                if (each := one.handling(queue)) is not None:
                    found.append(each)
            except Exception as error:
                report_telemetry(error)
        if len(found) <= 1:
            return found[0] if found else None

        def handled(delivery: Delivery, seconds: float, outcome: Outcome) -> None:
            for each in found:
                try:
                    each(delivery, seconds, outcome)
                except Exception as error:
                    report_telemetry(error)

        return handled

    def event(self, event: Event) -> None:
        for one in self.each:
            try:
                one.event(event)
            except Exception as error:
                report_telemetry(error)

    def tracing(self) -> Tracing | None:
        for one in self.each:
            try:
                if (found := one.tracing()) is not None:
                    return GuardedTracing(found)
            except Exception as error:
                report_telemetry(error)
        return None


class GuardedTracing:
    """Blocks whose own errors are reported, and change nothing: not what was sent, claimed, handled or settled."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def sending(self, queue: str, messages: list[Outgoing]) -> AbstractContextManager[list[Outgoing]]:
        return GuardedBlock(partial(self._tracing.sending, queue, messages), messages)

    def received(self, queue: str, deliveries: Sequence[Delivery], seconds: float) -> None:
        try:
            self._tracing.received(queue, deliveries, seconds)
        except Exception as error:
            report_telemetry(error)

    def handling(self, delivery: Delivery) -> AbstractContextManager[Callable[[BaseException], object]]:
        return GuardedBlock(partial(self._tracing.handling, delivery), _ignore)

    def settling(self, delivery: Delivery, verdict: Verdict) -> AbstractContextManager[Any]:
        return GuardedBlock(partial(self._tracing.settling, delivery, verdict), None)


class GuardedBlock(AbstractContextManager[T]):
    """A block that *make* returns; if it can't be entered, *instead* is yielded. It swallows no error of its body."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]], instead: T) -> None:
        self._make = make
        self._instead = instead
        self._block: AbstractContextManager[T] | None = None

    def __enter__(self) -> T:
        try:
            block = self._make()
            entered = block.__enter__()
        except Exception as error:
            report_telemetry(error)
            return self._instead
        self._block = block
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block is None:
            return
        try:
            self._block.__exit__(kind, error, trace)
        except Exception as raised:
            if raised is not error:
                report_telemetry(raised)
        except BaseException as raised:
            if raised is not error:
                raise


def _ignore(_: BaseException) -> None:
    """Take an exception, and do nothing."""


def given_telemetry(telemetry: object) -> list[Telemetry]:
    """Return what a program gave as its telemetry, as a list.

    Raises:
        ConfigError: It is no telemetry.
    """
    given: list[Any] = [] if telemetry is None else [telemetry]
    if isinstance(telemetry, (list, tuple)):
        given = list(telemetry)
    for one in given:
        if not isinstance(one, Telemetry):
            raise ConfigError(
                f"telemetry must be a tenure.telemetry.Telemetry, or a list of them, not {one!r:.80}; write for "
                "example telemetry=tenure.telemetry.Metrics()"
            )
    return given


def report_telemetry(error: Exception) -> None:
    """Report an error that a telemetry raised. Never raise: a filter of the log may."""
    with suppress(Exception):
        run_callback(partial(logger.error, "telemetry of tenure failed", exc_info=error))


OUTCOMES: dict[object, Outcome] = {
    Complete: "completed",
    Abandon: "abandoned",
    DeadLetter: "dead_lettered",
    GiveBack: "given_back",
    Defer: "deferred",
    NoneType: "kept",
}
"""The outcome by the type of the verdict. Any other thing in place of a verdict lets the lock run out."""


def traced(serve: Callable[[Any], Awaitable[object]], tracing: Tracing) -> Callable[[Any], Awaitable[object]]:
    """Return *serve*, which calls the handler with a message, inside the block of *tracing*."""

    async def serve_traced(message: Any) -> object:
        with tracing.handling(message.delivery) as fail:
            outcome = await serve(message)
            if isinstance(outcome, BaseException) and issubclass(
                type(outcome), BaseException
            ):  # __class__ may be wrong
                try:
                    fail(outcome)  # a thread has brought it
                except Exception as error:
                    report_telemetry(error)
            return outcome

    return serve_traced

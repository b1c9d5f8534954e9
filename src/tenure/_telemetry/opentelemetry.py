"""``OpenTelemetry``: spans and metrics by the semantic conventions for messaging.

The conventions (v1.44, *Development*): one span for each operation, named ``OPERATION DESTINATION``; a producer span
for a message whose context travels with it; links between producer and consumer, as the work may come much later. Only
the API is used, so nothing is recorded until a program sets up the SDK.

https://opentelemetry.io/docs/specs/semconv/messaging/
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tenure._queue.failures import text_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, Complete, DeadLetter, Defer, GiveBack, Verdict
from tenure._telemetry.families import SECONDS, WAITS
from tenure._telemetry.metrics import HandledCounts, election_label, queue_label, reason_label
from tenure._telemetry.telemetry import Handled, Outcome, Telemetry, Tracing
from tenure.errors import BackendNotInstalled
from tenure.events import (
    Event,
    LockEnded,
    MessageDied,
    Overrun,
    RenewalMissed,
    ResultDiscarded,
    SlotSent,
    TermBegan,
    TermEnded,
)

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise BackendNotInstalled(
        "traces need the package 'opentelemetry-api', which is not installed; run: pip install 'tenure[otel]'"
    ) from error

SYSTEM = "tenure"

_VERBS: dict[type[Verdict], str] = {
    Complete: "complete",
    Abandon: "abandon",
    DeadLetter: "dead_letter",
    Defer: "defer",
    GiveBack: "give_back",
}
_EMPTY = Context()


class OpenTelemetry(Telemetry):
    """Spans and metrics by the semantic conventions for messaging; see ``docs/telemetry.md`` for all of them.

    Args:
        traces: Whether there are spans.
        measures: Whether there are metrics.
        process_parent: Whether the span of a handler is a child of the span that created its message, in the same
            trace. Without, it is in a trace of its own, with a link to that span: the convention for work that may come
            much later.
        create_spans: Whether each message of a batch gets a span of its own, so that its consumer can link to it.
        tracer_provider, meter_provider: Instead of the global ones.

    Raises:
        BackendNotInstalled: ``opentelemetry-api`` is not installed.

    Example::

        backend = tenure.connect("postgresql://db/shop", telemetry=tenure.telemetry.OpenTelemetry())
    """

    def __init__(
        self,
        *,
        traces: bool = True,
        measures: bool = True,
        process_parent: bool = False,
        create_spans: bool = True,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        tracer = trace.get_tracer("tenure", tracer_provider=tracer_provider)
        self._tracing = _Spans(tracer, process_parent, create_spans) if traces else None
        self._terms: dict[tuple[str, str, int], Span] = {}
        self._tracer = tracer
        self._measures = _Measures(metrics.get_meter("tenure", meter_provider=meter_provider)) if measures else None

    def sent(self, queue: str, count: int, seconds: float) -> None:
        if self._measures is not None:
            self._measures.sent(queue_label(queue), count, seconds)

    def received(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        if self._measures is not None:
            self._measures.consumed.add(len(deliveries), _destination(queue_label(queue), "receive"))

    def handling(self, queue: str) -> Handled | None:
        return None if self._measures is None else self._measures.handling(queue_label(queue))

    def event(self, event: Event) -> None:
        if self._measures is not None:
            self._measures.event(event)
        if self._tracing is not None:
            self._note_term(event)

    def _note_term(self, event: Event) -> None:
        """Begin and end the span of a term."""
        match event:
            case TermBegan(token=token):
                attributes: dict[str, Any] = {"tenure.election.name": event.name, "tenure.election.token": token}
                span = self._tracer.start_span(
                    f"lead {election_label(event.name)}", _EMPTY, SpanKind.INTERNAL, attributes
                )
                self._terms[event.name, event.holder, token] = span
            case TermEnded(token=token, reason=reason):
                if (ended := self._terms.pop((event.name, event.holder, token), None)) is not None:
                    ended.set_attribute("tenure.election.reason", reason)
                    if reason in ("denied", "unanswered", "stalled"):
                        ended.set_status(Status(StatusCode.ERROR, reason))
                    ended.end()

    def tracing(self) -> Tracing | None:
        return self._tracing


def _destination(queue: str, operation: str, **more: Any) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        **more,
    }


# --- spans ---------------------------------------------------------------------------------------------------------


class _Spans:
    """The spans of messages."""

    def __init__(self, tracer: trace.Tracer, process_parent: bool, create_spans: bool) -> None:
        self._tracer = tracer
        self._process_parent = process_parent
        self._create_spans = create_spans

    @contextmanager
    def sending(self, queue: str, messages: list[Outgoing]) -> Iterator[list[Outgoing]]:
        """Make a span for a step of sending; for each message of a batch one before it, whose context it carries."""
        attributes = _destination(queue, "send", **{"messaging.operation.type": "send"})
        if len(messages) == 1:
            [message] = messages
            attributes |= _of_message(message.id, message.correlation_id)
            with self._operation(_span_name("send", queue), SpanKind.PRODUCER, attributes):
                yield [_with_context(message)]
            return
        attributes["messaging.batch.message_count"] = len(messages)
        links: list[Link] = []
        if self._create_spans:
            messages, links = self._created(queue, messages)
        # Without spans of their own, the messages carry the context of this one.
        kind = SpanKind.CLIENT if self._create_spans else SpanKind.PRODUCER
        with self._operation(_span_name("send", queue), kind, attributes, links):
            yield messages if self._create_spans else [_with_context(one) for one in messages]

    def _created(self, queue: str, messages: list[Outgoing]) -> tuple[list[Outgoing], list[Link]]:
        ready, links = [], []
        for message in messages:
            attributes = _destination(queue, "create", **{"messaging.operation.type": "create"})
            attributes |= _of_message(message.id, message.correlation_id)
            with self._operation(_span_name("create", queue), SpanKind.PRODUCER, attributes) as span:
                ready.append(_with_context(message))
            links.append(Link(span.get_span_context()))
        return ready, links

    def received(self, queue: str, deliveries: Sequence[Delivery], seconds: float) -> None:
        """Make the span of a receive by hand, which has ended just now; without messages, there is none."""
        end = time.time_ns()
        attributes = _destination(queue, "receive", **{"messaging.operation.type": "receive"})
        attributes["messaging.batch.message_count"] = len(deliveries)
        links = [link for one in deliveries for link in _links(one)]
        begun = end - int(seconds * 1e9)
        span = self._tracer.start_span(
            _span_name("receive", queue), None, SpanKind.CLIENT, attributes, links, start_time=begun
        )
        span.end(end)

    @contextmanager
    def handling(self, delivery: Delivery) -> Iterator[Callable[[BaseException], None]]:
        """Make the span of a handler, which is the current one while it runs."""
        attributes = _destination(
            delivery.queue,
            "process",
            **{
                "messaging.operation.type": "process",
                "messaging.tenure.message.sequence": delivery.sequence,
                "messaging.tenure.message.delivery_count": delivery.delivery_count,
            },
        )
        attributes |= _of_message(delivery.id, delivery.correlation_id)
        if delivery.session is not None:
            attributes["messaging.tenure.message.session"] = delivery.session
        # Never the span that is current here: that of the code that called consume(), or of a sender in this process.
        parent = propagate.extract(_carrier(delivery), _EMPTY) if self._process_parent else _EMPTY
        links = [] if self._process_parent else _links(delivery)
        with self._operation(
            _span_name("process", delivery.queue), SpanKind.CONSUMER, attributes, links, parent
        ) as span:
            yield partial(_fail, span)

    def settling(self, delivery: Delivery, verdict: Verdict) -> AbstractContextManager[Any]:
        """Make the span of a verdict that is passed by hand."""
        verb = _VERBS.get(type(verdict), "settle")
        attributes = _destination(delivery.queue, verb, **{"messaging.operation.type": "settle"})
        attributes |= _of_message(delivery.id, delivery.correlation_id)
        return self._operation(_span_name(verb, delivery.queue), SpanKind.CLIENT, attributes, _links(delivery))

    @contextmanager
    def _operation(
        self,
        name: str,
        kind: SpanKind,
        attributes: dict[str, Any],
        links: Sequence[Link] = (),
        parent: Context | None = None,
    ) -> Iterator[Span]:
        """Make a span, which is the current one inside the block, and fails with it."""
        with self._tracer.start_as_current_span(
            name, parent, kind, attributes, links, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                _fail(span, error)
                raise


def _fail(span: Span, error: BaseException) -> None:
    """Let *span* say that its operation has failed with *error*."""
    if span.is_recording():
        span.set_attribute("error.type", f"{type(error).__module__}.{type(error).__qualname__}")
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, text_of(error)))


def _span_name(operation: str, queue: str) -> str:
    """Return the name of a span: backends group by it, so the queues of replies have one."""
    return f"{operation} {queue_label(queue)}"


def _of_message(id_: str | None, correlation_id: str | None) -> dict[str, str]:
    given = {"messaging.message.id": id_, "messaging.message.conversation_id": correlation_id}
    return {name: value for name, value in given.items() if value is not None}


def _with_context(message: Outgoing) -> Outgoing:
    """Return *message* with the context of the current span in its headers, unless its sender has put one there."""
    if any(field in message.headers for field in propagate.get_global_textmap().fields):
        return message
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return replace(message, headers={**message.headers, **carrier}) if carrier else message


def _links(delivery: Delivery) -> list[Link]:
    """Return a link to the span that created the message, if its headers name one."""
    found = trace.get_current_span(propagate.extract(_carrier(delivery), _EMPTY)).get_span_context()
    return [Link(found)] if found.is_valid else []


def _carrier(delivery: Delivery) -> Mapping[str, str]:
    return {name: value for name, value in delivery.headers.items() if isinstance(value, str)}


# --- metrics -------------------------------------------------------------------------------------------------------


class _Measures:
    """The metrics. Names of candidates, ids and texts of errors are in none of them."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._operation = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Time of an operation of a client.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._process = meter.create_histogram(
            "messaging.process.duration", "s", "Time of a handler.", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._wait = meter.create_histogram(
            "tenure.message.wait",
            "s",
            "Time from the sending of a message to its first handling, with its delay.",
            explicit_bucket_boundaries_advisory=WAITS,
        )
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Messages sent.")
        self.consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Deliveries claimed.")
        self._handled: dict[tuple[str, int], HandledCounts] = {}
        meter.create_observable_counter(
            "tenure.messages.handled", [self._observe_outcomes], "{message}", "Deliveries by outcome."
        )
        self._dead = meter.create_counter("tenure.messages.dead", "{message}", "Messages that became dead letters.")
        self._locks = meter.create_counter("tenure.locks.lost", "{lock}", "Locks lost while the handler ran.")
        self._slots = meter.create_counter("tenure.slots.sent", "{slot}", "Slots of schedules sent.")
        self._leader = meter.create_up_down_counter("tenure.election.leader", "", "1 while this program leads.")
        self._terms = meter.create_counter("tenure.election.terms", "{term}", "Terms that ended here.")
        self._missed = meter.create_counter(
            "tenure.election.renewals.missed", "{renewal}", "Renewals of a term that got no answer."
        )
        self._overruns = meter.create_counter(
            "tenure.election.overruns", "{term}", "Terms whose work ran on after they were over."
        )

    def sent(self, queue: str, count: int, seconds: float) -> None:
        attributes = _destination(queue, "send")
        self._sent.add(count, attributes)
        self._operation.record(seconds, attributes)

    def handling(self, queue: str) -> Handled:
        attributes = _destination(queue, "process")
        key = queue, threading.get_ident()
        counts = self._handled.setdefault(key, HandledCounts())

        def handled(delivery: Delivery, seconds: float, outcome: Outcome) -> None:
            counts.outcomes[outcome] += 1  # shown when it is asked for: to record it each time would be slow
            self._process.record(seconds, attributes)
            if delivery.delivery_count == 1:
                self._wait.record(max(0.0, time.time() - seconds - delivery.enqueued_at), attributes)

        return handled

    def _observe_outcomes(self, _: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        totals: dict[tuple[str, Outcome], int] = {}
        for (queue, _thread), counts in list(self._handled.items()):
            for outcome, count in counts.outcomes.items():
                totals[queue, outcome] = totals.get((queue, outcome), 0) + count
        for (queue, outcome), total in totals.items():
            if total:
                yield metrics.Observation(total, _destination(queue, "process", **{"tenure.outcome": outcome}))

    def event(self, event: Event) -> None:
        match event:
            case MessageDied(reason=reason):
                labels = {"tenure.reason": reason_label(reason)}
                self._dead.add(1, _destination(queue_label(event.name), "settle", **labels))
            case LockEnded(why=why) | ResultDiscarded(why=why):
                self._locks.add(1, _destination(queue_label(event.name), "process", **{"tenure.why": why}))
            case SlotSent(schedule=schedule):
                self._slots.add(1, _destination(queue_label(event.name), "send", **{"tenure.schedule": schedule}))
            case TermBegan():
                self._leader.add(1, {"tenure.election.name": election_label(event.name)})
            case TermEnded(reason=reason):
                self._leader.add(-1, {"tenure.election.name": election_label(event.name)})
                self._terms.add(
                    1, {"tenure.election.name": election_label(event.name), "tenure.election.reason": reason}
                )
            case RenewalMissed():
                self._missed.add(1, {"tenure.election.name": election_label(event.name)})
            case Overrun():
                self._overruns.add(1, {"tenure.election.name": election_label(event.name)})

"""Spans and metrics by the conventions of OpenTelemetry for messaging, as its own SDK records them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.durations import PATIENCE, until

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import tenure
import tenure.sync
from tenure import Message, Outgoing, Reject, RetryPolicy
from tenure.telemetry import OpenTelemetry

AT_ONCE = RetryPolicy(initial=0.0, maximum=0.0)
SECRET = "customer 4711"


class Recorded:
    """The spans and metrics of one test."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meter_provider = MeterProvider(metric_readers=[self._reader])
        self.tracer = self.tracer_provider.get_tracer("test")

    def telemetry(self, **options: Any) -> OpenTelemetry:
        return OpenTelemetry(tracer_provider=self.tracer_provider, meter_provider=self.meter_provider, **options)

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def spans(self, name: str) -> list[ReadableSpan]:
        return [one for one in self.all() if one.name == name]

    def span(self, name: str) -> ReadableSpan:
        found = self.spans(name)
        assert len(found) == 1, sorted(one.name for one in self.all())
        return found[0]

    def names(self) -> list[str]:
        return sorted(one.name for one in self.all())

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def close(self) -> None:
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.close()


@pytest.fixture
def url() -> str:
    return f"memory:{uuid4().hex}"


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def linked(span: ReadableSpan) -> list[int]:
    return [one.context.span_id for one in span.links]


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


async def ignore(message: Message) -> None: ...


# --- sending and handling ---


async def test_a_message_makes_a_span_that_sends_and_one_that_processes_which_links_to_it(
    url: str, recorded: Recorded
) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x", id="a", correlation_id="c")
        await queue.consume(ignore, until_empty=True)
    assert recorded.names() == ["process orders", "send orders"]
    send, process = recorded.span("send orders"), recorded.span("process orders")
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    common = {
        "messaging.system": "tenure",
        "messaging.destination.name": "orders",
        "messaging.message.id": "a",
        "messaging.message.conversation_id": "c",
    }
    assert attributes_of(send) == {**common, "messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert attributes_of(process) == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.tenure.message.sequence": 1,
        "messaging.tenure.message.delivery_count": 1,
    }
    assert linked(process) == [id_of(send)]
    assert process.parent is None
    assert trace_of(process) != trace_of(send)
    assert {one.status.status_code for one in (send, process)} == {StatusCode.UNSET}


@pytest.mark.parametrize("create_spans", [True, False])
async def test_each_message_of_a_batch_links_to_its_own_creation_or_to_the_batch(
    url: str, recorded: Recorded, create_spans: bool
) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry(create_spans=create_spans)) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x", id=one) for one in "abc"])
        await queue.consume(ignore, until_empty=True)
    send = recorded.span("send orders")
    assert attributes_of(send)["messaging.batch.message_count"] == 3
    created = recorded.spans("create orders")
    processed = {attributes_of(one)["messaging.message.id"]: linked(one) for one in recorded.spans("process orders")}
    if create_spans:
        assert (send.kind, {one.kind for one in created}) == (SpanKind.CLIENT, {SpanKind.PRODUCER})
        ids = {attributes_of(one)["messaging.message.id"]: id_of(one) for one in created}
        assert processed == {name: [ids[name]] for name in "abc"}
        assert sorted(linked(send)) == sorted(ids.values())
        assert {attributes_of(one)["messaging.operation.name"] for one in created} == {"create"}
    else:
        assert (send.kind, created, linked(send)) == (SpanKind.PRODUCER, [], [])
        assert processed == {name: [id_of(send)] for name in "abc"}


async def test_spans_of_queues_of_replies_have_one_name(url: str, recorded: Recorded) -> None:
    names = [f"orders.replies.{digit * 16}" for digit in "01"]
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        for name in names:
            await backend.queue(name).send(b"x")
    sent = recorded.spans("send orders.replies")
    assert [attributes_of(one)["messaging.destination.name"] for one in sent] == names


async def test_with_process_parent_a_handler_is_in_the_trace_of_its_sender(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry(process_parent=True)) as backend:
        queue = backend.queue("orders")
        with recorded.tracer.start_as_current_span("checkout") as checkout:
            await queue.send_batch([Outgoing(b"x"), Outgoing(b"y")])
        await queue.consume(ignore, until_empty=True)
    created = {id_of(one) for one in recorded.spans("create orders")}
    processed = recorded.spans("process orders")
    assert {one.parent.span_id for one in processed if one.parent is not None} == created
    assert {trace_of(one) for one in recorded.all()} == {checkout.get_span_context().trace_id}
    assert [linked(one) for one in processed] == [[], []]


@pytest.mark.parametrize("process_parent", [False, True])
async def test_the_span_that_is_current_where_consuming_began_is_not_the_parent_of_handlers(
    url: str, recorded: Recorded, process_parent: bool
) -> None:
    """It may last as long as the program; and a hint may start a worker in the context of a sender."""
    async with tenure.connect(url, telemetry=recorded.telemetry(process_parent=process_parent)) as backend:
        queue = backend.queue("orders")
        handled: list[bytes] = []

        async def handler(message: Message) -> None:
            handled.append(message.body)

        with recorded.tracer.start_as_current_span("main") as main:
            consuming = asyncio.create_task(queue.consume(handler))
        with recorded.tracer.start_as_current_span("request") as request:
            await queue.send(b"a")
            await queue.send(b"b", headers={"traceparent": "none"})
        await until(lambda: len(handled) == 2)
        await queue.drain()
        await consuming
    processed = {
        attributes_of(one)["messaging.tenure.message.sequence"]: one for one in recorded.spans("process orders")
    }
    assert processed[2].parent is None  # it carries no context
    assert trace_of(processed[2]) not in {main.get_span_context().trace_id, request.get_span_context().trace_id}
    if process_parent:
        assert trace_of(processed[1]) == request.get_span_context().trace_id
    else:
        assert processed[1].parent is None
        assert trace_of(processed[1]) not in {main.get_span_context().trace_id, request.get_span_context().trace_id}


async def test_the_span_is_current_in_the_handler_and_so_nested_sends_are_children(
    url: str, recorded: Recorded
) -> None:
    inside: list[int] = []
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        orders, receipts = backend.queue("orders"), backend.queue("receipts")
        await orders.send(b"x")

        async def handler(message: Message) -> None:
            inside.append(trace.get_current_span().get_span_context().span_id)
            await receipts.send(b"y")

        await orders.consume(handler, until_empty=True)
        assert not trace.get_current_span().get_span_context().is_valid
    process, send = recorded.span("process orders"), recorded.span("send receipts")
    assert inside == [id_of(process)]
    assert send.parent is not None
    assert send.parent.span_id == id_of(process)


async def test_the_span_is_current_in_a_thread_too_and_fails_with_its_exception(url: str, recorded: Recorded) -> None:
    inside: list[int] = []

    def handler(message: tenure.sync.Message) -> None:
        inside.append(trace.get_current_span().get_span_context().span_id)
        if message.delivery_count == 1:
            raise ValueError(SECRET)
        message.complete()

    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        await queue.consume(handler, until_empty=True, retry=AT_ONCE)
    failed, process = recorded.spans("process orders")
    assert inside == [id_of(failed), id_of(process)]
    assert attributes_of(failed)["error.type"] == "builtins.ValueError"
    assert (failed.status.status_code, process.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert [one.name for one in failed.events] == ["exception"]
    complete = recorded.span("complete orders")
    assert complete.parent is not None
    assert complete.parent.span_id == id_of(process)


def in_process(message: Any) -> None:
    if message.delivery_count == 1:
        raise ValueError("broken")


@pytest.mark.process
async def test_a_handler_in_a_process_has_a_span_and_its_message_carries_the_context(
    url: str, recorded: Recorded
) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        await queue.consume(in_process, run_in="process", until_empty=True, retry=AT_ONCE)
    failed, process = recorded.spans("process orders")
    assert (failed.status.status_code, process.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert linked(failed) == linked(process) == [id_of(recorded.span("send orders"))]


@pytest.mark.parametrize("returned", [True, False])
async def test_a_handler_that_fails_says_how(url: str, recorded: Recorded, returned: bool) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")

        async def handler(message: Message) -> object:
            error = Reject("unknown", SECRET)
            if returned:
                return error
            raise error

        await queue.consume(handler, until_empty=True)
    process = recorded.span("process orders")
    assert process.status.status_code is StatusCode.ERROR
    assert attributes_of(process)["error.type"].endswith("Reject")


async def test_a_send_that_fails_says_how(url: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")

        async def refuse(*_: Any) -> Any:
            raise tenure.Unavailable("no route")

        monkeypatch.setattr(queue._context.broker, "send", refuse)
        with pytest.raises(tenure.Unavailable):
            await queue.send(b"x")
    failed = recorded.spans("send orders")[1]
    assert (failed.status.status_code, attributes_of(failed)["error.type"]) == (
        StatusCode.ERROR,
        "tenure.errors.Unavailable",
    )


# --- the context in the headers ---


async def test_the_context_is_kept_through_redelivery_dead_letters_and_redrive(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders", max_deliveries=2)
        await queue.send(b"x", headers={"mine": "kept"})
        headers: list[dict[str, Any]] = []

        async def handler(message: Message) -> None:
            headers.append(dict(message.headers))
            if len(headers) <= 2:
                raise ValueError("broken")

        await queue.consume(handler, until_empty=True, retry=AT_ONCE)
        assert (await queue.stats()).dead == 1
        await queue.dead_letters.redrive()
        await queue.consume(handler, until_empty=True, retry=AT_ONCE)
    send = recorded.span("send orders")
    assert send.context is not None
    traceparent = headers[0]["traceparent"]
    assert traceparent.startswith(f"00-{send.context.trace_id:032x}-{send.context.span_id:016x}-")
    assert headers == [{"mine": "kept", "traceparent": traceparent}] * 3
    assert [linked(one) for one in recorded.spans("process orders")] == [[id_of(send)]] * 3


async def test_a_context_that_the_program_has_put_in_is_not_replaced(url: str, recorded: Recorded) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x", headers={"traceparent": given})
        await queue.send_batch([Outgoing(b"x", headers={"traceparent": given}), Outgoing(b"y")])
        messages = await queue.receive(10)
        assert [one.headers["traceparent"] == given for one in messages] == [True, True, False]
        for one in messages:
            await one.give_back()
        await queue.consume(ignore, until_empty=True)
    links = [linked(one) for one in recorded.spans("process orders")]
    assert links[:2] == [[0xB7AD6B7169203331]] * 2


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "x",
        "00-0-0-0",
        f"00-{'0' * 32}-{'0' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        "ünïcödé",
        7,
        True,
        "00-" * 1_000,
    ],
)
@pytest.mark.parametrize("process_parent", [False, True])
async def test_a_context_that_can_not_be_read_is_harmless(
    url: str, recorded: Recorded, traceparent: Any, process_parent: bool
) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry(process_parent=process_parent)) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x", headers={"traceparent": traceparent, "tracestate": "\x01=,,="})
        await queue.consume(ignore, until_empty=True)
        assert await queue.stats() == tenure.Stats()
    process = recorded.span("process orders")
    assert (linked(process), process.parent) == ([], None)


async def test_without_spans_messages_carry_no_context(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry(traces=False)) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        (message,) = await queue.receive()
        assert dict(message.headers) == {}
        await message.complete()
    assert recorded.all() == []
    assert "messaging.client.sent.messages" in recorded.metrics()


async def test_without_a_provider_nothing_is_recorded_and_all_goes_on(url: str) -> None:
    async with tenure.connect(url, telemetry=OpenTelemetry(process_parent=True)) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x"), Outgoing(b"y")])
        await queue.consume(ignore, until_empty=True)
        assert await queue.stats() == tenure.Stats()


async def test_no_span_has_a_body_or_a_header_but_the_text_of_an_exception(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send_batch([Outgoing(SECRET.encode(), headers={"note": SECRET}), Outgoing(b"told")])

        async def handler(message: Message) -> None:
            raise ValueError("told" if message.body == b"told" else "unknown price")

        await queue.consume(handler, until_empty=True)
    spans = "".join(one.to_json() for one in recorded.all())
    assert "process orders" in spans
    assert SECRET not in spans
    assert "ValueError: told" in spans
    metrics = f"{recorded.metrics()}"
    assert "messaging.process.duration" in metrics
    assert SECRET not in metrics


# --- by hand ---


async def test_receiving_and_verdicts_by_hand_make_spans(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        assert await queue.receive() == []
        await queue.send_batch([Outgoing(b"x", id=one) for one in "abcde"])
        with recorded.tracer.start_as_current_span("work") as work:
            first, second, third, fourth, fifth = await queue.receive(5)
            await first.complete()
            await second.abandon(3_600.0)
            await third.defer()
            await fourth.dead_letter("bad", SECRET)
            await fifth.give_back()
        with pytest.raises(tenure.LockLost):
            await first.complete()
    created = {attributes_of(one)["messaging.message.id"]: id_of(one) for one in recorded.spans("create orders")}
    receive = recorded.span("receive orders")
    assert receive.kind is SpanKind.CLIENT
    assert attributes_of(receive) == {
        "messaging.system": "tenure",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.batch.message_count": 5,
    }
    assert sorted(linked(receive)) == sorted(created.values())
    assert receive.start_time is not None
    assert receive.end_time is not None
    assert 0 <= receive.end_time - receive.start_time < PATIENCE * 1e9
    for verb, name in zip(("abandon", "defer", "dead_letter", "give_back"), "bcde", strict=True):
        span = recorded.span(f"{verb} orders")
        assert (span.kind, linked(span)) == (SpanKind.CLIENT, [created[name]])
        found = attributes_of(span)
        assert (found["messaging.operation.name"], found["messaging.operation.type"]) == (verb, "settle")
        assert span.parent is not None
        assert span.parent.span_id == work.get_span_context().span_id
    assert recorded.spans("process orders") == []


async def test_what_a_consumer_receives_and_settles_by_itself_makes_no_span(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x", session=one) for one in "aab"])
        await queue.consume(ignore, sessions=True, until_empty=True)
    assert set(recorded.names()) == {"create orders", "process orders", "send orders"}
    sessions = [attributes_of(one)["messaging.tenure.message.session"] for one in recorded.spans("process orders")]
    assert sorted(sessions) == ["a", "a", "b"]


class Refusing(SpanProcessor):
    """A processor of spans that fails."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise OSError("the collector is full")


async def test_a_processor_of_spans_that_fails_changes_nothing(
    url: str, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    recorded.tracer_provider.add_span_processor(Refusing())
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x"), Outgoing(b"y")])
        (message,) = await queue.receive()
        await message.complete()
        await queue.consume(ignore, until_empty=True)
        assert await queue.stats() == tenure.Stats()
    assert "telemetry of tenure failed" in caplog.text


# --- terms ---


async def test_a_term_is_a_span_of_its_own(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        with recorded.tracer.start_as_current_span("main"):

            async def lead(term: tenure.Term) -> None: ...

            await backend.election("chair").run(lead)
        await until(lambda: recorded.spans("lead chair"))
    span = recorded.span("lead chair")
    assert (span.kind, span.parent, span.status.status_code) == (SpanKind.INTERNAL, None, StatusCode.UNSET)
    assert attributes_of(span) == {
        "tenure.election.name": "chair",
        "tenure.election.token": 1,
        "tenure.election.reason": "ended",
    }


# --- metrics ---


def points(metric: Any) -> list[tuple[dict[str, Any], Any]]:
    return [(dict(one.attributes), one) for one in metric.data.data_points]


async def test_metrics_have_the_names_units_and_values_of_the_conventions(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")
        await queue.send_batch([Outgoing(b"x"), Outgoing(b"y")])
        await queue.send(b"z")

        async def handler(message: Message) -> None:
            if message.body == b"z" and message.delivery_count == 1:
                raise ValueError(SECRET)
            if message.body == b"y":
                raise Reject(SECRET)

        await queue.consume(handler, until_empty=True, retry=AT_ONCE)

        async def lead(term: tenure.Term) -> None:
            held = recorded.metrics()["tenure.election.leader"]
            assert [(found, one.value) for found, one in points(held)] == [({"tenure.election.name": "chair"}, 1)]

        await backend.election("chair").run(lead)
        await until(lambda: "tenure.election.terms" in recorded.metrics())
    found = recorded.metrics()
    assert {name: metric.unit for name, metric in found.items()} == {
        "messaging.client.operation.duration": "s",
        "messaging.client.sent.messages": "{message}",
        "messaging.client.consumed.messages": "{message}",
        "messaging.process.duration": "s",
        "tenure.message.wait": "s",
        "tenure.messages.handled": "{message}",
        "tenure.messages.dead": "{message}",
        "tenure.election.leader": "",
        "tenure.election.terms": "{term}",
    }
    common = {"messaging.system": "tenure", "messaging.destination.name": "orders"}

    def values(name: str) -> list[tuple[dict[str, Any], Any]]:
        return [(labels, one.value) for labels, one in points(found[name])]

    assert values("messaging.client.sent.messages") == [({**common, "messaging.operation.name": "send"}, 3)]
    assert values("messaging.client.consumed.messages") == [({**common, "messaging.operation.name": "receive"}, 4)]
    assert values("tenure.messages.dead") == [
        ({**common, "messaging.operation.name": "settle", "tenure.reason": "rejected"}, 1)
    ]
    assert sorted((labels["tenure.outcome"], value) for labels, value in values("tenure.messages.handled")) == [
        ("abandoned", 1),
        ("completed", 2),
        ("dead_lettered", 1),
    ]
    assert values("tenure.election.leader") == [({"tenure.election.name": "chair"}, 0)]
    assert values("tenure.election.terms") == [
        ({"tenure.election.name": "chair", "tenure.election.reason": "ended"}, 1)
    ]
    ((labels, durations),) = points(found["messaging.process.duration"])
    assert (labels, durations.count) == ({**common, "messaging.operation.name": "process"}, 4)
    assert tuple(durations.explicit_bounds) == (
        0.005,
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
    )
    ((_, waits),) = points(found["tenure.message.wait"])
    assert waits.count == 3
    ((_, sends),) = points(found["messaging.client.operation.duration"])
    assert sends.count == 2


async def test_no_metric_has_an_attribute_with_very_many_values(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry()) as backend:
        queue = backend.queue("orders")

        async def handler(message: Message) -> None:
            if message.body == b"reply":
                await message.reply(b"done")
            elif message.delivery_count == 1:
                raise Reject(f"{SECRET} {message.id}")

        consuming = asyncio.create_task(queue.consume(handler))
        for number in range(30):
            await queue.send(b"x", id=f"id-{number}", correlation_id=f"correlation-{number}")
        await queue.request(b"reply", timeout=PATIENCE)

        async def all_dead() -> bool:
            return (await queue.stats()).dead == 30

        await until(all_dead)
        await queue.drain()
        await consuming
        await backend.queue(f"orders.replies.{'0' * 16}").send(b"x")
    seen = {
        str(value) for metric in recorded.metrics().values() for found, _ in points(metric) for value in found.values()
    }
    assert seen <= {
        "tenure",
        "orders",
        "orders.replies",
        "send",
        "receive",
        "process",
        "settle",
        "rejected",
        "completed",
        "dead_lettered",
        "kept",
    }


async def test_without_measures_there_are_no_metrics(url: str, recorded: Recorded) -> None:
    async with tenure.connect(url, telemetry=recorded.telemetry(measures=False)) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        await queue.consume(ignore, until_empty=True)
    assert recorded.metrics() == {}
    assert recorded.names() == ["process orders", "send orders"]

"""Metrics for Prometheus, and traces by OpenTelemetry."""

import asyncio

import prometheus_client
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tenure
import tenure.telemetry

spans = InMemorySpanExporter()  # in its place, that of your backend for traces
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))

metrics = tenure.telemetry.Metrics()
prometheus_client.REGISTRY.register(tenure.telemetry.PrometheusCollector(metrics.snapshot))


async def handle(message: tenure.Message) -> None: ...


async def main(url: str = "sqlite:///work.db") -> None:
    traces = tenure.telemetry.OpenTelemetry(tracer_provider=provider)
    async with tenure.connect(url, telemetry=[metrics, traces]) as backend:
        orders = backend.queue("orders")
        await orders.send(b"two kettles", id="order-17")
        await orders.consume(handle, until_empty=True)
    for line in prometheus_client.generate_latest().decode().splitlines():
        if line.startswith("tenure_messages_"):
            print(line)
    for span in spans.get_finished_spans():
        print(f"{span.name}: {len(span.links)} links")


asyncio.run(main())

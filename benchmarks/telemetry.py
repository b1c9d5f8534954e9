"""The cost of metrics and traces for each message, in one run.

Run by hand: ``python -m benchmarks telemetry [--messages 30000] [--rounds 5] [--on sqlite:///bench.db]``. Each
contender drains a queue of so many messages with a handler that does nothing, in one process, ten at once; the
contenders take turns. Prints figures only, and the ratio to a run without telemetry.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

import tenure
from tenure.telemetry import Metrics, OpenTelemetry, Telemetry

CONCURRENCY = 10
BATCH = 1_000

CONTENDERS: dict[str, Callable[[], Telemetry | None]] = {
    "without": lambda: None,
    "Metrics": Metrics,
    "OpenTelemetry, metrics": lambda: OpenTelemetry(
        traces=False, meter_provider=MeterProvider([InMemoryMetricReader()])
    ),
    "OpenTelemetry, traces": lambda: OpenTelemetry(measures=False, tracer_provider=TracerProvider()),
}


async def drained(url: str, telemetry: Telemetry | None, count: int) -> float:
    async def handle(message: tenure.Message) -> None: ...

    async with tenure.connect(url) as backend:
        queue = backend.queue("bench")
        for first in range(0, count, BATCH):
            await queue.send_batch([tenure.Outgoing(b"tea") for _ in range(first, min(first + BATCH, count))])
        if telemetry is not None:  # after the sends, which are not measured here
            backend.observe(telemetry)
        begun = time.perf_counter()
        await backend.queue("bench").consume(handle, concurrency=CONCURRENCY, until_empty=True)
        return count / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks telemetry")
    parser.add_argument("--messages", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", default="memory:")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name, make in CONTENDERS.items():
            found[name].append(asyncio.run(drained(options.on, make(), options.messages)))
    for name, rates in found.items():
        ratios = [rate / base for rate, base in zip(rates, found["without"], strict=True)]
        print(f"{name:24} {statistics.median(rates):>10,.0f}/s  ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()

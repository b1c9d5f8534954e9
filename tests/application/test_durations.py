"""Durations as values: what is measured, told and shown of times that a test sets, exactly, whatever its unit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import tenure
from tenure import Outgoing
from tenure._cli import output
from tenure._dashboard import shown
from tenure._election import handle
from tenure._election.machine import Machine
from tenure._telemetry import opentelemetry
from tenure._telemetry.families import Histogram
from tenure._telemetry.metrics import HandledCounts
from tenure.telemetry import Metrics
from tenure.testing import connect_here
from tenure.testing.loop import run
from tests.application.outages import proxies
from tests.application.test_opentelemetry import Recorded

WALL = 1_795_000_000.0
"""The wall clock's time when a test begins."""

SEND, CLAIM, DELAY, HANDLE = 2.0, 3.0, 5.0, 4.0
"""The seconds that the store takes for a send and a claim, that a message is delayed, and that its handler runs."""

LOCK, TTL, MARGIN = 40.0, 15.0, 1.0
LED = 0.25
"""The seconds after which a term is looked at: shorter than until its renewal."""


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    found = Recorded()
    yield found
    found.close()


async def measured(recorded: Recorded, patch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let known times pass; return each duration that is measured or told, in seconds."""
    loop = asyncio.get_running_loop()
    patch.setattr(time, "time", lambda: WALL + loop.time())
    patch.setattr(time, "time_ns", lambda: int((WALL + loop.time()) * 1e9))
    metrics, found = Metrics(), dict[str, float]()
    with proxies() as stores:
        async with connect_here(telemetry=[metrics, recorded.telemetry()]) as backend:
            (store,) = stores
            store.broker.takes = {"send": SEND, "receive": CLAIM}

            queue = backend.queue("by hand", lock=LOCK)
            await queue.send(b"a")
            found["oldest age"] = (await queue.stats()).oldest_age
            (message,) = await queue.receive()
            found["lock, of which a claim has passed"] = message.locked_until - time.time()
            await message.complete()

            orders = backend.queue("orders", lock=LOCK)
            await orders.send_batch([Outgoing(b"b", delay=DELAY)])

            async def handle(message: tenure.Message) -> None:
                await asyncio.sleep(HANDLE)

            consuming = asyncio.ensure_future(orders.consume(handle))
            await asyncio.sleep(30.0)
            await orders.drain()
            await consuming

            election = backend.election("chair", ttl=TTL, renew_every=5.0, drift=0.0, margin=MARGIN)
            began = loop.time()
            async with election.campaign() as term:
                found["trusted"] = term.remaining()
                await asyncio.sleep(LED)
                found["trusted, a moment later"] = term.remaining()
                status = await election.status()
                found["trusted, by the status"] = status.trusted_for
                found["answered ago"] = status.answered_ago or 0.0
                leader = await election.leader()
                assert leader is not None
                found["left of the lease"] = leader.remaining or 0.0
            assert loop.time() == began + LED
            await asyncio.sleep(7.0)
            found["vacant"] = (await backend.vacancies("chair"))["chair"] or 0.0

    for name, what in (("send_seconds", "by hand"), ("handler_seconds", "orders"), ("message_wait_seconds", "orders")):
        histogram = metrics.snapshot()[f"tenure_{name}", (what,)]
        assert isinstance(histogram, Histogram)
        found[f"metric {name}"] = histogram.total
    for name, metric in recorded.metrics().items():
        for point in metric.data.data_points:
            if metric.unit == "s":
                queue_name = point.attributes["messaging.destination.name"]
                found[f"metric {name} of {queue_name}"] = point.sum
    receive = recorded.span("receive by hand")
    found["span of a receive"] = ((receive.end_time or 0) - (receive.start_time or 0)) / 1e9
    return found


EXPECTED = {
    "oldest age": SEND,
    "lock, of which a claim has passed": LOCK - CLAIM,
    "trusted": TTL - MARGIN,
    "trusted, a moment later": TTL - MARGIN - LED,
    "trusted, by the status": TTL - MARGIN - LED,
    "answered ago": LED,
    "left of the lease": TTL - LED,
    "vacant": 7.0,
    "metric send_seconds": SEND,
    "metric handler_seconds": HANDLE,
    # It is claimed in vain once while it is delayed, and again when it is due.
    "metric message_wait_seconds": 2 * CLAIM + DELAY + 0.001,
    "metric tenure.message.wait of orders": 2 * CLAIM + DELAY + 0.001,
    "metric messaging.process.duration of orders": HANDLE,
    "metric messaging.client.operation.duration of by hand": SEND,
    "metric messaging.client.operation.duration of orders": SEND,
    "span of a receive": CLAIM,
}


def test_each_duration_is_the_one_that_has_passed(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(measured(recorded, monkeypatch), seed=1) == pytest.approx(EXPECTED, abs=1e-5)


@pytest.mark.parametrize(
    ("seconds", "in_commands", "in_the_dashboard"),
    [
        (None, "unknown", ""),
        (0.0, "0 ms", "0.0 s"),
        (0.002, "2 ms", "0.0 s"),
        (2.0, "2.0 s", "2.0 s"),
        (59.4, "59.4 s", "59 s"),
        (119.0, "119 s", "119 s"),
        (120.0, "120 s", "2 min"),
        (7_200.0, "7200 s", "2 h"),
        (172_800.0, "172800 s", "2 d"),
    ],
)
def test_a_duration_is_shown_with_its_unit(seconds: float | None, in_commands: str, in_the_dashboard: str) -> None:
    assert output.seconds(seconds) == in_commands
    assert shown.duration(seconds) == in_the_dashboard


# --- planted bugs ---


def spans_in_milliseconds(patch: pytest.MonkeyPatch) -> None:
    received = opentelemetry._Spans.received
    patch.setattr(
        opentelemetry._Spans,
        "received",
        lambda self, queue, deliveries, seconds: received(self, queue, deliveries, seconds / 1e3),
    )


def sends_in_milliseconds(patch: pytest.MonkeyPatch) -> None:
    sent = Metrics.sent
    patch.setattr(Metrics, "sent", lambda self, queue, count, seconds: sent(self, queue, count, seconds * 1e3))


def handlers_in_milliseconds(patch: pytest.MonkeyPatch) -> None:
    note = HandledCounts.note
    patch.setattr(
        HandledCounts, "note", lambda self, delivery, seconds, outcome: note(self, delivery, seconds * 1e3, outcome)
    )


def sends_in_milliseconds_by_opentelemetry(patch: pytest.MonkeyPatch) -> None:
    sent = opentelemetry._Measures.sent
    patch.setattr(
        opentelemetry._Measures, "sent", lambda self, queue, count, seconds: sent(self, queue, count, seconds * 1e3)
    )


def answers_counted_from_the_begin(patch: pytest.MonkeyPatch) -> None:
    status_of = handle._status_of
    patch.setattr(handle, "_status_of", lambda machine, now: replace(status_of(machine, now), answered_ago=now))


def trust_in_milliseconds(patch: pytest.MonkeyPatch) -> None:
    status_of = handle._status_of

    def in_milliseconds(machine: Machine, now: float) -> tenure.CandidateStatus:
        found = status_of(machine, now)
        return replace(found, trusted_for=found.trusted_for * 1e3)

    patch.setattr(handle, "_status_of", in_milliseconds)


@pytest.mark.parametrize(
    "plant",
    [
        spans_in_milliseconds,
        sends_in_milliseconds,
        handlers_in_milliseconds,
        sends_in_milliseconds_by_opentelemetry,
        answers_counted_from_the_begin,
        trust_in_milliseconds,
    ],
)
def test_a_planted_bug_of_a_unit_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert run(measured(recorded, monkeypatch), seed=1) != pytest.approx(EXPECTED, abs=1e-5)

"""Queues on Service Bus whose answers are held back, under the suite of faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tenure._queue.broker import Broker
from tenure.testing.conformance import BrokerFaultSuite
from tenure.testing.faultproxy import Begin, Direction, hold
from tests.stores.servicebus.test_suites import ServiceBusHarness

CLOSING = (b"S\x16", b"S\x17", b"S\x18")  # the frames "detach", "end" and "close", of a session that was released


class HeldServiceBusHarness(ServiceBusHarness):
    faults = frozenset({"hold"})

    def hold(self, broker: Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return hold(self._ways[broker].amqp, direction=direction, decides=_deciding())


def _deciding() -> Callable[[bytes], bool]:
    """Return what finds the frames that ask for something; on a new connection, that is to accept a session."""
    is_new = False

    def decides(frames: bytes) -> bool:
        nonlocal is_new
        is_new = is_new or frames.startswith(b"AMQP")
        if is_new:
            return b"com.microsoft:session-filter" in frames
        return bool(frames) and frames[9:11] not in CLOSING

    return decides


class TestServiceBusSlowAnswers(BrokerFaultSuite):
    harness = HeldServiceBusHarness

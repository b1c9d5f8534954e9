"""``Metrics``: counts what a program does, so that a scrape can read it."""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import get_args
from weakref import WeakSet

from tenure._queue.message import Delivery
from tenure._runtime.clock import SystemClock
from tenure._telemetry.families import FAMILIES, LABELS_MAX, OTHER, Histogram, Key, Snapshot, combined
from tenure._telemetry.telemetry import Handled, Outcome, Telemetry
from tenure.events import (
    BrokerUnanswered,
    CampaignFailed,
    Event,
    GivenBack,
    HandlerOverran,
    LockEnded,
    MessageDied,
    MessageFailed,
    Overrun,
    RenewalMissed,
    Renewed,
    ResultDiscarded,
    SlotSent,
    SlotsSkipped,
    StandingBy,
    TermBegan,
    TermEnded,
)

REASONS = frozenset({"max_deliveries", "expired", "undecodable", "unknown"})
"""The reasons of dead letters that are told apart; all others are those of handlers, and as many as they like."""

REJECTED = "rejected"

_REPLIES = re.compile(r"\.replies\.[0-9a-f]{16}$")
_PARTITION = re.compile(r"\.(partition|member)-[0-9]+$")
_SECONDS = FAMILIES["tenure_handler_seconds"].bounds
_WAITS = FAMILIES["tenure_message_wait_seconds"].bounds


def queue_label(name: str) -> str:
    """Return the label of a queue: those of processes that wait for replies are one."""
    return _REPLIES.sub(".replies", name)


def election_label(name: str) -> str:
    """Return the label of an election: those of the numbered partitions of a group are one, and of its members."""
    return _PARTITION.sub(r".\1-*", name)


def reason_label(reason: str) -> str:
    """Return the label of the reason of a dead letter."""
    return reason if reason in REASONS else REJECTED


class Metrics(Telemetry):
    """Counts what a backend does. Give one object to ``telemetry=``, also of several backends of a process.

    :class:`tenure.telemetry.PrometheusCollector` shows its values to Prometheus; ``tenure run --http`` and
    :func:`tenure.http.app` do that by themselves.

    Example::

        metrics = tenure.telemetry.Metrics()
        async with tenure.connect("postgresql://db/shop", telemetry=metrics) as backend:
            ...
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # loops of several threads, and the callback thread
        self._values: dict[Key, float] = {}
        self._histograms: dict[Key, Histogram] = {}
        self._handled: dict[tuple[str, int], HandledCounts] = {}
        """By queue and thread: so they need no lock."""
        self._leading: dict[str, set[tuple[str, int]]] = {}
        """The terms that have not ended, by name: one of another candidate may begin before the last one has ended."""
        self._trusted_until: dict[tuple[str, str], float] = {}
        self._labels: dict[str, set[str]] = {}
        self._clock = SystemClock()
        _made.add(self)

    # --- messages ---

    def sent(self, queue: str, count: int, seconds: float) -> None:
        labels = (self._queue_label(queue),)
        with self._lock:
            self._count("tenure_messages_sent", *labels, by=count)
            self._observe("tenure_send_seconds", labels, seconds)

    def received(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        label = self._queue_label(queue)
        with self._lock:
            self._count("tenure_messages_received", label, by=len(deliveries))

    def handling(self, queue: str) -> Handled:
        key = self._queue_label(queue), threading.get_ident()
        with self._lock:
            found = self._handled.setdefault(key, HandledCounts())
        return found.note

    def _queue_label(self, name: str) -> str:
        with self._lock:
            return self._label("queue", queue_label(name))

    def _label(self, kind: str, value: str) -> str:
        """Return *value*, or a common one if there are very many."""
        known = self._labels.setdefault(kind, set())
        if value not in known:
            if len(known) >= LABELS_MAX:
                return OTHER
            known.add(value)
        return value

    # --- events ---

    def event(self, event: Event) -> None:
        with self._lock:
            match event:
                case MessageFailed():
                    self._count("tenure_messages_failed", self._of(event))
                case MessageDied(reason=reason):
                    self._count("tenure_messages_dead", self._of(event), reason_label(reason))
                case GivenBack(count=count):
                    self._count("tenure_messages_given_back", self._of(event), by=count)
                case LockEnded(why=why) | ResultDiscarded(why=why):
                    self._count("tenure_locks_lost", self._of(event), why)
                case HandlerOverran():
                    self._count("tenure_handlers_overran", self._of(event))
                case BrokerUnanswered():
                    self._count("tenure_store_unanswered", self._of(event))
                case SlotSent(schedule=schedule, late=late):
                    labels = self._of(event), self._label("schedule", schedule)
                    self._count("tenure_slots_sent", *labels)
                    self._observe("tenure_slot_late_seconds", labels, late)
                case SlotsSkipped(schedule=schedule):
                    self._count("tenure_slots_skipped", self._of(event), self._label("schedule", schedule))
                case Renewed(trusted_until=until):
                    self._trusted_until[self._label("name", election_label(event.name)), event.holder] = until
                case TermBegan(token=token):
                    name = self._label("name", election_label(event.name))
                    self._count("tenure_terms", name)
                    self._leading.setdefault(name, set()).add((event.holder, token))
                case TermEnded(token=token, reason=why):
                    name = self._label("name", election_label(event.name))
                    self._count("tenure_terms_ended", name, why)
                    self._leading.setdefault(name, set()).discard((event.holder, token))
                    self._trusted_until.pop((name, event.holder), None)
                case RenewalMissed():
                    self._count("tenure_renewals_missed", self._label("name", election_label(event.name)))
                case Overrun():
                    self._count("tenure_overruns", self._label("name", election_label(event.name)))
                case CampaignFailed():
                    self._count("tenure_campaigns_failed", self._label("name", election_label(event.name)))
                case StandingBy():  # so that a name without a leader shows 0 where a candidate has never led, too
                    self._leading.setdefault(self._label("name", election_label(event.name)), set())

    def _of(self, event: Event) -> str:
        """Return the queue of an event, as its label."""
        return self._label("queue", queue_label(event.name))

    def _count(self, metric: str, *labels: str, by: float = 1.0) -> None:
        key = metric, labels
        self._values[key] = self._values.get(key, 0.0) + by

    def _observe(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        family = FAMILIES[metric]
        found = self._histograms.setdefault((metric, labels), Histogram.of(family))
        found.counts[bisect_left(family.bounds, value)] += 1
        found.total += value

    # --- reading ---

    def snapshot(self) -> Snapshot:
        """Return the present values; see :mod:`tenure.telemetry`."""
        now = self._clock.now()
        with self._lock:
            found: Snapshot = dict(self._values)
            for key, histogram in self._histograms.items():
                found[key] = Histogram(list(histogram.counts), histogram.total)
            for name, terms in self._leading.items():
                found["tenure_leader", (name,)] = float(len(terms))
            for (name, _), until in self._trusted_until.items():
                key = "tenure_term_seconds_left", (name,)
                before = found.get(key, 0.0)
                assert isinstance(before, float)
                found[key] = max(before, until - now)
            handled = list(self._handled.items())
        return combined([found, *(counts.snapshot(queue) for (queue, _), counts in handled)])


class HandledCounts:
    """What is counted of each message that is handled; by one thread only."""

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self._times = [0] * (len(_SECONDS) + 1)
        self._waits = [0] * (len(_WAITS) + 1)
        self._time = self._wait = 0.0
        self._again = 0

    def note(self, delivery: Delivery, seconds: float, outcome: Outcome) -> None:
        """Count a message whose handler has ended."""
        self.outcomes[outcome] += 1
        self._time += seconds
        self._times[0 if seconds <= _SECONDS[0] else bisect_left(_SECONDS, seconds)] += 1
        if delivery.delivery_count > 1:
            self._again += 1
        else:
            wait = time.time() - seconds - delivery.enqueued_at
            if wait <= _WAITS[0]:
                self._waits[0] += 1
                if wait > 0.0:  # else the clocks differ
                    self._wait += wait
            else:
                self._wait += wait
                self._waits[bisect_left(_WAITS, wait)] += 1

    def snapshot(self, queue: str) -> Snapshot:
        """Return the present values, for a queue."""
        found: Snapshot = {
            ("tenure_messages_handled", (queue, outcome)): float(count)
            for outcome, count in self.outcomes.items()
            if count
        }
        found["tenure_messages_redelivered", (queue,)] = float(self._again)
        found["tenure_handler_seconds", (queue,)] = Histogram(list(self._times), self._time)
        found["tenure_message_wait_seconds", (queue,)] = Histogram(list(self._waits), self._wait)
        return found


_made: WeakSet[Metrics] = WeakSet()


def _after_fork() -> None:
    """Give each object a new lock: another thread may have held the old one, and does not exist in the child."""
    for one in list(_made):
        one._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

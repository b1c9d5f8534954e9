"""The metrics of tenure: their names, kinds and labels, and snapshots of their values, which can be added up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from tenure._foreign import Unreadable, a_count, a_list, a_text, read_or

Kind = Literal["counter", "gauge", "histogram"]
"""The kind of a metric."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bounds of the buckets for handlers and sends: those of the messaging conventions of OpenTelemetry."""

WAITS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)
"""Bounds of the buckets for the time that messages wait."""

Key = tuple[str, tuple[str, ...]]
"""The name of a metric, and the values of its labels."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, with all its labels."""

    kind: Kind
    """``counter`` (it only rises), ``gauge`` or ``histogram``."""
    labels: tuple[str, ...]
    """The names of its labels, in the order of their values in a ``Key``."""
    help: str
    """One sentence for people who read the metric."""
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper bounds of its buckets, in seconds, rising."""
    combine: Literal["sum", "max"] = "sum"
    """How the values of several processes become one."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "tenure_messages_sent": Family("counter", ("queue",), "Messages sent by this program."),
        "tenure_send_seconds": Family("histogram", ("queue",), "Time of one step of sending.", SECONDS),
        "tenure_messages_received": Family("counter", ("queue",), "Deliveries claimed by this program."),
        "tenure_messages_redelivered": Family("counter", ("queue",), "Handled deliveries that were not a first one."),
        "tenure_messages_handled": Family("counter", ("queue", "outcome"), "Deliveries whose handler has ended."),
        "tenure_handler_seconds": Family("histogram", ("queue",), "Time of a handler.", SECONDS),
        "tenure_message_wait_seconds": Family(
            "histogram",
            ("queue",),
            "Time from the sending of a message to its first handling, with its delay.",
            WAITS,
        ),
        "tenure_messages_failed": Family("counter", ("queue",), "Deliveries whose handler has failed."),
        "tenure_messages_dead": Family("counter", ("queue", "reason"), "Messages that became dead letters."),
        "tenure_messages_given_back": Family("counter", ("queue",), "Deliveries given back unhandled and uncounted."),
        "tenure_locks_lost": Family("counter", ("queue", "why"), "Locks lost while the handler ran."),
        "tenure_handlers_overran": Family("counter", ("queue",), "Handlers that ran on after their lock was over."),
        "tenure_store_unanswered": Family("counter", ("queue",), "Requests that the store did not answer."),
        "tenure_handlers_running": Family("gauge", ("queue",), "Handlers that run now."),
        "tenure_handlers_concurrency": Family("gauge", ("queue",), "Handlers that may run at once."),
        "tenure_slots_sent": Family("counter", ("queue", "schedule"), "Slots of a schedule sent by this program."),
        "tenure_slot_late_seconds": Family("histogram", ("queue", "schedule"), "How late a slot was sent.", WAITS),
        "tenure_slots_skipped": Family("counter", ("queue", "schedule"), "Times at which missed slots were skipped."),
        "tenure_leader": Family("gauge", ("name",), "Terms that last here: 1 while this program leads, else 0."),
        "tenure_term_seconds_left": Family(
            "gauge", ("name",), "For how long the present term is trusted without a renewal.", combine="max"
        ),
        "tenure_terms": Family("counter", ("name",), "Terms that began here."),
        "tenure_terms_ended": Family("counter", ("name", "reason"), "Terms that ended here."),
        "tenure_renewals_missed": Family("counter", ("name",), "Renewals of a term that got no answer."),
        "tenure_overruns": Family("counter", ("name",), "Terms whose work ran on after they were over."),
        "tenure_campaigns_failed": Family("counter", ("name",), "Requests for a name that the store did not answer."),
        "tenure_processes": Family("gauge", ("state",), "Processes of tenure run."),
        "tenure_processes_crashed": Family("counter", (), "Processes of tenure run that ended without being told."),
        "tenure_queue_messages": Family("gauge", ("queue", "state"), "Messages of the whole queue.", combine="max"),
        "tenure_queue_oldest_seconds": Family(
            "gauge", ("queue",), "Age of the oldest ready message of the whole queue.", combine="max"
        ),
        "tenure_queue_paused": Family("gauge", ("queue",), "Whether the whole queue is paused: 1 or 0.", combine="max"),
    }
)
"""Every metric. The number of their values is bounded: by queues, names and schedules, of which ``LABELS_MAX`` each are
told apart."""

LABELS_MAX = 200
"""How many queues, names and schedules are told apart; further ones are one, under the name ``OTHER``."""

OTHER = "(other)"


@dataclass(slots=True)
class Histogram:
    """How many values were in each bucket, the last of which has no bound; and their sum."""

    counts: list[int]
    """How many values are in each bucket: those above the bound before it, up to its own."""
    total: float = 0.0
    """The sum of all values, in seconds."""

    @classmethod
    def of(cls, family: Family) -> Histogram:
        """Return an empty histogram with the buckets of *family*."""
        return cls([0] * (len(family.bounds) + 1))

    def add(self, other: Histogram) -> None:
        """Add the values of *other*."""
        for place, count in enumerate(other.counts):
            self.counts[place] += count
        self.total += other.total


Snapshot = dict[Key, "float | Histogram"]
"""The values of all metrics at one moment."""


def combined(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the values of several processes as those of one program."""
    found: Snapshot = {}
    for snapshot in snapshots:
        for key, value in snapshot.items():
            before = found.get(key)
            if isinstance(value, Histogram):
                if isinstance(before, Histogram):
                    before.add(value)
                else:
                    found[key] = Histogram(list(value.counts), value.total)
            elif isinstance(before, (int, float)):
                found[key] = max(before, value) if FAMILIES[key[0]].combine == "max" else before + value
            else:
                found[key] = value
    return found


def lasting(snapshot: Snapshot) -> Snapshot:
    """Return what still counts of a process that has ended: counters must not fall."""
    return {key: value for key, value in snapshot.items() if FAMILIES[key[0]].kind != "gauge"}


def packed(snapshot: Snapshot) -> list[Any]:
    """Return *snapshot* for JSON."""
    return [
        [name, list(labels), [*value.counts, value.total] if isinstance(value, Histogram) else value]
        for (name, labels), value in snapshot.items()
    ]


def unpacked(values: object) -> Snapshot:
    """Return the snapshot that :func:`packed` has written; what can't be read, or is of another version, is left out.

    Raises:
        Unreadable: It is no list.
    """
    found = (read_or(_unpacked_one, one, None) for one in a_list(values))
    return dict(one for one in found if one is not None)


def _unpacked_one(row: object) -> tuple[Key, float | Histogram]:
    match a_list(row):
        case [str(name), list(labels), value] if (family := FAMILIES.get(name)) and len(labels) == len(family.labels):
            key = name, tuple(a_text(one) for one in labels)
        case _:
            raise Unreadable("it is no metric of this version")
    if family.kind != "histogram":
        return key, _number(value)
    match a_list(value):
        case [*counts, total] if len(counts) == len(family.bounds) + 1:
            return key, Histogram([a_count(one) for one in counts], _number(total))
    raise Unreadable("it is no histogram with these bounds")


def _number(value: object) -> float:
    if isinstance(value, float) and not math.isnan(value):
        return value
    return float(a_count(value))

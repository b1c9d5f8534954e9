"""The metrics of a program: their counts, the sums over its processes, and the text that Prometheus reads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._queue.message import NO_HEADERS, Delivery
from tenure._telemetry.families import (
    FAMILIES,
    LABELS_MAX,
    OTHER,
    Histogram,
    Key,
    Snapshot,
    combined,
    lasting,
    packed,
    unpacked,
)
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
from tenure.telemetry import Metrics

HOSTILE = ['quo"ted', "back\\slash", "back\\nslash", "ünïcödé ☃ 𝛑", "{a=b}", "a,b", " spaces ", "#", "a/b/../c", "'"]
HOSTILE += [
    "two\nlines",
    'x"} 1.0\ntenure_processes{state="forged"} 9.0\n#',
    "ends in \\",
    "\r\t\x1b[2J\x85\u2028\u202e",
]


def delivery(queue: str = "orders", *, count: int = 1, enqueued_at: float | None = None) -> Delivery:
    now = time.time() if enqueued_at is None else enqueued_at
    return Delivery(queue, 1, "token", "1", b"", NO_HEADERS, count, now, now + 30.0)


def histogram(snapshot: Snapshot, name: str, *labels: str) -> Histogram:
    found = snapshot[name, labels]
    assert isinstance(found, Histogram)
    return found


# --- snapshots ---


def labels_of(count: int) -> st.SearchStrategy[tuple[str, ...]]:
    letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # as in any name
    return st.tuples(*[st.text(letters, max_size=5)] * count)


@st.composite
def values(draw: st.DrawFn, name: str) -> tuple[Key, float | Histogram]:
    family = FAMILIES[name]
    key = name, draw(labels_of(len(family.labels)))
    amounts = st.integers(0, 1_000)
    if family.kind == "histogram":
        counts = draw(st.lists(amounts, min_size=len(family.bounds) + 1, max_size=len(family.bounds) + 1))
        return key, Histogram(counts, float(draw(amounts)))
    return key, float(draw(amounts))


snapshots = st.lists(st.sampled_from(sorted(FAMILIES)).flatmap(values), max_size=8).map(lambda found: dict(found))


@given(snapshots)
def test_a_snapshot_that_goes_through_json_is_the_same(snapshot: Snapshot) -> None:
    assert unpacked(json.loads(json.dumps(packed(snapshot)))) == snapshot


@given(st.lists(snapshots, max_size=4))
def test_counters_and_histograms_are_added_up_and_nothing_that_is_added_is_changed(several: list[Snapshot]) -> None:
    before = [packed(one) for one in several]
    total = combined(several)
    assert [packed(one) for one in several] == before
    assert set(total) == {key for one in several for key in one}
    for (name, labels), value in total.items():
        parts = [one[name, labels] for one in several if (name, labels) in one]
        if isinstance(value, Histogram):
            histograms = [part for part in parts if isinstance(part, Histogram)]
            assert value.counts == [sum(each) for each in zip(*(one.counts for one in histograms), strict=True)]
            assert value.total == sum(one.total for one in histograms)
        else:
            numbers = [part for part in parts if not isinstance(part, Histogram)]
            assert value == (max(numbers) if FAMILIES[name].combine == "max" else sum(numbers))


@given(snapshots, snapshots)
def test_the_order_in_which_processes_are_added_up_does_not_matter(one: Snapshot, other: Snapshot) -> None:
    assert combined([one, other]) == combined([other, one])
    assert combined([combined([one]), other]) == combined([one, other])


def test_of_a_process_that_has_ended_all_but_gauges_lasts() -> None:
    snapshot: Snapshot = {}
    for name, family in FAMILIES.items():
        labels = ("x",) * len(family.labels)
        snapshot[name, labels] = Histogram.of(family) if family.kind == "histogram" else 1.0
    assert {name for name, _ in snapshot} - {name for name, _ in lasting(snapshot)} == {
        name for name, family in FAMILIES.items() if family.kind == "gauge"
    }


@pytest.mark.parametrize(
    "foreign",
    [
        ["tenure_unheard_of", ["orders"], 1.0],
        ["tenure_messages_sent", [], 1.0],
        ["tenure_messages_sent", ["orders", "more"], 1.0],
        ["tenure_messages_sent", ["orders"], [1, 2.0]],  # another kind
        ["tenure_handler_seconds", ["orders"], 1.0],
        ["tenure_handler_seconds", ["orders"], [1, 2, 3.0]],  # other bounds
        ["tenure_handler_seconds", ["orders"], [10**400] * 15 + [1.0]],
        ["tenure_handler_seconds", ["orders"], [-1] * 15 + [1.0]],
        ["tenure_handler_seconds", ["orders"], [math.inf] * 15 + [1.0]],
        ["tenure_messages_sent", [7], 1.0],  # labels that could not be sorted, or not be written
        ["tenure_messages_sent", [["orders"]], 1.0],
        ["tenure_messages_sent", ["\ud800"], 1.0],
        ["tenure_messages_sent", ["orders"], math.nan],
        ["tenure_messages_sent", ["orders"], 10**400],
        ["tenure_messages_sent", ["orders"], True],
        ["tenure_messages_sent", {"orders": 1}, 1.0],
        [["tenure_messages_sent"], ["orders"], 1.0],
        ["tenure_messages_sent", ["orders"]],
        {"tenure_messages_sent": 1.0},
        None,
        7,
    ],
    ids=lambda foreign: repr(foreign)[:60],
)
def test_values_of_another_version_and_unreadable_ones_are_left_out(foreign: Any) -> None:
    """As when a process runs newer code than its supervisor, or something else writes to the pipe of its reports."""
    pytest.importorskip("prometheus_client")
    from tenure._telemetry.prometheus import exposed

    found = unpacked([foreign, ["tenure_messages_failed", ["orders"], 1.0]])
    assert found == {("tenure_messages_failed", ("orders",)): 1.0}
    exposed(found)


# --- counting ---


def every_event(name: str, schedule: str = "nightly") -> Iterator[Event]:
    common = (0.0, name, "me")
    message = (*common, "id", 1, 1)
    yield MessageFailed(*message, "ValueError: secret", 0.0)
    yield MessageDied(*message, "max_deliveries")
    yield GivenBack(*common, 3)
    yield LockEnded(*message, "denied")
    yield ResultDiscarded(*message, "stalled")
    yield HandlerOverran(*message)
    yield BrokerUnanswered(*common, "receive", "no route to host")
    yield SlotSent(*common, schedule, 0.0, 0.2)
    yield SlotsSkipped(*common, schedule, 0.0, 1.0)
    yield TermBegan(*common, 1)
    yield Renewed(*common, 1, 1e12)
    yield RenewalMissed(*common, 1, "timeout", 1.0)
    yield Overrun(*common, 1)
    yield CampaignFailed(*common, "timeout")
    yield TermEnded(*common, 1, "denied", False)


def test_each_event_is_counted_where_it_belongs() -> None:
    metrics = Metrics()
    for event in every_event("orders"):
        metrics.event(event)
    found = metrics.snapshot()
    assert histogram(found, "tenure_slot_late_seconds", "orders", "nightly").counts[2] == 1
    assert {key: value for key, value in found.items() if not isinstance(value, Histogram)} == {
        ("tenure_messages_failed", ("orders",)): 1.0,
        ("tenure_messages_dead", ("orders", "max_deliveries")): 1.0,
        ("tenure_messages_given_back", ("orders",)): 3.0,
        ("tenure_locks_lost", ("orders", "denied")): 1.0,
        ("tenure_locks_lost", ("orders", "stalled")): 1.0,
        ("tenure_handlers_overran", ("orders",)): 1.0,
        ("tenure_store_unanswered", ("orders",)): 1.0,
        ("tenure_slots_sent", ("orders", "nightly")): 1.0,
        ("tenure_slots_skipped", ("orders", "nightly")): 1.0,
        ("tenure_terms", ("orders",)): 1.0,
        ("tenure_renewals_missed", ("orders",)): 1.0,
        ("tenure_overruns", ("orders",)): 1.0,
        ("tenure_campaigns_failed", ("orders",)): 1.0,
        ("tenure_terms_ended", ("orders", "denied")): 1.0,
        ("tenure_leader", ("orders",)): 0.0,
    }


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("max_deliveries", "max_deliveries"),
        ("expired", "expired"),
        ("undecodable", "undecodable"),
        ("customer 4711 unknown", "rejected"),
        ("", "rejected"),
    ],
)
def test_reasons_that_handlers_invent_are_one(reason: str, label: str) -> None:
    metrics = Metrics()
    metrics.event(MessageDied(0.0, "orders", "me", "id", 1, 1, reason))
    assert metrics.snapshot() == {("tenure_messages_dead", ("orders", label)): 1.0}


def test_a_candidate_that_stands_by_shows_that_it_does_not_lead() -> None:
    metrics = Metrics()
    metrics.event(StandingBy(0.0, "chair", "a", "b", 1))
    assert metrics.snapshot() == {("tenure_leader", ("chair",)): 0.0}


def test_a_program_leads_while_any_of_its_candidates_does() -> None:
    """The next candidate of the same program may begin its term before the last one has ended its own."""
    metrics = Metrics()

    def leads() -> float | Histogram:
        return metrics.snapshot()["tenure_leader", ("chair",)]

    metrics.event(TermBegan(0.0, "chair", "a", 1))
    metrics.event(TermBegan(0.0, "chair", "b", 2))
    metrics.event(Renewed(0.0, "chair", "b", 2, 1e12))
    metrics.event(TermEnded(0.0, "chair", "a", 1, "denied", False))
    assert leads() == 1.0
    assert ("tenure_term_seconds_left", ("chair",)) in metrics.snapshot()
    metrics.event(TermEnded(0.0, "chair", "b", 2, "stopped", True))
    assert leads() == 0.0
    assert ("tenure_term_seconds_left", ("chair",)) not in metrics.snapshot()


def test_a_term_that_is_over_has_no_negative_time_left() -> None:
    metrics = Metrics()
    metrics.event(TermBegan(0.0, "chair", "a", 1))
    metrics.event(Renewed(0.0, "chair", "a", 1, -5.0))
    assert metrics.snapshot()["tenure_term_seconds_left", ("chair",)] == 0.0


@pytest.mark.parametrize("kind", ["queue", "name", "schedule"])
def test_so_many_names_are_told_apart_and_further_ones_are_one(kind: str) -> None:
    metrics = Metrics()
    for number in range(LABELS_MAX + 50):
        one = f"name {number}"
        for event in every_event("orders", one) if kind == "schedule" else every_event(one):
            metrics.event(event)
        if kind == "queue":
            metrics.sent(one, 1, 0.1)
            metrics.received(one, [delivery(one)])
            handled = metrics.handling(one)
            handled(delivery(one), 0.1, "completed")
    found = metrics.snapshot()
    place = {name: family.labels.index(kind) for name, family in FAMILIES.items() if kind in family.labels}
    for metric in {name for name, _ in found} & place.keys():
        labels = {labels[place[metric]] for name, labels in found if name == metric}
        assert len(labels) == LABELS_MAX + 1, metric
        assert OTHER in labels
    if kind == "queue":
        assert found["tenure_messages_sent", (OTHER,)] == 50.0
        assert histogram(found, "tenure_handler_seconds", OTHER).counts[5] == 50


def test_the_partitions_of_a_group_are_one_and_so_are_its_members() -> None:
    metrics = Metrics()
    names = [f"orders.partition-{number}" for number in range(1_000)] + ["orders.member-3", "orders.partition-x"]
    for token, name in enumerate(names):
        metrics.event(TermBegan(1.0, name, "a", token))
    metrics.event(TermEnded(2.0, "orders.partition-7", "a", 7, "ended", True))
    found = metrics.snapshot()
    leading = {labels: value for (name, labels), value in found.items() if name == "tenure_leader"}
    assert leading == {("orders.partition-*",): 999.0, ("orders.member-*",): 1.0, ("orders.partition-x",): 1.0}
    assert found["tenure_terms", ("orders.partition-*",)] == 1_000.0


def test_the_reply_queues_of_processes_are_one() -> None:
    metrics = Metrics()
    for number in range(1_000):
        metrics.sent(f"orders.replies.{number:016x}", 1, 0.0)
    metrics.sent("orders.replies.short", 1, 0.0)
    sent = {labels: value for (name, labels), value in metrics.snapshot().items() if name == "tenure_messages_sent"}
    assert sent == {("orders.replies",): 1_000.0, ("orders.replies.short",): 1.0}


@pytest.mark.parametrize("value", [0.0, 0.005, 0.0051, 0.1, 10.0, 10.1, 1e9])
def test_a_value_is_in_the_bucket_with_the_least_bound_that_is_not_below_it(value: float) -> None:
    metrics = Metrics()
    metrics.sent("orders", 1, value)
    metrics.handling("orders")(delivery(), value, "completed")
    bounds = (*FAMILIES["tenure_handler_seconds"].bounds, math.inf)
    expected = min(place for place, bound in enumerate(bounds) if value <= bound)
    for name in ("tenure_send_seconds", "tenure_handler_seconds"):
        found = histogram(metrics.snapshot(), name, "orders")
        assert (found.counts.index(1), sum(found.counts), found.total) == (expected, 1, value)


def test_the_wait_is_that_of_the_first_delivery_and_never_negative() -> None:
    metrics = Metrics()
    handled = metrics.handling("orders")
    handled(delivery(enqueued_at=time.time() + 1_000.0), 0.0, "completed")  # the store's clock is ahead
    handled(delivery(enqueued_at=time.time() - 45.0), 0.0, "completed")
    handled(delivery(enqueued_at=time.time() - 45.0, count=2), 0.0, "completed")
    found = metrics.snapshot()
    waits = histogram(found, "tenure_message_wait_seconds", "orders")
    assert waits.counts == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert 45.0 <= waits.total < 60.0
    assert found["tenure_messages_redelivered", ("orders",)] == 1.0
    assert found["tenure_messages_handled", ("orders", "completed")] == 3.0


def test_no_value_is_lost_when_threads_count_at_once(request: pytest.FixtureRequest) -> None:
    metrics = Metrics()
    threads, each = 4, 2_000
    together = threading.Barrier(threads + 1)
    before = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(before))
    sys.setswitchinterval(1e-6)
    one = delivery()

    def count() -> None:
        together.wait()
        handled = metrics.handling("orders")
        for _ in range(each):
            metrics.sent("orders", 1, 0.1)
            metrics.received("orders", [one])
            metrics.event(MessageFailed(0.0, "orders", "me", "id", 1, 1, "", 0.0))
            handled(one, 0.1, "completed")

    working = [threading.Thread(target=count) for _ in range(threads)]
    for thread in working:
        thread.start()
    together.wait()
    sums: list[Any] = []
    while any(thread.is_alive() for thread in working):
        sums.append(metrics.snapshot().get(("tenure_messages_sent", ("orders",)), 0.0))
    assert sums == sorted(sums)  # they never fell
    found = metrics.snapshot()
    for key in (
        ("tenure_messages_sent", ("orders",)),
        ("tenure_messages_received", ("orders",)),
        ("tenure_messages_failed", ("orders",)),
        ("tenure_messages_handled", ("orders", "completed")),
    ):
        assert found[key] == threads * each, key
    assert sum(histogram(found, "tenure_handler_seconds", "orders").counts) == threads * each
    assert sum(histogram(found, "tenure_send_seconds", "orders").counts) == threads * each


def test_a_snapshot_that_was_taken_is_not_changed_by_later_values() -> None:
    metrics = Metrics()
    handled = metrics.handling("orders")
    metrics.sent("orders", 1, 0.1)
    handled(delivery(), 0.1, "completed")
    found = metrics.snapshot()
    before = packed(found)
    metrics.sent("orders", 1, 0.1)
    handled(delivery(), 0.1, "completed")
    combined([found, metrics.snapshot()])
    assert packed(found) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_by_fork_counts_on_although_another_thread_counted_then() -> None:
    script = """
import os, signal
from tenure.telemetry import Metrics

metrics = Metrics()
metrics._lock.acquire()  # as a thread that counts just now
child = os.fork()
if child == 0:
    signal.alarm(20)
    metrics.sent("orders", 1, 0.1)
    os._exit(0 if metrics.snapshot()["tenure_messages_sent", ("orders",)] == 1.0 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- Prometheus ---


def read(text: bytes) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text.decode())}


def filled(queues: Iterable[str]) -> Metrics:
    metrics = Metrics()
    for queue in queues:
        metrics.sent(queue, 2, 0.1)
        metrics.received(queue, [delivery(queue)])
        metrics.handling(queue)(delivery(queue), 0.2, "abandoned")
        for event in every_event(queue):
            metrics.event(event)
    return metrics


def test_prometheus_reads_every_metric_with_its_kind_its_help_and_its_labels() -> None:
    pytest.importorskip("prometheus_client")
    from tenure._telemetry.prometheus import exposed

    snapshot: Snapshot = {}
    for name, family in FAMILIES.items():
        labels = tuple(f"{label} of it" for label in family.labels)
        if family.kind == "histogram":
            snapshot[name, labels] = Histogram([1] * (len(family.bounds) + 1), 12.5)
        else:
            snapshot[name, labels] = 3.0
    text, kind = exposed(snapshot)
    assert kind.startswith("text/plain")
    found = read(text)
    assert set(found) == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert (found[name].type, found[name].documentation) == (family.kind, family.help)
        assert family.help.endswith(".")
        expected = {label: f"{label} of it" for label in family.labels}
        samples = found[name].samples
        if family.kind == "histogram":
            buckets = [one for one in samples if one.name == f"{name}_bucket"]
            assert [float(one.labels["le"]) for one in buckets] == [*family.bounds, math.inf]
            assert [one.value for one in buckets] == list(range(1, len(family.bounds) + 2))
            assert all({**expected, "le": one.labels["le"]} == one.labels for one in buckets)
            others = {one.name: one.value for one in samples if one not in buckets}
            assert others == {f"{name}_sum": 12.5, f"{name}_count": len(family.bounds) + 1}
        else:
            (sample,) = samples
            assert sample.name == (f"{name}_total" if family.kind == "counter" else name)
            assert (sample.labels, sample.value) == (expected, 3.0)


def test_metrics_without_values_are_there_with_their_help() -> None:
    pytest.importorskip("prometheus_client")
    from tenure._telemetry.prometheus import exposed

    text, _ = exposed({})
    assert set(read(text)) == set(FAMILIES)


@pytest.mark.parametrize("queue", HOSTILE)
def test_hostile_names_come_through(queue: str) -> None:
    pytest.importorskip("prometheus_client")
    from tenure._telemetry.prometheus import exposed

    text, _ = exposed(filled([queue, "orders"]).snapshot())
    found = read(text)
    sent = {one.labels["queue"]: one.value for one in found["tenure_messages_sent"].samples}
    assert sent == {queue: 2.0, "orders": 2.0}
    assert {one.labels["name"] for one in found["tenure_terms"].samples} == {queue, "orders"}


def test_a_registry_of_a_program_shows_the_present_values() -> None:
    client = pytest.importorskip("prometheus_client")
    import tenure.telemetry

    metrics = Metrics()
    registry = client.CollectorRegistry()
    registry.register(tenure.telemetry.PrometheusCollector(metrics.snapshot))
    for count in (1.0, 2.0):
        metrics.sent("orders", 1, 0.1)
        assert registry.get_sample_value("tenure_messages_sent_total", {"queue": "orders"}) == count
    with pytest.raises(ValueError, match="Duplicated"):  # it says which metrics it has
        registry.register(tenure.telemetry.PrometheusCollector(metrics.snapshot))

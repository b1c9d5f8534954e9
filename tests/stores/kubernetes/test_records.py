"""The record of a Lease under any sequence of writes, ours and foreign ones; and names for any text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._backends.kubernetes import records
from tenure._backends.kubernetes.names import fitting_name, require_lease_name
from tenure.errors import ConfigError

Json = dict[str, Any]

BEGAN = datetime(2026, 11, 23, 6, tzinfo=UTC)


class Server:
    """One Lease, as a server keeps it, and the two processes that acquire it; each step takes a second."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.now = BEGAN
        self.seen = [0, 0]  # the newest token that each process has seen
        self.granted: list[int] = []
        self.holders = 0

    def step(self, kind: str) -> None:
        self.now += timedelta(seconds=1)
        if kind.startswith("acquire"):
            self.acquire(int(kind[-1]))
        elif kind == "go takes":
            self.foreign_take(raised=1)
        elif kind == "python takes":
            self.foreign_take(raised=0)
        elif self.lease is not None:
            getattr(self, kind.replace(" ", "_"))(self.lease)

    def acquire(self, process: int) -> None:
        self.holders += 1
        holder, old = f"ours#{self.holders}", self.lease
        if old is not None:
            self.seen[process] = max(self.seen[process], records.token_of(old))
        lease = old or records.new_lease("x", "default")
        self.lease = records.acquired(lease, holder, 15.0, {"a": "b"}, after=self.seen[process], now=self.now)
        if old is None:
            self.lease["metadata"] |= {"creationTimestamp": f"{self.now:%Y-%m-%dT%H:%M:%SZ}", "uid": str(self.holders)}
        token = records.token_of(self.lease)
        assert records.grant_of("x", self.lease).holder == holder
        assert records.is_ours(self.lease)
        assert records.metadata_of(self.lease) == {"a": "b"}
        assert not records.is_asked_to_resign(self.lease)
        assert token > max(self.granted, default=0)
        self.seen[process] = token
        self.granted.append(token)

    def renewal(self, lease: Json) -> None:
        if records.is_ours(lease):
            new = records.renewed(lease, 15.0, left=7.2, now=self.now)
            assert records.grant_of("x", new) == records.grant_of("x", lease)
            assert records.record_of(new) != records.record_of(lease)
            assert new["spec"]["renewTime"][:19] != lease["spec"]["renewTime"][:19]
            self.lease = new

    def release(self, lease: Json) -> None:
        if records.is_ours(lease):
            self.lease = records.released(lease, now=self.now)
            assert records.holder_of(self.lease) == ""
            assert records.token_of(self.lease) == records.token_of(lease)

    def request_to_resign(self, lease: Json) -> None:
        if records.is_ours(lease):
            self.lease = records.asked_to_resign(lease)
            assert records.is_asked_to_resign(self.lease)
            assert records.record_of(self.lease) == records.record_of(lease)

    def foreign_take(self, *, raised: int) -> None:
        self.holders += 1
        time = records.micro_time(self.now)
        if self.lease is None:
            metadata = {"creationTimestamp": f"{self.now:%Y-%m-%dT%H:%M:%SZ}", "uid": str(self.holders)}
            self.lease, transitions = {"metadata": metadata}, 0
        else:
            transitions = self.lease["spec"].get("leaseTransitions", 0) + raised
        self.lease["spec"] = {
            "holderIdentity": f"foreign-{self.holders}",
            "leaseDurationSeconds": 15,
            "acquireTime": time,
            "renewTime": time,
            "leaseTransitions": transitions,
        }
        assert not records.is_ours(self.lease)
        assert records.metadata_of(self.lease) == {}
        assert records.token_of(self.lease) > max(self.granted, default=0)

    def foreign_release(self, lease: Json) -> None:
        lease["spec"]["holderIdentity"] = ""

    def transitions_lowered(self, lease: Json) -> None:
        lease["spec"]["leaseTransitions"] = 0

    def annotations_removed(self, lease: Json) -> None:
        lease["metadata"].pop("annotations", None)

    def deletion(self, lease: Json) -> None:
        self.lease = None


OURS = ["acquire 0", "acquire 1", "renewal", "release", "request to resign"]


@pytest.mark.parametrize(
    "foreign",
    [
        ["go takes", "python takes", "foreign release", "transitions lowered", "deletion"],
        ["go takes", "foreign release", "annotations removed", "deletion"],
    ],
    ids=["that lower the transitions", "that remove annotations"],
)
@given(data=st.data())
def test_tokens_rise_through_any_sequence_of_writes(foreign: list[str], data: st.DataObject) -> None:
    server = Server()
    for step in data.draw(st.lists(st.sampled_from(OURS + foreign), max_size=40)):
        server.step(step)


@given(
    renewals=st.lists(st.floats(0.0, 3.0), max_size=40),
    began=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),
)
def test_each_renewal_is_in_another_second_and_hardly_ahead(renewals: list[float], began: datetime) -> None:
    now = began.replace(tzinfo=UTC)
    lease = records.acquired(records.new_lease("x", "default"), "ann#1", 15.0, {}, after=0, now=now)
    for pause in renewals:
        now += timedelta(seconds=pause)
        new = records.renewed(lease, 15.0, left=0.0, now=now)
        assert new["spec"]["renewTime"][:19] != lease["spec"]["renewTime"][:19]
        written = datetime.fromisoformat(new["spec"]["renewTime"])
        assert now <= written <= now + records.AHEAD_MAX
        lease = new


@given(st.datetimes(datetime(1970, 1, 2), datetime(9000, 1, 1)))
def test_a_time_has_always_six_digits(moment: datetime) -> None:
    written = records.micro_time(moment.replace(tzinfo=UTC))
    assert len(written) == len("2006-01-02T15:04:05.000000Z")
    assert datetime.fromisoformat(written) == moment.replace(tzinfo=UTC)


@given(st.text(max_size=400))
def test_a_fitting_name_always_fits(text: str) -> None:
    require_lease_name(fitting_name(text))
    try:
        require_lease_name(text)
    except ConfigError:
        pass
    else:
        assert fitting_name(text) == text

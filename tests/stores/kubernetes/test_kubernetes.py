"""Leases of Kubernetes: the record's bytes, tokens beside foreign clients, and what a server may answer."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from tenure._backends import kubernetes
from tenure._backends.kubernetes import client as client_module
from tenure._backends.kubernetes import leases as leases_module
from tenure._backends.kubernetes import observations, records, watch
from tenure._election.store import Hint, LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure._runtime import shared_hints
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing._conformance.leases.following import following
from tenure.testing.faultproxy import FaultProxy
from tests.clocks import TurnedClock
from tests.connections import connections_to
from tests.explained import facts_by_name
from tests.servers import Kubernetes, patient, private, shared
from tests.servers.kubernetes import lease_path

Json = dict[str, Any]

pytestmark = pytest.mark.asyncio

NOW = datetime(2026, 11, 23, 6, 0, 0, 120, tzinfo=UTC)


@pytest.fixture(name="server")
def _server() -> Iterator[Kubernetes]:
    server = shared(Kubernetes)
    server.forget()
    yield server
    server.heal()
    server.set(roles=None, fields=[], bookmark_every=60.0)


@pytest.fixture(name="name")
def _name(request: pytest.FixtureRequest) -> str:
    return f"e-{abs(hash(request.node.nodeid)):x}-{abs(hash(request)):x}"


@pytest.fixture(name="clock")
def _clock() -> TurnedClock:
    return TurnedClock()


@asynccontextmanager
async def opened(url: str, clock: TurnedClock | None = None) -> AsyncIterator[kubernetes.KubernetesBackend]:
    backend = kubernetes.open(Url.parse(patient(url)), clock=clock)
    try:
        yield backend
    finally:
        await backend.close()


async def claim(store: LeaseStore, name: str, holder: str = "ann#1", ttl: float = 15.0) -> Grant:
    answer = await store.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


class ClientGo:
    """A foreign candidate that writes the Lease as client-go's LeaseLock does, in its bytes."""

    def __init__(self, server: Kubernetes, name: str, identity: str, duration: int = 15) -> None:
        self._server = server
        self._name = name
        self._identity = identity
        self._duration = duration
        self._at = datetime.now(UTC)

    def take(self) -> Json:
        """Create the Lease, or take it over, whoever has it."""
        status, found = self._server.ask("GET", lease_path(self._name))
        if status == 404:
            return self._write({"metadata": {"name": self._name, "namespace": "default"}}, transitions=0)
        same = found["spec"].get("holderIdentity") == self._identity
        before = found["spec"].get("leaseTransitions", 0)
        acquired = found["spec"]["acquireTime"] if same else None
        return self._write(found, transitions=before if same else before + 1, acquired=acquired)

    def release(self) -> Json:
        """Release it."""
        found = self._server.lease(self._name)
        return self._write(found, transitions=found["spec"]["leaseTransitions"], identity="", duration=1)

    def _write(
        self,
        lease: Json,
        *,
        transitions: int,
        acquired: str | None = None,
        identity: str | None = None,
        duration: int | None = None,
    ) -> Json:
        self._at += timedelta(seconds=1)
        now = records.micro_time(self._at)
        lease["spec"] = {  # the whole spec is made anew, in the order of Go's struct
            "holderIdentity": self._identity if identity is None else identity,
            "leaseDurationSeconds": duration or self._duration,
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        return self._server.put(lease)


def whole_second(lease: Json) -> str:
    return str(lease["spec"]["renewTime"])[:19]


# --- the record --------------------------------------------------------------------------------------------------

CREATED = (
    '{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "golden", "namespace": "default", '
    '"annotations": {"tenure/holder": "ann#1", "tenure/token": "0", '
    '"tenure/metadata": "{\\"url\\": \\"http://ann\\"}"}, '
    '"labels": {"tenure/election": "true"}}, "spec": {"holderIdentity": "ann#1", "leaseDurationSeconds": 15, '
    '"acquireTime": "2026-11-23T06:00:00.000120Z", "renewTime": "2026-11-23T06:00:00.000120Z", "leaseTransitions": 0}}'
)
RENEWED = (
    '{"holderIdentity": "ann#1", "leaseDurationSeconds": 15, "acquireTime": "2026-11-23T06:00:00.000120Z", '
    '"renewTime": "2026-11-23T06:00:05.000000Z", "leaseTransitions": 0}'
)
RELEASED = (
    '{"holderIdentity": "", "leaseDurationSeconds": 1, "acquireTime": "2026-11-23T06:00:06.500000Z", '
    '"renewTime": "2026-11-23T06:00:06.500000Z", "leaseTransitions": 0}'
)


async def test_the_bytes_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [NOW, datetime(2026, 11, 23, 6, 0, 5, tzinfo=UTC), datetime(2026, 11, 23, 6, 0, 6, 500_000, tzinfo=UTC)]
    monkeypatch.setattr(leases_module, "_wall_clock", lambda: moments.pop(0))
    with private(Kubernetes) as server:
        async with opened(server.url) as backend:
            answer = await backend.leases.acquire("golden", "ann#1", 15.0, {"url": "http://ann"})
            assert isinstance(answer, Granted)
            await backend.leases.renew([answer.grant], 15.0)
            await backend.leases.release(answer.grant)
        bodies = [one["body"] for one in server.requests() if one["verb"] in ("create", "update")]
    assert bodies[0] == CREATED
    assert [json.dumps(json.loads(body)["spec"]) for body in bodies[1:]] == [RENEWED, RELEASED]


@pytest.mark.parametrize(("ttl", "written"), [(1.0, 1), (1.2, 2), (15.0, 15), (86_399.1, 86_400)])
async def test_a_duration_is_rounded_up(server: Kubernetes, name: str, ttl: float, written: int) -> None:
    async with opened(server.url) as backend:
        await claim(backend.leases, name, ttl=ttl)
        assert server.lease(name)["spec"]["leaseDurationSeconds"] == written


async def test_each_renewal_is_seen_by_client_go(server: Kubernetes, name: str) -> None:
    """It compares records in whole seconds, so each write must differ from the one before in its seconds."""
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        seconds = [whole_second(server.lease(name))]
        for _ in range(6):
            assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]
            seconds.append(whole_second(server.lease(name)))
            ahead = datetime.fromisoformat(server.lease(name)["spec"]["renewTime"]) - datetime.now(UTC)
            assert ahead <= records.AHEAD_MAX
        assert all(earlier != later for earlier, later in pairwise(seconds)), seconds


async def test_a_request_to_resign_is_no_renewal(server: Kubernetes, name: str, clock: TurnedClock) -> None:
    async with opened(server.url) as ann, opened(server.url, clock) as bob:
        await claim(ann.leases, name)
        assert isinstance(await bob.leases.acquire(name, "bob#1", 15.0), HeldBy)
        before = server.lease(name)["spec"]
        clock.turned += 14.0
        assert await bob.leases.ask_to_resign(name)
        assert server.lease(name)["spec"] == before
        clock.turned += 1.5
        assert isinstance(await bob.leases.acquire(name, "bob#1", 15.0), Granted)


async def test_what_others_have_written_is_kept(server: Kubernetes, name: str) -> None:
    server.set(fields=["aFieldOfTheFuture"])
    owner = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "web",
        "uid": "4b9c7c0e-0000-4000-8000-000000000000",
    }
    made: Json = {
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {"example.com/note": "Ü", "tenure/of-a-newer-version": "x"},
            "labels": {"team": "payments"},
            "ownerReferences": [owner],
            "finalizers": ["example.com/wait"],
        },
        "spec": {"aFieldOfTheFuture": "kept"},
    }
    server.put(copy.deepcopy(made))
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        await backend.leases.renew([grant], 15.0)
        await backend.leases.ask_to_resign(name)
        await backend.leases.release(grant)
    found = server.lease(name)
    assert found["spec"]["aFieldOfTheFuture"] == "kept"
    for field in ("ownerReferences", "finalizers"):
        assert found["metadata"][field] == made["metadata"][field]
    assert made["metadata"]["annotations"].items() <= found["metadata"]["annotations"].items()
    assert found["metadata"]["labels"] == {"team": "payments", "tenure/election": "true"}


async def test_a_lease_without_a_spec_is_free(server: Kubernetes, name: str) -> None:
    server.put({"metadata": {"name": name}})
    async with opened(server.url) as backend:
        assert isinstance(await backend.leases.inspect(name), Vacant)
        assert (await claim(backend.leases, name)).token > 0


# --- tokens beside foreign clients -------------------------------------------------------------------------------


async def test_tokens_rise_through_foreign_terms(server: Kubernetes, name: str, clock: TurnedClock) -> None:
    other = ClientGo(server, name, "go-1")
    async with opened(server.url, clock) as backend:
        store = backend.leases
        tokens = [(await claim(store, name)).token]
        other.take()
        for _ in range(3):
            held = await store.acquire(name, "ann#2", 15.0)
            assert isinstance(held, HeldBy)
            assert (held.holder, held.metadata) == ("go-1", {})
            tokens.append(held.token)
            other.release()
            assert await store.inspect(name) == Vacant(name, tokens[-1])
            grant = await claim(store, name, "ann#2")
            tokens.append(grant.token)
            clock.turned += 16.0
            other.take()  # after an expiry
            assert await store.renew([grant], 15.0) == [Lost(grant)]
            assert await store.release(grant) == Lost(grant)
        assert tokens == sorted(set(tokens)), tokens


async def test_a_lease_that_a_foreign_client_made_can_be_led(server: Kubernetes, name: str) -> None:
    other = ClientGo(server, name, "go-1")
    other.take()
    async with opened(server.url) as backend:
        held = await backend.leases.acquire(name, "ann#1", 15.0)
        assert isinstance(held, HeldBy)
        assert name not in await backend.leases.names()
        other.release()
        grant = await claim(backend.leases, name)
        assert grant.token > held.token
        assert server.lease(name)["spec"]["leaseTransitions"] == 1
        assert name in await backend.leases.names()


async def test_a_foreign_leader_is_not_asked_to_resign(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        await backend.leases.release(await claim(backend.leases, name))
        ClientGo(server, name, "go-1").take()
        before = server.lease(name)
        assert await backend.leases.ask_to_resign(name) is False
        assert server.lease(name) == before


async def test_a_foreign_restart_under_the_same_identity_is_the_same_term(server: Kubernetes, name: str) -> None:
    other = ClientGo(server, name, "go-1")
    other.take()
    async with opened(server.url) as backend:
        first = await backend.leases.inspect(name)
        other.take()
        second = await backend.leases.inspect(name)
    assert isinstance(first, HeldBy)
    assert isinstance(second, HeldBy)
    assert first.token == second.token


def lowered(lease: Json) -> None:
    lease["spec"]["leaseTransitions"] = 0


def without_transitions(lease: Json) -> None:
    del lease["spec"]["leaseTransitions"]


def without_annotations(lease: Json) -> None:
    del lease["metadata"]["annotations"]


def without_either(lease: Json) -> None:
    without_transitions(lease)
    without_annotations(lease)
    del lease["metadata"]["labels"]


@pytest.mark.parametrize("change", [lowered, without_transitions, without_annotations, without_either])
async def test_tokens_rise_whatever_a_foreign_client_drops(
    server: Kubernetes, name: str, clock: TurnedClock, change: Any
) -> None:
    async with opened(server.url, clock) as backend:
        grant = await claim(backend.leases, name)
        for number in range(3):  # so that the number of transitions matters
            await backend.leases.release(grant)
            grant = await claim(backend.leases, name, f"ann#{number}")
        lease = server.lease(name)
        lease["spec"] |= {"holderIdentity": "python-1", "leaseDurationSeconds": 15}
        change(lease)
        server.put(lease)
        held = await backend.leases.acquire(name, "ann#4", 15.0)
        assert isinstance(held, HeldBy)
        clock.turned += 16.0
        new = await claim(backend.leases, name, "ann#4")
        assert new.token > max(grant.token, held.token)
        assert server.lease(name)["spec"]["leaseTransitions"] > 0
        assert await backend.leases.renew([new], 15.0) == [Granted(new)]


async def test_a_claim_survives_that_its_annotations_are_removed(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        for number in range(3):
            await backend.leases.release(await claim(backend.leases, name, f"ann#{number}"))
        grant = await claim(backend.leases, name, "ann#4")
        lease = server.lease(name)
        without_annotations(lease)
        server.put(lease)
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]
        assert server.lease(name)["metadata"]["annotations"]["tenure/token"] == str(grant.token)


async def test_tokens_rise_though_the_lease_was_deleted(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        for number in range(3):
            await ann.leases.release(await claim(ann.leases, name, f"ann#{number}"))
        grant = await claim(ann.leases, name, "ann#4")
        assert isinstance(await bob.leases.acquire(name, "bob#1", 15.0), HeldBy)
        server.delete(name)
        assert await ann.leases.renew([grant], 15.0) == [Lost(grant)]
        assert await ann.leases.release(grant) == Lost(grant)
        assert await ann.leases.inspect(name) == Vacant(name, grant.token)
        new = await claim(bob.leases, name, "bob#1")  # within the same second
        assert new.token > grant.token
        held = await ann.leases.inspect(name)
        assert isinstance(held, HeldBy)
        assert held.token == new.token


async def test_tokens_rise_for_a_process_that_never_saw_the_deleted_lease(server: Kubernetes, name: str) -> None:
    created = records.micro_time(datetime.now(UTC) - timedelta(minutes=1))
    old = records.acquired(
        {"metadata": {"name": name, "creationTimestamp": created, "uid": "1"}, "spec": {"leaseTransitions": 30}},
        "ann#1",
        15.0,
        {},
        after=0,
        now=NOW,
    )
    async with opened(server.url) as backend:
        assert (await claim(backend.leases, name)).token > records.token_of(old)


async def test_a_late_write_does_not_create_a_deleted_lease(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        server.delete(name)
        assert await backend.leases.renew([grant], 15.0) == [Lost(grant)]
        assert server.ask("GET", lease_path(name))[0] == 404


@pytest.mark.parametrize("ttl", [1.0, 15.0])
async def test_a_duration_that_was_edited_is_corrected_by_the_next_renewal(
    server: Kubernetes, name: str, ttl: float
) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name, ttl=ttl)
        for duration in (60, 2**31 - 1, 1):
            lease = server.lease(name)
            lease["spec"]["leaseDurationSeconds"] = duration
            server.put(lease)
            assert await backend.leases.renew([grant], ttl) == [Granted(grant)]
            assert server.lease(name)["spec"]["leaseDurationSeconds"] == ttl


async def test_a_claim_ends_at_once_as_its_watch_tells_that_its_lease_was_deleted(
    server: Kubernetes, name: str
) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        grant = await claim(ann.leases, name)
        assert isinstance(await bob.leases.inspect(name), HeldBy)
        heard = Heard(ann.leases, name)
        await heard.one_more()
        await until(lambda: version_seen(ann, name) is not None)
        server.delete(name)
        await heard.one_more()
        server.forget()
        assert await ann.leases.renew([grant], 15.0) == [Lost(grant)]
        assert server.requests() == []  # others may lead by now: no answer is waited for
        new = await claim(bob.leases, name, "bob#1")
        assert new.token > grant.token
        assert await ann.leases.renew([grant], 15.0) == [Lost(grant)]
        assert await ann.leases.renew([new], 15.0) == [Granted(new)]
        await heard.close()


async def test_the_next_claim_is_not_lost_with_a_deleted_lease(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        heard = Heard(backend.leases, name)
        await heard.one_more()
        server.delete(name)
        await heard.one_more()
        new = await claim(backend.leases, name)  # by the same holder
        assert await backend.leases.renew([grant, new], 15.0) == [Lost(grant), Granted(new)]
        await heard.close()


# --- expiry ------------------------------------------------------------------------------------------------------


async def test_the_duration_of_the_record_counts(server: Kubernetes, name: str, clock: TurnedClock) -> None:
    ClientGo(server, name, "go-1", duration=60).take()
    async with opened(server.url, clock) as backend:
        held = await backend.leases.acquire(name, "ann#1", 15.0)
        assert isinstance(held, HeldBy)
        assert held.remaining is not None
        assert 59 < held.remaining <= 60
        clock.turned += 59.0
        assert isinstance(await backend.leases.acquire(name, "ann#1", 15.0), HeldBy)
        clock.turned += 1.0
        assert isinstance(await backend.leases.acquire(name, "ann#1", 15.0), Granted)


async def test_times_of_other_machines_are_not_compared(server: Kubernetes, name: str, clock: TurnedClock) -> None:
    lease: Json = {"metadata": {"name": name}, "spec": {"holderIdentity": "go-1", "leaseDurationSeconds": 15}}
    lease["spec"] |= {"renewTime": "1999-01-01T00:00:00.000000Z", "acquireTime": "2999-01-01T00:00:00.000000Z"}
    server.put(lease)
    async with opened(server.url, clock) as backend:
        assert isinstance(await backend.leases.acquire(name, "ann#1", 15.0), HeldBy)
        clock.turned += 14.0
        assert isinstance(await backend.leases.acquire(name, "ann#1", 15.0), HeldBy)
        clock.turned += 1.0
        assert isinstance(await backend.leases.acquire(name, "ann#1", 15.0), Granted)


async def test_a_first_question_does_not_tell_how_long_a_lease_lasts(server: Kubernetes, name: str) -> None:
    other = ClientGo(server, name, "go-1")
    other.take()
    async with opened(server.url) as backend:
        first = await backend.leases.inspect(name)
        other.take()
        second = await backend.leases.inspect(name)
    assert isinstance(first, HeldBy)
    assert isinstance(second, HeldBy)
    assert first.remaining is None
    assert second.remaining is not None
    assert 14 < second.remaining <= 15


async def test_a_suspended_candidate_looks_before_it_takes_over(
    server: Kubernetes, name: str, clock: TurnedClock
) -> None:
    async with opened(server.url) as ann, opened(server.url, clock) as bob:
        grant = await claim(ann.leases, name)
        assert isinstance(await bob.leases.acquire(name, "bob#1", 15.0), HeldBy)
        assert await ann.leases.renew([grant], 15.0) == [Granted(grant)]
        clock.turned += 100.0
        assert isinstance(await bob.leases.acquire(name, "bob#1", 15.0), HeldBy)


# --- coordinated leader election ---------------------------------------------------------------------------------


async def test_the_server_chooses_the_holder_of_a_coordinated_lease(server: Kubernetes, name: str) -> None:
    server.put({"metadata": {"name": name}, "spec": {"strategy": "OldestEmulationVersion"}})
    async with opened(server.url) as backend:
        with pytest.raises(ConfigError, match=r"spec\.strategy OldestEmulationVersion: the API server chooses"):
            await backend.leases.acquire(name, "ann#1", 15.0)
        assert not server.lease(name)["spec"].get("holderIdentity")


async def test_a_preferred_holder_ends_the_term(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        lease = server.lease(name)
        lease["spec"] |= {"strategy": "OldestEmulationVersion", "preferredHolder": "go-2"}
        server.put(lease)
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant, resign_asked=True)]
        assert server.lease(name)["spec"]["preferredHolder"] == "go-2"
        assert await backend.leases.release(grant) == Released(grant)


# --- what a server may answer ------------------------------------------------------------------------------------


async def test_a_pause_that_the_server_asks_for_is_kept(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        server.forget()
        server.fail(verb="update", status=429, retry_after=1, times=1)
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]
    first, second = [one["at"] for one in server.requests() if one["verb"] == "update"]
    assert second - first >= 1.0


async def test_a_pause_that_is_too_long_is_reported(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        server.fail(verb="update", status=429, retry_after=30)
        with pytest.raises(Unavailable, match=r"asks to wait 30 s \(429\).*FlowSchema"):
            await backend.leases.renew([grant], 15.0)
        server.heal()
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]


@pytest.mark.parametrize("status", [500, 503, 504, 507])
async def test_a_failure_of_the_server_is_no_answer(server: Kubernetes, name: str, status: int) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        full = "etcdserver: mvcc: database space exceeded"
        server.fail(verb=["create", "update"], status=status, message=full)
        with pytest.raises(Unavailable, match=f"failed with status {status}: {full}"):
            await backend.leases.renew([grant], 15.0)
        with pytest.raises(Unavailable, match=full):
            await backend.leases.acquire(f"{name}-2", "ann#1", 15.0)
        server.heal()
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]


@pytest.mark.parametrize(
    ("verb", "ask"),
    [
        ("get", lambda store, name: store.inspect(name)),
        ("create", lambda store, name: store.acquire(name, "ann#1", 15.0)),
        ("list", lambda store, name: store.names()),
    ],
)
async def test_a_missing_right_is_named(server: Kubernetes, name: str, verb: str, ask: Any) -> None:
    rights = {"get", "create", "update", "list", "watch"} - {verb}
    server.set(roles=[{"verbs": sorted(rights)}])
    async with opened(server.url) as backend:
        with pytest.raises(ConfigError) as raised:
            await ask(backend.leases, name)
    assert f"grant the verb {verb!r} on leases of coordination.k8s.io in a Role" in str(raised.value)
    assert 'User "admin" cannot' in str(raised.value)


async def test_rights_that_are_changed_later_are_asked_for_again(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        await backend.leases.renew([grant], 15.0)
        server.set(roles=[])
        with pytest.raises(Unavailable, match="it worked before, so tenure tries again"):
            await backend.leases.renew([grant], 15.0)
        server.set(roles=None)
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]


async def test_the_rights_to_one_lease_are_enough(server: Kubernetes, name: str) -> None:
    server.set(roles=[{"verbs": ["get", "update", "watch"], "names": [name]}, {"verbs": ["create"]}])
    async with opened(server.url) as backend:
        heard = Heard(backend.leases, name)
        await heard.one_more()
        grant = await claim(backend.leases, name)
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]
        await until(lambda: heard.count == 2)
        assert heard.told == [None, None]
        assert await backend.leases.release(grant) == Released(grant)
        with pytest.raises(ConfigError, match="grant the verb 'get'"):
            await backend.leases.inspect(f"{name}-2")
        await heard.close()


async def test_a_missing_namespace_is_named(server: Kubernetes, name: str) -> None:
    async with opened(server.url.replace("default", "nowhere")) as backend:
        with pytest.raises(ConfigError, match="has no namespace 'nowhere'; create it, or correct the URL"):
            await backend.leases.acquire(name, "ann#1", 15.0)


async def test_a_namespace_that_is_being_deleted_is_named(server: Kubernetes, name: str) -> None:
    why = f"leases {name!r} is forbidden: unable to create new content in namespace x because it is being terminated"
    server.fail(verb="create", status=403, message=why)
    async with opened(server.url) as backend:
        with pytest.raises(Unavailable, match=r"the namespace default on .* is being deleted"):
            await backend.leases.acquire(name, "ann#1", 15.0)


async def test_a_server_that_is_no_api_server_is_named(server: Kubernetes, name: str) -> None:
    async with opened(f"{server.url}/elsewhere") as backend:
        with pytest.raises(ConfigError, match=r"has no Leases .*: is it an API server\?"):
            await backend.leases.acquire(name, "ann#1", 15.0)


async def test_metadata_that_is_too_long_is_refused(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        with pytest.raises(ConfigError, match="Too long: must have at most 262144 bytes"):
            await backend.leases.acquire(name, "ann#1", 15.0, {"much": "x" * 262_144})


async def test_a_lease_that_always_changes_is_no_answer(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        server.fail(verb="update", status=409)
        with pytest.raises(Unavailable, match="was changed 20 times while it was renewed"):
            await backend.leases.renew([grant], 15.0)


async def test_a_release_that_was_sent_twice_is_one(server: Kubernetes, name: str) -> None:
    """aiohttp sends a PUT again on a new connection when the first one breaks."""
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        server.fail(verb="update", drop="after", times=1)
        assert await backend.leases.release(grant) == Released(grant)


async def test_a_renewal_that_was_sent_twice_is_one(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        server.fail(verb="update", drop="after", times=1)
        assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]


async def test_a_creation_whose_answer_is_lost_is_found_again(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        server.fail(verb="create", drop="after", times=1)
        with pytest.raises(Unavailable):
            await ann.leases.acquire(name, "ann#1", 15.0)
        held = await bob.leases.acquire(name, "bob#1", 15.0)
        assert isinstance(held, HeldBy)
        assert (await claim(ann.leases, name)).token == held.token


async def test_a_slow_server_is_given_up(server: Kubernetes, name: str) -> None:
    async with opened(f"{server.url}&timeout=0.3") as backend:
        await claim(backend.leases, name)
        server.fail(verb="get", delay=1.0, times=1)
        with pytest.raises(Unavailable, match=r"gave no answer within 0\.3 s \(option timeout\)"):
            await backend.leases.inspect(name)
        assert isinstance(await backend.leases.inspect(name), HeldBy)


async def test_requests_wait_for_each_other_rather_than_open_a_connection_each(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CONNECTIONS_MAX", 4)
    async with opened(server.url) as backend:
        before = connections_to(server.port)
        await asyncio.gather(*(backend.leases.inspect(f"{name}-{number}") for number in range(40)))
        assert connections_to(server.port) - before == 4


async def test_a_request_that_got_no_turn_was_not_sent(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CONNECTIONS_MAX", 1)
    async with opened(f"{server.url}&timeout=0.3") as backend:
        await backend.leases.inspect(name)
        session = backend._client._session_here()
        connections = session._http
        async with session.turns:  # another request has it
            with pytest.raises(Unavailable, match="the request was not sent"):
                await backend.leases.inspect(name)
        assert session._http is connections


async def test_a_short_lease_leaves_time_to_ask_again(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name, ttl=3.0)
        server.fail(verb="update", delay=1.5, times=1)
        with pytest.raises(Unavailable, match="within 1 s"):
            await backend.leases.renew([grant], 3.0)


async def test_names_are_read_in_pages(server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "PAGE", 2)
    async with opened(server.url) as backend:
        names = [f"{name}-{number}" for number in range(5)]
        for each in names:
            await claim(backend.leases, each)
        assert set(names) <= set(await backend.leases.names())
        server.fail(verb="list", status=410, times=1)
        assert set(names) <= set(await backend.leases.names())
        server.fail(verb="list", status=410)
        with pytest.raises(Unavailable, match="became too old"):
            await backend.leases.names()


@pytest.mark.parametrize("refused", [False, True])
async def test_many_leases_are_listed_by_a_user_who_may(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    monkeypatch.setattr(leases_module, "PAGE", 20)
    names = [f"{name}-{number}" for number in range(30)]
    ClientGo(server, names[7], "go-1").take()
    async with opened(server.url) as backend:
        grants = [await claim(backend.leases, each) for each in names[:5]]
        assert await backend.leases.ask_to_resign(names[2])
        if refused:
            server.fail(verb="list", status=403)
        server.forget()
        found = await backend.leases.inspect_many(names)
        verbs = [one["verb"] for one in server.requests()]
        assert verbs == ["list", *["get"] * 30] if refused else set(verbs) == {"list"}
        held = [one for one in found if isinstance(one, HeldBy)]
        assert [(one.name, one.holder) for one in held] == [
            *((each, "ann#1") for each in names[:5]),
            (names[7], "go-1"),
        ]
        assert [one.name for one in held if one.resign_asked] == [names[2]]
        assert [one.name for one in found] == names
        for grant in grants:  # a Lease that was noted from a list can be written
            assert await backend.leases.release(grant) == Released(grant)


# --- hints -------------------------------------------------------------------------------------------------------


class Heard:
    """Counts the hints about a name."""

    def __init__(self, store: LeaseStore, name: str) -> None:
        self.count = 0
        self.told: list[Hint] = []
        self._task = asyncio.ensure_future(self._listen(store, name))

    async def _listen(self, store: LeaseStore, name: str) -> None:
        async for hint in store.hints(name):
            self.count += 1
            self.told.append(hint)

    async def one_more(self) -> None:
        """Wait for a hint that comes from now on."""
        before = self.count
        await until(lambda: self.count > before)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def watched(server: Kubernetes, name: str, times: int = 1) -> None:
    """Wait until *name* has been watched so often."""
    await until(lambda: len(watches(server, name)) >= times)


def watches(server: Kubernetes, name: str) -> list[Json]:
    return [one for one in server.requests() if one["verb"] == "watch" and one["name"] == name and "status" in one]


async def test_a_mere_renewal_gives_no_hint(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        heard = Heard(bob.leases, name)
        await heard.one_more()  # at the beginning of the watch
        grant = await claim(ann.leases, name)
        await until(lambda: heard.count == 2)
        for _ in range(3):
            await ann.leases.renew([grant], 15.0)
        # The watch has told the renewals nevertheless: it needs no request to know how long the lease lasts.
        newest = server.lease(name)["metadata"]["resourceVersion"]
        await until(lambda: version_seen(bob, name) == newest)
        assert heard.count == 2
        await ann.leases.release(grant)
        await until(lambda: heard.count == 3)
        await heard.close()


def version_seen(backend: kubernetes.KubernetesBackend, name: str) -> str | None:
    seen = backend.leases._observed.find(name)
    return seen.lease["metadata"]["resourceVersion"] if seen is not None else None


async def test_a_watch_continues_where_it_broke_off(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann:
        grant = await claim(ann.leases, name)
        heard = Heard(ann.leases, name)
        await until(lambda: version_seen(ann, name) is not None and heard.count >= 1)
        await watched(server, name)
        count = heard.count
        server.control("end_watches")
        await watched(server, name, times=2)
        assert watches(server, name)[-1]["query"]["resourceVersion"] == version_seen(ann, name)
        await ann.leases.release(grant)
        await until(lambda: heard.count > count)
        await heard.close()


async def test_a_watch_keeps_the_pause_that_the_server_asks_for(server: Kubernetes, name: str) -> None:
    server.fail(verb="watch", name=name, status=429, retry_after=1, times=1)
    async with opened(server.url) as backend:
        heard = Heard(backend.leases, name)
        await watched(server, name, times=2)
        first, second = watches(server, name)
        assert second["at"] - first["at"] >= 1.0
        await heard.close()


async def test_watches_that_end_at_once_are_made_ever_less_often(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LASTS", (0.0, 0.0))
    async with opened(server.url) as backend:
        heard = Heard(backend.leases, name)
        await until(lambda: pauses_of(server, name)[-1:] > [0.3])
        assert len(pauses_of(server, name)) <= 10
        await heard.close()


def pauses_of(server: Kubernetes, name: str) -> list[float]:
    return [later["at"] - earlier["at"] for earlier, later in pairwise(watches(server, name))]


@pytest.mark.parametrize("inside", [True, False])
async def test_a_watch_whose_version_is_gone_begins_anew(server: Kubernetes, name: str, *, inside: bool) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        grant = await claim(ann.leases, name)
        heard = Heard(bob.leases, name)
        await watched(server, name)
        server.fail(verb="watch", name=name, status=410, inside=inside, times=1)
        server.control("end_watches")
        await watched(server, name, times=3)
        await ann.leases.release(grant)
        await until(lambda: heard.count >= 2)
        assert "resourceVersion" not in watches(server, name)[-1]["query"]
        await heard.close()


async def test_bookmarks_keep_a_quiet_watch_new(server: Kubernetes, name: str) -> None:
    server.set(bookmark_every=0.05)
    async with opened(server.url) as ann:
        heard = Heard(ann.leases, name)
        await watched(server, name)
        await claim(ann.leases, f"{name}-other")  # raises the version
        newest = server.lease(f"{name}-other")["metadata"]["resourceVersion"]
        (running,) = ann._watches.sources()
        await until(lambda: int(running._version or 0) >= int(newest))
        await heard.close()


async def test_without_the_right_to_watch_hints_are_absent(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_hints, "DEAF", (0.05, 0.05))
    server.set(roles=[{"verbs": ["get", "create", "update", "list"]}])
    async with opened(server.url) as backend:
        await claim(backend.leases, name)  # other verbs work
        heard = Heard(backend.leases, name)
        await until(lambda: heard.told == ["absent"])
        server.set(roles=None)
        await until(lambda: heard.told == ["absent", None])
        await heard.close()


async def test_names_beyond_the_limit_of_watches_have_no_hints(server: Kubernetes, name: str) -> None:
    async with opened(f"{server.url}&watches=1") as backend:
        first, second = Heard(backend.leases, name), Heard(backend.leases, f"{name}-2")
        await until(lambda: (first.told, second.told) == ([None], ["absent"]))
        await first.close()
        await second.close()
    assert not watches(server, f"{name}-2")
    assert len(watches(server, name)) == 1


async def test_a_name_beyond_the_limit_is_watched_when_another_one_is_not_any_more(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_hints, "DEAF", (0.05, 0.05))
    monkeypatch.setattr(shared_hints, "UNUSED_AFTER", 1.0)
    async with opened(f"{server.url}&watches=1") as backend:
        first, second = Heard(backend.leases, name), Heard(backend.leases, f"{name}-2")
        await until(lambda: (first.told, second.told) == ([None], ["absent"]))
        await first.close()
        await until(lambda: second.told == ["absent", None])
        await second.close()


async def test_a_watch_ends_with_its_last_listener(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_hints, "UNUSED_AFTER", 1.0)
    async with opened(server.url) as backend:
        heard = Heard(backend.leases, name)
        await watched(server, name)
        await heard.close()
        await until(lambda: not list(backend._watches.sources()))
        again = Heard(backend.leases, name)
        await again.one_more()
        await again.close()


async def test_a_watch_comes_back_with_its_server(name: str) -> None:
    with private(Kubernetes) as server:
        async with opened(server.url) as backend:
            grant = await claim(backend.leases, name)
            heard = Heard(backend.leases, name)
            await heard.one_more()
            before = heard.count
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await until(lambda: heard.count > before)
            await until(lambda: bool(watches(server, name)))
            again = heard.count
            assert await backend.leases.release(grant) == Released(grant)
            await until(lambda: heard.count > again)
            await heard.close()


# --- following renewals ------------------------------------------------------------------------------------------


async def test_one_watch_follows_a_whole_group(server: Kubernetes, name: str, clock: TurnedClock) -> None:
    async with opened(server.url) as ann, opened(server.url, clock) as bob:
        names = [f"{name}.{number}" for number in range(20)]
        async with following(bob.leases, f"{name}."):
            await watched(server, "")
            server.forget()
            grants = [await claim(ann.leases, one) for one in names]
            await claim(ann.leases, f"{name}-other")
            await ann.leases.renew(grants, 15.0)
            await until(lambda: followed(bob) == set(names))
            assert [one["verb"] for one in server.requests() if one["verb"] in ("get", "list", "watch")] == ["get"] * 21
            clock.turned += 14.0
            seen = await bob.leases.inspect_many(names)
            assert all(isinstance(one, HeldBy) for one in seen)
            clock.turned += 1.0
            assert all(isinstance(one, Vacant) for one in await bob.leases.inspect_many(names))
        bob._renewals.here()[None].end()
        assert not followed(bob)


def followed(backend: kubernetes.KubernetesBackend) -> set[str]:
    return set(backend.leases._observed._followed)


async def test_a_user_of_single_leases_is_refused_the_watch_of_all_once(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_hints, "DEAF", (300.0, 300.0))
    server.set(roles=[{"verbs": ["get", "update", "watch"], "names": [name]}, {"verbs": ["create"]}])
    async with opened(server.url) as backend:
        grant = await claim(backend.leases, name)
        async with following(backend.leases, name):
            await watched(server, "")
            assert watches(server, "")[0]["status"] == 403
            heard = Heard(backend.leases, name)
            await heard.one_more()
            assert await backend.leases.release(grant) == Released(grant)
            await until(lambda: heard.count == 2)
            assert "absent" not in heard.told
            assert isinstance(await backend.leases.inspect(name), Vacant)
            await heard.close()
        assert len(watches(server, "")) == 1


async def test_what_is_followed_is_bounded(monkeypatch: pytest.MonkeyPatch, clock: TurnedClock) -> None:
    monkeypatch.setattr(observations, "FOLLOWED_MAX", 3)
    seen = observations.Observations(clock)
    leases = {name: {"metadata": {"name": name}, "spec": {"renewTime": "1"}} for name in "abcde"}
    seen.note("asked", {"metadata": {"name": "asked"}, "spec": {}})
    for name, lease in [*leases.items(), ("c", {**leases["c"], "spec": {"renewTime": "2"}})]:
        seen.note_followed(name, lease)
    assert list(seen._followed) == ["d", "e", "c"]  # of too many, those that were renewed last
    noted_at = seen.now
    clock.turned += 5.0
    assert seen.note("d", leases["d"]).since <= noted_at
    assert seen.note("a", leases["a"]).since >= noted_at + 5.0
    assert "asked" in seen._known


# --- connections -------------------------------------------------------------------------------------------------


async def test_a_silent_connection_is_replaced(server: Kubernetes, name: str) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        through = server.url.replace(str(server.port), str(proxy.port))
        async with opened(f"{through}&timeout=0.3") as backend:
            grant = await claim(backend.leases, name)
            proxy.stall_existing()
            with pytest.raises(Unavailable):
                await backend.leases.renew([grant], 15.0)
            assert await backend.leases.renew([grant], 15.0) == [Granted(grant)]


@pytest.mark.parametrize("was_released", [False, True])
async def test_a_candidate_that_hears_nothing_claims_nothing(
    server: Kubernetes, name: str, clock: TurnedClock, *, was_released: bool
) -> None:
    """Its requests arrive. If it claimed what it knows to be free, it would keep the name from others, unawares."""
    async with opened(server.url) as ann, FaultProxy("127.0.0.1", server.port) as proxy:
        grant = await claim(ann.leases, name)
        if was_released:
            await ann.leases.release(grant)
        async with opened(f"{server.url.replace(str(server.port), str(proxy.port))}&timeout=0.3", clock) as bob:
            await bob.leases.inspect(name)
            clock.turned += 15.0
            before = server.lease(name)
            proxy.stall("down")
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await bob.leases.acquire(name, "bob#1", 15.0)
            assert server.lease(name) == before
            proxy.heal()
            assert (await claim(bob.leases, name, "bob#1")).token > grant.token


async def test_a_release_that_its_watch_has_just_told_is_claimed_at_once(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        grant = await claim(ann.leases, name)
        heard = Heard(bob.leases, name)
        await until(lambda: version_seen(bob, name) is not None)
        await ann.leases.release(grant)
        await until(lambda: (seen := bob.leases._observed.find(name)) is not None and not records.holder_of(seen.lease))
        server.forget()
        await claim(bob.leases, name, "bob#1")
        assert [one["verb"] for one in server.requests() if one["verb"] != "watch"] == ["update"]
        await heard.close()


async def test_a_closed_backend_says_so(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        await claim(backend.leases, name)
    with pytest.raises(Unavailable, match="is closed; connect again"):
        await backend.leases.inspect(name)


async def test_an_unreachable_server_is_named(name: str) -> None:
    async with opened("kubernetes://default?server=http://127.0.0.1:1") as backend:
        with pytest.raises(
            Unavailable, match=r"the API server http://127.0.0.1:1 can't be reached: Connection refused"
        ):
            await backend.leases.inspect(name)


# --- doctor ------------------------------------------------------------------------------------------------------


async def test_the_facts_for_doctor(server: Kubernetes) -> None:
    async with opened(server.url) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts["server"].value == f"{server.server}, from the URL"
    assert facts["version"].value == "v1.31.0+double"
    assert facts["login"].value == "none"
    assert facts["namespace"].value == "default"
    assert facts["rights"].value == "get, create, update, list, watch on leases"
    assert facts["priority"].value == "level pl-1 of API Priority and Fairness"
    assert not facts["rights"].advice


async def test_missing_rights_are_told_to_doctor(server: Kubernetes) -> None:
    server.set(roles=[{"verbs": ["get", "create", "update"]}])
    async with opened(server.url) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts["rights"].value == "without list, watch on leases"
    assert "watch: candidates poll without it" in facts["rights"].advice
    assert facts["rights"].code == "kubernetes-rights"


async def test_doctor_works_with_the_rights_to_one_lease(server: Kubernetes) -> None:
    server.set(roles=[{"verbs": ["get", "update", "watch"], "names": ["nightly-report"]}, {"verbs": ["create"]}])
    server.fail(verb="get", name="", status=403)  # the version
    async with opened(server.url) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts["version"].value == "unknown"
    assert facts["rights"].value == "without get, update, list, watch on leases"
    assert "rights to single Leases (resourceNames) are not seen here" in facts["rights"].advice
    assert facts["priority"].value


async def test_a_missing_namespace_is_told_to_doctor(server: Kubernetes) -> None:
    async with opened(server.url.replace("default", "nowhere")) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts["namespace"].advice == "it doesn't exist: create it, or correct the URL"

"""Leases of Kubernetes: writes of others in between, late requests, and answers that no API server gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest

from tenure._backends import kubernetes
from tenure._backends.kubernetes import client as client_module
from tenure._backends.kubernetes import leases as leases_module
from tenure._backends.kubernetes import records
from tenure._backends.kubernetes.client import Client, Request
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure.errors import ConfigError, Unavailable
from tests.clocks import TurnedClock
from tests.servers import Kubernetes, shared
from tests.stores.kubernetes.test_kubernetes import opened

Json = dict[str, Any]

pytestmark = pytest.mark.asyncio

TTL = 15.0


@pytest.fixture(name="server")
def _server() -> Iterator[Kubernetes]:
    server = shared(Kubernetes)
    server.forget()
    yield server
    server.heal()


@pytest.fixture(name="name")
def _name(request: pytest.FixtureRequest) -> str:
    return f"r-{abs(hash(request.node.nodeid)):x}-{abs(hash(request)):x}"


@pytest.fixture(name="clock")
def _clock() -> TurnedClock:
    return TurnedClock()


async def claim(backend: kubernetes.KubernetesBackend, name: str, holder: str = "ann#1") -> Grant:
    answer = await backend.leases.acquire(name, holder, TTL)
    assert isinstance(answer, Granted), answer
    return answer.grant


def taken_over(server: Kubernetes, name: str, holder: str = "go-1") -> None:
    """Take the Lease for another program, whoever has it."""
    lease = server.lease(name)
    now = records.micro_time(datetime.now(UTC))
    lease["spec"] |= {"holderIdentity": holder, "leaseDurationSeconds": 15, "acquireTime": now, "renewTime": now}
    lease["spec"]["leaseTransitions"] = lease["spec"].get("leaseTransitions", 0) + 1
    server.put(lease)


def before(
    monkeypatch: pytest.MonkeyPatch, backend: kubernetes.KubernetesBackend, verb: str, act: Callable[[], None]
) -> None:
    """Let *act* happen once, just before the next request with *verb* is sent."""
    send = Client.send
    acts = [act]

    async def interrupted(client: Client, request: Request, *arguments: Any, **options: Any) -> Any:
        if client is backend._client and request.verb == verb and acts:
            await asyncio.to_thread(acts.pop())
        return await send(client, request, *arguments, **options)

    monkeypatch.setattr(Client, "send", interrupted)


# --- writes of others in between ---------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
async def test_another_is_faster(server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        newest = 0
        if exists:
            grant = await claim(bob, name, "bob#0")
            await bob.leases.release(grant)
            newest = grant.token

        def take() -> None:
            if exists:
                taken_over(server, name)
            else:
                server.put({"metadata": {"name": name}, "spec": {"holderIdentity": "go-1", "leaseDurationSeconds": 15}})

        before(monkeypatch, ann, "update" if exists else "create", take)
        answer = await ann.leases.acquire(name, "ann#1", TTL)
        assert isinstance(answer, HeldBy)
        assert answer.holder == "go-1"
        assert answer.token > newest


@pytest.mark.parametrize("verb", ["renew", "release", "ask_to_resign"])
async def test_another_takes_over_before_our_write(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async with opened(server.url) as ann:
        grant = await claim(ann, name)
        before(monkeypatch, ann, "update", lambda: taken_over(server, name))
        match verb:
            case "renew":
                assert await ann.leases.renew([grant], TTL) == [Lost(grant)]
            case "release":
                assert await ann.leases.release(grant) == Lost(grant)
            case _:
                assert await ann.leases.ask_to_resign(name) is False
        assert server.lease(name)["spec"]["holderIdentity"] == "go-1"
        assert "tenure/resign-asked" not in server.lease(name)["metadata"]["annotations"]


@pytest.mark.parametrize("verb", ["renew", "release"])
async def test_a_new_lease_of_the_same_name_is_not_ours(
    server: Kubernetes, name: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async with opened(server.url) as ann:
        grant = await claim(ann, name)
        spec = server.lease(name)["spec"] | {"holderIdentity": "go-1"}

        def recreate() -> None:
            server.delete(name)
            server.put({"metadata": {"name": name}, "spec": spec})

        before(monkeypatch, ann, "update", recreate)
        if verb == "renew":
            assert await ann.leases.renew([grant], TTL) == [Lost(grant)]
        else:
            assert await ann.leases.release(grant) == Lost(grant)
        assert server.lease(name)["spec"] == spec


async def test_a_claim_whose_answer_was_lost_and_that_another_has_taken(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann:
        await ann.leases.release(await claim(ann, name, "ann#0"))
        server.fail(verb="update", name=name, drop="after", times=2)  # aiohttp sends a PUT twice
        with pytest.raises(Unavailable):
            await ann.leases.acquire(name, "ann#1", TTL)
        lost = await ann.leases.inspect(name)
        assert isinstance(lost, HeldBy)
        assert lost.holder == "ann#1"
        taken_over(server, name)
        answer = await ann.leases.acquire(name, "ann#1", TTL)
        assert isinstance(answer, HeldBy)
        assert answer.holder == "go-1"
        assert answer.token > lost.token


async def test_a_duration_that_another_has_shortened_is_restored(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann:
        grant = await claim(ann, name)
        lease = server.lease(name)
        lease["spec"]["leaseDurationSeconds"] = 1
        server.put(lease)
        assert await ann.leases.renew([grant], TTL) == [Granted(grant)]
        assert server.lease(name)["spec"]["leaseDurationSeconds"] == TTL


async def test_a_stale_event_makes_no_lease_look_older(server: Kubernetes, name: str, clock: TurnedClock) -> None:
    async with opened(server.url) as ann, opened(server.url, clock) as bob:
        grant = await claim(ann, name)
        old = server.lease(name)
        assert isinstance(await bob.leases.acquire(name, "bob#1", TTL), HeldBy)
        assert await ann.leases.renew([grant], TTL) == [Granted(grant)]
        clock.turned += TTL - 1
        assert isinstance(await bob.leases.acquire(name, "bob#1", TTL), HeldBy)
        bob.leases._observed.note(name, old)  # as a watch does that lags behind
        clock.turned += TTL + 1  # the old record would have expired now, the new one is read again
        answer = await bob.leases.acquire(name, "bob#1", TTL)
        assert isinstance(answer, HeldBy)
        assert answer.remaining == pytest.approx(TTL, abs=0.5)


async def test_a_strategy_that_was_removed_is_not_remembered(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as ann:
        await ann.leases.release(await claim(ann, name))
        lease = server.lease(name)
        lease["spec"]["strategy"] = "OldestEmulationVersion"
        lease = server.put(lease)
        await ann.leases.inspect(name)
        with pytest.raises(ConfigError, match="the API server chooses its holder"):
            await ann.leases.acquire(name, "ann#2", TTL)
        del lease["spec"]["strategy"]
        server.put(lease)
        await claim(ann, name, "ann#2")


async def test_a_lease_that_is_refused_ends_no_other_term(server: Kubernetes, name: str) -> None:
    """As an admission policy does, which an operator adds later."""
    async with opened(server.url) as ann:
        grants = [await claim(ann, f"{name}-{number}") for number in range(3)]
        server.fail(verb="update", name=f"{name}-1", status=422, message="denied by a policy")
        answers = await ann.leases.renew(grants, TTL)
        assert answers[0] == Granted(grants[0])
        assert isinstance(answers[1], NoAnswer)
        assert "denied by a policy" in answers[1].why
        assert answers[2] == Granted(grants[2])


async def test_a_renewal_whose_turn_comes_too_late_is_not_sent(
    server: Kubernetes, name: str, clock: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would extend a lease that nobody trusts any more."""
    monkeypatch.setattr(leases_module, "CONCURRENCY", 1)
    async with opened(server.url, clock) as ann:
        grants = [await claim(ann, f"{name}-{number}") for number in range(2)]

        def take_long() -> None:
            clock.turned += TTL

        before(monkeypatch, ann, "update", take_long)
        server.forget()
        answers = await ann.leases.renew(grants, TTL)
        assert answers[0] == Granted(grants[0])
        assert isinstance(answers[1], NoAnswer)
        assert not [one for one in server.requests() if one["name"] == f"{name}-1"]


# --- renewals as client-go sees them -----------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [1.0, 1.5, 2.0, 2.5, 3.0])
async def test_frequent_renewals_come_back_to_no_second_that_is_remembered(ttl: float) -> None:
    """client-go compares records in whole seconds: it must not read the same one twice, with renewals in between."""
    now = datetime(2026, 11, 23, 6, 0, 0, 120, tzinfo=UTC)
    lease: Json = {"metadata": {"name": "x"}, "spec": {"renewTime": records.micro_time(now)}}
    written: dict[str, list[datetime]] = {}
    for _ in range(600):
        now += timedelta(seconds=ttl / 3)
        lease = records.renewed(lease, ttl, left=0.0, now=now)
        written.setdefault(lease["spec"]["renewTime"][:19], []).append(now)
    again = [later - earlier for moments in written.values() for earlier, later in combinations(moments, 2)]
    assert all(distance > timedelta(seconds=10 * ttl) for distance in again), min(again)


# --- answers that no API server gives ----------------------------------------------------------------------------


class Scripted:
    """A server that gives one answer to everything, or what a function returns."""

    def __init__(self) -> None:
        self.answer: Callable[[str, Json], tuple[int, Any]] = lambda method, body: (200, {})
        self.asked: list[str] = []
        self._serving: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"kubernetes://default?server=http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._serving.values():
            writer.close()
        await asyncio.gather(*filter(None, self._serving))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving[asyncio.current_task()] = writer
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                sizes = [line.partition(":")[2] for line in head.splitlines() if line.startswith("Content-Length")]
                body = await reader.readexactly(int(sizes[0])) if sizes else b""
                self.asked.append(head.splitlines()[0])
                status, answer = self.answer(head.partition(" ")[0], json.loads(body or b"{}"))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        writer.close()


def stored(body: Json, **changes: Any) -> Json:
    metadata = body["metadata"] | {"resourceVersion": "7", "creationTimestamp": "2026-11-23T06:00:00Z"}
    return {**body, "kind": "Lease", "metadata": metadata, "spec": body["spec"] | changes}


NOT_FOUND = 404, {"reason": "NotFound", "message": 'leases.coordination.k8s.io "x" not found'}

ODD = [
    {},
    {"ok": True},
    {"kind": "Lease", "metadata": {}},
    {"kind": "Lease", "metadata": {"name": "y", "resourceVersion": "1"}},
    {"kind": "Lease", "metadata": {"name": "x", "resourceVersion": "1"}, "spec": [1]},
    {"kind": "Lease", "metadata": None, "spec": []},
    [],
    b"<html>log in</html>",
    b"",
]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("to", ["all", "writes"])
async def test_what_is_no_lease_is_no_answer(odd: Any, to: str) -> None:
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: NOT_FOUND if to == "writes" and method == "GET" else (200, odd)
        with pytest.raises(Unavailable, match=r"not with the Lease 'x': is a proxy|is no JSON object"):
            await backend.leases.acquire("x", "ann#1", TTL)


@pytest.mark.parametrize(
    "change", [{"holderIdentity": "policy"}, {"leaseDurationSeconds": 5}, {"leaseDurationSeconds": None}], ids=repr
)
async def test_a_write_that_a_webhook_has_changed_is_no_grant(change: Json) -> None:
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: NOT_FOUND if method == "GET" else (201, stored(body, **change))
        with pytest.raises(ConfigError, match="stored another holder, duration or token in the Lease 'x' than"):
            await backend.leases.acquire("x", "ann#1", TTL)


async def test_a_webhook_that_adds_something_is_no_problem() -> None:
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: NOT_FOUND if method == "GET" else (201, stored(body, strategy="added"))
        assert (await claim(backend, "x")).token > 0


@pytest.mark.parametrize("odd", [None, 7, [], {}, {"metadata": "x"}, {"metadata": {"name": ["x"]}}], ids=repr)
async def test_what_is_no_lease_in_a_list_hides_no_other(odd: Any) -> None:
    names = [f"x-{number}" for number in range(9)]
    edited = {"annotations": [], "creationTimestamp": 7, "labels": "x", "name": "x-8", "resourceVersion": "1"}
    leases = [
        {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 9}}
        for name in names[:8]
    ]
    async with Scripted() as server, opened(server.url) as backend:
        listed = {"items": [*leases[:4], odd, *leases[4:], {"metadata": edited, "spec": "x"}], "metadata": {}}
        server.answer = lambda method, body: (200, listed)
        found = await backend.leases.inspect_many(names)
        assert [type(one) for one in found] == [HeldBy] * 8 + [Vacant]
        assert await backend.leases.names() == names


@pytest.mark.parametrize(
    "items", [{"items": 7}, {"items": [], "metadata": 7}, {"metadata": {"continue": ["x"]}}], ids=repr
)
async def test_what_is_no_list_is_no_answer(items: Json) -> None:
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: (200, items)
        with pytest.raises(Unavailable, match="answered, but not with a list of Leases: is a proxy"):
            await backend.leases.names()


async def test_a_list_ends_although_a_server_always_has_one_page_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "PAGES_MAX", 3)
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: (200, {"items": [], "metadata": {"continue": "more"}})
        with pytest.raises(Unavailable, match="not with a list of Leases that ends after 3 pages"):
            await backend.leases.names()
        assert len(server.asked) == 3


async def test_a_line_of_a_watch_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LINE_MAX", 2**17)
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: (200, b"x" * 2**19)
        request = client_module.Request("watch", "x")
        with pytest.raises(Unavailable, match="a watch has a line of more than 131,072 bytes"):
            async with backend._client.stream(request, "/", {}, lasts=60.0) as events:
                await anext(aiter(events))


async def test_a_record_that_others_have_edited_ends_no_election(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        old = await claim(backend, name)
        await backend.leases.release(old)
        lease = server.lease(name)
        lease["spec"] |= {"renewTime": "9999-12-31T23:59:59.000000Z", "acquireTime": "0001-01-01T00:00:00.000000Z"}
        lease["metadata"]["annotations"] |= {records.TOKEN: "9" * 18, records.METADATA: "[" * 50_000}
        server.put(lease)
        one = await claim(backend, name)
        assert one.token == 10**18
        assert await backend.leases.renew([one], TTL) == [Granted(one)]
        assert await backend.leases.release(one) == Released(one)
        lease = server.lease(name)
        lease["metadata"]["annotations"][records.TOKEN] = "9" * 19
        server.put(lease)
        with pytest.raises(ConfigError, match=f"the token of the Lease {name!r} can't rise any more"):
            await backend.leases.acquire(name, "bob#1", TTL)
        lease = server.lease(name)
        lease["metadata"]["annotations"][records.TOKEN] = str(one.token)
        server.put(lease)
        assert (await claim(backend, name)).token == one.token + 1


async def test_a_proxy_that_refuses_is_not_the_server(server: Kubernetes, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await claim(backend, name)
        assert await backend.leases.renew([grant], TTL) == [Granted(grant)]
        server.fail(verb="update", name=name, status=400, reason="", message="<html>Bad Request</html>")
        with pytest.raises(Unavailable, match=r"refuses to update the Lease .*it worked before, so tenure tries again"):
            await backend.leases.renew([grant], TTL)


async def test_a_refusal_without_a_pause_is_not_hammered() -> None:
    async with Scripted() as server, opened(f"{server.url}&timeout=1.5") as backend:
        server.answer = lambda method, body: (429, b"slow down")
        with pytest.raises(Unavailable, match="is overloaded"):
            await backend.leases.inspect("x")
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ERROR","object":{"code":429}}\n',
        b'{"type":"ADDED","object":"x"}\n',
        b'{"type":"ADDED","object":{"metadata":"x"}}\n',
        b'{"type":"ADDED","object":{"metadata":{"name":"x","resourceVersion":"1"},"spec":[1]}}\n',
        b'{"type":"BOOKMARK","object":null}\n',
        b'{"type":"ADDED","object":{"metadata":{"name":"x","resourceVersion":"1"}}}\n',
        b"[]\n",
        b"<html>\n",
        b"[" * 100_000 + b"\n",
        b'{"type":"ADDED","object":{"metadata":{"name":"x","resourceVersion":7}}}\n',
        b'{"type":"ADD',
        b"",
    ],
    ids=lambda line: repr(line[:80]),
)
async def test_watches_that_end_at_once_are_not_repeated_at_once(line: bytes) -> None:
    async with Scripted() as server, opened(server.url) as backend:
        server.answer = lambda method, body: (200, line)
        hints = 0

        async def listen() -> None:
            nonlocal hints
            async for _ in backend.leases.hints("x"):
                hints += 1

        task = asyncio.ensure_future(listen())
        await asyncio.sleep(0.5)
        assert 3 <= len(server.asked) <= 6
        assert hints <= len(server.asked) + 1
        assert len(list(backend._watches.sources())) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Fleets on this machine through the public API: connect, election, term, observe, threads, and clients."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import subprocess
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backend import Backend
from tenure._backends.peers import PeersBackend
from tenure._backends.peers.address import KEY_VARIABLE, Settings
from tenure._backends.peers.client import Member
from tenure._backends.peers.diagnosis import warnings_of
from tenure._backends.peers.machine import Machine
from tenure._backends.peers.seal import NONCE, greeting
from tenure._backends.peers.transport import Transport
from tenure._lease import Leader
from tenure._runtime.clock import SystemClock
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.absent import skip_or_fail
from tests.clocks import TurnedClock
from tests.explained import facts_by_name
from tests.ports import ports_held
from tests.servers import Authority

Work = Callable[[tenure.Term], Awaitable[None]]

LASTING = "ttl_max=15&heartbeat=1&patience=0.1"
"""Terms last longer than a busy machine delays a process."""
UNHURRIED = "ttl_max=15&heartbeat=5&patience=0.1"
"""The wait for answers is that long too: two heartbeats."""

_held = ExitStack()


@pytest.fixture(autouse=True)
def ports() -> Iterator[None]:
    """Hold the ports of the test's fleets until its end."""
    with _held:
        yield


def fleet_of(count: int) -> list[str]:
    """Return *count* unused addresses of this machine."""
    return [f"127.0.0.1:{port}" for port in _held.enter_context(ports_held(count))]


def urls(count: int = 3, options: str = LASTING) -> list[str]:
    addresses = fleet_of(count)
    return [f"peers://{','.join(addresses)}?me={me}&{options}" for me in addresses]


def without_me(url: str) -> str:
    return url.partition("me=")[0] + UNHURRIED


async def start(*backends: tenure.Backend) -> None:
    """Start members: each asks the others, so all of them at once."""
    await asyncio.gather(*(backend.leaders() for backend in backends))


async def forever(term: tenure.Term) -> None:
    await asyncio.Event().wait()


def member_of(backend: tenure.Backend) -> Member:
    opened: object = backend._connection.opened
    assert isinstance(opened, PeersBackend)
    return opened.member


def machine_of(backend: tenure.Backend) -> Machine:
    return member_of(backend).running()[1]


def transport_of(backend: tenure.Backend) -> Transport:
    return member_of(backend).running()[2]


async def test_the_default_lease_fits_the_fleet() -> None:
    for ttl_max, ttl in ((3, 3.0), (15, 15.0), (60, 15.0)):
        async with tenure.connect(urls(3, f"ttl_max={ttl_max}")[0]) as backend:
            assert backend.election("chair").timing.ttl == ttl
    async with tenure.connect(urls(3, "ttl_max=90&heartbeat=20")[0]) as backend:
        assert backend.election("chair").timing.ttl == 60.0
        with pytest.raises(ConfigError, match="ttl"):
            backend.election("chair", ttl=15.0)


@pytest.mark.parametrize("strategy", ["lowest", "bully", "ring"])
async def test_one_leads_and_another_follows(strategy: str) -> None:
    began: asyncio.Queue[tuple[int, tenure.Term]] = asyncio.Queue()

    def work_of(number: int) -> Work:
        async def work(term: tenure.Term) -> None:
            await began.put((number, term))
            await forever(term)

        return work

    async with AsyncExitStack() as stack:
        backends = [
            await stack.enter_async_context(tenure.connect(u)) for u in urls(3, f"{UNHURRIED}&strategy={strategy}")
        ]
        elections = [backend.election("chair") for backend in backends]
        tasks = [asyncio.create_task(each.run(work_of(number))) for number, each in enumerate(elections)]
        first, term = await asyncio.wait_for(began.get(), 60)
        term.check()
        assert began.empty()
        for each in elections:
            leader = await each.leader()
            assert leader is not None
            assert (leader.holder, leader.token) == (term.holder, term.token)
        tasks[first].cancel()
        await asyncio.wait({tasks[first]})
        second, next_term = await asyncio.wait_for(began.get(), 60)
        assert second != first
        assert next_term.token > term.token
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_leader_without_a_majority_steps_down_and_there_is_no_leader() -> None:
    lost: asyncio.Queue[float] = asyncio.Queue()
    began = asyncio.Event()

    async def work(term: tenure.Term) -> None:
        began.set()
        try:
            await forever(term)
        finally:
            lost.put_nowait(term.remaining())

    async with AsyncExitStack() as stack:
        fleet = urls(3, "ttl_max=6&heartbeat=0.2")
        leading = await stack.enter_async_context(tenure.connect(fleet[0]))
        rest = await stack.enter_async_context(AsyncExitStack())
        others = [await rest.enter_async_context(tenure.connect(url)) for url in fleet[1:]]
        # Cancelled work has much of the term left: on a busy machine, the cancellation is late.
        election = leading.election("chair", renew_every=0.5, retry_every=0.5, grace=3.5)
        task = asyncio.create_task(election.run(work))
        await start(*others)
        await asyncio.wait_for(began.wait(), 60)
        await rest.aclose()
        assert await asyncio.wait_for(lost.get(), 60) > 0.0  # cancelled before the term was over
        with pytest.raises(Unavailable, match="1 of 3 members answered"):
            await election.leader()
        task.cancel()
        await asyncio.wait({task})


async def test_a_client_sees_the_leader_and_may_ask_it_to_resign() -> None:
    began: asyncio.Queue[int] = asyncio.Queue()

    async def work(term: tenure.Term) -> None:
        await began.put(term.token)
        await forever(term)

    async with AsyncExitStack() as stack:
        fleet = urls()
        backends = [await stack.enter_async_context(tenure.connect(url)) for url in fleet]
        await start(*backends)
        election = backends[1].election("chair", renew_every=0.5, retry_every=1, metadata={"url": "http://b"})
        task = asyncio.create_task(election.run(work))
        token = await asyncio.wait_for(began.get(), 60)
        onlooker = await stack.enter_async_context(tenure.connect(without_me(fleet[0])))
        (leader,) = (await onlooker.leaders()).values()
        assert leader is not None
        assert (leader.token, dict(leader.metadata)) == (token, {"url": "http://b"})
        again = await stack.enter_async_context(tenure.connect(fleet[1].replace(LASTING, UNHURRIED)))
        # Its address is taken: it is a client.
        assert await again.election("chair").leader() == leader
        seen: list[Leader | None] = []
        watcher = await stack.enter_async_context(tenure.connect(without_me(fleet[0]).replace(UNHURRIED, LASTING)))
        watching = asyncio.create_task(collect(watcher.election("chair", retry_every=0.5), seen))
        await until(lambda: seen == [leader])
        assert await onlooker.election("chair").ask_to_resign() is True
        assert await asyncio.wait_for(began.get(), 60) > token  # there is no other candidate
        await until(lambda: seen[-1] is not None and seen[-1].token > token)
        with pytest.raises(ConfigError, match="me="):
            await onlooker.election("chair").run(work)
        found = {fact.name: fact for fact in (await onlooker.diagnose()).facts}
        assert "quorum" in found
        assert "every user of this machine may vote and lead" in found["key"].advice
        assert "alive" in {fact.name for fact in (await backends[0].diagnose()).facts}
        task.cancel()
        watching.cancel()
        await asyncio.wait({task, watching})


async def test_doctor_warns_when_tokens_run_ahead_of_the_clock() -> None:
    async with tenure.connect(urls(1, "quorum=majority")[0]) as backend:
        await backend.leaders()

        async def tokens() -> tuple[str, str]:
            (fact,) = [each for each in (await backend.diagnose()).facts if each.name == "tokens"]
            return fact.value, fact.advice

        assert await tokens() == ("not ahead of the clock", "")
        voter = machine_of(backend).voter
        voter.learn(voter.newest + 3_600_000)
        value, advice = await tokens()
        assert "s ahead of the clock" in value
        assert "set the clocks" in advice


async def collect(election: tenure.Election, seen: list[Leader | None]) -> None:
    async for leader in election.observe():
        seen += [leader]


async def test_two_leaders_that_meet_become_one() -> None:
    """Without a quorum: each half has its leader; once they meet, the older term ends."""
    fleet = urls(2, "ttl_max=15&heartbeat=0.2&quorum=none")
    began: asyncio.Queue[tuple[int, tenure.Term]] = asyncio.Queue()
    ended: asyncio.Queue[int] = asyncio.Queue()

    def work_of(number: int) -> Work:
        async def work(term: tenure.Term) -> None:
            await began.put((number, term))
            try:
                await forever(term)
            finally:
                await ended.put(term.token)

        return work

    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(tenure.connect(url)) for url in fleet]
        await start(*backends)
        for each in backends:  # cut both off: their messages are lost
            transport_of(each).send = lambda to, message: None  # type: ignore[method-assign]
        tasks = []
        for number, each in enumerate(backends):
            tasks.append(asyncio.create_task(each.election("chair", renew_every=0.5).run(work_of(number))))
        terms = dict([await asyncio.wait_for(began.get(), 60), await asyncio.wait_for(began.get(), 60)])
        assert set(terms) == {0, 1}
        for each in backends:
            del transport_of(each).send
        assert await asyncio.wait_for(ended.get(), 60) == min((term.token, number) for number, term in terms.items())[0]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def test_threads_lead_as_well() -> None:
    fleet = urls(1, "quorum=majority")
    tokens: list[int] = []

    def work(term: tenure.sync.Term) -> None:
        term.check()
        tokens.append(term.token)

    with tenure.sync.connect(fleet[0]) as backend:
        backend.election("chair").run(work)
        backend.election("chair").run(work)
    assert tokens[1] > tokens[0]


async def test_a_member_that_has_just_started_does_not_vote_while_another_leads() -> None:
    async with AsyncExitStack() as stack:
        fleet = urls()
        backends = [await stack.enter_async_context(tenure.connect(url)) for url in fleet[:2]]
        rest = await stack.enter_async_context(AsyncExitStack())
        late = await rest.enter_async_context(tenure.connect(fleet[2]))
        await start(*backends, late)
        began = asyncio.Event()

        async def work(term: tenure.Term) -> None:
            began.set()
            await forever(term)

        task = asyncio.create_task(backends[0].election("chair").run(work))
        await asyncio.wait_for(began.wait(), 60)
        await rest.aclose()
        clock = TurnedClock()
        newcomer = await stack.enter_async_context(Backend(fleet[2], clock=clock))
        voters = [machine_of(each).voter for each in backends]
        await until(lambda: None not in [voter.last("chair") for voter in voters])  # won before all members know it
        assert (await newcomer.leaders())["chair"] is not None
        _, machine, transport = member_of(newcomer).running()
        clock.turned += 14.0
        received = transport.counts.received
        await until(lambda: transport.counts.received > received + 4)
        awake, now = machine.voter.awake, clock.now()
        assert not awake or now >= machine.voter.silent_until
        clock.turned += 1.0
        await until(lambda: machine.voter.awake)
        task.cancel()
        await asyncio.wait({task})


async def test_a_connection_made_while_a_member_closes_leaves_nothing_open() -> None:
    for _ in range(20):
        (url,) = urls(1, "quorum=majority")
        port = int(url.partition("?")[0].rpartition(":")[2])
        async with tenure.connect(url) as backend:
            await backend.leaders()
            callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for each in callers:
            each.close()
    gc.collect()  # an open socket would be reported here


# --- connections without the key ---


async def test_random_bytes_on_the_port_change_nothing() -> None:
    async with AsyncExitStack() as stack:
        fleet = urls(3, "ttl_max=15&heartbeat=0.2")
        backends = [await stack.enter_async_context(tenure.connect(url)) for url in fleet]
        await start(*backends)
        settled, machine, transport = member_of(backends[0]).running()
        host, _, port = settled.members[0].rpartition(":")
        before = max(machine_of(each).voter.newest for each in backends)
        await until(lambda: machine.voter.newest == before)  # it knows what the others know
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n" * 3, os.urandom(4096), b"\xff" * 70_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(rubbish)
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        # Right greeting, wrong key: the first frame is refused.
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"tenure\x00\x01" + os.urandom(16) + (100).to_bytes(4, "big") + os.urandom(100))
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert transport.counts.dropped.get("foreign", 0) >= 3
        assert transport.counts.dropped.get("forged") == 1
        assert machine.voter.newest == before
        assert await backends[1].leaders() == {}


@pytest.mark.parametrize("kind", ["clients", "silent connections"])
async def test_neither_clients_nor_unauthenticated_connections_keep_a_member_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure._backends.peers.tcp.UNVERIFIED_MAX", 4)
    monkeypatch.setattr("tenure._backends.peers.tcp.CLIENTS_MAX", 4, raising=False)
    monkeypatch.setattr("tenure._backends.peers.tcp.GREET_WITHIN", 60.0)
    fleet = urls(3, "ttl_max=15&heartbeat=0.2")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(tenure.connect(fleet[0]))
        await first.leaders()
        settled, machine, transport = member_of(first).running()
        host, _, port = settled.members[0].rpartition(":")
        questions = []
        for _ in range(8):
            if kind == "clients":
                onlooker = await stack.enter_async_context(tenure.connect(without_me(fleet[0])))
                questions.append(asyncio.create_task(onlooker.leaders()))
            else:
                _, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
        await until(lambda: transport.counts.dropped.get("crowded out", 0) >= 4)
        second = await stack.enter_async_context(tenure.connect(fleet[1]))
        await second.leaders()
        await until(lambda: machine.liveness.alive(SystemClock().now()) == [0, 1])
        await second.leaders()
        # With so few slots, its own connection may be dropped once, and it connects again.
        await until(lambda: not transport_of(second).counts.refused)
        for each in questions:
            each.cancel()
        await asyncio.gather(*questions, return_exceptions=True)


async def test_members_with_another_key_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("r" * 32)
    wrong.write_text("w" * 32)
    for key in (right, wrong):
        key.chmod(0o600)
    fleet = urls(3, "ttl_max=60&heartbeat=0.2")
    async with AsyncExitStack() as stack:
        keys = (right, right, wrong)
        backends = [
            await stack.enter_async_context(tenure.connect(f"{url}&key_file={key}"))
            for url, key in zip(fleet, keys, strict=True)
        ]
        assert await backends[2].leaders() == {}  # names: known here, none
        await start(*backends[:2])
        dropped = transport_of(backends[0]).counts.dropped
        await until(lambda: dropped.get("forged", 0) > 0)

        async def tells_who_refused() -> bool:
            with pytest.raises(Unavailable, match="of 3 members answered") as caught:
                await backends[2].election("chair").leader()
            return "refused this member: compare key, member list" in str(caught.value)

        await until(tells_who_refused)
        assert not machine_of(backends[2]).voter.awake

        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        client = f"{fleet[0].partition('me=')[0]}ttl_max=60&heartbeat=0.2"
        addresses = client.partition("//")[2].partition("?")[0].split(",")
        for option, refusing in (("", addresses), (f"&key_file={right}", addresses[2:])):
            onlooker = await stack.enter_async_context(tenure.connect(f"{client}{option}"))

            async def is_refused(onlooker: tenure.Backend = onlooker, by: list[str] = refusing) -> bool:
                with pytest.raises(Unavailable, match="0 of 3 members answered") as caught:  # they wait for a ttl_max
                    await onlooker.election("chair").leader()
                return [one for one in addresses if one in str(caught.value)] == by

            await until(is_refused)


async def test_a_member_that_reached_itself_releases_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that connects to an unused port may get the same port for its own end."""
    fleet = urls(3, "ttl_max=15&heartbeat=0.2")
    ports: list[int] = []
    dial = asyncio.open_connection

    async def dial_itself_first(
        host: str, port: int, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not ports and f"me={host}:{port}&" in fleet[1]:
            both_ends = socket.socket()
            both_ends.bind((host, 0))  # not the port itself, which the test holds
            both_ends.connect(both_ends.getsockname())
            ports.append(both_ends.getsockname()[1])
            return await dial(sock=both_ends)
        return await dial(host, port, **options)

    monkeypatch.setattr("asyncio.open_connection", dial_itself_first)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(tenure.connect(fleet[0]))
        second = await stack.enter_async_context(tenure.connect(fleet[1]))
        await start(first)
        await until(lambda: ports)

        def can_be_listened_on() -> bool:
            with suppress(OSError), socket.create_server(("127.0.0.1", ports[0])):
                return True
            return False

        await until(can_be_listened_on)
        await start(first, second)
        assert not transport_of(first).counts.dropped


async def test_an_address_that_can_not_be_listened_on_is_an_error_with_advice() -> None:
    (free,) = fleet_of(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        every = f"{free},{taken},192.0.2.1:7000"
        for me, advice in ((taken, "in use.*leave me= out"), ("192.0.2.1", "add listen=0.0.0.0")):
            async with tenure.connect(f"peers://{every}?me={me}&insecure=yes&ttl_max=3") as backend:
                assert backend._connection.opened is not None
                with pytest.raises(Unavailable, match=advice):
                    await backend._connection.opened.leases.acquire("chair", "a#1", 3.0)


@pytest.fixture
def tls(tmp_path: Path) -> str:
    """Make a certificate for this machine; return the URL options for it."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    try:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=127.0.0.1"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        skip_or_fail("openssl is not installed")
    return f"tls_cert={cert}&tls_key={key}&tls_ca={cert}"


async def test_members_may_use_tls(tls: str) -> None:
    fleet = urls(3, f"{UNHURRIED}&{tls}")
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(tenure.connect(url)) for url in fleet]
        await start(*backends)
        async with backends[0].election("chair").campaign() as term:
            term.check()
            leader = await backends[1].election("chair").leader()
            assert leader is not None
            assert leader.token == term.token
            facts = facts_by_name((await backends[1].diagnose(write=False)).facts)
            assert facts["TLS"].value.startswith("TLS; the server's certificate and name are verified against /")
        clear = tenure.connect(f"peers://{fleet[0].partition('//')[2].partition('?')[0]}?ttl_max=15&heartbeat=0.2")
        onlooker = await stack.enter_async_context(clear)
        with pytest.raises(Unavailable):
            await onlooker.election("chair").leader()
    with pytest.raises(ConfigError, match="tls_cert=/nowhere of the fleet can't be read: No such file"):
        Settings.of(Url.parse(f"{urls()[0]}&tls_cert=/nowhere&tls_ca=/nowhere"))
    with pytest.raises(ConfigError, match="can't be used"):
        Settings.of(Url.parse(f"{urls()[0]}&tls_cert={__file__}&tls_ca={__file__}"))
    assert issubclass(ssl.SSLError, OSError)


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return files of a fleet: its authority, twice; a member's certificate and key; and those of a stranger."""
    try:
        own, other = Authority(), Authority("another authority")
        usage = "serverAuth,clientAuth"
        return {
            "authority": (own.certificate, own.certificate),
            "member": own.issue(tmp_path_factory.mktemp("member"), usage=usage),
            "stranger": other.issue(tmp_path_factory.mktemp("stranger"), usage=usage),
        }
    except FileNotFoundError:
        skip_or_fail("openssl is not installed")


async def told(address: str, issued: dict[str, tuple[Path, Path]], shows: str) -> bytes:
    """Return what a member at *address* tells a client that *shows* such a certificate, or "nothing", and greets it."""
    context = ssl.create_default_context(cafile=str(issued["authority"][0]))
    if shows != "nothing":
        context.load_cert_chain(*issued[shows])
    host, _, port = address.rpartition(":")
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(greeting(os.urandom(NONCE)))
        return await reader.read(1_000)
    except OSError:  # an SSLError, or a reset: TLS 1.3 lets the client finish its handshake before it is refused
        return b""
    finally:
        if writer is not None:
            writer.transport.abort()


async def test_who_shows_no_certificate_of_the_authority_is_told_nothing(
    issued: dict[str, tuple[Path, Path]],
) -> None:
    """This fleet has no key, so that the certificates alone keep strangers out."""
    (ca, _), (cert, key) = issued["authority"], issued["member"]
    fleet = urls(3, f"{UNHURRIED}&tls_cert={cert}&tls_key={key}&tls_ca={ca}")
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(tenure.connect(url)) for url in fleet]
        await start(*backends)
        addresses = member_of(backends[0]).running()[0].members
        for address in addresses:
            assert [await told(address, issued, shows) for shows in ("nothing", "stranger")] == [b"", b""]
        assert (await told(addresses[0], issued, "member")).startswith(greeting(b""))

        cert, key = issued["stranger"]
        stranger = f"{fleet[0].partition('me=')[0]}ttl_max=15&heartbeat=0.2&tls_cert={cert}&tls_key={key}&tls_ca={ca}"
        onlooker = await stack.enter_async_context(tenure.connect(stranger))

        with pytest.raises(Unavailable, match="0 of 3 members answered"):
            await onlooker.election("chair").leader()
        assert all(transport_of(one).counts.dropped == {} for one in backends)
        async with backends[0].election("chair").campaign() as term:
            term.check()
            with pytest.raises(Unavailable):
                await onlooker.election("chair").ask_to_resign()
            term.check()


@pytest.fixture
def garbage_stays() -> Iterator[None]:
    """Collect no garbage during the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("garbage_stays")
async def test_a_connection_without_a_tls_handshake_counts_too(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure._backends.peers.tcp.UNVERIFIED_MAX", 4)
    monkeypatch.setattr("tenure._backends.peers.tcp.GREET_WITHIN", 60.0)  # so that none ends because of its age
    fleet = urls(3, f"ttl_max=15&heartbeat=0.2&{tls}")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(tenure.connect(fleet[0]))
        await first.leaders()
        settled, machine, transport = member_of(first).running()
        host, _, port = settled.members[0].rpartition(":")
        silent = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            silent.append(asyncio.create_task(reader.read()))
        await until(lambda: sum(each.done() for each in silent) >= 8)
        assert transport.counts.dropped == {"crowded out": 8}
        # What a handshake has taken is given back at once: a flood doesn't wait for the garbage to be collected.
        await until(lambda: sum(type(each) is SSLProtocol for each in gc.get_objects()) <= 4)
        second = await stack.enter_async_context(tenure.connect(fleet[1]))
        await second.leaders()
        await until(lambda: machine.liveness.alive(SystemClock().now()) == [0, 1])
        for each in silent:
            each.cancel()
        await asyncio.wait(silent)


# --- the URL ---


@pytest.mark.parametrize(
    ("url", "trouble"),
    [
        ("peers://127.0.0.1:1", "can't lose one and still be a majority"),
        ("peers://127.0.0.1:1,127.0.0.1:2", "quorum=none"),
        ("peers://127.0.0.1", "a host and a port are needed"),
        ("peers://127.0.0.1:65536,127.0.0.1:2,127.0.0.1:3", "from 1 to 65535, not '65536'"),
        ("peers://a..b:1,127.0.0.1:2,127.0.0.1:3?insecure=yes", "no valid DNS name"),
        ("peers://127.0.0.1:1, 127.0.0.1:2,127.0.0.1:3", "no host:port"),
        ("peers://::1:1,127.0.0.1:2,127.0.0.1:3", "brackets"),
        ("peers://u:p@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "has a login, and members have none"),
        ("peers://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?me=auto", "needs dns="),
        ("peers://", "no member's address"),
        ("peers://127.0.0.1:x", "no member's address"),
        ("peers://127.0.0.1:1,127.0.0.1:1,127.0.0.1:2", "twice"),
        ("peers://a:1,b:1,c:1", "shared key"),
        ("peers://a:1,b:1,c:1/path?insecure=yes", "path"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=d", "none of the members"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=1", "more than one"),
        ("peers://a:1,b:1,c:1?insecure=yes&strategy=bulli", "bully"),
        ("peers://a:1,b:1,c:1?insecure=yes&quorum=most", "majority"),
        ("peers://a:1,b:1,c:1?insecure=yes&heartbeat=9", "at most a third of ttl_max"),
        ("peers://a:1,b:1,c:1?insecure=yes&patience=5", "patience"),
        ("peers://a:1,b:1,c:1?insecure=yes&ttl_max=0", "ttl_max"),
        ("peers://a:1,b:1,c:1?key_file=/nowhere", "key file '/nowhere' can't be read"),
        ("peers://a:1,b:1?dns=3&insecure=yes", "one host name"),
        ("peers://a:1?dns=2&insecure=yes", "quorum=none"),
        ("peers://a:1,b:1,c:1?insecure=yes&tls_cert=x", "tls_ca"),
        ("peers://a:1,b:1,c:1?insecure=yes&mee=a", "'me'"),
        ("peers://a:1,b:1,c:1?insecure=yes&listen=0.0.0.0", "add me="),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=0.0.0.0:x", "from 1 to 65535, not 'x'"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=0.0.0.0:0", "from 1 to 65535, not '0'"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=:7000", "a host and a port are needed"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=7000:", "not ''"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=::", "brackets"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=::1:7000", "brackets"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=0.0.0.0 ", "a space"),
        ("peers://a:1,b:1,c:1?insecure=yes&me=a&listen=a..b", "no valid DNS name"),
        ("peers://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?me=1&listen=0.0.0.0", "shared key"),
        ("peers://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?me=1&listen=[::]:7", "shared key"),
    ],
)
def test_a_url_that_can_not_work_is_refused(url: str, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(tenure.ConfigError, match=trouble):
        Settings.of(Url.parse(url))


def test_a_short_key_is_refused_and_no_key_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "hunter2")
    with pytest.raises(tenure.ConfigError, match="16 bytes") as caught:
        Settings.of(Url.parse("peers://a:1,b:1,c:1"))
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv(KEY_VARIABLE, "hunter2-hunter2-hunter2")
    settings = Settings.of(Url.parse("peers://a:1,b:1,c:1?me=b"))
    assert "hunter2" not in repr(settings)


async def test_me_may_be_a_host_or_a_port() -> None:
    for me, place in (("a:1", 0), ("b", 1), ("3", 2), ("", None)):
        settings = Settings.of(Url.parse(f"peers://a:1,b:2,c:3?insecure=yes&me={me}"))
        assert (await settings.fleet()).me == place
    ipv6 = Settings.of(Url.parse("peers://[::1]:1,[::1]:2,[::1]:3?me=2"))
    assert (await ipv6.fleet()).me == 1


async def test_members_may_listen_elsewhere_than_where_they_are_reached() -> None:
    """As behind NAT: each is reached through a proxy, whose port is the one that is listed."""
    async with AsyncExitStack() as stack:
        listening = [int(each.rpartition(":")[2]) for each in fleet_of(3)]
        reached = [await stack.enter_async_context(FaultProxy("127.0.0.1", port)) for port in listening]
        listed = ",".join(f"localhost:{proxy.port}" for proxy in reached)
        backends = [
            await stack.enter_async_context(
                tenure.connect(f"peers://{listed}?me={proxy.port}&listen=127.0.0.1:{port}&{UNHURRIED}")
            )
            for proxy, port in zip(reached, listening, strict=True)
        ]
        await start(*backends)
        async with backends[0].election("chair").campaign() as term:
            onlooker = await stack.enter_async_context(tenure.connect(f"peers://{listed}?{UNHURRIED}"))
            leader = await onlooker.election("chair").leader()
            assert leader is not None
            assert leader.token == term.token
        assert all(proxy.accepted for proxy in reached)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_listening_on_every_address_uses_the_listed_port(host: str) -> None:
    if host == "[::]" and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    (url,) = urls(1, f"quorum=majority&insecure=yes&listen={host}")
    port = int(url.partition("?")[0].rpartition(":")[2])
    async with tenure.connect(url) as backend:
        await backend.leaders()
        _, writer = await asyncio.open_connection("::1" if host == "[::]" else "127.0.0.1", port)
        writer.close()


async def test_a_foreign_listen_address_is_an_error_with_advice(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    (url,) = urls(1, f"quorum=majority&key_file={key}&listen=192.0.2.1")
    port = url.partition("?")[0].rpartition(":")[2]
    async with tenure.connect(url) as backend:
        with pytest.raises(Unavailable, match=rf"listen on 192\.0\.2\.1:{port} .*listen=0\.0\.0\.0 means all"):
            assert backend._connection.opened is not None
            await backend._connection.opened.leases.acquire("chair", "a#1", 15.0)


async def test_dns_lists_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    found = ["127.0.0.10", "127.0.0.9", "127.0.0.2"]

    async def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found * 2]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    fleet = await Settings.of(Url.parse("peers://fleet.test:7000?dns=3&insecure=yes&me=127.0.0.9")).fleet()
    assert fleet.members == ("127.0.0.2:7000", "127.0.0.9:7000", "127.0.0.10:7000")
    assert fleet.me == 1
    assert (await Settings.of(Url.parse("peers://fleet.test:7000?dns=3&insecure=yes&me=auto")).fleet()).me == 0
    found.pop()
    with pytest.raises(Unavailable, match="has 2 addresses"):
        await Settings.of(Url.parse("peers://fleet.test:7000?dns=3&insecure=yes")).fleet()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("peers://127.0.0.1:7101,127.0.0.1:7102,127.0.0.1:7103", "every user of this machine may vote and lead"),
        ("peers://a:1,b:1,c:1?insecure=true", "any host that reaches the members' ports may vote and lead"),
    ],
)
async def test_a_fleet_without_a_key_warns_at_its_start(
    url: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENURE_PEERS_KEY", raising=False)
    async with tenure.connect(url):
        pass
    assert "peers-no-key" in {fact.code for fact in warnings_of(Settings.of(Url.parse(url)))}
    assert said in caplog.text
    caplog.clear()
    monkeypatch.setenv("TENURE_PEERS_KEY", "0123456789abcdef")
    async with tenure.connect(url):
        pass
    assert not caplog.text

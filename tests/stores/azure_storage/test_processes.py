"""Azure Storage, on a real Azurite: beside other programs, with a failure at each step, without rights."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("azure.storage.blob")

from azure.core.exceptions import HttpResponseError, ServiceResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob import AccountSasPermissions, ResourceTypes, Services, generate_account_sas
from azure.storage.blob.aio import BlobClient, BlobLeaseClient, BlobServiceClient, ContainerClient
from azure.storage.queue.aio import QueueClient

import tenure
from tenure._backends import azure_storage
from tenure._backends.azure_storage import FOREIGN_HOLDER, AzureBackend, Fence, lease_id
from tenure._lease import Grant, Granted, HeldBy, Lost, Vacant
from tenure._queue.broker import EVERYTHING
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.received import Message
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, LAPSED, Abandon, Complete, Defer, Settled, Settlement
from tenure._url import Url
from tenure.errors import ConfigError, MessageRefused, TenureError, TermLost, Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Azurite, shared
from tests.servers.azurite import ACCOUNT, KEY

pytestmark = pytest.mark.process

TTL = 15.0


@pytest.fixture
def server() -> Azurite:
    return shared(Azurite, turnable=True)


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest_asyncio.fixture
async def backend(server: Azurite) -> AsyncIterator[AzureBackend]:
    opened = azure_storage.open(Url.parse(server.url))
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def container(server: Azurite) -> AsyncIterator[ContainerClient]:
    """Yield the same container, in Microsoft's own client, as another program uses it."""
    async with BlobServiceClient.from_connection_string(server.connection_string) as service:
        found = service.get_container_client("leases")
        if not await found.exists():
            await found.create_container()
        yield found


async def granted(backend: AzureBackend, name: str, holder: str, ttl: float = TTL) -> Grant:
    answer = await backend.leases.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def until(condition: Callable[[], Awaitable[bool]], within: float = 60.0) -> None:
    async with asyncio.timeout(within):
        while not await condition():
            await asyncio.sleep(0.02)


# --- beside the pattern's own sample -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["page blob", "page blob of 512 bytes", "block blob"])
async def test_the_sample_and_a_candidate_exclude_each_other(
    server: Azurite, backend: AzureBackend, container: ContainerClient, name: str, kind: str
) -> None:
    blob = container.get_blob_client(name)
    if kind == "block blob":
        await blob.upload_blob(b"its own")
    else:
        await blob.create_page_blob(512 if "512" in kind else 0)
    theirs = BlobLeaseClient(blob)
    await theirs.acquire(lease_duration=15)
    for _ in range(2):
        assert await backend.leases.acquire(name, "ann#1", TTL) == HeldBy(name, FOREIGN_HOLDER, 0, None)
    assert await backend.leases.inspect(name) == HeldBy(name, FOREIGN_HOLDER, 0, None)
    assert await backend.leases.ask_to_resign(name) is False
    assert name in await backend.leases.names()
    await theirs.release()
    ours = await granted(backend, name, "ann#1")
    with pytest.raises(HttpResponseError, match="LeaseAlreadyPresent"):
        await BlobLeaseClient(blob).acquire(lease_duration=15)
    server.turn(16)
    await BlobLeaseClient(blob).acquire(lease_duration=15)  # the sample takes over, and doesn't change our metadata
    assert await backend.leases.renew([ours], TTL) == [Lost(ours)]
    assert await backend.leases.inspect(name) == HeldBy(name, FOREIGN_HOLDER, 0, None)
    server.turn(16)
    assert (await granted(backend, name, "ann#2")).token > ours.token


async def test_metadata_of_other_programs_stays_with_the_blob(
    backend: AzureBackend, container: ContainerClient, name: str
) -> None:
    await container.get_blob_client(name).upload_blob(b"data", metadata={"theirs": "kept"})
    grant = await granted(backend, name, "ann#1")
    await backend.leases.ask_to_resign(name)
    await backend.leases.release(grant)
    found = await container.get_blob_client(name).get_blob_properties()
    assert (found.metadata["theirs"], found.size) == ("kept", 4)


async def test_a_blob_that_is_deleted_takes_no_token_back(
    server: Azurite, backend: AzureBackend, container: ContainerClient, name: str
) -> None:
    old = await granted(backend, name, "ann#1")
    await backend.leases.release(old)
    await container.get_blob_client(name).delete_blob()
    assert await backend.leases.inspect(name) == Vacant(name, 0)
    server.turn(2)  # the service's clock has whole seconds, so the blob must not be created in the same one
    assert (await granted(backend, name, "ann#2")).token > old.token


async def test_a_broken_lease_is_lost(backend: AzureBackend, container: ContainerClient, name: str) -> None:
    grant = await granted(backend, name, "ann#1")
    await BlobLeaseClient(container.get_blob_client(name)).break_lease(lease_break_period=0)
    assert await backend.leases.renew([grant], TTL) == [Lost(grant)]
    assert (await granted(backend, name, "bob#1")).token > grant.token


# --- fencing -----------------------------------------------------------------------------------------------------


async def test_the_service_fences_by_lease_id(
    server: Azurite, backend: AzureBackend, container: ContainerClient, name: str
) -> None:
    blob = container.get_blob_client(name)
    old = await granted(backend, name, "ann#1")
    await blob.set_blob_metadata((await blob.get_blob_properties()).metadata, lease=lease_id(old))
    server.turn(16)
    new = await granted(backend, name, "bob#1")
    metadata = (await blob.get_blob_properties()).metadata
    with pytest.raises(HttpResponseError):
        await blob.set_blob_metadata(metadata, lease=lease_id(old))
    with pytest.raises(HttpResponseError):
        await blob.set_blob_tags({"by": "ann"}, lease=lease_id(old))
    await blob.set_blob_tags({"by": "bob"}, lease=lease_id(new))
    await blob.set_blob_metadata(metadata, lease=lease_id(new))


async def test_a_fence_refuses_an_older_term(container: ContainerClient, name: str) -> None:
    blob: BlobClient = container.get_blob_client(name)
    fence = Fence(blob)
    await fence.upload(b"1", 1)
    await asyncio.gather(*(fence.upload(b"2", 2) for _ in range(3)))
    with pytest.raises(TermLost, match="newer term"):
        await fence.upload(b"late", 1)
    assert await (await blob.download_blob()).readall() == b"2"


# --- mistakes of the sample --------------------------------------------------------------------------------------


async def test_a_renewal_does_not_outlast_its_lease(server: Azurite, name: str) -> None:
    """Microsoft's client retries for longer than a lease lasts, and the task runs on meanwhile. tenure sends once."""
    async with FaultProxy("127.0.0.1", server.blob.port) as proxy:
        opened = azure_storage.open(Url.parse(f"azurite://127.0.0.1:{proxy.port}"))
        grant = await granted(opened, name, "ann#1")
        proxy.reset()
        proxy.refuse()
        asked_at = time.monotonic()
        with pytest.raises(Unavailable, match="can't be reached"):
            await opened.leases.renew([grant], TTL)
        assert time.monotonic() - asked_at < TTL / 2
        proxy.heal()
        assert await opened.leases.renew([grant], TTL) == [Granted(grant)]
        proxy.stall()
        patient, opened._account.options = opened._account.options, replace(opened._account.options, timeout=1.0)
        asked_at = time.monotonic()
        with pytest.raises(Unavailable, match="no answer within 1 s"):
            await opened.leases.renew([grant], TTL)
        assert time.monotonic() - asked_at < TTL / 2
        opened._account.options = patient
        proxy.heal()
        assert await opened.leases.renew([grant], TTL) == [Granted(grant)]
        await opened.close()


async def test_nothing_is_released_while_the_work_runs(server: Azurite, name: str) -> None:
    """The sample releases on cancellation, while its task may still be running."""
    done = asyncio.Event()
    cancelled = asyncio.Event()

    async def work(term: tenure.Term) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            await done.wait()

    async with tenure.connect(server.url) as one, tenure.connect(server.url) as other:
        stop = asyncio.Event()
        running = asyncio.ensure_future(one.election(name, ttl=TTL).run(work, stop=stop))
        watcher = other.election(name, ttl=TTL)
        await until(lambda: leads(watcher))
        assert await watcher.ask_to_resign()
        await asyncio.wait_for(cancelled.wait(), 30)
        assert await watcher.leader() is not None
        stop.set()
        done.set()
        await asyncio.wait_for(running, 30)
        assert await watcher.leader() is None


async def leads(election: tenure.Election) -> bool:
    return await election.leader() is not None


class AnswerLost(ServiceResponseError):
    """The answer to an executed request was lost."""


async def test_an_acquisition_with_a_lost_answer_can_be_repeated(
    backend: AzureBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to any request of an acquisition is lost: a repetition wins the same term."""
    for step in range(1, 20):
        other = f"{name}-{step}"
        was_lost = lose(monkeypatch, step)
        grant = None
        with suppress(Unavailable):
            grant = await granted(backend, other, "ann#1")
        monkeypatch.undo()
        grant = grant or await granted(backend, other, "ann#1")
        assert isinstance(found := await backend.leases.inspect(other), HeldBy)
        assert (found.holder, found.token) == ("ann#1", grant.token)
        assert await backend.leases.renew([grant], TTL) == [Granted(grant)]
        if not was_lost():
            assert step >= 4
            return
    raise AssertionError("an acquisition takes ever more requests")


@pytest.mark.parametrize("step", range(1, 5))
async def test_a_crash_during_an_acquisition_leaves_no_term(
    server: Azurite, backend: AzureBackend, name: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    old = await granted(backend, name, "old#1")
    await backend.leases.release(old)
    dying = azure_storage.open(Url.parse(server.url))
    lose(monkeypatch, step)
    with suppress(Unavailable):
        await dying.leases.acquire(name, "ann#1", TTL)
    monkeypatch.undo()
    await dying.close()
    server.turn(16)
    new = await granted(backend, name, "bob#1")
    assert new.token > old.token
    assert await backend.leases.renew([new], TTL) == [Granted(new)]


def lose(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], bool]:
    """Lose the answer to request number *step* from now on; return a function that checks whether there was one."""
    send, count = AioHttpTransport.send, 0

    async def lossy(self: AioHttpTransport, request: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        mine = count
        answer = await send(self, request, **options)
        if mine == step:
            raise AnswerLost("lost on its way, as the test wants it")
        return answer

    monkeypatch.setattr(AioHttpTransport, "send", lossy)
    return lambda: count >= step


async def test_the_worker_of_the_sample(server: Azurite) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "azure_worker.py"
    url = f"{server.url}&container=c{secrets.token_hex(6)}"

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            str(example),
            env={**os.environ, "TENURE_URL": url},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def says(process: asyncio.subprocess.Process, what: str) -> str:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while what not in (line := (await process.stdout.readline()).decode()):
                assert line, "it has ended"
        return line

    first = await start()
    term = await says(first, "is currently the leader")
    second = await start()
    assert str(first.pid) in await says(second, "sees that")
    for process, heir in ((first, second), (second, None)):
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await says(process, "is shutting down")
        if heir is not None:
            assert await says(heir, "is currently the leader") != term
        assert await process.wait() == 0


# --- without rights ----------------------------------------------------------------------------------------------


RIGHTS = ("read", "write", "delete", "list", "add", "create", "update", "process")


def sas(days: int = 3_000, /, **rights: bool) -> str:
    token: str = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(**rights),
        services=Services(blob=True, queue=True),
        expiry=datetime.now(UTC) + timedelta(days=days),
    )
    return token


def string(server: Azurite, secret: str) -> str:
    return f"AccountName={ACCOUNT};BlobEndpoint={server.blob.url};QueueEndpoint={server.queue.url};{secret}"


async def test_a_wrong_key_is_reported_and_not_shown(
    server: Azurite, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = KEY[:10] + KEY[10:].swapcase()
    monkeypatch.setenv("MINE", string(server, f"AccountKey={wrong}"))
    opened = azure_storage.open(Url.parse("azure://?connection_string_env=MINE"))
    for ask in (
        lambda: opened.leases.inspect(name),
        lambda: opened.leases.acquire(name, "ann#1", TTL),
        lambda: opened.broker.send(name, [Outgoing(b"a")]),
    ):
        with pytest.raises(ConfigError, match=r"does not permit|refused the login") as raised:
            await ask()
        assert wrong[:12] not in told(raised.value)
    await opened.close()


async def test_missing_rights_are_reported_and_the_signature_is_not_shown(
    server: Azurite, backend: AzureBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await granted(backend, f"{name}-there", "ann#1")
    signature = sas(read=True, list=True)
    monkeypatch.setenv("MINE", string(server, f"SharedAccessSignature={signature}"))
    asks: tuple[Callable[[AzureBackend], Awaitable[object]], ...] = (
        lambda fresh: fresh.leases.acquire(f"{name}-new", "ann#1", TTL),
        lambda fresh: fresh.broker.declare(name, {"max_deliveries": 3}),
        lambda fresh: fresh.broker.send(name, [Outgoing(b"a")]),
    )
    for ask in asks:
        fresh = azure_storage.open(Url.parse("azure://?connection_string_env=MINE"))
        for error in (ConfigError, Unavailable):
            with pytest.raises(TenureError) as raised:
                await ask(fresh)
            assert type(raised.value) is error
            assert "does not permit this user" in str(raised.value)
            assert "Storage Blob Data Contributor" in str(raised.value)
            assert signature.partition("sig=")[2].partition("&")[0] not in told(raised.value)
            assert f"{name}-there" in await fresh.leases.names()  # it may read: that works from now on
            assert name not in await fresh.broker.names()
        await fresh.close()


async def test_a_signature_that_has_ended_is_reported_and_not_shown(
    server: Azurite, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = sas(-1, **dict.fromkeys(RIGHTS, True))
    monkeypatch.setenv("MINE", string(server, f"SharedAccessSignature={signature}"))
    opened = azure_storage.open(Url.parse("azure://?connection_string_env=MINE"))
    for ask in (
        lambda: opened.leases.inspect(name),
        lambda: opened.leases.acquire(name, "ann#1", TTL),
        lambda: opened.broker.send(name, [Outgoing(b"a")]),
    ):
        with pytest.raises(ConfigError, match=r"when it ends|a signature that has ended") as raised:
            await ask()
        assert signature.partition("sig=")[2].partition("&")[0] not in told(raised.value)
    await opened.close()


async def test_all_rights_of_a_signature_are_enough(
    server: Azurite, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", string(server, f"SharedAccessSignature={sas(**dict.fromkeys(RIGHTS, True))}"))
    opened = azure_storage.open(Url.parse("azure://?connection_string_env=MINE"))
    grant = await granted(opened, name, "ann#1")
    assert await opened.leases.renew([grant], TTL) == [Granted(grant)]
    await opened.broker.send(name, [Outgoing(b"a")])
    assert [one.body for one in (await opened.broker.receive(name, 1, 30)).deliveries] == [b"a"]
    facts = await opened.describe()
    assert ("login", "shared access signature") in [(fact.name, fact.value) for fact in facts]
    await opened.close()


def told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# --- queues ------------------------------------------------------------------------------------------------------


async def test_other_clients_read_and_write_the_same_queue(server: Azurite, backend: AzureBackend, name: str) -> None:
    async with QueueClient.from_connection_string(server.connection_string, name) as client:
        await backend.broker.send(name, [Outgoing(b"from us")])
        [theirs] = [one async for one in client.receive_messages(max_messages=1)]
        assert theirs.content == "ZnJvbSB1cw=="
        await client.delete_message(theirs)
        await client.send_message("plain text!")
        await client.send_message("ZnJvbSB0aGVt")
        got = (await backend.broker.receive(name, 10, 30)).deliveries
        assert {one.body for one in got} == {b"plain text!", b"from them"}
        await backend.broker.settle([Settlement(one, COMPLETE) for one in got])
        await client.send_message("b25lIG1vcmU=")
        assert name in await backend.broker.names()


async def test_dead_letters_of_others_are_dead_letters(server: Azurite, backend: AzureBackend, name: str) -> None:
    async with QueueClient.from_connection_string(server.connection_string, f"{name}-poison") as client:
        await client.create_queue()
        await client.send_message("cG9pc29u")  # as an Azure Function does after five tries
    [dead] = await backend.broker.peek_dead(name, EVERYTHING, 10)
    assert (dead.body, dead.reason) == (b"poison", "unknown")
    assert await backend.broker.redrive(name, EVERYTHING, None) == 1
    [got] = (await backend.broker.receive(name, 10, 30)).deliveries
    assert (got.body, got.sequence, got.delivery_count) == (b"poison", dead.sequence, 1)


async def test_a_verdict_waits_for_a_concurrent_renewal(
    backend: AzureBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each renewal changes the receipt: a concurrent verdict must not be taken for another process's."""
    await backend.broker.send(name, [Outgoing(b"%d" % number) for number in range(10)])
    for verdict in (Abandon(), COMPLETE):
        got: list[Delivery] = []

        async def all_came(got: list[Delivery] = got) -> bool:  # the service may deliver fewer at a time than it has
            got.extend((await backend.broker.receive(name, 10, 300)).deliveries)
            return len(got) == 10

        await until(all_came)
        renewing = [asyncio.ensure_future(backend.broker.renew(got, 30)) for _ in range(3)]
        await asyncio.sleep(0)
        answers = await backend.broker.settle([Settlement(one, verdict) for one in got])
        assert list(answers) == [Settled()] * 10
        await asyncio.gather(*renewing)
    assert (await backend.broker.stats(name)).ready == 0


async def test_a_renewal_that_comes_after_the_verdict_locks_nothing(
    backend: AzureBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict returns a new receipt, with which a concurrent renewal could lock the message again."""
    send, is_settled, renewals = AioHttpTransport.send, asyncio.Event(), 0

    async def late(self: AioHttpTransport, request: Any, **options: Any) -> Any:
        nonlocal renewals
        if "visibilitytimeout=31" in request.url:
            renewals += 1
            await is_settled.wait()
        return await send(self, request, **options)

    await backend.broker.send(name, [Outgoing(b"a")])
    got = (await backend.broker.receive(name, 1, 30)).deliveries
    monkeypatch.setattr(AioHttpTransport, "send", late)
    for verdict in (Abandon(), GIVE_BACK):
        is_settled.clear()
        renewing = asyncio.ensure_future(backend.broker.renew(got, 31))
        before = renewals

        async def is_under_way(before: int = before) -> bool:
            return renewals > before

        await until(is_under_way)
        assert list(await backend.broker.settle([Settlement(got[0], verdict)])) == [Settled()]
        is_settled.set()
        assert list(await renewing) == [LAPSED]
        got = (await backend.broker.receive(name, 1, 30)).deliveries
        assert len(got) == 1


async def test_later_events_have_later_times(backend: AzureBackend, name: str) -> None:
    """The service answers in whole seconds, and late: the estimate of its clock must not jump back."""
    await backend.broker.declare(name, {"max_deliveries": 30})
    await backend.broker.send(name, [Outgoing(b"a")])
    for _ in range(30):
        [got] = (await backend.broker.receive(name, 1, 30)).deliveries
        await backend.broker.settle([Settlement(got, Abandon())])
    [dead] = await backend.broker.peek_dead(name, EVERYTHING, 10)
    dates = [attempt.at for attempt in dead.history]
    assert len(dates) == 30
    assert dates == sorted(dates)
    assert dead.enqueued_at <= dates[0] <= dates[-1] <= dead.dead_at


async def test_impossible_operations_are_refused_before_anything_is_written(backend: AzureBackend, name: str) -> None:
    broker = backend.broker
    for message in (Outgoing(b"a", session="s"), Outgoing(b"a", priority=1), Outgoing(b"a", delay=8 * 86_400.0)):
        with pytest.raises(MessageRefused, match=r"message 1 of 2: .*; none of them was sent") as refused:
            await broker.send(name, [Outgoing(b"fine"), message])
        assert refused.value.index == 1
    with pytest.raises(ConfigError, match="65,536"):
        await broker.send(name, [Outgoing(b"x" * 45_000, headers={"big": "y" * 6_000})])
    assert name not in await broker.names()
    await broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
    a, b = (await broker.receive(name, 10, 30)).deliveries
    for verdict in (Defer(), Complete(remember=1.0)):
        with pytest.raises(ConfigError):
            await broker.settle([Settlement(a, COMPLETE), Settlement(b, verdict)])
    assert list(await broker.settle([Settlement(a, COMPLETE), Settlement(b, COMPLETE)])) == [Settled(), Settled()]
    for ask in (broker.accept(name, None, 30), broker.receive_deferred(name, [1], 30), broker.handled(name, ["a"])):
        with pytest.raises(ConfigError, match="have no"):
            await ask


async def test_queues_work_through_the_public_interface(server: Azurite) -> None:
    name = f"orders-{secrets.token_hex(6)}"
    seen: list[bytes] = []
    async with tenure.connect(server.url) as backend:
        queue = backend.queue(name, max_deliveries=2)
        ids = await queue.send_batch([Outgoing(b"%d" % number) for number in range(40)])
        assert len(set(ids)) == 40
        await queue.send(b"bad")
        stop = asyncio.Event()

        async def handle(message: Message) -> None:
            if message.body == b"bad":
                raise ValueError("no such order")
            seen.append(message.body)

        consuming = asyncio.ensure_future(queue.consume(handle, concurrency=8, stop=stop))

        async def all_is_done() -> bool:
            return len(seen) >= 40 and bool(await queue.dead_letters.peek())

        await until(all_is_done)
        stop.set()
        await asyncio.wait_for(consuming, 30)
        assert sorted(map(int, seen)) == list(range(40))
        [dead] = await queue.dead_letters.peek()
        assert (dead.body, dead.reason, dead.delivery_count) == (b"bad", "max_deliveries", 2)
        assert dead.error is not None
        assert "no such order" in dead.error.message
        assert dead_letters_of(name) not in await backend.queues()

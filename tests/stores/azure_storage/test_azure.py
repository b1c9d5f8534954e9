"""Tests of Azure Storage alone: polling consumers, moves to the dead letters in steps, texts of other clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha1
from typing import Any

import pytest

pytest.importorskip("azure.storage.queue")

from azure.core.exceptions import HttpResponseError
from azure.storage.blob.aio import BlobLeaseClient, BlobServiceClient
from azure.storage.queue import QueueClient, QueueMessage

import tenure
from tenure._backends import azure_storage
from tenure._backends.azure_storage import background, dead_letters, live, removal, requests, settling
from tenure._backends.azure_storage import leases as leases_module
from tenure._backends.azure_storage.client import LoopConnections, Refused
from tenure._backends.azure_storage.names import POISON_SUFFIX, queue_of
from tenure._backends.azure_storage.queue import QUIET_CLAIMS, RECHECK_AFTER, AzureBroker
from tenure._backends.azure_storage.receipts import Receipts
from tenure._lease import Granted, HeldBy, NoAnswer
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, LiveSelection, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import MAX_DELIVERIES, Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, SETTLED, Abandon, DeadLetter, Renewed, Settled, Settlement, Verdict
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.events import BrokerUnanswered, CampaignFailed, MessageDied, ResultDiscarded, TermBegan, TermEnding
from tenure.testing import until
from tenure.testing._conformance.leases.faults import Candidates
from tests.durations import PATIENCE, stretched
from tests.servers import Azurite, patient, shared, url_of
from tests.servers.gate import HttpGate


@asynccontextmanager
async def opened(options: str = "") -> AsyncIterator[azure_storage.AzureBackend]:
    backend = azure_storage.open(Url.parse(patient(url_of(Azurite) + options)))
    try:
        yield backend
    finally:
        await backend.close()


async def test_a_foreign_holder_is_found_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"listed/{number}" for number in range(leases_module.FEW + 2)]
    async with opened() as ann:
        answer = await ann.leases.acquire(names[0], "ann#1", 60.0)
        assert isinstance(answer, Granted)
        async with BlobServiceClient.from_connection_string(shared(Azurite).connection_string) as service:
            blob = service.get_container_client("leases").get_blob_client(names[1])
            await blob.upload_blob(b"", overwrite=True)
            taken = BlobLeaseClient(blob)
            await taken.acquire(lease_duration=60)
            found = await ann.leases.inspect_many(names)
            assert [one.holder for one in found if isinstance(one, HeldBy)] == ["ann#1", leases_module.FOREIGN_HOLDER]
            monkeypatch.setattr(leases_module, "TERM_CHECKS", (60.0,))  # no more: it is known by its ETag
            assert await ann.leases.inspect_many(names) == found
            await taken.release()
        await ann.leases.release(answer.grant)


async def test_an_empty_claim_is_repeated_soon_while_messages_are_invisible() -> None:
    async with opened() as mine, opened() as others:
        await others.broker.send("out-of-sight", [Outgoing(b"a")])
        [held] = (await others.broker.receive("out-of-sight", 1, 30.0)).deliveries
        claims = [await mine.broker.receive("out-of-sight", 1, 30.0) for _ in range(QUIET_CLAIMS + 2)]
        assert {claim.due_in for claim in claims[:QUIET_CLAIMS]} == {None}
        assert {claim.due_in for claim in claims[QUIET_CLAIMS:]} == {RECHECK_AFTER}
        await others.broker.settle([Settlement(held, COMPLETE)])
        assert (await mine.broker.receive("out-of-sight", 1, 30.0)).due_in is None


async def test_an_idle_consumer_gets_a_dead_consumers_message_soon_after_its_lock() -> None:
    lock, received_at = stretched(4.0), list[float]()  # longer than the consumer claims again by itself

    def handle(message: tenure.Message) -> None:
        received_at.append(time.monotonic())

    async with opened() as dead, tenure.connect(patient(url_of(Azurite))) as backend:
        queue = backend.queue("from-the-dead", lock=lock)
        await queue.send(b"a")
        locked = time.monotonic()
        assert len((await dead.broker.receive("from-the-dead", 1, lock)).deliveries) == 1
        soon = stretched(5.0)
        consuming = asyncio.ensure_future(queue.consume(handle, poll_every=PATIENCE))
        await until(lambda: received_at)
        await queue.drain()
        await consuming
    assert received_at[0] - locked < lock + soon


# --- messages of other clients -----------------------------------------------------------------------------------


def native(name: str) -> QueueClient:
    return QueueClient.from_connection_string(shared(Azurite).connection_string, name)


@pytest.mark.parametrize("text", ["data.[]", 'data."x"', 'data.{"ttl": "soon"}', 'data.{"history": [[1]]}'])
async def test_a_text_that_looks_like_ours_is_a_message(text: str) -> None:
    got: list[bytes] = []
    async with tenure.connect(patient(url_of(Azurite))) as backend:
        queue = backend.queue(f"looks-like-ours-{text}")
        await queue.send(b"warm up")
        with native(queue_of(queue.name)) as client:
            client.send_message(text)
        assert (await queue.stats()).ready == 2
        await queue.consume(lambda message: got.append(message.body), until_empty=True)
    assert got == [b"warm up", text.encode()]


LONG = ["x," * 25_000, "x," * 32_500, "x," * 32_768, "YWJj" * 16_384]
"""Plain texts that are too long for base64, with and without room for properties; and base64 that leaves no room."""


@pytest.mark.parametrize("text", LONG)
async def test_a_text_too_long_for_properties_delays_no_other_message(text: str) -> None:
    body = b"abc" * 16_384 if text.startswith("YWJj") else text.encode()
    got: list[int] = []

    def handle(message: tenure.Message) -> None:
        if message.body == body:
            got.append(message.delivery_count)
            raise ValueError("too much")

    async with tenure.connect(patient(url_of(Azurite))) as backend:
        queue = backend.queue(f"too-long-{sha1(text.encode()).hexdigest()[:8]}", max_deliveries=3)
        await queue.send(b"warm up")
        with native(queue_of(queue.name)) as client:
            client.send_message(text)
        await queue.send(b"good")
        await queue.consume(handle, until_empty=True, retry=tenure.RetryPolicy(initial=0, maximum=0))
        assert await queue.stats() == tenure.Stats(dead=1)
        [letter] = await queue.dead_letters.peek()
        assert (got, letter.body) == ([1, 2, 3], body)
        if len(text) <= 65_000:
            assert (letter.reason, letter.delivery_count) == ("max_deliveries", 3)
        assert await queue.dead_letters.redrive() == 1
        [message] = await queue.receive()
        assert message.body == body
        await message.give_back()
        [message] = await queue.receive()
        await message.dead_letter("too long", "for us")
        [message] = await queue.dead_letters.receive()
        assert message.body == body
        await message.abandon()
        [message] = await queue.dead_letters.receive()
        await message.complete()
        assert await queue.stats() == tenure.Stats()


@pytest.mark.parametrize("text", LONG)
async def test_a_claim_that_finds_a_long_text_dead_receives_the_others(text: str) -> None:
    async with tenure.connect(patient(url_of(Azurite))) as backend:
        queue = backend.queue(f"found-dead-{sha1(text.encode()).hexdigest()[:8]}", max_deliveries=1)
        await queue.send(b"warm up")
        [message] = await queue.receive()
        await message.complete()
        with native(queue_of(queue.name)) as client:
            client.send_message(text)
            [taken] = client.receive_messages(max_messages=1, visibility_timeout=1)
            client.update_message(taken, visibility_timeout=0)
        await queue.send(b"good")
        assert [one.body for one in await queue.receive(max=10)] == [b"good"]
        assert (await queue.stats()).dead == 1


async def test_a_message_that_could_not_be_dead_lettered_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*given: object, **more: object) -> None:
        raise HttpResponseError("RequestBodyTooLarge")

    async with opened() as backend:
        broker = backend.broker
        await broker.declare("not-buried", {"max_deliveries": 1})
        await broker.send("not-buried", [Outgoing(b"bad")])
        [bad] = (await broker.receive("not-buried", 10, 60.0)).deliveries
        held = broker._receipts.find(bad)
        assert held is not None
        await backend._account.run(lambda connections: broker._receipts.update(connections, held, 0))
        await broker.send("not-buried", [Outgoing(b"good")])
        monkeypatch.setattr(dead_letters, "put", refused)
        assert [one.body for one in (await broker.receive("not-buried", 10, 60.0)).deliveries] == [b"good"]


@asynccontextmanager
async def silent_dead(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Event]:
    """Block requests to the dead letters until the event is set."""
    put, answers = requests.put, asyncio.Event()

    async def put_later(connections: LoopConnections, *, queue: str, text: str, delay: int) -> QueueMessage:
        if queue.endswith(DEAD_SUFFIX):
            await answers.wait()
        return await put(connections, queue=queue, text=text, delay=delay)

    with monkeypatch.context() as patch:
        patch.setattr(dead_letters, "put", put_later)
        yield answers


async def send_one_dead_and_one_good(broker: AzureBroker, queue: str) -> None:
    await broker.declare(queue, {"max_deliveries": 1})
    await broker.send(queue, [Outgoing(b"bad")])
    with native(queue_of(queue)) as client:
        [taken] = client.receive_messages(max_messages=1, visibility_timeout=30)
        client.update_message(taken, visibility_timeout=0)
    await broker.send(queue, [Outgoing(b"good")])


@pytest.mark.parametrize("answers_at_last", [True, False])
async def test_silent_dead_letters_take_no_lock_from_the_others(
    monkeypatch: pytest.MonkeyPatch, answers_at_last: bool
) -> None:
    name, lock = f"silent-dead-{answers_at_last}".lower(), 6.0
    async with silent_dead(monkeypatch) as answers, opened() as others:
        async with opened("&timeout=20") as backend:  # more than the lock
            broker = backend.broker
            await send_one_dead_and_one_good(broker, name)
            [good] = (await broker.receive(name, 10, lock)).deliveries
            assert good.body == b"good"
            assert await broker.settle([Settlement(good, COMPLETE)]) == [SETTLED]
            assert (await broker.stats(name)).dead == 0
            died: list[str] = []

            async def is_reported() -> bool:
                died.extend(one.reason for one in (await broker.receive(name, 10, lock)).died)
                return bool(died)

            if answers_at_last:
                answers.set()
                await until(is_reported)
                assert died == [MAX_DELIVERIES]
        stats = await others.broker.stats(name)
        assert (stats.dead, stats.ready + stats.locked) == ((1, 0) if answers_at_last else (0, 1))
        assert not [task for task in asyncio.all_tasks() if "dead-letters" in task.get_name()]


# --- one of many ---


@asynccontextmanager
async def silent_about(word: bytes, behind: int) -> AsyncIterator[int]:
    """Relay to the service at the port *behind*, but drop requests that contain *word*; yield the relay's port."""
    tasks = set[asyncio.Task[None]]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keeps: bool) -> None:
        silent = False
        try:
            while data := await reader.read(65_536):
                silent = silent or (keeps and word in data)
                if not silent:
                    writer.write(data)
        finally:
            writer.close()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside = await asyncio.open_connection("127.0.0.1", behind)
        for task in (relay(reader, inside[1], keeps=True), relay(inside[0], writer, keeps=False)):
            tasks.add(asyncio.ensure_future(task))

    listening = await asyncio.start_server(welcome, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lease_without_an_answer_delays_no_other() -> None:
    server = shared(Azurite)
    async with opened() as well, silent_about(b"renewed-not", shared(Azurite).blob.port) as port:
        grants = []
        for name in ("renewed-1", "renewed-not", "renewed-2"):
            answer = await well.leases.acquire(name, "ann#1", 60)
            assert isinstance(answer, Granted)
            grants.append(answer.grant)
        url = f"azurite://127.0.0.1:{port}?queue_port={server.queue.port}&timeout=2"
        hurt = azure_storage.open(Url.parse(url))
        first, lacking, last = await hurt.leases.renew(grants, 60)
        assert (first, last) == (Granted(grants[0]), Granted(grants[2]))
        assert isinstance(lacking, NoAnswer)
        with pytest.raises(tenure.Unavailable):
            await hurt.leases.renew([grants[1]], 60)
        await hurt.close()


async def test_a_verdict_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "STRAGGLER_WAIT", 0.2)
    monkeypatch.setattr(background, "CLOSE_WAIT", 0.2)
    server, name = shared(Azurite), "hanging-verdict"
    async with silent_about(f"{queue_of(name)}{POISON_SUFFIX}".encode(), server.queue.port) as port:
        backend = azure_storage.open(Url.parse(f"azurite://127.0.0.1:{server.blob.port}?queue_port={port}&timeout=60"))
        try:
            await backend.broker.send(name, [Outgoing(b"bad"), *[Outgoing(b"good")] * 40])
            got = (await backend.broker.receive(name, 100, 60.0)).deliveries
            verdicts = [DeadLetter("hangs") if one.body == b"bad" else COMPLETE for one in got]
            async with asyncio.timeout(30.0):
                answers = await backend.broker.settle(list(map(Settlement, got, verdicts)))
            expected = [SETTLED if verdict is COMPLETE else NoAnswer for verdict in verdicts]
            assert [type(one) if isinstance(one, NoAnswer) else one for one in answers] == expected
        finally:
            await backend.close()


async def test_a_consumer_continues_beside_a_verdict_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that was answered is not repeated, and one that hung is applied once."""
    monkeypatch.setattr(settling, "STRAGGLER_WAIT", 0.1)
    events: list[tenure.events.Event] = []

    async def work(message: tenure.Message) -> None:
        if message.body == b"bad":
            raise tenure.Reject("hangs")

    async with (
        silent_dead(monkeypatch) as answers,
        tenure.connect(patient(url_of(Azurite)), on_event=events.append) as backend,
    ):
        queue = backend.queue("beside-a-hanging-verdict", lock=10.0)
        await queue.send_batch([tenure.Outgoing(body) for body in (b"bad", b"good", b"good")])
        consuming = asyncio.ensure_future(queue.consume(work, poll_every=0.1))
        await until(lambda: [one for one in events if isinstance(one, BrokerUnanswered) and one.what == "settle"])
        await queue.send(b"good")
        await until_left(queue, 1)
        answers.set()
        await until_left(queue, 0)
        await queue.drain()
        await consuming
        assert (await queue.stats()).dead == 1
    kinds = [type(one) for one in events if isinstance(one, MessageDied | ResultDiscarded)]
    assert kinds == [MessageDied]


async def until_left(queue: tenure.Queue, count: int) -> None:
    async def are_left() -> bool:
        stats = await queue.stats()
        return stats.ready + stats.locked == count

    await until(are_left)


async def test_dead_letters_behind_many_others_are_found_by_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "ROUND", requests.PAGE)
    async with opened() as backend:
        broker = backend.broker
        for reason, count in (("front", 34), ("behind", 3)):
            await broker.send("by-reason", [Outgoing(b"a")] * count)
            while deliveries := (await broker.receive("by-reason", 32, 30.0)).deliveries:
                await broker.settle([Settlement(one, DeadLetter(reason)) for one in deliveries])
        assert await broker.redrive("by-reason", Selection(reason="behind"), 2) == 2
        assert await broker.purge("by-reason", Selection(reason="behind"), None) == 1
        assert await broker.purge("by-reason", Selection(reason="front"), 33) == 33
        assert await broker.purge("by-reason", Selection(reason="front"), None) == 1
        assert (await broker.stats("by-reason")).dead == 0


async def test_a_purge_counts_what_it_has_removed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def another_process_is_first(_: LoopConnections, one: Any) -> None:
        queue.delete_message(one.raw.id, one.raw.pop_receipt)

    async with opened() as backend:
        await backend.broker.send("beside", [Outgoing(b"a"), Outgoing(b"b")])
        queue = native("beside")
        monkeypatch.setattr(live, "drop", another_process_is_first)
        assert await backend.broker.purge_live("beside", EVERY_LIVE) == 0


async def test_a_purge_that_fails_hides_nothing_that_it_was_not_to_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ConfigError("not to be removed")

    async with opened() as backend:
        await backend.broker.send("in-part", [Outgoing(b"goes", id="goes"), Outgoing(b"stays", id="stays")])
        monkeypatch.setattr(live, "drop", fail)
        with pytest.raises(ConfigError, match="not to be removed"):
            await backend.broker.purge_live("in-part", LiveSelection(ids=frozenset(["goes"])))
        [got] = (await backend.broker.receive("in-part", 32, 30.0)).deliveries
        assert (got.body, got.delivery_count) == (b"stays", 1)


# --- concurrent changes ------------------------------------------------------------------------------------------


async def test_a_term_between_the_read_and_the_acquisition_keeps_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = leases_module._take_lease
    async with opened() as ann, opened() as bob:

        async def a_term_of_bob() -> int:
            answer = await bob.leases.acquire("between", "bob#1", 60.0)
            assert isinstance(answer, Granted)
            await bob.leases.release(answer.grant)
            return answer.grant.token

        async def too_late(*arguments: Any) -> bool:
            monkeypatch.setattr(leases_module, "_take_lease", taken)
            tokens.append(await a_term_of_bob())
            return await taken(*arguments)

        tokens = [await a_term_of_bob()]
        monkeypatch.setattr(leases_module, "_take_lease", too_late)
        answer = await ann.leases.acquire("between", "ann#1", 60.0)
        assert isinstance(answer, Granted)
        assert tokens[0] < tokens[1] < answer.grant.token


async def test_a_verdict_waits_for_the_receipt_that_a_renewal_brings() -> None:
    async with opened() as backend:
        broker = backend.broker
        await broker.send("receipt", [Outgoing(b"a")])
        [got] = (await broker.receive("receipt", 1, 30.0)).deliveries
        held = broker._receipts.find(got)
        assert held is not None
        newest, old = held.receipt, "AgAAAAMAAAAAAAAAAAAAAAAAAAA="
        held.receipt, held.open_requests = old, 1  # as if a renewal on another thread waited for its answer
        settling = asyncio.ensure_future(broker.settle([Settlement(got, Abandon(delay=20.0))]))
        await until(lambda: held.open_requests == 2)
        await until(lambda: held.open_requests == 1 or settling.done())
        held.receipt, held.open_requests = newest, held.open_requests - 1
        assert list(await settling) == [Settled()]

        async def never(receipt: str) -> None:
            raise AssertionError("the message is no longer ours")

        # A concurrent renewal must not use the receipt that the verdict returned.
        assert isinstance(await broker._receipts.with_receipt(held, never), Refused)
        assert (await broker.receive("receipt", 1, 30.0)).deliveries == ()


# --- deleted containers and queues -------------------------------------------------------------------------------


def still_being_deleted(line: str) -> tuple[int, str] | None:
    """Refuse a request that would create it again, as the service does for half a minute after a deletion."""
    method, target, _ = line.split()
    path, _, query = target.partition("?")
    if method == "PUT" and "restype=container" in query:
        return 409, "ContainerBeingDeleted"
    return (409, "QueueBeingDeleted") if method == "PUT" and path.count("/") == 2 and "comp" not in query else None


async def test_candidates_outlast_a_container_that_is_deleted() -> None:
    server = shared(Azurite)
    async with HttpGate(server.blob.port) as gate:
        url = f"azurite://127.0.0.1:{gate.port}?queue_port={server.queue.port}&container=deleted"
        backends = [azure_storage.open(Url.parse(url)) for _ in range(2)]
        candidates = Candidates("office", azure_storage.TRAITS.ttl_min)
        try:
            for backend in backends:
                await candidates.candidate(backend.leases)
            await until(lambda: candidates.events_of(TermBegan))
            gate.refusal = still_being_deleted
            async with BlobServiceClient.from_connection_string(server.connection_string) as user:
                await user.delete_container("deleted")
            await until(lambda: candidates.events_of(TermEnding))
            failures = len(candidates.events_of(CampaignFailed))
            await until(lambda: len(candidates.events_of(CampaignFailed)) > failures + 1)
            assert len(candidates.events_of(TermBegan)) == 1
            gate.heal()
            await until(lambda: len(candidates.events_of(TermBegan)) == 2)
        finally:
            await candidates.close()
            for backend in backends:
                await backend.close()


async def test_a_consumer_outlasts_a_queue_that_is_deleted() -> None:
    server = shared(Azurite)
    handled: list[bytes] = []

    async def work(message: tenure.Message) -> None:
        handled.append(message.body)

    async with HttpGate(server.queue.port) as gate:
        url = f"azurite://127.0.0.1:{server.blob.port}?queue_port={gate.port}"
        async with tenure.connect(url) as backend:
            queue = backend.queue("deleted-meanwhile")
            await queue.send(b"a")
            consuming = asyncio.ensure_future(queue.consume(work, poll_every=0.1))
            await until(lambda: handled == [b"a"] or consuming.done())
            gate.refusal = still_being_deleted
            native(queue_of("deleted-meanwhile")).delete_queue()
            with pytest.raises(tenure.Unavailable, match="QueueBeingDeleted"):
                await queue.send(b"b")
            gate.heal()
            await queue.send(b"c")
            await until(lambda: handled == [b"a", b"c"] or consuming.done())
            assert not consuming.done()
            await queue.drain()
            await consuming


async def test_a_message_that_can_not_be_renewed_costs_the_locks_of_no_other() -> None:
    server = shared(Azurite)
    async with HttpGate(server.queue.port) as gate:
        backend = azure_storage.open(Url.parse(f"azurite://127.0.0.1:{server.blob.port}?queue_port={gate.port}"))
        broker = backend.broker
        await broker.send("one-cut", [Outgoing(b"a"), Outgoing(b"b"), Outgoing(b"c")])
        got = [one for _ in range(3) for one in (await broker.receive("one-cut", 1, 30.0)).deliveries]
        cut = broker._receipts._held[got[1][:3]].message
        gate.refusal = lambda line: (503, "ServerBusy") if f"/messages/{cut}?" in line else None
        answers = list(await broker.renew(got, 30.0))
        assert [type(answer) for answer in answers] == [Renewed, NoAnswer, Renewed]
        with pytest.raises(tenure.Unavailable, match="ServerBusy"):
            await broker.renew(got[1:2], 30.0)
        gate.heal()
        assert [type(answer) for answer in await broker.renew(got, 30.0)] == [Renewed] * 3
        assert list(await broker.settle([Settlement(one, COMPLETE) for one in got])) == [SETTLED] * 3
        await backend.close()


# --- a move to the dead letters that is cut ------------------------------------------------------------------------


@contextmanager
def move_cut_at(step: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside the block, lose the answer to one of the requests that move a message to the dead letters."""

    async def lose(*_: object, **__: object) -> None:
        raise tenure.Unavailable("the answer was lost, as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(dead_letters if step == "put" else Receipts, step, lose)
        yield


async def begin_to_reject(broker: AzureBroker, queue: str, step: str, monkeypatch: pytest.MonkeyPatch) -> Delivery:
    await broker.send(queue, [Outgoing(b"bad", id="bad")])
    [got] = (await broker.receive(queue, 1, 30.0)).deliveries
    with move_cut_at(step, monkeypatch), pytest.raises(tenure.Unavailable):
        await broker.settle([Settlement(got, DeadLetter("why"))])
    return got


@pytest.mark.parametrize("step", ["put", "delete"])
async def test_another_process_finishes_a_move_that_was_cut(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(dead_letters, "MOVE_LOCK", 1)
    name, died = f"move-cut-at-{step}", list[tuple[str, int, str]]()
    async with opened() as first, opened() as second:
        await begin_to_reject(first.broker, name, step, monkeypatch)

        async def is_dead() -> bool:
            claim = await second.broker.receive(name, 10, 30.0)
            assert claim.deliveries == ()
            died.extend((one.id, one.delivery_count, one.reason) for one in claim.died)
            return bool(died)

        await until(is_dead)
        assert died == [("bad", 1, "why")]
        [letter] = await second.broker.peek_dead(name, EVERYTHING, 10)
        assert (letter.id, letter.body, letter.reason, letter.delivery_count) == ("bad", b"bad", "why", 1)
        assert await second.broker.stats(name) == tenure.Stats(dead=1)


@pytest.mark.parametrize("step", ["put", "delete"])
@pytest.mark.parametrize("verdict", [DeadLetter("why"), COMPLETE], ids=["again", "complete"])
async def test_a_verdict_after_a_move_that_was_cut_finishes_it(
    monkeypatch: pytest.MonkeyPatch, step: str, verdict: Verdict
) -> None:
    name = f"verdict-after-{step}-{type(verdict).__name__}".lower()
    async with opened() as backend:
        got = await begin_to_reject(backend.broker, name, step, monkeypatch)
        assert await backend.broker.peek(name, EVERY_LIVE, 10) == []
        answers = await backend.broker.settle([Settlement(got, verdict)])
        assert answers == [LAPSED if verdict == COMPLETE else SETTLED]
        assert await backend.broker.stats(name) == tenure.Stats(dead=1)


async def test_copies_of_a_dead_letter_are_one() -> None:
    async with opened() as backend:
        broker = backend.broker
        for body in (b"bad", b"other"):
            await broker.send("copies", [Outgoing(body)])
            [got] = (await broker.receive("copies", 1, 30.0)).deliveries
            await broker.settle([Settlement(got, DeadLetter("why"))])
        with native(queue_of("copies") + POISON_SUFFIX) as client:
            for one in client.peek_messages(max_messages=32):
                client.send_message(one.content)
        assert sorted(one.body for one in await broker.peek_dead("copies", EVERYTHING, 10)) == [b"bad", b"other"]
        assert await broker.redrive("copies", EVERYTHING, 1) == 1
        assert await broker.purge("copies", EVERYTHING, None) == 1
        stats = await broker.stats("copies")
        assert (stats.ready, stats.dead) == (1, 0)


async def test_a_schedule_that_advances_while_its_queue_is_deleted_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as backend, opened() as other:
        broker = backend.broker
        for schedule in ("idle", "busy"):
            assert (await broker.advance(name, schedule, None, "1")).is_done
        remove = broker._kept.remove

        async def advance_and_remove(blobs: Any) -> None:
            assert (await other.broker.advance(name, "busy", "1", "2")).is_done
            await remove(blobs)

        monkeypatch.setattr(broker._kept, "remove", advance_and_remove)
        await broker.delete(name)
        assert (await other.broker.schedules(name)).records == {"busy": "2"}
        monkeypatch.undo()
        await broker.delete(name)
        assert (await other.broker.schedules(name)).records == {}


async def test_a_queue_can_be_deleted_without_the_right_to_blobs(name: str) -> None:
    server = shared(Azurite)
    async with HttpGate(server.blob.port) as gate, opened() as owner:
        gate.refusal = lambda line: (403, "AuthorizationPermissionMismatch")
        url = f"azurite://127.0.0.1:{gate.port}?queue_port={server.queue.port}"
        backend = azure_storage.open(Url.parse(url))
        await backend.broker.send(name, [Outgoing(b"a")])
        await backend.broker.delete(name, force=True)
        assert name not in await owner.broker.names()
        with pytest.raises(Unavailable, match="does not permit"):
            await backend.broker.schedules(name)
        await backend.close()

"""The client library by itself on the look-alike: behaviours on which the backend is built, or which it replaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import (
    MessageLockLostError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

import tenure
from tests.interop.azure_client import wait_for_frames_only
from tests.servers import ServiceBus, shared
from tests.servers.servicebus import connection_string
from tests.stores.servicebus.opened import look_shortly

PATIENCE = 30.0
"""Seconds in which a message comes that is there, also on a busy machine."""


@pytest.fixture
def server() -> Iterator[ServiceBus]:
    server = shared(ServiceBus)
    server.reset()
    yield server
    server.reset()


@pytest_asyncio.fixture
async def client(server: ServiceBus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceBusClient]:
    look_shortly(monkeypatch)
    wait_for_frames_only(monkeypatch)
    async with tenure.connect(server.url) as backend:
        await backend.queue("plain").declare(lock=30, max_deliveries=3)
        await backend.queue("plain").send(b"to be removed")
        await backend.queue("plain").purge()
        await backend.queue("sessions").send(b"to be removed", session="first")
        await backend.queue("sessions").purge()
    async with ServiceBusClient.from_connection_string(server.connection_string, retry_total=0) as client:
        yield client


async def send(client: ServiceBusClient, *bodies: bytes, queue: str = "plain", session: str | None = None) -> None:
    async with client.get_queue_sender(queue) as sender:
        await sender.send_messages([ServiceBusMessage(body, session_id=session) for body in bodies])


def properties_of(message: ServiceBusReceivedMessage) -> dict[str, object]:
    found: dict[Any, object] = dict(message.application_properties or {})
    return {bytes(name).decode(): value for name, value in found.items()}


async def received(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """Return the next *count* messages, in as many steps as it takes."""
    found: list[ServiceBusReceivedMessage] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < count:
            found += await receiver.receive_messages(count - len(found), max_wait_time=PATIENCE)
    return found


async def bodies(receiver: ServiceBusReceiver, count: int) -> list[bytes]:
    return [b"".join(one.body) for one in await received(receiver, count)]


async def is_given_nothing(receiver: ServiceBusReceiver) -> bool:
    return await receiver.receive_messages(1, max_wait_time=0.5) == []


async def test_a_message_passes_unchanged(client: ServiceBusClient) -> None:
    sent = ServiceBusMessage(
        b"\0\xff",
        message_id="id",
        correlation_id="correlation",
        reply_to="answers",
        reply_to_session_id="reply-session",
        subject="subject",
        to="to",
        content_type="application/json",
        application_properties={"text": "é", "whole": 7, "number": 1.5, "yes": True},
        time_to_live=timedelta(seconds=100),
    )
    async with client.get_queue_sender("plain") as sender, client.get_queue_receiver("plain") as receiver:
        await sender.send_messages(sent)
        [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        assert b"".join(got.body) == b"\0\xff"
        for name in (
            "message_id",
            "correlation_id",
            "reply_to",
            "reply_to_session_id",
            "subject",
            "to",
            "content_type",
        ):
            assert getattr(got, name) == getattr(sent, name), name
        assert properties_of(got) == {
            "text": "é".encode(),
            "whole": 7,
            "number": 1.5,
            "yes": True,
        }
        assert got.time_to_live == timedelta(seconds=100)
        assert (got.delivery_count, got.sequence_number) == (0, 2)
        await receiver.complete_message(got)


async def test_a_late_complete_is_refused(server: ServiceBus, client: ServiceBusClient) -> None:
    await send(client, b"a")
    async with client.get_queue_receiver("plain") as receiver:
        [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        server.turn(31)
        for verb in (receiver.complete_message, receiver.abandon_message, receiver.defer_message):
            with pytest.raises(MessageLockLostError):
                await verb(got)
        with pytest.raises(MessageLockLostError):
            await receiver.renew_message_lock(got)
        [again] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        assert again.delivery_count == 1


async def test_a_message_dies_with_its_last_delivery(client: ServiceBusClient) -> None:
    await send(client, b"a")
    async with (
        client.get_queue_receiver("plain") as receiver,
        client.get_queue_receiver("plain", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead,
    ):
        numbers = set()
        for count in range(3):
            [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
            assert got.delivery_count == count
            numbers.add(got.sequence_number)
            await receiver.abandon_message(got)
        [letter] = await dead.receive_messages(1, max_wait_time=PATIENCE)
        assert letter.dead_letter_reason == "MaxDeliveryCountExceeded"
        assert letter.sequence_number == numbers.pop()
        assert not numbers


async def test_receiving_leaves_credit_behind(server: ServiceBus, client: ServiceBusClient) -> None:
    """Which is why claims drain it: another receiver doesn't get the next message for a while."""
    async with client.get_queue_receiver("plain") as receiver, client.get_queue_receiver("plain") as other:
        assert await is_given_nothing(receiver)
        assert int(server.control("credit", "plain")) > 0
        await send(client, b"a")
        assert await is_given_nothing(other)


async def test_closing_releases_what_was_prefetched(client: ServiceBusClient) -> None:
    await send(client, *[b"%d" % number for number in range(5)])
    async with client.get_queue_receiver("plain", prefetch_count=10) as receiver:
        assert len(await received(receiver, 1)) == 1
        async with asyncio.timeout(PATIENCE):
            while receiver._handler._received_messages.qsize() < 4:  # until they have come, too
                await receiver._handler._connection.listen(wait=0.1, batch=10)
    async with client.get_queue_receiver("plain") as other:
        again = await received(other, 4)
        assert {one.delivery_count for one in again} == {0}  # released is not abandoned


async def test_a_message_is_settled_over_another_link_after_a_detach(
    server: ServiceBus, client: ServiceBusClient
) -> None:
    await send(client, b"a")
    async with client.get_queue_receiver("plain") as receiver:
        [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        server.control("detach", "plain")
        await receiver.complete_message(got)  # by its lock token, over the management link
    async with client.get_queue_receiver("plain") as other:
        assert await is_given_nothing(other)


async def test_a_detached_link_is_an_error_that_a_retry_mends(server: ServiceBus, client: ServiceBusClient) -> None:
    async with client.get_queue_receiver("plain") as receiver:
        assert await is_given_nothing(receiver)
        server.control("detach", "plain")
        with pytest.raises((ServiceBusConnectionError, ServiceBusError)):
            await receiver.receive_messages(1, max_wait_time=PATIENCE)
        await send(client, b"a")
        [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        assert b"".join(got.body) == b"a"


async def test_a_session_is_taken_once(client: ServiceBusClient) -> None:
    await send(client, b"a", b"b", queue="sessions", session="s")
    async with client.get_queue_receiver(
        "sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=PATIENCE
    ) as holder:
        assert holder.session.session_id == "s"
        assert await bodies(holder, 2) == [b"a", b"b"]
        with pytest.raises(SessionCannotBeLockedError):
            async with client.get_queue_receiver("sessions", session_id="s"):
                pass
        began = time.monotonic()
        with pytest.raises(OperationTimeoutError):  # by the service, which without a time waits for 65 s
            async with client.get_queue_receiver("sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=0.1):
                pass
        assert time.monotonic() - began < PATIENCE
        await holder.session.set_state(b"state")
    async with client.get_queue_receiver("sessions", session_id="s") as again:
        assert await again.session.get_state() == b"state"
        assert await bodies(again, 2) == [b"a", b"b"]


async def test_a_session_lock_ends(server: ServiceBus, client: ServiceBusClient) -> None:
    await send(client, b"a", queue="sessions", session="s")
    async with client.get_queue_receiver("sessions", session_id="s") as holder:
        [got] = await holder.receive_messages(1, max_wait_time=PATIENCE)
        server.turn(61)
        with pytest.raises((SessionLockLostError, ServiceBusConnectionError)):
            await holder.complete_message(got)
    async with client.get_queue_receiver("sessions", session_id="s") as again:
        [later] = await again.receive_messages(1, max_wait_time=PATIENCE)
        assert later.delivery_count == 1


async def test_deferred_scheduled_and_peeked(server: ServiceBus, client: ServiceBusClient) -> None:
    await send(client, b"a")
    async with client.get_queue_sender("plain") as sender, client.get_queue_receiver("plain") as receiver:
        [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        await receiver.defer_message(got)
        [number] = await sender.schedule_messages(
            ServiceBusMessage(b"later"), datetime.now(UTC) + timedelta(seconds=100)
        )
        shown = await receiver.peek_messages(10, sequence_number=1)
        assert [(b"".join(one.body), one.state.name) for one in shown] == [(b"a", "DEFERRED"), (b"later", "SCHEDULED")]
        assert got.sequence_number is not None
        [deferred] = await receiver.receive_deferred_messages([got.sequence_number])
        await receiver.complete_message(deferred)
        await sender.cancel_scheduled_messages(number)
        assert await receiver.peek_messages(10, sequence_number=1) == []


async def test_a_busy_service_refuses(server: ServiceBus, client: ServiceBusClient) -> None:
    async with client.get_queue_sender("plain") as sender:
        await sender.send_messages(ServiceBusMessage(b"a"))
        server.control("throttle", 1)
        with pytest.raises(ServiceBusServerBusyError):
            await sender.send_messages(ServiceBusMessage(b"b"))
        server.control("full", 1)
        with pytest.raises(ServiceBusQuotaExceededError):
            await sender.send_messages(ServiceBusMessage(b"c"))
    assert client is not None


async def test_what_is_missing_and_what_is_forbidden(server: ServiceBus, client: ServiceBusClient) -> None:
    with pytest.raises(ServiceBusAuthenticationError) as missing:  # the login for it is refused
        await send(client, b"a", queue="missing")
    assert "404" in str(missing.value.inner_exception)
    wrong = connection_string(server.port, key="wrong")
    async with ServiceBusClient.from_connection_string(wrong, retry_total=0) as other:
        with pytest.raises(ServiceBusAuthenticationError) as wrong_key:
            await send(other, b"a")
        assert "401" in str(wrong_key.value.inner_exception)


async def test_duplicates_are_dropped(client: ServiceBusClient) -> None:
    async with client.get_queue_sender("plain") as sender, client.get_queue_receiver("plain") as receiver:
        for body in (b"1", b"2"):
            await sender.send_messages(ServiceBusMessage(body, message_id="same"))
        assert await bodies(receiver, 1) == [b"1"]
        assert await is_given_nothing(receiver)


async def test_everything_survives_kill_9(server: ServiceBus, client: ServiceBusClient) -> None:
    await send(client, b"a", b"b")
    async with client.get_queue_receiver("plain") as receiver:
        [got] = await receiver.receive_messages(1, max_wait_time=PATIENCE)
        server.kill()
        server.start()
    async with (
        ServiceBusClient.from_connection_string(server.connection_string) as other,
        other.get_queue_receiver("plain") as receiver,
    ):
        assert await bodies(receiver, 1) == [b"b"]
        assert await is_given_nothing(receiver)
        server.turn(31)
        [again] = [one for one in await received(receiver, 2) if b"".join(one.body) == b"a"]
        assert (again.sequence_number, again.delivery_count) == (got.sequence_number, 1)

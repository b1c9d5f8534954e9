"""What a message has in it is shown by no log on any store, with all loggers at DEBUG: one of a driver excepted."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("azure.servicebus")
pytest.importorskip("azure.storage.queue")
pytest.importorskip("nats")
pytest.importorskip("redis")

import aiormq

import tenure
from tenure._backends import postgres
from tenure._queue.received import Received
from tenure.events import Event, MessageDied, MessageFailed
from tests.servers import Azurite, Nats, Postgres, RabbitMQ, Redis, ServiceBus, patient, shared

BODY, HEADER = "hush7body", "hush7header"

SERVERS: dict[str, Any] = {
    "azurite": Azurite,
    "nats": Nats,
    "postgresql": Postgres,
    "rabbitmq": RabbitMQ,
    "redis": Redis,
    "servicebus": ServiceBus,
}


def found(text: str) -> bool:
    """Return whether a *text* has a mark in it: as it is, in hexadecimal, or in base64 wherever it begins."""
    return any(form in text for mark in (BODY, HEADER) for form in _forms(mark.encode()))


def _forms(mark: bytes) -> list[str]:
    encoded = [base64.b64encode(bytes(before) + mark).decode().rstrip("=")[:-2] for before in range(3)]
    return [mark.decode(), mark.hex(), encoded[0], encoded[1][4:], encoded[2][4:]]


async def url_of(store: str, folder: Path) -> str:
    if store in ("memory", "sqlite"):
        return "memory:" if store == "memory" else f"sqlite:///{folder / 'work.db'}"
    url = patient(shared(SERVERS[store]).url)
    if store == "postgresql":
        await postgres.migrate(url)
    return url


async def use(backend: tenure.Backend, name: str) -> None:
    """Let messages become whatever can become of them."""

    async def serve(message: Received) -> None:
        match message.id:
            case "rejected":
                raise tenure.Reject("bad")
            case "failed":
                raise ValueError("no price")
            case "retried":
                raise tenure.Retry(delay=0)

    def message(name: str) -> tenure.Outgoing:
        return tenure.Outgoing(body, id=name, headers=headers)

    body, headers = f'{{"price": "{BODY}"}}'.encode(), {"note": HEADER}
    queue = backend.queue(name, max_deliveries=2)
    await queue.send(body, id="first", headers=headers)
    await queue.send_batch([message(name) for name in ("done", "rejected", "failed", "retried")])
    await queue.send(body, id="later", headers=headers, delay=3600)
    [one] = await queue.receive()
    await one.renew()
    await one.abandon()
    await queue.consume(serve, until_empty=True, retry=tenure.RetryPolicy(initial=0, maximum=0))
    assert len(await queue.dead_letters.peek()) == 3
    await queue.peek()
    await queue.stats()
    await queue.dead_letters.redrive()
    await queue.dead_letters.purge()
    await queue.purge()


QUOTING = {"rabbitmq": {("aiormq.connection", "DEBUG")}}
"""The loggers that show what a message has in it, as docs/security.md says, with the only level at which they do."""


@pytest.mark.parametrize("store", ["memory", "sqlite", *SERVERS])
async def test_no_log_of_a_driver_has_a_body_or_a_header_but_that_of_frames(
    store: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = await url_of(store, tmp_path)
    caplog.set_level(logging.DEBUG)
    events: list[Event] = []
    async with tenure.connect(url, on_event=events.append) as backend:
        await use(backend, f"orders-{name[-10:]}")
    assert {MessageDied, MessageFailed} <= {type(event) for event in events}
    assert "its handler failed" in caplog.text
    quoting = {
        (record.name, record.levelname)
        for record in caplog.records
        if found(f"{record.getMessage()} {vars(record)} {record.exc_text}")
    }
    assert quoting == QUOTING.get(store, set())
    assert not found(f"{events}")
    shown = [record for record in caplog.records if (record.name, record.levelname) not in quoting]
    assert not found("".join(map(caplog.handler.format, shown)))


class Forgetful(dict[str, int]):
    """Has whatever is put into it, and finds nothing of it."""

    def get(self, *_: object) -> None:  # type: ignore[override]
        return None


async def test_the_driver_of_rabbitmq_logs_the_id_of_a_message_that_comes_back_too_late(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its channel does not know the message any more, as after the end of a request."""
    caplog.set_level(logging.INFO)
    async with tenure.connect(patient(shared(RabbitMQ).url)) as backend:
        await backend.queues()
    connection = aiormq.Connection(shared(RabbitMQ).address)
    await connection.connect()
    try:
        channel: Any = await connection.channel()
        properties = aiormq.spec.Basic.Properties(message_id="late", headers={"note": HEADER})
        channel.message_id_delivery_tag = Forgetful()
        await channel.basic_publish(BODY.encode(), routing_key=name, properties=properties, mandatory=True)
    finally:
        await connection.close()
    assert "Unhandled message \"<message 'late'>\" returning" in caplog.text
    assert not found(caplog.text)


@pytest.mark.parametrize("before", [b"", b"{", b"[{"])
def test_a_mark_is_found_in_every_form(before: bytes) -> None:
    content = before + BODY.encode() + b"}"
    for form in (content.decode(), content.hex(), base64.b64encode(content).decode(), f"{content!r}"):
        assert found(f"sent: {form}")
    assert not found("sent: 24 bytes")

"""What a message has in it is shown by no log and no event, whatever becomes of it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import msgspec
import pydantic
import pytest

import tenure
from tenure._backend import connect
from tenure._queue.received import Received
from tenure.events import Event, MessageDied, MessageFailed

MARK = "hush7body"


async def test_no_log_and_no_event_has_a_body_or_a_header(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    events: list[Event] = []
    shown: list[str] = []

    async def serve(message: Received) -> None:
        shown.append(f"{message} {message!r}")
        match message.id:
            case "rejected":
                raise tenure.Reject("bad")
            case "failed":
                raise ValueError("no price")
            case "retried":
                raise tenure.Retry(delay=0)

    async with connect("memory:", on_event=events.append) as backend:
        queue = backend.queue("orders", max_deliveries=2)
        for name in ("done", "rejected", "failed", "retried"):
            await queue.send(f'{{"price": "{MARK}"}}'.encode(), id=name, headers={"note": MARK})
        await queue.consume(serve, until_empty=True, retry=tenure.RetryPolicy(initial=0, maximum=0))
        assert len(await queue.dead_letters.peek()) == 3
    assert {MessageDied, MessageFailed} <= {type(event) for event in events}
    assert "its handler failed" in caplog.text
    assert len(shown) == 6
    assert MARK not in f"{events} {caplog.text} {shown}"


@dataclass
class Order:
    price: int


class ValidatedOrder(pydantic.BaseModel):
    price: int


class PackedOrder(msgspec.Struct):
    price: int


LONG = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
"""Characters that tenure's own words don't have."""


@pytest.mark.parametrize("kind", [Order, ValidatedOrder, PackedOrder, list[int]])
@pytest.mark.parametrize("body", [json.dumps({"price": LONG}), json.dumps([LONG]), json.dumps(LONG), f"no JSON {LONG}"])
async def test_a_body_that_does_not_fit_is_quoted_in_part(
    kind: type, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    async def serve(message: Received) -> None:
        message.decode(kind)

    async with connect("memory:", on_event=events.append) as backend:
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send(body.encode())
        await queue.consume(serve, until_empty=True)
    [failed] = [event for event in events if isinstance(event, MessageFailed)]
    for shown in (f"{failed.error}", caplog.messages[0]):
        assert len([one for one in shown if one in LONG]) <= 80


async def test_the_text_of_an_exception_is_shown_whatever_is_in_it(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(message: Received) -> None:
        raise ValueError(message.body.decode())

    async with connect("memory:") as backend:
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send(MARK.encode())
        await queue.consume(serve, until_empty=True)
        [letter] = await queue.dead_letters.peek()
    assert letter.error is not None
    assert MARK in letter.error.message
    assert MARK in caplog.text

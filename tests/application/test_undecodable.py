"""A message whose body its handler can't decode: dead-lettered at once, wherever the handler runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import tenure
from tenure._backend import connect
from tenure._queue.message import Stats
from tenure._queue.received import Received
from tests.consuming import consume_down_to

ODD = (b"{", b"[]", b'{"number":"7"}')


@dataclass
class Order:
    number: int


def in_thread(message: Received) -> None:
    assert message.decode(Order).number == 7


async def on_loop(message: Received) -> None:
    in_thread(message)


@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
@pytest.mark.parametrize(
    ("handler", "run_in"),
    [(on_loop, "auto"), (in_thread, "thread"), pytest.param(in_thread, "process", marks=pytest.mark.process)],
)
def test_what_can_not_be_decoded_is_dead_at_once(handler: Any, run_in: Any, sessions: bool) -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30)
            session = "s" if sessions else None
            for body in ODD:
                await queue.send(body, session=session)
            await queue.send(json=Order(7), session=session)
            failures: list[BaseException] = []
            await queue.consume(
                handler,
                run_in=run_in,
                sessions=sessions,
                concurrency=1,
                until_empty=True,
                on_error=lambda _, error: failures.append(error),
            )
            assert await queue.stats() == Stats(dead=len(ODD))
            letters = await queue.dead_letters.peek()
            assert [(one.body, one.reason, one.delivery_count) for one in letters] == [
                (body, "undecodable", 1) for body in ODD
            ]
            assert letters[2].description == "the body.number must be int, not '7'"
            assert letters[2].error is not None
            assert "in in_thread" in letters[2].error.traceback
            assert all(isinstance(failure, tenure.DecodeError) for failure in failures)
            assert len(failures) == len(ODD)

    asyncio.run(main())


async def test_a_handler_can_ask_for_a_retry_instead() -> None:
    """As before a deployment, when the readers are newer than the sender, or older."""

    async def handler(message: Received) -> None:
        try:
            message.json()
        except tenure.DecodeError:
            raise tenure.Retry(delay=600) from None

    async with connect("memory:") as backend:
        queue = backend.queue("orders")
        await queue.send(b"{")
        await consume_down_to(Stats(delayed=1), queue, handler)


async def test_another_message_that_can_not_be_decoded_is_a_failure_like_any_other() -> None:
    """A reply, for example: the next one may be valid."""
    async with connect("memory:") as backend:
        queue, other = backend.queue("orders"), backend.queue("answers")
        await queue.send(b"{}")
        await other.send(b"{")
        [answer] = await other.receive()

        async def handler(message: Received) -> None:
            answer.json()

        await consume_down_to(Stats(delayed=1), queue, handler, retry=tenure.RetryPolicy(initial=600, maximum=600))

"""A handler under test: alone with a message, and at a queue in memory.

Run it with ``pytest -p tenure.testing.pytest_plugin examples/test_handlers.py``; in a project of your own, name the
plug-in in ``conftest.py``: ``pytest_plugins = ["tenure.testing.pytest_plugin"]``.
"""

import asyncio
from dataclasses import dataclass

import pytest

import tenure
import tenure.sync
from tenure.testing import DeadLetter, message, message_for_threads


@dataclass
class Order:
    customer: int
    item: str


async def handle(received: tenure.Message) -> None:
    """Serve an order; what is under test."""
    order = received.decode(Order)
    if order.customer == 404:
        await received.dead_letter("no such customer")
    elif order.item == "kettle":
        raise tenure.Retry(delay=60)


def handle_in_thread(received: tenure.sync.Message) -> None:
    """Reply with a price; what is under test."""
    received.reply(json={"price": 12.5})


def test_an_order_is_served() -> None:
    order = message(json=Order(7, "tea"))
    asyncio.run(handle(order))
    assert order.verdict is None  # it has returned without a verdict: consume would complete the message


def test_an_unknown_customer_is_a_dead_letter() -> None:
    order = message(json=Order(404, "tea"))
    asyncio.run(handle(order))
    assert order.verdict == DeadLetter("no such customer")


def test_an_order_of_a_kettle_is_retried() -> None:
    with pytest.raises(tenure.Retry):
        asyncio.run(handle(message(json=Order(7, "kettle"), delivery_count=3)))


def test_a_reply_goes_to_the_reply_queue() -> None:
    request = message_for_threads(b"tea", reply_to="replies", correlation_id="request-1")
    handle_in_thread(request)
    [(queue, reply)] = request.sends
    assert (queue, reply.body, reply.correlation_id) == ("replies", b'{"price":12.5}', "request-1")


def test_a_queue_of_orders(memory_queue: tenure.Queue) -> None:
    async def main() -> None:
        await memory_queue.send(json=Order(404, "tea"))
        await memory_queue.send(json=Order(7, "tea"))
        await memory_queue.send(json={"customer": "seven"})
        await memory_queue.consume(handle, until_empty=True)
        letters = await memory_queue.dead_letters.peek()
        assert [letter.reason for letter in letters] == ["no such customer", "undecodable"]

    asyncio.run(main())

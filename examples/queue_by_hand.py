"""Send with each option, settle each message by hand, and redrive a dead letter."""

import asyncio
from datetime import UTC, datetime, timedelta

import tenure


async def send(orders: tenure.Queue) -> None:
    await orders.send(b"tea", id="order-1")  # the same id again within dedupe_window is not kept twice
    await orders.send(b"tea", id="order-1")
    await orders.send(json={"item": "kettle"}, headers={"from": "shop"}, priority=9)
    await orders.send(b"for tomorrow", at=datetime.now(UTC) + timedelta(days=1))
    await orders.send(b"for a minute", expires_in=60)  # a dead letter if it has not been received by then


async def receive(orders: tenure.Queue) -> None:
    for message in await orders.receive(max=10, wait=1):
        match message.body:
            case b"tea":
                await message.complete()
            case b"for a minute":
                await message.dead_letter("too late", "the shop is closed")
            case _:
                print(f"{message.json()['item']}, delivery {message.delivery_count}")
                await message.abandon(delay=3600)  # deliver it again in an hour


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        orders = backend.queue("orders", lock=30, max_deliveries=10, dedupe_window=600)
        await send(orders)
        await receive(orders)
        stats = await orders.stats()
        print(f"{stats.ready} ready, {stats.delayed} delayed, {stats.dead} dead")
        for letter in await orders.dead_letters.peek():
            print(f"{letter.body.decode()}: {letter.reason}, {letter.description}")
        print(f"{await orders.dead_letters.redrive(reason='too late')} put back")
        [message] = await orders.receive(max=10)
        await message.complete()


asyncio.run(main())

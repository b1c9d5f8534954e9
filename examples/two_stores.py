"""Elect on one store, and share the work through another: each fails without the other."""

import asyncio
import os

import tenure

ELECTIONS = os.environ.get("ELECTIONS_URL", "sqlite:///elections.db")  # kubernetes://, say
MESSAGES = os.environ.get("MESSAGES_URL", "sqlite:///messages.db")  # amqp://guest:guest@127.0.0.1/, say


async def serve(message: tenure.Message) -> None:
    print(f"{message.body.decode()} is served")


async def main() -> None:
    async with tenure.connect(ELECTIONS) as coordination, tenure.connect(MESSAGES) as broker:
        orders = broker.queue("orders")

        async def fill(term: tenure.Term) -> None:
            for number in range(1, 4):
                term.check()  # the lease is in the other store
                await orders.send(f"order {number}".encode(), id=f"order-{number}")

        await coordination.election("filler", ttl=15).run(fill)
        await orders.consume(serve, until_empty=True)
        print(f"led by {await coordination.election('filler').leader()}, and the queue has {await orders.stats()}")


asyncio.run(main())

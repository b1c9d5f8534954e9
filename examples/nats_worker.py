"""Serve orders from a queue in NATS JetStream, and keep what can't be served. Needs: pip install 'tenure[nats]'"""

import asyncio
import os

import tenure

URL = os.environ.get("TENURE_URL", "nats://127.0.0.1:4222/?prefix=shop")


async def serve(message: tenure.Message) -> None:
    order = message.body.decode()
    if not order.isdecimal():
        raise tenure.Reject("not a number", f"the order was {order!r}")  # a dead letter, with this reason
    print(f"order {order} is served, delivery {message.delivery_count}")


async def main() -> None:
    async with tenure.connect(URL) as backend:
        orders = backend.queue("orders")  # with the settings that were declared, or else the usual ones
        # Another program sends with: nats pub shop.orders 17
        await orders.send_batch([tenure.Outgoing(order) for order in (b"17", b"eighteen", b"19")])
        await orders.consume(serve, until_empty=True)  # a service leaves until_empty out
        for letter in await orders.dead_letters.peek():
            print(f"dead: {letter.body.decode()}, {letter.reason} ({letter.description})")
        await orders.dead_letters.purge()


asyncio.run(main())

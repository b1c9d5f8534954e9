"""Several instances share one queue: each message goes to one of them, and to another if that one dies."""

import asyncio

import tenure


async def handle(message: tenure.Message) -> None:
    # A return completes the message; after an exception it is delivered again.
    print(f"{message.body.decode()} is served, delivery {message.delivery_count}")


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        orders = backend.queue("orders", lock=30, max_deliveries=10)
        await orders.send_batch([tenure.Outgoing(f"order {number}".encode()) for number in range(1, 4)])
        await orders.consume(handle, concurrency=10, until_empty=True)  # a service leaves until_empty out


asyncio.run(main())

"""Share a queue in RabbitMQ, also with programs that use other clients. Needs: pip install 'tenure[rabbitmq]'"""

import asyncio
import os

import tenure

URL = os.environ.get("TENURE_URL", "amqp://guest:guest@127.0.0.1:5672/")


async def handle(message: tenure.Message) -> None:
    if message.body == b"no such customer":
        raise tenure.Reject("unknown customer", "no customer of this name")
    print(f"{message.body.decode()} is served, delivery {message.delivery_count}")


async def main() -> None:
    async with tenure.connect(URL) as backend:
        orders = backend.queue("orders")  # with the settings that were declared, or else the usual ones
        await orders.send_batch([tenure.Outgoing(b"two kettles"), tenure.Outgoing(b"no such customer")])
        await orders.consume(handle, until_empty=True)  # a service leaves until_empty out
        for letter in await orders.dead_letters.peek():
            print(f"{letter.body.decode()} is dead: {letter.reason}; {letter.description}")
        await orders.dead_letters.purge()


asyncio.run(main())

"""The consumer of Azure's competing consumers sample. Start it in several shells: each message goes to one of them.

It runs on the namespace of AZURE_SERVICEBUS_CONNECTION_STRING, or on the one that TENURE_URL names.
"""

import asyncio
import os
import signal
import sys

import tenure

URL = os.environ.get("TENURE_URL", "servicebus:?create=yes")


async def handle(message: tenure.Message) -> None:
    # A return completes the message; an exception abandons it, and the entity's MaxDeliveryCount ends its retries.
    if message.body == b"poison":
        raise tenure.Reject("poison", "it can't be handled, now or ever")  # to the entity's dead letters
    print(f"{os.getpid()} has handled {message.body.decode()}, delivery {message.delivery_count}", flush=True)


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with tenure.connect(URL) as backend:
        orders = backend.queue("orders")
        if "send" in sys.argv:
            await orders.send_batch([tenure.Outgoing(text.encode()) for text in sys.argv[2:]])
        else:
            await orders.consume(handle, concurrency=10, stop=stop)


asyncio.run(main())

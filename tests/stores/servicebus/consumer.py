"""A consumer on Service Bus as a process of its own: it stops itself, or blocks its loop, and reports on its output.

Run as ``python -m tests.stores.servicebus.consumer URL MODE SECONDS``:

- ``stopped``: receives one message, says so, stops itself, and settles it when it is continued;
- ``blocked``: ten handlers at once; the first blocks the loop for so many seconds. It reports each lock that was lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import tenure
from tenure.events import LockEnded


async def stopped(queue: tenure.Queue) -> None:
    while not (messages := await queue.receive(wait=5)):
        pass
    print("received", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    for verb in (messages[0].complete, messages[0].abandon, messages[0].renew):
        try:
            await verb()
            print("settled", flush=True)
        except tenure.LockLost:
            print("LockLost", flush=True)


async def blocked(queue: tenure.Queue, seconds: float) -> None:
    began: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        began.append(message.body)
        while len(began) < 10:
            await asyncio.sleep(0.01)
        if message.body == b"0":
            print("blocked", flush=True)
            time.sleep(seconds)  # that is the test
        await asyncio.sleep(0.1)
        print(f"handled {message.body.decode()} {message.delivery_count}", flush=True)

    await queue.consume(handle, concurrency=10, until_empty=True)


async def main(url: str, mode: str, seconds: float) -> None:
    def observe(event: tenure.Event) -> None:
        if isinstance(event, LockEnded):
            print("lost", flush=True)

    async with tenure.connect(url, on_event=observe) as backend:
        queue = backend.queue("q")
        await (stopped(queue) if mode == "stopped" else blocked(queue, seconds))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))

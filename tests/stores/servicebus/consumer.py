"""A consumer on Service Bus as a process of its own, which settles its message when it is told to.

Run as ``python -m tests.stores.servicebus.consumer URL``. It says when it has received the message, waits for a line,
and says how each verb ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import tenure


async def main(url: str) -> None:
    async with tenure.connect(url) as backend:
        messages: Sequence[tenure.Message] = ()
        while not messages:  # one that waits would leave credit behind for a moment, also when it is stopped then
            messages = await backend.queue("q").receive()
        [message] = messages
        print("received", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for verb in (message.complete, message.abandon, message.renew):
            try:
                await verb()
                print("settled", flush=True)
            except tenure.LockLost:
                print("LockLost", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""The worker of Azure's leader election sample. Start it in several shells: one leads, the others stand by.

It runs on Azurite, or on the account that TENURE_URL names, such as azure://mystorageaccount.
"""

import asyncio
import os
import sys
import time

import tenure

URL = os.environ.get("TENURE_URL", "azurite://127.0.0.1:10000")


def say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] This process ({os.getpid()}) {what}", flush=True)


async def lead(term: tenure.Term) -> None:
    while True:
        term.check()  # raises TermLost when this process can no longer be sure that it leads
        say(f"is currently the leader, in term {term.token}. Press Enter to exit.")
        await asyncio.sleep(5)


async def watch(election: tenure.Election) -> None:
    async for leader in election.observe():
        if leader is not None:
            say(f"sees that {leader.holder} leads. Press Enter to exit.")


async def main() -> None:
    async with tenure.connect(URL) as backend:
        election = backend.election("leader", ttl=15)  # the blob leases/leader, as in the sample
        watching = asyncio.create_task(watch(election))
        running = asyncio.create_task(election.run(lead))
        await asyncio.to_thread(sys.stdin.readline)
        say("is shutting down.")
        for task in (watching, running):  # the work is cancelled, and its lease released when it has ended
            task.cancel()
        await asyncio.gather(watching, running, return_exceptions=True)


asyncio.run(main())

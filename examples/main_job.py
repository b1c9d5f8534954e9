"""The whole pattern: instances elect a leader, the leader splits a job into messages, all compete for them, and the
leader receives the results and adds them up. Start it in several shells, and kill any of them: the sum is right.
"""

import asyncio
import sqlite3
from contextlib import closing

import tenure
from tenure.backends.sqlite import Fence

PARTS, STEP = 10, 1_000


def add_up(message: tenure.sync.Message) -> None:
    """Do a part of the work, on any instance. A plain function runs in a thread."""
    first = int(message.body)
    total = sum(number * number for number in range(first, first + STEP))
    message.reply(json=[first, total])  # sends the result and completes the message, in one step


async def coordinate(term: tenure.Term, backend: tenure.Backend) -> None:
    """Split the job, and aggregate the results. A second leader goes on where the first one stopped."""
    parts, results = backend.queue("parts"), backend.queue("results")
    await parts.send_batch(
        # The ids make it harmless that a second leader sends them all again.
        [tenure.Outgoing(str(n * STEP).encode(), id=f"part-{n}", reply_to="results") for n in range(PARTS)]
    )
    with closing(sqlite3.connect("result.db")) as ledger:
        while (found := ledger.execute("SELECT count(*), sum(total) FROM part").fetchone())[0] < PARTS:
            for message in await results.receive(max=100, wait=1):
                with ledger:
                    Fence(ledger).check("part", term.token)  # raises TermLost if a newer leader has written
                    # A result may come twice: the key lets it count once.
                    ledger.execute("INSERT INTO part VALUES (?, ?) ON CONFLICT DO NOTHING", message.json())
                await message.complete()  # only now: if the process dies before, it is delivered again
        print(f"the sum of the first {PARTS * STEP:,} squares is {found[1]:,}")


async def main() -> None:
    with closing(sqlite3.connect("result.db")) as ledger:
        ledger.execute("CREATE TABLE IF NOT EXISTS part (first INTEGER PRIMARY KEY, total INTEGER)")
    async with tenure.connect("sqlite:///work.db") as backend:
        election, parts = backend.election("squares", ttl=5), backend.queue("parts", lock=5)
        working = asyncio.create_task(parts.consume(add_up, concurrency=2))  # leader or not
        await election.run(lambda term: coordinate(term, backend))  # waits until elected, or for a leader to die
        await parts.drain()
        await working


asyncio.run(main())

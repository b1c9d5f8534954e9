"""A stream processor without a leader: processes share partitions, each with its messages in order, and its state."""

import asyncio
import json
from functools import partial

import tenure
from tenure.testing import until

PARTITIONS = 8


async def add_up(moves: tenure.Queue, name: str, term: tenure.PartitionTerm) -> None:
    """Add up what moves on the accounts of one partition, as long as this process owns it."""
    async with moves.session(term.partition) as session:  # partitions and sessions have the same names
        totals = json.loads(session.state or b"{}")  # what the last owner wrote
        while True:
            for message in await session.receive(wait=60):
                move = message.json()
                totals[move["account"]] = totals.get(move["account"], 0) + move["amount"]
                await session.set_state(json.dumps(totals).encode())
                print(f"{name}: {move['account']} has {totals[move['account']]}")
                await message.complete()


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        moves = backend.queue("moves-by-account")

        async def send(account: str, amount: int) -> None:
            body = {"account": account, "amount": amount}
            await moves.send(json=body, session=tenure.partition_of(account, PARTITIONS))

        first, second = (backend.partitions("accounts", PARTITIONS) for _ in range(2))
        async with first:
            running = asyncio.create_task(first.run(partial(add_up, moves, "first")))
            await send("anna", 5)
            await until(lambda: is_empty(moves))
            async with second:
                joined = asyncio.create_task(second.run(partial(add_up, moves, "second")))
                await until(lambda: len(second.owned) == PARTITIONS // 2)
                print(f"the first owns {len(first.owned)}, the second {len(second.owned)}")
                for account in ("anna", "ben", "cleo"):
                    await send(account, 7)
                await until(lambda: is_empty(moves))
            await joined  # it has left: the first owns all again, and goes on with the states
            await send("ben", -2)
            await until(lambda: is_empty(moves))
        await running


async def is_empty(queue: tenure.Queue) -> bool:
    return not (await queue.stats()).backlog


asyncio.run(main())

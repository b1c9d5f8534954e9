"""Messages of one key in order, to one consumer at a time; a state is kept with the session."""

import asyncio

import tenure


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        moves = backend.queue("moves")
        for account, amount in (("anna", 5), ("ben", 7), ("anna", -2), ("anna", 4)):
            await moves.send(str(amount).encode(), session=account)
        for _ in range(2):
            async with moves.session() as session:  # the next free one with messages waiting
                balance = int(session.state or b"0")
                async for message in session:
                    balance += int(message.body)
                    await session.set_state(str(balance).encode())
                    await message.complete()
                print(f"{session.name} has {balance}")


asyncio.run(main())

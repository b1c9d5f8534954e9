"""Consumers of a queue whose limits hold over the whole fleet: start it in several shells."""

import asyncio
import time

import tenure

running = 0
busiest = 0
began: list[float] = []


async def call(message: tenure.Message) -> None:
    """Call a service that takes ten requests a second, two at a time."""
    global running, busiest
    began.append(time.monotonic())
    running += 1
    busiest = max(busiest, running)
    await asyncio.sleep(0.01)
    running -= 1


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        calls = backend.queue("calls", max_locked=2, rate=(10, 1.0))
        await calls.send_batch([tenure.Outgoing(b"%d" % number) for number in range(20)])
        await asyncio.gather(*(calls.consume(call, until_empty=True) for _ in range(3)))
        print(f"{busiest} at once; 20 calls took more than a second: {began[-1] - began[0] > 0.9}")

        letters = backend.queue("letters", session_rate=(1, 5.0))  # one in five seconds to each customer
        for customer in ("anna", "ben"):
            await letters.send_batch([tenure.Outgoing(b"hello", session=customer) for _ in range(2)])
        for _ in range(2):
            async with letters.session() as session:
                [letter] = await session.receive(10)
                print(f"{letter.body.decode()}, {session.name}")
                await letter.complete()
        print(f"five seconds later: {(await letters.stats()).delayed} letters")

        await calls.declare(paused=True)  # for all consumers of the fleet, until it is declared False
        await calls.send(b"21")
        print(f"paused: {len(await calls.receive())} received, {(await calls.stats()).ready} ready")
        await calls.declare(paused=False)
        print(f"resumed: {len(await calls.receive(wait=5))} received")


if __name__ == "__main__":
    asyncio.run(main())

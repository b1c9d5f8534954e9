"""Handlers that fail: retries with growing delays, or a dead letter at once; and CPU-bound handlers in processes."""

import asyncio

import tenure


def squares(message: tenure.Received) -> None:
    """Run in a process of its own, which is killed if the lock is lost."""
    total = sum(n * n for n in range(int(message.body)))
    print(f"the sum of the first {int(message.body):,} squares is {total:,}", flush=True)


async def serve(message: tenure.Message) -> None:
    match message.body:
        case b"broken":
            raise tenure.Reject("unreadable", "no retry mends it")  # a dead letter at once
        case b"busy" if message.delivery_count < 3:
            raise tenure.Retry(delay=0)  # again, at once
        case b"number":
            int("x")  # raises ValueError: see never=
    print(f"{message.body.decode()} is served, delivery {message.delivery_count}")


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        calls = backend.queue("calls", max_deliveries=5)
        await calls.send_batch([tenure.Outgoing(body) for body in (b"broken", b"busy", b"number", b"plain")])
        patient = tenure.RetryPolicy(initial=0.5, factor=2, maximum=60, never=(ValueError,))
        await calls.consume(serve, concurrency=4, retry=patient, grace=25, until_empty=True)
        print(sorted(letter.reason for letter in await calls.dead_letters.peek()))
        await calls.dead_letters.purge()
        sums = backend.queue("sums")
        await sums.send(b"10001")
        await sums.consume(squares, run_in="process", concurrency=2, until_empty=True)


if __name__ == "__main__":  # the processes import this file
    asyncio.run(main())

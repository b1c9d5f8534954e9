"""Receive the events of this process's candidates and consumers as plain values, for displays, metrics, alarms."""

import asyncio
from collections import Counter

import tenure

counts: Counter[str] = Counter()


def record(event: tenure.Event) -> None:
    counts[type(event).__name__] += 1
    match event:
        case tenure.events.TermEnded(reason=reason):
            print(f"{event.name}: a term has ended: {reason}")
        case tenure.events.MessageDied(reason=reason):
            print(f"{event.name}: a message is dead: {reason}")


async def handle(message: tenure.Message) -> None:
    raise tenure.Reject("no such customer")


async def main() -> None:
    async with tenure.connect("sqlite:///work.db", on_event=record) as backend:
        async with backend.election("nightly-report").campaign():
            pass
        orders = backend.queue("orders")
        await orders.send(b"order 1")
        await orders.consume(handle, until_empty=True)
        await orders.dead_letters.purge()
    print(f"{counts['TermBegan']} term, {counts['MessageDied']} dead letter")


asyncio.run(main())

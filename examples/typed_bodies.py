"""Send a dataclass, and read it as one: a body that doesn't fit is a dead letter at once, as no retry mends it."""

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from uuid import UUID, uuid4

import tenure


@dataclass
class Line:
    article: str
    price: Decimal
    count: int = 1


@dataclass
class Order:
    id: UUID
    lines: list[Line]
    wanted: datetime | None = None
    notes: dict[str, str] = field(default_factory=dict)


async def handle(message: tenure.Message) -> None:
    order = message.decode(Order)  # also a pydantic model, a msgspec struct, a TypedDict, list[Order], …
    print(f"{order.lines[0].article} for {sum(line.price * line.count for line in order.lines)}")


async def main() -> None:
    async with tenure.connect("memory:") as backend:
        orders = backend.queue("orders")
        await orders.send(json=Order(uuid4(), [Line("tea", Decimal("2.50"), 2)]))
        await orders.send(json={"id": str(uuid4()), "lines": [{"article": "cup", "price": "4", "colour": "red"}]})
        await orders.send(json={"id": str(uuid4()), "lines": [{"article": "pot", "price": "much"}]})
        await orders.consume(handle, concurrency=1, until_empty=True)
        for letter in await orders.dead_letters.peek():
            print(f"{letter.reason}: {letter.description}")


if __name__ == "__main__":
    asyncio.run(main())

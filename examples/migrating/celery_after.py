"""After: the same as a service of tenure. Each process serves orders, and sends at the times of the schedule."""

import asyncio
from dataclasses import dataclass

import tenure

service = tenure.Service("sqlite:///work.db")


@dataclass
class Order:
    item: str
    count: int


orders = service.queue("orders", Order, lock=30, max_deliveries=10)


@service.handler(orders, concurrency=4, retry=tenure.RetryPolicy(initial=1, maximum=600))
def serve(order: Order) -> None:
    print(f"{order.count} {order.item} served", flush=True)


@service.every("0 3 * * *", timezone="Europe/Berlin")
def tidy() -> None:
    print("tidied up", flush=True)


async def order() -> None:
    async with service:
        await orders.send(Order("kettle", 2), id="order-1")
        await orders.send(Order("cup", 1), id="order-2", delay=3600)


if __name__ == "__main__":
    asyncio.run(order())
    service.run(until_empty=True)  # in production: tenure run celery_after:service --processes 4

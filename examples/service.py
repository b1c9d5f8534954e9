"""A service: start it in two shells. Both serve orders, and one of them leads."""

import asyncio
from dataclasses import dataclass

import tenure

service = tenure.Service("sqlite:///work.db")


@dataclass
class Order:
    item: str
    count: int = 1


orders = service.queue("orders", Order)


@service.handler(orders, concurrency=10)
async def serve(order: Order) -> None:
    print(f"{order.count} {order.item} served", flush=True)


@service.leader("shop", ttl=15)
async def place_orders(term: tenure.Term) -> None:
    while True:
        await orders.send(Order("kettle", count=term.token))
        await asyncio.sleep(1)


if __name__ == "__main__":
    service.run()  # until SIGTERM or Ctrl-C

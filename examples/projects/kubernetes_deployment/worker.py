"""The worker of a shop: each pod serves orders, and one of them, the leader, places the standing orders.

The orders are in the store that TENURE_URL names; the leader is elected on a Lease of the pod's own namespace.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

import tenure
import tenure.http

POD = socket.gethostname()
STANDING_ORDER_EVERY = float(os.environ.get("STANDING_ORDER_EVERY", "10"))

metrics = tenure.telemetry.Metrics()
shop = tenure.Service(telemetry=metrics)
elections = tenure.Service(os.environ.get("ELECTION_URL", "kubernetes://"), telemetry=metrics)


@dataclass
class Order:
    item: str
    count: int = 1


orders = shop.queue("orders", Order, lock=30)


@shop.handler(orders, concurrency=10, grace=20)
async def serve(order: Order, message: tenure.Message) -> None:
    await asyncio.sleep(0.1)  # the work; if the pod is to end, it may take 20 s more
    print(f"{POD}: {message.id}, {order.count} {order.item} served", flush=True)


@elections.leader("shop-worker", ttl=15)
async def place_standing_orders(term: tenure.Term) -> None:
    for number in itertools.count(1):
        order_id = f"standing-{term.token}-{number}"
        try:
            await orders.send(Order("tea"), id=order_id)
            print(f"{POD}: {order_id} placed", flush=True)
        except tenure.Unavailable as problem:  # an error would end the pod, which brings no store back
            print(f"{POD}: {order_id} not placed: {problem}", flush=True)
        await asyncio.sleep(STANDING_ORDER_EVERY)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with shop.running(), elections.running():
        yield
        for one in (shop, elections):
            one.stop()  # side by side: another pod can lead while this one serves its last orders


async def statuses() -> list[tenure.ServiceStatus]:
    async with asyncio.timeout(2):  # a thread that hangs fails the probe
        return [await shop.status(), await elections.status()]


async def live(request: Request) -> Response:
    """Fail if a service has failed for good, or the leader's work runs beyond its term; not while a store is away."""
    return answer(all(one.is_live and (one.handlers or one.leaders) for one in await statuses()))


async def ready(request: Request) -> Response:
    """Fail if the pod does not reach the queue, or the API server with the rights that an election needs."""
    return answer(all(one.is_ready for one in await statuses()))


def answer(passes: bool) -> Response:
    return PlainTextResponse("yes\n" if passes else "no\n", 200 if passes else 503)


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/live", live),
        Route("/ready", ready),
        Mount("/", tenure.http.app(shop, metrics=metrics)),  # /metrics, and /keda/v1/queues/orders
    ],
)

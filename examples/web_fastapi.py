"""FastAPI: orders are taken by an endpoint and served in the background, and one of all workers leads.

TENURE_URL=sqlite:///work.db uvicorn web_fastapi:app --workers 4
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

import tenure


@dataclass
class Order:
    item: str
    count: int = 1


service = tenure.Service()  # on the store that TENURE_URL names
orders = service.queue("orders", Order)
served: list[str] = []


@service.handler(orders)
async def serve(order: Order) -> None:
    served.append(order.item)


@service.leader("tidy")
async def tidy(term: tenure.Term) -> None:
    while True:
        term.check()
        await asyncio.sleep(60)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with service.running():
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/tenure", tenure.http.app(service))  # /tenure/live, /tenure/ready, /tenure/metrics, /tenure/keda/…


@app.post("/orders", status_code=202)
async def take(order: Order) -> str:
    return await orders.send(order)


@app.get("/stats")
async def stats() -> tenure.Stats:
    return await orders.queue.stats()


@app.get("/leader")
async def leader() -> tenure.Leader | None:
    return await service.backend.election("tidy").leader()

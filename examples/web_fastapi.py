"""FastAPI: orders are taken by an endpoint and served in the background, and one of all workers leads.

TENURE_URL=sqlite:///work.db uvicorn web_fastapi:app --workers 4
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Response

import tenure

backend = tenure.connect()  # to the store that TENURE_URL names
served: list[str] = []


@dataclass
class Order:
    item: str
    count: int = 1


async def handle(message: tenure.Message) -> None:
    served.append(message.decode(Order).item)


async def tidy(term: tenure.Term) -> None:
    while True:
        term.check()
        await asyncio.sleep(60)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with backend, asyncio.TaskGroup() as group:
        group.create_task(backend.queue("orders").consume(handle, stop=stop, sigterm=False))
        app.state.election = election = backend.election("tidy")
        leading = group.create_task(election.run(tidy, sigterm=False))
        yield
        stop.set()  # handlers may finish; what they leave is given back
        leading.cancel()  # the lease is released


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def take(order: Order) -> str:
    return await backend.queue("orders").send(json=order)


@app.get("/stats")
async def stats() -> tenure.Stats:
    return await backend.queue("orders").stats()


@app.get("/leader")
async def leader() -> tenure.Leader | None:
    return await backend.election("tidy").leader()


@app.get("/ready")
async def ready(response: Response) -> tenure.CandidateStatus:
    async with asyncio.timeout(1):  # a process that hangs fails the probe
        status: tenure.CandidateStatus = await app.state.election.status()
    response.status_code = 200 if status.is_ready else 503
    return status

"""Starlette: as web_fastapi.py, with an election of the lifespan's own, whose state answers a probe.

TENURE_URL=sqlite:///work.db uvicorn web_starlette:app --workers 4
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TypedDict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tenure

service = tenure.Service()  # on the store that TENURE_URL names
pages = service.queue("pages", str)
fetched: list[str] = []


class State(TypedDict):
    election: tenure.Election


@service.handler(pages, concurrency=10)
async def fetch(address: str) -> None:
    fetched.append(address)


async def tidy(term: tenure.Term) -> None:
    while True:
        term.check()
        await asyncio.sleep(60)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[State]:
    async with service.running(), asyncio.TaskGroup() as group:
        election = service.backend.election("tidy")
        leading = group.create_task(election.run(tidy, sigterm=False))
        yield {"election": election}
        leading.cancel()  # the lease is released


async def take(request: Request) -> Response:
    address = (await request.body()).decode()
    return JSONResponse({"id": await pages.send(address, id=address)}, 202)


async def ready(request: Request) -> Response:
    async with asyncio.timeout(1):  # a process that hangs fails the probe
        status: tenure.CandidateStatus = await request.state.election.status()
    return JSONResponse(asdict(status), 200 if status.is_ready else 503)


app = Starlette(
    lifespan=lifespan,
    routes=[Route("/pages", take, methods=["POST"]), Route("/ready", ready)],
)

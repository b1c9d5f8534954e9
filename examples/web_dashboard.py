"""The dashboard as a part of a Starlette application: uvicorn web_dashboard:app. Put it behind your own login."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Mount

import tenure
import tenure.dashboard

backend = tenure.connect("sqlite:///work.db")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with backend:
        yield


app = Starlette(
    lifespan=lifespan,
    routes=[Mount("/tenure", tenure.dashboard.app(backend, allow_changes=True))],
)

"""The web application: it takes orders and shows them; its lifespan runs the work of ``work.py``."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Literal

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

import tenure
import tenure.dashboard
import tenure.http

from . import database
from .work import Placed, backend, placed, service

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")


class Order(BaseModel):
    item: Literal["cup", "kettle", "tea"]
    count: int = Field(1, ge=1, le=10)


class OrderState(Order):
    id: str
    packed_by: str | None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    database.create_tables()
    async with backend, service.running():  # at the end, handlers may finish, and the leader resigns
        yield


app = FastAPI(title="Shop", lifespan=lifespan)
Key = Annotated[str, Header(pattern=r"^[A-Za-z0-9._-]{1,100}$")]


@app.post("/orders", status_code=202)
def place(order: Order, idempotency_key: Key) -> OrderState:
    """Take an order. Sent again with the same key, as after a broken connection, it is taken once."""
    state = OrderState(**database.place(idempotency_key, order.item, order.count))
    if (state.item, state.count) != (order.item, order.count):
        raise HTTPException(409, "this key belongs to another order")
    if state.packed_by is None:
        placed.blocking.send(Placed(state.id), id=state.id)  # an id that was sent before is dropped
    return state


@app.get("/orders/{order}")
def show(order: str) -> OrderState:
    row = database.find(order)
    if row is None:
        raise HTTPException(404, "there is no such order")
    return OrderState(**row)


@app.get("/stock")
def stock() -> dict[str, int]:
    return database.stock()


@app.exception_handler(tenure.Unavailable)
def say_that_the_store_is_away(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "the store does not answer; send the same request again"}, 503)


app.mount("/dashboard", tenure.dashboard.app(backend))  # for everybody who reaches it: put it behind your own login
app.mount("", tenure.http.app(service))  # /live, /ready, /metrics; last, because it takes all other paths

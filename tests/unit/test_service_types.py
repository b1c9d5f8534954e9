"""pyright knows the types of a service: of bodies, replies, handlers and leaders."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.absent import skip_or_fail

PROGRAM = """
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict

from typing_extensions import assert_type

import tenure
import tenure.sync


@dataclass
class Order:
    item: str


@dataclass
class Receipt:
    text: str


class Line(TypedDict):
    article: str


service = tenure.Service("memory:")
orders = service.queue("orders", Order, lock=60)
lines = service.queue("lines", Line)
either = service.queue("either", list[Order])
raw = service.queue("raw")


async def uses() -> None:
    assert_type(orders, tenure.TypedQueue[Order])
    assert_type(raw, tenure.TypedQueue[bytes])
    assert_type(await orders.send(Order("tea"), id="a", delay=3), str)
    await orders.send("tea")  # error: argument
    await orders.send(Order("tea"), dely=3)  # error: parameter named "dely"
    await orders.send_batch([Order("tea"), orders.outgoing(Order("cup"), id="c")])
    await orders.send_batch([Receipt("x")])  # error: argument
    assert_type(await orders.request(Order("tea"), Receipt, timeout=5), Receipt)
    await lines.send({"article": "tea"})
    await lines.send({"articel": "tea"})  # error: argument
    await either.send([Order("tea")])
    await raw.send("tea")  # error: argument
    for message in await orders.queue.receive():
        assert_type(orders.decode(message), Order)
    assert_type(orders.blocking.send(Order("tea")), str)
    service.queue("orders", Order, lok=5)  # error: overloads


@service.handler(orders, concurrency=10)
async def serve(order: Order, message: tenure.Message) -> Receipt | None: ...


@service.handler(orders)
async def serve_body(order: Order) -> None: ...


@service.handler(orders)
def serve_in_thread(order: Order, message: tenure.sync.Message) -> None: ...


@service.handler(orders)
async def serve_object(order: object) -> None: ...


@service.handler(orders)
async def serve_message(message: tenure.Message) -> None: ...


@service.handler(orders)  # error: argument
async def serve_receipt(receipt: Receipt) -> None: ...


@service.handler("mails", prefetch=3)
async def mail(message: tenure.Message) -> None: ...


@service.leader("chair", ttl=15, metadata={"at": "here"})
async def lead(term: tenure.Term) -> None: ...


@service.leader("clerk")
def lead_in_thread(term: tenure.sync.Term) -> None: ...


@service.leader("porter")  # error: argument
async def lead_nothing(order: Order) -> None: ...


@service.every("0 3 * * *", timezone="Europe/Berlin", missed="skip", concurrency=3)
async def tidy() -> None: ...


@service.every(timedelta(minutes=5), name="sweep", sessions=True)
async def sweep_up(slot: datetime, message: tenure.Message) -> int: ...


@service.every("@daily", missed="never")  # error: argument
async def never() -> None: ...


@service.every(None)  # error: argument
async def no_time() -> None: ...


@service.every(5, concurency=3)  # error: parameter named "concurency"
async def misspelled() -> None: ...


@service.on_startup
async def start() -> None: ...


async def keeps_its_type(message: tenure.Message) -> None:
    assert_type(await serve(Order("tea"), message), Receipt | None)
    assert_type(await sweep_up(datetime.now(), message), int)
    await tidy("x")  # error: argument
    await mail("x")  # error: argument


threads = tenure.sync.Service("memory:")
mails = threads.queue("mails", str)


def blocks() -> None:
    assert_type(mails, tenure.sync.TypedQueue[str])
    assert_type(mails.send("tea"), str)
    mails.send(b"tea")  # error: argument
    assert_type(mails.request("tea", Receipt), Receipt)


@threads.handler(mails)
def post(text: str, message: tenure.sync.Message) -> None: ...


@threads.every(0.5, missed_after=3)
def beat(slot: datetime) -> None: ...


@threads.every(0.5, missed_after="3")  # error: argument
def beat_late(slot: datetime) -> None: ...


@threads.leader("chair")
def chair(term: tenure.sync.Term) -> None: ...


@threads.leader("clerk")  # error: argument
def clerk(term: Order) -> None: ...
"""


def test_pyright_finds_the_planted_mistakes_and_no_others(tmp_path: Path) -> None:
    if (pyright := shutil.which("pyright", path=str(Path(sys.executable).parent))) is None:
        skip_or_fail("there is no pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    asked = [pyright, "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=110)
    found: dict[int, str] = {}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            found[line] = f"{found.get(line, '')}{one['message'].lower()}\n"
    planted = {
        number: match[1]
        for number, line in enumerate(PROGRAM.splitlines(), start=1)
        if (match := re.search(r"# error: (.*)", line))
    }
    if not found:
        pytest.fail(done.stdout[-2_000:])
    assert set(found) == set(planted), found
    for number, text in planted.items():
        assert text.lower() in found[number]

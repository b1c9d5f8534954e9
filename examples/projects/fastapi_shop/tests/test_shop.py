"""The shop, with its store in memory and its database in a temporary file."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from shop import database, work
from shop.main import app

import tenure

TEA = {"item": "tea", "count": 2}


@pytest.fixture(autouse=True)
def new_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(database, "FILE", tmp_path / "shop.db")
    database.create_tables()


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(app) as client:  # the lifespan runs the handler and the election
        yield client


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_an_order_that_is_sent_twice_is_packed_once(client: TestClient) -> None:
    for _ in range(2):
        assert client.post("/orders", json=TEA, headers={"Idempotency-Key": "order-1"}).status_code == 202
    until(lambda: client.get("/orders/order-1").json()["packed_by"] == work.INSTANCE)
    assert client.get("/stock").json()["tea"] == 18


def test_a_key_belongs_to_one_order(client: TestClient) -> None:
    key = {"Idempotency-Key": "order-2"}
    assert client.post("/orders", json=TEA, headers=key).status_code == 202
    assert client.post("/orders", json={"item": "cup"}, headers=key).status_code == 409
    assert client.post("/orders", json=TEA).status_code == 422  # without a key
    assert client.get("/orders/order-3").status_code == 404


def test_the_probes_answer(client: TestClient) -> None:
    until(lambda: client.get("/ready").status_code == 200)
    assert client.get("/live").status_code == 200
    assert "tenure_handlers_running" in client.get("/metrics").text
    assert "orders" in client.get("/dashboard/").text


def test_a_second_delivery_changes_nothing() -> None:
    database.place("order-4", "tea", 2)
    for _ in range(2):
        work.pack(work.Placed("order-4"))
    assert database.stock()["tea"] == 18


def test_an_order_waits_until_the_leader_has_restocked() -> None:
    for number in range(3):
        database.place(f"order-{number}", "kettle", 10)
    work.pack(work.Placed("order-0"))
    work.pack(work.Placed("order-1"))
    with pytest.raises(tenure.Retry):
        work.pack(work.Placed("order-2"))
    assert database.restock(token=1) == 1
    work.pack(work.Placed("order-2"))


def test_an_older_leader_is_refused() -> None:
    database.restock(token=2)
    with pytest.raises(tenure.TermLost):
        database.restock(token=1)

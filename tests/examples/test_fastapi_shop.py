"""The project with FastAPI, as its reader runs it: two instances, of which one is killed or stopped."""

from __future__ import annotations

import re
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tenure
import tenure.sync
from tests.durations import wait_until
from tests.examples.projects import WITHIN, Answer, Process, Project
from tests.ports import ports_held

pytestmark = pytest.mark.process

PORTS = ("8001", "8002")
ORDERS = ("order-1", "order-2", "order-3")
NO_RESTOCK = {"SHOP_RESTOCK_SECONDS": "600"}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Project]:
    for package in ("fastapi", "httpx", "jinja2", "prometheus_client", "uvicorn"):
        pytest.importorskip(package)
    with ports_held(2) as ports, Project("fastapi_shop", tmp_path, dict(zip(PORTS, ports, strict=True))) as project:
        yield project


def start(shop: Project, port: str, **environment: str) -> Process:
    """Start an instance, and return it when it is ready."""
    instance = shop.start(shop.command(f"--port {port}"), **environment)
    wait_until(lambda: get(shop, port, "ready").code == 200, shop.explain)
    return instance


def get(shop: Project, port: str, path: str) -> Answer:
    return shop.curl(f"curl localhost:{port}/{path}")


def order(shop: Project, key: str) -> Answer:
    """Order as in the README, with another key and at the instance of port 8001."""
    return shop.curl(shop.command("--json").replace("order-1", key))


def packer_of(shop: Project, port: str, key: str) -> int | None:
    """Return the process that has packed an order."""
    found = shop.curl(f"curl localhost:{port}/orders/{key}").json()["packed_by"]
    return None if found is None else int(found.rpartition(":")[2])


def leads(shop: Project, port: str) -> bool:
    return 'tenure_leader{name="restock"} 1.0' in get(shop, port, "metrics").text


def test_its_own_tests_pass(shop: Project) -> None:
    assert "6 passed" in shop.run(shop.command("pytest"))


def test_two_instances_serve_and_the_other_one_leads_when_the_leader_is_killed(shop: Project) -> None:
    instances = {port: start(shop, port) for port in PORTS}
    assert order(shop, "order-1").code == 202
    wait_until(lambda: packer_of(shop, "8002", "order-1"), shop.explain)
    shown = shop.curl(shop.command("/orders/order-1")).text
    assert re.sub(r'(?<="packed_by":)"[^"]+"', '"shop-1:4711"', shown) in shop.readme
    assert packer_of(shop, "8001", "order-1") in {one.pid for one in instances.values()}
    assert "restock" in get(shop, "8002", "dashboard/").text
    wait_until(lambda: any(leads(shop, port) for port in PORTS), shop.explain)
    leader, other = sorted(PORTS, key=lambda port: not leads(shop, port))
    instances[leader].kill()
    wait_until(lambda: leads(shop, other), shop.explain)
    assert "restock: elected, term 2" in instances[other].output
    wait_until(lambda: get(shop, other, "stock").json()["tea"] == 20, shop.explain)  # restocked
    with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
        wait_until(lambda: database.execute("SELECT token FROM tenure_fence").fetchall() == [(2,)], shop.explain)


def test_orders_of_a_killed_instance_are_packed_by_the_other_one_and_only_once(shop: Project) -> None:
    killed = start(shop, "8001", SHOP_PACKING_SECONDS="600", **NO_RESTOCK)
    for key in (*ORDERS, *ORDERS):  # each is sent twice
        assert order(shop, key).code == 202
    wait_until(lambda: get(shop, "8001", "keda/v1/queues/orders").json()["locked"] == len(ORDERS), shop.explain)
    other = start(shop, "8002", SHOP_PACKING_SECONDS="0", **NO_RESTOCK)
    killed.kill()
    wait_until(lambda: all(packer_of(shop, "8002", key) == other.pid for key in ORDERS), shop.explain)
    assert get(shop, "8002", "stock").json()["tea"] == 20 - 2 * len(ORDERS)
    wait_until(lambda: stats_in(shop) == tenure.Stats(), shop.explain)


def test_sigterm_lets_the_handler_finish(shop: Project) -> None:
    instance = start(shop, "8001", SHOP_PACKING_SECONDS="5")
    wait_until(lambda: leads(shop, "8001"), shop.explain)
    with an_open_page_of_the_dashboard(shop):
        assert order(shop, "order-1").code == 202
        wait_until(lambda: stats_in(shop).locked == 1, shop.explain)
        instance.send_signal(signal.SIGTERM)
        assert instance.wait() in (0, -signal.SIGTERM)  # uvicorn ends by the signal, after its lifespan
    with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
        [(packer,)] = database.execute("SELECT packed_by FROM placed").fetchall()
    assert packer.endswith(f":{instance.pid}")
    assert stats_in(shop) == tenure.Stats()
    with tenure.sync.connect(url_of(shop)) as backend:
        assert backend.election("restock").leader() is None


def test_without_its_store_an_instance_keeps_an_order_and_asks_for_it_again(shop: Project) -> None:
    pytest.importorskip("redis")
    nothing_listens_there = f"redis://127.0.0.1:{shop.ports['8002']}"
    shop.start(shop.command("--port 8001"), TENURE_URL=nothing_listens_there)
    wait_until(lambda: get(shop, "8001", "live").code == 200, shop.explain)
    assert get(shop, "8001", "ready").code == 503
    answer = order(shop, "order-1")
    assert (answer.code, "send the same request again" in answer.text) == (503, True)
    assert packer_of(shop, "8001", "order-1") is None


def url_of(shop: Project) -> str:
    return f"sqlite:///{shop.folder}/work.db"


def stats_in(shop: Project) -> tenure.Stats:
    with tenure.sync.connect(url_of(shop)) as backend:
        return backend.queue("orders").stats()


def an_open_page_of_the_dashboard(shop: Project) -> Any:
    """Return a connection on which the dashboard sends its changes."""
    connection = socket.create_connection(("127.0.0.1", shop.ports["8001"]), timeout=WITHIN)
    connection.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 " in connection.recv(1000)
    return closing(connection)

"""The project with Django, as its reader runs it on PostgreSQL: consumers and leaders are killed or stopped."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tests.durations import wait_until
from tests.examples.projects import Project
from tests.ports import ports_held

pytestmark = pytest.mark.process

ORDERS = (1, 2, 3)


@pytest.fixture
def url(postgresql_url: str) -> Iterator[str]:
    """Yield the URL of a database of its own."""
    psycopg: Any = pytest.importorskip("psycopg")
    name = f"outbox_{uuid4().hex[:12]}"
    with psycopg.connect(postgresql_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        yield urlsplit(postgresql_url)._replace(path=f"/{name}").geturl()
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def shop(url: str, tmp_path: Path) -> Iterator[Project]:
    pytest.importorskip("django")
    with ports_held(1) as (port,), Project("django_outbox", tmp_path, {"8001": port}, TENURE_URL=url) as project:
        project.run(project.command("migrate"))
        yield project


def start_server(shop: Project) -> None:
    shop.start(shop.command("runserver"))
    wait_until(lambda: shop.curl(shop.command("/report")).code == 404, shop.explain)  # there is no report yet


def place_orders(shop: Project) -> None:
    for number in ORDERS:
        answer = shop.curl(shop.command("-d item="))
        assert (answer.code, answer.json()) == (202, {"order": number})


def shipped_by(shop: Project, number: int) -> list[int]:
    """Return the process of each shipment of an order."""
    answer = shop.curl(shop.command("orders/1").replace("orders/1", f"orders/{number}"))
    return [int(name.rpartition(":")[2]) for name in answer.json()["shipped_by"]]


def test_its_own_tests_pass_and_no_migration_is_missing(shop: Project) -> None:
    assert "OK" in shop.run(shop.command("manage.py test"))
    assert "No changes detected" in shop.run("python manage.py makemigrations --check --dry-run")


def test_orders_of_a_killed_consumer_are_shipped_by_the_other_one_and_only_once(shop: Project, url: str) -> None:
    start_server(shop)
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders-placed")
        killed = shop.start(shop.command("consume"), SHIPPING_SECONDS="600")
        place_orders(shop)
        wait_until(lambda: queue.stats().locked == len(ORDERS), shop.explain)
        other = shop.start(shop.command("consume"), SHIPPING_SECONDS="0.1")
        killed.kill()
        wait_until(lambda: all(shipped_by(shop, number) for number in ORDERS), shop.explain)
        assert [shipped_by(shop, number) for number in ORDERS] == [[other.pid]] * len(ORDERS)
        assert queue.stats() == tenure.Stats()
        shown = shop.curl(shop.command("orders/1")).text
        assert re.sub(r'(?<="shipped_by": )\["[^"]+"\]', '["shop-1:4711"]', shown) in shop.readme
        other.send_signal(signal.SIGTERM)
        assert other.wait() == 0, other.output


def test_a_consumer_that_was_stopped_for_longer_than_its_lock_ships_nothing(shop: Project, url: str) -> None:
    start_server(shop)
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders-placed")
        stopped = shop.start(shop.command("consume"), SHIPPING_SECONDS="15")
        place_orders(shop)
        wait_until(lambda: queue.stats().locked == len(ORDERS), shop.explain)
        stopped.send_signal(signal.SIGSTOP)
        other = shop.start(shop.command("consume"), SHIPPING_SECONDS="0.1")
        wait_until(lambda: all(shipped_by(shop, number) for number in ORDERS), shop.explain)
        stopped.send_signal(signal.SIGCONT)
        stopped.send_signal(signal.SIGTERM)  # its handlers may finish
        assert stopped.wait() == 0, stopped.output
        assert [shipped_by(shop, number) for number in ORDERS] == [[other.pid]] * len(ORDERS)
        assert queue.stats() == tenure.Stats()


def test_sigterm_lets_the_handlers_finish(shop: Project, url: str) -> None:
    start_server(shop)
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders-placed")
        consumer = shop.start(shop.command("consume"), SHIPPING_SECONDS="2")
        place_orders(shop)
        wait_until(lambda: queue.stats().locked == len(ORDERS), shop.explain)
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait() == 0, consumer.output
        assert [shipped_by(shop, number) for number in ORDERS] == [[consumer.pid]] * len(ORDERS)
        assert queue.stats() == tenure.Stats()


def test_the_other_candidate_reports_when_the_leader_is_killed(shop: Project, url: str) -> None:
    start_server(shop)
    place_orders(shop)

    def report() -> Any:
        answer = shop.curl(shop.command("/report"))
        return answer.json() if answer.code == 200 else None

    with tenure.sync.connect(url) as backend:
        candidates = [shop.start(shop.command("lead") + " --every 0.2") for _ in range(2)]
        wait_until(lambda: report() == {"orders": 3, "shipments": 0, "term": 1}, shop.explain)
        assert re.sub(r"\d+", "1", shop.curl(shop.command("/report")).text) in shop.readme
        leader = backend.election("report").leader()
        assert leader is not None
        leads, other = sorted(candidates, key=lambda one: f"-{one.pid}-" not in leader.holder)
        leads.kill()
        wait_until(lambda: report()["term"] == 2, shop.explain)
        assert "report: elected, term 2" in other.output
        other.send_signal(signal.SIGTERM)
        assert other.wait() == 0, other.output
        assert backend.election("report").leader() is None

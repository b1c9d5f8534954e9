"""The endpoints of a service: probes, Prometheus and KEDA, when all is well and when store, thread or handler hang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest

from tests.durations import PATIENCE, stretched, until

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

import tenure.http
import tenure.sync
from tenure import Message, Service, Stats, Unavailable
from tenure._http import source
from tenure._http.source import FRESH, Remembered
from tenure.telemetry import Metrics

KEDA_WAITS = 3.0
"""Seconds after which KEDA gives up."""

ANSWERED_WITHIN = 10.0
"""The same, on a busy machine."""

HOST = "db.internal.example"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tenure.http.TOKEN_VARIABLE, raising=False)


@pytest.fixture
def url() -> str:
    return f"memory:{uuid4().hex}"


@pytest.fixture
def service(url: str) -> Service:
    made = Service(url)

    @made.handler("orders", concurrency=3, poll_every=0.1)
    async def serve(message: Message) -> None:
        while message.body == b"wait":
            await asyncio.sleep(0.01)

    return made


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service") as client:
        yield client


async def is_ready(client: Any) -> bool:
    return bool((await client.get("/ready")).status_code == 200)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values by name and labels, in the order of the names of these."""
    return {
        (one.name, *(one.labels[label] for label in sorted(one.labels))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


# --- probes ---


async def test_ready_is_200_while_the_service_runs_only_and_live_always(service: Service) -> None:
    async with client_of(tenure.http.app(service)) as client:
        before = await client.get("/ready")
        assert (before.status_code, before.text) == (503, "the service does not run yet, or not any more\n")
        assert (await client.get("/live")).status_code == 200
        async with service.running():
            await until(lambda: is_ready(client))
            live = await client.get("/live")
            assert (live.status_code, live.text, live.headers["cache-control"]) == (200, "live\n", "no-store")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        async with service.running():  # it can be run again
            await until(lambda: is_ready(client))


async def test_when_the_store_stops_to_answer_it_is_not_ready_and_a_restart_would_not_help(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = tenure.http.app(service)
    async with client_of(app) as client, service.running():
        await until(lambda: is_ready(client))
        broker = service.backend.queue("orders")._context.broker

        async def cut(*_: Any) -> Any:
            raise Unavailable(f"no route to {HOST}")

        for verb in ("receive", "holding", "stats"):
            monkeypatch.setattr(type(broker), verb, cut)

        async def is_unready() -> bool:
            return not await is_ready(client)

        await until(is_unready)
        assert (await client.get("/ready")).text == "not ready: the handler of orders\n"
        assert (await client.get("/live")).status_code == 200
        monkeypatch.setattr(source, "FRESH", 0.0)  # an earlier answer serves no longer
        for path in ("/keda/v1/queues/orders", "/metrics"):
            answer = await client.get(path)
            assert HOST not in answer.text
            assert answer.status_code == (503 if "keda" in path else 200)
        monkeypatch.undo()
        await service.backend.queue("orders").send(b"x")  # a hint: it asks at once, and not after a pause
        await until(lambda: is_ready(client))
        assert (await client.get("/keda/v1/queues/orders")).status_code == 200


async def test_a_renewal_thread_that_hangs_makes_it_neither_live_nor_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = asyncio.Event()

    @service.leader("chair")
    async def lead(term: tenure.Term) -> None:
        leading.set()
        await asyncio.sleep(3_600)

    released = threading.Event()
    async with client_of(tenure.http.app(service)) as client, service.running():
        await asyncio.wait_for(leading.wait(), PATIENCE)
        await until(lambda: is_ready(client))
        thread = service.backend._connection.require_open()[0]
        assert thread.loop is not None
        thread.loop.call_soon_threadsafe(released.wait, PATIENCE)
        monkeypatch.setattr(source, "ANSWER_WITHIN", 0.1)
        try:
            begun = time.monotonic()
            live, ready = await asyncio.gather(client.get("/live"), client.get("/ready"))
            assert time.monotonic() - begun < ANSWERED_WITHIN
            assert (live.status_code, ready.status_code) == (503, 503)
            assert live.text == "the thread that renews leases and locks does not answer\n"
            assert (await client.get("/metrics")).status_code == 200
        finally:
            released.set()
        monkeypatch.undo()
        await until(lambda: is_ready(client))
        assert (await client.get("/live")).status_code == 200


# --- KEDA ---


async def test_the_backlog_is_what_is_ready_and_what_is_locked(service: Service) -> None:
    async with client_of(tenure.http.app(service)) as client, service.running():
        queue = service.backend.queue("orders")
        await queue.send_batch([tenure.Outgoing(b"wait") for _ in range(5)])
        await queue.send(b"later", delay=3_600)

        async def is_locked() -> bool:
            return (await queue.stats()).locked >= 3

        await until(is_locked)
        answer = await client.get("/keda/v1/queues/orders")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.headers["cache-control"] == "no-store"
        found = answer.json()
        numbers = {"backlog", "ready", "locked", "delayed", "deferred", "dead", "oldest_age"}
        assert set(found) == {"queue", "paused", *numbers}
        assert (found["queue"], found["backlog"], found["delayed"]) == ("orders", 5, 1)
        assert found["ready"] + found["locked"] == 5
        assert found["locked"] >= 3
        service.stop(0.0)


async def test_a_queue_without_a_handler_is_404(service: Service) -> None:
    async with client_of(tenure.http.app(service)) as client, service.running():
        await service.backend.queue("others").send(b"x")
        await until(lambda: is_ready(client))
        for path in ("others", "orders/", "order", "", "ORDERS"):
            answer = await client.get(f"/keda/v1/queues/{path}")
            assert answer.status_code == 404, path
        assert "'others'" in (await client.get("/keda/v1/queues/others")).json()["error"]


@pytest.mark.parametrize(
    "name",
    ["a/b", "a/b/", "/a", "a//b", "a.b", "...", "a b", "a%2Fb", "a?b", "a#b", "ünïcödé ☃ 𝛑", "a+b", '"quoted\\"'],
)
async def test_every_name_of_a_queue_can_be_asked_for(url: str, name: str) -> None:
    service = Service(url)

    @service.handler(name)
    async def serve(message: Message) -> None: ...

    app = tenure.http.app(service)
    async with client_of(app) as client, service.running():
        await until(lambda: is_ready(client))
        request = client.build_request("GET", "/")
        request.url = httpx.URL("http://service", raw_path=b"/keda/v1/queues/" + quote(name, safe="/").encode())
        answer = await client.send(request)
        assert (answer.status_code, answer.json()["queue"]) == (200, name)
        assert samples((await client.get("/metrics")).text)["tenure_queue_messages", name, "ready"] == 0.0


async def test_a_store_that_is_silent_is_503_in_time_and_the_next_answer_is_a_new_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(tenure.http.app(service)) as client, service.running():
        await until(lambda: is_ready(client))
        broker = service.backend.queue("orders")._context.broker
        asked = 0

        async def hang(*_: Any) -> Any:
            nonlocal asked
            asked += 1
            await asyncio.sleep(3_600)

        monkeypatch.setattr(type(broker), "stats", hang)
        monkeypatch.setattr(source, "ANSWER_WITHIN", stretched(0.2))
        begun = time.monotonic()
        answers = await asyncio.gather(*(client.get("/keda/v1/queues/orders") for _ in range(20)))
        assert time.monotonic() - begun < ANSWERED_WITHIN
        assert {(one.status_code, one.text) for one in answers} == {(503, '{"error":"the store did not answer"}')}
        assert asked == 1
        monkeypatch.undo()
        assert (await client.get("/keda/v1/queues/orders")).status_code == 200


async def test_requests_share_one_question_for_a_second(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(tenure.http.app(service)) as client, service.running():
        await until(lambda: is_ready(client))
        broker = service.backend.queue("orders")._context.broker
        asked = 0
        stats = broker.stats

        async def count(_: Any, name: str) -> Stats:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.05)
            return await stats(name)

        monkeypatch.setattr(type(broker), "stats", count)
        begun = time.monotonic()
        paths = ["/keda/v1/queues/orders", "/metrics"] * 10
        answers = await asyncio.gather(*map(client.get, paths))
        answers += [await client.get(path) for path in paths]
        took = time.monotonic() - begun
        assert {one.status_code for one in answers} == {200}
        assert asked <= 1 + took / FRESH
        monkeypatch.setattr(source, "FRESH", 0.0)
        before = asked
        assert (await client.get("/keda/v1/queues/orders")).status_code == 200
        assert asked == before + 1


async def test_a_client_that_goes_away_takes_the_answer_from_no_other() -> None:
    answers = asyncio.Event()

    async def ask() -> dict[str, Stats]:
        await answers.wait()
        return {"orders": Stats()}

    remembered = Remembered(ask)
    first, second = asyncio.create_task(remembered.get()), asyncio.create_task(remembered.get())
    await asyncio.sleep(0)
    first.cancel()
    answers.set()
    assert await asyncio.wait_for(second, PATIENCE) == {"orders": Stats()}
    assert first.cancelled()


def test_an_answer_that_a_loop_has_left_open_is_asked_for_again_on_the_next() -> None:
    async def ask() -> dict[str, Stats]:
        if not loops:
            await asyncio.sleep(3_600)
        return {"orders": Stats()}

    loops: list[asyncio.AbstractEventLoop] = []
    remembered = Remembered(ask)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remembered.get(), 0.01)

    first = asyncio.new_event_loop()
    first.run_until_complete(give_up())
    loops.append(first)  # it does not run any more, and has cancelled nothing
    assert asyncio.run(asyncio.wait_for(remembered.get(), PATIENCE)) == {"orders": Stats()}
    for task in asyncio.all_tasks(first):
        task.cancel()
        first.run_until_complete(asyncio.gather(task, return_exceptions=True))
    first.close()


async def test_a_question_that_was_cancelled_is_asked_again() -> None:
    asked = 0

    async def ask() -> dict[str, Stats]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise asyncio.CancelledError
        return {"orders": Stats()}

    remembered = Remembered(ask)
    with pytest.raises(asyncio.CancelledError):
        await remembered.get()
    assert await remembered.get() == {"orders": Stats()}


# --- Prometheus ---


async def test_metrics_have_what_was_done_what_runs_and_what_waits(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FRESH", 0.0)
    async with client_of(tenure.http.app(service)) as client, service.running():
        queue = service.backend.queue("orders")
        await queue.send_batch([tenure.Outgoing(b"x"), tenure.Outgoing(b"wait")])

        async def found() -> dict[tuple[str, ...], float]:
            answer = await client.get("/metrics")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=")
            return samples(answer.text)

        async def is_handled() -> bool:
            numbers = await found()
            return (
                numbers.get(("tenure_messages_handled_total", "completed", "orders")) == 1.0
                and numbers.get(("tenure_queue_messages", "orders", "locked")) == 1.0
            )

        await until(is_handled)
        numbers = await found()
        assert numbers["tenure_messages_sent_total", "orders"] == 2.0
        assert numbers["tenure_messages_received_total", "orders"] == 2.0
        assert numbers["tenure_handlers_running", "orders"] == 1.0
        assert numbers["tenure_handlers_concurrency", "orders"] == 3.0
        assert numbers["tenure_queue_messages", "orders", "ready"] == 0.0
        service.stop(0.0)


async def test_the_two_handlers_of_a_queue_are_added_up(service: Service) -> None:
    @service.handler("orders", concurrency=4, sessions=True)
    async def serve(message: Message) -> None:
        while True:
            await asyncio.sleep(0.01)

    async with client_of(tenure.http.app(service)) as client, service.running():
        queue = service.backend.queue("orders")
        await queue.send_batch([tenure.Outgoing(b"wait"), tenure.Outgoing(b"wait", session="s")])

        async def are_both_running() -> bool:
            found = samples((await client.get("/metrics")).text)
            return found.get(("tenure_handlers_running", "orders")) == 2.0

        await until(are_both_running)
        found = samples((await client.get("/metrics")).text)
        assert found["tenure_handlers_concurrency", "orders"] == 7.0
        service.stop(0.0)


async def test_metrics_that_measure_already_are_shown(url: str) -> None:
    metrics = Metrics()
    service = Service(url, telemetry=metrics)

    @service.handler("orders")
    async def serve(message: Message) -> None: ...

    async with client_of(tenure.http.app(service, metrics=metrics)) as client, service:
        await service.backend.queue("orders").send(b"x")
        assert samples((await client.get("/metrics")).text)["tenure_messages_sent_total", "orders"] == 1.0
    wrong: Any = 3
    with pytest.raises(tenure.ConfigError, match=r"metrics must be a tenure\.telemetry\.Metrics, not 3"):
        tenure.http.app(service, metrics=wrong)


# --- the token ---


@pytest.mark.parametrize(
    ("header", "is_right"),
    [
        (None, False),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("Bearer wrong", False),
        ("Bearer sécret-1 ", True),
        ("bearer sécret-1", True),
        ("Basic sécret-1", False),
        ("sécret-1", False),
        ("Bearer sécret-1 more", False),
    ],
)
@pytest.mark.parametrize("token", ["sécret-1", "sécret-1\n"])
async def test_metrics_and_numbers_need_the_token_and_probes_do_not(
    service: Service, monkeypatch: pytest.MonkeyPatch, header: str | None, is_right: bool, token: str
) -> None:
    monkeypatch.setenv(tenure.http.TOKEN_VARIABLE, token)  # one from a file ends with a newline
    headers = {} if header is None else {"authorization": header.encode()}
    async with client_of(tenure.http.app(service)) as client, service.running():
        await until(lambda: is_ready(client))
        for path in ("/metrics", "/keda/v1/queues/orders", "/keda/v1/queues/unknown"):
            answer = await client.get(path, headers=headers)
            if is_right:
                assert answer.status_code == (404 if "unknown" in path else 200)
            else:
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert "orders" not in answer.text
        for path in ("/live", "/ready"):
            assert (await client.get(path, headers=headers)).status_code == 200


# --- the application ---


async def test_it_can_be_mounted_below_a_path(service: Service) -> None:
    app = Starlette(routes=[Mount("/tenure", tenure.http.app(service))])
    async with client_of(app) as client, service.running():
        assert (await client.get("/live")).status_code == 404

        async def is_ready_below() -> bool:
            return bool((await client.get("/tenure/ready")).status_code == 200)

        await until(is_ready_below)
        for path in ("live", "ready", "metrics", "keda/v1/queues/orders"):
            assert (await client.get(f"/tenure/{path}")).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/ready", "/metrics", "/keda/v1/queues/orders"])
async def test_nothing_can_be_changed(service: Service, path: str) -> None:
    async with client_of(tenure.http.app(service)) as client, service.running():
        await until(lambda: is_ready(client))
        head = await client.head(path)
        assert (head.status_code, head.text) == (200, "")
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await client.request(method, path)).status_code == 405
        assert (await client.get(f"{path}/x")).status_code == 404


def serve_plain(message: tenure.sync.Message) -> None: ...


@pytest.fixture
def plain_service(url: str) -> tenure.sync.Service:
    service = tenure.sync.Service(url)
    service.handler("orders")(serve_plain)
    return service


async def test_a_service_without_asyncio_has_the_same(
    plain_service: tenure.sync.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FRESH", 0.0)
    async with client_of(tenure.http.app(plain_service)) as client, plain_service.service.running():
        await until(lambda: is_ready(client))
        await asyncio.to_thread(plain_service.backend.queue("orders").send, b"x")

        async def is_handled() -> bool:
            found = samples((await client.get("/metrics")).text)
            return found.get(("tenure_messages_handled_total", "completed", "orders")) == 1.0

        await until(is_handled)

        async def is_empty() -> bool:
            return bool((await client.get("/keda/v1/queues/orders")).json()["backlog"] == 0)

        await until(is_empty)


async def test_a_service_with_leaders_only_needs_no_queue(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(url)

    @service.leader("chair")
    async def lead(term: tenure.Term) -> None:
        await asyncio.sleep(3_600)

    async with client_of(tenure.http.app(service)) as client, service.running():
        await until(lambda: is_ready(client))

        async def leads() -> bool:
            return samples((await client.get("/metrics")).text).get(("tenure_leader", "chair")) == 1.0

        await until(leads)
        assert (await client.get("/keda/v1/queues/orders")).status_code == 404


def test_it_gives_up_before_keda_does() -> None:
    assert source.ANSWER_WITHIN <= KEDA_WAITS - 0.5


async def test_an_answer_that_takes_too_long_leaves_nothing_behind(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(tenure.http.app(service)) as client, service.running():
        await until(lambda: is_ready(client))
        monkeypatch.setattr(source, "ANSWER_WITHIN", 0.02)
        broker = service.backend.queue("orders")._context.broker

        async def hang(*_: Any) -> Any:
            await asyncio.sleep(3_600)

        monkeypatch.setattr(type(broker), "stats", hang)
        await client.get("/keda/v1/queues/orders")
        before = len(asyncio.all_tasks())
        for _ in range(20):
            assert (await client.get("/keda/v1/queues/orders")).status_code == 503
        assert len(asyncio.all_tasks()) < before + 10  # the consumer has some that come and go

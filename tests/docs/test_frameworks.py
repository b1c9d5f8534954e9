"""The examples for web frameworks, where these are installed; the project doesn't need them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tenure
from tenure.testing import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

WITHIN = 60.0
"""Seconds that a process has to start and to do its work, on a slow machine."""

QUIET = ("-W", "ignore:This process:DeprecationWarning")
"""From 3.12 on, Python warns of a fork beside threads; the program forks there on purpose."""


def load(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("TENURE_URL", url_in(tmp_path))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder}/work.db"


def environment_in(folder: Path) -> dict[str, str]:
    """Return the environment of a process that can import the examples."""
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "TENURE_URL": url_in(folder), "PYTHONPATH": path}


def run(program: str, folder: Path) -> str:
    """Return what a program prints that uses an example."""
    line = [sys.executable, *QUIET, "-c", program]
    done = subprocess.run(
        line, cwd=folder, env=environment_in(folder), capture_output=True, text=True, timeout=WITHIN, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def let_work(example: str, *arguments: str, queue: str, folder: Path) -> str:
    """Run an example until it has served all messages of *queue*, then end it by SIGTERM; return what it printed."""
    line = [sys.executable, str(EXAMPLES / f"{example}.py"), *arguments]
    pipe = subprocess.PIPE
    async with tenure.connect(url_in(folder)) as backend:
        messages = backend.queue(queue)
        assert (await messages.stats()).ready > 0
        worker = subprocess.Popen(line, cwd=folder, env=environment_in(folder), stdout=pipe, stderr=pipe, text=True)

        async def all_are_served() -> bool:
            assert worker.poll() is None, worker.communicate()
            return await messages.stats() == tenure.Stats()

        try:
            await until(all_are_served, within=WITHIN)
            worker.send_signal(signal.SIGTERM)
            output, errors = worker.communicate(timeout=WITHIN)
        finally:
            worker.kill()
            worker.wait()
    assert worker.returncode == 0, errors
    return output


def client_of(web: ModuleType) -> Any:
    httpx: Any = pytest.importorskip("httpx")
    return httpx.AsyncClient(transport=httpx.ASGITransport(web.app), base_url="http://here")


async def test_the_dashboard_is_below_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)  # where its store is
    web = load("web_dashboard", monkeypatch, tmp_path)
    async with web.app.router.lifespan_context(web.app), client_of(web) as client:
        await web.backend.queue("orders").send(b"x")
        page = await client.get("/tenure/")
        assert page.status_code == 200
        assert 'href="/tenure/queue?name=orders"' in page.text


@pytest.mark.filterwarnings("default")
async def test_fastapi_takes_and_serves_orders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    web = load("web_fastapi", monkeypatch, tmp_path)
    for _ in range(2):  # as tests do, which start the application anew
        async with web.app.router.lifespan_context(web.app), client_of(web) as client:
            assert (await client.post("/orders", json={"item": "tea"})).status_code == 202
            assert (await client.post("/orders", json={"count": 2})).status_code == 422
            await until(lambda: web.served == ["tea"], within=WITHIN)

            async def leads(ask: Any = client) -> Any:
                return (await ask.get("/leader")).json()

            await until(leads, within=WITHIN)
            assert (await leads())["metadata"] == {}
            assert (await client.get("/stats")).json()["dead"] == 0
            web.served.clear()
        assert "not open" in repr(web.service)


@pytest.mark.filterwarnings("default")
async def test_starlette_takes_and_fetches_pages_and_answers_a_probe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("starlette")
    httpx: Any = pytest.importorskip("httpx")
    web = load("web_starlette", monkeypatch, tmp_path)
    async with web.app.router.lifespan_context(web.app) as state:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await web.app({**scope, "state": dict(state)}, receive, send)  # as servers do

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            for _ in range(2):  # the second one is dropped
                answer = await client.post("/pages", content="http://there/")
                assert (answer.status_code, answer.json()) == (202, {"id": "http://there/"})
            await until(lambda: web.fetched, within=WITHIN)

            async def leads() -> bool:
                return bool((await client.get("/ready")).json()["state"] == "leading")

            await until(leads, within=WITHIN)
            assert (await client.get("/ready")).status_code == 200
    assert web.fetched == ["http://there/"]
    assert "not open" in repr(web.service)


@pytest.mark.process
@pytest.mark.filterwarnings("default")
async def test_flask_takes_orders_and_its_worker_serves_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flask")
    web = load("web_flask", monkeypatch, tmp_path)
    client = web.app.test_client()
    try:
        assert client.post("/orders", data={"item": "tea", "count": "2"}).status_code == 202
        assert client.post("/orders", data={"count": "2"}).status_code == 400
        assert web.orders.queue.stats().ready == 1
    finally:
        web.service.close()
    assert await let_work("web_flask", queue="orders", folder=tmp_path) == "2 × tea served\n"


FORKS = """
import os
import web_flask as web

def post(item):
    return web.app.test_client().post("/orders", data={"item": item}).status_code

assert post("tea") == 202
child = os.fork()
if child == 0:
    raise SystemExit(post("cup") != 202)  # and it closes the service of the child
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert post("can") == 202
print(web.orders.queue.stats().ready)
"""


@pytest.mark.process
def test_a_process_that_flask_was_forked_to_sends_too(tmp_path: Path) -> None:
    """As with ``gunicorn --preload``."""
    pytest.importorskip("flask")
    assert run(FORKS, tmp_path) == "3\n"


REQUESTS = """
import json
import web_django as web
from django.db import transaction
from django.test import Client

web.create_table()
client = Client(headers={"host": "localhost"})
tea = {"item": "tea", "count": 2}
answers = [client.post("/orders", tea), client.post("/orders", {"item": "cup"}), client.get("/orders")]
web.send(web.Order.objects.get())  # dropped
try:
    with transaction.atomic():
        answers.append(client.post("/orders", tea))
        raise LookupError
except LookupError:
    pass  # neither kept nor sent
print(json.dumps([[one.status_code for one in answers], web.placed.queue.stats().ready]))
"""


@pytest.mark.process
async def test_django_takes_orders_and_its_command_serves_them(tmp_path: Path) -> None:
    pytest.importorskip("django")  # in processes only: its settings are those of a whole process
    assert json.loads(run(REQUESTS, tmp_path)) == [[202, 400, 405, 202], 1]
    await let_work("web_django", "work", queue="orders-placed", folder=tmp_path)
    shop = sqlite3.connect(tmp_path / "shop.db")
    try:
        assert shop.execute("select item, count, is_served from shop_order").fetchall() == [("tea", 2, 1)]
    finally:
        shop.close()


@pytest.mark.process
@pytest.mark.parametrize("line", ["web_flask.py", "web_django.py work"])
def test_without_a_store_the_error_of_a_worker_says_what_to_do(line: str, tmp_path: Path) -> None:
    name, *arguments = line.split()
    pytest.importorskip(name.removeprefix("web_").removesuffix(".py"))
    environment = {key: value for key, value in os.environ.items() if key != "TENURE_URL"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )
    assert "no store is named" in done.stderr.splitlines()[-1]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["web_fastapi", "web_starlette"])
async def test_without_a_store_the_application_does_not_start(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(name.removeprefix("web_"))
    web = load(name, monkeypatch, tmp_path)
    monkeypatch.delenv("TENURE_URL")
    with pytest.raises(tenure.ConfigError, match="no store is named"):
        await web.app.router.lifespan_context(web.app).__aenter__()

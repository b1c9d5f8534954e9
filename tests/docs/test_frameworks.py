"""The examples for web frameworks, where these are installed; the project doesn't need them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tenure.testing import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("TENURE_URL", f"sqlite:///{tmp_path}/work.db")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("default")
async def test_fastapi_takes_and_serves_orders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    httpx: Any = pytest.importorskip("httpx")
    web = load("web_fastapi", monkeypatch, tmp_path)
    for _ in range(2):  # as tests do, which start the application anew
        async with (
            web.app.router.lifespan_context(web.app),
            httpx.AsyncClient(transport=httpx.ASGITransport(web.app), base_url="http://here") as client,
        ):
            assert (await client.post("/orders", json={"item": "tea"})).status_code == 202
            await until(lambda: web.served == ["tea"])

            async def leads(ask: Any = client) -> Any:
                return (await ask.get("/leader")).json()

            await until(leads)
            assert (await leads())["metadata"] == {}
            assert (await client.get("/stats")).json()["dead"] == 0
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["state"]) == (200, "leading")
            web.served.clear()
        assert "closed" in repr(web.backend)


@pytest.mark.filterwarnings("default")
def test_flask_takes_orders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flask")
    web = load("web_flask", monkeypatch, tmp_path)
    answer = web.app.test_client().post("/orders", json={"item": "tea"})
    assert answer.status_code == 202
    assert web.orders().stats().ready == 1
    web.backend.close()


@pytest.mark.process
@pytest.mark.parametrize("name", ["web_fastapi", "web_flask"])
def test_without_a_store_the_error_says_what_to_do(name: str) -> None:
    pytest.importorskip(name.removeprefix("web_"))
    environment = {key: value for key, value in os.environ.items() if key != "TENURE_URL"}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert "no store is named" in run.stderr.splitlines()[-1]

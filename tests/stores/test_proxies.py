"""A proxy that the environment names is told nothing: it would be sent passwords and tokens."""

from __future__ import annotations

import asyncio

import pytest

import tenure

for _driver in ("aiohttp", "yaml"):
    pytest.importorskip(_driver)

HOST = "127.0.0.1:1"
"""Nobody listens there."""

URLS = [
    f"etcd://ann:hush@{HOST}/?timeout=1",
    f"etcds://ann:hush@{HOST}/?timeout=1",
    f"kubernetes://default?server=http://{HOST}&token_env=TOKEN&timeout=1",
    f"kubernetes://default?server=https://{HOST}&token_env=TOKEN&timeout=1",
]


@pytest.mark.parametrize("url", URLS)
async def test_a_proxy_of_the_environment_is_told_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.read(1000))
        writer.close()

    listener = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    for scheme in ("http", "https", "all"):
        for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TOKEN", "hush")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with listener, tenure.connect(url) as backend:
        with pytest.raises(tenure.Unavailable):
            await backend.leaders()
    assert told == []

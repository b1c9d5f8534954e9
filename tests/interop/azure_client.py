"""The client of Azure's own library for Service Bus, without the pauses that it makes by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from azure.servicebus._pyamqp.aio import _client_async
from azure.servicebus._pyamqp.aio._client_async import AMQPClientAsync
from azure.servicebus.aio import _servicebus_receiver_async, _servicebus_sender_async


def wait_for_frames_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library's own clients wait for frames, and not sleep besides.

    They sleep for a twentieth of a second after each frame of a link that they open, and at close up to a second, until
    their task for keeping connections alive wakes: no test takes so long that a connection would be idle.
    """

    async def nothing(self: AMQPClientAsync) -> None:
        pass

    monkeypatch.setattr(AMQPClientAsync, "_keep_alive_async", nothing)
    sleepless = SimpleNamespace(**{**vars(asyncio), "sleep": lambda _: asyncio.sleep(0)})
    for module in (_servicebus_receiver_async, _servicebus_sender_async, _client_async):
        monkeypatch.setattr(module, "asyncio", sleepless)

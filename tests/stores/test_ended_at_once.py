"""Hints whose connection a server accepts and ends at once: it is made again ever less often.

Where the common rule of ``_runtime/shared_hints.py`` is used, tests/unit/test_shared_hints.py tries that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tenure._backends.postgres.wake import Wake
from tenure._backends.servicebus.client import NO_SESSION
from tenure._backends.servicebus.driver import Refused
from tenure._backends.servicebus.feed import Feed
from tenure._backends.servicebus.sessions import Sessions
from tenure._runtime.backoff import LONGEST
from tenure.testing.loop import run as run_in_virtual_time

ASKED_FOR = 600.0
"""Seconds."""


def always(result: Any = None) -> Any:
    async def answer(*_: object, **__: object) -> Any:
        return result

    return answer


def ends_soon(end: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_later(0.001, end)


async def postgres(made: list[float]) -> None:
    async def connect() -> Any:
        made.append(asyncio.get_running_loop().time())
        return SimpleNamespace(
            add_termination_listener=lambda act: ends_soon(lambda: act(None)),
            add_listener=always(),
            terminate=lambda: None,
        )

    options = SimpleNamespace(schema="tenure", listen=True, timeout=5.0)
    wake = Wake(SimpleNamespace(options=options, connect=connect))  # type: ignore[arg-type]
    hints = wake.listen("lease:a")
    await asyncio.sleep(ASKED_FOR)
    await wake.close()
    del hints


async def service_bus(made: list[float]) -> None:
    async def receiver(path: object, on_arrival: Callable[[], None]) -> Any:
        made.append(asyncio.get_running_loop().time())
        link = SimpleNamespace(credit=0, ready=[], lost=None, ask=always())

        def end() -> None:
            link.lost = ConnectionError("the service has ended it")
            on_arrival()

        ends_soon(end)
        return link

    namespace: Any = SimpleNamespace(options=SimpleNamespace(timeout=5.0), receiver=receiver, is_closed=False)
    feed = Feed(namespace, always(), always(False), lambda: 30.0, lambda: None, lambda: None, lambda: None)
    feed.begin_listening()
    await asyncio.sleep(ASKED_FOR)
    feed.end_listening()


async def service_bus_sessions(made: list[float]) -> None:
    async def session(*_: object) -> Any:
        made.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        raise Refused(min(NO_SESSION), "there is none")

    namespace: Any = SimpleNamespace(session=session)
    places: Any = SimpleNamespace(existing=always("orders"))
    sessions = Sessions(namespace, places, None)  # type: ignore[arg-type]
    sessions.wait("orders", lambda: None)
    await asyncio.sleep(ASKED_FOR)
    await sessions.close()


@pytest.mark.parametrize("listen", [postgres, service_bus, service_bus_sessions])
def test_hints_that_end_at_once_are_asked_for_ever_less_often(listen: Any) -> None:
    made: list[float] = []
    run_in_virtual_time(listen(made), limit=10 * ASKED_FOR)
    assert 10 <= len(made) <= ASKED_FOR / (LONGEST / 2) + 10

"""The settings of a queue: declared for all processes, expected by each program."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from uuid import uuid4

import pytest

import tenure
import tenure.sync

USUAL = tenure.QueueSettings()


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory:{uuid4().hex}" if request.param == "memory" else f"sqlite:///{tmp_path}/work.db"


async def test_the_first_use_declares_what_is_expected(url: str) -> None:
    async with tenure.connect(url) as backend, tenure.connect(url) as other:
        queue = backend.queue("orders", lock=5)
        assert await other.queue("orders").settings() == USUAL  # nothing was used yet
        await queue.send(b"x")
        assert await other.queue("orders").settings() == tenure.QueueSettings(lock=5)


async def test_another_expectation_is_refused_whatever_is_asked(url: str) -> None:
    async with tenure.connect(url) as backend, tenure.connect(url) as other:
        await backend.queue("orders", lock=5, max_deliveries=3).send(b"x")
        queue = other.queue("orders", lock=30, max_deliveries=3, body_max=2_000_000 // 2)
        for use in (
            lambda: queue.send(b"x"),
            queue.receive,
            lambda: queue.request(b"x"),
            lambda: queue.consume(print, sigterm=False),
            lambda: queue.session(wait=0).__aenter__(),
        ):
            with pytest.raises(tenure.ConfigError, match="lock is 5, not 30") as caught:
                await use()
            said = str(caught.value)
            assert "'orders'" in said
            assert "max_deliveries" not in said
            assert "leave lock out" in said
            assert "await queue.declare(lock=30)" in said
            assert "tenure queue declare orders --lock 30" in said
        assert (await queue.stats()).ready == 1
        await queue.declare(lock=30)  # as the message says
        await queue.send(b"y")
        assert (await backend.queue("orders").settings()).lock == 30


async def test_without_settings_nothing_is_checked(url: str) -> None:
    async with tenure.connect(url) as backend, tenure.connect(url) as other:
        await backend.queue("orders").send(b"x")  # declares nothing
        await other.queue("orders", lock=5).send(b"y")
        queue = backend.queue("orders")
        await queue.send(b"z")
        assert repr(queue) == "<Queue 'orders', lock 5 s>"


async def test_of_two_that_race_one_is_refused(url: str) -> None:
    async with tenure.connect(url) as backend, tenure.connect(url) as other:
        sends = [one.queue("orders", lock=lock).send(b"x") for one, lock in ((backend, 5), (other, 30))]
        ends = await asyncio.gather(*sends, return_exceptions=True)
        [refused] = [one for one in ends if isinstance(one, BaseException)]
        assert isinstance(refused, tenure.ConfigError)
        assert (await backend.queue("orders").stats()).ready == 1


async def test_declare_changes_what_it_names_for_all_processes(url: str) -> None:
    async with tenure.connect(url) as backend, tenure.connect(url) as other:
        queue, theirs = backend.queue("orders", lock=5), other.queue("orders")
        await queue.send(b"x")
        await theirs.send(b"x")
        holds = tenure.QueueSettings(lock=5, max_deliveries=3, dead_retention=9)
        assert await queue.declare(max_deliveries=3, dead_retention=9) == holds
        assert await theirs.settings() == holds
        assert (await queue.declare(dead_retention=math.inf)).dead_retention == math.inf
        for wrong in ({"lock": -1}, {"max_deliveries": 0}, {"lock": 1e9}):
            with pytest.raises(tenure.ConfigError, match="must be"):
                await queue.declare(**wrong)


async def test_declare_alone_makes_the_queue(url: str) -> None:
    async with tenure.connect(url) as backend:
        assert await backend.queue("orders").declare() == USUAL
        assert await backend.queues() == ["orders"]


async def test_what_is_declared_is_expected_from_then_on(url: str) -> None:
    async with tenure.connect(url) as backend:
        queue = backend.queue("orders", lock=5)
        await queue.declare(lock=7)
        await queue.send(b"x")
        await queue.delete(force=True)
        assert await queue.settings() == USUAL
        await queue.send(b"x")
        assert (await queue.settings()).lock == 7


def test_threads_declare_as_well(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders", lock=5)
        queue.send(b"x")
        assert queue.declare(max_deliveries=3) == tenure.QueueSettings(lock=5, max_deliveries=3)
        assert queue.settings().max_deliveries == 3
        with pytest.raises(tenure.ConfigError, match="lock is 5, not 6"):
            backend.queue("orders", lock=6).send(b"x")

"""The options of ``consume``: their names, their defaults, and the errors of invalid ones."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import pytest

import tenure
import tenure.sync
from tenure._queue.handlers import RunIn
from tenure._queue.options import ConsumeOptions, ConsumeSettings


@pytest.fixture
async def queue() -> AsyncIterator[tenure.Queue]:
    async with tenure.connect("memory:") as backend:
        yield backend.queue("orders")


async def handle(message: tenure.Message) -> None:
    """Do nothing."""


def yields(message: object, error: object = None) -> Iterator[int]:
    """A generator function: calling it runs nothing."""
    yield 1


async def yields_later(message: object) -> AsyncIterator[int]:
    """An async generator function."""
    yield 1


class Yielding:
    def __call__(self, message: object) -> Iterator[int]:
        yield 1


@types.coroutine
def old_style(message: tenure.Message) -> Generator[None, None, None]:
    """A coroutine in the old style."""
    yield


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("run_in", ["auto", "thread", "process"])
@pytest.mark.parametrize("bad", [yields, yields_later, Yielding(), functools.partial(yields, error=None)])
async def test_a_generator_function_is_no_handler(queue: tenure.Queue, bad: Any, run_in: RunIn, sessions: bool) -> None:
    await queue.send(b"a")
    with pytest.raises(tenure.ConfigError, match="handler must be a function that does its work when it is called"):
        await queue.consume(bad, sessions=sessions, run_in=run_in)
    assert (await queue.stats()).ready == 1


async def test_a_generator_function_is_no_work_of_a_leader() -> None:
    bad: Any
    async with tenure.connect("memory:") as backend:
        for bad in (yields, yields_later):
            with pytest.raises(
                tenure.ConfigError, match="work must be a function that does its work when it is called"
            ):
                await backend.election("chair").run(bad)
    with tenure.sync.connect("memory:") as blocking:
        for bad in (yields, yields_later):
            with pytest.raises(tenure.ConfigError, match="work must be"):
                blocking.election("chair").run(bad)
            with pytest.raises(tenure.ConfigError, match="handler must be"):
                blocking.queue("orders").consume(bad)


async def test_a_coroutine_of_the_old_style_is_a_handler(queue: tenure.Queue) -> None:
    await queue.send(b"a")
    await queue.consume(old_style, until_empty=True)
    assert (await queue.stats()).ready == 0


def test_the_typed_options_are_the_parameters() -> None:
    assert [one.name for one in dataclasses.fields(ConsumeSettings)] == list(ConsumeOptions.__annotations__)


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"retry": 3}, r"retry must be a RetryPolicy, not 3; try"),
        ({"on_error": 3}, "on_error must be a function that takes a message and an exception, not 3"),
        ({"grace": -1}, "grace must be at least 0, not -1"),
        ({"inbox_window": math.nan}, "inbox_window must be a finite number of seconds, not nan"),
        ({"concurrency": "ten"}, "concurrency must be a whole number of at least 1, not 'ten'"),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0, not -1"),
        ({"poll_every": "x"}, "poll_every must be a finite number of seconds, not 'x'"),
        ({"on_error": yields}, "on_error must be a function that does its work when it is called"),
        ({"run_in": "fibre"}, "run_in must be 'auto', 'thread' or 'process', not 'fibre'"),
    ],
)
async def test_options_that_can_not_work(
    queue: tenure.Queue, sessions: bool, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(tenure.ConfigError, match=complaint):
        await queue.consume(handle, sessions=sessions, **options)


async def test_an_unknown_option(queue: tenure.Queue) -> None:
    misspelled: Any = {"concurency": 3}
    with pytest.raises(TypeError, match=r"^consume\(\) has no option 'concurency'; did you mean 'concurrency'\?$"):
        await queue.consume(handle, **misspelled)


async def test_sessions_are_settled_for_their_handler(queue: tenure.Queue) -> None:
    with pytest.raises(tenure.ConfigError, match="auto_complete=False is not for sessions=True"):
        queue.consumer(handle, sessions=True, auto_complete=False)

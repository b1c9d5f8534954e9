"""The options of ``consume``: their names, their defaults, and what is said of those that can't work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

import tenure
from tenure.queue.consuming import ConsumeOptions, Consuming


@pytest.fixture
async def queue() -> AsyncIterator[tenure.Queue]:
    async with tenure.connect("memory:") as backend:
        yield backend.queue("orders")


async def handle(message: tenure.Message) -> None:
    """Do nothing."""


def test_the_options_that_may_be_passed_on_are_those_that_there_are() -> None:
    assert [one.name for one in dataclasses.fields(Consuming)] == list(ConsumeOptions.__annotations__)


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"retry": 3}, r"retry must be a RetryPolicy, not 3; try"),
        ({"on_error": 3}, "on_error must be a function that takes a message and an exception, not 3"),
        ({"grace": -1}, "grace must be at least 0, not -1"),
        ({"inbox": math.nan}, "inbox must be a finite number of seconds, not nan"),
        ({"concurrency": "ten"}, "concurrency must be a whole number of at least 1, not 'ten'"),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0, not -1"),
        ({"poll_every": "x"}, "poll_every must be a finite number of seconds, not 'x'"),
        ({"run_in": "fibre"}, "run_in must be 'auto', 'thread' or 'process', not 'fibre'"),
    ],
)
async def test_options_that_can_not_work(
    queue: tenure.Queue, sessions: bool, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(tenure.ConfigError, match=complaint):
        await queue.consume(handle, sessions=sessions, **options)


async def test_an_option_that_is_not_there(queue: tenure.Queue) -> None:
    misspelled: Any = {"concurency": 3}
    with pytest.raises(TypeError, match=r"^consume\(\) has no option 'concurency'; did you mean 'concurrency'\?$"):
        await queue.consume(handle, **misspelled)


async def test_sessions_are_settled_for_their_handler(queue: tenure.Queue) -> None:
    with pytest.raises(tenure.ConfigError, match="auto_complete=False is not for sessions=True"):
        queue.consumer(handle, sessions=True, auto_complete=False)

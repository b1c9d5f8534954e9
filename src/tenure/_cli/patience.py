"""Questions to a store that may be away, by commands that go on: they wait for its first answer and survive outages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from tenure._cli.group import duration
from tenure._cli.output import notice, warn
from tenure.errors import TenureError, Unavailable

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., object])
T = TypeVar("T")

PAUSE = 0.5
"""Seconds between two questions to a store that did not answer."""


def wait_option(function: AnyFunction) -> AnyFunction:
    """Add ``--wait S``."""
    return click.option(
        "--wait",
        type=duration,
        metavar="S",
        help="How long to wait for a store that does not answer at the start; 0: not at all. [default: for ever]",
    )(function)


class Patience:
    """Asks a store until it answers.

    Args:
        wait: Seconds until the first answer, after which ``Unavailable`` is raised; None: for ever; 0: at once.
        tell: Called with what is wrong when the store falls silent, and with nothing when it answers again.
    """

    def __init__(self, wait: float | None, tell: Callable[[str], None]) -> None:
        self._wait = math.inf if wait is None else wait
        self._tell = tell
        self._has_answered = False
        self._trouble = ""  # what was told; nothing while the store answers

    @property
    def has_answered(self) -> bool:
        """Whether the store has answered at all."""
        return self._has_answered

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to *question*, which is asked again until there is one.

        Raises:
            Unavailable: There was no first answer in time.
            ConfigError: The store can't be asked as it is, and never could.
        """
        loop = asyncio.get_running_loop()
        give_up_at = math.inf if self._has_answered else loop.time() + self._wait
        while True:
            try:
                answer = await self._try(question, give_up_at - loop.time())
            except TenureError as error:
                is_late = loop.time() >= give_up_at
                if not (self._has_answered or isinstance(error, Unavailable)) or (is_late and not self._wait):
                    raise
                if is_late:
                    raise Unavailable(f"{error}; given up after --wait {self._wait:g} s") from error
                self._note(str(error))
                await asyncio.sleep(max(0.0, min(PAUSE, give_up_at - loop.time())))
            else:
                self._has_answered = True
                self._note("")
                return answer

    async def _try(self, question: Callable[[], Awaitable[T]], left: float) -> T:
        if math.isinf(left) or left <= 0.0:  # a store that is not waited for has the time that its own client gives it
            return await question()
        try:
            async with asyncio.timeout(left):
                return await question()
        except TimeoutError as error:
            raise Unavailable(self._trouble or "the store did not answer") from error

    def _note(self, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            self._tell(trouble)
        self._trouble = trouble


def tell_silence(trouble: str) -> None:
    """Tell on stderr that the store has fallen silent, or that it answers again."""
    if trouble:
        warn(f"{trouble}; asking again until it answers")
    else:
        notice("the store answers now")

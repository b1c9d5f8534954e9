"""Requests of long-running commands: they wait for the store's first answer, and survive outages."""

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
"""Seconds between two requests to a store that did not answer."""


def wait_option(function: AnyFunction) -> AnyFunction:
    """Add ``--wait S``."""
    return click.option(
        "--wait",
        type=duration,
        metavar="S",
        help="Time to wait for a store that does not answer at the start; 0: don't wait. [default: for ever]",
    )(function)


class Retrying:
    """Repeats a request until the store answers.

    Args:
        wait: Seconds until the first answer, after which ``Unavailable`` is raised; None: for ever; 0: at once.
        report: Called with the error when the store stops answering, and with "" when it answers again.
    """

    def __init__(self, wait: float | None, report: Callable[[str], None]) -> None:
        self._wait = math.inf if wait is None else wait
        self._report = report
        self._has_answered = False
        self._trouble = ""  # as reported; empty while the store answers

    @property
    def has_answered(self) -> bool:
        """Whether the store has answered at all."""
        return self._has_answered

    async def ask(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to *request*, which is repeated until there is one.

        Raises:
            Unavailable: There was no first answer in time.
            ConfigError: The store can't be used as it is configured.
        """
        loop = asyncio.get_running_loop()
        give_up_at = math.inf if self._has_answered else loop.time() + self._wait
        while True:
            try:
                answer = await self._try(request, give_up_at - loop.time())
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

    async def _try(self, request: Callable[[], Awaitable[T]], left: float) -> T:
        if math.isinf(left) or left <= 0.0:  # without a limit of our own, the client's timeout counts
            return await request()
        try:
            async with asyncio.timeout(left):
                return await request()
        except TimeoutError as error:
            raise Unavailable(self._trouble or "the store did not answer") from error

    def _note(self, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            self._report(trouble)
        self._trouble = trouble


def report_outage(trouble: str) -> None:
    """Print on stderr that the store does not answer, or that it answers again."""
    if trouble:
        warn(f"{trouble}; trying again until it answers")
    else:
        notice("the store answers now")

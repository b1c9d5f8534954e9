"""Misbehaving objects, as users' code may have: errors that can't be printed, or whose attributes are wrong.

The conformance suites hand them to real consumers, the simulators to simulated ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import MappingProxyType

from tenure._queue.retry import Reject


class Unprintable(Exception):
    """Can't be printed."""

    def __str__(self) -> str:
        raise LookupError("no text")

    def __repr__(self) -> str:
        raise LookupError("no text")

    def __bool__(self) -> bool:
        raise LookupError("neither true nor false")


class ExitsWhenPrinted(Exception):
    """Ends the program when it is printed."""

    def __str__(self) -> str:
        raise SystemExit("printed")


class RejectWithoutReason(Reject):
    """Has lost its reason and its description."""

    def __init__(self) -> None:
        self.reason = None  # type: ignore[assignment]
        self.description = ""


ODD_ERRORS: MappingProxyType[str, Callable[[], BaseException]] = MappingProxyType(
    {
        "unprintable": Unprintable,
        "exits when printed": ExitsWhenPrinted,
        "reject without reason": RejectWithoutReason,
        "stop iteration": StopIteration,
        "stop async iteration": StopAsyncIteration,
        "cancelled": asyncio.CancelledError,
        "generator exit": GeneratorExit,
        "system exit": lambda: SystemExit(3),
        "base": lambda: BaseException("neither Exception nor exit"),
    }
)
"""Errors by name. A handler, a hook or work that raises one ends only itself. Each call makes a new error."""


def odd_error(rng: random.Random) -> BaseException:
    """Draw one of them."""
    return ODD_ERRORS[rng.choice(tuple(ODD_ERRORS))]()

"""Jitter: durations made a little longer or shorter at random, so that equal instances do not act in step."""

from __future__ import annotations

from typing import Protocol


class Rng(Protocol):
    """A source of uniform numbers in [0, 1): ``random.Random`` is one; a simulation has its own."""

    def random(self) -> float: ...


def sooner(duration: float, rng: Rng, share: float = 0.1) -> float:
    """Return *duration* shortened by a random part of *share*, for renewals: they may be early, never late."""
    return duration * (1.0 - share * rng.random())


def later(duration: float, rng: Rng, share: float = 0.2) -> float:
    """Return *duration* lengthened by a random part of *share*, so that equal candidates don't ask in step."""
    return duration * (1.0 + share * rng.random())

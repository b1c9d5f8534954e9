"""A decoder of what others may have written, and one round of its fuzz."""

from __future__ import annotations

import signal
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.fuzz.hostile import mutated

SECONDS_MAX = 1.0
"""Seconds of the process's own time that a round may take, whatever was written: a longer one would hang a consumer."""

MEASURED = 100
"""Rounds of each decoder of which the memory is measured."""


@dataclass(frozen=True)
class Decoder:
    """A decoder, and what is done with its results."""

    name: str
    samples: Sequence[Any]
    """What tenure writes there."""
    read: Callable[[Any], object]
    """Reads one, and uses the result as the library does: shown, copied, written again."""
    errors: tuple[type[Exception], ...] = ()
    """Those that are documented."""
    share: float = 1.0
    """How many rounds it gets of those that others get: fewer where one takes long."""


class TooSlow(BaseException):
    """A round took too long. No decoder catches it."""


def round_of(decoder: Decoder, seed: int, seconds: float = SECONDS_MAX) -> str:
    """Let *decoder* read what this *seed* gives; return what is wrong, or nothing."""
    given = given_by(decoder, seed)
    try:
        with limited(seconds):
            decoder.read(given)
    except decoder.errors:
        return ""
    except TooSlow:
        why = f"it took more than {seconds:g} s\n{traceback.format_exc(limit=-8)}"
    except Exception as error:
        why = f"{type(error).__name__}: {error!s:.300}\n{traceback.format_exc(limit=-8)}"
    else:
        return ""
    return f"{decoder.name}, seed {seed}: {why}given: {given!a:.2000}\nreplay: {replay_of(decoder.name, seed)}"


def given_by(decoder: Decoder, seed: int) -> Any:
    """Return what a round reads."""
    rng = Random(f"{decoder.name}:{seed}")
    return mutated(rng, rng.choice(decoder.samples))


def seeds_of(decoder: Decoder, rounds: int) -> range:
    """Return the seeds that *decoder* gets of so many *rounds*."""
    return range(max(1, int(rounds * decoder.share)))


def replay_of(name: str, seed: int) -> str:
    return f"python -m tests.fuzz {name} --seed {seed}"


def memory_of(decoder: Decoder) -> int:
    """Return how many bytes *decoder* takes at once for one of the values that its first seeds give.

    All are read, as it may be a short one that claims a size.
    """
    most = 0
    for seed in seeds_of(decoder, MEASURED):
        given = given_by(decoder, seed)
        tracemalloc.start()
        try:
            with suppress(*decoder.errors):
                decoder.read(given)
            most = max(most, tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return most


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow if the block takes too much of the process's own time, also while it runs.

    A machine that is busy with other processes makes none too slow.
    """

    def alarm(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    began = time.process_time()
    try:
        yield
        if time.process_time() - began > seconds:
            raise TooSlow
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

"""The name of the boot from which the clock counts: two readings can be compared only within one boot."""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress

from tenure._runtime.clock import SystemClock

_GUESSED = "booted:"
_KERNEL = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SAME_WITHIN = 60.0  # seconds by which two guesses at one boot may differ, as wall clocks are set


def this_boot() -> str:
    """Return the name of the present boot.

    Linux has an id for each boot. Containers of one machine share it, and the clock too, unless they are in another
    time namespace, so that is part of the name. Elsewhere the name is a guess: the wall-clock time at which the clock
    began.
    """
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/time")
        return f"{boot} {namespace}".strip()
    return f"{_GUESSED}{time.time() - SystemClock().now():.0f}"


def common_name(mine: str, others: list[str]) -> str:
    """Return the name among *others* that means the same boot as *mine*, or *mine* if none does."""
    if mine.startswith(_GUESSED):
        for other in others:
            if other.startswith(_GUESSED) and abs(_seconds(other) - _seconds(mine)) <= _SAME_WITHIN:
                return other
    return mine


def is_earlier_boot(other: str, mine: str) -> bool:
    """Whether *other* is an earlier boot of this machine; never for a guess or another namespace of this boot."""
    kernels = [boot.partition(" ")[0] for boot in (other, mine)]
    return all(_KERNEL.fullmatch(kernel) for kernel in kernels) and kernels[0] != kernels[1]


def _seconds(guess: str) -> float:
    try:
        return float(guess.removeprefix(_GUESSED))
    except ValueError:  # another program's
        return math.nan

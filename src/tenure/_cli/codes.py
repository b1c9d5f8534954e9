"""Exit codes of commands: whether a message is completed, retried or rejected."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection

import click

from tenure._cli.exits import Exit

REJECT = 65
"""The exit code for a message that can never be handled: EX_DATAERR of sysexits."""

LEAST, MOST = 1, 255


def exit_codes(text: str) -> frozenset[int]:
    """Read exit codes and ranges of them, as in ``2,64-70``; to be used as the type of an option."""
    codes: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part, re.ASCII)
        if not found:
            raise click.BadParameter(f"{part!r} is neither an exit code nor a range; write for example 2,64-70")
        first = int(found[1])
        last = int(found[2] or first)
        if last < first:
            raise click.BadParameter(f"the range {part.strip()} ends before it begins; write {last}-{first}")
        if first == 0:
            raise click.BadParameter("0 completes the message; give codes from 1 to 255")
        if last > MOST:
            raise click.BadParameter(f"{last} is not an exit code; they are from {LEAST} to {MOST}")
        codes.update(range(first, last + 1))
    return frozenset(codes)


def rejecting(reject_on: Collection[int] | None, retry_on: Collection[int] | None) -> frozenset[int]:
    """Return the codes on which a message is rejected: 65 and *reject_on*; or, with *retry_on* alone, all others.

    Raises:
        UsageError: One code stands in both.
    """
    if both := sorted({*(reject_on or ())}.intersection(retry_on or ())):
        raise click.UsageError(f"--reject-on and --retry-on both contain {both[0]}; put it into one of them")
    if retry_on is not None and reject_on is None:
        return frozenset(range(LEAST, MOST + 1)).difference(retry_on)
    return frozenset({REJECT, *(reject_on or ())}.difference(retry_on or ()))


def describe(code: int) -> str:
    """Return an exit code as text; above 128, with the name of the signal that it may mean."""
    if code > Exit.SIGNAL:
        try:
            return f"{code} ({signal.Signals(code - Exit.SIGNAL).name})"
        except ValueError:
            pass
    return str(code)

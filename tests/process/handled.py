"""What consumers have noted of their messages, and what is wrong with it: by this the tests of kills judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

DOUBT = 1.0
"""Seconds around the kill of a server in which it may take back a verdict that it has answered."""


class Noted(NamedTuple):
    """A line of a consumer."""

    at: float
    """When, by the clock of all processes."""
    what: str
    """``got``, ``completing`` (before the verdict), ``completed`` (once it was answered), or ``failed``."""
    message: str
    consumer: str


class Outage(NamedTuple):
    """When the kill of a server began, and when the server was dead."""

    begun: float
    done: float

    def is_near(self, at: float) -> bool:
        """Return whether what was answered then may have been lost with the server."""
        return self.begun - DOUBT <= at <= self.done + DOUBT


class Notes:
    """The file of a consumer, read as it grows."""

    def __init__(self, file: Path) -> None:
        self.consumer = file.stem
        self._file = file
        self._at = 0
        self._lines: list[Noted] = []
        self._in_hand: set[str] = set()
        self._handled: set[str] = set()

    def lines(self) -> list[Noted]:
        """Return what it has noted so far."""
        with open(self._file) as file:
            file.seek(self._at)
            text = file.read()
        self._at += len(text)
        for line in text.splitlines():
            at, what, message = line.split()
            self._lines.append(Noted(float(at), what, message, self.consumer))
            if what == "completing":
                self._handled.add(message)
            (self._in_hand.discard if what in ("completed", "failed") else self._in_hand.add)(message)
        return self._lines

    def in_hand(self) -> set[str]:
        """Return the messages that it handles, or did when it was killed."""
        self.lines()
        return self._in_hand

    def handled(self) -> set[str]:
        """Return the messages whose work it has done, whatever was answered to their completion."""
        self.lines()
        return self._handled


@dataclass
class Judgement:
    """What is wrong with what was noted, and how often there was what is allowed. Messages by their ids."""

    lost: list[str] = field(default_factory=list)
    """Never handed out; or nobody who could have completed it has."""
    again: list[str] = field(default_factory=list)
    """Handed out although ``complete()`` had been answered, and not near an outage."""
    twice: list[str] = field(default_factory=list)
    """Completed although ``complete()`` had been answered, and not near an outage."""
    undone: int = 0
    """How many were handed out, or completed, after an answer near an outage."""
    redelivered: int = 0
    """How many were handed out more than once, for any reason."""


def judge(sent: Set[str], notes: Iterable[Noted], killed: Set[str], outages: Iterable[Outage]) -> Judgement:
    """Judge what was noted of messages of which the store has none any more.

    Args:
        sent: The messages whose sends were acknowledged, each sent once.
        notes: In the order of their moments.
        killed: The consumers that were killed before they could note every answer.
        outages: The kills of the server.
    """
    outages = list(outages)

    def is_near_an_outage(at: float) -> bool:
        return any(outage.is_near(at) for outage in outages)

    def may_have_completed(one: Noted) -> bool:
        is_unanswered = one.what == "completing" and (one.consumer in killed or is_near_an_outage(one.at))
        return one.what == "completed" or is_unanswered

    by_message: defaultdict[str, list[Noted]] = defaultdict(list, {one: [] for one in sent})
    for one in notes:
        by_message[one.message].append(one)
    found = Judgement()
    for message, lines in by_message.items():
        found.redelivered += sum(one.what == "got" for one in lines) > 1
        if not any(map(may_have_completed, lines)):
            found.lost.append(message)
        after: set[str] = set()  # what followed an answer that no outage can have undone
        after_undone: set[str] = set()
        for place, one in enumerate(lines):
            if one.what == "completed":
                later = {each.what for each in lines[place + 1 :]} & {"got", "completed"}
                if is_near_an_outage(one.at):
                    after_undone |= later
                else:
                    after |= later
        if "got" in after:
            found.again.append(message)
        if "completed" in after:
            found.twice.append(message)
        found.undone += bool(after_undone)
    return found

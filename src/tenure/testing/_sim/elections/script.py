"""Scenarios of one candidate as text that a human can read: events, line by line, and the machine's effects.

::

    # The answer to the first question is lost.             a comment; it stays as it is
    timing ttl=15 retry_every=2                             optional: settings that differ from the usual ones
    hints                                                   optional: the store hints at vacancies
    queued                                                  optional: candidates stand in a queue in the store

    at 0 tick                                               what happens, and when
      -> acquire 1 as n#1                                   what the machine does (written by `play`)
      = campaigning, wakes at 2                             where it stands then (written by `play`)
    at 2 tick
      ...

What may happen::

    tick · hint · hints absent · together · resign · stop
    work ended 7 [for good]
    answer 1 granted 7 [and asked to resign]     answer 1 held by m#1 under 6 [for 3.5 s]     answer 1 lost 7
    answer 1 granted 7 [2.5 s old]               answer 1 no answer [why]                     answer 1 withheld [why]
    answer 1 released 7                          answer 1 withdrawn                       answer 1 vacant

The candidate is called ``n``, its clock starts at the first line, and its random numbers are 0: there is no jitter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from tenure._election.effects import (
    Acquire,
    Answer,
    Answered,
    CancelWork,
    Effect,
    Emit,
    Hint,
    HintsAbsent,
    Input,
    Inspect,
    Release,
    Renew,
    RenewalWithheld,
    RenewTogether,
    Resign,
    StartWork,
    Stop,
    Tick,
    Trust,
    Withdraw,
    Withdrawn,
    WorkEnded,
    WorkOverran,
)
from tenure._election.machine import Machine
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._timing import Timing
from tenure.errors import ConfigError
from tenure.events import (
    CampaignFailed,
    Overrun,
    ReleasedUnused,
    ReleaseMissed,
    RenewalMissed,
    TermBegan,
    TermEnded,
    TermEnding,
)

NAME = "election"
SIMPLE: dict[str, Input] = {
    "tick": Tick(),
    "hint": Hint(),
    "hints absent": HintsAbsent(),
    "together": RenewTogether(),
    "resign": Resign(),
    "stop": Stop(),
}


class Zeros:
    """Random numbers that are always 0."""

    def random(self) -> float:
        """Return 0."""
        return 0.0


def play(text: str, *, machine: Callable[..., Machine] = Machine) -> str:
    """Return the scenario *text* with what the machine does now, in place of what stood there.

    A test compares the two; where they differ on purpose, the new text is the new scenario.

    Raises:
        ConfigError: A line can't be understood; it is shown.
    """
    player = _Player(machine)
    lines: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith(("->", "= ", "(")):
            continue
        lines.append(line)
        if line.strip() and not line.startswith("#"):
            lines += player.take(line)
    return "\n".join(lines) + "\n"


class _Player:
    def __init__(self, machine: Callable[..., Machine]) -> None:
        self._make = machine
        self._timing = Timing()
        self._hints = False
        self._queued = False
        self._machine: Machine | None = None
        self._asked: dict[int, Acquire | Inspect | Renew | Release | Withdraw] = {}

    def take(self, line: str) -> list[str]:
        match line.split(maxsplit=1):
            case ["timing", settings]:
                pairs = (pair.split("=") for pair in settings.split())
                self._timing = Timing(**{name: float(value) for name, value in pairs})
                return []
            case ["hints"]:
                self._hints = True
                return []
            case ["queued"]:
                self._queued = True
                return []
            case ["at", what]:
                moment, _, happens = what.partition(" ")
                return self._step(float(moment), self._input(happens, line))
        raise ConfigError(
            f"a scenario can't be read at {line!r}; it knows 'timing', 'hints', 'queued', 'at TIME WHAT' and '#'"
        )

    def _step(self, now: float, event: Input) -> list[str]:
        if self._machine is None:
            options = {"hints": self._hints, "queued": self._queued}
            self._machine = self._make(NAME, "n", self._timing, Zeros(), now=now, **options)
        due = self._machine.wake_at
        shown = [f"  (slept through its moment to wake, {due:g})"] if due < now else []
        for effect in self._machine.handle(event, now):
            if isinstance(effect, (Acquire, Inspect, Renew, Release, Withdraw)):
                self._asked[effect.request_id] = effect
            shown += [f"  -> {text}" for text in _describe(effect)]
        return [*shown, f"  = {_standing(self._machine)}"]

    def _input(self, happens: str, line: str) -> Input:
        if happens in SIMPLE:
            return SIMPLE[happens]
        if found := re.fullmatch(r"work ended (\d+)( for good)?", happens):
            return WorkEnded(int(found[1]), again=not found[2])
        if found := re.fullmatch(r"answer (\d+) (.+)", happens):
            return Answered(int(found[1]), self._answer(int(found[1]), found[2], line))
        raise ConfigError(f"a scenario can't be read at {line!r}: nothing like {happens!r} can happen")

    def _answer(self, ask: int, says: str, line: str) -> Answer:
        question = self._asked.get(ask)
        if question is None:
            raise ConfigError(f"a scenario can't be read at {line!r}: nothing was asked under number {ask}")
        holder = _holder_of(question)
        if found := re.fullmatch(r"granted (\d+)(?: ([\d.]+) s old)?( and asked to resign)?", says):
            return Granted(Grant(NAME, holder, int(found[1])), resign_asked=bool(found[3]), age=float(found[2] or 0))
        if found := re.fullmatch(r"held by (\S+) under (\d+)(?: for ([\d.]+) s)?", says):
            return HeldBy(NAME, found[1], int(found[2]), float(found[3]) if found[3] else None)
        if says == "vacant":
            return Vacant(NAME)
        if found := re.fullmatch(r"lost (\d+)", says):
            return Lost(Grant(NAME, holder, int(found[1])))
        if found := re.fullmatch(r"released (\d+)", says):
            return Released(Grant(NAME, holder, int(found[1])))
        if says == "withdrawn":
            return Withdrawn()
        if found := re.fullmatch(r"no answer ?(.*)", says):
            return NoAnswer(found[1])
        if found := re.fullmatch(r"withheld ?(.*)", says):
            return RenewalWithheld(found[1])
        raise ConfigError(f"a scenario can't be read at {line!r}: no store answers {says!r}")


def _holder_of(question: Acquire | Inspect | Renew | Release | Withdraw) -> str:
    match question:
        case Acquire(_, holder) | Withdraw(_, holder):
            return holder
        case Renew(_, grant) | Release(_, grant):
            return grant.holder
        case Inspect():
            return ""


def _describe(effect: Effect) -> list[str]:
    match effect:
        case Acquire(ask, holder):
            return [f"acquire {ask} as {holder}"]
        case Inspect(ask):
            return [f"inspect {ask}"]
        case Renew(ask, grant):
            return [f"renew {ask} for {grant.token}"]
        case Release(ask, grant):
            return [f"release {ask} of {grant.token}"]
        case Withdraw(ask, holder):
            return [f"withdraw {ask} as {holder}"]
        case StartWork(grant, until):
            return [f"start work {grant.token}, trusted until {_seconds(until)}"]
        case Trust(token, until):
            return [f"trust {token} until {_seconds(until)}" if until > -math.inf else f"trust {token} no more"]
        case CancelWork(token, reason):
            return [f"tell work {token} to stop: {reason}"]
        case WorkOverran(token):
            return [f"work {token} overran"]
        case Emit(event):
            return _describe_event(event)


def _describe_event(event: object) -> list[str]:
    """Describe an event, unless the effect beside it says the same."""
    match event:
        case CampaignFailed(why=why):
            return [f"say: campaign failed, {why}"]
        case RenewalMissed(why=why, time_left=left):
            return [f"say: renewal missed, {why}; {_seconds(left)} s left"]
        case TermEnding(reason=reason, deadline=deadline):
            return [f"say: term ending, {reason}; work has until {_seconds(deadline)}"]
        case TermEnded(reason=reason, released=released):
            return [f"say: term ended, {reason}; {'' if released else 'not '}released"]
        case ReleaseMissed(why=why, time_left=left):
            return [f"say: not released, {why}; {_seconds(left)} s left"]
        case ReleasedUnused(token=token):
            return [f"say: {token} released unused"]
        case TermBegan() | Overrun():
            return []
    return []


def _standing(machine: Machine) -> str:
    parts = [machine.state.value]
    if machine.grant is not None:
        trusted = machine.trusted_until
        parts.append(f"trusted until {_seconds(trusted)}" if trusted > -math.inf else "not trusted")
    if machine.wake_at < math.inf:
        parts.append(f"wakes at {_seconds(machine.wake_at)}")
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{round(value, 6):g}"

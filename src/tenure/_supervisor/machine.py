"""The supervisor as a pure state machine: inputs and the time in, effects out.

Rules:

- A process that is told to *retire* takes no more messages, and ends when its last handler has: without a limit, as
  scaling in must not interrupt work. Once its handlers have ended, it gets the grace for the rest. One that is told to
  *drain* has the grace for all, and a little more.
- The time is that for which the supervisor itself runs: see :mod:`tenure._supervisor.awake`.
- Each process gives a sign of life every second. One that gives none for a while hangs: that is said, and it is asked
  where it is; if it goes on like that, it is killed, and replaced as one that has crashed. The others go on.
- A process is replaced (its age, its memory, a reload) one at a time, and only once the new one has begun.
- A process that says that its work is done, and ends with 0, is not started again. One that ends otherwise without
  being told has crashed: the next is started after a pause that doubles with each crash, until one has run well for a
  while.
- Processes that can't begin at all end the supervisor: after so many in a row, or at once if their code says that a
  retry can't succeed; but only if no other process works.
- Once a process has finished, the number of processes is not changed any more, and none is replaced.
- Nothing here depends on the store: if it is away, the number of processes stays.

::

    STARTING ──begun──▶ RUNNING ──retire──▶ RETIRING ──┐
        │                  │                    │      ├──▶ ended
        └─────drain────────┴───────drain──▶ DRAINING ──┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tenure._jitter import Rng
from tenure._supervisor.scaling import Backlog, Scaling
from tenure.errors import ConfigError

NEVER = math.inf

PAUSE_MIN, PAUSE_MAX = 1.0, 60.0
"""Seconds until the next process after one crash, and after many."""

PAUSE_JITTER = 0.2

HEALTHY_AFTER = 60.0
"""Seconds for which a process must run until earlier crashes are forgotten."""

FAILED_MAX = 5
"""That many processes in a row that end before they have begun end the supervisor."""

YOUNG = 10.0
"""Seconds for which a process is not replaced because of its memory: it would be again and again."""

KILL_AFTER = 5.0
"""Seconds from the end of the grace to KILL."""

HURRY = 5.0
"""Seconds from a second request to stop to KILL."""

AGE_JITTER = 0.1

HUNG_MAX_MIN = 10.0
"""The least ``hung_max`` in seconds: on a busy machine, signs of life come some seconds late."""


class State(Enum):
    """The state of a process."""

    STARTING = "starting"
    RUNNING = "running"
    RETIRING = "retiring"
    """It ends when its last handler has."""
    DRAINING = "draining"
    """It ends within the grace of its handlers."""


# --- settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a supervisor.

    Args:
        least, most: Bounds of the number of processes.
        grace: Seconds that a process gets to end when all do.
        begin_within: Seconds within which a process must have begun, or it is killed.
        hung_after: Seconds without a sign of life after which a process is said to hang.
        hung_max: Seconds without a sign of life after which it is killed; at least 10.
        look_every: Seconds between looks at the backlog; only if *most* is more than *least*.
        calm: For how many seconds fewer processes must be enough, before one is retired.
        age_max: Seconds after which a process is replaced.
        memory_max: Bytes of resident memory with which a process is replaced.
        hopeless: The exit codes after which a retry can't succeed.

    Raises:
        ConfigError: They can't work.
    """

    least: int = 1
    most: int = 1
    grace: float = 30.0
    begin_within: float = 60.0
    hung_after: float = 30.0
    hung_max: float = 300.0
    look_every: float = 5.0
    calm: float = 60.0
    age_max: float = NEVER
    memory_max: float = NEVER
    hopeless: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ConfigError(f"at least one process must run, not {self.least}; try 1..{max(self.most, 1)}")
        if self.most < self.least:
            raise ConfigError(
                f"the most processes ({self.most}) must not be fewer than the least ({self.least}); "
                f"try {self.most}..{self.least}"
            )
        for name, least in (
            ("grace", 0.0),
            ("calm", 0.0),
            ("begin_within", 0.1),
            ("hung_max", max(self.hung_after, HUNG_MAX_MIN)),
            ("hung_after", 0.1),
            ("look_every", 0.1),
            ("age_max", 1.0),
        ):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least:g} s, not {getattr(self, name):g}")


# --- inputs ------------------------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """Time has passed."""


class Reported(NamedTuple):
    """A process says how it is, every second: a sign of life. Its first report says that it has begun."""

    number: int
    running: int
    """Handlers that run there."""
    leads: bool
    memory: float


class Ended(NamedTuple):
    """A process has ended, with this exit code; negative: by a signal."""

    number: int
    code: int
    has_finished: bool
    """Whether it said before that its work is done."""


class Leaving(NamedTuple):
    """A process ends by itself, as it was stopped by somebody else; or its handlers have ended, or its work is done."""

    number: int


class Looked(NamedTuple):
    """The backlogs of the queues; None if the store did not answer."""

    backlogs: Sequence[Backlog] | None


class Stop(NamedTuple):
    """End all processes; a second one lets them hurry, a third one kills them."""


class Reload(NamedTuple):
    """Replace all processes, one by one."""


class Move(NamedTuple):
    """Run so many more processes, or fewer."""

    by: int


Input = Tick | Reported | Leaving | Ended | Looked | Stop | Reload | Move


# --- effects -----------------------------------------------------------------------------------------------------


class Spawn(NamedTuple):
    """Start a process with this number."""

    number: int


class Retire(NamedTuple):
    """Tell a process to take no more messages, and to end when its last handler has."""

    number: int


class Drain(NamedTuple):
    """Tell a process to end within the grace of its handlers."""

    number: int


class Hurry(NamedTuple):
    """Tell a process to cancel its handlers, and to end."""

    number: int


class Examine(NamedTuple):
    """Let a process that hangs show where it is."""

    number: int


class Kill(NamedTuple):
    """Kill a process."""

    number: int


class Look(NamedTuple):
    """Ask this process for the backlogs of the queues."""

    number: int


class Say(NamedTuple):
    """Report an event: its name, the process, and what else is known of it."""

    event: str
    number: int | None
    text: str


class Exit(NamedTuple):
    """All have ended: end with this code."""

    code: int


Effect = Spawn | Retire | Drain | Hurry | Examine | Kill | Look | Say | Exit


# --- the machine -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Process:
    """One process, as the supervisor knows it."""

    number: int
    began_at: float
    kill_at: float
    replace_at: float
    state: State = State.STARTING
    heard_at: float = -NEVER
    """When it gave its last sign of life; minus infinity before the first."""
    hangs: bool = False
    is_killed: bool = False
    running: int = 0
    leads: bool = False
    must_go: str = ""
    """Why it is to be replaced."""

    @property
    def is_kept(self) -> bool:
        """Whether it was not told to end."""
        return self.state in (State.STARTING, State.RUNNING)

    @property
    def works(self) -> bool:
        """Whether it handles messages, or may."""
        return self.state in (State.RUNNING, State.RETIRING)

    @property
    def is_watched(self) -> bool:
        """Whether it is to give signs of life: it has begun, and nothing else limits its time."""
        return self.heard_at > -NEVER and self.kill_at == NEVER and not self.is_killed

    def end_by(self, at: float) -> None:
        """Have it killed at *at* if it has not ended by then; an earlier limit stays."""
        if not self.is_killed:
            self.kill_at = min(self.kill_at, at)

    def kill(self, text: str) -> list[Effect]:
        """Note that it is killed now, for the reason in *text*; return the effects. It ends at some time, or never."""
        self.kill_at, self.is_killed = NEVER, True
        return [Say("killed", self.number, text), Kill(self.number)]


class Supervisor:
    """Decides how many processes run, and when each begins and ends."""

    def __init__(self, settings: Settings, rng: Rng, *, now: float) -> None:
        self.settings = settings
        self.processes: dict[int, Process] = {}
        self._rng = rng
        self._scaling = Scaling(settings.least, settings.most, settings.calm)
        self._made = 0
        self._spawn_at = now
        self._look_at = now + settings.look_every if settings.most > settings.least else NEVER
        self._crashes = 0  # in a row
        self._crashed_at = -NEVER
        self._last_crash = ""  # which process, and how it ended
        self._failed = 0  # processes in a row that have ended before they had begun
        self._asked = 0  # the process that was asked for the backlog last
        self._finished = 0  # processes that have ended by themselves, as their work had
        self._stops = 0  # requests to stop
        self._replacing: int | None = None  # the process whose replacement is on its way
        self._code: int | None = None  # once the supervisor ends
        self.has_ended = False

    # --- for the driver ---

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        times = [min(process.kill_at, self._silent_until(process)) for process in self.processes.values()]
        if self._code is None:
            times += [one.replace_at for one in self._kept() if not one.must_go and not self._finished]
            if self._is_short():
                times.append(self._spawn_at)
            if not self._finished and self._next_asked() is not None:
                times.append(self._look_at)
        return min(times, default=NEVER)

    @property
    def wanted(self) -> int:
        """How many processes are wanted now."""
        return self._scaling.wanted

    def crash_loop(self, now: float) -> str:
        """Say that processes crash one after the other, and when the next one begins; empty if they don't."""
        is_tried = any(one.began_at > self._crashed_at for one in self._kept())
        if self._crashes < 2 or not (is_tried or self._is_short()):  # the latter: no more are wanted, so none crashes
            return ""
        waits = self._code is None and self._is_short() and now < self._spawn_at
        following = f"; the next one begins in {self._spawn_at - now:.0f} s" if waits else ""
        return f"{self._crashes} crashes in a row, last {self._last_crash}{following}"

    def silence(self, number: int, now: float) -> float | None:
        """Return for how many seconds a process that hangs has given no sign of life; None if it doesn't hang.

        One that was killed hangs until it has ended; one with another limit is only slow to end.
        """
        process = self.processes.get(number)
        if process is None or not process.hangs or not (process.is_watched or process.is_killed):
            return None
        return now - process.heard_at

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take note of what has happened, and return what is to be done."""
        effects: list[Effect] = []
        if self.has_ended:
            return effects
        match event:
            case Reported():
                self._reported(event, now, effects)
            case Leaving(number):
                self._leaving(number, now)
            case Ended():
                self._ended(event, now, effects)
            case Looked(backlogs) if self._code is None and not self._finished:
                self._looked(backlogs, now, effects)
            case Stop():
                self._stop(now, effects)
            case Reload() if self._code is None and not self._finished:
                effects.append(Say("reload", None, "all processes are replaced, one by one"))
                self._mark(self._kept(), "reload")
            case Move(by) if self._code is None and not self._finished:
                effects.append(Say("scale", None, f"{self._scaling.move(by)} processes wanted, by hand"))
        if isinstance(event, (Tick, Stop)):  # not with a report: that of another process may be about to be read
            self._kill_late(now, effects)
            self._look_for_hung(now, effects)
        if self._code is None:
            if not self._finished:
                self._mark((one for one in self._kept() if now >= one.replace_at), "age")
                self._replace(now, effects)
            self._reconcile(now, effects)
            self._ask_for_backlog(now, effects)
            if self._finished and not self._kept() and not self._is_short():  # those that retire may finish
                self._code = 0
        if self._code is not None and not self.processes:
            self.has_ended = True
            effects.append(Exit(self._code))
        return effects

    # --- inputs ---

    def _reported(self, report: Reported, now: float, effects: list[Effect]) -> None:
        process = self.processes.get(report.number)
        if process is None or process.is_killed:  # it may have been written before
            return
        process.running, process.leads = report.running, report.leads
        if process.hangs:
            silence = now - process.heard_at
            effects.append(Say("recovered", process.number, f"it gives signs of life again, after {silence:.0f} s"))
        process.heard_at, process.hangs = now, False
        if process.state is State.STARTING:
            process.state = State.RUNNING
            process.kill_at = NEVER
            self._failed = 0
            effects.append(Say("begun", process.number, ""))
        if process.state is State.RUNNING:
            if now - process.began_at >= HEALTHY_AFTER and process.began_at > self._crashed_at:
                self._crashes = 0
            if report.memory > self.settings.memory_max and now - process.began_at >= YOUNG:
                self._mark([process], "memory")

    def _leaving(self, number: int, now: float) -> None:
        """Give a process that ends, or has nothing left to do but to end, the grace."""
        if (process := self.processes.get(number)) is not None:
            process.end_by(now + self.settings.grace + KILL_AFTER)

    def _ended(self, event: Ended, now: float, effects: list[Effect]) -> None:
        process = self.processes.pop(event.number, None)
        if process is None:
            return
        if self._replacing == event.number:
            self._replacing = None
        if not process.is_kept:
            effects.append(Say("ended", event.number, "" if event.code == 0 else _how(event.code)))
        elif event.has_finished and event.code == 0:
            self._finished += 1
            self._replacing = None
            effects.append(Say("ended", event.number, "its work is done"))
        else:
            self._crashed(process, event.code, now, effects)

    def _crashed(self, process: Process, code: int, now: float, effects: list[Effect]) -> None:
        why = ""
        never_began = process.state is State.STARTING
        if process.began_at > self._crashed_at:  # those that were started together count once
            self._crashes += 1
            self._failed += never_began
        if never_began and not any(one.works for one in self.processes.values()):
            if code in self.settings.hopeless:
                why = "a retry can't succeed"
            elif self._failed >= FAILED_MAX:
                why = f"{FAILED_MAX} processes in a row have ended before they had begun"
        self._crashed_at = now
        self._last_crash = f"process {process.number}: {_how(code)}"
        if why:
            effects.append(Say("crashed", process.number, f"{_how(code)}; {why}"))
            self._end_with(code if code > 0 else 128 - code, now, effects)
            return
        pause = min(PAUSE_MAX, PAUSE_MIN * 2.0 ** min(self._crashes - 1, 10))
        pause *= 1.0 + PAUSE_JITTER * (2.0 * self._rng.random() - 1.0)
        self._spawn_at = max(self._spawn_at, now + pause)
        effects.append(Say("crashed", process.number, f"{_how(code)}; the next one begins in {pause:.1f} s"))

    def _looked(self, backlogs: Sequence[Backlog] | None, now: float, effects: list[Effect]) -> None:
        before = self._scaling.wanted
        wanted = self._scaling.look(backlogs, now)
        if wanted != before and backlogs is not None:
            messages = sum(one.messages for one in backlogs)
            effects.append(Say("scale", None, f"{wanted} processes wanted, {before} before; backlog {messages}"))

    def _stop(self, now: float, effects: list[Effect]) -> None:
        self._stops += 1
        if self._stops == 1:
            effects.append(Say("stopping", None, f"{len(self.processes)} processes finish their work"))
            self._end_with(0, now, effects)
            return
        for process in self.processes.values():
            if self._stops == 2:
                process.end_by(now + HURRY)
                effects.append(Hurry(process.number))
            else:
                process.end_by(now)

    def _end_with(self, code: int, now: float, effects: list[Effect]) -> None:
        """End all processes, and then with *code*; an earlier code stays."""
        self._code = code if self._code is None else self._code
        self._replacing = None
        for process in self.processes.values():
            if process.state is not State.DRAINING:
                process.state = State.DRAINING
                if not process.is_killed:
                    process.kill_at = now + self.settings.grace + KILL_AFTER
                effects.append(Drain(process.number))

    # --- decisions ---

    def _kept(self) -> list[Process]:
        return [process for process in self.processes.values() if process.is_kept]

    def _base(self) -> int:
        """Return how many processes are to run: fewer than are wanted, if some have finished."""
        return max(self._scaling.wanted - self._finished, 0)

    def _target(self) -> int:
        """Return how many processes are to be kept: one more while one is replaced."""
        return self._base() + (self._replacing is not None)

    def _is_short(self) -> bool:
        return len(self._kept()) < self._target()

    def _mark(self, processes: Iterable[Process], why: str) -> None:
        for process in processes:
            process.must_go = process.must_go or why

    def _kill_late(self, now: float, effects: list[Effect]) -> None:
        for process in self.processes.values():
            if now >= process.kill_at:
                if process.state is State.STARTING:
                    text = f"it has not begun within {self.settings.begin_within:g} s"
                else:
                    text = "it has not ended in time"
                effects += process.kill(text)

    def _silent_until(self, process: Process) -> float:
        """Return when a silence of *process* is too long."""
        if not process.is_watched:
            return NEVER
        return process.heard_at + (self.settings.hung_max if process.hangs else self.settings.hung_after)

    def _look_for_hung(self, now: float, effects: list[Effect]) -> None:
        for process in self.processes.values():
            if now < self._silent_until(process):
                continue
            silence = now - process.heard_at
            if process.hangs:
                effects += process.kill(f"it has given no sign of life for {silence:.0f} s")
            else:
                process.hangs = True
                left = max(0.0, self.settings.hung_max - silence)
                text = (
                    f"no sign of life for {silence:.0f} s, with {process.running} handlers running before; something "
                    "blocks its event loop or the thread that renews locks, or it was stopped; it writes its stacks "
                    f"to stderr if it can, and is killed in {left:.0f} s"
                )
                effects += [Say("hung", process.number, text), Examine(process.number)]

    def _replace(self, now: float, effects: list[Effect]) -> None:
        """Retire the process that is to go once one more runs than is wanted; then begin with the next."""
        old = self.processes.get(self._replacing) if self._replacing is not None else None
        if old is not None and old.is_kept:
            if sum(one.state is State.RUNNING for one in self._kept()) <= self._base():
                return
            self._retire(old, old.must_go, now, effects)
        self._replacing = next((one.number for one in self._kept() if one.must_go), None)

    def _reconcile(self, now: float, effects: list[Effect]) -> None:
        """Start processes that are missing, or retire one that is too many."""
        while self._is_short() and now >= self._spawn_at:
            self._made += 1
            age = self.settings.age_max * (1.0 + AGE_JITTER * (2.0 * self._rng.random() - 1.0))
            self.processes[self._made] = Process(
                self._made, began_at=now, kill_at=now + self.settings.begin_within, replace_at=now + age
            )
            effects += [Say("started", self._made, ""), Spawn(self._made)]
            if self._crashes:  # one after the other, until one has run well
                self._spawn_at = now + PAUSE_MIN
        while len(kept := self._kept()) > self._target():
            self._retire(min(kept, key=_cost), "scale", now, effects)

    def _retire(self, process: Process, why: str, now: float, effects: list[Effect]) -> None:
        if process.state is State.STARTING:  # it has no message yet
            process.state = State.DRAINING
            process.end_by(now + self.settings.grace + KILL_AFTER)
            effects += [Say("retiring", process.number, f"{why}; it had not begun"), Drain(process.number)]
            return
        process.state = State.RETIRING
        effects += [
            Say("retiring", process.number, f"{why}; {process.running} handlers finish"),
            Retire(process.number),
        ]

    def _next_asked(self) -> Process | None:
        """Return the process that is asked for the backlog: each that runs in turn, as one of them may hang."""
        running = [one for one in self._kept() if one.state is State.RUNNING]
        return next((one for one in running if one.number > self._asked), running[0] if running else None)

    def _ask_for_backlog(self, now: float, effects: list[Effect]) -> None:
        if now >= self._look_at and not self._finished and (process := self._next_asked()) is not None:
            self._look_at = now + self.settings.look_every
            self._asked = process.number
            effects.append(Look(process.number))


def _cost(process: Process) -> tuple[bool, int, int]:
    """Return what it costs to retire *process*: a leader most, then one with many handlers; the youngest first."""
    return process.leads, process.running, -process.number


def _how(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"

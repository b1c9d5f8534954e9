"""The findings of a simulated run, as plain values that pass between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from tenure.testing._sim.world import World

VIOLATIONS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken: which one, when in true seconds, and what was seen."""

    kind: str
    """Which promise, in a word or two."""
    at: float
    """When, in seconds of true time from the beginning of the run."""
    what: str
    """What was seen."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.3f} s: {self.what}"


class Findings:
    """Collect violations. Nothing is raised: an exception would end the task that caused it, unseen."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[Violation] = []

    def violated(self, kind: str, what: str) -> None:
        """Note that a promise was broken."""
        if len(self.violations) < VIOLATIONS_KEPT:
            self.violations.append(Violation(kind, self.world.now, what))
        self.world.log("CHECK", f"{kind}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one seed.

    ``recovery`` is how many seconds after the end of the faults all was in order, ``bound`` how many it may take;
    ``digest`` is equal for equal runs.
    """

    command: ClassVar[str] = "tenure sim"
    """The command that shows a run again, given its seed."""
    unit: ClassVar[str] = ""
    """The unit of :attr:`amount`."""

    seed: int
    """The seed, from which everything was drawn."""
    mutant: str | None
    """The planted bug; None if there was none."""
    setting: str
    """What the seed drew, in words: how many processes, which times, which kind of store."""
    seconds: float
    """The length of the run, in virtual seconds."""
    steps: int
    """How many steps the run took."""
    recovery: float
    bound: float
    digest: str
    violations: tuple[Violation, ...] = ()
    """The promises that were broken, the first twenty at most; none if all is well."""
    trace: tuple[str, ...] = field(default=(), repr=False)
    """With ``trace=True``: what happened, line by line."""

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    @property
    def amount(self) -> int:
        """How many of them there were."""
        raise NotImplementedError

    @property
    def counted(self) -> str:
        """How many of them there were, in words."""
        return f"{self.amount} {self.unit}"

    @property
    def replay(self) -> str:
        """The command that shows this run again."""
        planted = f" --mutant {self.mutant}" if self.mutant else ""
        return f"{self.command} --seed {self.seed}{planted}"

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.counted} in {self.seconds:.0f} virtual s ({self.setting})"
        if self.ok:
            return f"{head}, no violation"
        lines = [f"{head}, {len(self.violations)} violations; replay: {self.replay}"]
        return "\n  ".join(lines + [str(violation) for violation in self.violations])


AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)


def outcome_of(
    findings: Findings,
    kind: type[AnyOutcome],
    *,
    mutant: str | None,
    setting: object,
    recovery: float,
    bound: float,
    **own: Any,
) -> AnyOutcome:
    """Return the result of the run of *findings*, as it stands now; *own* are the fields that *kind* adds."""
    world = findings.world
    return kind(
        seed=world.seed,
        mutant=mutant,
        setting=str(setting),
        seconds=world.now,
        steps=world.steps,
        recovery=recovery,
        bound=bound,
        digest=world.digest(),
        violations=tuple(findings.violations),
        trace=tuple(world.lines),
        **own,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Outcome):
    """The result of one seed of elections; ``recovery`` is the seconds without a leader after the faults."""

    unit: ClassVar[str] = "elections"

    elections: int
    """How many elections were held."""

    @property
    def amount(self) -> int:
        """How many elections were held."""
        return self.elections


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport(Outcome):
    """The result of one seed of a queue; ``recovery`` is the seconds after the faults until all were settled."""

    command: ClassVar[str] = "tenure sim --queues"
    unit: ClassVar[str] = "messages"

    messages: int
    """How many were sent and acknowledged."""
    deliveries: int
    """How often a message was handed out."""
    sessions: int
    """Of how many sessions messages were handed out."""

    @property
    def amount(self) -> int:
        """How many messages were acknowledged to their senders; all of them were settled, if no promise was broken."""
        return self.messages

    @property
    def counted(self) -> str:
        """How many messages there were, in words."""
        sessions = f", in {self.sessions} sessions" if self.sessions else ""
        return f"{self.messages} messages, delivered {self.deliveries} times{sessions}"

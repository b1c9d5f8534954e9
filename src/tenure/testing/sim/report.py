"""What a simulated run brought to light, as plain values that pass between processes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken: which one, when in true seconds, and what was seen."""

    kind: str
    at: float
    what: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.3f} s: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one seed.

    ``recovery`` is how many seconds after the end of the faults a leader stood, ``bound`` how many it may take;
    ``digest`` is equal for equal runs.
    """

    seed: int
    mutant: str | None
    setting: str
    elections: int
    seconds: float
    steps: int
    recovery: float
    bound: float
    digest: str
    violations: tuple[Violation, ...] = ()
    trace: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    @property
    def replay(self) -> str:
        """The command that shows this run again."""
        return f"tenure sim --seed {self.seed}" + (f" --mutant {self.mutant}" if self.mutant else "")

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.elections} elections in {self.seconds:.0f} virtual s ({self.setting})"
        if self.ok:
            return f"{head}, no violation"
        lines = [f"{head}, {len(self.violations)} violations; replay: {self.replay}"]
        return "\n  ".join(lines + [str(violation) for violation in self.violations])

"""The summary: what happened, what of it is wrong, and the same for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tenure.demo.computation import Total

NAMED_MAX = 3
"""Files that are named; of more, the number is told."""


@dataclass(frozen=True, slots=True)
class Term:
    """One election's outcome: the fencing token, and which instance won it."""

    token: int
    instance: int


@dataclass(slots=True)
class Failover:
    """A leader's death, and what followed; ``elected`` and ``wrote`` are seconds from the kill, None until it happens.

    ``at`` is the moment of the kill on the monotonic clock, ``done`` how many files were counted then, ``refusal`` what
    the fence said to a write under the dead leader's token.
    """

    instance: int
    pid: int
    token: int
    done: int
    at: float
    elected: float | None = None
    wrote: float | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run."""

    folder: str
    url: str
    instances: int
    ttl: float
    parsed: int
    total: Total
    plain: Total
    differing: Sequence[str]
    unreadable: Mapping[str, str]
    terms: Sequence[Term]
    failover: Failover | None
    seconds: float
    plain_seconds: float

    def problems(self) -> list[str]:
        """Say what did not go as promised; nothing, if all is well."""
        found = []
        if self.failover is None or self.failover.wrote is None:
            found.append("no fail-over happened: the work was finished before the leader could be killed and followed")
        elif not self.failover.refusal:
            found.append("the fence was not tried: the work was finished too soon after the fail-over")
        tokens = [term.token for term in self.terms]
        if tokens != sorted(set(tokens)):
            found.append(f"the fencing tokens did not rise with every election: {tokens}")
        if self.total != self.plain or self.differing:
            found.append(f"the result is not that of the plain run; counted differently: {named(self.differing)}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        problems = self.problems()
        failover = asdict(self.failover) if self.failover else None
        if failover:
            del failover["at"]  # means nothing outside this run
        return {
            "ok": not problems,
            "problems": problems,
            "folder": self.folder,
            "url": self.url,
            "instances": self.instances,
            "ttl": self.ttl,
            "elections": len(self.terms),
            "terms": [asdict(term) for term in self.terms],
            "failover": failover,
            "total": asdict(self.total),
            "equals_plain_run": self.total == self.plain and not self.differing,
            "differing": list(self.differing),
            "unreadable": dict(self.unreadable),
            "seconds": round(self.seconds, 3),
            "plain_seconds": round(self.plain_seconds, 3),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return what people want to read, as pairs of a title and a text."""
        total, kill = self.total, self.failover
        rows = [
            ("folder", self.folder),
            (
                "counted",
                f"{total.files:,} files, {total.size / 1e6:.1f} MB, {total.lines:,} lines, {total.words:,} words",
            ),
            ("", f"{total.nodes:,} nodes in the syntax trees of {self.parsed:,} Python files" if self.parsed else ""),
            ("not readable", named([f"{path} ({why})" for path, why in self.unreadable.items()])),
            ("digest", total.digest),
            (
                "elections",
                f"{len(self.terms)}: " + ", ".join(f"term {t.token} instance {t.instance}" for t in self.terms),
            ),
        ]
        if kill:
            rows.append(
                ("killed", f"instance {kill.instance}, pid {kill.pid}, term {kill.token}, at {kill.done:,} files")
            )
        if kill and kill.elected is not None and kill.wrote is not None:
            after = f"elected {kill.elected:.2f} s after the kill, first fenced write {kill.wrote:.2f} s after it"
            rows.append(("fail-over", f"{after} (lease {self.ttl:g} s)"))
        if kill and kill.refusal:
            rows.append(("late write", f"under term {kill.token}: refused ({kill.refusal.partition(';')[0]})"))
        same = "the same result" if self.total == self.plain and not self.differing else "ANOTHER RESULT"
        rows.append(("plain run", f"{same}, in {self.plain_seconds:.1f} s; this run took {self.seconds:.1f} s"))
        return [(title, text) for title, text in rows if text]


def named(names: Sequence[str]) -> str:
    """Name the first few of *names*."""
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more

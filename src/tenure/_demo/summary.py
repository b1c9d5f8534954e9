"""The summary of a run: its events, its problems, and both as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tenure._demo.computation import Total
from tenure._demo.messages import DeadChunk

NAMED_MAX = 3
"""Names that are listed; of more, only the number is shown."""


@dataclass(frozen=True, slots=True)
class Term:
    """The result of one election: the fencing token, and the instance that won."""

    token: int
    instance: int


@dataclass(slots=True)
class WorkerKill:
    """The kill of a worker that handled a message; ``again``: the seconds until another instance received it, or None.

    ``at`` is the moment of the kill on the monotonic clock.
    """

    instance: int
    pid: int
    chunk: int
    at: float
    again: float | None = None


@dataclass(slots=True)
class Failover:
    """The kill of a leader, and the fail-over; ``elected`` and ``wrote`` are seconds from the kill, or None.

    ``at`` is the moment of the kill on the monotonic clock, ``done`` how many messages were settled then, ``refusal``
    the fence's answer to a write under the killed leader's token.
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
    """A whole run.

    ``redelivered``: the redeliveries of each chunk; ``again``: the repeated results; ``poison``: the chunk that always
    fails; ``left_out``: the chunks that the plain run could not count; ``led_after``: the seconds until the first
    leader; ``cores``: the processors; ``pace``: the least seconds for each file, if there was little to do.
    """

    folder: str
    url: str
    queue_url: str
    queue: str
    instances: int
    ttl: float
    lock: float
    parsed: int
    messages: int
    redelivered: Mapping[int, int]
    again: int
    deliveries_max: int
    dead: Sequence[DeadChunk]
    poison: int
    left_out: Sequence[int]
    lost: Sequence[str]
    twice: Sequence[str]
    total: Total
    plain: Total
    differing: Sequence[str]
    unreadable: Mapping[str, str]
    terms: Sequence[Term]
    worker_kill: WorkerKill | None
    failover: Failover | None
    seconds: float
    plain_seconds: float
    led_after: float
    cores: int
    pace: float

    @property
    def equals_plain_run(self) -> bool:
        """Whether the result is that of one process without election and queue."""
        return self.total == self.plain and not self.differing

    def problems(self) -> list[str]:
        """Return the broken promises; none, if all went well."""
        return [*self._problems_of_kills(), *self._problems_of_dead_letters(), *self._problems_of_result()]

    def _problems_of_kills(self) -> Iterator[str]:
        if self.worker_kill is None:
            yield "no worker was killed: no instance was found handling a message"
        elif self.worker_kill.again is None:
            yield f"message {self.worker_kill.chunk}, which the killed worker had, was not delivered to another"
        if self.failover is None or self.failover.wrote is None:
            yield "no fail-over happened: the work was finished before the leader was killed and replaced"
        elif not self.failover.refusal:
            yield "the fence was not tried after the fail-over"
        tokens = [term.token for term in self.terms]
        if tokens != sorted(set(tokens)):
            yield f"the fencing tokens did not rise with every election: {tokens}"

    def _problems_of_dead_letters(self) -> Iterator[str]:
        dead = {letter.chunk: letter for letter in self.dead}
        poison = dead.get(self.poison)
        if poison is None:
            yield f"message {self.poison}, the poison message, is not among the dead letters"
        elif (poison.reason, poison.deliveries) != ("max_deliveries", self.deliveries_max):
            yield (
                f"the poison message was dead-lettered as {poison.reason} after {poison.deliveries} deliveries, not as "
                f"max_deliveries after {self.deliveries_max}"
            )
        if healthy := sorted(dead.keys() - set(self.left_out)):
            yield f"messages were dead-lettered that could be handled: {named(list(map(str, healthy)))}"

    def _problems_of_result(self) -> Iterator[str]:
        if self.lost:
            yield f"lost, neither counted nor dead: {named(self.lost)}"
        if self.twice:
            yield f"counted twice: {named(self.twice)}"
        if not self.equals_plain_run:
            yield f"the result is not that of the plain run; counted differently: {named(self.differing)}"

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        problems = self.problems()
        return {
            "ok": not problems,
            "problems": problems,
            "folder": self.folder,
            "url": self.url,
            "queue_url": self.queue_url,
            "queue": self.queue,
            "instances": self.instances,
            "ttl": self.ttl,
            "lock": self.lock,
            "messages": self.messages,
            "redeliveries": sum(self.redelivered.values()),
            "results_again": self.again,
            "dead_letters": [asdict(letter) | {"poison": letter.chunk == self.poison} for letter in self.dead],
            "elections": len(self.terms),
            "terms": [asdict(term) for term in self.terms],
            "worker_killed": _lasting(self.worker_kill),
            "failover": _lasting(self.failover),
            "lost": list(self.lost),
            "counted_twice": list(self.twice),
            "total": asdict(self.total),
            "equals_plain_run": self.equals_plain_run,
            "differing": list(self.differing),
            "unreadable": dict(self.unreadable),
            "seconds": round(self.seconds, 3),
            "plain_seconds": round(self.plain_seconds, 3),
            "led_after": round(self.led_after, 3),
            "cores": self.cores,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary for people, as pairs of a title and a text."""
        rows = [*self._rows_of_work(), *self._rows_of_messages(), *self._rows_of_kills(), *self._rows_of_result()]
        return [(title, text) for title, text in rows if text]

    def _rows_of_work(self) -> Iterator[tuple[str, str]]:
        total = self.total
        size = f"{total.size / 1e6:.1f} MB, {total.lines:,} lines, {total.words:,} words"
        yield "folder", self.folder
        yield "counted", f"{total.files:,} files, {size}"
        yield "", f"{total.nodes:,} nodes in the syntax trees of {self.parsed:,} Python files" if self.parsed else ""
        yield "not readable", named([f"{path} ({why})" for path, why in self.unreadable.items()])
        yield "digest", total.digest

    def _rows_of_messages(self) -> Iterator[tuple[str, str]]:
        of_poison = self.redelivered.get(self.poison, 0)
        if self.queue_url != self.url:
            yield "stores", f"leases in {self.url}, messages in {self.queue_url}"
        yield "messages", f"{self.messages:,}, all competed for by {self.instances} instances"
        yield (
            "redeliveries",
            f"{sum(self.redelivered.values()):,}, {of_poison:,} of them of the poison message; "
            f"repeated results: {self.again:,}",
        )
        for letter in self.dead:
            which = "the poison message" if letter.chunk == self.poison else "of this folder"
            why = f"{letter.reason} after {letter.deliveries} deliveries ({letter.why})"
            yield "dead letter", f"message {letter.chunk}, {which}: {why}"

    def _rows_of_kills(self) -> Iterator[tuple[str, str]]:
        worker_kill, kill = self.worker_kill, self.failover
        if worker_kill:
            seen = worker_kill.again
            again = f"delivered to another after {seen:.2f} s" if seen is not None else "not delivered since"
            message = f"its message {worker_kill.chunk} was {again} (lock {self.lock:g} s)"
            yield "worker killed", f"instance {worker_kill.instance}, pid {worker_kill.pid}; {message}"
        if kill:
            done = f"at {kill.done:,} messages"
            yield "leader killed", f"instance {kill.instance}, pid {kill.pid}, term {kill.token}, {done}"
        if kill and kill.elected is not None and kill.wrote is not None:
            after = f"elected {kill.elected:.2f} s after the kill, first fenced write {kill.wrote:.2f} s after it"
            yield "fail-over", f"{after} (lease {self.ttl:g} s)"
        if kill and kill.refusal:
            yield "late write", f"under term {kill.token}: refused ({kill.refusal.partition(';')[0]})"
        yield (
            "elections",
            f"{len(self.terms)}: " + ", ".join(f"term {t.token} instance {t.instance}" for t in self.terms),
        )

    def _rows_of_result(self) -> Iterator[tuple[str, str]]:
        yield "lost", f"{len(self.lost):,}"
        yield "counted twice", f"{len(self.twice):,}"
        same = "the same result" if self.equals_plain_run else "A DIFFERENT RESULT"
        left_out = f"; it omits message {named(list(map(str, self.left_out)))} as well" if self.left_out else ""
        yield "plain run", f"{same}, in {self.plain_seconds:.1f} s; this run took {self.seconds:.1f} s{left_out}"
        yield "", self._why_no_faster()

    def _why_no_faster(self) -> str:
        """Explain why several instances may need longer than the plain run; empty if they did not."""
        shared = self.cores <= self.instances  # the plain run needs one core, too
        if not shared and self.seconds < self.plain_seconds:
            return ""
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'}"
        together = f"{self.instances} instances and the plain run shared {cores}, so there was little to gain; "
        waits = [f"{self.led_after:.1f} s for its processes and a first leader"]
        if self.worker_kill and self.worker_kill.again:
            waits.append(f"{self.worker_kill.again:.1f} s for the killed worker's message")
        if self.failover and self.failover.elected:
            waits.append(f"{self.failover.elected:.1f} s for a new leader")
        alone = f"only this run stores each message and result, and it waited {', '.join(waits)}"
        slow = f"as there was little to do, each file was made to take {seconds(self.pace)} here; " if self.pace else ""
        return f"{slow}{together if shared and not slow else ''}{alone}"


def seconds(duration: float) -> str:
    """Write a short duration."""
    return f"{duration * 1_000:.0f} ms" if duration < 1 else f"{duration:.1f} s"


def _lasting(act: WorkerKill | Failover | None) -> dict[str, Any] | None:
    """Return a fault as plain values, without its time, which means nothing outside this run."""
    return {name: value for name, value in asdict(act).items() if name != "at"} if act else None


def named(names: Sequence[str]) -> str:
    """List the first few of *names*."""
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more

"""One run of the demonstration: starts all processes, watches them while the faults are injected, compares the results.

It does not campaign, and counts no files. It only reads: the leader and the queue from the store, the
progress from the ledger, the times of events from the instances' reports.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import tenure
from tenure._demo.computation import Count, differences, merge
from tenure._demo.faults import Faults
from tenure._demo.instance import InstanceConfig, queue_backend
from tenure._demo.job import Job, with_poison_file
from tenure._demo.ledger import Ledger
from tenure._demo.messages import LETTERS_MAX, MAX_DELIVERIES, DeadChunk, Queues
from tenure._demo.processes import Failed, InstanceProcess, Processes
from tenure._demo.report import Report
from tenure._demo.state import Display, InstanceState, RunState
from tenure._demo.summary import Summary, Term

TTL = 2.0
LOCK = 3.0
"""Seconds of a lease and of a lock, if the store allows such short ones, so that a fail-over is quick."""

CHECK_EVERY = 0.1
"""Seconds between reads of ledger and store."""

STUCK_AFTER = 30.0
"""Seconds without progress, on top of a lease's length, after which the run is given up."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The settings of a run."""

    job: Job
    directory: Path  # the folder for all files
    url: str | None = field(repr=False)  # None: an SQLite file in directory
    instances: int
    ttl: float | None  # None: a short lease

    @property
    def store(self) -> str:
        """The URL of the store."""
        return self.url or f"sqlite:///{self.directory / 'store.db'}"


async def run_demo(setting: DemoSettings, display: Display) -> Summary:
    """Run the whole demonstration; all its processes have ended when this returns.

    Raises:
        Failed: There is no result: the work did not end, or could not be compared.
        tenure.TenureError: The store can't be used.
    """
    url = setting.store
    path = setting.directory / "ledger.db"
    job, poison = with_poison_file(setting.job, setting.directory / "poison.py")
    async with AsyncExitStack() as stack:
        ledger = Ledger.create(path, job)
        stack.callback(ledger.close)
        backend = await stack.enter_async_context(tenure.connect(url))
        config = await _config(setting, backend, url, path)
        queues = await stack.enter_async_context(queue_backend(backend, config))
        run = RunState(job, str(backend.url), str(queues.url), config.election, config.ttl, ledger.progress())
        demo = DemoRun(config, backend, queues, ledger, run, display, poison.number)
        stack.push_async_callback(demo.processes.end)
        await demo.begin(setting.instances)
        await demo.watch()
        await demo.processes.stop_all()
        summary = await demo.summarize()
        await demo.clean_up()
        return summary


async def _config(setting: DemoSettings, backend: tenure.Backend, url: str, ledger: Path) -> InstanceConfig:
    """Return the settings of all instances; a wrong setting is better found here than by each of them."""
    # On a shared store, the names must be unique.
    name = "demo" if setting.url is None else f"demo-{secrets.token_hex(4)}"
    found = await backend.diagnose()
    if found.traits is None:
        raise tenure.ConfigError(f"{backend.url} has queues, but no elections; the demonstration needs both")
    ttl = max(TTL, found.traits.ttl_min) if setting.ttl is None else setting.ttl
    if (traits := found.queues) is not None:
        queue_url = url
    else:
        queue_url = f"sqlite:///{setting.directory / 'queue.db'}"
        async with tenure.connect(queue_url) as other:
            traits = (await other.diagnose()).queues
        assert traits is not None
    lock = max(LOCK, traits.lock_min)
    queues = Queues(f"{name}-work", f"{name}-results", lock, named=traits.dedupe != "impossible")
    return InstanceConfig(0, url, queue_url, name, ttl, str(ledger), queues)


class DemoRun:
    """One run, from the first process to the summary."""

    def __init__(
        self,
        config: InstanceConfig,
        backend: tenure.Backend,
        queues: tenure.Backend,
        ledger: Ledger,
        run: RunState,
        display: Display,
        poison: int,
    ) -> None:
        self.processes: Processes = Processes(Path(config.ledger).parent, self._on_report)
        self._config = config
        self._election = backend.election(config.election, ttl=config.ttl)
        self._work = config.queues.work_of(queues)
        self._results = config.queues.results_of(queues)
        self._ledger = ledger
        self._state_of_run = run
        self._display = display
        self._poison = poison
        self._faults = Faults(run.job, poison, ledger, self._results, self.processes, self._add_event)
        self._began = time.monotonic()
        self._finished = 0.0
        self._led_after = 0.0
        self._moved_at = self._began
        self._terms: list[Term] = []
        self._redelivered: Counter[int] = Counter()  # by chunk

    async def begin(self, instances: int) -> None:
        """Start the instances, and the plain run beside them."""
        job, config = self._state_of_run.job, self._config
        self._add_event(
            f"{len(job.files):,} files in {len(job.chunks):,} chunks, in {job.folder}; one file can't be counted"
        )
        if config.queue_url != config.url:
            scheme = self._state_of_run.url.partition(":")[0]
            self._add_event(f"the leases are in {scheme}, which has no queues; the messages are in an SQLite file")
        for number in range(1, instances + 1):
            self._state_of_run.instances.append(await self.processes.start(config.of(number)))
        await self.processes.start_plain(Path(config.ledger))
        self._add_event(f"{instances} instances are started, and a plain run to compare with")

    async def watch(self) -> None:
        """Watch until the work is finished, and inject the faults meanwhile."""
        while not self._state_of_run.progress.finished:
            if time.monotonic() - self._moved_at > STUCK_AFTER + self._config.ttl:
                raise Failed(f"no progress for {STUCK_AFTER + self._config.ttl:g} s{self.processes.last_errors()}")
            if all(child.process.returncode is not None for child in self.processes.instances):
                raise Failed(f"no instance is left{self.processes.last_errors()}")
            await asyncio.sleep(CHECK_EVERY)
            await self._update()
            await self._faults.inject(self._state_of_run)
        self._finished = time.monotonic()
        self._add_event(f"all {self._state_of_run.progress.of:,} messages are done")

    async def summarize(self) -> Summary:
        """Wait for the plain run, and compare."""
        self._faults.conclude()
        if not self.processes.is_plain_over:
            self._add_event("the plain run is still counting")
        while not self.processes.is_plain_over:
            await asyncio.sleep(CHECK_EVERY)
            await self._update()
        report = json.loads(await self.processes.plain())
        plain = [Count(**count) for count in report["counts"]]
        counts, total = self._ledger.counts(), self._ledger.outcome()
        assert total is not None
        await self._update()
        letters = [DeadChunk.of(letter) for letter in await self._work.dead_letters.peek(LETTERS_MAX)]
        job, config, progress = self._state_of_run.job, self._config, self._state_of_run.progress
        return Summary(
            folder=job.folder,
            url=self._state_of_run.url,
            queue_url=self._state_of_run.queue_url,
            queue=self._work.name,
            instances=len(self._state_of_run.instances),
            ttl=config.ttl,
            lock=config.queues.lock,
            parsed=sum(1 for file in job.files if file.parsed),
            messages=progress.of,
            redelivered=dict(self._redelivered),
            again=progress.again,
            deliveries_max=MAX_DELIVERIES,
            dead=letters,
            poison=self._poison,
            left_out=report["left_out"],
            lost=_lost(job, counts, letters),
            twice=[path for path, times in Counter(count.path for count in counts).items() if times > 1],
            total=total,
            plain=merge(plain),
            differing=differences(counts, plain),
            unreadable={count.path: count.error for count in counts if count.error},
            terms=self._terms,
            worker_kill=self._faults.worker_kill,
            failover=self._faults.failover,
            seconds=self._finished - self._began,
            plain_seconds=report["seconds"],
            led_after=self._led_after,
            cores=_cores(),
            pace=job.pace,
        )

    async def clean_up(self) -> None:
        """Remove the messages from the store; the dead letters stay, to be inspected."""
        for queue in (self._work, self._results):
            with suppress(tenure.Unavailable, tenure.LockLost):
                while left := await queue.receive(100):
                    for message in left:
                        await message.complete()

    # --- watching ---

    async def _update(self) -> None:
        """Read the progress; if the store does not answer, the last state stays."""
        run, before = self._state_of_run, self._state_of_run.progress
        run.progress = self._ledger.progress()
        run.elapsed = time.monotonic() - self._began
        run.plain = "done" if self.processes.is_plain_over else "counting"
        with suppress(tenure.Unavailable):
            leader, run.queue = await asyncio.gather(self._election.leader(), self._work.stats())
            run.leader = int(leader.metadata.get("instance", 0)) if leader else 0
            run.lease_left = leader.remaining if leader else 0.0
            run.token = leader.token if leader else run.token
        if run.progress.dead > before.dead:
            self._add_event(
                "; ".join(
                    f"message {one.chunk} was dead-lettered: {one.reason}, {one.why}" for one in self._ledger.dead()
                )
            )
        if run.progress != before or (run.leader and any(instance.is_busy for instance in run.instances)):
            self._moved_at = time.monotonic()
        self._display.draw(run)

    def _on_report(self, child: InstanceProcess, report: Report) -> None:
        """Process an instance's report."""
        instance = child.instance
        if instance.state == "killed":
            return  # sent before it was killed, and read after that
        match report.what:
            case "took" | "counted" | "could not count":
                self._on_worker_report(instance, report)
            case "standing by" | "left":
                instance.state = "standing by"
            case "elected":
                instance.state, instance.token = "leading", report.token
                self._led_after = self._led_after or report.at - self._began
                self._terms.append(Term(report.token, instance.number))
                self._add_event(f"{instance.name} is elected: term {report.token}", report.at)
            case "split":
                again = (
                    " again, which the store drops by their ids"
                    if len(self._terms) > 1 and self._config.queues.named
                    else ""
                )
                self._add_event(f"{instance.name} has sent {report.count:,} messages{again}", report.at)
            case "refused":
                self._add_event(f"{instance.name} was refused: {report.why}", report.at)
            case "failed":
                instance.state = "failed"
                self._add_event(f"{instance.name} failed: {report.why}", report.at)
        self._faults.follow(instance, report)

    def _on_worker_report(self, instance: InstanceState, report: Report) -> None:
        instance.chunk = report.chunk if report.what == "took" else 0
        if report.what == "took" and report.delivery > 1:
            self._redelivered[report.chunk] += 1
        elif report.what == "counted":
            instance.counted += 1
        elif report.what == "could not count":
            text = f"{instance.name} failed with message {report.chunk}, delivery {report.delivery}: {report.why}"
            self._add_event(text, report.at)

    def _add_event(self, text: str, at: float | None = None) -> None:
        since = (time.monotonic() if at is None else at) - self._began
        self._state_of_run.events.append((since, text))
        self._display.add_event(since, text)


def _cores() -> int:
    """Return the number of processors that this process and its children may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lost(job: Job, counts: list[Count], letters: list[DeadChunk]) -> list[str]:
    """Return the files that were neither counted, nor are among the dead letters."""
    counted = {count.path for count in counts}
    dead = {letter.chunk for letter in letters}
    waiting = (file.path for chunk in job.chunks if chunk.number not in dead for file in chunk.files)
    return [path for path in waiting if path not in counted]

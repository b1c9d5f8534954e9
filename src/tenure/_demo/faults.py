"""The faults of a run: a worker is killed, a result repeated, the leader killed, a write under its old token tried.

Each is injected when the work has reached some point, and some time after the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import tenure
from tenure._demo.job import Job
from tenure._demo.ledger import Ledger
from tenure._demo.messages import Result
from tenure._demo.processes import Failed, InstanceProcess, Processes
from tenure._demo.report import Report
from tenure._demo.state import InstanceState, RunState
from tenure._demo.summary import Failover, WorkerKill

FEW = 8
"""With fewer chunks, a worker may also be killed while it handles the poison message."""


class Faults:
    """The faults that are injected, and their effects.

    Args:
        job: The work.
        poison: The number of the chunk that always fails.
        ledger: The database of the results.
        results: The queue in which a result is repeated.
        processes: The instances.
        on_event: Called with a text about each fault, and with its time, if that is not now.
    """

    def __init__(
        self,
        job: Job,
        poison: int,
        ledger: Ledger,
        results: tenure.Queue,
        processes: Processes,
        on_event: Callable[[str, float | None], None],
    ) -> None:
        self.worker_kill: WorkerKill | None = None
        self.failover: Failover | None = None
        self._spared_chunk = 0 if len(job.chunks) < FEW else poison
        self._ledger = ledger
        self._results = results
        self._processes = processes
        self._add_event = on_event
        self._stopped: InstanceProcess | None = None
        self._is_repeated = False

    async def inject(self, run: RunState) -> None:
        """Inject the faults that are due."""
        if not self._is_repeated:
            await self._repeat_a_result()
        if self.worker_kill is None:
            self._kill_a_worker(run)
        elif self.failover is None:
            self._kill_the_leader(run)
        else:
            self._write_under_old_token(self.failover)

    def conclude(self) -> None:
        """Inject the last fault, if it was not possible before all instances ended."""
        if self.failover is not None:
            self._write_under_old_token(self.failover)

    def follow(self, instance: InstanceState, report: Report) -> None:
        """Record the effect of a fault, if *report* is one."""
        worker_kill, failover = self.worker_kill, self.failover
        if worker_kill and report.what == "took" and report.chunk == worker_kill.chunk and worker_kill.again is None:
            worker_kill.again = report.at - worker_kill.at
            self._add_event(
                f"{instance.name} received message {worker_kill.chunk}, delivery {report.delivery}", report.at
            )
        if failover is None or report.token <= failover.token:
            return
        if report.what == "elected" and failover.elected is None:
            failover.elected = report.at - failover.at
        elif report.what == "wrote" and failover.wrote is None:
            failover.wrote = report.at - failover.at

    async def _repeat_a_result(self) -> None:
        """Send a result again, as its worker did: a queue may deliver a message twice."""
        result = self._ledger.result()
        if result is not None:
            self._is_repeated = True
            await self._results.send_batch([result.outgoing()])
            self._add_event(f"the result of message {result.chunk} is delivered a second time", None)

    def _kill_a_worker(self, run: RunState) -> None:
        """Kill -9 a worker that handles a message.

        It is stopped first, and killed at the next call: by then its reports have been read, and if it completed its
        message meanwhile, another worker is chosen.
        """
        child, self._stopped = self._stopped, None
        if child is None:
            self._stop_a_worker(run)
        elif self._handles_a_message(child.instance):
            instance = child.instance
            self.worker_kill = WorkerKill(instance.number, instance.pid, instance.chunk, time.monotonic())
            child.kill()
            at = f"while it handled message {instance.chunk}"
            self._add_event(f"kill -9 {instance.pid}: {instance.name}, a worker, was killed {at}", None)
        else:
            child.resume()

    def _stop_a_worker(self, run: RunState) -> None:
        if 4 * run.progress.settled < run.progress.of:
            return
        for child in self._processes.instances:
            standing_by = child.instance.state == "standing by" and child.instance.number != run.leader
            if standing_by and child.process.returncode is None and self._handles_a_message(child.instance):
                child.stop()
                self._stopped = child
                return

    def _handles_a_message(self, instance: InstanceState) -> bool:
        return instance.chunk not in (0, self._spared_chunk)

    def _kill_the_leader(self, run: RunState) -> None:
        """Kill -9 the leader, if the store and the instance itself agree that it leads."""
        progress = run.progress
        if 2 * progress.settled < progress.of or progress.finished:
            return
        for child in self._processes.instances:
            instance = child.instance
            agreed = (instance.number, instance.token) == (run.leader, run.token)
            if agreed and instance.state == "leading" and child.process.returncode is None:
                self.failover = Failover(
                    instance.number, instance.pid, instance.token, progress.settled, time.monotonic()
                )
                child.kill()
                at = f"{progress.settled:,} of {progress.of:,} messages"
                self._add_event(f"kill -9 {instance.pid}: {instance.name}, the leader, was killed at {at}", None)

    def _write_under_old_token(self, failover: Failover) -> None:
        """Write under the killed leader's token, as that leader would do if it had only been slow.

        The fence checks only the token, so this works also when all results are written already.
        """
        if failover.wrote is None or failover.refusal:
            return
        left = self._ledger.remaining()[:1]
        late = [Result(one.number, failover.instance, ((-1, -1, -1, -1, "", ""),) * len(one.files)) for one in left]
        try:
            self._ledger.record(failover.token, late)
        except tenure.TermLost as refusal:
            failover.refusal = str(refusal)
            self._add_event(f"a late write under term {failover.token} was refused", None)
        else:
            raise Failed(f"a write under the old term {failover.token} was accepted after a newer term had written")

"""The demonstration's faults, when the work is finished already."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import tenure
from tenure._demo.computation import Count
from tenure._demo.faults import Faults
from tenure._demo.job import Chunk, File, Job
from tenure._demo.ledger import Ledger
from tenure._demo.messages import Result
from tenure._demo.processes import Processes
from tenure._demo.summary import Failover

JOB = Job("/some/where", (Chunk(1, (File("a", False),)),), 0.5)


async def test_the_fence_is_tried_also_if_the_new_leader_finished_first(tmp_path: Path) -> None:
    printed: list[str] = []
    async with tenure.connect("memory:faults") as backend:
        with closing(Ledger.create(tmp_path / "ledger.db", JOB)) as ledger:
            ledger.begin_term(1, instance=1)
            ledger.begin_term(2, instance=2)
            ledger.record(2, [Result.of(1, 2, [Count("a")])])
            processes = Processes(tmp_path, lambda running, report: None)
            faults = Faults(JOB, 0, ledger, backend.queue("results"), processes, lambda text, at: printed.append(text))
            faults.failover = Failover(1, 4711, token=1, done=0, at=0.0, elected=1.0, wrote=1.0)
            faults.conclude()
            faults.conclude()
            assert "too old" in faults.failover.refusal
            assert ledger.progress().again == 0
    assert printed == ["a late write under term 1 was refused"]

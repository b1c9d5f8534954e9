"""The demonstration's leader and worker in one process: the work is split and aggregated, dead letters are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

import tenure
from tenure._demo.computation import Count, count_chunk, merge
from tenure._demo.job import Job, survey, with_poison_file
from tenure._demo.leader import Leader
from tenure._demo.ledger import Ledger
from tenure._demo.messages import Queues, Result
from tenure._demo.worker import Worker
from tests.durations import until

CHANNELS = Queues("work", "results", lock=30.0, named=True)
UNNAMED = Queues("work", "results", lock=30.0, named=False)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "input"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.py").write_text(f"x = {number}\n")
    return survey(folder, at_least=0.0)


@pytest.fixture
def counts(job: Job) -> list[Count]:
    return [count for chunk in job.chunks for count in count_chunk(job.folder, chunk)]


@pytest.fixture
def ledger(tmp_path: Path, job: Job) -> Iterator[Ledger]:
    poisoned_job, _ = with_poison_file(job, tmp_path / "poison.py")
    with closing(Ledger.create(tmp_path / "ledger.db", poisoned_job)) as created:
        yield created


@asynccontextmanager
async def leading(backend: tenure.Backend, ledger: Ledger, queues: Queues) -> AsyncIterator[tenure.Term]:
    stop = asyncio.Event()
    both = queues.work_of(backend), queues.results_of(backend)
    async with backend.election("demo", ttl=30).campaign() as term:
        task = asyncio.create_task(Leader(1, ledger, *both, named=queues.named, stop=stop).lead(term))
        yield term
        stop.set()
        await task


async def test_all_but_the_failing_chunk_is_counted(ledger: Ledger, counts: list[Count]) -> None:
    stop = asyncio.Event()
    async with tenure.connect("memory:") as backend, leading(backend, ledger, CHANNELS):
        queue = CHANNELS.work_of(backend)
        working = asyncio.create_task(Worker(1, CHANNELS.results).work(queue, stop))
        await until(lambda: ledger.progress().finished)
        stop.set()
        await working
        stats = await queue.stats()
    assert ledger.outcome() == merge(counts)
    [dead] = ledger.dead()
    assert (dead.reason, dead.deliveries) == ("max_deliveries", 5)
    assert dead.why.startswith("TooDeep: ")
    assert (stats.ready, stats.locked, stats.delayed, stats.dead) == (0, 0, 0, 1)


@pytest.mark.parametrize(("queues", "times"), [(CHANNELS, 1), (UNNAMED, 2)], ids=["ids", "no ids"])
async def test_a_second_leader_sends_again(
    ledger: Ledger, queues: Queues, times: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where ids are remembered, the messages are dropped; elsewhere, the ledger ignores the results."""
    of = len(ledger.remaining())
    async with tenure.connect("memory:") as backend:
        queue = queues.work_of(backend)
        for _ in range(2):
            async with leading(backend, ledger, queues):
                await until(lambda: '"split"' in capfd.readouterr().out)
        assert (await queue.stats()).ready == of * times


async def test_a_result_that_comes_again_counts_once(ledger: Ledger, job: Job, counts: list[Count]) -> None:
    first = Result.of(1, 1, count_chunk(job.folder, job.chunks[0]))
    async with tenure.connect("memory:") as backend, leading(backend, ledger, CHANNELS):
        results = CHANNELS.results_of(backend)
        await results.send_batch([first.outgoing(), first.outgoing()])
        await until(lambda: ledger.progress().again == 1)
    assert ledger.counts() == counts[: len(first.counts)]


async def test_an_old_leader_writes_nothing(ledger: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    async with tenure.connect("memory:") as backend:
        queues = CHANNELS.work_of(backend), CHANNELS.results_of(backend)
        async with backend.election("demo", ttl=30).campaign() as term:
            ledger.begin_term(term.token + 1, instance=2)  # another leads already, and this one does not know it yet
            leading = asyncio.create_task(Leader(1, ledger, *queues, named=True, stop=asyncio.Event()).lead(term))
            await until(lambda: "too old" in capfd.readouterr().out)
            leading.cancel()
        assert (await queues[0].stats()).ready == 0

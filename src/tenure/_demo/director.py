"""The director: starts everybody, looks on while the plot is played, and compares the results.

It takes no part in the election, and counts nothing. What it knows, it learns as any outsider would: from the store who
leads and what waits in the queue, from the ledger how far the work is, from the instances' reports when it happened.
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
from tenure._demo.instance import Station
from tenure._demo.job import Job, poisoned
from tenure._demo.ledger import Ledger
from tenure._demo.messages import LETTERS_MAX, MAX_DELIVERIES, Channels, Dead
from tenure._demo.plot import Plot
from tenure._demo.report import Report
from tenure._demo.setup import Display, Player, Scene
from tenure._demo.stage import Actor, Failed, Stage
from tenure._demo.summary import Summary, Term

TTL = 2.0
LOCK = 3.0
"""Seconds of a lease and of a lock, where the store can keep such short ones: a fail-over shouldn't be tedious."""

LOOK_EVERY = 0.1
"""Seconds between looks at ledger and store."""

STUCK_AFTER = 30.0
"""Seconds in which nobody leads or nothing moves, on top of a lease's length, after which the director gives up."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is played, and where."""

    job: Job
    place: Path  # the folder for everything that is written
    url: str | None = field(repr=False)  # None: an SQLite file in place
    instances: int
    ttl: float | None  # None: a short one


async def perform(setting: Setting, display: Display) -> Summary:
    """Run the whole demonstration, and leave no process behind.

    Raises:
        Failed: There is nothing to sum up: the work did not end, or could not be compared.
        tenure.TenureError: The store can't be used.
    """
    url = setting.url or f"sqlite:///{setting.place / 'store.db'}"
    path = setting.place / "ledger.db"
    job, poisonous = poisoned(setting.job, setting.place / "poisonous.py")
    async with AsyncExitStack() as stack:
        ledger = Ledger.create(path, job)
        stack.callback(ledger.close)
        backend = await stack.enter_async_context(tenure.connect(url))
        station = await _station(setting, backend, url, path)
        scene = Scene(job, str(backend.url), station.election, station.ttl, ledger.progress())
        director = Director(station, backend, ledger, scene, display, poisonous.number)
        stack.push_async_callback(director.stage.end)
        await director.begin(setting.instances)
        await director.watch()
        await director.stage.dismiss()
        summary = await director.judge()
        await director.tidy()
        return summary


async def _station(setting: Setting, backend: tenure.Backend, url: str, ledger: Path) -> Station:
    """Return what all instances are told; what can't work is better found out here than by all of them."""
    # On a store that others use as well, the names must be nobody else's.
    name = "demo" if setting.url is None else f"demo-{secrets.token_hex(4)}"
    found = await backend.diagnose()
    if found.queues is None:
        raise tenure.ConfigError(f"{found.url} has elections, but no queues; name another store with --on")
    ttl = max(TTL, found.traits.ttl_min) if setting.ttl is None else setting.ttl
    lock = max(LOCK, found.queues.lock_min)
    channels = Channels(f"{name}-work", f"{name}-results", lock, named=found.queues.dedupe != "impossible")
    return Station(0, url, name, ttl, str(ledger), channels)


class Director:
    """One run, from the first process to the verdict."""

    def __init__(
        self,
        station: Station,
        backend: tenure.Backend,
        ledger: Ledger,
        scene: Scene,
        display: Display,
        poisonous: int,
    ) -> None:
        self.stage: Stage = Stage(Path(station.ledger).parent, self._take)
        self._station = station
        self._election = backend.election(station.election, ttl=station.ttl)
        self._work = station.channels.work_of(backend)
        self._results = station.channels.results_of(backend)
        self._ledger = ledger
        self._scene = scene
        self._display = display
        self._poisonous = poisonous
        self._plot = Plot(scene.job, poisonous, ledger, self._results, self.stage, self._tell)
        self._began = time.monotonic()
        self._finished = 0.0
        self._led_after = 0.0
        self._moved_at = self._began
        self._terms: list[Term] = []
        self._redelivered: Counter[int] = Counter()  # by chunk

    async def begin(self, instances: int) -> None:
        """Start the instances, and the plain run beside them."""
        job, station = self._scene.job, self._station
        self._tell(f"{len(job.files):,} files in {len(job.chunks):,} chunks, in {job.folder}; one file is poisonous")
        for number in range(1, instances + 1):
            self._scene.players.append(await self.stage.start(station.of(number)))
        await self.stage.start_plain(Path(station.ledger))
        self._tell(f"{instances} instances are started, and a plain run to compare with")

    async def watch(self) -> None:
        """Look on until the work is finished, and play the plot meanwhile."""
        while not self._scene.progress.finished:
            if time.monotonic() - self._moved_at > STUCK_AFTER + self._station.ttl:
                raise Failed(f"nothing moved for {STUCK_AFTER + self._station.ttl:g} s{self.stage.last_words()}")
            if all(actor.process.returncode is not None for actor in self.stage.actors):
                raise Failed(f"no instance is left{self.stage.last_words()}")
            await asyncio.sleep(LOOK_EVERY)
            await self._look()
            await self._plot.play(self._scene)
        self._finished = time.monotonic()
        self._tell(f"all {self._scene.progress.of:,} messages are accounted for")

    async def judge(self) -> Summary:
        """Wait for the plain run, and compare."""
        self._plot.conclude()
        if not self.stage.is_plain_over:
            self._tell("the plain run is still counting")
        while not self.stage.is_plain_over:
            await asyncio.sleep(LOOK_EVERY)
            await self._look()
        said = json.loads(await self.stage.plain())
        plain = [Count(**count) for count in said["counts"]]
        counts, total = self._ledger.counts(), self._ledger.outcome()
        assert total is not None
        await self._look()
        letters = [Dead.of(letter) for letter in await self._work.dead_letters.peek(LETTERS_MAX)]
        job, station, progress = self._scene.job, self._station, self._scene.progress
        return Summary(
            folder=job.folder,
            url=self._scene.url,
            queue=self._work.name,
            instances=len(self._scene.players),
            ttl=station.ttl,
            lock=station.channels.lock,
            parsed=sum(1 for file in job.files if file.parsed),
            messages=progress.of,
            redelivered=dict(self._redelivered),
            again=progress.again,
            deliveries_max=MAX_DELIVERIES,
            dead=letters,
            poisonous=self._poisonous,
            left_out=said["left_out"],
            lost=_lost(job, counts, letters),
            twice=[path for path, times in Counter(count.path for count in counts).items() if times > 1],
            total=total,
            plain=merge(plain),
            differing=differences(counts, plain),
            unreadable={count.path: count.error for count in counts if count.error},
            terms=self._terms,
            strike=self._plot.strike,
            failover=self._plot.failover,
            seconds=self._finished - self._began,
            plain_seconds=said["seconds"],
            led_after=self._led_after,
            cores=_cores(),
            pace=job.pace,
        )

    async def tidy(self) -> None:
        """Leave no messages on a store that is not ours; the dead letters stay, to be looked at."""
        for queue in (self._work, self._results):
            with suppress(tenure.Unavailable, tenure.LockLost):
                while left := await queue.receive(100):
                    for message in left:
                        await message.complete()

    # --- looking ---

    async def _look(self) -> None:
        """See how far it has come; a store that can't be asked leaves what was seen last."""
        scene, before = self._scene, self._scene.progress
        scene.progress = self._ledger.progress()
        scene.elapsed = time.monotonic() - self._began
        scene.plain = "done" if self.stage.is_plain_over else "counting"
        with suppress(tenure.Unavailable):
            leader, scene.queue = await asyncio.gather(self._election.leader(), self._work.stats())
            scene.leader = int(leader.metadata.get("instance", 0)) if leader else 0
            scene.lease_left = (leader.remaining or 0.0) if leader else 0.0
            scene.token = leader.token if leader else scene.token
        if scene.progress.dead > before.dead:
            self._tell(
                "; ".join(f"message {one.chunk} is dead: {one.reason}, {one.why}" for one in self._ledger.dead())
            )
        if scene.progress != before or (scene.leader and any(player.is_busy for player in scene.players)):
            self._moved_at = time.monotonic()
        self._display.draw(scene)

    def _take(self, actor: Actor, report: Report) -> None:
        """Take an instance's report."""
        player = actor.player
        if player.state == "killed":
            return  # said before it died, and read after
        match report.what:
            case "took" | "counted" | "tripped":
                self._take_from_worker(player, report)
            case "standing" | "left":
                player.state = "standing by"
            case "elected":
                player.state, player.token = "leading", report.token
                self._led_after = self._led_after or report.at - self._began
                self._terms.append(Term(report.token, player.number))
                self._tell(f"{player.name} is elected: term {report.token}", report.at)
            case "split":
                again = (
                    " once more, whose ids are known" if len(self._terms) > 1 and self._station.channels.named else ""
                )
                self._tell(f"{player.name} has sent {report.count:,} messages{again}", report.at)
            case "refused":
                self._tell(f"{player.name} was refused: {report.why}", report.at)
            case "failed":
                player.state = "failed"
                self._tell(f"{player.name} failed: {report.why}", report.at)
        self._plot.follow(player, report)

    def _take_from_worker(self, player: Player, report: Report) -> None:
        player.chunk = report.chunk if report.what == "took" else 0
        if report.what == "took" and report.delivery > 1:
            self._redelivered[report.chunk] += 1
        elif report.what == "counted":
            player.counted += 1
        elif report.what == "tripped":
            told = f"{player.name} failed with message {report.chunk}, delivery {report.delivery}: {report.why}"
            self._tell(told, report.at)

    def _tell(self, text: str, at: float | None = None) -> None:
        since = (time.monotonic() if at is None else at) - self._began
        self._scene.news.append((since, text))
        self._display.tell(since, text)


def _cores() -> int:
    """Return how many processors this process and those that it starts may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lost(job: Job, counts: list[Count], letters: list[Dead]) -> list[str]:
    """Name the files that were neither counted, nor are among the dead letters."""
    counted = {count.path for count in counts}
    dead = {letter.chunk for letter in letters}
    waiting = (file.path for chunk in job.chunks if chunk.number not in dead for file in chunk.files)
    return [path for path in waiting if path not in counted]

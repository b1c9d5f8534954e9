"""The director: knows the plot. Kills the leader half-way, tries the dead leader's pen, compares the results.

It takes no part in the election. What it knows, it learns as any outsider would: from the store who leads, from the
ledger how far the work is, and from the instances' own reports when it happened.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import tenure
from tenure.demo.computation import Count, differences, merge
from tenure.demo.instance import Report, Station
from tenure.demo.job import Job
from tenure.demo.ledger import Ledger, Progress
from tenure.demo.scene import Display, Scene
from tenure.demo.stage import Actor, Failed, Stage
from tenure.demo.summary import Failover, Summary, Term

LOOK_EVERY = 0.1
"""Seconds between looks at ledger and store."""

STUCK_AFTER = 30.0
"""Seconds in which nobody leads, on top of a lease's length, after which the director gives up."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is played, and where."""

    job: Job
    place: Path  # the folder for everything that is written
    url: str | None  # None: an SQLite file in place
    instances: int
    ttl: float


async def perform(setting: Setting, display: Display) -> Summary:
    """Run the whole demonstration, and leave no process behind.

    Raises:
        Failed: There is nothing to sum up: the work did not end, or could not be compared.
        tenure.TenureError: The store can't be used.
    """
    url = setting.url or f"sqlite:///{setting.place / 'election.db'}"
    # On a store that others use as well, the name must be nobody else's.
    name = "demo" if setting.url is None else f"demo-{secrets.token_hex(4)}"
    path = setting.place / "ledger.db"
    async with AsyncExitStack() as stack:
        ledger = Ledger.create(path, setting.job)
        stack.callback(ledger.close)
        backend = await stack.enter_async_context(tenure.connect(url))
        election = backend.election(name, ttl=setting.ttl)
        await election.leader()  # better found out before anybody starts than by all of them
        director = Director(setting, ledger, election, Scene(setting.job, str(backend.url), name, setting.ttl), display)
        stack.push_async_callback(director.stage.end)
        await director.begin(Station(0, url, name, setting.ttl, str(path)))
        await director.watch()
        await director.stage.dismiss()
        return await director.judge()


class Director:
    """One run, from the first process to the verdict."""

    def __init__(
        self, setting: Setting, ledger: Ledger, election: tenure.Election, scene: Scene, display: Display
    ) -> None:
        self.stage: Stage = Stage(setting.place, self._take)
        self._setting = setting
        self._ledger = ledger
        self._election = election
        self._scene = scene
        self._display = display
        self._began = time.monotonic()
        self._finished = 0.0
        self._terms: list[Term] = []
        self._failover: Failover | None = None

    async def begin(self, station: Station) -> None:
        """Start the instances, and the plain run beside them."""
        job = self._setting.job
        self._tell(f"{len(job.files):,} files in {job.folder}")
        for number in range(1, self._setting.instances + 1):
            self._scene.players.append(
                await self.stage.start(Station(number, station.url, station.election, station.ttl, station.ledger))
            )
        await self.stage.start_plain(Path(station.ledger))
        self._tell(f"{self._setting.instances} instances are started, and a plain run to compare with")

    async def watch(self) -> None:
        """Look on until the work is finished; at half of it, kill the leader."""
        led_at = time.monotonic()
        while True:
            progress = self._ledger.progress()
            await self._look_at_the_store(progress)
            self._play(progress)
            self._display.draw(self._scene)
            if progress.finished:
                self._finished = time.monotonic()
                self._tell(f"all {progress.of:,} files are counted")
                return
            if self._scene.leader:
                led_at = time.monotonic()
            if time.monotonic() - led_at > STUCK_AFTER + self._setting.ttl:
                raise Failed(f"nobody led for {STUCK_AFTER + self._setting.ttl:g} s{self.stage.last_words()}")
            if all(actor.process.returncode is not None for actor in self.stage.actors):
                raise Failed(f"no instance is left{self.stage.last_words()}")
            await asyncio.sleep(LOOK_EVERY)

    async def judge(self) -> Summary:
        """Wait for the plain run, and compare."""
        self._play(self._ledger.progress())  # what the last reports may have made possible
        if not self.stage.is_plain_over:
            self._tell("the plain run is still counting")
        said = json.loads(await self.stage.plain())
        plain = [Count(**count) for count in said["counts"]]
        counts, total = self._ledger.counts(), self._ledger.outcome()
        assert total is not None
        await self._look_at_the_store(self._ledger.progress())
        self._display.draw(self._scene)
        return Summary(
            folder=self._setting.job.folder,
            url=self._scene.url,
            instances=self._setting.instances,
            ttl=self._setting.ttl,
            parsed=sum(1 for file in self._setting.job.files if file.parsed),
            total=total,
            plain=merge(plain),
            differing=differences(counts, plain),
            unreadable={count.path: count.error for count in counts if count.error},
            terms=self._terms,
            failover=self._failover,
            seconds=self._finished - self._began,
            plain_seconds=said["seconds"],
        )

    # --- looking ---

    async def _look_at_the_store(self, progress: Progress) -> None:
        scene = self._scene
        scene.done = progress.done
        scene.elapsed = time.monotonic() - self._began
        scene.plain = "done" if self.stage.is_plain_over else "counting"
        try:
            leader = await self._election.leader()
        except tenure.Unavailable:
            return  # neither yes nor no: what was seen last is the last that is known
        scene.leader = int(leader.metadata.get("instance", 0)) if leader else 0
        scene.lease_left = (leader.remaining or 0.0) if leader else 0.0
        scene.token = leader.token if leader else scene.token

    def _take(self, actor: Actor, report: Report) -> None:
        """Take an instance's report."""
        player, failover = actor.player, self._failover
        newer = failover is not None and report.token > failover.token
        if player.state == "killed":
            return  # said before it died, and read after
        match report.what:
            case "standing":
                player.state = "standing by"
            case "elected":
                player.state, player.token = "leading", report.token
                self._terms.append(Term(report.token, player.number))
                self._tell(f"{player.name} is elected: term {report.token}", report.at)
                if failover and newer and failover.elected is None:
                    failover.elected = report.at - failover.at
            case "wrote":
                if failover and newer and failover.wrote is None:
                    failover.wrote = report.at - failover.at
                    self._tell(f"{player.name} has written under term {report.token}, and goes on", report.at)
            case "refused":
                self._tell(f"{player.name} was refused: {report.why}", report.at)
            case "left":
                player.state = "standing by"
            case "failed":
                player.state = "failed"
                self._tell(f"{player.name} failed: {report.why}", report.at)

    # --- the plot ---

    def _play(self, progress: Progress) -> None:
        if self._failover is None and progress.done >= progress.of // 2 and not progress.finished:
            self._kill_the_leader(progress.done)
        elif self._failover and self._failover.wrote is not None and not self._failover.refusal:
            self._try_the_old_pen(self._failover)

    def _kill_the_leader(self, done: int) -> None:
        """Kill -9 the leader, if the store and the instance itself agree on who that is."""
        for actor in self.stage.actors:
            player = actor.player
            agreed = (player.number, player.token) == (self._scene.leader, self._scene.token)
            if agreed and player.state == "leading" and actor.process.returncode is None:
                self._failover = Failover(player.number, player.pid, player.token, done, time.monotonic())
                actor.kill()
                self._tell(f"kill -9 {player.pid}: {player.name}, the leader, is dead at {done:,} files")

    def _try_the_old_pen(self, failover: Failover) -> None:
        """Write under the dead leader's token, as it would do itself if it had only been slow."""
        left = self._ledger.remaining()[:1]
        try:
            self._ledger.record(failover.token, [Count(file.path, lines=-1) for file in left])
        except tenure.TermLost as refusal:
            failover.refusal = str(refusal)
            self._tell(f"a late write under term {failover.token} is refused")
        else:
            raise Failed(f"a write under the old term {failover.token} was accepted after a newer term had written")

    def _tell(self, text: str, at: float | None = None) -> None:
        since = (time.monotonic() if at is None else at) - self._began
        self._scene.news.append((since, text))
        self._display.tell(since, text)

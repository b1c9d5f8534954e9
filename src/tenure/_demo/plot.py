"""The plot: a worker is killed, a result comes twice, the leader is killed, and a dead leader's pen is tried.

Each act waits for its moment: so far the work must have come, and so long ago the act before it must be.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import tenure
from tenure._demo.job import Job
from tenure._demo.ledger import Ledger
from tenure._demo.messages import Result
from tenure._demo.report import Report
from tenure._demo.setup import Player, Scene
from tenure._demo.stage import Actor, Failed, Stage
from tenure._demo.summary import Failover, Strike

FEW = 8
"""With fewer chunks than these, a worker is killed also with the poisonous one in hand."""


class Plot:
    """What is done to the instances, and what came of it.

    Args:
        job: The work.
        poisonous: The number of the chunk that nobody can count.
        ledger: Where the work is written down.
        results: The queue in which a result comes twice.
        stage: Where the instances are.
        tell: Called with a line about each act, and with the moment at which it happened, if that is not now.
    """

    def __init__(
        self,
        job: Job,
        poisonous: int,
        ledger: Ledger,
        results: tenure.Queue,
        stage: Stage,
        tell: Callable[[str, float | None], None],
    ) -> None:
        self.strike: Strike | None = None
        self.failover: Failover | None = None
        self._spared = 0 if len(job.chunks) < FEW else poisonous
        self._ledger = ledger
        self._results = results
        self._stage = stage
        self._tell = tell
        self._halted: Actor | None = None
        self._is_repeated = False

    async def play(self, scene: Scene) -> None:
        """Do what its time has come for."""
        if not self._is_repeated:
            await self._bring_a_result_again()
        if self.strike is None:
            self._strike_a_worker(scene)
        elif self.failover is None:
            self._kill_the_leader(scene)
        else:
            self._try_the_old_pen(self.failover)

    def conclude(self) -> None:
        """Do what is left to do when all instances have ended, and all that they said is known."""
        if self.failover is not None:
            self._try_the_old_pen(self.failover)

    def follow(self, player: Player, report: Report) -> None:
        """Take note of what an instance reports, if it comes of an act of ours."""
        strike, failover = self.strike, self.failover
        if strike and report.what == "took" and report.chunk == strike.chunk and strike.again is None:
            strike.again = report.at - strike.at
            self._tell(f"{player.name} has message {strike.chunk} now, delivery {report.delivery}", report.at)
        if failover is None or report.token <= failover.token:
            return
        if report.what == "elected" and failover.elected is None:
            failover.elected = report.at - failover.at
        elif report.what == "wrote" and failover.wrote is None:
            failover.wrote = report.at - failover.at

    async def _bring_a_result_again(self) -> None:
        """Send a result once more, as its worker did: a queue may deliver what it delivered before."""
        result = self._ledger.result()
        if result is not None:
            self._is_repeated = True
            await self._results.send_batch([result.outgoing()])
            self._tell(f"the result of message {result.chunk} is delivered a second time", None)

    def _strike_a_worker(self, scene: Scene) -> None:
        """Kill -9 a worker that has a message in hand.

        It is halted first, and killed at the next look: what it said before has been heard by then, and if it had ended
        its message meanwhile, another one is chosen.
        """
        actor, self._halted = self._halted, None
        if actor is None:
            self._halt_a_worker(scene)
        elif self._has_in_hand(actor.player):
            player = actor.player
            self.strike = Strike(player.number, player.pid, player.chunk, time.monotonic())
            actor.kill()
            self._tell(f"kill -9 {player.pid}: {player.name}, a worker, is dead with message {player.chunk}", None)
        else:
            actor.go_on()

    def _halt_a_worker(self, scene: Scene) -> None:
        if 4 * scene.progress.settled < scene.progress.of:
            return
        for actor in self._stage.actors:
            standing_by = actor.player.state == "standing by" and actor.player.number != scene.leader
            if standing_by and actor.process.returncode is None and self._has_in_hand(actor.player):
                actor.halt()
                self._halted = actor
                return

    def _has_in_hand(self, player: Player) -> bool:
        return player.chunk not in (0, self._spared)

    def _kill_the_leader(self, scene: Scene) -> None:
        """Kill -9 the leader, if the store and the instance itself agree on who that is."""
        progress = scene.progress
        if 2 * progress.settled < progress.of or progress.finished:
            return
        for actor in self._stage.actors:
            player = actor.player
            agreed = (player.number, player.token) == (scene.leader, scene.token)
            if agreed and player.state == "leading" and actor.process.returncode is None:
                self.failover = Failover(player.number, player.pid, player.token, progress.settled, time.monotonic())
                actor.kill()
                done = f"{progress.settled:,} of {progress.of:,} messages"
                self._tell(f"kill -9 {player.pid}: {player.name}, the leader, is dead at {done}", None)

    def _try_the_old_pen(self, failover: Failover) -> None:
        """Write under the dead leader's token, as it would do itself if it had only been slow.

        The fence looks at the token alone, so it can be tried also when no result is left to be written.
        """
        if failover.wrote is None or failover.refusal:
            return
        left = self._ledger.remaining()[:1]
        late = [Result(one.number, failover.instance, ((-1, -1, -1, -1, "", ""),) * len(one.files)) for one in left]
        try:
            self._ledger.record(failover.token, late)
        except tenure.TermLost as refusal:
            failover.refusal = str(refusal)
            self._tell(f"a late write under term {failover.token} is refused", None)
        else:
            raise Failed(f"a write under the old term {failover.token} was accepted after a newer term had written")

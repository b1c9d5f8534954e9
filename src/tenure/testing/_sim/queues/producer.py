"""A simulated producer: sends in bursts, and sends what has an id again until it is acknowledged."""

from __future__ import annotations

from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.outgoing import Outgoing
from tenure.testing._sim.client import Client, Pending
from tenure.testing._sim.process import Process
from tenure.testing._sim.queues.oracle import SentMessage
from tenure.testing._sim.queues.plan import DELAY_MAX
from tenure.testing._sim.queues.protocols import ProducerRun
from tenure.testing._sim.queues.requests import Send
from tenure.testing._sim.world import SkewedClock


class Producer(Process):
    """One process that sends. Only its network is broken, as there is no machine in it to be tested."""

    def __init__(self, run: ProducerRun, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run.world, number, name, clock)
        self.run = run
        self.plan = run.plan
        self.waiting = 0
        """How many batches are under way, or to be sent again."""
        self._asked = 0
        self._written = self._batches = 0
        self._client = Client(self, run.server, self.plan.patience, self._on_answer)

    def begin(self) -> None:
        """Spread the bursts over the time of the run."""
        left = self.plan.messages // self.plan.producers
        while left > 0:
            count = min(left, self.plan.burst)
            left -= count
            self.world.after(0.95 * self.plan.seconds * self.world.rng.random(), self.send, count)

    def send(self, count: int) -> None:
        """Write and send a batch of so many messages."""
        is_named = self.world.rng.random() < self.plan.named
        self.waiting += 1
        self._batches += 1
        self._ask([self._write(is_named) for _ in range(count)])

    def _write(self, is_named: bool) -> Outgoing:
        rng, lock = self.world.rng, self.plan.timing.ttl
        self._written += 1
        label = f"{self.name}-{self._written}.{rng.choice(self.plan.natures)}"
        session = self._session()
        self.run.oracle.sending(SentMessage(label, is_named, session, self.number * 10_000 + self._batches))
        return Outgoing(
            label.encode(),
            id=label if is_named else None,
            delay=DELAY_MAX * lock * rng.random() if rng.random() < 0.1 else 0.0,
            expires_in=2.0 * lock * rng.random() + 0.01 if rng.random() < 0.05 else None,
            priority=rng.choice((0, 0, 0, 1, 9)),
            session=session,
        )

    def _session(self) -> str | None:
        """Draw of which session a message is; a run without sessions draws nothing."""
        sessions, rng = self.plan.sessions, self.world.rng
        if sessions is None or rng.random() >= sessions.share:
            return None
        return f"s{rng.randrange(sessions.names)}"

    def _ask(self, messages: list[Outgoing]) -> None:
        self._asked += 1
        self._client.ask(self._asked, Send(self._asked, messages))

    def _on_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        messages = asked.question.messages
        if not isinstance(answer, NoAnswer):
            self.waiting -= 1
            for message in messages:
                self.run.oracle.sent[message.body.decode()].acknowledged = True
        elif messages[0].id is not None:
            self.after(self.plan.timing.retry_every * self.world.rng.random(), self._ask, messages)
        else:  # it may have been kept or not, and sent again, it might be there twice
            self.waiting -= 1

"""The server in front of the simulated broker, which answers questions and sends hints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import EVERYTHING, QueueOptions
from tenure._queue.effects import Accept, Receive, ReceiveSession, Release, Renew, Settle
from tenure._queue.message import DeadMessage, SessionLock, Stats
from tenure.testing._sim.queues.broker import QUEUE, BrokerClock, SimulatedBroker, at_once
from tenure.testing._sim.queues.protocols import BrokerServerRun
from tenure.testing._sim.queues.requests import Send, WriteState
from tenure.testing._sim.queues.trace import describe
from tenure.testing._sim.server import Asker, Server
from tenure.testing._sim.world import SkewedClock


class BrokerServer(Server):
    """The process that answers for the broker, and sends hints out."""

    def __init__(self, run: BrokerServerRun, clock: SkewedClock, broker: type[SimulatedBroker]) -> None:
        plan = run.plan
        super().__init__(run.world, run.network, NoAnswer)
        self._run = run
        self._oracle = run.oracle
        self._sessions = run.session_oracle
        self._lock = plan.timing.ttl
        self._hinted: set[int] = set()
        self._waits_until = 0.0
        self.clock = BrokerClock(run.world, clock)
        self.broker = broker(run, self.clock, self.hint)
        changes: QueueOptions = {
            "lock": self._lock,
            "max_deliveries": plan.max_deliveries,
            "dedupe_window": 1_000.0 * self._lock,
            "max_locked": plan.limits.max_locked,
            "rate": plan.limits.rate,
            "session_rate": plan.limits.session_rate,
        }
        at_once(self.broker.declare(QUEUE, changes))

    # --- faults ---

    def wait(self, seconds: float) -> None:
        """Let some of what is asked within so many *seconds* wait for a row, and be carried out later."""
        self._waits_until = max(self._waits_until, self._world.now + seconds)

    def heal(self) -> None:
        """Come up, in order; what waits for a row is carried out when its time comes."""
        super().heal()
        self._waits_until = 0.0
        self.broker.heal()

    # --- questions ---

    def receive(self, client: Asker, ask: int, message: Any) -> None:
        """Take in *message*; or begin with it, and let it wait, also when its asker has given up."""
        if not (self.is_up and self._world.now < self._waits_until and self._world.rng.random() < 0.5):
            super().receive(client, ask, message)
            return
        begun_at, waits = self.clock.now(), self.network.far_delay()
        if self._world.now + waits > client.patience_ends(ask):
            client.unanswered(ask)
            self._world.after(waits, self._carry_out, client.process, message, begun_at)
        else:
            self._world.after(
                waits, lambda: self._answer(client, ask, self._carry_out(client.process, message, begun_at))
            )

    def may_repeat(self, message: Any) -> bool:
        """Return whether *message* may be carried out twice now: a claim in a session never is.

        The second one would lock a message of which its consumer gets no answer, and later ones would overtake it.
        """
        return super().may_repeat(message) and not isinstance(message, ReceiveSession)

    def perform(self, process: Any, message: Any) -> Any:
        """Let the broker do what *message* asks for."""
        return self._carry_out(process, message, self.clock.now())

    def _carry_out(self, process: Any, message: Any, begun_at: float) -> Any:
        self.broker.begun_at = begun_at
        why = self.broker.refusal(message)
        answer = NoAnswer(why) if why else self._done(process, message)
        if self._world.traced:
            self._world.log("broker", f"{process.name}: {describe(message)} → {describe(answer)}")
        return answer

    def _done(self, process: Any, message: Any) -> Any:
        now = self.clock.now()
        answer: Any
        match message:
            case Receive(limit=limit):
                answer = at_once(self.broker.receive(QUEUE, limit, self._lock))
                self._oracle.claimed(answer, self._lock, now)
                self._run.checkers.locked(process, answer.deliveries)
            case Settle(settlements=settlements):
                answer = at_once(self.broker.settle(settlements))
                self._oracle.settled(settlements, answer, now)
            case Renew(held=held):
                answer = self.broker.renew_others(held, self._lock)
                self._oracle.renewed(held, answer, self._lock, now)
                self._sessions.renewed(held, answer, self._lock, now)
                self._run.checkers.locked(process, held)
                self._run.session_checkers.locked(process, held)
            case Send(messages=messages):
                answer = at_once(self.broker.send(QUEUE, messages))
                self._oracle.kept(messages, answer, now)
            case _:
                return self._done_in_session(process, message, now)
        return answer

    def _done_in_session(self, process: Any, message: Any, now: float) -> Any:
        answer: Any
        match message:
            case Accept():
                answer = at_once(self.broker.accept(QUEUE, None, self._lock))
                self._sessions.accepted(answer, self._lock, now)
                if isinstance(answer, SessionLock):
                    self._run.session_checkers.locked(process, [answer])
            case ReceiveSession(session=held):
                answer = at_once(self.broker.receive_session(held, 1))
                self._sessions.claimed(held, answer, now)
            case Release(session=held):
                answer = at_once(self.broker.release(held))
                self._sessions.released(held, answer, now)
            case WriteState(held=held, state=state):
                answer = at_once(self.broker.write_state(held, state))
                self._sessions.state_written(held, state, answer, now)
        return answer

    # --- hints ---

    def hint(self) -> None:
        """Hint to the consumers that there may be messages; hints to one consumer that come together are one."""
        if not self._run.plan.settings.hints:
            return
        for consumer in self._run.consumers:
            number = consumer.number
            if number in self._hinted:
                continue
            delay = self.network.down(number)
            if delay is not None:
                self._hinted.add(number)
                self._world.after(delay, self._hint_arrives, number)

    def _hint_arrives(self, number: int) -> None:
        self._hinted.discard(number)
        self._run.consumers[number].hint()

    # --- looking on ---

    def stats(self) -> Stats:
        """Count what is there."""
        return at_once(self.broker.stats(QUEUE))

    def most_in_session(self) -> int:
        """Return how many messages the session with the most messages has."""
        return max((session.size for session in self.broker.sessions()), default=0)

    def state_of(self, session: str) -> bytes | None:
        """Return the state of a session that is free."""
        held = at_once(self.broker.accept(QUEUE, session, self._lock))
        return held.state if isinstance(held, SessionLock) else None

    def dead(self) -> Sequence[DeadMessage]:
        """Return the dead letters."""
        return at_once(self.broker.peek_dead(QUEUE, EVERYTHING, 10_000))

"""What must hold in every run, seen from outside and collected: nothing is raised or asserted inside a run.

===================  ==================================================================================================
``two leaders``      two candidates trusted a term at one true moment; judged exactly, whenever a belief begins or grows
``token order``      tokens rise with every acquisition, are used by one, and stay as they are when renewed
``stale claim``      the store extended or took back a claim that was not the newest, or already released
``shortened``        a lease ended earlier for having been renewed: by a question that was carried out late, say
``late release``     a lease was released while its work ran
``stale write``      the resource accepted a write of an older term after one of a newer term
``stale act``        a term's unfenced act, guarded by a look at the trust, came after one of a newer term
``trust``            trust grew by something else than a yes, counted from its question; or outlived a no
``stalled leader``   trust grew from a question asked while the work made no progress
``grace``            work was cancelled with less than ``grace`` left, though its candidate was awake
``overrun``          work ran on after its term, which was not reported
``orphan``           a grant arrived, and was neither used nor released
``identity``         a retried acquisition had another name, or a new one the name of an old one
``too soon``         a leader that stepped down asked again before the others could
``after stop``       a candidate that was stopped asked for the name
``left place``       a candidate that was stopped left a place in the queue of the store behind
``lost place``       a candidate that waits, undisturbed, did not keep its place in the queue
``unsettled``        a candidate that was stopped was still waiting, long after its last answer was due
``machine``          the machine raised, changed state illegally, or numbered a question twice
``user object``      an object of the user's broke its candidate: a hook that raises, say
``idle leader``      a candidate renewed a lease for which no work ran any more
``deaf leader``      a leader got a yes that asks it to resign, and leads on
``asleep``           a candidate that waits for something had no moment to wake at
``busy``             a candidate woke again and again
``no leader``        there was no leader, although the faults had been over for long enough
``unstable``         a leader lost its term, long after the faults were over
===================  ==================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tenure._election.effects import (
    Acquire,
    Answered,
    Effect,
    Emit,
    Input,
    Inspect,
    Release,
    Renew,
    Stop,
    Tick,
    Withdraw,
    Withdrawn,
    WorkEnded,
)
from tenure._election.machine import TRANSITIONS, State
from tenure._lease import Grant, Granted, Lost, Released
from tenure.events import Reason, TermEnded
from tenure.testing._sim.elections.node import Node, Work
from tenure.testing._sim.elections.plan import Plan
from tenure.testing._sim.elections.queued_store import QueuedStore
from tenure.testing._sim.elections.stores import Question
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR, World

TICKS_MAX = 15
"""How often a candidate may wake by itself within one ``retry_every``; the worst honest case needs about four."""

REACHABLE: dict[State, frozenset[State]] = {
    state: frozenset(
        {state} | set(first) | {second for one in first for second in TRANSITIONS[one]},
    )
    for state, first in TRANSITIONS.items()
}
"""Where one input may lead: at most two changes of state, the passing of time and then the input itself."""


class Checkers(Findings):
    """Watch one run. Each method takes in one thing that happened, and notes violations."""

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world)
        self.timing = plan.timing
        self.elections = 0
        self._beliefs: dict[Node, float] = {}
        self._acquired: dict[tuple[str, int], int] = {}
        self._by_token: dict[int, str] = {}
        self._newest: Grant | None = None
        self._newest_ended = False
        self._began: dict[int, Node] = {}
        self._newest_write = -1
        self._newest_act = -1

    # --- at the store ---

    def processed(self, node: Node, question: Question, answer: Any) -> None:
        """The store has answered *question* of *node*; the answer may never arrive."""
        match question, answer:
            case Acquire(), Granted(grant):
                self._given(grant)
            case Renew(_, asked), Granted(grant):
                if grant != asked:
                    self.violated("token order", f"{asked} was renewed as {grant}")
                self._still_newest(asked, "extended")
            case Release(_, asked), Released():
                self._still_newest(asked, "took back")
                self._newest_ended = True
                self._released(node, lambda grant: grant == asked)
            case Withdraw(_, holder), Withdrawn():
                self._released(node, lambda grant: grant.holder == holder)

    def counted(self, question: Question, answer: Any, longer: float) -> None:
        """The store has answered, and the lease ends so much later than it did before."""
        if isinstance(question, Renew) and isinstance(answer, Granted) and longer < -BLUR:
            self.violated("shortened", f"renewing {answer.grant} made its lease {-longer:.3f} s shorter")

    def _given(self, grant: Grant) -> None:
        claim = (grant.holder, grant.token)
        if claim in self._acquired:
            return
        if self._newest is not None and grant.token <= self._newest.token:
            self.violated("token order", f"{grant} was given after {self._newest}")
        self._acquired[claim] = len(self._acquired)
        self._newest, self._newest_ended = grant, False

    def _still_newest(self, grant: Grant, verb: str) -> None:
        if grant != self._newest:
            self.violated("stale claim", f"the store {verb} {grant}, the newest is {self._newest}")
        elif self._newest_ended:
            self.violated("stale claim", f"the store {verb} {grant}, which was released")

    def _released(self, node: Node, was_taken: Callable[[Grant], bool]) -> None:
        if node.alive and node.work is not None and was_taken(node.work.grant):
            self.violated("late release", f"{node.work.grant} was taken back while its work ran")

    def place_ended(self, nodes: Sequence[Node], holder: str) -> None:
        """The time of a place in the queue is over, long after the faults."""
        for node in nodes:
            if node.alive and node.machine.place == holder:
                self.violated("lost place", f"{holder} waits, and its place in the queue has ended")

    # --- belief ---

    def began(self, node: Node, work: Work) -> None:
        """*node* has begun the term of *work*."""
        self.elections += 1
        token = work.grant.token
        other = self._began.setdefault(token, node)
        if other is not node or (node.last_token is not None and token <= node.last_token):
            self.violated("token order", f"{node.name} began term {token}, as {other.name} had")
        if node.work is not None:
            self.violated("machine", f"{node.name} began term {token} during term {node.work.grant.token}")
        if work.until <= node.now():
            self.violated("trust", f"{node.name} began term {token} when it was over")
        self._believe(node, work)

    def trusts(self, node: Node, work: Work) -> None:
        """*node* trusts its term up to another moment than before."""
        self._believe(node, work)

    def left(self, node: Node) -> None:
        """*node* has no term any more."""
        self._beliefs.pop(node, None)

    def _believe(self, node: Node, work: Work) -> None:
        until = node.clock.moment(work.until)
        for other, theirs in self._beliefs.items():
            if other is not node and min(theirs, until) > self.world.now + BLUR:
                self.violated("two leaders", f"{node.name} trusts {work.grant} while {other.name} trusts its own term")
        self._beliefs[node] = until

    # --- effects of a term ---

    def wrote(self, grant: Grant) -> None:
        """The resource has accepted a write in the name of *grant*."""
        order = self._acquired.get((grant.holder, grant.token), -1)
        if order < self._newest_write:
            self.violated("stale write", f"a write of {grant} was accepted after one of a newer term")
        self._newest_write = max(order, self._newest_write)

    def acted(self, grant: Grant) -> None:
        """The holder of *grant* has looked at its trust and done something that no fence guards."""
        order = self._acquired.get((grant.holder, grant.token), -1)
        if order < self._newest_act:
            self.violated("stale act", f"{grant} acted after a newer term had")
        self._newest_act = max(order, self._newest_act)

    def cancelled(self, node: Node, work: Work, reason: Reason, *, slept: bool) -> None:
        """*node* has cancelled its work; *slept* if it was paused when it should have woken."""
        left = work.until - node.now()
        if reason in ("unanswered", "stalled") and not slept and left < self.timing.grace - BLUR:
            self.violated("grace", f"{node.name} gave its work {left:.3f} s of {self.timing.grace:g} s to stop")

    def work_ended(self, node: Node, work: Work, *, slept: bool) -> None:
        """The work of a term has ended."""
        if not slept and not work.overran and node.now() > work.stop_by + BLUR:
            self.violated("overrun", f"work of {work.grant} ran beyond its term, unreported")

    # --- the machine ---

    def raised(self, node: Node, event: Input, error: Exception) -> None:
        """The machine has raised."""
        self.violated("machine", f"{node.name} raised {error!r} on {event}")

    def handled(self, node: Node, event: Input, was: State, effects: Sequence[Effect]) -> None:
        """The machine of *node* has taken in *event*."""
        machine = node.machine
        if machine.state is not was and machine.state not in REACHABLE[was]:
            self.violated("machine", f"{node.name} went from {was.value} to {machine.state.value} on {event}")
        if effects:  # most ticks have none
            for effect in effects:
                if isinstance(effect, (Acquire, Inspect, Renew, Release, Withdraw)):
                    self._asked(node, effect)
            self._gave_way(node, effects)
        match event:
            case Answered(ask, answer):
                self._answered(node, ask, answer, effects)
            case Tick():
                self._ticked(node)
            case Stop() | WorkEnded(again=False):
                node.told_to_stop = True
                if node.run.closing and was in (State.STANDBY, State.CAMPAIGNING):
                    node.must_leave_queue = True
        if node.must_leave_queue and machine.is_finished:
            self._must_have_left_queue(node)
        work, now = node.work, node.now()
        if work is not None and not work.is_cancelled and now > work.until - self.timing.grace + BLUR:
            self.violated("grace", f"{node.name} has not cancelled its work, {work.until - now:.3f} s before the end")
        if node.work is None and machine.state is not State.STOPPED and machine.wake_at == math.inf:
            self.violated("asleep", f"{node.name} is {machine.state.value} and will never wake")

    def _must_have_left_queue(self, node: Node) -> None:
        # A request that the network repeated may have taken a place after its holder's term; that ends by itself.
        store, holder = node.run.store, node.last_holder
        if holder is None or node.holders[holder] or not isinstance(store, QueuedStore):
            return
        if store.place_of(holder) is not None:
            self.violated("left place", f"{node.name} has stopped, and the place of {holder} is in the queue")

    def broken(self, node: Node, error: BaseException) -> None:
        """An object of the user's has raised *error*, and it was not caught."""
        self.violated("user object", f"{node.name} was broken by {type(error).__name__}")

    def _gave_way(self, node: Node, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit(TermEnded(reason="asked" | "resigned")):
                    node.gave_way_at = node.now()

    def _asked(self, node: Node, question: Question) -> None:
        if question.request_id <= node.last_ask:
            self.violated("machine", f"{node.name} numbered a question {question.request_id} after {node.last_ask}")
        node.last_ask = question.request_id
        if isinstance(question, Acquire):
            if node.told_to_stop:
                self.violated("after stop", f"{node.name} asked for the name after it was stopped")
            if node.now() < node.gave_way_at + self.timing.retry_every:
                self.violated("too soon", f"{node.name} made way for others, and asked again at once")
            self._named(node, question.holder)
        elif isinstance(question, Renew) and (node.work is None or node.work.grant != question.grant):
            self.violated("idle leader", f"{node.name} renews {question.grant}, and no work runs under it")
        elif isinstance(question, Release) and node.work is not None and node.work.grant == question.grant:
            self.violated("late release", f"{node.name} tracked {question.grant} back while its work runs")

    def _named(self, node: Node, holder: str) -> None:
        known = node.holders
        if holder != node.last_holder:
            if node.last_holder is not None and not known.get(node.last_holder):
                self.violated("identity", f"{node.name} asked as {holder}; what became of {node.last_holder}?")
            if holder in known:
                self.violated("identity", f"{node.name} asked as {holder} again")
        elif holder in node.finished:
            self.violated("identity", f"{node.name} asked as {holder}, which has had its term")
        known.setdefault(holder, False)
        node.last_holder = holder

    def _answered(self, node: Node, ask: int, answer: object, effects: Sequence[Effect]) -> None:
        work = node.work
        match node.client.pending[ask].question, answer:
            case Acquire(_, holder), Granted(grant):
                node.holders[holder] = True
                used = node.machine.trusted_until > -math.inf and node.last_grant == grant
                handed_back = any(isinstance(each, Release) and each.grant == grant for each in effects)
                if not used and not handed_back and grant not in node.denied:
                    self.violated("orphan", f"{node.name} got {grant}, and neither used it nor handed it back")
            case Renew(_, grant), Granted(same, resign_asked=True) if same == grant == node.machine.grant:
                if node.machine.state in (State.LEADING, State.RENEWING):
                    self.violated("deaf leader", f"{node.name} was asked to resign {grant}, and leads on")
            case Renew(_, grant), Lost():
                node.denied.add(grant)
                if work is not None and work.grant == grant and work.until > node.now():
                    self.violated("trust", f"{node.name} trusts {grant} after the store said no")

    def grew(self, node: Node, work: Work, event: Input) -> None:
        """The trust of *node* has grown while its machine took in *event*."""
        answer = event.answer if isinstance(event, Answered) else None
        asked = node.client.pending[event.request_id] if isinstance(event, Answered) else None
        if asked is None or not isinstance(answer, Granted) or answer.grant != work.grant:
            self.violated("trust", f"{node.name} trusts {work.grant} for longer because of {event}")
            return
        if work.until > asked.at - answer.age + self.timing.window + BLUR:
            self.violated("trust", f"{node.name} trusts {work.grant} for longer than its question allows")
        if isinstance(asked.question, Renew) and node.stalled and asked.at > node.stalled_since + BLUR:
            self.violated("stalled leader", f"{node.name} renewed {work.grant} although its work stood still")
        if isinstance(asked.question, Renew) and asked.at > node.ill_since + BLUR:
            self.violated("stalled leader", f"{node.name} renewed {work.grant} although its health callback raised")

    def disagrees(self, node: Node, work: Work) -> None:
        """The term that the work holds and the machine differ about the trust."""
        self.violated("trust", f"{node.name}: work trusts {work.grant} otherwise than its machine")

    def _ticked(self, node: Node) -> None:
        now = node.now()
        if now - node.ticks_since > self.timing.retry_every:
            node.ticks_since, node.ticks = now, 0
        node.ticks += 1
        if node.ticks > TICKS_MAX:
            self.violated("busy", f"{node.name} woke {node.ticks} times within {self.timing.retry_every:g} s")
            node.die("ends, as it would never rest")

    # --- progress ---

    def no_leader(self, bound: float) -> None:
        """There is no leader, *bound* seconds after the faults were over."""
        self.violated("no leader", f"there is no leader, {bound:.1f} s after the faults were over")

    def unstable(self, what: str) -> None:
        """A leader did not last, though nothing disturbed it."""
        self.violated("unstable", what)

    def unsettled(self, node: Node) -> None:
        """*node* was stopped, has had its time, and still waits."""
        self.violated("unsettled", f"{node.name} is {node.machine.state.value} and still waits for an answer")

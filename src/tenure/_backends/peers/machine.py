"""A member, as a pure state machine: its votes, its questions to others, its part in each election.

House rules:

- No I/O, no clock, no loop, no random numbers of its own. ``handle(event, now)`` returns the effects;
  ``wake_at`` says when to call again with ``Tick``.
- To the election above it, a fleet is a store of leases: the same questions, the same three answers. So the promises of
  a lease (when to stop believing in it, never to release it while work runs) are decided in one place,
  :mod:`tenure._election.machine`, and not again here.
- An answer to a question counts only votes that were asked for after the question came in. A question that comes
  after a round began waits for the next round: its trust counts from its own moment, and the votes are older.
- A claim that was not won is withdrawn, so that its votes are free at once.

Its parts, each on top of the one before: :mod:`tenure._backends.peers.questions` (rounds), ``claims``, ``startup``.
"""

from __future__ import annotations

import math

from tenure._backends.peers import strategies
from tenure._backends.peers.bully import Bully
from tenure._backends.peers.events import (
    Acquire,
    Answer,
    AskToResign,
    Drop,
    Effect,
    Hint,
    Input,
    Inspect,
    Names,
    Outcome,
    Received,
    Release,
    Renew,
    Send,
    Tick,
)
from tenure._backends.peers.fleet import Fleet, Strategy
from tenure._backends.peers.lowest import Lowest
from tenure._backends.peers.quorum import NAMES_MAX
from tenure._backends.peers.ring import Ring
from tenure._backends.peers.rounds import held_by
from tenure._backends.peers.startup import Startup
from tenure._backends.peers.strategies import ElectionStrategy
from tenure._backends.peers.wire import (
    NUMBER_MAX,
    BullyElection,
    BullyOk,
    Claim,
    ElectionMessage,
    Heartbeat,
    InspectReply,
    InspectRequest,
    ListReply,
    ListRequest,
    Message,
    Question,
    Refusal,
    ReleaseReply,
    ReleaseRequest,
    ResignReply,
    ResignRequest,
    RingElected,
    RingElection,
    StartupReply,
    StartupRequest,
    Vote,
    page,
)
from tenure._jitter import Rng
from tenure.errors import ConfigError

__all__ = [
    "STRATEGIES",
    "Acquire",
    "Answer",
    "AskToResign",
    "Drop",
    "Effect",
    "Hint",
    "Input",
    "Inspect",
    "Machine",
    "Names",
    "Outcome",
    "Received",
    "Release",
    "Renew",
    "Send",
    "Tick",
]

STRATEGIES: dict[Strategy, type[ElectionStrategy]] = {"lowest": Lowest, "bully": Bully, "ring": Ring}


class Machine(Startup):
    """One member of a fleet; where ``fleet.me`` is None, a client, which only asks the members.

    Args:
        fleet: The fleet and its rules.
        rng: Source of jitter.
        floor: The wall clock in ms: this member votes for no lower token.
        nonce: A number that no process before this one has used: its rounds count from it.
        now: The present moment.
    """

    def __init__(self, fleet: Fleet, rng: Rng, *, floor: int, nonce: int, now: float) -> None:
        if not 0 <= floor < NUMBER_MAX // 4 or not 0 <= nonce < NUMBER_MAX // 4:
            raise ConfigError(f"the wall clock ({floor} ms) is out of all bounds; set it")
        super().__init__(fleet, rng, floor=floor, nonce=nonce, now=now)
        self._elections: dict[str, ElectionStrategy] = {}
        self._held_back: dict[str, list[tuple[int, RingElection]]] = {}  # while a dead leader has the vote
        if fleet.me is not None:
            self._timers.set(self.liveness.beat_at, "heartbeat")
            if not self.voter.awake:
                self._timers.set(now, "startup")

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``; infinity for never."""
        return self._timers.wake_at

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Process *event* at *now* and return the effects, to be performed in this order."""
        effects: list[Effect] = []
        match event:
            case Received(sender, message):
                self._receive(sender, message, now, effects)
            case Tick():
                self._tick(now, effects)
            case Acquire():
                self._acquire(event, now, effects)
            case Renew(ask, grant, ttl):
                self._renew(ask, grant, ttl, now, effects)
            case Release(ask, grant):
                self._release(ask, grant, now, effects)
            case Inspect(ask, name):
                self._inspect(ask, name, now, effects)
            case Names(ask):
                self._list(ask, now, effects)
            case AskToResign(ask, name):
                self._ask_to_resign(ask, name, now, effects)
            case Drop(ask):
                self._drop(ask, now, effects)
        return effects

    # --- time ---

    def _tick(self, now: float, effects: list[Effect]) -> None:
        for kind, of in self._timers.due(now):
            match kind, of:
                case "heartbeat", _:
                    self._beat(now, effects)
                case "startup", _:
                    self._ask_others(now, effects)
                case "round", int(number):
                    self._round_due(number, now, effects)
                case "candidate", str(name):
                    self._candidates_due(name, now, effects)
                case "election", str(name) if name in self._elections:
                    self._advance(name, strategies.Tick(), now, effects)
                case "held back", str(name):
                    self._pass_held_back(name, now, effects)
                case "turn", str(name):
                    self._turn_due(name, now, effects)
                case "suspect", str(name):
                    self._suspect(name, now, effects)

    def _beat(self, now: float, effects: list[Effect]) -> None:
        self.voter.bound(now)
        self.liveness.beat(now)
        self._timers.set(self.liveness.beat_at, "heartbeat")
        effects.extend(Send(other, Heartbeat(self.voter.newest)) for other in self.fleet.others)

    # --- messages ---

    def _receive(self, sender: int, message: Message, now: float, effects: list[Effect]) -> None:
        if sender >= 0:
            if self.liveness.heard(sender, now) and len(self.liveness.alive(now)) == self.fleet.needed:
                self._wake_waiting(now, effects)
            if self.voter.awake and not self.voter.knows(sender) and not isinstance(message, StartupReply):
                effects.append(Send(sender, StartupRequest(self._startup_round)))
        elif not isinstance(message, (InspectRequest, ListRequest, ResignRequest)):
            return
        match message:
            case Heartbeat(newest):
                self.voter.learn(newest)
            case StartupRequest(number):
                self._answer_startup(sender, number, now, effects)
            case StartupReply():
                self._take_startup_reply(sender, message, now, effects)
            case Claim() | ReleaseRequest() | InspectRequest() | ListRequest() | ResignRequest():
                if self.fleet.me is not None:
                    self._reply(sender, message, now, effects)
            case Vote() | Refusal() | ReleaseReply() | InspectReply() | ListReply() | ResignReply():
                self._count(sender, message, now, effects)
            case BullyElection() | BullyOk() | RingElection() | RingElected():
                self._receive_election(sender, message, now, effects)

    def _reply(self, sender: int, question: Question, now: float, effects: list[Effect]) -> None:
        match question:
            case Claim():
                self._vote(sender, question, now, effects)
            case ReleaseRequest(number, name, holder, token, won):
                if self.voter.free(name, sender, holder, token, won=won):
                    effects.append(Hint(name))
                effects.append(Send(sender, ReleaseReply(number)))
            case ListRequest(number, after):
                names = [name for name in self.voter.names() if name > after]
                effects.append(Send(sender, ListReply(number, page(names))))
            case InspectRequest(number, name) if self.voter.awake:
                effects.append(Send(sender, self._inspect_reply(number, name, now)))
            case ResignRequest(number, name) if self.voter.awake:
                effects.append(Send(sender, ResignReply(number, self._note_resign_request(name, now, effects))))

    def _vote(self, sender: int, claim: Claim, now: float, effects: list[Effect]) -> None:
        before = self.voter.promise(claim.name, now)
        known = before.token if before is not None else None
        vote = self.voter.vote(sender, claim, now)
        if vote is None:
            return
        effects.append(Send(sender, vote))
        if isinstance(vote, Vote) and known != claim.token:
            self._follow(claim.name, now, effects)

    def _follow(self, name: str, now: float, effects: list[Effect]) -> None:
        """Notify the candidates here, after a vote for another member's claim."""
        promise = self.voter.promise(name, now)
        effects.append(Hint(name))
        if promise is not None:
            self._answer_candidates(name, held_by(name, promise.standing(now)), now, effects)
            if self.fleet.quorum == "none":
                self._timers.set(self.liveness.dies_at(promise.member), "suspect", name)

    def _suspect(self, name: str, now: float, effects: list[Effect]) -> None:
        """Without a quorum, a leader whose heartbeats have stopped no longer leads."""
        record = self.voter.last(name)
        if record is None or record.member == self.fleet.me or now >= record.until:
            return
        if self.liveness.is_alive(record.member, now):
            self._timers.set(max(now, self.liveness.dies_at(record.member)) + 1e-6, "suspect", name)
        else:
            effects.append(Hint(name))

    # --- elections ---

    def _receive_election(self, sender: int, message: ElectionMessage, now: float, effects: list[Effect]) -> None:
        name = message.name
        if name not in self._elections and len(self._elections) >= NAMES_MAX:
            return
        if isinstance(message, RingElection) and self._hold_back(sender, message, now):
            return
        wanted = False
        if now < self._waiting.get(name, -math.inf) and self.voter.awake and self.voter.promise(name, now) is None:
            # A candidate here waits, and learns only now that there is an election. It will ask; count that as done.
            effects.append(Hint(name))
            wanted = True
        self._advance(name, strategies.Received(sender, message, wanted), now, effects)

    def _hold_back(self, sender: int, message: RingElection, now: float) -> bool:
        """Hold *message* back while a dead leader has this member's vote for a moment more; return whether it is held.

        Promises to one leader end a little apart. If the message went on at once, its owner would claim before this
        member may vote, in vain, and all would begin again.
        """
        promise = self.voter.promise(message.name, now)
        if promise is None or self.fleet.quorum == "none" or self.liveness.is_alive(promise.member, now):
            return False
        if promise.until - now > self.fleet.answer_within:
            return False
        held_back = self._held_back.setdefault(message.name, [])
        if all(each.candidate != message.candidate for _, each in held_back):
            held_back.append((sender, message))
            self._timers.set(promise.until, "held back", message.name)
        return True

    def _pass_held_back(self, name: str, now: float, effects: list[Effect]) -> None:
        for sender, message in self._held_back.pop(name, ()):
            self._receive_election(sender, message, now, effects)

    def _advance(self, name: str, event: strategies.Input, now: float, effects: list[Effect]) -> None:
        """Give *event* to the election for *name*, and perform its effects."""
        election = self._elections.get(name)
        if election is None:
            kind = STRATEGIES[self.fleet.strategy]
            election = self._elections[name] = kind(name, self.fleet, self.liveness, self._rng)
        before = election.wake_at
        todo = election.handle(event, now)
        if election.wake_at != before:
            self._timers.set(election.wake_at, "election", name)
        for effect in todo:
            match effect:
                case strategies.Send(to, message):
                    effects.append(Send(to, message))
                case strategies.WakeCandidate() if self.voter.promise(name, now) is None:
                    effects.append(Hint(name))
                case strategies.ClaimNow():
                    self._claim(name, now, effects)

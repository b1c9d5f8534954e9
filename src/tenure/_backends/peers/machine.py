"""A member, as a pure state machine: its promises to others, its questions to them, its part in each election.

House rules:

- No I/O, no clock, no loop, no randomness of its own. ``handle(event, now)`` returns what is to be done; ``wake_at``
  says
  when to call again with ``Tick``.
- To the election above it, a fleet is a store of leases: the same questions, the same three answers. So everything that
  is promised of a lease (when to stop believing in it, never to hand it back while work runs) is decided in one place,
  :mod:`tenure._election.machine`, and not once more here.
- An answer to a question counts only votes that were asked for after the question came in. Who asks later than a round
  began waits for the next round: it would count its trust from its own question, and the votes are older.
- A claim that was not won is taken back, so that who vouched for it is free at once.

A claim from beginning to end, in a fleet of three::

    a: acquire ─▶ race: whose turn? ─▶ Stake ─▶ Claim ─▶ b, c      a vouches for itself
                                                b: Vouch ─▶ a      two of three: Granted
                                                c: Vouch ─▶ a      (counted, changes nothing)
    a: renew ──────────────────────────────────▶ Claim ─▶ b, c     … every renew_every
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

from tenure._backends.peers import strategies
from tenure._backends.peers.bully import Bully
from tenure._backends.peers.fleet import Fleet, Strategy
from tenure._backends.peers.liveness import Liveness
from tenure._backends.peers.lowest import Lowest
from tenure._backends.peers.quorum import NAMES_MAX, Promise, Voter
from tenure._backends.peers.ring import Ring
from tenure._backends.peers.rounds import ClaimRound, InspectRound, ListRound, ReleaseRound, ResignRound, Round, held_by
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
    Reply,
    ResignReply,
    ResignRequest,
    RingElected,
    RingElection,
    StandingPromise,
    StartupReply,
    StartupRequest,
    Vote,
    page,
)
from tenure._jitter import Rng
from tenure._lease import Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure.errors import ConfigError

STRATEGIES: dict[Strategy, type[ElectionStrategy]] = {"lowest": Lowest, "bully": Bully, "ring": Ring}

HOPELESS_AFTER = 0.1
"""Shares of a lease after which it is said why nobody can be elected now: soon enough to be heard by who asks."""

HIGHER_TRIES = 3
"""How often a claim that was refused for its token is made again at once with a higher one."""


# --- what comes in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a member; a negative *sender* is somebody who only looks on."""

    sender: int
    message: Message


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lead *name* as *holder*. Each question has a number of its own, which its answer carries."""

    ask: int
    name: str
    holder: str
    ttl: float
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Renew:
    """Go on leading."""

    ask: int
    grant: Grant
    ttl: float


@dataclass(frozen=True, slots=True)
class Release:
    """Lead no more."""

    ask: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Inspect:
    """Who leads *name*?"""

    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class Names:
    """Which names were ever claimed?"""

    ask: int


@dataclass(frozen=True, slots=True)
class AskToResign:
    """Ask whoever leads *name* to step down."""

    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits any more for the answer to question *ask*."""

    ask: int


Input = Tick | Received | Acquire | Renew | Release | Inspect | Names | AskToResign | Drop


# --- what goes out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send *message* to a member, or to somebody who looks on; it may be lost."""

    to: int
    message: Message


Outcome = Granted | Lost | Released | HeldBy | Vacant | NoAnswer | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to question *ask*. Each gets one."""

    ask: int
    answer: Outcome


@dataclass(frozen=True, slots=True)
class Hint:
    """Something may have changed for *name*: tell whoever waits."""

    name: str


Effect = Send | Answer | Hint


# --- what is remembered ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Candidate:
    """Somebody here who wants a name, until it is answered."""

    ask: int
    holder: str
    ttl: float
    metadata: Metadata
    hopeless_at: float
    until: float
    perhaps: StandingPromise | None = None  # who may lead, as far as a refused claim has told


@dataclass(order=True, slots=True)
class _Timer:
    at: float
    count: int
    kind: str = field(compare=False)
    of: str | int = field(compare=False, default=0)


class Machine:
    """One member of a fleet, or, where ``fleet.me`` is None, somebody who asks its members.

    Args:
        fleet: The fleet and its rules.
        dice: Source of jitter.
        floor: The wall clock in ms: no token that we vouch for is lower.
        nonce: A number that no process before us has used: our rounds count from it.
        now: The present moment.
    """

    def __init__(self, fleet: Fleet, rng: Rng, *, floor: int, nonce: int, now: float) -> None:
        if not 0 <= floor < NUMBER_MAX // 4 or not 0 <= nonce < NUMBER_MAX // 4:
            raise ConfigError(f"the wall clock ({floor} ms) is out of all bounds; set it")
        self.fleet = fleet
        self.liveness = Liveness(fleet, rng, now)
        self.voter = Voter(fleet, floor, self.liveness.is_alive, now)
        self._rng = rng
        self._round = self._learning = nonce
        self._rounds: dict[int, Round] = {}
        self._candidates: dict[str, list[_Candidate]] = {}
        self._wanted: dict[str, float] = {}  # until when a candidate that had to stand by is taken to stand by still
        self._turns: dict[str, float] = {}  # until when a candidate that asks for a name may claim it at once
        self._kept: dict[str, list[tuple[int, RingElection]]] = {}  # messages held while a dead leader has our vote
        self._claims: dict[str, int] = {}  # the round of the claim that is under way for a name
        self._higher: dict[str, int] = {}  # how often it was made again for its token
        self._elections: dict[str, ElectionStrategy] = {}
        self._clear: set[int] = set()
        self._timers: list[_Timer] = []
        self._timer_count = 0
        if fleet.me is not None:
            self._at(self.liveness.beat_at, "beat")
            if not self.voter.awake:
                self._at(now, "learn")

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``; infinity for never."""
        return self._timers[0].at if self._timers else math.inf

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
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

    def _at(self, when: float, kind: str, of: str | int = 0) -> None:
        if when < math.inf:
            self._timer_count += 1
            heapq.heappush(self._timers, _Timer(when, self._timer_count, kind, of))

    def _tick(self, now: float, effects: list[Effect]) -> None:
        while self._timers and self._timers[0].at <= now:
            timer = heapq.heappop(self._timers)
            match timer.kind, timer.of:
                case "beat", _:
                    self._beat(now, effects)
                case "learn", _:
                    self._ask_others(now, effects)
                case "round", int(number):
                    self._round_due(number, now, effects)
                case "candidate", str(name):
                    self._candidates_due(name, now, effects)
                case "election", str(name) if name in self._elections:
                    self._advance(name, strategies.Tick(), now, effects)
                case "kept", str(name):
                    self._pass_kept(name, now, effects)
                case "turn", str(name):
                    self._turn_due(name, now, effects)
                case "suspect", str(name):
                    self._suspect(name, now, effects)

    def _beat(self, now: float, effects: list[Effect]) -> None:
        self.voter.bound(now)
        self.liveness.beat(now)
        self._at(self.liveness.beat_at, "beat")
        effects.extend(Send(other, Heartbeat(self.voter.newest)) for other in self.fleet.others)

    # --- the silence after the start ---

    def _ask_others(self, now: float, effects: list[Effect]) -> None:
        if self.voter.awake:
            return
        if now >= self.voter.silent_until:
            self.voter.wake_in_time(now)
            self._begin_voting(now, effects)
            return
        silent = [other for other in self.fleet.others if other not in self._clear]
        effects.extend(Send(other, StartupRequest(self._learning)) for other in silent)
        self._at(min(now + self.fleet.answer_within, self.voter.silent_until), "learn")

    def _answer_startup(self, sender: int, number: int, now: float, effects: list[Effect]) -> None:
        claiming = any(isinstance(each, ClaimRound) for each in self._rounds.values())
        clear = not claiming and not self.voter.leads(now)
        effects.append(Send(sender, StartupReply(number, clear, self.voter.newest, self.voter.bound(now))))

    def _take_startup_reply(self, sender: int, message: StartupReply, now: float, effects: list[Effect]) -> None:
        if message.round != self._learning:
            return
        self.voter.note_reply(sender, message.newest, message.bound, now)
        if message.clear and not self.voter.awake:
            self._clear.add(sender)
            if self._clear.issuperset(self.fleet.others):
                self.voter.wake()
                self._begin_voting(now, effects)

    def _begin_voting(self, now: float, effects: list[Effect]) -> None:
        for name in list(self._candidates):
            self._advance(name, strategies.Campaign(), now, effects)
        self._hope(now, effects)

    # --- what others say ---

    def _receive(self, sender: int, message: Message, now: float, effects: list[Effect]) -> None:
        if sender >= 0:
            if self.liveness.heard(sender, now) and len(self.liveness.alive(now)) == self.fleet.needed:
                self._hope(now, effects)
            if self.voter.awake and not self.voter.knows(sender) and not isinstance(message, StartupReply):
                effects.append(Send(sender, StartupRequest(self._learning)))
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
                effects.append(Send(sender, self._seen(number, name, now)))
            case ResignRequest(number, name) if self.voter.awake:
                effects.append(Send(sender, ResignReply(number, self._note_request(name, now, effects))))

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
        """We vouch for somebody else now: whoever wants the name here hears of it."""
        promise = self.voter.promise(name, now)
        effects.append(Hint(name))
        if promise is not None:
            self._answer_all(name, held_by(name, promise.held(now)), now, effects)
            if self.fleet.quorum == "none":
                self._at(self.liveness.dies_at(promise.member), "suspect", name)

    def _suspect(self, name: str, now: float, effects: list[Effect]) -> None:
        """Without a quorum, a leader that fell silent leads no more."""
        record = self.voter.last(name)
        if record is None or record.member == self.fleet.me or now >= record.until:
            return
        if self.liveness.is_alive(record.member, now):
            self._at(max(now, self.liveness.dies_at(record.member)) + 1e-6, "suspect", name)
        else:
            effects.append(Hint(name))

    def _seen(self, number: int, name: str, now: float) -> InspectReply:
        promise = self.voter.promise(name, now)
        return InspectReply(number, self.voter.token(name), promise.held(now) if promise is not None else None)

    def _note_request(self, name: str, now: float, effects: list[Effect]) -> bool:
        led = self.voter.ask_to_resign(name, now)
        if led:
            effects.append(Hint(name))
        return led

    # --- races ---

    def _receive_election(self, sender: int, message: ElectionMessage, now: float, effects: list[Effect]) -> None:
        name = message.name
        if name not in self._elections and len(self._elections) >= NAMES_MAX:
            return
        if isinstance(message, RingElection) and self._keep(sender, message, now):
            return
        wanted = False
        if now < self._wanted.get(name, -math.inf) and self.voter.awake and self.voter.promise(name, now) is None:
            # A candidate here stands by, and learns only now that there is an election. Its asking is as good as done.
            effects.append(Hint(name))
            wanted = True
        self._advance(name, strategies.Received(sender, message, wanted), now, effects)

    def _keep(self, sender: int, message: RingElection, now: float) -> bool:
        """Keep *message* while we are bound, for a moment more, to a leader that is dead; return whether it is kept.

        Promises to one leader end a little apart. If the message went on at once, its owner would claim before we may
        vouch, in vain, and all would begin anew.
        """
        promise = self.voter.promise(message.name, now)
        if promise is None or self.fleet.quorum == "none" or self.liveness.is_alive(promise.member, now):
            return False
        if promise.until - now > self.fleet.answer_within:
            return False
        kept = self._kept.setdefault(message.name, [])
        if all(each.candidate != message.candidate for _, each in kept):
            kept.append((sender, message))
            self._at(promise.until, "kept", message.name)
        return True

    def _pass_kept(self, name: str, now: float, effects: list[Effect]) -> None:
        for sender, message in self._kept.pop(name, ()):
            self._receive_election(sender, message, now, effects)

    def _advance(self, name: str, event: strategies.Input, now: float, effects: list[Effect]) -> None:
        """Give *event* to the race for *name*, and do what it says."""
        runner = self._elections.get(name)
        if runner is None:
            kind = STRATEGIES[self.fleet.strategy]
            runner = self._elections[name] = kind(name, self.fleet, self.liveness, self._rng)
        before = runner.wake_at
        todo = runner.handle(event, now)
        if runner.wake_at != before:
            self._at(runner.wake_at, "election", name)
        for effect in todo:
            match effect:
                case strategies.Send(to, message):
                    effects.append(Send(to, message))
                case strategies.WakeCandidate() if self.voter.promise(name, now) is None:
                    effects.append(Hint(name))
                case strategies.ClaimNow():
                    self._stake(name, now, effects)

    # --- claims ---

    def _acquire(self, event: Acquire, now: float, effects: list[Effect]) -> None:
        name, promise = event.name, self.voter.promise(event.name, now)
        if promise is not None and name not in self._claims:
            if (promise.member, promise.holder) == (self.fleet.me, event.holder):
                # Its answer was lost, or came too late: ask all once more, under the same token.
                claim = self._renewal(promise, name, event.ttl)
                if self.fleet.quorum == "majority":
                    # Nobody has acted on it, so others may have led meanwhile: it may be outdated, as a new one may.
                    claim = replace(claim, renewal=False)
                lost = NoAnswer("the claim was lost while its answer was asked for once more")
                self._begin(ClaimRound(self.fleet, claim, [event.ask], lost, now, holds=True), now, effects)
            else:
                self._want(name, now)
                effects.append(Answer(event.ask, held_by(name, promise.held(now))))
            return
        if not self.voter.remembers(name):
            effects.append(Answer(event.ask, _no_room()))
            return
        until = now + self.fleet.election_lasts
        hopeless_at = min(until, now + HOPELESS_AFTER * event.ttl)
        candidate = _Candidate(event.ask, event.holder, event.ttl, event.metadata, hopeless_at, until)
        self._wanted.pop(name, None)
        self._candidates.setdefault(name, []).append(candidate)
        self._at(hopeless_at, "candidate", name)
        self._at(until, "candidate", name)
        if not self.voter.awake:
            return
        turn_ends = self._turns.pop(name, None)
        if turn_ends is not None and now < turn_ends:
            self._stake(name, now, effects)
            return
        if turn_ends is not None:  # it came a hair too late, and the race still takes the turn for taken
            self._advance(name, strategies.Withdraw(), now, effects)
        self._advance(name, strategies.Campaign(), now, effects)

    def _want(self, name: str, now: float) -> None:
        """A candidate here stands by for *name*: it asks again when it is free, but may be the last to see it."""
        if name in self._wanted or len(self._wanted) < NAMES_MAX:
            self._wanted[name] = now + 2 * self.fleet.ttl_max

    def _candidates_due(self, name: str, now: float, effects: list[Effect]) -> None:
        waiting = self._candidates.get(name, [])
        hopeless = self._is_hopeless(now)
        for candidate in [each for each in waiting if now >= (each.hopeless_at if hopeless else each.until)]:
            waiting.remove(candidate)
            effects.append(Answer(candidate.ask, self._unelected(name, candidate, now)))
            self._want(name, now)
        self._stand_back_alone(name, now, effects)

    def _drop(self, ask: int, now: float, effects: list[Effect]) -> None:
        for name, waiting in list(self._candidates.items()):
            waiting[:] = [each for each in waiting if each.ask != ask]
            self._stand_back_alone(name, now, effects)
        for asked in self._rounds.values():
            if not isinstance(asked, ClaimRound) and ask in asked.asks:
                asked.asks.remove(ask)

    def _stand_back_alone(self, name: str, now: float, effects: list[Effect]) -> None:
        """If nobody here wants *name* any more, claim it no more."""
        if name in self._candidates and not self._candidates[name]:
            del self._candidates[name]
            if name in self._claims:
                self._take_back(name, now, effects)
            self._advance(name, strategies.Withdraw(), now, effects)

    def _unelected(self, name: str, candidate: _Candidate, now: float) -> HeldBy | NoAnswer:
        if candidate.perhaps is not None:
            return held_by(name, candidate.perhaps, certain=False)
        if not self.voter.awake:
            silence = self.voter.silent_until - now
            return NoAnswer(f"started a moment ago, and silent for {silence:.1f} s more or until all others are heard")
        alive = len(self.liveness.alive(now))
        return NoAnswer(
            f"nobody was elected; {alive} of {self.fleet.size} members live, {self.fleet.needed} are needed"
        )

    def _stake(self, name: str, now: float, effects: list[Effect]) -> None:
        """Claim *name* for the first applicant."""
        waiting = self._candidates.get(name)
        if not waiting:
            if self._wanted.pop(name, -math.inf) > now:  # it was told a moment ago; the race was faster
                self._turns[name] = now + self.fleet.answer_within
                self._at(self._turns[name], "turn", name)
                effects.append(Hint(name))
            else:
                self._advance(name, strategies.Withdraw(), now, effects)
            return
        if name in self._claims:
            return
        promise = self.voter.promise(name, now)
        if promise is not None:
            self._answer_all(name, held_by(name, promise.held(now)), now, effects)
            return
        if not self.voter.remembers(name):  # others have taken the last places meanwhile
            effects.extend(Answer(each.ask, _no_room()) for each in waiting)
            waiting.clear()
            self._stand_back_alone(name, now, effects)
            return
        first = waiting[0]
        asks = [each.ask for each in waiting if each.holder == first.holder]
        claim = Claim(self._next_round(), name, first.holder, self.voter.newest + 1, first.ttl, False, first.metadata)
        self._claims[name] = claim.round
        self._begin(ClaimRound(self.fleet, claim, asks, NoAnswer("not elected"), now, holds=False), now, effects)

    def _is_hopeless(self, now: float) -> bool:
        """Return whether nobody can be elected now, as far as we know."""
        return not self.voter.awake or len(self.liveness.alive(now)) < self.fleet.needed

    def _hope(self, now: float, effects: list[Effect]) -> None:
        """Somebody can be elected from now on: tell whoever stood in vain."""
        wanted = [name for name, until in self._wanted.items() if now < until]
        effects.extend(Hint(name) for name in wanted if self.voter.promise(name, now) is None)

    def _turn_due(self, name: str, now: float, effects: list[Effect]) -> None:
        if self._turns.get(name, math.inf) <= now:
            del self._turns[name]
            if name not in self._candidates:
                self._advance(name, strategies.Withdraw(), now, effects)

    def _renewal(self, promise: Promise, name: str, ttl: float) -> Claim:
        # Members that have not heard of the claim hear of it now, so it tells everything once more.
        return Claim(self._next_round(), name, promise.holder, promise.token, ttl, True, promise.metadata)

    def _evaluate_claim(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        if voting.is_settled:
            return
        alive = self.liveness.alive(now)
        if voting.is_won(alive):
            voting.is_settled = True
            self._win(voting, now, effects)
        elif voting.is_refused(alive):
            voting.is_settled = True
            self._lose(voting, now, effects)

    def _win(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        claim = voting.question
        grant = Grant(claim.name, claim.holder, claim.token)
        granted = Granted(grant, voting.poll.resign_asked)
        if voting.holds:
            effects.extend(Answer(ask, granted) for ask in voting.asks)
            return
        del self._claims[claim.name]
        self._higher.pop(claim.name, None)
        effects.append(Hint(claim.name))
        waiting = self._candidates.pop(claim.name, [])
        self._advance(claim.name, strategies.LeaderKnown(), now, effects)
        for each in waiting:
            if each.ask in voting.asks:
                effects.append(Answer(each.ask, granted))
            else:  # it asked after the round began, and the votes of this round are too old for it
                self._acquire(Acquire(each.ask, claim.name, each.holder, each.ttl, each.metadata), now, effects)

    def _lose(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        claim = voting.question
        if voting.holds:
            self._rounds.pop(claim.round, None)
            effects.extend(Answer(ask, voting.if_lost) for ask in voting.asks)
            if not claim.renewal:
                self.voter.learn(voting.poll.newest)
                self._let_go(claim, [], now, effects)
            return
        self._take_back(claim.name, now, effects)
        winner = voting.winner()
        self.voter.learn(voting.poll.newest)
        if winner is not None:
            self._answer_all(claim.name, held_by(claim.name, winner), now, effects)
            return
        for candidate in self._candidates.get(claim.name, ()):
            candidate.perhaps = voting.poll.held
        tries = self._higher.get(claim.name, 0)
        if voting.poll.held is None and voting.poll.newest >= claim.token and tries < HIGHER_TRIES:
            self._higher[claim.name] = tries + 1
            self._stake(claim.name, now, effects)
            return
        self._higher.pop(claim.name, None)
        wait = voting.in_vain_for(self.liveness.alive(now))
        self._advance(claim.name, strategies.ClaimFailed(wait), now, effects)

    def _take_back(self, name: str, now: float, effects: list[Effect]) -> None:
        """Claim *name* no more: count no further vote, and free whoever has voted."""
        voting = self._rounds.pop(self._claims.pop(name), None)
        assert isinstance(voting, ClaimRound)
        claim = voting.question
        assert self.fleet.me is not None
        # No hint to ourselves: it would make us try again at once.
        self.voter.free(name, self.fleet.me, claim.holder, claim.token, won=False)
        free = ReleaseRequest(self._next_round(), name, claim.holder, claim.token, won=False)
        self._begin(ReleaseRound(self.fleet, free, [], now + self.fleet.question_lasts), now, effects)

    def _answer_all(self, name: str, answer: HeldBy, now: float, effects: list[Effect]) -> None:
        """Somebody else leads: tell all applicants."""
        if name in self._claims:
            self._take_back(name, now, effects)
        waiting = self._candidates.pop(name, ())
        if waiting:
            self._want(name, now)
        effects.extend(Answer(each.ask, answer) for each in waiting)
        if name in self._elections:
            self._advance(name, strategies.LeaderKnown(), now, effects)

    def _renew(self, ask: int, grant: Grant, ttl: float, now: float, effects: list[Effect]) -> None:
        promise = self._own(grant, now)
        if promise is None:
            effects.append(Answer(ask, Lost(grant)))
            return
        claim = self._renewal(promise, grant.name, ttl)
        self._begin(ClaimRound(self.fleet, claim, [ask], Lost(grant), now, holds=True), now, effects)

    def _own(self, grant: Grant | Claim, now: float) -> Promise | None:
        """Return our own vote for our own claim: without it, the claim is over."""
        promise = self.voter.promise(grant.name, now)
        me = self.fleet.me
        return promise if promise and me is not None and promise.is_of(me, grant.holder, grant.token) else None

    def _release(self, ask: int, grant: Grant, now: float, effects: list[Effect]) -> None:
        if self._own(grant, now) is None:
            self._release_again(ask, grant, effects)
            return
        for voting in [each for each in self._rounds.values() if isinstance(each, ClaimRound)]:
            if (voting.question.name, voting.question.token) == (grant.name, grant.token):
                del self._rounds[voting.question.round]  # votes for it count no more
                if not voting.is_settled:
                    effects.extend(Answer(each, voting.if_lost) for each in voting.asks)
        effects.append(Hint(grant.name))
        self._let_go(grant, [ask], now, effects)

    def _let_go(self, held: Grant | Claim, asks: list[int], now: float, effects: list[Effect]) -> None:
        """Free whoever vouches for a claim of ours that was won."""
        assert self.fleet.me is not None
        self.voter.free(held.name, self.fleet.me, held.holder, held.token, won=True)
        free = ReleaseRequest(self._next_round(), held.name, held.holder, held.token, won=True)
        self._begin(ReleaseRound(self.fleet, free, asks, now + self.fleet.question_lasts), now, effects)

    def _release_again(self, ask: int, grant: Grant, effects: list[Effect]) -> None:
        """The claim is over, or is just being handed back: then wait for that."""
        for asked in self._rounds.values():
            if isinstance(asked, ReleaseRound) and not asked.is_settled and asked.grant == grant:
                asked.asks.append(ask)
                return
        effects.append(Answer(ask, Lost(grant)))

    # --- questions that change nothing ---

    def _inspect(self, ask: int, name: str, now: float, effects: list[Effect]) -> None:
        number, until = self._next_round(), now + self.fleet.question_lasts
        looking = InspectRound(self.fleet, InspectRequest(number, name), name, [ask], until)
        if self.fleet.me is not None and self.voter.awake:
            looking.take(self.fleet.me, self._seen(number, name, now))
        self._begin(looking, now, effects)

    def _list(self, ask: int, now: float, effects: list[Effect]) -> None:
        until = now + self.fleet.question_lasts
        listing = ListRound(self.fleet, ListRequest(self._next_round(), ""), [ask], until)
        if self.fleet.me is not None:
            listing.names.update(self.voter.names())
            listing.told = 1
        self._begin(listing, now, effects)

    def _ask_to_resign(self, ask: int, name: str, now: float, effects: list[Effect]) -> None:
        until = now + self.fleet.question_lasts
        asking = ResignRound(self.fleet, ResignRequest(self._next_round(), name), [ask], until)
        if self.fleet.me is not None and self.voter.awake:
            asking.answers[self.fleet.me] = self._note_request(name, now, effects)
        self._begin(asking, now, effects)

    # --- rounds ---

    def _next_round(self) -> int:
        self._round += 1
        return self._round

    def _begin(self, asked: Round, now: float, effects: list[Effect]) -> None:
        number = asked.question.round
        self._rounds[number] = asked
        asked.sent(now)
        if isinstance(asked, ClaimRound):
            assert self.fleet.me is not None
            own = self.voter.vote(self.fleet.me, asked.question, now)
            if own is not None:
                asked.take(self.fleet.me, own)
        self._evaluate(asked, now, effects)
        if number not in self._rounds:
            return
        self._send(asked, effects)
        self._at(min(asked.resend_at, asked.ends_at), "round", number)

    def _send(self, asked: Round, effects: list[Effect]) -> None:
        effects.extend(Send(member, asked.question_to(member)) for member in sorted(asked.missing))

    def _count(self, sender: int, reply: Reply, now: float, effects: list[Effect]) -> None:
        asked = self._rounds.get(reply.round)
        if asked is None or sender not in asked.missing:
            return
        if isinstance(asked, ClaimRound) and not self.voter.knows(sender):
            return
        asked.take(sender, reply)
        if isinstance(asked, ClaimRound) and isinstance(reply, Refusal) and self.fleet.quorum == "none":
            self._meet(asked.question, reply, now, effects)
            if reply.round not in self._rounds:
                return
        question = asked.next_question(sender)
        if question is not None:
            effects.append(Send(sender, question))
        self._evaluate(asked, now, effects)

    def _meet(self, claim: Claim, denied: Refusal, now: float, effects: list[Effect]) -> None:
        """Without a quorum: somebody knows better than we who leads, or that our term was followed by another."""
        if denied.held is None:
            if claim.renewal and denied.newest > claim.token and self._own(claim, now) is not None:
                self._let_go(claim, [], now, effects)
                effects.append(Hint(claim.name))
        elif self.voter.adopt(claim.name, denied.held, now):
            self._follow(claim.name, now, effects)

    def _round_due(self, number: int, now: float, effects: list[Effect]) -> None:
        asked = self._rounds.get(number)
        if asked is None:
            return
        self._evaluate(asked, now, effects)  # who was awaited may be taken for dead by now
        if number not in self._rounds:
            return
        if now >= asked.ends_at:
            self._end(asked, now, effects)
            return
        if now >= asked.resend_at:
            self._send(asked, effects)
            asked.sent(now)
        self._at(min(asked.resend_at, asked.ends_at), "round", number)

    def _evaluate(self, asked: Round, now: float, effects: list[Effect]) -> None:
        """Tell the outcome as soon as it is known."""
        awaited = self.liveness.alive(now) if self.fleet.me is not None else self.fleet.others
        match asked:
            case ClaimRound():
                self._evaluate_claim(asked, now, effects)
            case ReleaseRound():
                if asked.is_done(awaited if now < asked.begun + self.fleet.answer_within else ()):
                    self._settle(asked, Released(asked.grant), effects)
            case InspectRound():
                if (found := asked.outcome(awaited)) is not None:
                    self._settle(asked, found, effects)
                    asked.missing.clear()
            case ListRound():
                if asked.told >= self.fleet.majority:
                    self._settle(asked, tuple(sorted(asked.names)), effects)
                    asked.missing.clear()
            case ResignRound():
                if self._are_enough(asked, awaited):
                    self._settle(asked, any(asked.answers.values()), effects)
        if not asked.missing and asked.is_settled:
            self._rounds.pop(asked.question.round, None)

    def _are_enough(self, asked: ResignRound, awaited: list[int] | tuple[int, ...]) -> bool:
        if self.fleet.quorum == "majority":
            return len(asked.answers) >= self.fleet.majority
        return bool(asked.answers) and not asked.missing.intersection(awaited)

    def _settle(self, asked: Round, answer: Outcome, effects: list[Effect]) -> None:
        if not asked.is_settled:
            asked.is_settled = True
            effects.extend(Answer(ask, answer) for ask in asked.asks)

    def _end(self, asked: Round, now: float, effects: list[Effect]) -> None:
        """No further answer is waited for."""
        self._rounds.pop(asked.question.round, None)
        if asked.is_settled:
            return
        match asked:
            case ClaimRound() if not asked.holds:
                self._rounds[asked.question.round] = asked
                if self.fleet.quorum == "none" and asked.poll.yes and not asked.poll.no:
                    asked.missing.clear()
                    self._evaluate(asked, now, effects)
                else:
                    asked.is_settled = True
                    self._lose(asked, now, effects)
            case ClaimRound():
                self._settle(asked, asked.too_few(asked.poll.answered), effects)
            case ReleaseRound():
                self._settle(asked, asked.too_few(asked.freed), effects)
            case InspectRound():
                self._settle(asked, asked.last_word(), effects)
            case ListRound():
                found = tuple(sorted(asked.names)) if asked.told else asked.too_few(0)
                self._settle(asked, found, effects)
            case ResignRound():
                enough = len(asked.answers) >= self.fleet.needed
                answer = any(asked.answers.values()) if enough else asked.too_few(len(asked.answers))
                self._settle(asked, answer, effects)


def _no_room() -> NoAnswer:
    return NoAnswer(f"this member remembers {NAMES_MAX} names, and no more; use fewer, or restart the members in turn")

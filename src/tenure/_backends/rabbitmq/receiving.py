"""How one process receives from one queue of RabbitMQ: a pure state machine, by which nothing is counted unseen.

RabbitMQ takes back what is on its way to a consumer that is ended, and counts that as a delivery. To a consumer that
holds as many messages as it may, nothing is on its way: if R messages have come, the verdicts on A of them were sent,
and the queue lets it hold C, then R - A = C says that the queue has sent no more, and has taken every verdict. (It has
sent S >= R, has taken A' <= A, and keeps S - A' <= C.) So:

- R1. A consumer is ended only while it is full, by what has come and what was *sent*. Then the verdicts that follow
  make no room in it.
- R2. Messages come by *units*, consumers of one message each. A unit that is free is its own hint, and says that the
  queue has nothing ready. The verdict on its message frees it again, without a request.
- R3. As few units are free as messages are expected within ``AHEAD``: 1 in a calm queue. More are ended before the
  verdict that would free them; all of them while nobody listens. In place of a unit that a message has come to alone,
  another is begun only if there is no verdict ``SOON``.
  Whoever gets messages asks again, or goes: so none begins right behind an answer that has some; but if none is free
  then, there is a hint for those who listen on.
- R4. Of many ready messages, a *bulk* comes: a consumer of several messages, which the queue fills in the very step
  that begins it, and which is ended as soon as it is full. It takes a share that leaves ``SHARES`` times as much for
  each other consumer that there is.
- R5. When the last listener goes, nothing is sent: a free unit stays. If a message comes to it and nobody asks for that
  within ``HOLD``, the unit, now full, is ended, and the message given back, ``AT_ONCE`` at a time.
- R6. Without listeners, a claim takes messages one by one, or a bulk, and leaves nothing behind.

::

              Listen, Claim            Came               Answer            Verdict: a unit too many
    (none) ─────────────────► free ──────────► full ─────────────► full ─────────────────────────────► (none)
                               ▲  │            waits                held
                     Unlisten: │  │              │ for too long       │ Verdict: one that is needed
                       nothing └──┘              └─► GiveBack         └─► free

What is left: the end of the process ends its free units, which no client can do without that risk. If messages have
come lately, it waits for them to be filled, for ``CLOSING`` at most. And a bulk of which others took most between two
requests isn't full: it is then used like any consumer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOLD, HOLD_AFTER = 0.05, 1.0
"""Seconds for which a message waits to be asked for while nobody listens, as between two short receives; and for how
long after the last listener has gone. Later, it goes back at once."""

KEPT = 1.0
"""Seconds for which it waits while somebody listens, who may be busy, or paused."""

AHEAD = 0.01
"""Seconds of arrivals for which units are free: longer than it takes to begin another."""

SOON = 0.001
"""Seconds within which the verdict of a short handler comes: so its message costs neither the beginning of a unit nor
the end of one."""

RATE_OVER = 0.25
"""Seconds over which arrivals are counted."""

UNITS_MAX = 8
"""Units that are free at most."""

BULK_MIN, SHARES = 8, 2
"""The smallest bulk, and how many times as much must be ready, for each consumer of the queue."""

BULK_MAX = 65_535
"""What a consumer may hold at most, by AMQP."""

GETS_MAX = 8
"""Messages that are taken one by one before it is asked how many are ready."""

AT_ONCE = 4
"""Messages that are given back at once: so many may be there twice if the process is killed just then."""

CLOSING, CALM = 0.25, 5.0
"""Seconds for which the end waits for free units to be filled, unless no message has come for the second."""

NEVER = math.inf

Tag = int
"""A consumer, by its number on its channel."""

Message = int
"""A message that has come, by its delivery tag."""


# --- inputs ---


class Claim(NamedTuple):
    """Somebody asks for up to *limit* messages, and for no more than one beyond *size* bytes."""

    claim: int
    limit: int
    size: int


class GiveUp(NamedTuple):
    """Somebody asks no more."""

    claim: int


class Listen(NamedTuple):
    """Somebody waits for hints."""


class Unlisten(NamedTuple):
    """Somebody waits for hints no more."""


class Taken(NamedTuple):
    """Somebody has taken messages by ``Receiving.take``, and would have taken *missing* more."""

    missing: int


class Came(NamedTuple):
    """A message of *size* bytes has come to a consumer, or as the answer to a get: then *tag* is None."""

    tag: Tag | None
    message: Message
    size: int


class GotNothing(NamedTuple):
    """A get has found the queue empty."""


class Counted(NamedTuple):
    """So many messages are *ready*, and the queue has so many consumers of *others*."""

    ready: int
    others: int


class Arrived(NamedTuple):
    """All has come that the queue had sent when the oldest unanswered ``Await`` reached it."""


class Verdict(NamedTuple):
    """A verdict on a message is written right behind the effects of this: an acknowledgement, a rejection."""

    message: Message


class Close(NamedTuple):
    """The process ends, or uses the queue no more."""


class Tick(NamedTuple):
    """The time of ``wake_at`` has come."""


Input = Claim | GiveUp | Listen | Unlisten | Taken | Came | GotNothing | Counted | Arrived | Verdict | Close | Tick


# --- effects, to be carried out in their order, on one channel ---


class Begin(NamedTuple):
    """Begin a consumer that may hold *credit* messages."""

    tag: Tag
    credit: int


class End(NamedTuple):
    """End a consumer."""

    tag: Tag


class Get(NamedTuple):
    """Ask for one message."""


class Count(NamedTuple):
    """Ask how many messages are ready, and how many consumers there are."""


class Await(NamedTuple):
    """Ask the queue for an answer that comes behind all that it has sent."""


class Answer(NamedTuple):
    """Answer a claim; *is_more* says whether it is worth asking again at once."""

    claim: int
    messages: tuple[Message, ...]
    is_more: bool


class GiveBack(NamedTuple):
    """Give back a message that nobody asked for, uncounted: by a copy, and then a verdict."""

    message: Message


class Hint(NamedTuple):
    """Tell the listeners that a message is here."""


class Closed(NamedTuple):
    """Nothing comes any more, and nothing waits: the channel can be closed."""


Effect = Begin | End | Get | Count | Await | Answer | GiveBack | Hint | Closed


def bulk_of(ready: int, others: int) -> int:
    """Return how many of *ready* messages one may take at once beside *others* that consume."""
    return min(ready // (SHARES * (1 + others)), BULK_MAX)


# --- the machine ---


@dataclass(slots=True)
class _Consumer:
    credit: int
    held: int = 0
    """How many messages have come whose verdicts were not sent."""
    is_ended: bool = False
    has_arrived: bool = False
    """Whether all has come that the queue had for it when it began."""

    @property
    def is_full(self) -> bool:
        """Whether nothing can be on its way to it."""
        return self.held == self.credit

    @property
    def is_free(self) -> bool:
        """Whether something may come to it."""
        return not self.is_ended and not self.is_full


@dataclass(slots=True)
class _Asked:
    """A claim that is not answered."""

    number: int
    limit: int
    size: int
    gets: int = 0
    is_busy: bool = False
    """Whether a request for it is not answered."""
    is_counted: bool = False
    is_given_up: bool = False


class Waiting(NamedTuple):
    """A message that has come and was not asked for yet."""

    message: Message
    at: float
    size: int


@dataclass(slots=True)
class Receiving:
    """The consumers of one queue, on one channel."""

    consumers: dict[Tag, _Consumer] = field(default_factory=dict)
    """Those that the server counts: they may receive, or hold messages."""
    waiting: deque[Waiting] = field(default_factory=deque)
    """What has come and was not asked for yet. Any thread may take from its left."""
    listeners: int = 0
    returning: set[Message] = field(default_factory=set)
    """What is being given back."""
    _holders: dict[Message, Tag] = field(default_factory=dict)
    _claims: deque[_Asked] = field(default_factory=deque)
    _arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    _wanted: int = 0
    """How many messages were asked for and have not come."""
    _ready: int = 0
    """How many were ready when that was asked last; 0 if a unit was found free since."""
    _left_at: float = -NEVER
    """When the last listener has gone."""
    _stand_at: float = NEVER
    """When a unit is begun if none is free then."""
    _by_bulks: bool = False
    """Whether messages come by bulks just now: then one unit is enough."""
    _is_backlog: bool = False
    """Whether every consumer was full when a claim had waited for what was on its way."""
    _next: Tag = 1
    _awaits: deque[tuple[int | None, Tag]] = field(default_factory=deque)
    """For each that is not answered: the claim that waits for it, and the first consumer begun behind it."""
    _close_by: float = NEVER
    _is_ending: bool = False
    """Whether every consumer was ended, for good."""
    is_closed: bool = False

    # --- what is known ---

    @property
    def free(self) -> int:
        """How many consumers may receive something."""
        return sum(one.is_free for one in list(self.consumers.values()))  # on any thread

    @property
    def wake_at(self) -> float:
        """When a ``Tick`` is due; ``NEVER`` if none is."""
        if self.is_closed:
            return NEVER
        oldest = self._oldest
        is_held_up = len(self.returning) >= AT_ONCE or any(claim is None for claim, _ in self._awaits)
        stale = NEVER if oldest is None or is_held_up else self._stale_at(oldest)
        is_settled = not (self._is_ending or self.waiting or self.returning)
        return min(stale, self._close_by if is_settled else NEVER, self._stand_at)

    @property
    def _oldest(self) -> Waiting | None:
        try:
            return self.waiting[0]
        except IndexError:
            return None

    def _stale_at(self, one: Waiting) -> float:
        """Return when a message has waited for too long."""
        if self._close_by < NEVER:
            return one.at
        if self._claims:  # it is for the first of them
            return NEVER
        if self.listeners:
            return one.at + KEPT
        return one.at + (HOLD if one.at < self._left_at + HOLD_AFTER else 0.0)

    @property
    def _has_unfilled_bulk(self) -> bool:
        """Whether a bulk is not full: verdicts on its messages would make room in it, and it would never be."""
        return any(one.credit > 1 and not one.is_ended for one in self.consumers.values())

    def _target(self, now: float) -> int:
        """Return how many units should be free."""
        recent = sum(at > now - RATE_OVER for at in self._arrivals)
        expected = 1 if self._by_bulks else max(math.ceil(recent / RATE_OVER * AHEAD), self._ready)
        return max(1, min(UNITS_MAX, self._wanted, expected))

    # --- on any thread ---

    @property
    def is_calm(self) -> bool:
        """Whether the last message has come alone: then it is not worth asking at once whether more are ready."""
        try:
            return self._arrivals[-1] - self._arrivals[-2] > AHEAD
        except IndexError:
            return True

    def take(self, limit: int, size: int) -> tuple[Message, ...]:
        """Take up to *limit* messages of what waits, and no more than one beyond *size* bytes."""
        taken: list[Message] = []
        while len(taken) < limit and size > 0:
            try:
                one = self.waiting.popleft()
            except IndexError:
                break
            taken.append(one.message)
            size -= one.size
        return tuple(taken)

    def put_back(self, messages: Sequence[Waiting]) -> None:
        """Undo ``take``."""
        self.waiting.extendleft(reversed(messages))

    # --- inputs ---

    def handle(self, given: Input, now: float) -> list[Effect]:
        """Return what to do, in this order."""
        done: list[Effect] = []
        match given:
            case Claim(claim, limit, size):
                self._claims.append(_Asked(claim, limit, size))
                if len(self._claims) == 1:
                    done += self._go_on(now)
            case GiveUp(claim):
                for one in self._claims:
                    one.is_given_up |= one.number == claim
                done += self._go_on(now)
            case Listen():
                self.listeners += 1
                if self.listeners == 1 and not self._claims:
                    self._wanted = max(1, self._wanted)
                    done += self._stand(now)
            case Unlisten():
                self.listeners -= 1
                if not self.listeners:
                    self._wanted, self._left_at = 0, now
            case Taken(missing):
                self._wanted = missing
                if self.is_calm:
                    self._stand_at = min(self._stand_at, now + SOON)
                else:
                    done += self._stand(now)
            case Came(tag, message, size):
                done += self._came(tag, Waiting(message, now, size), now)
            case GotNothing():
                self._is_backlog = False
                done += self._answer(is_more=False) + self._stand(now) + self._go_on(now)
            case Counted(ready, others):
                done += self._counted(ready, max(1, others), now)  # one that pulls may have none just now
            case Arrived():
                done += self._arrived(now)
            case Verdict(message):
                done += self._verdict(message, now)
            case Close():
                is_calm = not self._arrivals or self._arrivals[-1] < now - CALM
                self._close_by = now if is_calm or not self.free else now + CLOSING
                self.listeners = self._wanted = 0
                for one in self._claims:
                    one.is_given_up = True
                done += self._go_on(now)
            case Tick():
                if now >= self._stand_at:
                    begun = self._stand(now)
                    # The handler goes on: it is worth asking now whether more are ready.
                    done += [*begun, Hint()] if begun and not self._claims else begun
        return done + self._give_back(now) + self._close(now)

    # --- claims ---

    def _go_on(self, now: float) -> list[Effect]:
        """Take the next step of the first claim."""
        done: list[Effect] = []
        while self._claims and not (claim := self._claims[0]).is_busy:
            if claim.is_given_up:
                self._claims.popleft()
            elif self.waiting and (self.listeners or self._has_enough(claim)):
                done += self._answer_or_stand(now)
            else:
                claim.is_busy = True
                done += self._ask(claim, now)
        return done

    def _has_enough(self, claim: _Asked) -> bool:
        waiting = list(self.waiting)
        return len(waiting) >= claim.limit or sum(one.size for one in waiting) >= claim.size

    def _ask(self, claim: _Asked, now: float) -> list[Effect]:
        missing = claim.limit - len(self.waiting)
        if self.listeners:
            self._wanted = max(self._wanted, missing)
            if missing >= BULK_MIN and self._is_backlog and not claim.is_counted:
                return [Count()]
            return [*self._stand(now), self._await(claim.number)]
        if self.free:  # so nothing is ready; but what is on its way comes before the answer
            return [self._await(claim.number)]
        if claim.gets >= GETS_MAX and missing >= BULK_MIN and not claim.is_counted:
            return [Count()]
        claim.gets += 1
        return [Get()]

    def _answer(self, *, is_more: bool) -> list[Effect]:
        """Answer the first claim with what waits.

        It may be nobody's who listens, and have got what a listener's unit has brought: that one is to ask again.
        """
        claim = self._claims.popleft()
        if claim.is_given_up:
            return [Hint()] if self.waiting and self.listeners and not self._claims else []
        taken = self.take(claim.limit, claim.size)
        missing = claim.limit - len(taken)
        if self.listeners:
            self._wanted = missing
        answer = Answer(claim.number, taken, bool(self.waiting) or (is_more and missing > 0))
        return [answer, Hint()] if taken and self.listeners and not (self._claims or self.free) else [answer]

    def _answer_or_stand(self, now: float) -> list[Effect]:
        """Answer the first claim; begin units only if it gets nothing, as else whoever listened for it may be gone."""
        is_answered = bool(self.waiting) and not self._claims[0].is_given_up
        done = self._answer(is_more=not self.free)
        return done if is_answered else done + self._stand(now)

    def _stand(self, now: float) -> list[Effect]:
        """Begin units while somebody listens and wants more."""
        self._stand_at = NEVER
        if not self._wants or not self._wanted:
            return []
        return [self._begin(1) for _ in range(self._target(now) - self.free)]

    def _begin(self, credit: int) -> Begin:
        tag = self._next  # never used twice: to begin one with the tag of one just ended costs the connection
        self._next += 1
        self.consumers[tag] = _Consumer(credit)
        return Begin(tag, credit)

    def _await(self, claim: int | None) -> Await:
        self._awaits.append((claim, self._next))
        return Await()

    def _counted(self, ready: int, others: int, now: float) -> list[Effect]:
        claim = self._claims[0]
        claim.is_counted, claim.is_busy = True, False
        credit = min(claim.limit - len(self.waiting), bulk_of(ready, others))
        self._by_bulks = credit >= BULK_MIN
        self._ready = 0 if self._by_bulks else ready
        if not self._by_bulks or claim.is_given_up:
            return self._go_on(now)
        claim.is_busy = True
        return [self._begin(credit), self._await(claim.number)]

    def _arrived(self, now: float) -> list[Effect]:
        number, before = self._awaits.popleft()
        for tag, consumer in self.consumers.items():
            consumer.has_arrived |= tag < before
        if not self._claims or self._claims[0].number != number:  # it was answered before
            return []
        claim = self._claims[0]
        claim.is_busy = False
        self._is_backlog = not self.free
        if self.free:
            self._ready, self._by_bulks = 0, False
        if not self.listeners and not self.free and not self._has_enough(claim) and not claim.is_given_up:
            claim.is_counted = False  # what was free is full: there may be more
            return self._go_on(now)
        return self._answer_or_stand(now) + self._go_on(now)

    # --- what comes and goes ---

    def _came(self, tag: Tag | None, one: Waiting, now: float) -> list[Effect]:
        done: list[Effect] = []
        self._arrivals.append(now)
        self.waiting.append(one)
        if tag is not None and (consumer := self.consumers.get(tag)) is not None:  # else it was ended for the close
            consumer.held += 1
            self._holders[one.message] = tag
            if consumer.credit > 1 and consumer.is_full and not consumer.is_ended:
                done.append(self._end(tag))
        if not self._claims:
            return [*done, Hint()] if self.listeners else done
        claim = self._claims[0]
        if tag is None:
            claim.is_busy = False
            return done + self._go_on(now)
        is_awaiting = any(number == claim.number for number, _ in self._awaits)
        if is_awaiting and len(self.waiting) >= claim.limit and not self._has_unfilled_bulk:
            done += self._answer(is_more=True) + self._go_on(now)
        return done

    def _verdict(self, message: Message, now: float) -> list[Effect]:
        """End the consumer of a message if that would be free by the verdict, and isn't needed."""
        done: list[Effect] = []
        self.returning.discard(message)
        tag = self._holders.pop(message, None)
        if tag is not None:
            one = self.consumers[tag]
            if one.is_full and not one.is_ended and not (self._wants and self.free < self._target(now)):
                done.append(self._end(tag))
            one.held -= 1
            if one.is_ended and not one.held:
                del self.consumers[tag]
        return done

    @property
    def _wants(self) -> bool:
        return bool(self.listeners) and self._close_by == NEVER

    def _end(self, tag: Tag) -> End:
        self.consumers[tag].is_ended = True
        return End(tag)

    def _give_back(self, now: float) -> list[Effect]:
        """Give back what has waited for too long, few at once."""
        done: list[Effect] = []
        while len(self.returning) < AT_ONCE and (one := self._oldest) is not None and now >= self._stale_at(one):
            tag = self._holders.get(one.message)
            if tag is not None and not (consumer := self.consumers[tag]).is_ended:
                # A unit is full. A bulk may be on its way; and if it was not filled, it is ended with others on their
                # way to it, perhaps: else it would get its own copies again and again.
                if not (consumer.is_full or consumer.has_arrived):
                    if not any(claim is None and before > tag for claim, before in self._awaits):
                        done.append(self._await(None))
                    break
                done.append(self._end(tag))
            taken = self.take(1, 1)  # another thread may have taken it just now: then this is a later one, or none
            self.returning.update(taken)
            done += [GiveBack(message) for message in taken]
        return done

    def _close(self, now: float) -> list[Effect]:
        if self.is_closed or self._close_by == NEVER or self.waiting or self.returning:
            return []
        if not self._is_ending:
            if self.free and now < self._close_by:
                return []
            self._is_ending = True
            return [*(self._end(tag) for tag, one in self.consumers.items() if not one.is_ended), self._await(None)]
        if self._awaits:
            return []
        self.is_closed = True
        return [Closed()]

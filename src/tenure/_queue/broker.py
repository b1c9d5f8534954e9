"""The port to a broker: a queue's questions to it, and its abilities.

Answers that the domain expects are values. An exception means *could not find out* (``Unavailable``) or *can never
work* (``ConfigError``). After ``Unavailable``, the command may have run or not.

Every broker keeps these rules:

- **A claim locks, counts and answers in one step.** ``receive`` takes messages that are *claimable* by the store's
  clock: not locked or the lock has ended, not delayed or the delay has ended, not deferred, not of a session. One
  predicate for new and for orphaned messages: no sweeper, no registry of workers.
- **A delivery is counted when it is claimed**, so a crash counts. ``GiveBack`` (and releasing a session) takes it off.
- **Every verb compares queue, sequence and token** with the store's row, and that the lock has not ended, in the step
  that acts. A token belongs to one claim. What doesn't match is ``Lapsed``, and nothing has changed. A settled message
  is ``Lapsed`` too: it can't be settled twice. (If the answer was lost, the same verdict again gets ``Lapsed``.)
- **Nothing disappears.** A message whose last allowed delivery is abandoned goes to the dead letters in that step, with
  the reason ``max_deliveries``; one whose last lock expired, when it would be claimed next; one whose ``expires_in`` is
  over before it was received (or is abandoned, given back after it), with the reason ``expired``. Under a lock, no
  message expires. Dead letters don't expire by themselves (a process that uses the queue purges those older than
  ``dead_retention``, if that is set), don't count deliveries towards a limit, and keep id, sequence and history.
- **Limits hold in the step that claims.** Of a queue whose settings say ``paused``, ``max_locked``, ``rate`` or
  ``session_rate``, no claim of live messages brings more than they allow. Locks count until they end, so a dead
  consumer's place is free then; deliveries count for a rate, whatever becomes of them. Dead letters have no limits.
- **Order**: higher priority first, then by sequence, also for abandoned and given back messages. It is a promise
  inside a session only; elsewhere an idle consumer sees it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, cast

from tenure._checks import check_seconds
from tenure._election.store import Hint
from tenure._foreign import an_object
from tenure._lease import NoAnswer
from tenure._queue.checks import check_count, check_most, check_rate
from tenure._queue.generations import Generations
from tenure._queue.limits import Rate
from tenure._queue.message import DeadMessage, Death, Delivery, Died, LiveMessage, SessionLock, State, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Deleted, Lapsed, NotEmpty, Renewed, Settled, Settlement
from tenure.errors import ConfigError, refuse_unknown

Support = Literal["native", "emulated", "impossible"]
"""How a store does something: by itself, by steps of tenure, or not at all."""

CLAIM_BYTES = 4 * 2**20
"""Bytes: a claim ends with the message whose body makes it as large as this, so that its answer comes in time."""


@dataclass(frozen=True, slots=True)
class QueueTraits:
    """A broker's abilities: data, so that suite, docs, checks and callers read the same object. Times in seconds."""

    lock_min: float
    """The shortest lock."""
    lock_max: float
    """The longest lock."""
    body_max: int
    """The largest body in bytes."""
    fencing: Support = "native"
    """Whether a late verb of an old claim is refused: by the store, by our check in it, or not."""
    renewal: Support = "native"
    """Whether a lock can be renewed."""
    dead_letters: Support = "native"
    """Whether dead letters are kept."""
    delay: Support = "native"
    """Whether a message can be sent, or abandoned, with a delay."""
    delay_step: float = 0.001
    """Delays are rounded up to a multiple of it."""
    delay_lag: float = 0.0
    """Seconds by which a delayed message may come late, where the server puts it into the queue by its own schedule."""
    priorities: Support = "native"
    """Whether messages of a higher priority come first."""
    sessions: Support = "native"
    """Whether messages of a session come in order, to one consumer at a time."""
    deferral: Support = "native"
    """Whether a message can be set aside until it is asked for by its sequence."""
    dedupe: Support = "native"
    """Whether the ids of sent messages are remembered."""
    dedupe_min: float = 0.0
    """The shortest ``dedupe_window``."""
    inbox: Support = "native"
    """Whether the ids of handled messages are remembered."""
    order: Support = "native"
    """Whether an idle consumer sees messages in the order of sending."""
    transactions: bool = True
    """Whether ``Complete`` with sends, and a batch to be sent, are one step."""
    peek: Support = "native"
    """Whether every live message can be looked at and purged; ``emulated``: only some of those that are ready."""
    tells_holder: bool = True
    """Whether ``peek`` tells which process has locked a message, and since when."""
    exact_stats: bool = True
    """Whether the counts of messages, and the age of the oldest, are exact; without, they may be a little old."""
    hints: bool = True
    """Whether consumers get hints of new messages; without, they look now and then."""
    names_dead: bool = False
    """Whether claims name the messages that died by time; see ``Claim.died``."""
    survives_restart: bool = True
    """Whether messages outlive the store's process."""
    lock_per_claim: bool = True
    """Whether each claim says how long its locks last; without, all locks of a queue last as long as it says."""
    mixed_sessions: bool = True
    """Whether one queue holds messages with and without sessions; without, it is created for one kind. There, messages
    of a session are received only under its lock, deferred ones too."""
    sequences_restart: bool = False
    """Whether a queue that is made anew after its deletion begins with the first sequence again."""
    case_sensitive: bool = True
    """Whether names of queues that differ only in capital letters name different queues."""
    connection_bound: bool = False
    """Whether a lock ends with the connection of its process."""
    schedules: Support = "native"
    """Whether the slots of schedules are noted: in the step that sends their messages; or beside it (``emulated``), so
    that a process that dies in between leaves a slot that is sent twice, under one id."""
    limits: Support = "native"
    """Whether queues can be paused for all their consumers, and limited: ``max_locked``, ``rate``, ``session_rate``."""
    surveys: bool = False
    """Whether one request tells which of many queues hold messages; see :class:`SurveyingBroker`."""
    connects: bool = True
    """Whether a connection begins with an answer of the store itself: who hears nothing can soon claim nothing."""
    dead_pages: bool = False
    """Whether dead letters come page by page, in no order; see :class:`PagingBroker`."""
    pushes: bool = False
    """Whether messages come to a process that waits for hints before it claims them; see :class:`PushingBroker`."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue that its store keeps. Times in seconds.

    Args:
        lock: How long a received message belongs to its consumer, unless renewed.
        max_deliveries: How often a message is handed out before it is dead-lettered.
        dedupe_window: How long an id is remembered after it was sent.
        body_max: The largest body in bytes that may be sent.
        dead_retention: How long a dead letter is kept; ``math.inf`` until it is redriven or purged.
        max_locked: How many messages may be locked at once, over all consumers; ``math.inf`` for any number.
        rate: How many messages may be received in how many seconds, over all consumers: ``(count, seconds)``;
            ``math.inf`` for any number.
        session_rate: The same for the messages of each session by itself.
        paused: Whether no messages can be received.

    Raises:
        ConfigError: A setting can't work. The message names it, with its value and one that fits.
    """

    lock: float = 30.0
    max_deliveries: int = 10
    dedupe_window: float = 600.0
    body_max: int = 1_048_576
    dead_retention: float = math.inf
    max_locked: float = math.inf
    rate: Rate = math.inf
    session_rate: Rate = math.inf
    paused: bool = False

    def __post_init__(self) -> None:
        check_seconds("lock", self.lock, above=0.0)
        check_seconds("dedupe_window", self.dedupe_window, least=0.0)
        for name in ("max_deliveries", "body_max"):
            check_count(name, getattr(self, name))
        if self.dead_retention != math.inf:
            check_seconds("dead_retention", self.dead_retention, above=0.0, what="seconds, or math.inf")
        check_most("max_locked", self.max_locked)
        check_rate("rate", self.rate)
        check_rate("session_rate", self.session_rate)
        if not isinstance(self.paused, bool):
            raise ConfigError(f"paused must be True or False, not {self.paused!r:.80}")

    @property
    def is_limited(self) -> bool:
        """Whether a claim may be refused messages that are ready."""
        return self.paused or not self.max_locked == self.rate == self.session_rate == math.inf


class QueueOptions(TypedDict, total=False):
    """Some of :class:`QueueSettings`, each with the value that it is to get."""

    lock: float
    max_deliveries: int
    dedupe_window: float
    body_max: int
    dead_retention: float
    max_locked: float
    rate: Rate
    session_rate: Rate
    paused: bool


LIMITS = frozenset({"max_locked", "rate", "session_rate", "paused"})
"""The settings by which a queue may refuse messages that are ready."""


def checked_changes(function: str, settings: QueueOptions) -> QueueOptions:
    """Return those of *settings*, as they were given to *function*, that are not None.

    Raises:
        ConfigError: One of them can't work.
        TypeError: There is no such setting.
    """
    refuse_unknown(function, settings, QueueOptions.__annotations__)
    given = cast(QueueOptions, {name: value for name, value in settings.items() if value is not None})
    QueueSettings(**given)
    return given


def read_settings(value: object) -> QueueOptions:
    """Return the settings in an object that a store has kept, and that anybody may have edited.

    What can't work as a setting, or is none that this version knows, is left out, as if it had never been declared.

    Raises:
        Unreadable: It is no object.
    """
    found: dict[str, Any] = {}
    for name, one in an_object(value).items():
        if name in QueueOptions.__annotations__:
            setting: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one}
            with suppress(ConfigError):
                QueueSettings(**setting)
                found |= setting
    return cast(QueueOptions, found)


def settings_with(changes: QueueOptions, traits: QueueTraits) -> QueueSettings:
    """Return the usual settings of a queue on a store with *traits*, with these *changes*.

    Raises:
        ConfigError: One of them can't work, or doesn't fit the store.
    """
    usual: QueueOptions = {"body_max": min(QueueSettings().body_max, traits.body_max)}
    settings = replace(QueueSettings(**usual), **changes)
    _check(settings, traits)
    return settings


def _check(settings: QueueSettings, traits: QueueTraits) -> None:
    """Refuse settings that the broker with *traits* can't keep.

    Raises:
        ConfigError: The message shows both values.
    """
    if not traits.lock_min <= settings.lock <= traits.lock_max:
        raise ConfigError(
            f"lock ({settings.lock:g} s) must be from {traits.lock_min:g} s to {traits.lock_max:g} s on this backend"
        )
    if settings.body_max > traits.body_max:
        raise ConfigError(
            f"body_max ({settings.body_max:,} bytes) must not be more than this backend takes "
            f"({traits.body_max:,} bytes); try body_max={traits.body_max}"
        )
    if settings.is_limited and traits.limits == "impossible":
        usual = QueueSettings()
        wished = [name for name in sorted(LIMITS) if getattr(settings, name) != getattr(usual, name)]
        raise ConfigError(
            f"{' and '.join(wished)} can't be kept on this backend, which can neither limit nor pause a queue for all "
            "its consumers (trait limits); use SQLite, PostgreSQL or Redis, or pause the consumers themselves: "
            "queue.pause()"
        )


def expectations(changes: QueueOptions) -> QueueOptions:
    """Return those of *changes* that programs may expect of a queue: all but ``paused``."""
    return cast(QueueOptions, {name: value for name, value in changes.items() if name != "paused"})


def undeclared(changes: QueueOptions, declared: Container[str]) -> QueueOptions:
    """Return those of *changes* whose settings are not *declared*."""
    return cast(QueueOptions, {name: value for name, value in changes.items() if name not in declared})


class Claim(NamedTuple):
    """The answer to one ``receive``: deliveries that share one token and one moment at which their locks end.

    ``age`` is above 0 where a lock may have begun before the claim was sent, by so many seconds at most.

    ``due_in`` says, when fewer came than were asked for, in how many seconds by the store's clock the next message
    becomes claimable by time alone (its delay ends, or its unrenewed lock). None: none will, or it can't say. 0: there
    is more at once, or may be: with no deliveries, the store has not yet processed all ended delays and locks.

    ``died`` names messages of this queue that the broker dead-lettered by itself since its last report, to this process
    or, where it can, to any: those that expired, or whose last lock ended. Each is named once, so that its consumer can
    report it; a broker that can't cheaply name them leaves it empty. Those in a lost or given up answer are not
    reported, unless the broker names them again. (Those that die of a verdict are named in its answer.)
    """

    deliveries: Sequence[Delivery]
    """The messages, in order; none if the queue has none to hand out."""
    due_in: float | None = None
    died: Sequence[Died] = ()
    age: float = 0.0
    is_limited: bool = False
    """Whether the queue has limits: then messages that wait in a buffer take places from other consumers."""
    is_held_back: bool = False
    """Whether fewer came because of its limits, though more messages wait; ``due_in`` tells when time alone changes
    that."""
    held_up_for: float | None = None
    """In a session: for how many seconds its rate delays a message that waits in it; None if it doesn't."""


class NoSession(NamedTuple):
    """No session could be accepted: none is free and has messages waiting, or the named one is locked to another.

    ``due_in`` and ``died`` are as in :class:`Claim`; the first says when a session's lock or a delay ends that would
    change this.
    """

    due_in: float | None = None
    died: Sequence[Died] = ()
    is_held_back: bool = False
    """Whether a session is free and has messages waiting that the limits of the queue keep back."""


class Schedules(NamedTuple):
    """What is kept of the schedules of a queue, by their names; *now* is the store's wall clock, in Unix seconds."""

    records: Mapping[str, str]
    """The record of each schedule: text that tenure writes and reads."""
    now: float


class Advanced(NamedTuple):
    """The answer to ``advance``: whether it was done, the record that is kept now, and the store's wall clock."""

    is_done: bool
    """Whether the record was as expected: then it is replaced, and the messages are sent."""
    record: str | None
    """The record that is kept now; None if there is none."""
    now: float
    """The store's wall clock, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters are meant: those that fit every condition given; all of them if none is."""

    sequences: frozenset[int] | None = None
    """Have one of these sequences."""
    ids: frozenset[str] | None = None
    """Have one of these ids."""
    reason: str | None = None
    """Died for this reason."""
    dead_before: float | None = None
    """Died before this moment of the store's wall clock, in Unix seconds."""
    dead_for: float | None = None
    """Died so many seconds ago, or earlier, by the store's clock; instead of ``dead_before``."""
    after: int = 0
    """Have a sequence higher than this: to go through them page by page."""

    def at(self, now: float) -> Selection:
        """Return it with the moment that ``dead_for`` means *now*, by the store's wall clock."""
        return self if self.dead_for is None else replace(self, dead_for=None, dead_before=now - self.dead_for)

    def fits(self, sequence: int, id_: str, death: Death) -> bool:
        """Whether a dead letter is meant; ``dead_for`` is not looked at, see :meth:`at`."""
        return (
            sequence > self.after
            and (self.sequences is None or sequence in self.sequences)
            and (self.ids is None or id_ in self.ids)
            and (self.reason is None or death.reason == self.reason)
            and (self.dead_before is None or death.at < self.dead_before)
        )


EVERYTHING = Selection()


@dataclass(frozen=True, slots=True)
class LiveSelection:
    """Which live messages are meant: those that fit every condition given; all of them if none is."""

    states: frozenset[State] | None = None
    """Are in one of these states."""
    sequences: frozenset[int] | None = None
    """Have one of these sequences."""
    ids: frozenset[str] | None = None
    """Have one of these ids."""
    session: str | None = None
    """Belong to this session."""
    sent_before: float | None = None
    """Sent before this moment of the store's wall clock, in Unix seconds."""
    after: int = 0
    """Have a sequence higher than this: to go through them page by page."""

    def wants(self, state: State) -> bool:
        """Whether messages in *state* are meant."""
        return self.states is None or state in self.states

    def fits(self, sequence: int, named: Callable[[], str], session: str | None, enqueued_at: float) -> bool:
        """Whether a message is meant, by everything but its state. *named* is its id."""
        return (
            sequence > self.after
            and (self.sequences is None or sequence in self.sequences)
            and (self.session is None or session == self.session)
            and (self.sent_before is None or enqueued_at < self.sent_before)
            and (self.ids is None or named() in self.ids)
        )


EVERY_LIVE = LiveSelection()


class Broker(Protocol):
    """Queues by name. They come into being when first used; *queue* may be any name that ``check_name`` lets pass.

    ``dead_letters_of(queue)`` is a queue too, for ``receive``, ``renew``, ``settle`` and ``hints``: there, ``Complete``
    removes for good, ``Abandon`` (with its delay) and ``GiveBack`` leave it among the dead letters, ``DeadLetter``
    does so under a new reason; ``Defer`` is refused with ``ConfigError``. To receive it is not counted.

    Its methods may be called on any loop, and on several at once: messages travel on the caller's, locks are renewed on
    the renewal thread's. Messages, names and settings come in checked; a broker need not look at them again.
    """

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        ...

    @property
    def generations(self) -> Generations:
        """The generations of queues that its answers have shown: those to ``declare``, ``send``, claims and ``accept``.

        ``declare`` notes that of the queue in which the settings hold that it returns, as its last step. What no answer
        tells (see the documentation of each store) is found out by the next one that does.
        """
        ...

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*, and no others; return the settings that hold then.

        With *only_undeclared*, a setting that was declared before keeps its value: the caller compares. That is one
        atomic step: of two processes with different wishes, one gets its wish, and the other reads it. (A store that
        can't do that says so in its documentation.)

        A setting is declared by being named here, also with the value that it has. It holds for every process until it
        is declared otherwise; before, its value is the one in ``QueueSettings()``. Two processes that declare
        different settings at the same time both get theirs. Settings count when a verb looks at them: a lower
        ``max_deliveries`` also applies to messages sent before. A queue that is deleted has no declared settings.
        """
        ...

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings that hold for *queue*."""
        ...

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages* or, on an exception, none; return their ids in order once they are safe.

        A message whose id was sent to this queue less than ``dedupe_window`` ago is not kept again, even if the
        first is gone; its id is returned all the same. That holds inside one batch, too. Where ``id`` is None,
        the broker makes one up that no sender would, unique over all queues, and remembers nothing.
        """
        ...

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds, and answer at once, also with none.

        The claim ends with the message whose body brings it to ``CLAIM_BYTES``; one always comes if there is one.
        Then, and where the broker has looked at only some of the messages that are due, ``due_in`` is 0.
        The limits of the queue may end it sooner; see ``Claim.is_held_back``.

        It never waits for messages to come: so the caller knows before which moment the locks can't have begun, and
        a question that was given up claims nothing. To wait, a caller uses ``hints`` and ``due_in``.
        """
        ...

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences* that are not locked, in that order; the others are left out.

        So are those that ``paused``, ``max_locked`` or ``rate`` don't allow.

        They stay deferred until completed or dead: abandoned, given back or with the lock ended, they are deferred
        again, and come by sequence only.
        """
        ...

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now, in one step; the answers stand in the order of *held*.

        A lock never ends sooner for being renewed: one that lasts longer keeps its end, and the answer says so.
        A session's lock covers the deliveries received under it: they are extended with it (and not by themselves).
        Where queues lie apart, one that can't be asked gives ``NoAnswer`` for its locks and costs the others nothing;
        ``Unavailable`` is for all.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts, on deliveries of any queues, in one step; the answers stand in the order given.

        Each verdict stands or lapses by itself. On ``Unavailable``, none or all have been passed, where the store has
        transactions. Where queues lie apart, or no two verdicts are one step, ``NoAnswer`` says so of some, which may
        stand or not. Twice the same delivery in one call: the second is ``Lapsed``.
        """
        ...

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or for None the next free one with a message waiting: the one that has waited longest.

        A named session can be accepted also while it has no messages, or the limits of the queue allow none, e.g. to
        read its state. The next free one is not, if none of its messages may be received.
        """
        ...

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session in order of sequence, under the session's token and until its lock ends.

        A message that was delivered before and waits for its delay to end holds up those behind it; one that was sent
        with a delay, or deferred, does not.

        If ``session_rate`` allows no further one, the next message that waits is delayed until it does, but for
        ``HELD_UP_MAX`` at most, and holds up those behind it: so the session is not accepted in vain. Each answer
        tells that by ``held_up_for``, also one that brings as many as were asked for.
        """
        ...

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session, so that the next may have it at once; its unsettled deliveries are given back uncounted."""
        ...

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return the state last stored for this session."""
        ...

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store *state* for this session; it stays when the session is released. None forgets it."""
        ...

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue* as they stand now by the store's clock, in a time that doesn't grow with them.

        A message that is claimable by now counts as ready; one that is dead by now (expired, last lock ended) as dead.
        """
        ...

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages in order of sequence, without locking or counting them.

        Each is shown as it stands by the store's clock; they need not all be of one moment.
        """
        ...

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, and return how many; or how many it would have been.

        Those that are locked stay, and so do those sent after the question. It works in portions, so that other
        callers don't wait long; if it raises, those removed so far stay removed. Ids that were sent stay remembered.
        """
        ...

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages with a sequence above *after*, in order, without locking (``token`` is empty)."""
        ...

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters of *queue* in order of sequence, without locking them."""
        ...

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*, oldest first, and return how many (or how many it would have been).

        They start anew: no deliveries counted, no delay, no ``expires_in``; the history stays. One that is locked by a
        consumer of the dead letters is left out, as it is by ``purge``.

        With *to*, they go into that queue, which is not *queue*, as if sent there now: each with a new sequence, but
        its id (also one that was made up, and one that is remembered there), its history, its session and all that its
        sender has set. Each moves in one step where the store has transactions; elsewhere it is written before it is
        removed.
        """
        ...

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good, oldest first, and return how many."""
        ...

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Return which *ids* the queue's inbox remembers: those completed with ``remember`` that is not over."""
        ...

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        ...

    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        """Keep *record* of a schedule in place of *expected*, and send *messages* to *queue*, in one step.

        Nothing is done if another text is kept than *expected*, or by the store's wall clock, it is before
        *not_before*. None: nothing is kept. The texts are of the caller; they have 1,000 ASCII characters at most.
        An id that *queue* remembers is not sent again, as in ``send``.

        Where that can't be one step (see the trait ``schedules``), the store notes first that the messages are being
        sent: another caller is refused meanwhile, and takes over when this one has not gone on for a while.
        """
        ...

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty, with its settings, schedules, its sessions' states and the ids it remembers.

        A queue is empty when it holds no message in any state, and no dead letter. With *force*, what it holds is
        deleted first, perhaps in several steps; locks on it lapse. The queue comes into being anew when it is next
        used, and its sequences go on from where they were: what belonged to the old one never fits the new one.
        """
        ...

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* once *seconds* have passed without another such call."""
        ...

    async def idle(self) -> Sequence[str]:
        """List up to 100 queues whose time, as given to ``delete_when_idle``, has run out by the store's clock."""
        ...

    async def names(self) -> Sequence[str]:
        """List every queue that was declared or sent to, sorted; dead letters are not listed by themselves."""
        ...

    def hints(self, queue: str) -> AsyncIterator[Hint]:
        """Yield when a call made messages of *queue* claimable, now or later. May be wrong, late or absent.

        That includes calls that unlock messages of a queue with ``max_locked``, and those that change its limits.

        A change after this call is reported, if late; a broker that must subscribe first yields when it has, and after
        each interruption. So a caller that calls this, then receives, then waits for a hint, misses nothing. Several
        changes may be reported as one. Ended delays and locks are not reported; see ``Claim.due_in``.
        """
        ...


class PagingBroker(Broker, Protocol):
    """A broker that can't show dead letters by sequence; its ``traits.dead_pages`` is true."""

    def dead_pages(self, queue: str, which: Selection) -> AsyncGenerator[Sequence[DeadMessage], None]:
        """Yield the dead letters of *queue* that *which* selects, in any order, in pages of few bytes."""
        ...


class SurveyingBroker(Broker, Protocol):
    """A broker that tells in one request which of many queues hold messages; its ``traits.surveys`` is true."""

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Return whether each of *queues* holds a message that is ready, locked or delayed; in their order.

        A message whose send was answered before the request counts, by whatever process. *queues* are no dead letters.
        True may be wrong: then the caller claims in vain.
        """
        ...


class PushingBroker(Broker, Protocol):
    """A broker that sends messages to a process that waits for hints; its ``traits.pushes`` is true."""

    def receive_arrived(self, queue: str, limit: int, lock: float) -> Claim | None:
        """Do what ``receive`` does with what has come to this process already, at once; None if that takes a request.

        It raises nothing: whatever stands in its way is for ``receive``, which is called next.
        """
        ...

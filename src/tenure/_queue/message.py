"""A message on its way: what is sent, what is handed out under a lock, the verdicts on it, what is left of a dead one.

House rules:

- A delivery is named by queue, sequence and token. Every verb carries all three, so that a consumer whose lock is over
  cannot touch the next one's delivery.
- A body is bytes and headers are the broker's own: no envelope.
- What can be refused is refused here, before anything is written.
- Wall-clock moments (``enqueued_at``, ``locked_until``, ``dead_at``) are the store's, in Unix seconds: to be shown,
  never to decide how long a lock is good. That is counted on one's own clock, from before the question was sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict, Unpack
from zlib import crc32

from tenure._checks import check_seconds
from tenure._frozen import FrozenDict
from tenure.errors import ConfigError, MessageRefused

HeaderValue = str | int | float | bool
Headers = Mapping[str, HeaderValue]
NO_HEADERS: Headers = FrozenDict()

Token = str | int
"""What proves a claim: opaque, made by the broker, one for all that a claim handed out, and never used again."""

PRIORITY_MAX = 9
NAME_MAX = 200
TEXT_MAX = 255
INT_MAX = 2**63 - 1
COUNT_MAX = 2**31 - 1
HEADERS_MAX = 65_536
"""Bytes that the headers of a message may have, names and texts as UTF-8, and 8 for each other value."""
TRACEBACK_MAX = 16_384
TRACEBACK_BRIEF = 1_024
"""So much is kept of the traceback of a delivery that is neither the first nor the last allowed: so the history of a
message that failed fifty times stays below 100 KB."""
MESSAGE_MAX = 4_096
DESCRIPTION_MAX = 4_096
HISTORY_MAX = 50
"""So many attempts are kept of a message, the newest."""

DEAD_SUFFIX = "$dead"
"""Dead letters are a queue of their own, under the queue's name with this behind it."""

ID_MARK = "--"
"""Stands in an id that a broker makes up, before the message's sequence: ``orders--17``. No shell treats it specially,
and a sender would hardly write it. Ids are made up when they are told, so a message that an older tenure has sent is
called so as well."""

_FORMER_ID = re.compile(r"(.+)\$([0-9]+)", re.DOTALL)
"""How ids were made up before: ``orders$17``."""

_MADE_UP_ID = re.compile(rf"(.+){ID_MARK}([0-9]+)", re.DOTALL)

# Why a message died, when it was not its handler who said so.
MAX_DELIVERIES = "max_deliveries"
EXPIRED = "expired"
UNDECODABLE = "undecodable"
"""Its handler could not read its body as what it was to be."""

# What brokers answer alike.
EXPIRED_DESCRIPTION = "not handled before it expired"
NO_DEFERRED_DEAD_LETTERS = "a dead letter can't be deferred; complete it, abandon it, or redrive it"


def exhausted_description(deliveries: int | str) -> str:
    """Say why a message without deliveries left is dead."""
    return f"delivered {deliveries} times, and never completed"


BODY_SHOWN = 60
"""So many bytes of a body are shown in the ``repr`` of a message."""


def brief(message: Outgoing | Delivery | DeadMessage) -> str:
    """Return the ``repr`` of *message*: what is not as usual, and the beginning of its body."""
    shown = []
    for name in message._fields if isinstance(message, tuple) else [one.name for one in fields(message)]:
        value = getattr(message, name)
        if isinstance(value, (bytes, bytearray)) and len(value) > BODY_SHOWN:
            shown.append(f"{name}={bytes(value[:BODY_SHOWN])!r}… ({len(value):,} bytes)")
        elif value is not None and value != NO_HEADERS:
            shown.append(f"{name}={value!r}")
    return f"{type(message).__name__}({', '.join(shown)})"


# --- going in ----------------------------------------------------------------------------------------------------


class NotGiven(Enum):
    """The default of ``json=``, where None is a value."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return self.value


NOT_GIVEN = NotGiven.NOT_GIVEN


class SendOptions(TypedDict, total=False):
    """What can be said of a message beside its body; :class:`Outgoing` tells what each means."""

    id: str | None
    headers: Headers
    delay: float
    at: datetime | float | None
    expires_in: float | None
    session: str | None
    priority: int
    reply_to: str | None
    correlation_id: str | None


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A message to be sent. (Not frozen: that would cost more time than all the rest of building one.)

    Args:
        body: The content, as bytes.
        id: Names the message; a second one with the same id inside the queue's dedupe window is not kept. Without,
            the broker makes one up, and nothing is remembered of it.
        headers: Text names; values are text, whole numbers, numbers or booleans.
        delay: Seconds before it can be received.
        at: The moment from which it can be received: an aware ``datetime``, or Unix seconds. Not with *delay*.
        expires_in: Seconds from now after which an unreceived message is dead-lettered as ``expired``.
        session: Messages of one session are received in the order sent, by one consumer at a time.
        priority: 0 to 9; higher ones are received first. Ignored inside a session.
        reply_to: The queue that waits for the answer.
        correlation_id: What the answer is to; an answer carries the same.
    """

    body: bytes = field(default=b"", kw_only=False)
    id: str | None = None
    headers: Headers = field(default_factory=lambda: NO_HEADERS)
    delay: float = 0.0
    at: datetime | float | None = None
    expires_in: float | None = None
    session: str | None = None
    priority: int = 0
    reply_to: str | None = None
    correlation_id: str | None = None

    def __repr__(self) -> str:
        return brief(self)

    @classmethod
    def json(cls, value: object, **options: Unpack[SendOptions]) -> Outgoing:
        """Return a message whose body is *value* as JSON, and says so in the header ``content-type``.

        Args:
            value: What ``json`` takes, a dataclass, a pydantic model, a msgspec struct.
            options: The other fields.

        Raises:
            ConfigError: The value can't be written as JSON.
        """
        from tenure._queue.bodies import JSON_TYPE, encode

        options["headers"] = {"content-type": JSON_TYPE, **options.get("headers", NO_HEADERS)}
        return cls(encode(value), **options)


def outgoing(body: bytes, json: object, options: SendOptions) -> Outgoing:
    """Return the message with this *body*, or with *json* as its body if that is given.

    Raises:
        ConfigError: Both are given, or the value can't be written as JSON.
    """
    if json is NOT_GIVEN:
        return Outgoing(body, **options)
    if body != b"":
        raise ConfigError("body and json can't both be given; write one of them")
    return Outgoing.json(json, **options)


def checked(messages: Sequence[Outgoing], body_max: int, most: int = 0) -> list[Outgoing]:
    """Return *messages* fit to be written: bodies as bytes, ``at`` as Unix seconds, headers copied.

    Args:
        messages: What is to be sent.
        body_max: The largest body in bytes that the queue takes.
        most: To how much the store lets that be raised, for the message of the error.

    Raises:
        MessageRefused: One of them can't be sent. None is then; the message says which one and why.
    """
    ready: list[Outgoing] = []
    for index, message in enumerate(messages):
        try:
            ready.append(_checked(message, body_max, most))
        except ConfigError as error:
            raise MessageRefused(str(error), index, len(messages)) from error.__cause__
    return ready


def _checked(message: Outgoing, body_max: int, most: int) -> Outgoing:
    if not isinstance(message, Outgoing):
        raise ConfigError(f"a message must be an Outgoing, not {message!r:.80}; write Outgoing(b'…')")
    body: object = message.body
    changes: dict[str, Any] = {}
    if type(body) is not bytes:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            advice = "; encode it, or send it with json=" if isinstance(body, str) else "; json= sends other values"
            raise ConfigError(f"body must be bytes, not {type(body).__name__}{advice}")
        changes["body"] = body = bytes(body)
    if len(body) > body_max:
        raise ConfigError(_too_large(len(body), body_max, most))
    if message.headers is not NO_HEADERS:
        changes["headers"] = _headers(message.headers)
    if message.at is not None:
        changes["at"] = _moment(message.at, message.delay)
    check_seconds("delay", message.delay, least=0.0)
    if message.expires_in is not None:
        check_seconds("expires_in", message.expires_in, above=0.0)
    if type(message.priority) is not int or not 0 <= message.priority <= PRIORITY_MAX:
        raise ConfigError(f"priority must be a whole number from 0 to {PRIORITY_MAX}, not {message.priority!r}")
    for name in ("id", "session", "correlation_id"):
        text = getattr(message, name)
        if text is not None:
            check_text(name, text, optional=True)
    if message.reply_to is not None:
        check_name(message.reply_to, "reply_to", optional=True)
    return replace(message, **changes) if changes else message


def _too_large(size: int, body_max: int, most: int) -> str:
    if body_max >= most:
        return f"body ({size:,} bytes) must not be larger than {body_max:,} bytes on this store; send a reference to it"
    return (
        f"body ({size:,} bytes) must not be larger than body_max ({body_max:,} bytes); send a reference to it, or "
        "raise that setting of the queue: await queue.declare(body_max=…)"
    )


def _headers(headers: object) -> Headers:
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers must be a mapping of names to values, not {type(headers).__name__}")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str):
            raise ConfigError(f"a header's name must be text, not {name!r}")
        check_text("a header's name", name)
        if type(value) not in (str, int, float, bool):
            raise ConfigError(
                f"the header {name!r} must be text, a whole number, a number or a boolean, not {type(value).__name__}"
            )
        if type(value) is str:
            _encodable(f"the header {name!r}", value)
        if type(value) is int and not -INT_MAX - 1 <= value <= INT_MAX:
            raise ConfigError(f"the header {name!r} must fit into 64 bits, {value} does not; write it as text")
        if type(value) is float and not math.isfinite(value):
            raise ConfigError(f"the header {name!r} must be a finite number, not {value!r}")
        size += len(name.encode()) + (len(value.encode()) if type(value) is str else 8)
    if size > HEADERS_MAX:
        raise ConfigError(
            f"headers ({size:,} bytes) must not be larger than {HEADERS_MAX:,} bytes; put what is large into the body"
        )
    return FrozenDict(headers) if headers else NO_HEADERS


def _moment(at: object, delay: float) -> float:
    if delay:
        raise ConfigError(f"delay ({delay!r}) and at ({at!s}) can't both be given; write one of them")
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise ConfigError(
                f"at ({at.isoformat()}) must have a time zone; try at=….astimezone() or tzinfo=timezone.utc"
            )
        at = at.timestamp()
    check_seconds("at", at, least=0.0, what="a datetime or finite Unix seconds")
    return float(at)  # type: ignore[arg-type]


def check_name(name: object, what: str = "the queue's name", *, optional: bool = False) -> str:
    """Return *name* if a queue can be called so.

    Raises:
        ConfigError: It is empty, too long, or holds a character that is kept for tenure's own use.
    """
    check_text(what, name, most=NAME_MAX, optional=optional)
    assert isinstance(name, str)
    if name.endswith(DEAD_SUFFIX):
        home = name.removesuffix(DEAD_SUFFIX)
        raise ConfigError(
            f"{what} ({name!r}) must not contain '$'; the dead letters of {home!r} are "
            f"queue({home!r}).dead_letters, and tenure dead on the command line"
        )
    if "$" in name:
        raise ConfigError(f"{what} ({name!r}) must not contain '$', which marks tenure's own queues")
    if not name.isprintable() or name != name.strip():
        raise ConfigError(f"{what} ({name!r}) must be printable, with no space around it")
    return name


def check_text(what: str, text: object, most: int = TEXT_MAX, *, optional: bool = False) -> None:
    """Refuse *text* that is no text, empty, longer than *most*, or that can't be stored."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be text, not {text!r:.80}")
    if not text:
        instead = "leave it out instead" if optional else "give it at least one character"
        raise ConfigError(f"{what} must not be empty; {instead}")
    if len(text) > most:
        raise ConfigError(f"{what} ({len(text)} characters) must not be longer than {most} characters")
    _encodable(what, text)


def check_count(what: str, count: object, least: int = 1, most: int = COUNT_MAX) -> None:
    """Refuse a *count* that is no whole number, less than *least*, or more than every store can count."""
    if type(count) is not int or count < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {count!r:.80}")
    if count > most:
        raise ConfigError(f"{what} must not be more than {most:,}")


def check_sequences(what: str, sequences: Iterable[object]) -> None:
    """Refuse what can't be the sequence of a message."""
    for one in sequences:
        check_count(what, one, least=0, most=INT_MAX)


def check_collection(what: str, given: object) -> None:
    """Refuse a text, which is a collection of letters, where a collection of texts or numbers is meant."""
    if isinstance(given, (str, bytes)):
        raise ConfigError(f"{what} must be a collection, not {given!r}; try {what}=[{given!r}]")


def chosen(
    ids: Collection[str] | None, sequences: Collection[int] | None
) -> tuple[frozenset[str] | None, frozenset[int] | None]:
    """Return which messages *ids* mean, in whatever form they were noted, and *sequences*; None where none are given.

    Raises:
        ConfigError: One of them can't be the id, or the sequence, of a message.
    """
    check_collection("ids", ids)
    check_collection("sequences", sequences)
    for one in ids or ():
        check_text("an id", one)
    check_sequences("a sequence", sequences or ())
    return (
        None if ids is None else frozenset(name for one in ids for name in names_of(one)),
        None if sequences is None else frozenset(sequences),
    )


def _encodable(what: str, text: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise ConfigError(f"{what} must not contain a NUL character")
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} ({text!r:.80}) can't be encoded as UTF-8") from error
    if "\0" in text:
        raise ConfigError(f"{what} must not contain a NUL character")


def partition_of(key: str | bytes, partitions: int) -> str:
    """Return the session that *key* falls into when a queue is cut into so many *partitions*, in every process alike.

    Messages of one key keep their order, different partitions are worked on at the same time, and nobody has to know
    how many consumers there are::

        await queue.send(body, session=partition_of(customer, 16))
    """
    check_count("partitions", partitions)
    if isinstance(key, str):
        _encodable("key", key)
        key = key.encode()
    if not isinstance(key, bytes):
        raise ConfigError(f"key must be text or bytes, not {key!r:.80}; try str(…)")
    number = crc32(key) % partitions
    return f"partition-{number}"


def names_of(id_: str) -> tuple[str, ...]:
    """Return what a message may be called that somebody has noted as *id_*: in the present form, too."""
    former = _FORMER_ID.fullmatch(id_)
    return (id_, f"{former[1]}{ID_MARK}{former[2]}") if former else (id_,)


def spellings_of(id_: str) -> tuple[str, ...]:
    """Return what an older tenure or this one may have called a message whose id is *id_*, in either form."""
    made_up = _MADE_UP_ID.fullmatch(id_)
    return (id_, f"{made_up[1]}${made_up[2]}") if made_up else names_of(id_)


def dead_letters_of(queue: str) -> str:
    """Return the name under which the dead letters of *queue* are received."""
    return queue + DEAD_SUFFIX


# --- failures, and what is left of them --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as text that outlives its process."""

    type: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, most: int = TRACEBACK_MAX) -> Failure:
        """Write down *error*; of a traceback longer than *most* characters its end is kept, which says what happened.

        Nothing that the exception's own methods do comes out of this.
        """
        told = traceback_of(error)
        if len(told) > most:
            told = "…" + told[-most:]
        return cls(storable(name_of(error))[:TEXT_MAX], storable(text_of(error)[:MESSAGE_MAX]), storable(told))


def traceback_most(deliveries: int, max_deliveries: int) -> int:
    """Return how many characters to keep of the traceback of the delivery with this number."""
    return TRACEBACK_MAX if deliveries == 1 or deliveries >= max_deliveries else TRACEBACK_BRIEF


def name_of(error: BaseException) -> str:
    """Return the full name of the type of *error*."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a note in its place if the exception's own ``__str__`` fails, in whatever way."""
    try:
        return str.__str__(str(error))  # never a subclass of str, which could have methods of its own
    except BaseException:
        return "(its text could not be had)"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of *error* as text, or a note in its place if it can't be had."""
    from traceback import format_exception  # dear to import, and seldom needed

    try:
        return "".join(format_exception(error))
    except BaseException:  # __str__ and __notes__ are forgiven by the module itself, but not everything they can raise
        return f"{name_of(error)}: (its traceback could not be had)"


def storable(text: str) -> str:
    """Return *text* with what no store would take (lone surrogates, NUL) escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def check_description(text: object) -> None:
    """Refuse what is no text."""
    if not isinstance(text, str):
        raise ConfigError(
            f"description must be text, not {text!r:.80}; write str(…), or give an exception as its cause"
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A delivery that did not settle the message for good; ``at`` by the store's wall clock."""

    number: int
    """Which delivery it was: 1 is the first."""
    at: float
    outcome: Literal["abandoned", "expired", "rejected"]
    """``abandoned`` by its consumer, its lock ``expired`` (crash, hang), or ``rejected`` to the dead letters."""
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """Why, when and after what a message died."""

    reason: str
    description: str
    at: float
    error: Failure | None = None
    """The last failure told of."""
    history: tuple[Attempt, ...] = ()


# --- handed out --------------------------------------------------------------------------------------------------


class Died(NamedTuple):
    """A message whose death the broker decided by itself: it expired, or its last lock did."""

    sequence: int
    id: str
    delivery_count: int
    reason: str


class Delivery(NamedTuple):
    """A message locked to us. A tuple, so that a broker can make thousands out of rows: ``Delivery._make(row)``."""

    queue: str
    sequence: int
    """The message's number in its queue: rising in the order sent, unchanged by redelivery."""
    token: Token
    """Proves the lock; the same for all deliveries of one claim."""
    id: str
    body: bytes
    headers: Headers
    delivery_count: int
    """How many times it was handed out, this time included. Given back, that time is taken off again."""
    enqueued_at: float
    locked_until: float
    """By the store's wall clock: for show."""
    session: str | None = None
    priority: int = 0
    reply_to: str | None = None
    correlation_id: str | None = None
    death: Death | None = None
    """Set only for what is received from the dead letters."""

    def __repr__(self) -> str:
        return brief(self)


class SessionLock(NamedTuple):
    """A session locked to us: its messages come to nobody else."""

    queue: str
    session: str
    token: Token
    locked_until: float
    state: bytes | None = None
    """What was last stored for this session, when it was accepted."""


State = Literal["ready", "locked", "delayed", "deferred"]
"""Where a live message is; each is in one state. The same names as in :class:`Stats`."""

STATES: frozenset[State] = frozenset(("ready", "locked", "delayed", "deferred"))


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A live message, looked at without locking it."""

    queue: str
    sequence: int
    id: str
    body: bytes
    headers: Headers
    state: State
    delivery_count: int
    """How many times it was handed out; the present time included if it is locked."""
    enqueued_at: float
    locked_until: float | None
    """When its lock ends unless it is renewed; None if it is not locked."""
    due_at: float | None
    """When it can be received; None unless it is delayed."""
    session: str | None
    priority: int
    reply_to: str | None
    correlation_id: str | None


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A dead letter, looked at without locking it."""

    queue: str
    sequence: int
    id: str
    body: bytes
    headers: Headers
    delivery_count: int
    enqueued_at: float
    session: str | None
    priority: int
    reply_to: str | None
    correlation_id: str | None
    reason: str
    description: str
    dead_at: float
    error: Failure | None
    history: tuple[Attempt, ...]

    def __repr__(self) -> str:
        return brief(self)


def live_message_of(
    delivery: Delivery, state: State, *, locked_until: float | None = None, due_at: float | None = None
) -> LiveMessage:
    """Return *delivery* as a live message that is only looked at."""
    return LiveMessage(
        delivery.queue,
        delivery.sequence,
        delivery.id,
        delivery.body,
        delivery.headers,
        state,
        delivery.delivery_count,
        delivery.enqueued_at,
        locked_until,
        due_at,
        delivery.session,
        delivery.priority,
        delivery.reply_to,
        delivery.correlation_id,
    )


def dead_message_of(queue: str, delivery: Delivery, death: Death) -> DeadMessage:
    """Return *delivery* as a dead letter of *queue* that is only looked at."""
    return DeadMessage(
        queue,
        delivery.sequence,
        delivery.id,
        delivery.body,
        delivery.headers,
        delivery.delivery_count,
        delivery.enqueued_at,
        delivery.session,
        delivery.priority,
        delivery.reply_to,
        delivery.correlation_id,
        death.reason,
        death.description,
        death.at,
        death.error,
        death.history,
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """How many messages a queue holds, each counted in one place, at one moment."""

    ready: int = 0
    """Could be received now: also those whose lock or delay has ended."""
    locked: int = 0
    delayed: int = 0
    """Sent or abandoned with a delay that has not ended."""
    deferred: int = 0
    dead: int = 0
    """Dead letters, also those that are being looked at under a lock."""
    oldest_age: float = 0.0
    """Seconds since the oldest ready message was sent; 0 if none is ready."""

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in ("ready", "locked", "delayed", "deferred", "dead")}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


def count_of(stats: Stats) -> int:
    """Return how many messages *stats* counts, dead letters included."""
    return stats.ready + stats.locked + stats.delayed + stats.deferred + stats.dead


# --- verdicts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Complete:
    """It was handled: remove it for good.

    ``sends`` are written in the same step where the store has transactions, and before the removal where not.
    ``remember`` notes the id in the queue's inbox for so many seconds, in the same step.
    """

    sends: tuple[tuple[str, Outgoing], ...] = ()
    remember: float = 0.0


@dataclass(frozen=True, slots=True)
class Abandon:
    """It was tried and failed: to be delivered again after *delay*, or dead if that was its last delivery."""

    delay: float = 0.0
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class GiveBack:
    """It was not tried: unlock it and take this delivery off its count, as if it had never been handed out."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Not now: put it aside; it is received again only by its sequence."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """It can't be handled, now or ever: keep it among the dead letters.

    The description is made fit for every store: a verdict that one of them refused would hold up all that are settled
    with it.
    """

    reason: str
    description: str = ""
    error: Failure | None = None

    def __post_init__(self) -> None:
        check_description(self.description)
        fit = storable(self.description)
        if len(fit) > DESCRIPTION_MAX:
            fit = fit[: DESCRIPTION_MAX - 1] + "…"
        object.__setattr__(self, "description", fit)


Verdict = Complete | Abandon | GiveBack | Defer | DeadLetter

COMPLETE = Complete()
GIVE_BACK = GiveBack()


class Settlement(NamedTuple):
    """A verdict on one delivery."""

    delivery: Delivery
    verdict: Verdict


# --- answers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewed:
    """Yes: the lock holds for the time asked, from some moment after the question was sent, or for longer."""

    locked_until: float


@dataclass(frozen=True, slots=True)
class Settled:
    """Yes: the verdict stands. ``dead`` tells that an abandoned message died, as it had no delivery left."""

    dead: bool = False


@dataclass(frozen=True, slots=True)
class Lapsed:
    """No: this lock is over, for certain and for ever. The message may be with another, settled, or waiting."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Yes: the queue is gone, and with it the messages that are counted here."""

    stats: Stats


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """No: the queue holds the messages that are counted here, and nothing was changed."""

    stats: Stats


SETTLED = Settled()
SETTLED_DEAD = Settled(dead=True)
LAPSED = Lapsed()

"""The messages between members: plain values, and their encoding as bytes.

House rules:

- A message is complete in itself. It may be lost, late or duplicated, and it may overtake another.
- ``decode(encode(message)) == message``. Any other input decodes to a message that is fit to be handled, or raises
  :class:`Malformed`: every field has its type and its limit.
- A reply carries its request's ``round``. A member that doesn't wait for that round ignores it.

A message is a JSON array: its tag, then its fields in the order of the classes below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Metadata

FRAME_MAX = 65_536
"""Bytes of a whole frame; a longer one is refused before it is read."""

BODY_MAX = FRAME_MAX - 256
"""Bytes of a message; the rest of a frame is for the transport's header."""

TEXT_MAX = 1_024
"""Characters of a name or a holder."""

METADATA_MAX = 16_384
"""Bytes of a term's metadata, as JSON."""

NUMBER_MAX = 2**62
"""Tokens, rounds and nonces are below it."""

TTL_MAX = 86_400.0 * 366


class Malformed(ValueError):
    """Some bytes are no valid message."""


@dataclass(frozen=True, slots=True)
class StandingPromise:
    """A promise that still holds: to which member, for which claim, and for how many seconds more.

    *won* is set once the claim was renewed: only a leader renews, so a majority had voted for it. *resign_asked* is set
    once its leader was asked to step down.
    """

    member: int
    holder: str
    token: int
    remaining: float
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    won: bool = False
    resign_asked: bool = False


# --- liveness, start-up ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive; ``newest`` is the highest token that it knows."""

    newest: int


@dataclass(frozen=True, slots=True)
class StartupRequest:
    """The sender has just started and has lost its promises: it asks whether the receiver leads anything."""

    round: int


@dataclass(frozen=True, slots=True)
class StartupReply:
    """Reply to ``StartupRequest``: ``clear`` if the sender leads and claims nothing; the newest token it knows.

    ``bound`` is an upper limit of all tokens, those included that were given since without the sender's knowledge.
    """

    round: int
    clear: bool
    newest: int
    bound: int


# --- votes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """The sender asks for a vote as the leader of *name*, for *ttl* seconds; ``renewal`` if it leads already."""

    round: int
    name: str
    holder: str
    token: int
    ttl: float
    renewal: bool
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class Vote:
    """Yes to ``Claim``: no other claim gets this vote meanwhile. ``resign_asked``: the leader is asked to resign."""

    round: int
    resign_asked: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """No to ``Claim``: the name is held, or the token is not newer than ``newest``."""

    round: int
    newest: int
    standing: StandingPromise | None


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """The sender gives up its claim to *name* under this token: votes for it are free. *won*: the sender has led."""

    round: int
    name: str
    holder: str
    token: int
    won: bool


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """Reply to ``ReleaseRequest``: done."""

    round: int


# --- questions that change nothing -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """Ask which claim to *name* has the receiver's vote."""

    round: int
    name: str


@dataclass(frozen=True, slots=True)
class InspectReply:
    """Reply to ``InspectRequest``: the highest token known for this name, and the promise that holds, if any."""

    round: int
    newest: int
    standing: StandingPromise | None


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Ask which names after *after* the receiver knows."""

    round: int
    after: str


@dataclass(frozen=True, slots=True)
class ListReply:
    """Reply to ``ListRequest``: the next names, sorted; an empty page is the last."""

    round: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResignRequest:
    """Ask the leader of *name* to step down."""

    round: int
    name: str


@dataclass(frozen=True, slots=True)
class ResignReply:
    """Reply to ``ResignRequest``: whether a leader has the sender's vote; it reads the request in the next ``Vote``."""

    round: int
    led: bool


# --- strategies: which member claims -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BullyElection:
    """Bully's ELECTION: the sender holds an election for *name*; a higher member that wants the name takes over."""

    name: str


@dataclass(frozen=True, slots=True)
class BullyOk:
    """Bully's answer: the sender ranks higher and takes over."""

    name: str


@dataclass(frozen=True, slots=True)
class RingElection:
    """Chang–Roberts election message: the highest *candidate* so far, passed on ``hops`` times."""

    name: str
    candidate: int
    hops: int


@dataclass(frozen=True, slots=True)
class RingElected:
    """Chang–Roberts elected message: *candidate* was the highest in the ring, and claims the name."""

    name: str
    candidate: int
    hops: int


ElectionMessage = BullyElection | BullyOk | RingElection | RingElected
Question = Claim | ReleaseRequest | InspectRequest | ListRequest | ResignRequest
Reply = Vote | Refusal | ReleaseReply | InspectReply | ListReply | ResignReply
Message = Heartbeat | StartupRequest | StartupReply | Question | Reply | ElectionMessage


# --- fields ------------------------------------------------------------------------------------------------------


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < NUMBER_MAX:
        raise Malformed("not a number in range")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise Malformed("not true or false")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= TTL_MAX:  # neither holds for NaN
        raise Malformed("not a duration")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= TEXT_MAX:
        raise Malformed("not a name")
    return value


def _maybe_text(value: Any) -> str:
    return value if value == "" and type(value) is str else _text(value)


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise Malformed("not a list of names")
    return tuple(_text(each) for each in value)


def _metadata(value: Any) -> Metadata:
    if type(value) is not dict or any(type(each) is not str for each in value.values()):
        raise Malformed("not metadata")
    if metadata_size(value) > METADATA_MAX:  # a reply repeats it, and must fit into a frame too
        raise Malformed("too much metadata")
    return FrozenDict(value) if value else NO_METADATA


def _standing(value: Any) -> StandingPromise | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 7:
        raise Malformed("not a promise")
    member, holder, token, remaining, metadata, won, resign_asked = value
    return StandingPromise(
        _number(member),
        _text(holder),
        _number(token),
        _seconds(remaining),
        _metadata(metadata),
        _flag(won),
        _flag(resign_asked),
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _number,
    "bool": _flag,
    "float": _seconds,
    "str": _text,
    "tuple[str, ...]": _texts,
    "Metadata": _metadata,
    "StandingPromise | None": _standing,
}

_KINDS: dict[str, type[Any]] = {
    # The tags are the wire format: members of other versions read them, so they stay when a class is renamed.
    "beat": Heartbeat,
    "learn": StartupRequest,
    "told": StartupReply,
    "claim": Claim,
    "vouch": Vote,
    "deny": Refusal,
    "free": ReleaseRequest,
    "freed": ReleaseReply,
    "look": InspectRequest,
    "seen": InspectReply,
    "list": ListRequest,
    "listed": ListReply,
    "ask": ResignRequest,
    "asked": ResignReply,
    "election": BullyElection,
    "okay": BullyOk,
    "elect": RingElection,
    "elected": RingElected,
}
_TAGS: dict[type[Any], str] = {kind: tag for tag, kind in _KINDS.items()}
_SHAPES: dict[str, tuple[Callable[[Any], Any], ...]] = {
    tag: tuple(
        _maybe_text if (kind, each.name) == (ListRequest, "after") else _READERS[str(each.type)]
        for each in fields(kind)
    )
    for tag, kind in _KINDS.items()
}


# --- bytes -------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return *message* as bytes.

    Raises:
        Malformed: It is longer than a frame may be.
    """
    array: list[Any] = [_TAGS[type(message)]]
    array += [_plain(getattr(message, name)) for name in _NAMES[type(message)]]
    body = _TO_JSON.encode(array).encode("ascii")
    if len(body) > BODY_MAX:
        raise Malformed(f"the message has {len(body)} bytes, more than {BODY_MAX}")
    return body


def _plain(value: Any) -> Any:
    match value:
        case StandingPromise(member, holder, token, remaining, metadata, won, resign_asked):
            return [member, holder, token, remaining, dict(metadata), won, resign_asked]
        case FrozenDict():
            return dict(value)
    return value


def decode(body: bytes) -> Message:
    """Return the message that *body* encodes.

    Raises:
        Malformed: It is no valid message.
    """
    if len(body) > BODY_MAX:
        raise Malformed("too long")
    try:
        array = _FROM_JSON.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise Malformed("not JSON") from error
    if type(array) is not list or not array or type(array[0]) is not str:
        raise Malformed("not an array with a tag")
    shape = _SHAPES.get(array[0])
    if shape is None or len(shape) != len(array) - 1:
        raise Malformed("an unknown tag, or another number of fields")
    message: Message = _KINDS[array[0]](*(read(value) for read, value in zip(shape, array[1:], strict=True)))
    return message


def _no_constant(written: str) -> float:
    raise Malformed(f"{written} is no number")


_NAMES = {kind: tuple(each.name for each in fields(kind)) for kind in _KINDS.values()}
_TO_JSON = json.JSONEncoder(separators=(",", ":"))  # made once: making one takes as long as using it
_FROM_JSON = json.JSONDecoder(parse_constant=_no_constant)


def metadata_size(metadata: Metadata) -> int:
    """Return how many bytes *metadata* takes in a message."""
    return len(json.dumps(dict(metadata), separators=(",", ":")))


def page(names: Sequence[str]) -> tuple[str, ...]:
    """Return as many of *names*, from the first on, as fit into one message for certain."""
    room, taken = BODY_MAX // 2, 0
    for count, name in enumerate(names):
        taken += len(json.dumps(name)) + 1
        if taken > room:
            return tuple(names[:count])
    return tuple(names)

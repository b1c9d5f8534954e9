"""What members say to one another: plain values, and their form as bytes.

House rules:

- A message is complete in itself. It may be lost, come late, come twice, and overtake another.
- ``decode(encode(message)) == message``. Whatever else is decoded gives a message that is fit to be handled, or
  :class:`Malformed`: every field has its type and its limit.
- What answers a question carries the question's ``round``, and means nothing to anybody who doesn't wait for it.

Fields are written in the order of the classes below, as a JSON array that begins with the message's tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Metadata

FRAME_MAX = 65_536
"""Bytes of a frame, all in all; a longer one is refused before it is read."""

BODY_MAX = FRAME_MAX - 256
"""Bytes of a message; the rest is for what a transport puts around it."""

TEXT_MAX = 1_024
"""Characters of a name or a holder."""

METADATA_MAX = 16_384
"""Bytes of a term's metadata, as JSON."""

NUMBER_MAX = 2**62
"""Tokens, rounds and nonces are below it."""

TTL_MAX = 86_400.0 * 366


class Malformed(ValueError):
    """Say that some bytes are no message."""


@dataclass(frozen=True, slots=True)
class Held:
    """A promise that still stands: to which member, for which claim, and for how many seconds more.

    *won* if it is known that others have vouched, too, and it made a leader: for who renews has led.
    """

    member: int
    holder: str
    token: int
    remaining: float
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    won: bool = False


# --- who is there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beat:
    """I live; ``newest`` is the highest token that I know of."""

    newest: int


@dataclass(frozen=True, slots=True)
class Learn:
    """I have just started and know nothing of what I promised before: tell me whether you lead anything."""

    round: int


@dataclass(frozen=True, slots=True)
class Told:
    """To ``Learn``: whether I lead nothing and claim nothing, the highest token that I know of, and the highest that
    there can be: ``bound`` counts those that may have been given since where I don't hear of it."""

    round: int
    clear: bool
    newest: int
    bound: int


# --- votes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Vouch for me as the leader of *name*, for *ttl* seconds from now; ``renewal`` if I lead it already."""

    round: int
    name: str
    holder: str
    token: int
    ttl: float
    renewal: bool
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class Vouch:
    """Yes to ``Claim``: I vouch for nobody else meanwhile. ``resign_asked``: somebody wants you to step down."""

    round: int
    resign_asked: bool


@dataclass(frozen=True, slots=True)
class Deny:
    """No to ``Claim``: the name is held, or the token is not newer than ``newest``."""

    round: int
    newest: int
    held: Held | None


@dataclass(frozen=True, slots=True)
class Free:
    """I claim *name* no more under this token: whoever vouched for it is free. *won*: I have led under it."""

    round: int
    name: str
    holder: str
    token: int
    won: bool


@dataclass(frozen=True, slots=True)
class Freed:
    """To ``Free``: done."""

    round: int


# --- questions that change nothing -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """Whom do you vouch for?"""

    round: int
    name: str


@dataclass(frozen=True, slots=True)
class Seen:
    """To ``Look``: the highest token I vouched for or heard of under this name, and the promise that stands, if any."""

    round: int
    newest: int
    held: Held | None


@dataclass(frozen=True, slots=True)
class List:
    """Which names after *after* do you know?"""

    round: int
    after: str


@dataclass(frozen=True, slots=True)
class Listed:
    """To ``List``: the next few of them, sorted; none at the end."""

    round: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask whoever leads *name* to step down."""

    round: int
    name: str


@dataclass(frozen=True, slots=True)
class Asked:
    """To ``Ask``: whether I vouch for a leader, who will read it in my next answer."""

    round: int
    led: bool


# --- who should claim: the strategies ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Election:
    """Bully: I hold an election for *name*; if you rank higher and want it, take over."""

    name: str


@dataclass(frozen=True, slots=True)
class Okay:
    """Bully: I rank higher and take over."""

    name: str


@dataclass(frozen=True, slots=True)
class Elect:
    """Ring: *candidate* is the highest so far; ``hops`` is how often this was passed on."""

    name: str
    candidate: int
    hops: int


@dataclass(frozen=True, slots=True)
class Elected:
    """Ring: *candidate* has come round, and claims the name."""

    name: str
    candidate: int
    hops: int


Strategic = Election | Okay | Elect | Elected
Question = Claim | Free | Look | List | Ask
Reply = Vouch | Deny | Freed | Seen | Listed | Asked
Message = Beat | Learn | Told | Question | Reply | Strategic


# --- fields ------------------------------------------------------------------------------------------------------


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < NUMBER_MAX:
        raise Malformed("not a number of ours")
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
    if metadata_size(value) > METADATA_MAX:  # or it would be repeated in an answer that is longer than the question
        raise Malformed("too much metadata")
    return FrozenDict(value) if value else NO_METADATA


def _held(value: Any) -> Held | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 6:
        raise Malformed("not a promise")
    member, holder, token, remaining, metadata, won = value
    return Held(_number(member), _text(holder), _number(token), _seconds(remaining), _metadata(metadata), _flag(won))


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _number,
    "bool": _flag,
    "float": _seconds,
    "str": _text,
    "tuple[str, ...]": _texts,
    "Metadata": _metadata,
    "Held | None": _held,
}

_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Beat, Learn, Told, Claim, Vouch, Deny, Free, Freed, Look, Seen, List, Listed, Ask, Asked),
        *(Election, Okay, Elect, Elected),
    )
}
_SHAPES: dict[str, tuple[Callable[[Any], Any], ...]] = {
    tag: tuple(
        _maybe_text if (kind, each.name) == (List, "after") else _READERS[str(each.type)] for each in fields(kind)
    )
    for tag, kind in _KINDS.items()
}


# --- bytes -------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return the form of *message* as bytes.

    Raises:
        Malformed: It is longer than a frame may be.
    """
    told: list[Any] = [type(message).__name__.lower()]
    told += [_plain(getattr(message, name)) for name in _NAMES[type(message)]]
    body = _TO_JSON.encode(told).encode("ascii")
    if len(body) > BODY_MAX:
        raise Malformed(f"the message has {len(body)} bytes, more than {BODY_MAX}")
    return body


def _plain(value: Any) -> Any:
    match value:
        case Held(member, holder, token, remaining, metadata, won):
            return [member, holder, token, remaining, dict(metadata), won]
        case FrozenDict():
            return dict(value)
    return value


def decode(body: bytes) -> Message:
    """Return the message that *body* stands for.

    Raises:
        Malformed: It stands for none.
    """
    if len(body) > BODY_MAX:
        raise Malformed("too long")
    try:
        told = _FROM_JSON.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise Malformed("not JSON") from error
    if type(told) is not list or not told or type(told[0]) is not str:
        raise Malformed("not an array with a tag")
    shape = _SHAPES.get(told[0])
    if shape is None or len(shape) != len(told) - 1:
        raise Malformed("no message of ours")
    message: Message = _KINDS[told[0]](*(read(value) for read, value in zip(shape, told[1:], strict=True)))
    return message


def _no_constant(written: str) -> float:
    raise Malformed(f"{written} is no number")


_NAMES = {kind: tuple(each.name for each in fields(kind)) for kind in _KINDS.values()}
_TO_JSON = json.JSONEncoder(separators=(",", ":"))  # kept, as it takes as long to make one as to use it
_FROM_JSON = json.JSONDecoder(parse_constant=_no_constant)


def metadata_size(metadata: Metadata) -> int:
    """Return how many bytes *metadata* takes in a message."""
    return len(json.dumps(dict(metadata), separators=(",", ":")))


def page(names: Sequence[str]) -> tuple[str, ...]:
    """Return as many of *names*, from the first on, as surely fit into one message."""
    room, taken = BODY_MAX // 2, 0
    for count, name in enumerate(names):
        taken += len(json.dumps(name)) + 1
        if taken > room:
            return tuple(names[:count])
    return tuple(names)

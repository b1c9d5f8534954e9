"""The properties of a message as NATS headers: the sender's own as they are, and what tenure adds.

A message that was sent with a body alone has no headers. Its id, ``Nats-Msg-Id``, is NATS's own, which also keeps
a second one from being stored. A header of the sender whose name or value NATS can't carry as it is (a number, a line
break, a name with a space) goes into ``Tenure-Headers``, as JSON. What tenure itself must know of a message that it has
stored again (attempts, a reason, its first sequence) is in ``Tenure-State``, as JSON::

    Nats-Msg-Id: order-17
    tenant: blue
    Tenure-Headers: {"priority class": 3}
    Tenure-State: {"sequence": 17, "deliveries": 1, "history": […]}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tenure._backends.nats.errors import TooLarge
from tenure._frozen import FrozenDict
from tenure._queue.checks import INT_MAX
from tenure._queue.failures import Failure
from tenure._queue.message import HISTORY_MAX, NO_HEADERS, Attempt, Headers
from tenure._queue.outgoing import Outgoing, SendOptions, checked
from tenure.errors import ConfigError

NATIVE_ID = "Nats-Msg-Id"
ID, REPLY_TO, CORRELATION_ID = "Tenure-Id", "Tenure-Reply-To", "Tenure-Correlation-Id"
DUE, EXPIRES_IN = "Tenure-Due", "Tenure-Expires-In"
HEADERS, STATE = "Tenure-Headers", "Tenure-State"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_RESERVED = ("nats-", "tenure-")
ADDED = 512
"""Bytes of the headers that are added to a message when it is stored: its id, and what it expects."""

ROOM = 2_048
"""Bytes that a message leaves free when it is sent, so that it can be stored again with what tenure has to note."""

_YEAR_10000 = 253_402_300_800
"""In Unix seconds. A later time can't be shown as a date."""


@dataclass(frozen=True, slots=True)
class State:
    """What tenure has noted with a message; values that are the default are omitted in the text."""

    sequence: int = 0
    """Its sequence in its queue; 0 if that is the stream's."""
    enqueued_at: float = 0.0
    deliveries: int = 0
    """How often it was handed out when it was stored, the delivery at the same time included."""
    history: tuple[Attempt, ...] = ()
    before: int = 0
    """The number of entries of the history from before it was redriven."""
    reason: str | None = None
    """The reason of a dead letter, or of a message that is being moved to the dead letters."""
    description: str = ""
    dead_at: float = 0.0
    error: Failure | None = None
    locked_for: float = 0.0
    """Seconds for which a live message is locked from when it was stored, as it was delivered at the same time."""
    locked_until: float = 0.0
    """When the lock of a dead letter ends, by the store's clock."""
    lock: str = ""
    """The token of that lock."""
    due: float = 0.0
    """When a dead letter that was abandoned can be received, by the store's clock."""

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter, or is to be one and is not delivered any more."""
        return self.reason is not None

    def with_attempt(self, attempt: Attempt) -> State:
        """Return the state with one more attempt."""
        return replace(self, history=(*self.history, attempt)[-HISTORY_MAX:])

    def shortened(self) -> Iterator[State]:
        """Yield the state in full, then with ever less of the history, errors and description."""
        yield self
        brief = [replace(one, error=_shortened(one.error)) for one in self.history]
        yield replace(self, history=tuple(brief))
        yield replace(self, history=tuple(brief[-3:]), error=_shortened(self.error))
        yield replace(self, history=(), error=_shortened(self.error), before=0)
        yield replace(self, history=(), error=None, description=self.description[:200], before=0)


NO_STATE = State()


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a message beside its body."""

    id: str | None = None
    """None if the broker makes one up."""
    headers: Headers = field(default_factory=lambda: NO_HEADERS)
    reply_to: str | None = None
    correlation_id: str | None = None
    due: float = 0.0
    """When a delayed message can be received, by the store's clock."""
    expires_in: float = math.inf
    """Seconds after it was sent, until it expires."""
    state: State = NO_STATE


NO_PROPERTIES = Properties()


def properties_of(message: Outgoing, due: float) -> Properties:
    """Return the properties of a message that is to be sent."""
    return Properties(
        message.id,
        message.headers,
        message.reply_to,
        message.correlation_id,
        due,
        math.inf if message.expires_in is None else message.expires_in,
    )


def encode(properties: Properties, once: str | None = None) -> dict[str, str]:
    """Return the headers of a message.

    Args:
        properties: What they have to hold.
        once: If given, what keeps a second message with the same from being stored: as a rule, its id.
    """
    encoded: dict[str, str] = {}
    others: dict[str, object] = {}
    if once is not None:
        encoded[NATIVE_ID] = once if _fits(once) else json.dumps(once)
    if properties.id is not None and encoded.get(NATIVE_ID) != properties.id:
        encoded[ID] = json.dumps(properties.id)
    for name, value in properties.headers.items():
        if type(value) is str and _fits(value) and _NAME.fullmatch(name) and not _is_reserved(name):
            encoded[name] = value
        else:
            others[name] = value
    if others:
        encoded[HEADERS] = json.dumps(others)
    if properties.reply_to is not None:
        encoded[REPLY_TO] = _text(properties.reply_to)
    if properties.correlation_id is not None:
        encoded[CORRELATION_ID] = _text(properties.correlation_id)
    if properties.due:
        encoded[DUE] = repr(properties.due)
    if properties.expires_in != math.inf:
        encoded[EXPIRES_IN] = repr(properties.expires_in)
    if properties.state != NO_STATE:
        encoded[STATE] = _state_to_json(properties.state)
    return encoded


def size_of(headers: Mapping[str, str]) -> int:
    """Return how many bytes the headers take."""
    return 12 + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())


def encode_to_fit(properties: Properties, body: bytes, most: int) -> dict[str, str]:
    """Return the headers of a message of *most* bytes at most, with as much of its state as fits beside *body*.

    Raises:
        TooLarge: Not even the least of it fits.
    """
    for less in properties.state.shortened():
        encoded = encode(replace(properties, state=less))
        if size_of(encoded) + ADDED + len(body) <= most:
            return encoded
    raise TooLarge


def decode(headers: Mapping[str, str] | None) -> Properties:
    """Return the properties in the headers of a message. A header that tenure can't have written is ignored."""
    if not headers:
        return NO_PROPERTIES
    own: dict[str, Any] = {name: value for name, value in headers.items() if not _is_reserved(str(name))}
    others = _json(headers.get(HEADERS), {})
    if isinstance(others, dict):
        own.update(others)
    id_ = _json(headers.get(ID), None)
    if not isinstance(id_, str):
        id_ = headers.get(NATIVE_ID)
    options: SendOptions = {
        "id": id_,
        "headers": own,
        "reply_to": _untext(headers.get(REPLY_TO)),
        "correlation_id": _untext(headers.get(CORRELATION_ID)),
    }
    given = Outgoing()
    for name in ("", "reply_to", "correlation_id", "headers", "id"):
        if name:  # another program's: without what tenure can't have written
            options.pop(name)  # type: ignore[misc]
        try:
            [given] = checked([Outgoing(**options)], 0)
            break
        except (ConfigError, TypeError, ValueError):
            continue
    return Properties(
        given.id,
        FrozenDict(given.headers) if given.headers else NO_HEADERS,
        given.reply_to,
        given.correlation_id,
        _number(headers.get(DUE), 0.0),
        _number(headers.get(EXPIRES_IN), math.inf),
        _state_of(headers.get(STATE)),
    )


# --- values ---


def _fits(text: str) -> bool:
    """Whether NATS carries *text* as it is: it strips white space around a value, and ends it at a line break."""
    return bool(text) and text.isprintable() and text == text.strip()


def _text(text: str) -> str:
    return text if _fits(text) and not text.startswith('"') else json.dumps(text)


def _untext(text: str | None) -> str | None:
    if text is None or not text.startswith('"'):
        return text
    found = _json(text, text)
    return found if isinstance(found, str) else text


def _is_reserved(name: str) -> bool:
    return name.lower().startswith(_RESERVED)


def _number(text: str | None, otherwise: float) -> float:
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        return otherwise
    return found if 0.0 <= found < _YEAR_10000 else otherwise


def _json(text: str | None, otherwise: object) -> object:
    try:
        return otherwise if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _shortened(error: Failure | None) -> Failure | None:
    return None if error is None else Failure(error.type, error.message[:500])


def _state_to_json(state: State) -> str:
    given = {
        one.name: _plain(getattr(state, one.name))
        for one in fields(state)
        if getattr(state, one.name) != getattr(NO_STATE, one.name)
    }
    return json.dumps(given)


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        return asdict(value)
    if isinstance(value, tuple):
        return [asdict(one) for one in value]
    return value


def _state_of(text: str | None) -> State:
    """Return the state in *text*; none if tenure can't have written it."""
    given = _json(text, None)
    if not isinstance(given, dict):
        return NO_STATE
    try:
        if "history" in given:
            given["history"] = tuple(Attempt(**{**one, "error": _failure(one["error"])}) for one in given["history"])
        if "error" in given:
            given["error"] = _failure(given["error"])
        state = State(**given)
        counts = [state.sequence, state.deliveries, state.before, *(one.number for one in state.history)]
        times = [state.enqueued_at, state.dead_at, state.locked_for, state.locked_until, state.due]
        times += [one.at for one in state.history]
        texts = [state.reason or "", state.description, state.lock]
        errors = (state.error, *(one.error for one in state.history))
        texts += [text for one in errors if one is not None for text in (one.type, one.message, one.traceback)]
        fits = all(type(one) is int and 0 <= one <= INT_MAX for one in counts)
        fits = fits and all(type(one) in (int, float) and 0 <= one < _YEAR_10000 for one in times)
        return state if fits and all(isinstance(one, str) for one in texts) else NO_STATE
    except (ValueError, TypeError, KeyError):
        return NO_STATE


def _failure(given: dict[str, str] | None) -> Failure | None:
    return None if given is None else Failure(**given)

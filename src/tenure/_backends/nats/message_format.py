"""The properties of a message as NATS headers: the sender's own as they are, and what tenure adds.

A message that was sent with a body alone has no headers; an empty one has one, as the server takes an answer without
anything for the end of all answers if the receiver's account imports them. Its id, ``Nats-Msg-Id``, is NATS's own,
which also keeps a second one from being stored. A header of the sender whose name or value NATS can't carry as it is (a
number, a line break, a name with a space) goes into ``Tenure-Headers``, as JSON. What tenure itself must know of a
message that it has stored again (attempts, a reason, its first sequence) is in ``Tenure-State``, as JSON::

    Nats-Msg-Id: order-17
    tenant: blue
    Tenure-Headers: {"priority class": 3}
    Tenure-State: {"sequence": 17, "deliveries": 1, "history": […]}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tenure._backends.nats.errors import HeadersTooLong, TooLarge
from tenure._checks import LONGEST
from tenure._foreign import a_text, read_json, read_object, read_or, seconds
from tenure._queue.checks import TEXT_MAX, read_id, read_name
from tenure._queue.headers import HEADERS_JSON_MAX, is_reserved, read_headers
from tenure._queue.message import NO_HEADERS, Headers
from tenure._queue.note_headers import NOTED, Reader, fields_of, read_fields, read_sequence, shortened
from tenure._queue.notes import HISTORY_JSON_MAX, Notes
from tenure._queue.outgoing import Outgoing

NATIVE_ID = "Nats-Msg-Id"
ID, REPLY_TO, CORRELATION_ID = "Tenure-Id", "Tenure-Reply-To", "Tenure-Correlation-Id"
DUE, EXPIRES_IN = "Tenure-Due", "Tenure-Expires-In"
HEADERS, STATE = "Tenure-Headers", "Tenure-State"

_OURS = ("nats-", "tenure-")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
ADDED = 512
"""Bytes of the headers that are added to a message when it is stored: its id, and what it expects."""

HEADERS_MAX = 65_535
"""Bytes of all headers of a message that JetStream takes, whatever ``max_payload`` is."""

ROOM = 4_096
"""Bytes that a message leaves free when it is sent, so that it can be stored again with what tenure has to note: the
longest reason of a dead letter alone takes 3,060."""

HEADERS_TOO_LONG = "headers_too_long"
"""The reason of a dead letter that can't be delivered again, as its headers leave no room for what must be noted."""

LOCK_MAX = 604_800.0
"""Seconds of the longest lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Notes):
    """What tenure has noted with a message; values that are the default are omitted in the text.

    ``deliveries`` is how often it was handed out when it was stored, the delivery at the same time included.
    """

    sequence: int = 0
    """Its sequence in its queue; 0 if that is the stream's."""
    enqueued_at: float = 0.0
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

    def redriven(self) -> Self:
        """Return the notes of it as a message with all deliveries left, and no lock."""
        return replace(Notes.redriven(self), locked_for=0.0, locked_until=0.0, lock="", due=0.0)


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
        if type(value) is str and _fits(value) and _NAME.fullmatch(name) and not is_reserved(name):
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
        encoded[STATE] = json.dumps(fields_of(properties.state, NO_STATE))
    return encoded


def mark_empty(headers: dict[str, str], body: bytes) -> dict[str, str]:
    """Return *headers* with one that says nothing if there is neither a header nor a *body*."""
    return headers if headers or body else {HEADERS: "{}"}


def size_of(headers: Mapping[str, str]) -> int:
    """Return how many bytes the headers take."""
    size = 12
    for name, value in headers.items():
        size += len(name) + len(value.encode()) + 4
    return size


def size_of_id(id_: str) -> int:
    """Return how many bytes the header takes in which a message has its id when it is stored again."""
    return len(ID) + len(json.dumps(id_)) + 4


def encode_to_fit(properties: Properties, body: bytes, most: int) -> dict[str, str]:
    """Return the headers of a message of *most* bytes at most, with as much of its state as fits beside *body*.

    Raises:
        HeadersTooLong: The headers of the sender leave no room for the least of it.
        TooLarge: The least of it does not fit beside *body*.
    """
    headers = 0
    for less in shortened(properties.state):
        encoded = encode(replace(properties, state=less))
        headers = size_of(encoded) + ADDED
        if headers <= HEADERS_MAX and headers + len(body) <= most:
            return encoded
    raise HeadersTooLong if headers > HEADERS_MAX else TooLarge


def without_headers(dead: Properties) -> Properties:
    """Return the properties of a dead letter without the headers of its sender, and with a note that says so."""
    said = f"{dead.state.description}; " if dead.state.description else ""
    description = f"{said}its headers left no room in the {HEADERS_MAX:,} bytes of JetStream, and are not kept"
    return replace(dead, headers=NO_HEADERS, state=replace(dead.state, description=description))


def decode(headers: Mapping[str, str] | None, *, is_ours: bool = True) -> Properties:
    """Return the properties in the headers of a message.

    Of what tenure can't have written, each header and each note is ignored by itself.

    Args:
        headers: The headers, if it has any.
        is_ours: Whether tenure has stored it. If another program has, what that has copied of notes says nothing.
    """
    if not headers:
        return NO_PROPERTIES
    id_ = read_or(_a_json_id, headers.get(ID), None)
    native = {name: value for name, value in headers.items() if not name.lower().startswith(_OURS)}
    shown = native | read_or(_more_headers, headers.get(HEADERS), {})
    return Properties(
        read_or(read_id, headers.get(NATIVE_ID), None) if id_ is None else id_,
        read_headers(shown) if shown else NO_HEADERS,
        read_or(_a_queue, headers.get(REPLY_TO), None),
        read_or(_a_written_id, headers.get(CORRELATION_ID), None),
        _number(headers.get(DUE), 0.0),
        _number(headers.get(EXPIRES_IN), math.inf),
        read_or(_a_state, headers.get(STATE), NO_STATE) if is_ours else NO_STATE,
    )


# --- values ---


def _fits(text: str) -> bool:
    """Whether NATS carries *text* as it is: it strips white space around a value, and ends it at a line break."""
    return bool(text) and text.isprintable() and text == text.strip()


def _text(text: str) -> str:
    return text if _fits(text) and not text.startswith('"') else json.dumps(text)


def _untext(text: str) -> str:
    if not text.startswith('"'):
        return text
    return read_or(_a_json_text, text, text)


def _number(text: str | None, otherwise: float) -> float:
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        return otherwise
    return found if 0.0 <= found <= LONGEST else otherwise


# --- what others may have written ---


def _a_json_text(value: object) -> str:
    return a_text(read_json(value))


def _a_json_id(value: object) -> str:
    return read_id(read_json(value))


def _a_written_id(value: str) -> str:
    return read_id(_untext(value))


def _a_queue(value: str) -> str:
    return read_name(_untext(value))


def _more_headers(value: object) -> dict[str, Any]:
    return read_object(value, HEADERS_JSON_MAX)


def _a_state(value: object) -> State:
    return State(**read_fields(read_object(value, HISTORY_JSON_MAX), _STATE))


def _a_lock_time(value: object) -> float:
    return seconds(value, most=LOCK_MAX + 1.0)  # the server's is a little longer, see ``slack_of``


def _a_token(value: object) -> str:
    return a_text(value, TEXT_MAX)


_STATE: Mapping[str, Reader] = {
    **NOTED,
    "sequence": read_sequence,
    "enqueued_at": seconds,
    "locked_for": _a_lock_time,
    "locked_until": seconds,
    "lock": _a_token,
    "due": seconds,
}
"""By note of a state: what reads it."""

"""The text of a message in a Storage Queue: the body, and its properties if it has any.

The body is base64, as Azure Functions and most clients write it, and in most messages that is all. A Storage Queue
stores nothing else with a message. So if there are properties (an id, headers, a reply queue, a failed attempt, a
reason), a dot follows, and the properties in JSON::

    SGVsbG8=
    SGVsbG8=.{"id": "order-17", "headers": {"tenant": "blue"}}

Another client that reads such a message uses the part before the dot. A text in neither form is a body that another
client sent as plain text. If it is too long for base64, it stays plain, and its properties are added as a last line,
after a dot::

    a long text …
    .{"reason": "max_deliveries", "deliveries": 10}

If the properties can't be tenure's, the whole text is a body: if none of them is known, or one of those without which a
message isn't what its sender meant is unreadable. Of the notes about its deliveries, only those that are unreadable are
ignored, and so is what a newer version may have added.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from tenure._foreign import Unreadable, a_count, a_flag, a_list, read_object, seconds
from tenure._queue.checks import read_id, read_name
from tenure._queue.headers import read_headers
from tenure._queue.message import NO_HEADERS, Attempt, Headers
from tenure._queue.note_headers import NOTED, Reader, fields_of, read_fields, written_to_fit
from tenure._queue.notes import Notes, read_attempts, read_deliveries, read_reason

TEXT_MAX = 65_536
"""The longest text that Azure allows, in bytes."""

ROOM = 4_096
"""Of them, so many are kept for what is noted with a message later: its counts, and why it died, if not all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties(Notes):
    """The properties of a message besides its body. Those with their default value are omitted in the text."""

    id: str | None = None
    headers: Headers = field(default_factory=lambda: NO_HEADERS)
    reply_to: str | None = None
    correlation_id: str | None = None
    ttl: float | None = None
    """Seconds until it expires; Azure's own time to live would remove it silently."""
    uncounted: int = 0
    """The number of deliveries that were given back; they are subtracted from Azure's count."""
    sequence: int = 0
    """Its sequence, if it was moved from another queue and would get a new one."""
    enqueued_at: float = 0.0
    moving: bool = False
    """Whether it is being moved to the dead letters, and so is not delivered any more."""


NO_PROPERTIES = Properties()


def encode(body: bytes, properties: Properties) -> str:
    """Return the text of a message."""
    text, json_text = base64.b64encode(body).decode(), _to_json(properties)
    return f"{text}.{json_text}" if json_text else text


def encode_to_fit(text: str, body: bytes, properties: Properties) -> str | None:
    """Return *text*, which contains *body*, with as many of the properties as fit; None if there is no room."""
    encoded = written_to_fit(properties, partial(encode, body), lambda one: len(one) <= TEXT_MAX)
    if encoded is not None:
        return encoded
    if not text.encode().startswith(body):
        return None  # it is base64, and other clients must be able to read it
    room = TEXT_MAX - len(body) - len(_LAST_LINE)
    json_text = written_to_fit(properties, _to_json, lambda one: 0 < len(one) <= room)
    return None if json_text is None else body.decode() + _LAST_LINE + json_text


_LAST_LINE = "\n."


def _to_json(properties: Properties) -> str:
    given = fields_of(properties, NO_PROPERTIES)
    return json.dumps(given) if given else ""


def decode(text: str | None) -> tuple[bytes, Properties]:
    """Return the body and the properties in a text. A text that tenure can't have written is a body, unchanged."""
    text = text or ""
    start, dot, rest = text.partition(".")
    properties = _properties_of(rest) if dot else NO_PROPERTIES
    if properties is not None:
        try:
            return base64.b64decode(start, validate=True), properties
        except (binascii.Error, ValueError):
            pass
    start, separator, rest = text.rpartition(_LAST_LINE)
    properties = _properties_of(rest) if separator else None
    if properties is None or properties == NO_PROPERTIES:
        return text.encode(), NO_PROPERTIES
    return start.encode(), properties


def _properties_of(text: str) -> Properties | None:
    """Return the properties in *text*; None if tenure can't have written them."""
    if not text.startswith("{"):
        return None
    try:
        said = read_object(text)
        if said.keys() - _MEANT.keys() - _NOTED.keys():  # it is somebody else's, and not to be taken apart
            return None
        meant = {name: read(said[name]) for name, read in _MEANT.items() if name in said}
    except Unreadable:
        return None
    found = meant | read_fields(said, _NOTED)
    return Properties(**found) if found else None


def _read_ttl(value: object) -> float:
    return seconds(value, least=0.001)


def _read_history(value: object) -> tuple[Attempt, ...]:
    """Return the attempts that are readable; a list of what can't be any is Unreadable."""
    attempts = read_attempts(value)
    if not attempts and not (value and all(isinstance(one, dict) for one in a_list(value))):
        raise Unreadable("it is no list of attempts")
    return attempts


_MEANT: Mapping[str, Reader] = {
    "id": read_id,
    "headers": read_headers,
    "reply_to": read_name,
    "correlation_id": read_id,
    "ttl": _read_ttl,
    "uncounted": read_deliveries,
    "sequence": a_count,
    "enqueued_at": seconds,
    "reason": read_reason,
    "moving": a_flag,
}
"""By property, what reads it: of those that say which message it is, what its sender meant, and what becomes of it."""

_NOTED: Mapping[str, Reader] = {
    **{name: read for name, read in NOTED.items() if name not in _MEANT},
    "history": _read_history,
}
"""The same of notes about its deliveries and its death."""

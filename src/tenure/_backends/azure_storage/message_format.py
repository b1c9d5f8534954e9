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

If the properties can't be tenure's, the whole text is a body.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tenure._queue.checks import INT_MAX
from tenure._queue.failures import Failure
from tenure._queue.message import HISTORY_MAX, NO_HEADERS, Attempt, Headers
from tenure._queue.outgoing import Outgoing, checked
from tenure.errors import ConfigError

TEXT_MAX = 65_536
"""The longest text that Azure allows, in bytes."""


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a message besides its body. Those with their default value are omitted in the text."""

    id: str | None = None
    headers: Headers = field(default_factory=lambda: NO_HEADERS)
    reply_to: str | None = None
    correlation_id: str | None = None
    ttl: float | None = None
    """Seconds until it expires; Azure's own time to live would remove it silently."""
    uncounted: int = 0
    """The number of deliveries that were given back; they are subtracted from Azure's count."""
    history: tuple[Attempt, ...] = ()
    before: int = 0
    """The number of entries of the history from before it was redriven."""
    sequence: int = 0
    """Its sequence, if it was moved from another queue and would get a new one."""
    enqueued_at: float = 0.0
    deliveries: int = 0
    """The delivery count of a dead letter."""
    reason: str | None = None
    """The reason of a dead letter."""
    description: str = ""
    dead_at: float = 0.0
    error: Failure | None = None
    moving: bool = False
    """Whether it is being moved to the dead letters, and so is not delivered any more."""

    def with_attempt(self, attempt: Attempt) -> Properties:
        """Return the properties with one more attempt."""
        return replace(self, history=(*self.history, attempt)[-HISTORY_MAX:])

    def shortened(self) -> Iterator[Properties]:
        """Yield the properties in full, then with ever less of the history, errors and description."""
        yield self
        brief = [replace(one, error=_shortened(one.error)) for one in self.history]
        yield replace(self, history=tuple(brief))
        yield replace(self, history=tuple(brief[-3:]), error=_shortened(self.error))
        yield replace(self, history=(), error=_shortened(self.error), before=0)
        yield replace(self, history=(), error=None, description=self.description[:200], before=0)


def _shortened(error: Failure | None) -> Failure | None:
    return None if error is None else Failure(error.type, error.message[:500])


_EMPTY = Properties()


def encode(body: bytes, properties: Properties) -> str:
    """Return the text of a message."""
    text, json_text = base64.b64encode(body).decode(), _to_json(properties)
    return f"{text}.{json_text}" if json_text else text


def encode_to_fit(text: str, body: bytes, properties: Properties) -> str | None:
    """Return *text*, which contains *body*, with as many of the properties as fit; None if there is no room."""
    for less in properties.shortened():
        encoded = encode(body, less)
        if len(encoded) <= TEXT_MAX:
            return encoded
    if not text.encode().startswith(body):
        return None  # it is base64, and other clients must be able to read it
    for less in properties.shortened():
        json_text = _to_json(less)
        if json_text and len(body) + len(_LAST_LINE) + len(json_text) <= TEXT_MAX:
            return body.decode() + _LAST_LINE + json_text
    return None


_LAST_LINE = "\n."


def _to_json(properties: Properties) -> str:
    fields_given = {
        one.name: _plain(getattr(properties, one.name))
        for one in fields(properties)
        if getattr(properties, one.name) != getattr(_EMPTY, one.name)
    }
    return json.dumps(fields_given) if fields_given else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Failure):
        return asdict(value)
    if isinstance(value, tuple):
        return [asdict(one) for one in value]
    return value


def decode(text: str | None) -> tuple[bytes, Properties]:
    """Return the body and the properties in a text. A text that tenure can't have written is a body, unchanged."""
    text = text or ""
    start, dot, rest = text.partition(".")
    properties = _properties_of(rest) if dot else _EMPTY
    if properties is not None:
        try:
            return base64.b64decode(start, validate=True), properties
        except (binascii.Error, ValueError):
            pass
    start, separator, rest = text.rpartition(_LAST_LINE)
    properties = _properties_of(rest) if separator else None
    return (text.encode(), _EMPTY) if properties is None or properties == _EMPTY else (start.encode(), properties)


def _properties_of(text: str) -> Properties | None:
    """Return the properties in *text*; None if tenure can't have written them."""
    if not text.startswith("{"):
        return None
    try:
        fields_given = json.loads(text)
        if any(name in fields_given and not fits(fields_given[name]) for name, fits in _CHECKS.items()):
            return None
        if "history" in fields_given:
            fields_given["history"] = tuple(
                Attempt(**{**one, "error": _failure(one["error"])}) for one in fields_given["history"]
            )
        if "error" in fields_given:
            fields_given["error"] = _failure(fields_given["error"])
        properties = Properties(**fields_given)
        sent = Outgoing(  # the sender's properties must be valid
            id=properties.id,
            headers=properties.headers,
            expires_in=properties.ttl,
            reply_to=properties.reply_to,
            correlation_id=properties.correlation_id,
        )
        return replace(properties, headers=checked([sent], 0)[0].headers)
    except (ValueError, TypeError, KeyError, RecursionError, ConfigError):
        return None


def _failure(fields_given: dict[str, str] | None) -> Failure | None:
    return None if fields_given is None else Failure(**fields_given)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= INT_MAX


def _is_moment(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _YEAR_10000  # type: ignore[operator]


def _is_failure(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_text, value.values())))


def _is_history(value: object) -> bool:
    return isinstance(value, list) and all(
        _is_count(one["number"]) and _is_moment(one["at"]) and _is_text(one["outcome"]) and _is_failure(one["error"])
        for one in value
    )


_YEAR_10000 = 253_402_300_800
"""In Unix seconds. A later time can't be shown as a date."""

_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "ttl": _is_moment,
    "uncounted": _is_count,
    "history": _is_history,
    "before": _is_count,
    "sequence": _is_count,
    "enqueued_at": _is_moment,
    "deliveries": _is_count,
    "reason": _is_text,
    "description": _is_text,
    "dead_at": _is_moment,
    "error": _is_failure,
    "moving": lambda value: value is True,
}
"""By property: whether tenure can have written a value."""

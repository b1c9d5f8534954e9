"""A message to be sent. What can be refused is refused here, before anything is written.

A body is bytes and headers are the broker's own: no envelope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any, TypedDict, Unpack

from tenure._checks import check_seconds
from tenure._queue.checks import check_name, check_text
from tenure._queue.headers import checked_headers
from tenure._queue.message import NO_HEADERS, Headers, brief
from tenure.errors import ConfigError, MessageRefused

PRIORITY_MAX = 9


class NotGiven(Enum):
    """The default of ``json=``, where None is a value."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return self.value


NOT_GIVEN = NotGiven.NOT_GIVEN


class SendOptions(TypedDict, total=False):
    """The properties of a message beside its body; :class:`Outgoing` describes them."""

    id: str | None
    headers: Headers
    delay: float
    at: datetime | float | None
    expires_in: float | None
    session: str | None
    priority: int
    reply_to: str | None
    correlation_id: str | None


# Not frozen: that would cost more time than all the rest of building one.
@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A message to be sent.

    Args:
        body: The content, as bytes.
        id: Names the message; a second one with the same id inside the queue's dedupe window is not kept. Without,
            the broker makes one up, and nothing is remembered of it.
        headers: Text names; values are text, whole numbers, numbers or booleans. Names that stores use for their
            own notes are refused.
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
        changes["headers"] = checked_headers(message.headers)
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

"""The bodies of a typed queue: ``bytes`` as they are, ``str`` as text in UTF-8, every other type as JSON.

Of a union, each value is sent by its own type, and its header ``content-type`` tells the reader which it is.
"""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any, TypeGuard, Union, cast

from tenure import ConfigError, Outgoing, Received, SendOptions

TEXT_TYPE = "text/plain; charset=utf-8"


def message_of(value: object, kind: Any, options: SendOptions) -> Outgoing:
    """Return the message with *value* as its body, which is to be of this *kind*.

    Raises:
        ConfigError: It is of another type, or has no JSON form.
    """
    # By its type: an object may claim to be of any class.
    if _is_plain_class(kind) and not issubclass(type(value), kind):
        raise ConfigError(f"the body must be {name_of(kind)}, not {type(value).__name__}: {value!r:.80}")
    members = members_of(kind)
    if bytes in members and issubclass(type(value), bytes):
        return Outgoing(bytes(cast("bytes", value)), **options)
    if str in members and issubclass(type(value), str):
        options["headers"] = {"content-type": TEXT_TYPE, **options.get("headers", {})}
        try:
            return Outgoing(cast("str", value).encode(), **options)
        except UnicodeEncodeError as error:
            raise ConfigError(f"the body is no text that UTF-8 has a form of: {error}") from error
    return Outgoing.json(value, **options)


def body_of(message: Received, kind: Any) -> Any:
    """Return the body of *message* as a value of this *kind*.

    Raises:
        DecodeError: It doesn't fit. If a handler lets it out, the message is dead-lettered at once.
        ConfigError: No body can be read as a *kind*.
    """
    if kind is bytes:
        return message.body
    if kind is str:
        return message.text()
    members = members_of(kind)
    content = message.headers.get("content-type")
    if str in members and content == TEXT_TYPE:
        return message.text()
    if bytes in members and content is None:
        return message.body
    return message.decode(kind)


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union; of any other *kind*, that alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def check_kind(kind: Any) -> None:
    """Refuse a type that no body can be read as, before there is any.

    Raises:
        ConfigError: It is one.
    """
    if kind not in (bytes, str):
        from tenure._queue.typed import reader

        reader(kind)


def name_of(kind: Any) -> str:
    """Return how *kind* is written in a program."""
    return str(kind.__name__) if inspect.isclass(kind) and not hasattr(kind, "__origin__") else str(kind)


def _is_plain_class(kind: Any) -> TypeGuard[type]:
    """Return whether a value of this *kind* is an instance of it: not so for numbers, ``TypedDict`` and protocols."""
    if not inspect.isclass(kind) or hasattr(kind, "__origin__") or kind in (Any, object):  # Any is a class, too
        return False
    if kind in (bytes, str):
        return True
    is_typed_dict = issubclass(kind, dict) and hasattr(kind, "__required_keys__")
    return kind.__module__ != "builtins" and not is_typed_dict and not getattr(kind, "_is_protocol", False)

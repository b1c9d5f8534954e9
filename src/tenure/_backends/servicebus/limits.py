"""What Service Bus keeps of a message, at most."""

from __future__ import annotations

from tenure._backends.servicebus.message_format import HEADERS_MAX, NOTES_ROOM, size_of
from tenure._queue.outgoing import Outgoing
from tenure.errors import ConfigError

TEXT_MAX = 128
"""Characters of a message's id, and of a session's name."""


def check_limits(message: Outgoing) -> None:
    """Refuse a message that Service Bus can't keep as it is meant."""
    for name, text in (("id", message.id), ("session", message.session)):
        if text is not None and len(text) > TEXT_MAX:
            raise ConfigError(
                f"{name} has {len(text)} characters, and Service Bus takes {TEXT_MAX}; choose a shorter one"
            )
    if (size := size_of(message.headers)) > HEADERS_MAX - NOTES_ROOM:
        raise ConfigError(
            f"the headers take {size:,} bytes, and Service Bus takes {HEADERS_MAX:,}, of which {NOTES_ROOM:,} are kept "
            "for what tenure notes with the message; put a part of them into the body"
        )

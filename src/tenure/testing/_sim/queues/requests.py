"""Requests to the broker that no machine of a consumer makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing


@dataclass(frozen=True, slots=True)
class Send:
    """Keep these messages."""

    request_id: int
    messages: Sequence[Outgoing]


@dataclass(frozen=True, slots=True)
class WriteState:
    """Store the state of a session."""

    request_id: int
    held: SessionLock
    state: bytes

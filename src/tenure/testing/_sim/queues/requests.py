"""Requests to the broker that no machine of a consumer makes: sending, and the verbs of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure._queue.message import Outgoing, SessionLock


@dataclass(frozen=True, slots=True)
class Send:
    """Keep these messages."""

    ask: int
    messages: Sequence[Outgoing]


@dataclass(frozen=True, slots=True)
class Accept:
    """Lock the next free session with a message waiting."""

    ask: int


@dataclass(frozen=True, slots=True)
class ReceiveSession:
    """Claim up to *limit* messages of a session."""

    ask: int
    held: SessionLock
    limit: int


@dataclass(frozen=True, slots=True)
class Release:
    """Unlock a session."""

    ask: int
    held: SessionLock


@dataclass(frozen=True, slots=True)
class WriteState:
    """Store the state of a session."""

    ask: int
    held: SessionLock
    state: bytes


SessionRequest = Accept | ReceiveSession | Release | WriteState

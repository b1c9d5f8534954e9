"""The inputs and the effects of a member's machine."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._backends.peers.wire import Message
from tenure._lease import Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant

# --- inputs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a member; a negative *sender* is a client, which is no member and only asks."""

    sender: int
    message: Message


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lead *name* as *holder*. Each question has a number of its own, which its answer carries."""

    ask: int
    name: str
    holder: str
    ttl: float
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Renew:
    """Go on leading."""

    ask: int
    grant: Grant
    ttl: float


@dataclass(frozen=True, slots=True)
class Release:
    """Stop leading."""

    ask: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Inspect:
    """Find out which holder leads *name*."""

    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class Names:
    """List the names that were ever claimed."""

    ask: int


@dataclass(frozen=True, slots=True)
class AskToResign:
    """Ask the leader of *name* to step down."""

    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The caller no longer waits for the answer to question *ask*."""

    ask: int


Input = Tick | Received | Acquire | Renew | Release | Inspect | Names | AskToResign | Drop


# --- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send *message* to a member or a client; it may be lost."""

    to: int
    message: Message


Outcome = Granted | Lost | Released | HeldBy | Vacant | NoAnswer | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to question *ask*. Each question gets one."""

    ask: int
    answer: Outcome


@dataclass(frozen=True, slots=True)
class Hint:
    """Something may have changed for *name*: wake those that wait for it."""

    name: str


Effect = Send | Answer | Hint

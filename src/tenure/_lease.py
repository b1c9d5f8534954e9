"""A lease: a claim that is good only for a while. Plain values, and the one sum that says how long to believe in it.

House rules:

- A claim is counted from *before the question was sent*, on the asker's own clock. The answer may have been on the
  road for the whole lease.
- A ``Grant`` names one claim exactly. Every later verb takes it, so that a late message from an old claim cannot touch
  a newer one.
- ``token`` rises with every acquisition and never falls; it is the fencing token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tenure._frozen import FrozenDict

Metadata = Mapping[str, str]
NO_METADATA: Metadata = FrozenDict()


@dataclass(frozen=True, slots=True)
class Grant:
    """One claim on one name: who won it, and its number among all claims on that name."""

    name: str
    holder: str
    token: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Yes: the claim stands, for ``ttl`` seconds from some moment after the question was sent."""

    grant: Grant
    resign_asked: bool = False


@dataclass(frozen=True, slots=True)
class HeldBy:
    """No: somebody else holds the name.

    ``remaining`` is the time left in seconds by the store's clock when it answered; None where the store can't tell.
    """

    name: str
    holder: str
    token: int
    remaining: float | None
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nobody holds the name; ``token`` is the newest ever given out for it, 0 if none was.

    ``vacant_for`` is for how many seconds at least nobody has held it, by the store's clock when it answered; None
    where the store can't tell, and if nobody ever has.
    """

    name: str
    token: int = 0
    vacant_for: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Lost:
    """No: this claim is over, for certain and for ever. Another may hold the name, or nobody."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Released:
    """Yes: the claim was handed back; the name is free at once."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Don't know: the store could not be asked about this claim, or did not say. It counts as neither yes nor no."""

    why: str


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads: the holder's identity, the term's fencing token, and what the holder tells about itself.

    ``remaining`` is how many seconds the lease had left when the store was asked, if it isn't renewed; None where the
    store can't tell. It doesn't count when two leaders are compared.
    """

    holder: str
    token: int
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    remaining: float | None = field(default=None, compare=False)


def trusted_until(asked_at: float, ttl: float, drift: float, margin: float) -> float:
    """Return the moment up to which a claim of *ttl* seconds, asked for at *asked_at*, may be believed.

    *drift* is the share by which our clock may run slower than the store's (0.05: five per cent); *margin* is in
    seconds. The holder's term is shortened, the store's is not: Gray & Cheriton, "Leases: an efficient fault-tolerant
    mechanism for distributed file cache consistency", SOSP 1989.
    """
    return asked_at + ttl - drift * ttl - margin

"""A lease: a claim that is good only for a while. Plain values, and the one sum that says how long to trust it.

Rules:

- A claim is counted from *before the request was sent*, on the client's own clock: the answer may be delayed by up to
  the whole lease. A store that can promise less says by how much (``Granted.age``).
- A ``Grant`` identifies one claim exactly. Every later operation takes it, so that a late request of an old claim can't
  affect a newer one.
- ``token`` rises with every acquisition and never falls; it is the fencing token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tenure._checks import LONGEST
from tenure._frozen import FrozenDict

Metadata = Mapping[str, str]
"""What a leader shows to other processes, such as its address."""

NO_METADATA: Metadata = FrozenDict()

TOKEN_MAX = 2**63 - 1
"""The highest fencing token: users keep tokens in columns of 64 bits with a sign."""


@dataclass(frozen=True, slots=True)
class Grant:
    """One claim on one name: its holder, and its number among all claims on that name.

    A token that can't be one is a ``ValueError``, here and in what follows: an error of the store, not an answer.
    """

    name: str
    """The name that is claimed."""
    holder: str
    """The identity that claimed it; new for each acquisition."""
    token: int
    """The fencing token: one higher than that of any earlier claim, or more."""

    def __post_init__(self) -> None:
        if type(self.token) is not int or not 0 <= self.token <= TOKEN_MAX:
            raise _no_token(self.name, self.token)


@dataclass(frozen=True, slots=True)
class Granted:
    """Yes: the claim stands for ``ttl`` seconds, counted from *age* seconds before the request was sent, or later.

    ``age`` is 0 unless the store knows of the request only later, and can't say when: then it is the time in seconds,
    less than ``ttl``, by which the claim may end sooner. It is ignored when two answers are compared. One that can't be
    an age is a ``ValueError``: an error of the store, not an answer.
    """

    grant: Grant
    """The claim."""
    resign_asked: bool = False
    """Whether its holder was asked to step down."""
    age: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.age < math.inf:  # a term would be trusted for too long, or without an end
            raise ValueError(
                f"age ({self.age!r}) must be seconds, 0 or more; the claim on {self.grant.name!r} is refused"
            )


@dataclass(frozen=True, slots=True)
class HeldBy:
    """No: another holder has the name.

    ``remaining`` is the time left in seconds by the store's clock when it answered; None if the store doesn't know.
    ``resign_asked`` says whether the holder was asked to step down in this term; only ``inspect`` tells, and answers
    to ``acquire`` leave it False. It is ignored when two answers are compared.

    A store answers so only with values that it has checked, as others may have written them. What can't be such a
    value is a ``ValueError``.
    """

    name: str
    """The name that was asked for."""
    holder: str
    """The identity that has it."""
    token: int
    """The fencing token of that holder's claim."""
    remaining: float | None
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    """What the holder lets others read; empty where the store does not keep any, or the holder is another program."""
    resign_asked: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.token) is not int or not 0 <= self.token <= TOKEN_MAX:
            raise _no_token(self.name, self.token)
        if not isinstance(self.holder, str):
            raise ValueError(f"the holder of {self.name!r} must be text, not {type(self.holder).__name__}")
        left = self.remaining
        if left is not None and (type(left) not in (int, float) or not -1.0 < left <= LONGEST):
            raise ValueError(
                f"remaining ({self.remaining!r}) must be seconds from 0 to {LONGEST:g}, or None; so the holder of "
                f"{self.name!r} is not known"
            )
        if left is not None and left < 0.0:  # it ended just now; a follower would ask without a pause
            object.__setattr__(self, "remaining", 0.0)


@dataclass(frozen=True, slots=True)
class Vacant:
    """The name has no holder; ``token`` is the newest ever given for it, 0 if none was.

    ``vacant_for`` is the seconds without a holder, at least, by the store's clock when it answered; None if the store
    doesn't know, and if there never was a holder.
    """

    name: str
    """The name that was asked for."""
    token: int = 0
    vacant_for: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if type(self.token) is not int or not 0 <= self.token <= TOKEN_MAX:
            raise _no_token(self.name, self.token)
        if self.vacant_for is not None and not abs(self.vacant_for) <= LONGEST:
            raise ValueError(f"vacant_for ({self.vacant_for!r}) must be seconds, or None; {self.name!r} is not known")


@dataclass(frozen=True, slots=True)
class Lost:
    """No: this claim is certainly over. The name may have another holder, or none."""

    grant: Grant
    """The claim that is over."""


@dataclass(frozen=True, slots=True)
class Released:
    """Yes: the claim was released; the name is free at once."""

    grant: Grant
    """The claim that was released."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Don't know: the store could not be asked about this claim, or did not answer. It counts as neither yes nor no."""

    why: str
    """The reason, as text."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of a name: its identity, the term's fencing token, and its metadata.

    ``remaining`` is the seconds that the lease had left when the store was asked, unless it is renewed; None if the
    store doesn't know. It is ignored when two leaders are compared.
    """

    holder: str
    """The identity under which it was elected; new for each term."""
    token: int
    """The fencing token of its term."""
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    """What it lets others read; empty if it is another program."""
    remaining: float | None = field(default=None, compare=False)


def _no_token(name: str, token: object) -> ValueError:
    shown = ascii(token) if isinstance(token, (bool, int, float)) else type(token).__name__
    return ValueError(f"the token of {name!r} must be a whole number from 0 to {TOKEN_MAX}, not {shown:.40}")


def leader_of(answer: HeldBy | Vacant) -> Leader | None:
    """Return a store's answer as users get it."""
    if isinstance(answer, Vacant):
        return None
    return Leader(answer.holder, answer.token, answer.metadata, answer.remaining)


def trusted_until(asked_at: float, ttl: float, drift: float, margin: float) -> float:
    """Return the time until which a claim of *ttl* seconds, requested at *asked_at*, is trusted.

    *drift* is the share by which our clock may run slower than the store's (0.05: five per cent); *margin* is in
    seconds. The holder's view of the lease is shortened, not the store's: Gray & Cheriton, "Leases: an efficient
    fault-tolerant mechanism for distributed file cache consistency", SOSP 1989.
    """
    return asked_at + ttl - drift * ttl - margin

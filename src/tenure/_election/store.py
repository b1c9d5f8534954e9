"""The port to a store of leases: the operations that an election needs, and the traits of a store.

Answers that the domain expects are values. An exception means *could not find out* (``Unavailable``) or *can never
work* (``ConfigError``).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure.errors import ConfigError

Hint = Literal["absent"] | None
"""What a store yields to those who wait for a change: None, if something may have changed; or ``"absent"``, if nothing
is reported from now on, until the next None."""


@dataclass(frozen=True, slots=True)
class LeaseTraits:
    """The abilities of a store, as data: the suite, docs, checks and callers read the same object. Times in seconds."""

    ttl_min: float
    """The shortest lease."""
    ttl_max: float
    """The longest lease."""
    fencing: Literal["native", "emulated"]
    """The source of the rising token: the store's own counter, or one that tenure keeps in it."""
    expiry: Literal["store clock", "observed"]
    """Which clock ends a lease: the store's, or the monotonic clock of the process that watches it."""
    hints: bool
    """Whether a vacancy wakes other candidates; if not, they ask every ``retry_every``. Where hints are absent for a
    while, as without the right to watch, ``hints`` says so."""
    survives_restart: bool
    """Whether leases and tokens outlive the store's process."""
    queued: bool = False
    """Whether candidates that wait stand in a queue in the store, and are granted the name in the order in which they
    came. Then the store is a :class:`QueuedLeaseStore`."""
    tells_remaining: bool = True
    """Whether ``inspect`` tells how long a lease still lasts, also to a process that has not looked before."""
    takes_back: bool = False
    """Whether the store itself takes a claim back that it could not answer for. Where it doesn't, who gets no answer to
    ``acquire`` may hold the name, and another ``acquire`` would keep it from all others: it must look first."""
    tells_vacancy: bool = True
    """Whether ``inspect`` tells since when a name has been vacant that was released."""
    follows_renewals: bool = False
    """Whether a process can follow the renewals of others, where it judges their end by what it has seen. Then the
    store is a :class:`FollowedLeaseStore`."""
    foreign_leaders: bool = False
    """Whether other programs lead there, too, by clients of their own. They have no metadata and read no requests to
    resign, so ``ask_to_resign`` returns False for them."""
    names: Literal["any", "dns"] = "any"
    """The names that it accepts: any text of up to ``NAME_MAX`` characters, or only DNS names (RFC 1123 subdomains)."""


class LeaseStore(Protocol):
    """Leases by name, each with its rising token."""

    @property
    def traits(self) -> LeaseTraits:
        """The abilities of this store."""
        ...

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* for *ttl* seconds if it is free, under a token one higher than any before.

        *holder* is new for each acquisition. If it holds the name already, an earlier answer was lost: the same grant
        is returned again, extended. A store that can't promise all of *ttl* from now says so by ``Granted.age``.
        """
        ...

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims by *ttl* seconds from now, in one step; the answers stand in the order of *grants*.

        A renewal never shortens a claim, however late it is executed. Where claims lie on several servers, one that
        can't be reached gives ``NoAnswer`` for its claims, and does not delay the others; ``Unavailable`` means that
        none was answered.
        """
        ...

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim, so that the name is free at once; its token is kept.

        ``Lost`` means that it was over before this call: also if an earlier call released it, and its answer was lost.
        Within one call, the store may be asked more than once; if an attempt without an answer may have released the
        claim, that is ``Released``.
        """
        ...

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, without changing anything."""
        ...

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, in the order of *names*, without changing anything.

        It is one request where the store can answer one for all, and a few round trips otherwise. Either all are
        answered or none: then it is ``Unavailable``.
        """
        ...

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted; perhaps also what others have written there, see
        :func:`usable_names`."""
        ...

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down. It is notified by its next answer, or a hint.

        False if there is none, or if it is another program, which reads no such requests.
        """
        ...

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Yield None when something may have changed for *name*. A hint may be wrong, late or absent.

        A change between this call and the start of the subscription is reported by a first hint. A store that finds
        that it can report nothing, as it may not subscribe, yields ``"absent"`` once; then candidates and observers ask
        in their own time, until it yields None again. It never yields None because some time has passed: leaders obey
        hints, too.
        """
        ...


class FollowedLeaseStore(LeaseStore, Protocol):
    """A store in which the end of a lease is observed, and that tells of renewals: ``traits.follows_renewals`` is true.

    There, a process that only looks sees a renewal late, and takes the lease for longer than it is.
    """

    def follow_renewals(self, prefix: str) -> AsyncIterator[object]:
        """While it is awaited, note each renewal of the leases whose names begin with *prefix* as it happens.

        So ``inspect`` knows the end of each from its last renewal, and not from when a look has found it. It is never
        known too early: a lease ends its own ttl after this process saw its last change, also if this misses some.
        Where a user may not follow them, nothing is noted. It yields now and then, which has no meaning.
        """
        ...


class QueuedLeaseStore(LeaseStore, Protocol):
    """A store in which the candidates that wait stand in a queue; its ``traits.queued`` is true.

    A holder that was refused has a place in the queue. Each ``acquire`` of that holder keeps the place for another
    *ttl* seconds; a place ends by itself after that, and a claim too if it isn't renewed, also if its process lives. A
    holder whose place has come to the front has the name, and learns that from its next ``acquire``.

    Closing the backend may end places, and never a claim that was granted: its work may still run, so it runs out.
    """

    async def withdraw(self, name: str, holder: str) -> None:
        """End the place of *holder* in the queue for *name*; a claim that it was granted meanwhile is released.

        After that, an ``acquire`` of *holder* that was under way leaves no place and no claim behind. A second call
        does nothing, nor does one for a holder without a place.
        """
        ...


NAME_MAX = 1_024
"""Every store accepts holders of up to this many characters, whatever they are; and such names, unless its traits say
otherwise."""


def require_name(name: object, of: str = "name", most: int = NAME_MAX) -> None:
    """Refuse a name of an election or holder that some store can't keep; the rule is the same on every store.

    Raises:
        ConfigError: It isn't text, is empty, is too long, or contains a character that some store can't keep.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the {of} must be text of 1 to {most} characters, not {name!r:.80}")
    if len(name) > most:
        raise ConfigError(f"the {of} must have at most {most} characters, not {len(name)}: {name[:40]!r}…")
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ConfigError(
            f"the {of} must hold no NUL and no lone surrogate, as {name!r} does: some stores can't keep them"
        )


def usable_names(listed: Iterable[str]) -> list[str]:
    """Return those of the names *listed* by a store that an election can have: others can write there what they like.

    One that no election can have would be refused by ``inspect_many``, and all the others with it.
    """
    found = []
    for name in listed:
        with suppress(ConfigError):
            require_name(name)
            found.append(name)
    return found


def require_ttl(ttl: float, traits: LeaseTraits) -> None:
    """Refuse a *ttl* that the store can't keep.

    Raises:
        ConfigError: It isn't a number, or outside the store's limits; the message names them.
    """
    if math.isnan(ttl):
        raise ConfigError(f"ttl must be a number of seconds, not {ttl!r}")
    if not traits.ttl_min <= ttl <= traits.ttl_max:
        fits = min(max(ttl, traits.ttl_min), traits.ttl_max)
        raise ConfigError(
            f"ttl ({ttl:g} s) must be from {traits.ttl_min:g} to {traits.ttl_max:g} s on this store; try ttl={fits:g}"
        )

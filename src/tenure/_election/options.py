"""The options of ``backend.election``, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from tenure._election.health import Health
from tenure._election.store import LeaseTraits, require_ttl
from tenure._timing import Timing

TTL_DEFAULT = 15.0
"""The default length of a lease, in seconds."""


class ElectionOptions(TypedDict, total=False):
    """The options of :meth:`tenure.Backend.election`, which explains them; for callers that pass them on."""

    ttl: float | None
    renew_every: float | None
    retry_every: float | None
    drift: float | None
    margin: float | None
    grace: float | None
    stall_after: float | None
    health: Health | None
    overrun: Literal["report", "exit"]
    metadata: Mapping[str, str] | None
    label: str | None


def timing_of(options: ElectionOptions, traits: LeaseTraits) -> Timing:
    """Return the timing for *options*, with a length of the lease that a store with *traits* allows.

    Raises:
        ConfigError: The times leave too little room, or don't fit the store.
    """
    ttl = options.get("ttl")
    if ttl is None:
        ttl = min(max(TTL_DEFAULT, traits.ttl_min), traits.ttl_max)
    times = {name: options.get(name) for name in ("renew_every", "retry_every", "drift", "margin", "grace")}
    timing = Timing(ttl, **{name: time for name, time in times.items() if time is not None})  # type: ignore[arg-type]
    require_ttl(timing.ttl, traits)
    return timing

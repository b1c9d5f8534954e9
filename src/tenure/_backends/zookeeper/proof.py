"""The proof of a claim: its node exists, and the leader of the ensemble lets its session last; see ``touches``.

A session lasts longer than its leases, and often not so long that the whole lease is certain: then the claim is granted
as an older one, which counts from before its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kazoo.exceptions import NoNodeError

from tenure._backends.zookeeper.client import Client
from tenure._backends.zookeeper.places import Place
from tenure._backends.zookeeper.requests import check, failure_of
from tenure._backends.zookeeper.session import Session
from tenure._lease import NO_METADATA, Metadata
from tenure.errors import Unavailable

AGE_MAX = 1 / 3
"""The share of a lease by which its claim may be older than its request; rather than that, a request waits."""
DRIFT_MAX = 0.25
"""The share of the session's time beyond the lease that is left to drift: elections allow for it in the lease alone."""


@dataclass(frozen=True, slots=True)
class Request:
    """A claim that is asked for, and the times of the request."""

    asked_at: float
    ttl: float
    until: float
    """When the request is given up."""
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)

    @property
    def ends_at(self) -> float:
        """When the claim ends that it asks for."""
        return self.asked_at + self.ttl


async def proven(
    client: Client, places: Sequence[Place], request: Request, *, is_checked: bool = False
) -> float | None:
    """Prove that these places, of one session, stand, and return from when the leader certainly lets them last.

    Args:
        client: The client of the ensemble.
        places: The places.
        request: How long they are to last, from when.
        is_checked: Whether a write within this request has found them.

    Returns:
        How many seconds before the request their ttl begins; None if one of their nodes is gone.

    Raises:
        Unavailable: It could not be proven in time.
        ConfigError: The session is too short for such a lease.
    """
    session = places[0].session
    paths = [place.node_path for place in places]
    while True:
        if not is_checked:
            failure = failure_of(await session.ask(check(paths), request.until, writes=True))
            if isinstance(failure, NoNodeError):
                return None
            if failure is not None:
                raise session.translated(failure) from failure
        client.require_time(session, request.ttl)
        # A request that the leader has heard of, and that was sent then or later, makes the whole lease certain.
        whole = request.asked_at - (session.negotiated - request.ttl) * (1 - DRIFT_MAX)
        needed = whole - request.ttl * AGE_MAX
        if session.touches.heard_at >= needed:
            return max(0.0, whole - session.touches.heard_at)
        await _until_heard(client, session, needed, request.until)
        is_checked = False


async def _until_heard(client: Client, session: Session, needed: float, until: float) -> None:
    """Wait until a write can prove that the leader has heard of a request that was sent after *needed*."""
    now, tick = client.clock.now(), client.options.tick
    wait = min(session.touches.write_at(needed) - now, tick)
    if now + wait > until:
        raise Unavailable(
            f"{client.address} answers, but its leader may not have heard of this session for too long; that is known "
            f"a tick ({tick:g} s) after the next request"
        )
    await asyncio.sleep(max(wait, tick / 100))

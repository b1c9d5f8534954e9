"""The proof of a claim: its node exists, and the leader of the ensemble lets its session last; see ``touches``."""

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


async def proven(client: Client, places: Sequence[Place], request: Request, *, is_checked: bool = False) -> bool:
    """Prove that these places, of one session, stand, and that the leader of the ensemble lets them last.

    Args:
        client: The client of the ensemble.
        places: The places.
        request: How long they are to last, from when.
        is_checked: Whether a write within this request has found them.

    Returns:
        False if one of their nodes is gone.

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
                return False
            if failure is not None:
                raise session.translated(failure) from failure
        client.require_time(session, request.ttl)
        needed = request.ends_at - session.negotiated
        if session.touches.heard_at >= needed:
            return True
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

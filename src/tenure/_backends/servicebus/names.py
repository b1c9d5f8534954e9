"""Names of queues as Service Bus accepts them; and which names mean a subscription."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from tenure._queue.checks import DEAD_SUFFIX

SCHEDULES = "tenure-schedules"
"""The entity in which tenure keeps schedules."""

_ENTITY = re.compile(r"[A-Za-z0-9](?:[\w./~-]{0,258}[A-Za-z0-9])?", re.ASCII)
_GENERATED = re.compile(r".*-x[0-9a-f]{20}")
_SUBSCRIPTION = re.compile(r"(.+)/subscriptions/([^/]+)", re.IGNORECASE)


class Path(NamedTuple):
    """An entity to receive from: a queue, or a subscription of a topic; or their dead letters."""

    entity: str
    """The queue, or the topic."""
    subscription: str | None = None
    is_dead: bool = False

    @property
    def node(self) -> str:
        """Its address on a connection."""
        base = self.entity if self.subscription is None else f"{self.entity}/Subscriptions/{self.subscription}"
        return f"{base}/$deadletterqueue" if self.is_dead else base


def home_of(name: str) -> str:
    """Return the queue whose dead letters *name* means, or *name* itself."""
    return name.removesuffix(DEAD_SUFFIX)


def entity_of(name: str) -> str:
    """Return Service Bus's name for the queue *name*.

    Letters, digits, ``.``, ``-``, ``_``, ``~`` and ``/`` are not changed. Any other name becomes a readable part and a
    hash; the name itself is kept in the entity's user metadata.
    """
    is_plain = _ENTITY.fullmatch(name) and not _GENERATED.fullmatch(name.lower()) and "//" not in name
    if is_plain and name.lower() != SCHEDULES:
        return name
    rest = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:100].strip("-") or "queue"
    return f"{rest}-x{hashlib.sha256(name.encode()).hexdigest()[:20]}"


def subscription_of(name: str) -> tuple[str, str] | None:
    """Return topic and subscription, if *name* is written ``topic/subscriptions/subscription``."""
    found = _SUBSCRIPTION.fullmatch(name)
    return (found[1], found[2]) if found else None


def may_be_subscription(name: str) -> tuple[str, str] | None:
    """Return topic and subscription, if *name* may mean them: ``topic/subscription``."""
    topic, slash, subscription = name.rpartition("/")
    return (topic, subscription) if slash and topic and subscription else None

"""The names of queues and exchanges in RabbitMQ.

A queue's name that every AMQP client accepts is not changed, so that other programs find the queue under the same name.
Any other name becomes a readable part and a hash; the name itself is kept in the records.
"""

from __future__ import annotations

import hashlib
import re

from tenure._queue.checks import DEAD_SUFFIX

OURS = "tenure:"
"""The prefix of what is no queue of messages: records, their lock, delays."""

DEAD = ":dead"
"""The suffix of the queue of a queue's dead letters."""

RECORDS = f"{OURS}records"
RECORDS_LOCK = f"{OURS}records:lock"
PROBE = f"{OURS}probe"
"""A routing key that leads nowhere."""
DUE = f"{OURS}due"
"""The exchange at which messages arrive whose delay has ended."""
ALL_DELAYS = f"{OURS}delays"
"""An exchange to which nobody publishes: where it is, all exchanges and queues of delays are."""
GONE = f"{OURS}gone"
"""The exchange and the queue of those whose own queue was deleted meanwhile."""

SERVERS = "amq."
"""The prefix of names that the server gives, such as those of other programs' reply queues."""

_PLAIN = re.compile(r"[a-zA-Z0-9_.:@,/><-]+")
_GENERATED = re.compile(r".*-x[0-9a-f]{20}")


def amqp_name(queue: str) -> str:
    """Return RabbitMQ's name for *queue*, or for the queue of its dead letters."""
    if queue.endswith(DEAD_SUFFIX):
        return amqp_name(queue.removesuffix(DEAD_SUFFIX)) + DEAD
    if queue.startswith(SERVERS):
        return queue
    is_free = not queue.startswith(OURS) and not queue.endswith(DEAD) and not _GENERATED.fullmatch(queue)
    if is_free and _PLAIN.fullmatch(queue):
        return queue
    rest = re.sub(r"[^a-zA-Z0-9]+", "-", queue).strip("-")[:100].strip("-") or "queue"
    return f"{rest}-x{hashlib.sha256(queue.encode()).hexdigest()[:20]}"


def dead_letters_name(queue: str) -> str:
    """Return RabbitMQ's name for the queue of the dead letters of *queue*."""
    return amqp_name(queue) + DEAD


def delay_name(level: int) -> str:
    """Return the name of the exchange, and of the queue, of a *level* of delays."""
    return f"{OURS}delay:{level:02d}"

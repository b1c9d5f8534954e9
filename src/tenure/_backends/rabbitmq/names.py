"""The names of queues and exchanges in RabbitMQ.

A queue's name that every AMQP client accepts is not changed, so that other programs find the queue under the same name.
Any other name becomes a readable part and a hash; the name itself is kept in the records.
"""

from __future__ import annotations

import hashlib
import re

from tenure._queue.checks import DEAD_SUFFIX
from tenure.errors import ConfigError

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

ANSWERS = f"{SERVERS}rabbitmq.reply-to."
"""The prefix of where a client waits for answers without a queue."""

_PLAIN = re.compile(r"[a-zA-Z0-9_.:@,/-]+")
"""What a driver takes: of pamqp, version 3 refuses ``+``, version 4 ``<`` and ``>``. Topics give ``#`` a meaning."""
_QUEUE = re.compile(r"[a-zA-Z0-9_.:@#,/-]+")
_SERVERS_OWN = re.compile(r"[a-zA-Z0-9_.:@#,/+=-]+")
"""Queues, and where clients wait for answers, which ends with base64."""
_GENERATED = re.compile(r".*-x[0-9a-f]{20}")


def amqp_name(queue: str) -> str:
    """Return RabbitMQ's name for *queue*, or for the queue of its dead letters.

    Raises:
        ConfigError: It begins as those that the server gives, and can be none of them.
    """
    if queue.endswith(DEAD_SUFFIX):
        return amqp_name(queue.removesuffix(DEAD_SUFFIX)) + DEAD
    if queue.startswith(SERVERS):
        if not _SERVERS_OWN.fullmatch(queue):
            raise ConfigError(
                f"the queue's name ({queue!r}) begins with {SERVERS!r}, so it must be one that RabbitMQ has given, of "
                "ASCII letters, digits and _.:@#,/+=-; choose another beginning"
            )
        return queue
    is_free = not queue.startswith(OURS) and not queue.endswith(DEAD) and not _GENERATED.fullmatch(queue)
    if is_free and _PLAIN.fullmatch(queue):
        return queue
    rest = re.sub(r"[^a-zA-Z0-9]+", "-", queue).strip("-")[:100].strip("-") or "queue"
    return f"{rest}-x{hashlib.sha256(queue.encode()).hexdigest()[:20]}"


def is_queue(name: str) -> bool:
    """Return whether a queue can have RabbitMQ's *name*."""
    return not name.startswith(ANSWERS) and _QUEUE.fullmatch(name) is not None


def dead_letters_name(queue: str) -> str:
    """Return RabbitMQ's name for the queue of the dead letters of *queue*."""
    return amqp_name(queue) + DEAD


def delay_name(level: int) -> str:
    """Return the name of the exchange, and of the queue, of a *level* of delays."""
    return f"{OURS}delay:{level:02d}"

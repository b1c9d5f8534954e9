"""The settings of a queue, in its metadata."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress

from tenure._backends.azure_storage.client import LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.names import decode_metadata, encode_metadata
from tenure._backends.azure_storage.requests import NO_QUEUE, client_of
from tenure._foreign import Unreadable, read_object
from tenure._queue.broker import QueueOptions, QueueSettings, QueueTraits, read_settings, settings_with, undeclared
from tenure.errors import ConfigError

MADE = "tenure_made"
"""The name of the mark in the metadata."""

CHECK_AFTER = 0.25
"""Seconds after which to check that a setting still has the value that was written."""


async def settings_of(
    connections: LoopConnections, queue: str, traits: QueueTraits
) -> tuple[QueueSettings, str | None]:
    """Return the settings of *queue*, and what tells it from one that was deleted; see :func:`declare`."""
    answer = await unless_refused(client_of(connections, queue).get_queue_properties(), *NO_QUEUE)
    known = {} if isinstance(answer, Refused) else answer.metadata or {}
    return _in_force(_declared(known), traits), known.get(MADE)


async def declare(
    connections: LoopConnections,
    queue: str,
    traits: QueueTraits,
    changes: QueueOptions,
    *,
    only_undeclared: bool = False,
) -> tuple[QueueSettings, str | None]:
    """Write *changes* into the settings of *queue*; return the settings that result, and a mark.

    The mark is written with the first setting that is declared, so it tells the queue from one that was deleted.

    Azure replaces all of the metadata, without a condition. So the settings are read again a moment later, and written
    again if another process has replaced them. If several processes declare a setting at the same time, the first one
    certainly wins only on a queue that doesn't exist yet.
    """
    client = client_of(connections, queue)
    is_marking = bool(changes)
    while True:  # until the request times out
        answer = await unless_refused(client.get_queue_properties(), *NO_QUEUE)
        known = None if isinstance(answer, Refused) else answer.metadata or {}
        declared = _declared(known)
        if only_undeclared:  # without the settings that another process has declared since the last read
            changes = undeclared(changes, declared)
        made = (known or {}).get(MADE)
        is_done = all(declared.get(name) == value for name, value in changes.items())
        if known is not None and is_done and (made or not is_marking):
            return _in_force(declared, traits), made
        declared.update(changes)
        metadata = {"tenure_settings": encode_metadata(json.dumps(declared)), "tenure_name": encode_metadata(queue)}
        if is_marking:
            metadata[MADE] = made = made or secrets.token_hex(8)
        if known is not None:
            await unless_refused(client.set_queue_metadata({**known, **metadata}), *NO_QUEUE)
        elif not isinstance(
            await unless_refused(client.create_queue(metadata=metadata), "QueueAlreadyExists"), Refused
        ):
            return _in_force(declared, traits), made  # created with them, so every later process sees them
        await asyncio.sleep(CHECK_AFTER)


def _declared(metadata: Mapping[str, str] | None) -> QueueOptions:
    """Return the settings that were declared. What another program has made unreadable was not."""
    text = (metadata or {}).get("tenure_settings")
    with suppress(Unreadable):
        return read_settings(read_object(decode_metadata(text))) if text else {}
    return {}


def _in_force(declared: QueueOptions, traits: QueueTraits) -> QueueSettings:
    """Return the settings that were *declared*, without those that no queue on this store can have."""
    fit: dict[str, object] = {}
    for name, value in declared.items():
        with suppress(ConfigError):
            settings_with({name: value}, traits)  # type: ignore[misc]
            fit[name] = value
    return QueueSettings(**fit)  # type: ignore[arg-type]

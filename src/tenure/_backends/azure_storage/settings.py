"""The settings of a queue, in its metadata."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from typing import Any, cast

from tenure._backends.azure_storage.client import LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.names import decode_metadata, encode_metadata
from tenure._backends.azure_storage.requests import NO_QUEUE, client_of
from tenure._queue.broker import QueueOptions, QueueSettings, undeclared

CHECK_AFTER = 0.25
"""Seconds after which to check that a setting still has the value that was written."""


async def read_settings(connections: LoopConnections, queue: str) -> QueueSettings:
    """Return the settings of *queue*."""
    answer = await unless_refused(client_of(connections, queue).get_queue_properties(), *NO_QUEUE)
    return QueueSettings(**_declared({} if isinstance(answer, Refused) else answer.metadata or {}))


async def declare(
    connections: LoopConnections, queue: str, changes: QueueOptions, *, only_undeclared: bool = False
) -> QueueSettings:
    """Write *changes* into the settings of *queue*; return the settings that result.

    Azure replaces all of the metadata, without a condition. So the settings are read again a moment later, and written
    again if another process has replaced them. If several processes declare a setting at the same time, the first one
    certainly wins only on a queue that doesn't exist yet.
    """
    client = client_of(connections, queue)
    while True:  # until the request times out
        answer = await unless_refused(client.get_queue_properties(), *NO_QUEUE)
        known = None if isinstance(answer, Refused) else answer.metadata or {}
        declared = _declared(known or {})
        if only_undeclared:  # without the settings that another process has declared since the last read
            changes = undeclared(changes, declared)
        if known is not None and all(declared.get(name) == value for name, value in changes.items()):
            return QueueSettings(**declared)
        declared.update(changes)
        metadata = {"tenure_settings": encode_metadata(json.dumps(declared)), "tenure_name": encode_metadata(queue)}
        if known is not None:
            await unless_refused(client.set_queue_metadata({**known, **metadata}), *NO_QUEUE)
        elif not isinstance(
            await unless_refused(client.create_queue(metadata=metadata), "QueueAlreadyExists"), Refused
        ):
            return QueueSettings(**declared)  # created with them, so every later process sees them
        await asyncio.sleep(CHECK_AFTER)


def _declared(metadata: dict[str, str]) -> QueueOptions:
    """Return the settings that were declared; those that a newer tenure may have added are left out."""
    text = metadata.get("tenure_settings")
    declared: dict[str, Any] = json.loads(decode_metadata(text)) if text else {}
    known = {field.name for field in fields(QueueSettings)}
    return cast(QueueOptions, {name: value for name, value in declared.items() if name in known})

"""Schedules: an empty blob for each, in the container of the leases; its metadata is what is kept of it.

A blob is replaced if it has the ETag that was read; the metadata of a queue is replaced without a condition, and so it
is no place for them. No lease has a blob of this prefix: their names never begin with a dot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from azure.core import MatchConditions
from azure.storage.blob.aio import BlobClient

from tenure._backends.azure_storage.client import NO_RIGHTS, Account, LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.names import decode_metadata, encode_metadata, queue_of
from tenure._backends.azure_storage.requests import client_of, create
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._foreign import a_text, read_or
from tenure._queue.broker import Schedules
from tenure._queue.schedule_steps import Act

T = TypeVar("T")

_MISSING = ("BlobNotFound", "ContainerNotFound")
_CHANGED = ("ConditionNotMet", "BlobAlreadyExists", "BlobNotFound")


class Blob(NamedTuple):
    """The blob of a schedule, as it was when it was read."""

    name: str
    etag: str


class AzureSchedules:
    """A ``ScheduleStore`` on the blobs of a container."""

    def __init__(
        self,
        account: Account,
        clock: ServiceClock,
    ) -> None:
        self._account = account
        self._clock = clock

    async def kept(self, queue: str) -> Schedules:
        """Return the texts that are kept of the schedules of *queue*."""

        async def read(connections: LoopConnections) -> dict[str, str]:
            texts: dict[str, str] = {}
            asked_at = self._clock.local.now()
            listed = connections.container.list_blobs(
                name_starts_with=_prefix_of(queue),
                include=["metadata"],
                raw_response_hook=partial(self._clock.learn_from, asked_at=asked_at),
            )
            async for one in listed:
                schedule = _schedule_in(one.metadata)
                if schedule is not None and str(one.name) == _blob_of(queue, schedule):
                    texts[schedule] = _text_in(one.metadata)
            return texts

        texts = await self._account.run(lambda connections: unless_refused(read(connections), *_MISSING))
        await self._clock.ensure_known(queue)
        return Schedules({} if isinstance(texts, Refused) else texts, self._clock.now())

    async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
        """Replace the text of one schedule by that of *act*; create *queue* first, so that it is listed."""
        await self._clock.ensure_known(queue)
        return await self._account.run(partial(self._change, queue=queue, schedule=schedule, act=act))

    async def _change(self, connections: LoopConnections, *, queue: str, schedule: str, act: Act[T]) -> T:
        blob = connections.container.get_blob_client(_blob_of(queue, schedule))
        while True:  # until the request times out
            asked_at = self._clock.local.now()
            hook = partial(self._clock.learn_from, asked_at=asked_at)
            found = await unless_refused(blob.get_blob_properties(raw_response_hook=hook), *_MISSING)
            etag, kept = None, None
            if not isinstance(found, Refused):
                etag = str(found.etag)
                kept = _text_in(found.metadata) if _schedule_in(found.metadata) == schedule else None
            text, answer = act(kept, self._clock.now())
            if text == kept:
                return answer
            if kept is None:
                await create(client_of(connections, queue), queue)
            metadata = {"tenure_schedule": encode_metadata(schedule), "tenure_text": encode_metadata(text or "")}
            written = await unless_refused(
                _write(blob, None if text is None else metadata, etag), *_CHANGED, "ContainerNotFound"
            )
            if written == Refused("ContainerNotFound"):
                await unless_refused(connections.container.create_container(), "ContainerAlreadyExists")
            elif not isinstance(written, Refused):
                return answer

    async def blobs(self, queue: str) -> list[Blob]:
        """Return the blobs of the schedules of *queue*, as they are now; none if this process may not use blobs."""

        async def read(connections: LoopConnections) -> list[Blob]:
            if not connections.has_blobs:
                return []
            listed = connections.container.list_blobs(name_starts_with=_prefix_of(queue))
            return [Blob(str(one.name), str(one.etag)) async for one in listed]

        found = await self._account.run(lambda connections: unless_refused(read(connections), *_MISSING, *NO_RIGHTS))
        return [] if isinstance(found, Refused) else found

    async def remove(self, blobs: Sequence[Blob]) -> None:
        """Remove those of *blobs* that nobody has changed since."""

        async def remove(connections: LoopConnections, one: Blob) -> None:
            blob = connections.container.get_blob_client(one.name)
            await unless_refused(_write(blob, None, one.etag), *_CHANGED, "ContainerNotFound")

        await self._account.run_all([partial(remove, one=one) for one in blobs])


def _prefix_of(queue: str) -> str:
    return f".schedules/{queue_of(queue)}/"


def _blob_of(queue: str, schedule: str) -> str:
    return _prefix_of(queue) + hashlib.sha256(schedule.encode()).hexdigest()[:40]


def _schedule_in(metadata: Mapping[str, str] | None) -> str | None:
    """Return the schedule whose text a blob with *metadata* keeps; None if another program has put it there."""
    return read_or(_read_text, (metadata or {}).get("tenure_schedule"), None)


def _text_in(metadata: Mapping[str, str] | None) -> str:
    """Return the text of a schedule. One that another program has made unreadable is shown to its reader as it is."""
    value = (metadata or {}).get("tenure_text", "")
    return read_or(_read_text, value, value)


def _read_text(value: object) -> str:
    return a_text(decode_metadata(a_text(value)))


def _write(blob: BlobClient, metadata: dict[str, str] | None, etag: str | None) -> Awaitable[Any]:
    """Create a blob, or replace its metadata, or delete it for None; unless it isn't the one with *etag* any more."""
    if etag is None:
        return blob.upload_blob(b"", overwrite=False, metadata=metadata)
    condition: dict[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
    if metadata is None:
        return blob.delete_blob(**condition)
    return blob.set_blob_metadata(metadata, **condition)

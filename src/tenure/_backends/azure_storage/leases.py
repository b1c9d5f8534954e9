"""Leases on blobs: a blob per name, Azure's own lease on it, and the token in its metadata.

House rules:

- The lease id is a hash of name, holder and token. So it is the same when a request is repeated, and another one for
  every term; and a process that reads the metadata can prove, by a request for the blob *under that id*, that this term
  holds the lease now. The service compares it in every write that passes it, which fences the blob.
- A new term: read (token *t*, ETag *e*); acquire with the id of *t + 1*, if the ETag is still *e*; write *t + 1* into
  the metadata under that id, if the ETag is still *e*. Only then it is granted. Leases don't change the ETag, metadata
  does: so no token is granted twice. A crash in between leaves a lease without a term, which expires, and a token that
  was never granted. A candidate that repeats a request after a lost answer proposes the same id, and goes on.
- The service would renew an expired lease that no other program has taken. So it is read under the lease id first,
  which the service refuses then. An expired lease stays lost.
- A lease without a written term belongs to a *foreign holder*: a program without tokens, such as the sample of the
  leader election pattern. It is a holder like any other, but can't be requested to resign.
- The tokens of a new blob start at the service's clock, in seconds. So they rise even if a blob was deleted, for
  example by a lifecycle rule. One whose token was made unreadable is not acquired: the next token could be a lower one.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from azure.core import MatchConditions
from azure.storage.blob import BlobProperties
from azure.storage.blob.aio import BlobClient, BlobLeaseClient

from tenure._backends.azure_storage.client import CONCURRENCY, Account, LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.names import blob_of, common_beginning, decode_metadata, encode_metadata, name_of
from tenure._election.store import NAME_MAX, LeaseTraits, require_name, require_ttl
from tenure._foreign import a_text, digits, read_json, read_or, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.notifier import Notifier
from tenure._runtime.together import together
from tenure.errors import ConfigError, Unavailable

TRAITS = LeaseTraits(
    ttl_min=15.0,
    ttl_max=60.0,
    fencing="emulated",
    expiry="store clock",
    hints=False,
    survives_restart=True,
    tells_remaining=False,
    tells_vacancy=False,
    foreign_leaders=True,
)

FOREIGN_HOLDER = "(a program that writes no term)"
"""The holder of a lease without a written term."""

METADATA_MAX = 8_000
"""The most bytes of metadata: Azure allows 8 KiB for a blob."""

_SPACE = uuid.UUID("6f1c1a3e-60a6-5b0e-9d3c-0d6d6f6b6a01")
_MISSING = ("BlobNotFound", "ContainerNotFound")
_BUSY = ("LeaseAlreadyPresent", "LeaseIdMismatchWithLeaseOperation", "LeaseIsBreakingAndCannotBeAcquired")
_NOT_OURS = (
    "LeaseIdMismatchWithBlobOperation",
    "LeaseNotPresentWithBlobOperation",
    "LeaseLost",
    "LeaseIdMismatchWithLeaseOperation",
    "LeaseNotPresentWithLeaseOperation",
    "LeaseIsBrokenAndCannotBeRenewed",
    "LeaseIsBreakingAndCannotBeAcquired",
    "LeaseAlreadyPresent",
    *_MISSING,
)
_CHANGED = "ConditionNotMet"

TOKEN_MAX = 2**63 - 2
"""The highest token that is read: the next one fits into 64 bits."""

CONTENT_MAX = 4 * NAME_MAX
"""Bytes of the longest name, as the content of a blob."""

TERM_CHECKS = (0.03, 0.06, 0.12, 0.25, 0.5)
"""Seconds between reads of a lease that has just been taken, until its holder has written the term."""

FEW = 8
"""Up to so many names are inspected one by one; for more, the blobs of the container are listed."""

TRIES = 20
"""How often a request is repeated after a concurrent change by another process."""


class TermLike(Protocol):
    """The identity of a term: a :class:`tenure.Term` or :class:`tenure.sync.Term`, or a value with the same three."""

    @property
    def name(self) -> str:
        """The name of the election."""
        ...

    @property
    def holder(self) -> str:
        """The identity under which the term was won."""
        ...

    @property
    def token(self) -> int:
        """The fencing token."""
        ...


def lease_id(term: TermLike) -> str:
    """Return the id of the lease under which *term* holds its blob.

    Azure refuses a write to a leased blob under another id: so the service fences all writes to *that blob*. A write
    that replaces a whole blob also replaces its metadata, and with it the token, so data belongs elsewhere; see
    :class:`Fence`.

    .. versionadded:: 0.1
    """
    return str(uuid.uuid5(_SPACE, json.dumps([term.name, term.holder, term.token])))


@dataclass(frozen=True, slots=True)
class LeaseBlob:
    """A lease blob, as it was when it was read."""

    token: int
    """The newest token that was granted; 0 if none is known."""
    floor: int | None
    """The next token is higher than this; None if that isn't known, as the token in the blob is unreadable."""
    holder: str | None
    metadata: Metadata
    ttl: int
    resign_asked: int
    """The token whose holder was requested to resign."""
    held: bool
    etag: str
    raw: Mapping[str, str]

    @classmethod
    def of(cls, found: BlobProperties) -> LeaseBlob:
        """Return the lease blob with the properties *found*."""
        raw = dict(found.metadata or {})
        text = raw.get("tenure_token")
        newest = read_or(_read_token, text, None) if text else 0
        token = newest or 0
        # Without a token (new, another program's, overwritten), tokens start at the time of the last write.
        floor = None if newest is None else token or int(found.last_modified.timestamp())
        holder = read_or(_read_holder, raw.get("tenure_holder"), None) if token else None
        metadata = read_or(_read_metadata, raw.get("tenure_metadata"), NO_METADATA) if token else NO_METADATA
        held = found.lease.status == "locked"
        ttl, resign = _number(raw.get("tenure_ttl"), int(TRAITS.ttl_max)), _number(raw.get("tenure_resign"))
        etag = '"{}"'.format(str(found.etag).strip('"'))  # a list has it without quotes
        return cls(token, floor, holder, metadata, ttl, resign, held, etag, raw)

    def grant(self, name: str) -> Grant:
        """Return the grant of the term that is written in the blob."""
        return Grant(name, self.holder or "", self.token)


def _number(text: str | None, most: int = TOKEN_MAX) -> int:
    return min(read_or(digits, text, 0), most)


def _read_token(text: str) -> int:
    return digits(text, TOKEN_MAX)


def _read_holder(text: object) -> str:
    return a_text(decode_metadata(a_text(text)), NAME_MAX)


def _read_metadata(text: object) -> Metadata:
    return FrozenDict(texts(read_json(decode_metadata(a_text(text)))))


class AzureLeases:
    """A ``LeaseStore`` on the blobs of a container."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._notifier = Notifier()
        self._started: dict[str, str] = {}  # name: the holder of an acquisition that may be half done
        self._proven: dict[str, str] = {}  # name: ETag under which the written term was proven to hold the lease
        self._foreign: dict[str, str] = {}  # name: ETag under which a foreign holder was seen

    @property
    def traits(self) -> LeaseTraits:
        """What the store can do."""
        return TRAITS

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that repeats the request gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        written = _metadata_of(holder, ttl, metadata)
        return await self._account.run(lambda connections: self._acquire(connections, name, holder, written))

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims to *ttl* seconds from now, concurrently; one without an answer gets ``NoAnswer``."""
        require_ttl(ttl, TRAITS)
        answers = await self._account.run_each([_bind(self._renew, grant, math.ceil(ttl)) for grant in grants])
        unanswered = [answer for answer in answers if isinstance(answer, Unavailable)]
        if unanswered and len(unanswered) == len(answers):
            raise unanswered[0]
        return [NoAnswer(str(answer)) if isinstance(answer, Unavailable) else answer for answer in answers]

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim; its token is kept."""
        answer = await self._account.run(lambda connections: self._release(connections, grant))
        self._notifier.notify(grant.name)
        return answer

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, without changing anything."""
        (found,) = await self.inspect_many([name])
        return found

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, by a list of the blobs, and a request to prove the term of each lease."""
        for name in names:
            require_name(name)
        distinct = list(dict.fromkeys(names))
        seen = await self._listed(distinct) if len(distinct) > FEW else {}
        found = {name: _told(name, blob) for name, blob in seen.items() if blob is None or not blob.held}
        left = [name for name in distinct if name not in found]

        async def inspect(name: str) -> HeldBy | Vacant:
            return await self._account.run(lambda connections: self._inspect(connections, name, seen.get(name)))

        found |= zip(left, await together(inspect, left, CONCURRENCY), strict=True)
        return [found[name] for name in names]

    async def _listed(self, names: Sequence[str]) -> dict[str, LeaseBlob | None]:
        """Return the blobs of many names; None for each that there isn't."""
        blobs = {blob_of(name): name for name in names}
        beginning = common_beginning(blobs)
        found: dict[str, LeaseBlob | None] = dict.fromkeys(names)
        following: str | None = None
        while True:  # each page has a time limit of its own
            page, following = await self._account.run(_page_of(beginning, following))
            for one in page:
                if (name := blobs.get(str(one.name))) is not None:
                    found[name] = LeaseBlob.of(one)
            if following is None:
                return found

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted; also those of foreign holders, while they hold them."""
        return await self._account.run(self._names)

    async def ask_to_resign(self, name: str) -> bool:
        """Request that the present holder resigns; False if there is none, or it is a foreign one."""
        require_name(name)
        asked = await self._account.run(lambda connections: self._ask_to_resign(connections, name))
        self._notifier.notify(name)
        return asked

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when this process has changed something for *name*; Azure sends no hints of others' changes."""
        require_name(name)
        return self._notifier.listen(name)

    def close(self) -> None:
        """End the hints."""
        self._notifier.close()

    # --- a new term ---

    async def _acquire(
        self, connections: LoopConnections, name: str, holder: str, written: Mapping[str, str]
    ) -> Granted | HeldBy:
        blob, seconds = _blob(connections, name), int(written["tenure_ttl"])
        for _ in range(TRIES):
            seen = await _read(blob)
            if seen is None:
                await self._create(connections, blob, name)
                continue
            mine, begun = seen.holder == holder, self._started.get(name) == holder
            if seen.held and mine and await _take_lease(blob, seen.grant(name), seen, max(seconds, seen.ttl)):
                self._started.pop(name, None)
                return Granted(seen.grant(name), seen.resign_asked == seen.token)
            if not seen.held or begun:
                self._started[name] = holder
                grant = await self._begin_term(blob, Grant(name, holder, _next_token(blob, seen)), seen, written)
                if grant is not None:
                    self._started.pop(name, None)
                    self._notifier.notify(name)
                    return Granted(grant)
            elif (other := await self._holder_of(blob, name, seen)) is not None:
                return other
        raise Unavailable(f"{name!r} changed hands {TRIES} times while it was read; tenure tries again")

    async def _begin_term(
        self, blob: BlobClient, grant: Grant, seen: LeaseBlob, written: Mapping[str, str]
    ) -> Grant | None:
        """Take the lease and write the term; None if another process has changed the blob in between."""
        if not await _take_lease(blob, grant, seen, int(written["tenure_ttl"])):
            self._started.pop(grant.name, None)
            return None
        own = {name: text for name, text in seen.raw.items() if not name.startswith("tenure_")}
        metadata = {**own, **written, "tenure_token": str(grant.token)}
        answer = await unless_refused(_write(blob, metadata, lease_id(grant), seen.etag), *_NOT_OURS, _CHANGED)
        return None if isinstance(answer, Refused) else grant

    async def _create(self, connections: LoopConnections, blob: BlobClient, name: str) -> None:
        """Create an empty blob; if its name is a hash, its content is the name."""
        content = b"" if name_of(str(blob.blob_name)) is not None else name.encode()
        answer = await unless_refused(
            blob.upload_blob(content, overwrite=False), "ContainerNotFound", "BlobAlreadyExists"
        )
        if answer == Refused("ContainerNotFound"):
            await unless_refused(connections.container.create_container(), "ContainerAlreadyExists")

    # --- other holders ---

    async def _holder_of(self, blob: BlobClient, name: str, seen: LeaseBlob) -> HeldBy | None:
        """Return the holder of a lease that is not ours; None if it is free by now."""
        if self._proven.get(name) == seen.etag:
            return _held_by(name, seen)  # a foreign holder may hold it by now, but that isn't worth a request per poll
        if self._foreign.get(name) == seen.etag:
            return HeldBy(name, FOREIGN_HOLDER, 0, None)
        found = await self._wait_for_term(blob, name, seen)
        if found is None or not found.held:
            return None
        return _held_by(name, found) if found.holder is not None else HeldBy(name, FOREIGN_HOLDER, 0, None)

    async def _wait_for_term(self, blob: BlobClient, name: str, seen: LeaseBlob | None) -> LeaseBlob | None:
        """Wait until a lease that was just taken has its term written; one that never has is foreign."""
        for pause in (*TERM_CHECKS, None):
            if seen is None or not seen.held:
                return seen
            if seen.holder is not None:
                proven = await _read(blob, lease_id(seen.grant(name)))
                if proven is not None:
                    self._proven[name] = proven.etag
                    return proven
            if self._foreign.get(name) == seen.etag or pause is None:
                break
            await asyncio.sleep(pause)
            seen = await _read(blob)
        assert seen is not None
        self._proven.pop(name, None)
        self._foreign[name] = seen.etag
        return replace(seen, holder=None)

    async def _inspect(self, connections: LoopConnections, name: str, seen: LeaseBlob | None) -> HeldBy | Vacant:
        blob = _blob(connections, name)
        return _told(name, await self._wait_for_term(blob, name, seen or await _read(blob)))

    async def _names(self, connections: LoopConnections) -> list[str]:
        found: set[str] = set()
        listed = connections.container.list_blobs(include=["metadata"])

        async def read() -> None:
            async for one in listed:
                if "tenure_token" in (one.metadata or {}) or one.lease.status == "locked":
                    name = name_of(str(one.name))
                    if name is None and one.size <= CONTENT_MAX:
                        name = await _content_of(connections.container.get_blob_client(str(one.name)))
                    if name is not None and _is_blob_of(str(one.name), name):
                        found.add(name)

        await unless_refused(read(), *_MISSING)
        return sorted(found)

    # --- an existing term ---

    async def _renew(self, connections: LoopConnections, grant: Grant, seconds: int) -> Granted | Lost:
        blob = _blob(connections, grant.name)
        seen = await _read(blob, lease_id(grant))
        if seen is None or seen.token != grant.token:
            return Lost(grant)
        if seconds > seen.ttl:  # only an acquisition changes the duration; under the same id it is the same lease
            return await self._lengthen(blob, grant, seen, seconds)
        answer = await unless_refused(_lease(blob, grant).renew(), *_NOT_OURS)
        if isinstance(answer, Refused):
            return Lost(grant)
        return Granted(grant, seen.resign_asked == grant.token)

    async def _lengthen(self, blob: BlobClient, grant: Grant, seen: LeaseBlob, seconds: int) -> Granted | Lost:
        """Renew for longer than before: first the lease, then the metadata, so that it never records more."""
        if not await _take_lease(blob, grant, seen, seconds):
            raise Unavailable(f"{grant.name!r} was written to while it was renewed; tenure tries again")
        answer = await unless_refused(
            _write(blob, {**seen.raw, "tenure_ttl": str(seconds)}, lease_id(grant), seen.etag), _CHANGED
        )
        if isinstance(answer, Refused):
            raise Unavailable(f"{grant.name!r} was written to while it was renewed; tenure tries again")
        return Granted(grant, seen.resign_asked == grant.token)

    async def _release(self, connections: LoopConnections, grant: Grant) -> Released | Lost:
        blob = _blob(connections, grant.name)
        seen = await _read(blob, lease_id(grant))
        if seen is None or seen.token != grant.token:
            return Lost(grant)
        answer = await unless_refused(_lease(blob, grant).release(), *_NOT_OURS)
        return Lost(grant) if isinstance(answer, Refused) else Released(grant)

    async def _ask_to_resign(self, connections: LoopConnections, name: str) -> bool:
        blob = _blob(connections, name)
        for _ in range(TRIES):
            found = await self._wait_for_term(blob, name, await _read(blob))
            if found is None or not found.held or found.holder is None:
                return False
            grant = found.grant(name)
            metadata = {**found.raw, "tenure_resign": str(found.token)}
            answer = await unless_refused(_write(blob, metadata, lease_id(grant), found.etag), *_NOT_OURS, _CHANGED)
            if not isinstance(answer, Refused):
                return True
        raise Unavailable(f"{name!r} changed hands {TRIES} times during the request to resign; try again")


# --- requests ----------------------------------------------------------------------------------------------------


def _blob(connections: LoopConnections, name: str) -> BlobClient:
    return connections.container.get_blob_client(blob_of(name))


def _lease(blob: BlobClient, grant: Grant) -> BlobLeaseClient:
    return BlobLeaseClient(blob, lease_id=lease_id(grant))


def _next_token(blob: BlobClient, seen: LeaseBlob) -> int:
    """Return the token of the next term.

    Raises:
        ConfigError: It would perhaps not be higher than an earlier one.
    """
    if seen.floor is None:
        raise ConfigError(
            f"the blob {blob.blob_name!r} in the container {blob.container_name!r} has the token "
            f"{seen.raw['tenure_token']!r:.40}, which is no number from 1 to {TOKEN_MAX}, so no higher one can follow; "
            "in its metadata, set tenure_token to a number as high as the newest token, or remove it: then tokens go "
            "on from Azure's clock in seconds"
        )
    return seen.floor + 1


def _is_blob_of(blob: str, name: str) -> bool:
    """Return whether *blob* is that of the election *name*, if there can be one."""
    try:
        require_name(name)
    except ConfigError:
        return False
    return blob_of(name) == blob


async def _content_of(blob: BlobClient) -> str | None:
    """Return the content of a blob; None if it is no text, or the blob is no more."""

    async def read() -> bytes:
        return await (await blob.download_blob()).readall()

    content = await unless_refused(read(), *_MISSING)
    try:
        return None if isinstance(content, Refused) else content.decode()
    except UnicodeDecodeError:
        return None


async def _read(blob: BlobClient, under: str | None = None) -> LeaseBlob | None:
    """Read a blob; None if there is none, or if it is not leased *under* this id now."""
    found = await unless_refused(blob.get_blob_properties(lease=under), *(_MISSING if under is None else _NOT_OURS))
    return None if isinstance(found, Refused) else LeaseBlob.of(found)


async def _take_lease(blob: BlobClient, grant: Grant, seen: LeaseBlob, seconds: int) -> bool:
    """Take the lease under the id of *grant*, or extend it; False if it is another's, or the blob has changed."""
    taking = _lease(blob, grant).acquire(
        lease_duration=seconds, etag=seen.etag, match_condition=MatchConditions.IfNotModified
    )
    return not isinstance(await unless_refused(taking, *_BUSY, *_MISSING, _CHANGED), Refused)


def _write(blob: BlobClient, metadata: Mapping[str, str], under: str, etag: str) -> Awaitable[Any]:
    return blob.set_blob_metadata(dict(metadata), lease=under, etag=etag, match_condition=MatchConditions.IfNotModified)


def _page_of(
    beginning: str, marker: str | None
) -> Callable[[LoopConnections], Coroutine[Any, Any, tuple[list[BlobProperties], str | None]]]:
    """Return what reads the page at *marker* of the list of blobs with this *beginning*, and the marker of the next."""

    async def read(connections: LoopConnections) -> tuple[list[BlobProperties], str | None]:
        listed = connections.container.list_blobs(name_starts_with=beginning, include=["metadata"])
        pages: Any = listed.by_page(marker)

        async def first() -> list[BlobProperties]:
            async for page in pages:
                return [one async for one in page]
            return []

        found = await unless_refused(first(), *_MISSING)
        return ([], None) if isinstance(found, Refused) else (found, pages.continuation_token or None)

    return read


def _metadata_of(holder: str, ttl: float, metadata: Metadata) -> dict[str, str]:
    """Return the metadata of a term, without its token."""
    written = {"tenure_holder": encode_metadata(holder), "tenure_ttl": str(math.ceil(ttl))}
    if metadata:
        written["tenure_metadata"] = encode_metadata(json.dumps(dict(metadata), ensure_ascii=False))
    size = sum(len(name) + len(text) for name, text in written.items())
    if size > METADATA_MAX:
        raise ConfigError(
            f"metadata and holder take {size:,} bytes, and Azure keeps {METADATA_MAX:,} with a blob; "
            "shorten them, for example to an address where the rest can be read"
        )
    return written


def _held_by(name: str, seen: LeaseBlob) -> HeldBy:
    assert seen.holder is not None
    return HeldBy(name, seen.holder, seen.token, None, seen.metadata)


def _told(name: str, found: LeaseBlob | None) -> HeldBy | Vacant:
    """Return the answer of ``inspect`` about a blob whose term, if it is held, was proven or is foreign."""
    if found is None or not found.held:
        return Vacant(name, found.token if found else 0)
    if found.holder is None:
        return HeldBy(name, FOREIGN_HOLDER, 0, None)
    return replace(_held_by(name, found), resign_asked=found.resign_asked == found.token)


def _bind(operation: Any, grant: Grant, seconds: int) -> Any:
    return lambda connections: operation(connections, grant, seconds)

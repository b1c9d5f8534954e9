"""The keys in etcd, the requests to its JSON gateway, and what its answers mean. Pure functions: nothing is sent here.

House rules:

- The keys of an election are those of etcd's own package ``concurrency``: ``PREFIXNAME/LEASE``, where LEASE is the
  candidate's etcd lease in hexadecimal. Candidates stand in the order of their create revisions, which are the tokens.
- What that dialect has no room for is kept under ``PREFIX%tenure/``, where no name can lead: a ``%`` in a name is
  always followed by two digits.
- No answer is decided by a read. A transaction that can only read is answered by etcd as a read, which may be stale
  after a pause (etcd issue 20418). So each decision is a transaction that would write if its conditions held; where
  there is nothing to write, it deletes a key that never exists, which etcd's log orders and which changes nothing.
- Anybody who may write there can write any key and any value: one that can't be read is nobody's record, or no name.
  An answer that etcd's gateway can't have given is ``Unavailable``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tenure._election.store import NAME_MAX
from tenure._foreign import Unreadable, a_count, a_list, a_text, an_object, digits, read_object, read_or, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, TOKEN_MAX, Metadata
from tenure.errors import Unavailable

Json = dict[str, Any]

OPS_MAX = 128
"""The most conditions, and the most operations, that a transaction may have: etcd's default of ``--max-txn-ops``."""
CHECKED_MAX = OPS_MAX - 1
"""The most places that one transaction checks: it has an operation for each, and one that makes it a write."""
LOOKED_MAX = OPS_MAX // 3
"""The most names that one transaction looks at."""

_ENCODED_MAX = 2**26
"""Characters of a key or value in an answer, at most: etcd's own limit of a request is much lower."""
_UINT_MAX = 2**64 - 1

_OWN = "%tenure/"


# --- keys -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a key that concerns the election *name*."""

    name: str
    kind: Literal["place", "record", "resign"]
    key: bytes
    is_delete: bool
    revision: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys from *first* up to *end*, without that one; only the key *first* if there is no end."""

    first: bytes
    end: bytes | None = None

    @classmethod
    def beginning_with(cls, beginning: bytes) -> KeyRange:
        return cls(beginning, end_of(beginning))

    def written(self) -> Json:
        return {"key": encoded(self.first)} | ({} if self.end is None else {"range_end": encoded(self.end)})


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys under one prefix."""

    prefix: str

    def election(self, name: str) -> bytes:
        """Return the beginning of the keys of all candidates for *name*."""
        return f"{self.prefix}{escaped(name)}/".encode()

    def place(self, name: str, lease: int) -> bytes:
        """Return the key of a candidate."""
        return self.election(name) + f"{lease:x}".encode()

    def record(self, name: str) -> bytes:
        """Return the key of what is noted about the newest term of *name*."""
        return f"{self.prefix}{_OWN}record/{escaped(name)}".encode()

    def resign(self, name: str) -> bytes:
        """Return the key of a request to resign: its value is the token of the term."""
        return f"{self.prefix}{_OWN}resign/{escaped(name)}".encode()

    def fence(self, lease: int) -> bytes:
        """Return the key whose version is raised so that no earlier request puts a key of *lease* any more."""
        return f"{self.prefix}{_OWN}fence/{lease:x}".encode()

    @property
    def never(self) -> bytes:
        """A key that never exists."""
        return f"{self.prefix}{_OWN}never".encode()

    @property
    def records(self) -> bytes:
        """The beginning of the keys of all records."""
        return f"{self.prefix}{_OWN}record/".encode()

    @property
    def whole(self) -> KeyRange:
        """All keys here."""
        return KeyRange.beginning_with(self.prefix.encode())

    def watched(self, name: str) -> tuple[KeyRange, ...]:
        """Return the keys whose changes concern *name*."""
        return KeyRange.beginning_with(self.election(name)), KeyRange(self.record(name)), KeyRange(self.resign(name))

    def change(self, event: object) -> Change | None:
        """Return the change that *event* reports; None if it concerns no election.

        Raises:
            Unreadable: It has no such form.
        """
        event = an_object(event)
        pair = an_object(event.get("kv"))
        key, revision = decoded(pair.get("key", "")), number(pair, "mod_revision")
        rest = key.removeprefix(self.prefix.encode())
        kind: Literal["place", "record", "resign"] = "place"
        if rest.startswith(_OWN.encode()):
            section, _, written = rest.removeprefix(_OWN.encode()).partition(b"/")
            if section == b"record":
                kind = "record"
            elif section == b"resign":
                kind = "resign"
            else:
                return None
        else:
            written, slash, _ = rest.partition(b"/")
            if not slash:
                return None
        name = unescaped(written)
        return None if name is None else Change(name, kind, key, event.get("type") == "DELETE", revision)


def escaped(name: str) -> str:
    """Return *name* without slashes: everything below ``a/`` contends for ``a``, so ``a`` and ``a/b`` would collide."""
    return name.replace("%", "%25").replace("/", "%2F")


def unescaped(written: bytes) -> str | None:
    """Return the name that :func:`escaped` has turned into what is *written* in a key; None if it is of no name."""
    try:
        text = written.decode()
    except UnicodeDecodeError:
        return None
    name = text.replace("%2F", "/").replace("%25", "%")
    return name if name and escaped(name) == text else None


def end_of(beginning: bytes) -> bytes:
    """Return the end of the range of all keys with this *beginning*."""
    kept = beginning.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(text: object) -> bytes:
    """Return the bytes in a field of the gateway's answer.

    Raises:
        Unreadable: It has no such form.
    """
    try:
        return base64.b64decode(a_text(text, most=_ENCODED_MAX), validate=True)
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"it is no base64: {error}") from None


def number(found: Mapping[str, object], name: str) -> int:
    """Return a number in the gateway's answer, which writes most as text, and leaves out 0.

    Raises:
        Unreadable: It is none.
    """
    value = found.get(name, 0)
    if isinstance(value, str):
        return -digits(value[1:]) if value.startswith("-") else digits(value, _UINT_MAX)
    return a_count(value, -_UINT_MAX, _UINT_MAX)


# --- values ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key, as etcd has it."""

    key: bytes
    value: bytes
    create_revision: int
    version: int
    lease: int

    @classmethod
    def of(cls, found: object) -> KeyValue:
        """Return what the gateway has answered.

        Raises:
            Unreadable: It has no such form.
        """
        found = an_object(found)
        counts = (number(found, name) for name in ("create_revision", "version", "lease"))
        return cls(decoded(found.get("key", "")), decoded(found.get("value", "")), *counts)


@dataclass(frozen=True, slots=True)
class Record:
    """What is noted about the newest term that tenure has won: a foreign client neither reads nor writes it."""

    token: int = 0
    holder: str = ""
    metadata: Metadata = field(default_factory=lambda: NO_METADATA)

    def written(self) -> bytes:
        found: Json = {"token": self.token, "holder": self.holder}
        if self.metadata:
            found["metadata"] = dict(self.metadata)
        return json.dumps(found).encode()

    @classmethod
    def read(cls, found: KeyValue | None) -> Record:
        if found is None:
            return cls()
        try:
            read = read_object(found.value)
            metadata = read_or(texts, read.get("metadata"), None)
            return cls(
                a_count(read.get("token"), most=TOKEN_MAX),
                a_text(read.get("holder"), most=NAME_MAX),
                FrozenDict(metadata) if metadata else NO_METADATA,
            )
        except Unreadable:  # not written by tenure
            return cls()


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a name: the key that was created first."""

    holder: str
    token: int
    lease: int
    metadata: Metadata
    is_ours: bool
    """Whether tenure has won this term, in any process: only then is a request to resign read."""
    key: bytes
    """The key that was created first."""

    @classmethod
    def of(cls, first: KeyValue, record: Record) -> Holder:
        """Return the holder whose key is *first*; a foreign one is known by its value, or by its key."""
        if record.token == first.create_revision:
            return cls(record.holder, record.token, first.lease, record.metadata, True, first.key)
        name = first.value or first.key.rpartition(b"/")[2]
        shown = name[: 4 * NAME_MAX].decode(errors="replace")[:NAME_MAX]
        return cls(shown, first.create_revision, first.lease, NO_METADATA, False, first.key)


@dataclass(frozen=True, slots=True)
class TxnAnswer:
    """The answer to a transaction: whether its conditions held, and the keys that each of its reads has found."""

    succeeded: bool
    revision: int
    term: int
    """The raft term of the member that answered, after it had executed the transaction."""
    found: Sequence[Sequence[KeyValue]]

    @classmethod
    def of(cls, answer: Json) -> TxnAnswer:
        """Return what the gateway has answered.

        Raises:
            Unavailable: It has no such form.
        """
        try:
            header = an_object(answer.get("header", {}))
            found = [_found_by(an_object(one)) for one in a_list(answer.get("responses", []))]
            return cls(answer.get("succeeded") is True, number(header, "revision"), number(header, "raft_term"), found)
        except Unreadable as error:
            raise no_answer(error) from error

    def first(self, place: int) -> KeyValue | None:
        """Return the first key that the operation in this *place* has found.

        Raises:
            Unavailable: The answer has no such operation.
        """
        if place >= len(self.found):
            raise no_answer(f"it has {len(self.found)} parts")
        return next(iter(self.found[place]), None)


def _found_by(operation: Json) -> Sequence[KeyValue]:
    reading = operation.get("response_range")
    return () if reading is None else [KeyValue.of(one) for one in a_list(an_object(reading).get("kvs", []))]


def no_answer(why: object) -> Unavailable:
    """Return the error for an answer that etcd's gateway can't have given."""
    return Unavailable(f"an answer can't be from etcd, as {why}; is a proxy between here and etcd?")


# --- conditions and operations --------------------------------------------------------------------------


def created_at(key: bytes, revision: int) -> Json:
    """Hold if *key* was created at *revision*; 0: if it doesn't exist."""
    return {"target": "CREATE", "result": "EQUAL", "key": encoded(key), "create_revision": str(revision)}


def none_created_before(beginning: bytes, revision: int) -> Json:
    """Hold if every key with this *beginning* was created at *revision* or later."""
    keys = KeyRange.beginning_with(beginning).written()
    return {"target": "CREATE", "result": "GREATER", "create_revision": str(revision - 1), **keys}


def has_version(key: bytes, version: int) -> Json:
    """Hold if *key* was put so many times since it was created; 0: if it doesn't exist."""
    return {"target": "VERSION", "result": "EQUAL", "key": encoded(key), "version": str(version)}


def put(key: bytes, value: bytes = b"", lease: int = 0) -> Json:
    body = {"key": encoded(key), "value": encoded(value)}
    return {"request_put": body | ({"lease": str(lease)} if lease else {})}


def delete(key: bytes) -> Json:
    return {"request_delete_range": {"key": encoded(key)}}


def get(key: bytes) -> Json:
    return {"request_range": {"key": encoded(key)}}


def first_of(beginning: bytes) -> Json:
    """Read the key with this *beginning* that was created first."""
    return _in_order_of_creation(beginning, "ASCEND")


def last_before(beginning: bytes, revision: int) -> Json:
    """Read the key with this *beginning* that was created last before *revision*."""
    found = _in_order_of_creation(beginning, "DESCEND")
    found["request_range"] |= {"max_create_revision": str(revision - 1), "keys_only": True}
    return found


def _in_order_of_creation(beginning: bytes, order: str) -> Json:
    keys = KeyRange.beginning_with(beginning).written()
    return {"request_range": {**keys, "sort_target": "CREATE", "sort_order": order, "limit": "1"}}


def txn(compare: Sequence[Json], success: Sequence[Json], failure: Sequence[Json] = ()) -> Json:
    return {"compare": list(compare), "success": list(success), "failure": list(failure)}


# --- the transactions of the verbs ----------------------------------------------------------------------


def enter(keys: Keys, name: str, lease: int, value: bytes, fence: int) -> Json:
    """Put the key of a candidate, unless it is there; otherwise read it (0) and the version of the fence (1)."""
    key = keys.place(name, lease)
    return txn(
        [created_at(key, 0), has_version(keys.fence(lease), fence)],
        [put(key, value, lease)],
        [get(key), get(keys.fence(lease))],
    )


def decide(keys: Keys, name: str, lease: int, record: Record) -> Json:
    """Note the term if the candidate's key was created first.

    Reads a request to resign (1); if another is first: its own key (0), the first (1), the one before it (2), and the
    record (3).
    """
    key, election = keys.place(name, lease), keys.election(name)
    return txn(
        [created_at(key, record.token), none_created_before(election, record.token)],
        [put(keys.record(name), record.written()), get(keys.resign(name))],
        [get(key), first_of(election), last_before(election, record.token), get(keys.record(name))],
    )


def check(keys: Keys, places: Sequence[tuple[bytes, int, str]]) -> Json:
    """Read the requests to resign if all these keys, with revisions and names, still exist; else read the keys."""
    return txn(
        [created_at(key, revision) for key, revision, _ in places],
        [*(get(keys.resign(name)) for _, _, name in places), delete(keys.never)],
        [get(key) for key, _, _ in places],
    )


def leave(keys: Keys, name: str, lease: int, revision: int) -> Json:
    """Delete a candidate's key that was created at *revision*."""
    key = keys.place(name, lease)
    return txn([created_at(key, revision)], [delete(key)])


def leave_for_good(keys: Keys, name: str, lease: int, fence: int) -> Json:
    """Delete a candidate's key, and raise the fence, so that no earlier ``enter`` puts it again; or read the fence."""
    key, fence_key = keys.place(name, lease), keys.fence(lease)
    return txn(
        [has_version(fence_key, fence)],
        [delete(key), put(fence_key, lease=lease)],
        [get(fence_key), delete(keys.never)],
    )


def look(keys: Keys, names: Sequence[str]) -> Json:
    """Read for each name the key that was created first (0), the record (1), and a request to resign (2).

    For display only: it may be stale.
    """
    about = ((first_of(keys.election(name)), get(keys.record(name)), get(keys.resign(name))) for name in names)
    return txn([], [reading for readings in about for reading in readings])


def ask_to_resign(keys: Keys, name: str, holder: Holder) -> Json:
    """Ask the term of *holder* to end; the request ends with the holder's etcd lease."""
    asked = put(keys.resign(name), str(holder.token).encode(), holder.lease)
    return txn([created_at(holder.key, holder.token)], [asked])


def is_asked(found: KeyValue | None, token: int) -> bool:
    """Return whether the request to resign that was *found* is for the term with this *token*."""
    return found is not None and found.value == str(token).encode()


# --- on a stream of watches ------------------------------------------------------------------------------


PROGRESS: Json = {"progress_request": {}}
"""Ask for a sign of life; it says no watch, and the present revision."""


def watch(keys: KeyRange, number: int, revision: int | None) -> Json:
    """Watch *keys* under a *number*, from *revision* on; None: from now on."""
    request: Json = {**keys.written(), "watch_id": str(number), "progress_notify": True}
    if revision is not None:
        request["start_revision"] = str(revision)
    return {"create_request": request}


def no_watch(number: int) -> Json:
    """Watch these keys no more."""
    return {"cancel_request": {"watch_id": str(number)}}

"""The keys in etcd, the requests to its JSON gateway, and what its answers mean. Pure functions: nothing is sent here.

House rules:

- The keys of an election are those of etcd's own package ``concurrency``: ``PREFIXNAME/LEASE``, where LEASE is the
  candidate's etcd lease in hexadecimal. Candidates stand in the order of their create revisions, which are the tokens.
- What that dialect has no room for is kept under ``PREFIX%tenure/``, where no name can lead: a ``%`` in a name is
  always followed by two digits.
- No answer is decided by a read. A transaction that can only read is answered by etcd as a read, which may be stale
  after a pause (etcd issue 20418). So each decision is a transaction that would write if its conditions held; where
  there is nothing to write, it deletes a key that never exists, which etcd's log orders and which changes nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Metadata

Json = dict[str, Any]

OPS_MAX = 128
"""The most conditions, and the most operations, that a transaction may have: etcd's default of ``--max-txn-ops``."""
CHECKED_MAX = OPS_MAX - 1
"""The most places that one transaction checks: it has an operation for each, and one that makes it a write."""
LOOKED_MAX = OPS_MAX // 3
"""The most names that one transaction looks at."""

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

    def ranges(self, name: str) -> tuple[bytes, ...]:
        """Return the beginnings of keys to watch for *name*: all keys here; without a prefix, only those of *name*."""
        if self.prefix:
            return (self.prefix.encode(),)
        return self.election(name), _OWN.encode()

    def change(self, event: Json) -> Change | None:
        """Return the change that *event* reports; None if it concerns no election."""
        key = decoded(event["kv"].get("key", ""))
        rest = key.removeprefix(self.prefix.encode()).decode(errors="replace")
        kind: Literal["place", "record", "resign"] = "place"
        if rest.startswith(_OWN):
            section, _, name = rest.removeprefix(_OWN).partition("/")
            if section == "record":
                kind = "record"
            elif section == "resign":
                kind = "resign"
            else:
                return None
        else:
            name, slash, _ = rest.partition("/")
            if not slash:
                return None
        is_delete = event.get("type") == "DELETE"
        return Change(unescaped(name), kind, key, is_delete, int(event["kv"].get("mod_revision", 0)))


def escaped(name: str) -> str:
    """Return *name* without slashes: everything below ``a/`` contends for ``a``, so ``a`` and ``a/b`` would collide."""
    return name.replace("%", "%25").replace("/", "%2F")


def unescaped(text: str) -> str:
    """Return the name that :func:`escaped` has turned into *text*."""
    return text.replace("%2F", "/").replace("%25", "%")


def end_of(beginning: bytes) -> bytes:
    """Return the end of the range of all keys with this *beginning*."""
    kept = beginning.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


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
    def of(cls, found: Json) -> KeyValue:
        return cls(
            decoded(found.get("key", "")),
            decoded(found.get("value", "")),
            int(found.get("create_revision", 0)),
            int(found.get("version", 0)),
            int(found.get("lease", 0)),
        )


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
            read = json.loads(found.value)
            metadata = {str(name): str(value) for name, value in read.get("metadata", {}).items()}
            return cls(int(read["token"]), str(read["holder"]), FrozenDict(metadata) if metadata else NO_METADATA)
        except (ValueError, KeyError, TypeError, AttributeError):  # not written by tenure
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
        return cls(name.decode(errors="replace"), first.create_revision, first.lease, NO_METADATA, False, first.key)


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
        header = answer.get("header", {})
        found = [
            [KeyValue.of(each) for each in one["response_range"].get("kvs", ())] if "response_range" in one else ()
            for one in answer.get("responses", ())
        ]
        succeeded = bool(answer.get("succeeded", False))
        return cls(succeeded, int(header.get("revision", 0)), int(header.get("raft_term", 0)), found)

    def first(self, number: int) -> KeyValue | None:
        """Return the first key that the operation with this *number* has found."""
        return next(iter(self.found[number]), None)


# --- conditions and operations --------------------------------------------------------------------------


def created_at(key: bytes, revision: int) -> Json:
    """Hold if *key* was created at *revision*; 0: if it doesn't exist."""
    return {"target": "CREATE", "result": "EQUAL", "key": encoded(key), "create_revision": str(revision)}


def none_created_before(beginning: bytes, revision: int) -> Json:
    """Hold if every key with this *beginning* was created at *revision* or later."""
    bounds = {"key": encoded(beginning), "range_end": encoded(end_of(beginning))}
    return {"target": "CREATE", "result": "GREATER", "create_revision": str(revision - 1), **bounds}


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
    bounds = {"key": encoded(beginning), "range_end": encoded(end_of(beginning))}
    return {"request_range": {**bounds, "sort_target": "CREATE", "sort_order": order, "limit": "1"}}


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


def watch(beginning: bytes, revision: int | None) -> Mapping[str, Json]:
    """Watch all keys with this *beginning*, from *revision* on; None: from now on."""
    request: Json = {"key": encoded(beginning), "range_end": encoded(end_of(beginning)), "progress_notify": True}
    if revision is not None:
        request["start_revision"] = str(revision)
    return {"create_request": request}

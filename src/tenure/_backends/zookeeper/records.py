"""What an election's node holds, beside its candidates: the newest token, its holder's metadata, a request to resign.

Clients in other languages never look at the data of that node. If it isn't ours, it is left alone. What is wrong in a
record of ours counts as not noted, and the next holder writes it anew: no token follows from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial

from tenure._election.store import NAME_MAX
from tenure._foreign import a_count, a_text, read_object, read_or, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, TOKEN_MAX, Metadata
from tenure.errors import ConfigError

METADATA_MAX = 65_536
"""Bytes that metadata may take as JSON. A request that is too large for ZooKeeper breaks the connection."""

_MARK = "tenure"
_LAYOUT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """The newest claim on a name by a candidate of tenure.

    Args:
        token: Its token.
        holder: Its holder.
        metadata: Its holder's metadata.
        resign: The token of the claim whose holder was asked to resign; 0 for none.
    """

    token: int = 0
    holder: str = ""
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)
    resign: int = 0

    def written(self) -> bytes:
        """Return it as the data of a node."""
        fields = {_MARK: _LAYOUT, "token": self.token, "holder": self.holder}
        if self.metadata:
            fields["metadata"] = dict(self.metadata)
        if self.resign:
            fields["resign"] = self.resign
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


NO_RECORD = Record()

REVOKED = b"__REVOKE__"
"""The data by which Curator asks the holder of an ``InterProcessMutex`` to give it up."""


def is_asked(record: Record, token: int, data: bytes = b"") -> bool:
    """Return whether the holder with this *token* was asked to step down, by the record or the *data* of its node."""
    return data == REVOKED or record.resign == token


def read_record(data: bytes, path: str) -> Record | None:
    """Return the record in *data*, an empty one for no data; None if somebody else's data is there.

    Raises:
        ConfigError: A newer tenure has written it.
    """
    if not data:
        return NO_RECORD
    found = read_or(read_object, data, {})
    layout = found.get(_MARK)
    if type(layout) is not int or layout < _LAYOUT:
        return None
    if layout != _LAYOUT:
        raise ConfigError(
            f"{path} was written in layout {layout}, and this tenure knows layout {_LAYOUT} only; update tenure in "
            "every process that uses it"
        )
    token = read_or(_a_token, found.get("token"), 0)
    holder = read_or(partial(a_text, most=NAME_MAX), found.get("holder"), "")
    if not (token and holder):
        return NO_RECORD
    metadata = read_or(texts, found.get("metadata"), {})
    return Record(token, holder, FrozenDict(metadata) or NO_METADATA, read_or(_a_token, found.get("resign"), 0))


def shown_record(data: bytes) -> Record:
    """Return the record in *data* as far as it is known, to be shown: nothing of one that isn't ours, or is newer."""
    try:
        return read_record(data, "") or NO_RECORD
    except ConfigError:
        return NO_RECORD


def is_record(data: bytes) -> bool:
    """Return whether a candidate of tenure has written *data*, also a newer one."""
    try:
        return bool(data) and read_record(data, "") is not None
    except ConfigError:
        return True


_a_token = partial(a_count, most=TOKEN_MAX)


def require_metadata(metadata: Metadata) -> None:
    """Refuse metadata that is too large for a node.

    Raises:
        ConfigError: It takes more bytes than a node may have.
    """
    size = len(json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))
    if size > METADATA_MAX:
        raise ConfigError(f"metadata must take at most {METADATA_MAX} bytes as JSON, and takes {size}")

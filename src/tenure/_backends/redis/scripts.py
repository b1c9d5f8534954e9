"""The Lua scripts of this folder, sent to the server by the hash of their text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib import resources
from typing import Any

from tenure._queue.broker import CLAIM_BYTES
from tenure._queue.message import EXPIRED, EXPIRED_DESCRIPTION, HISTORY_MAX, MAX_DELIVERIES, exhausted_description
from tenure._queue.notes import HISTORY_JSON_MAX

Argument = str | bytes | int
Answer = Any
"""A reply of Redis: bytes, numbers, None, and lists of them."""

LAYOUT = 1
"""The version of the layout of tenure's keys: as in the scripts."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, known to the server by the hash of its text: so old and new versions of tenure can run together."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


GROWING = frozenset({"send", "advance"})
"""Scripts that a server without memory refuses before their first write. All others work there: they free memory, or
keep leases and locks."""


SHARED_VALUES = {
    "claim_bytes": CLAIM_BYTES,
    "history_max": HISTORY_MAX,
    "history_size": HISTORY_JSON_MAX,
    "reason_exhausted": MAX_DELIVERIES,
    "reason_expired": EXPIRED,
    "exhausted_description": exhausted_description("%d"),
    "expired_description": EXPIRED_DESCRIPTION,
}
"""Values that the scripts share with other code; each replaces its name in braces."""

LEASES = ("leases",)
QUEUES = tuple(
    f"queue/{subject}"
    for subject in (
        "keys",
        "rows",
        "hints",
        "places",
        "due",
        "deaths",
        "limits",
        "claim",
        "send",
        "schedules",
        "settle",
        "sessions",
        "live",
        "dead_letters",
        "queues",
    )
)
"""Files of the folder ``lua``. A shared function uses only definitions above it or in earlier files."""


@cache
def scripts(files: tuple[str, ...], *, is_cluster: bool = False) -> dict[str, Script]:
    """Return the scripts of *files* by their names.

    A file begins with the part that its scripts share with all of *files*: statements, which are put before every
    script, and local functions and values, which are put before the scripts that use them. Below each ``-- name:`` is a
    script.

    In a cluster, a script publishes to the shard that it runs on, and not over the bus to every node.
    """
    heads, shared, named = list[str](), list[_Shared](), dict[str, str]()
    for file in files:
        text = resources.files(__package__).joinpath("lua", f"{file}.lua").read_text(encoding="utf-8")
        first, *blocks = re.split(r"^-- name: (\w+).*\n", text, flags=re.MULTILINE)
        named.update(zip(blocks[::2], map(_bare, blocks[1::2]), strict=True))
        head, *some = re.split(r"^(?=local )", _bare(first), flags=re.MULTILINE)
        heads.append(head)
        shared += (_Shared.of(one) for one in some)
    return {
        name: Script.of(_with_shard_commands(_flags(name) + "".join((*heads, *_used(shared, text), text)), is_cluster))
        for name, text in named.items()
    }


@dataclass(frozen=True, slots=True)
class _Shared:
    """A local function or values that several scripts share."""

    text: str
    names: frozenset[str]
    words: frozenset[str]

    @classmethod
    def of(cls, text: str) -> _Shared:
        named = re.match(r"local (?:function )?(\w+(?:, \w+)*)", text)
        assert named is not None
        return cls(text, frozenset(named[1].split(", ")), _words(text))


def _used(shared: Sequence[_Shared], text: str) -> Iterator[str]:
    """Return the definitions of *shared* that *text* uses, directly or through others, in order."""
    words, kept = set(_words(text)), list[str]()
    for one in reversed(shared):  # a definition uses only earlier ones
        if words & one.names:
            words |= one.words
            kept.append(one.text)
    return reversed(kept)


def _words(text: str) -> frozenset[str]:
    """Return the identifiers in *text*; quoted text is a key, a command or a message."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^'\n]*'", "", text)))


def _bare(text: str) -> str:
    """Return *text* without comments and empty lines, and with the shared values in place."""
    for name, value in SHARED_VALUES.items():
        text = text.replace(f"{{{name}}}", str(value))
    return re.sub(r"\n+", "\n", re.sub(r" *--.*$", "", text, flags=re.MULTILINE)).lstrip()


def _with_shard_commands(text: str, is_cluster: bool) -> str:
    return text.replace("'PUBLISH'", "'SPUBLISH'").replace("'NUMSUB'", "'SHARDNUMSUB'") if is_cluster else text


def _flags(name: str) -> str:
    # With this first line, Redis checks its memory before a script begins; without it, at some of its writes.
    return "#!lua\n" if name in GROWING else "#!lua flags=allow-oom\n"


NOTE, NOTE_GROWING = (
    Script.of(head + "redis.call('SADD', KEYS[1], unpack(ARGV))") for head in map(_flags, ("", "send"))
)
"""Add names to a list of names: always, and only if there is memory for more."""


@dataclass(frozen=True, slots=True)
class Call:
    """A script with the keys and arguments that it is to be run with."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]

"""The Lua scripts of this folder, sent to the server by the hash of their text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib import resources
from typing import Any

Argument = str | bytes | int
Answer = Any
"""What Redis returns: bytes, numbers, None, and lists of them."""

LAYOUT = 1
"""The version of the layout of our keys: as in the scripts."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, known to the server by the hash of its text: so old and new versions of us live side by side."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


GROWING = frozenset({"send"})
"""Scripts that a server without memory refuses before their first write. All others work there: they free memory, or
keep what is held."""


@cache
def scripts(file: str, *, is_cluster: bool = False) -> dict[str, Script]:
    """Return the scripts of *file*, a Lua file of this folder, by the name above each; "common" stands before all.

    In a cluster, what a script publishes goes to the shard that it runs on, and not over the bus to every node.
    """
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    if is_cluster:
        text = text.replace("'PUBLISH'", "'SPUBLISH'").replace("'NUMSUB'", "'SHARDNUMSUB'")
    blocks = re.split(r"^-- name: (\w+).*\n", text, flags=re.MULTILINE)
    named = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    common = named.pop("common", "")
    return {name: Script.of(_flags(name) + common + text) for name, text in named.items()}


def _flags(name: str) -> str:
    # With a first line of this kind, Redis decides before a script begins whether it may; else at some of its writes.
    return "#!lua\n" if name in GROWING else "#!lua flags=allow-oom\n"


NOTE, NOTE_GROWING = (
    Script.of(head + "redis.call('SADD', KEYS[1], unpack(ARGV))") for head in map(_flags, ("", "send"))
)
"""Add names to a list of them: always, and where there is memory for more."""


@dataclass(frozen=True, slots=True)
class Call:
    """A script with the keys and arguments that it is to be run with."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]

"""The names of nodes: of elections, and of the candidates in their queues as each dialect writes them.

ZooKeeper appends the sequence number to a candidate's node: a signed counter of 32 bits, written with at least ten
characters (``%010d``). After 2147483647 comes -2147483648, so numbers are compared modulo 2**32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote
from uuid import UUID

Dialect = Literal["latch", "lock", "kazoo"]

_NUMBER = r"(-\d{9,10}|\d{10})"
_ANY_SEQUENCE = re.compile(rf".*?{_NUMBER}", re.DOTALL | re.ASCII)
_WRITES: dict[str, str] = {"latch": "_c_{guid}-latch-", "lock": "_c_{guid}-lock-", "kazoo": "{hex}__lock__"}
# As the clients of the dialect find the number: Curator takes what follows the last "latch-" or "lock-". A name that
# begins with "lock-" is of DistributedLock for .NET, which counts no other names: it would lead beside those clients.
_READS = {
    dialect: re.compile(rf"{marker}{_NUMBER}", re.DOTALL | re.ASCII)
    for dialect, marker in (("latch", ".*latch-"), ("lock", ".+lock-"), ("kazoo", ".*__lock__"))
}
_CYCLE = 2**32


@dataclass(frozen=True, slots=True)
class Queue:
    """The candidates of an election, the first one first.

    Args:
        nodes: The names of their nodes.
        strangers: Nodes with a sequence number that clients of this dialect don't count: candidates of another one.
    """

    nodes: Sequence[str]
    strangers: Sequence[str]

    @property
    def first(self) -> str | None:
        """The node that holds the name."""
        return self.nodes[0] if self.nodes else None

    def before(self, node: str) -> str | None:
        """Return the node just before *node*, which is in the queue; None if it is the first."""
        place = self.nodes.index(node)
        return self.nodes[place - 1] if place else None


def node_prefix(dialect: Dialect, guid: UUID) -> str:
    """Return the name of a candidate's node, to which ZooKeeper appends the sequence number."""
    return _WRITES[dialect].format(guid=guid, hex=guid.hex)


def is_of(node: str, guid: UUID) -> bool:
    """Return whether *node* was made with this *guid*."""
    return node.startswith((f"_c_{guid}-", f"{guid.hex}__"))


def queue_of(children: Iterable[str], dialect: Dialect) -> Queue:
    """Sort the *children* of an election. Those without a sequence number are no candidates in any dialect."""
    numbers: dict[str, int] = {}
    strangers = []
    for child in children:
        found = _READS[dialect].fullmatch(child)
        sequence = found or _ANY_SEQUENCE.fullmatch(child)
        if sequence is None or not -_CYCLE // 2 <= int(sequence[1]) < _CYCLE // 2:  # no server gives such a number
            continue
        if found:
            numbers[child] = int(found[1])
        else:
            strangers.append(child)
    return Queue(_sorted(numbers), sorted(strangers))


def _sorted(numbers: dict[str, int]) -> list[str]:
    """Sort nodes so that all clients agree, whatever numbers others have put among them by hand.

    All that stand in a queue at one time have numbers close to each other. So the first one follows the widest gap.
    """
    nodes = sorted(numbers, key=lambda node: (numbers[node] % _CYCLE, node))
    gaps = [
        (numbers[node] - numbers[before]) % _CYCLE for before, node in zip([*nodes[-1:], *nodes], nodes, strict=False)
    ]
    first = gaps.index(max(gaps)) if len(nodes) > 1 else 0
    return nodes[first:] + nodes[:first]


def dialect_of(node: str) -> str:
    """Return a text that says which client may have made *node*."""
    for dialect, pattern in _READS.items():
        if pattern.fullmatch(node):
            return f"the dialect {dialect}"
    return "no dialect that tenure knows"


# --- elections ---

_ESCAPED = re.compile("[%/\u0001-\u001f\u007f-\u009f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
"""What a node's name can't hold; ZooKeeper counts in UTF-16, so nothing outside of the Basic Multilingual Plane."""


def escaped(name: str) -> str:
    """Return the name of an election's node; no two names give the same."""
    if name in (".", ".."):
        return name.replace(".", "%2E")
    if name == "zookeeper":  # ZooKeeper's own, if the elections stand at the root
        return "%7Aookeeper"
    return _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


def unescaped(node: str) -> str | None:
    """Return the name of the election that has this *node*; None if no name gives it."""
    name = unquote(node, errors="replace")
    return name if escaped(name) == node else None

"""The computation: counts one file, and merges the counts of many into a total. No election is involved."""

from __future__ import annotations

import ast
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenure._demo.job import Chunk

BLOCK = 1 << 20  # bytes read at a time
SYNTAX_MAX = 1 << 17
"""Bytes of the largest file that is parsed: the parser holds the interpreter's lock, and renewals must run in between,
also on a busy machine."""

NESTED_MAX = 1_000
"""More opening brackets in a row than any of Python's parsers accepts."""


class TooDeep(Exception):
    """A source nests too deep to be parsed: its chunk can't be computed, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Count:
    """The counts of one file; ``error`` says why it could not be read, and then the rest is empty."""

    path: str
    size: int = 0
    lines: int = 0
    words: int = 0
    nodes: int = 0
    digest: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Total:
    """The counts of all files; ``digest`` covers every path and every content."""

    files: int
    unreadable: int
    size: int
    lines: int
    words: int
    nodes: int
    digest: str


def count_chunk(folder: str, chunk: Chunk, *, pace: float = 0.0) -> list[Count]:
    """Count the files of *chunk*, each in *pace* seconds at least; all of them, or none.

    Raises:
        TooDeep: One of them can't be parsed. The chunk is omitted from the total.
    """
    counts = []
    for file in chunk.files:
        began = time.monotonic()
        time.sleep(pace / 2)  # so that even a chunk that fails at once takes some time
        counts.append(count_file(folder, file.path, parsed=file.parsed))
        time.sleep(max(0.0, began + pace - time.monotonic()))
    return counts


def count_file(folder: str, path: str, *, parsed: bool) -> Count:
    """Read the file *path* of *folder* and count what is in it; if *parsed*, also the nodes of its syntax tree.

    Raises:
        TooDeep: It can't be parsed, because it nests too deep.
    """
    digest, lines, words, size = hashlib.sha256(), 0, 0, 0
    source = bytearray()
    between_words = True
    try:
        with open(os.path.join(folder, path), "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
                lines += block.count(b"\n")
                # A word that spans two blocks is one word.
                words += len(block.split()) - (not between_words and not block[:1].isspace())
                between_words = block[-1:].isspace()
                if parsed and size <= SYNTAX_MAX:
                    source += block
    except OSError as error:
        return Count(path, error=error.strerror or str(error))
    nodes = _nodes(path, bytes(source)) if parsed and size <= SYNTAX_MAX else 0
    return Count(path, size, lines, words, nodes, digest.hexdigest())


def _nodes(path: str, source: bytes) -> int:
    try:
        return sum(1 for _ in ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if b"(" * NESTED_MAX in source:
            raise TooDeep(f"{path} nests brackets more than {NESTED_MAX:,} deep") from error
        return 0  # not valid for this Python: the tests of Python itself have many such files


def merge(counts: Iterable[Count]) -> Total:
    """Merge the counts of many files; their order does not matter."""
    ordered = sorted(counts, key=lambda count: os.fsencode(count.path))
    digest = hashlib.sha256()
    for count in ordered:
        digest.update(os.fsencode(count.path) + b"\0" + count.digest.encode() + b"\n")
    return Total(
        files=len(ordered),
        unreadable=sum(1 for count in ordered if count.error),
        size=sum(count.size for count in ordered),
        lines=sum(count.lines for count in ordered),
        words=sum(count.words for count in ordered),
        nodes=sum(count.nodes for count in ordered),
        digest=digest.hexdigest(),
    )


def differences(some: Sequence[Count], others: Sequence[Count]) -> list[str]:
    """Return the files whose counts differ, sorted."""
    first = {count.path: count for count in some}
    second = {count.path: count for count in others}
    return sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))

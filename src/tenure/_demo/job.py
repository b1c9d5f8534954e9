"""The job: the files to count, in chunks, which of them are parsed, and the pace."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tenure.errors import ConfigError

PARSED_MAX = 8_000_000
"""Bytes of Python that are parsed: some seconds of work, so that a run is neither too short nor too long."""

CHUNKS = 120
"""The approximate number of chunks of a large job: enough for all to compete, few enough to display."""

FILES_MAX = 100
TEXT_MAX = 7_000  # characters of paths
"""The limits of a chunk, so that its message and its result fit into every store (the smallest limit is 45 kB)."""

PACE_MAX = 1.0
"""The longest time for one file, in seconds."""

_PARSED = 2_500_000.0  # bytes a second, roughly, of sources that are parsed
_READ = 150_000_000.0  # bytes a second of everything else
_OPENED = 5_000.0  # files a second

_PACKAGES = ("site-packages", "dist-packages")  # beside the standard library's sources, and not part of them


@dataclass(frozen=True, slots=True)
class File:
    """A file to count: its path in the folder, and whether its syntax tree is counted as well."""

    path: str
    parsed: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Files that are counted together, by one worker at a time: the content of a message. Numbers start at 1."""

    number: int
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Files to count.

    ``pace`` is the least time for a file, in seconds: 0.0, unless there is so little work that it would end at once.
    """

    folder: str
    chunks: tuple[Chunk, ...]
    pace: float

    @property
    def files(self) -> tuple[File, ...]:
        """All of them, in order."""
        return tuple(file for chunk in self.chunks for file in chunk.files)


def survey(folder: Path | None, *, at_least: float) -> Job:
    """List the files of *folder* (None: the Python sources of this installation).

    Little work is spread, so that it would keep one process busy for *at_least* seconds.

    Raises:
        ConfigError: There is no such folder, it can't be listed, or no file is in it.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder.absolute()
    paths = _paths(root) if folder else [path for path in _paths(root, but=_PACKAGES) if path.endswith(".py")]
    if not paths:
        raise ConfigError(f"{root} holds no files to count; name another folder with --input")
    sizes = {path: _size(root / path) for path in paths}
    python = {path: size for path, size in sizes.items() if path.endswith(".py")}
    every = math.ceil(sum(python.values()) / PARSED_MAX) or 1
    parsed = set(list(python)[::every])
    expected = {path: _expected(size, parsed=path in parsed) for path, size in sizes.items()}
    pace = min(PACE_MAX, max(0.0, at_least - sum(expected.values())) / len(paths))
    return Job(str(root), _cut([File(path, path in parsed) for path in paths], expected), pace)


def with_poison_file(job: Job, path: Path) -> tuple[Job, Chunk]:
    """Write a file to *path* that makes the computation fail; return *job* with it, and the chunk that it is in."""
    path.write_text("# No parser accepts this file: tenure demo adds it, to show a message that always fails.\n")
    with path.open("a") as file:
        file.write("(" * 10_000)
    before = len(job.chunks) // 4  # early, so that the run does not end by waiting for its retries
    files = [chunk.files for chunk in job.chunks]
    files.insert(before, (File(str(path), parsed=True),))
    chunks = tuple(Chunk(number, group) for number, group in enumerate(files, 1))
    return replace(job, chunks=chunks), chunks[before]


def _expected(size: int, *, parsed: bool) -> float:
    return 1 / _OPENED + size / _READ + (size / _PARSED if parsed else 0.0)


def _cut(files: list[File], expected: Mapping[str, float]) -> tuple[Chunk, ...]:
    """Cut *files* into chunks that take about the same time each."""
    enough = sum(expected.values()) / CHUNKS
    chunks: list[Chunk] = []
    group: list[File] = []
    for file in files:
        too_much = len(group) == FILES_MAX or sum(len(one.path) for one in [*group, file]) > TEXT_MAX
        if group and (too_much or sum(expected[one.path] for one in group) >= enough):
            chunks.append(Chunk(len(chunks) + 1, tuple(group)))
            group = []
        group.append(file)
    return (*chunks, Chunk(len(chunks) + 1, tuple(group)))


def _paths(root: Path, *, but: Collection[str] = ()) -> list[str]:
    """List every file under *root*, relative to it and sorted; whether it can be read shows when it is read."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder; name one with --input")
    found: list[str] = []

    def fail(error: OSError) -> None:
        if error.filename == str(root):
            raise ConfigError(f"{root} can't be listed: {error.strerror}; name another folder with --input") from error
        found.append(os.path.relpath(error.filename, root))

    for place, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in but]
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path) or not os.path.exists(path):  # not a pipe, whose read could block for ever
                found.append(os.path.relpath(path, root))
    return sorted(found, key=os.fsencode)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

"""The job: which files are to be counted, which of them parsed, and how fast at most."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tenure.errors import ConfigError

PARSED_MAX = 16_000_000
"""Bytes of Python that are parsed: some seconds of work, so that a run is neither over at once nor tedious."""

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
class Job:
    """Files to count.

    ``pace`` is how many seconds a file takes at least: 0.0, unless there is so little to do that nothing could be seen.
    """

    folder: str
    files: tuple[File, ...]
    pace: float


def survey(folder: Path | None, *, at_least: float) -> Job:
    """List the files of *folder* (None: the Python sources of this installation), for a run of *at_least* seconds.

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
    expected = sum(python[path] for path in parsed) / _PARSED + sum(sizes.values()) / _READ + len(paths) / _OPENED
    pace = max(0.0, at_least - expected) / len(paths)
    return Job(str(root), tuple(File(path, path in parsed) for path in paths), pace)


def _paths(root: Path, *, but: Collection[str] = ()) -> list[str]:
    """List every file under *root*, relative to it and sorted; whether it can be read is found out by reading."""
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
            if os.path.isfile(path) or not os.path.exists(path):  # not a pipe, which nobody may ever write to
                found.append(os.path.relpath(path, root))
    return sorted(found, key=os.fsencode)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

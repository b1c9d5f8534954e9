"""Small disks, to be filled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.absent import skip_or_fail


@contextmanager
def small_disk(place: Path, size: str = "2m") -> Iterator[Path]:
    """Make the folder *place* a disk of its own inside the block; skip the test where nothing can be mounted."""
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={size}", "tenure", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        place.rmdir()
        skip_or_fail("no file system can be mounted here; that takes root")
    try:
        yield place
    finally:
        # Lazily: a server may still have deleted files open there.
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def fill(disk: Path) -> Path:
    """Fill *disk* with another file; return that file, to be deleted."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4_096)):
            pass
    assert os.statvfs(disk).f_bfree == 0
    return ballast

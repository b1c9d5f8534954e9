"""A process whose user has no entry in passwd, or no home that it can read: told at once, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers import free_port
from tests.servers.process import release

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can run as another user"),
]

NOBODY = 54_321
"""A number that no user has."""

ASK = """
import asyncio, os
import tenure
from tenure.errors import TenureError

async def said(url):
    try:
        async with tenure.connect(url) as backend:
            await backend.leaders()
    except TenureError as error:
        return f"{{type(error).__name__}} {{error}}"

asyncio.run(said({url!r}))  # imports what this user may not read, when Python is in root's home
os.setgid({nobody})
os.setuid({nobody})
print(asyncio.run(said({url!r})))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a home that only root can enter, with a certificate in it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        home = Path(folder, "home")
        (home / ".postgresql").mkdir(parents=True)
        (home / ".postgresql" / "root.crt").touch()
        home.chmod(0o700)
        yield home


def said(url: str, **env: str) -> str:
    """Return what a process of a user without an entry says of a database where nobody listens."""
    port = free_port()
    try:
        code = ASK.format(nobody=NOBODY, url=url.format(at=f"127.0.0.1:{port}"))
        kept = {name: text for name, text in os.environ.items() if name not in ("HOME", "LOGNAME", "USER", "LNAME")}
        ended = subprocess.run(
            [sys.executable, "-c", code], env={**kept, **env}, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        with suppress(OSError):
            release(port)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_user_without_a_name_is_told_to_write_one() -> None:
    told = said("postgresql://{at}/orders?sslmode=disable")
    assert told.startswith("ConfigError postgresql://127.0.0.1:")
    assert f"this process runs as user {NOBODY}, who has no entry in passwd; name the user of the database in" in told


@pytest.mark.parametrize("url", ["postgresql://ann@{at}/orders", "postgresql://{at}/orders?user=ann"])
def test_a_url_with_a_user_needs_no_entry(url: str) -> None:
    told = said(url)
    assert told.startswith("Unavailable")
    assert "Connection refused" in told


def test_a_variable_names_the_user_too() -> None:
    assert said("postgresql://{at}/orders", PGUSER="ann").startswith("Unavailable")


@pytest.mark.parametrize("mode", ["", "?sslmode=prefer", "?sslmode=require", "?sslmode=verify-full"])
def test_a_home_that_can_not_be_read_is_told(home: Path, mode: str) -> None:
    told = said(f"postgresql://ann@{{at}}/orders{mode}", HOME=str(home))
    assert told.startswith("ConfigError")
    assert f" {home}/.postgresql/" in told
    assert "can't be read: Permission denied; let this process read it, set HOME to a folder of its own user" in told


def test_a_home_is_not_needed_without_tls(home: Path) -> None:
    assert said("postgresql://ann@{at}/orders?sslmode=disable", HOME=str(home)).startswith("Unavailable")

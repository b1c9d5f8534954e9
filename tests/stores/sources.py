"""The ways in which a caller gives a password that is not in the URL."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import tenure


class Given(NamedTuple):
    """How it is given."""

    option: str
    """What is added to the URL, if anything."""
    ask: tenure.AskCredentials | None = None
    login: str = "ann@"
    """What is before the hosts of the URL."""


Way = Callable[[Path, str, str], Given]
"""Gives a user and a password; a folder is there for files."""


def a_function(_: Path, user: str, password: str) -> Given:
    """Give only the password; the user is in the URL."""
    return Given("", lambda: password, f"{user}@")


def an_async_function(_: Path, user: str, password: str) -> Given:
    """Give both, for a minute."""

    async def ask() -> tenure.Credentials:
        await asyncio.sleep(0)
        return tenure.Credentials(password, user=user, lasts=60.0)

    return Given("", ask, "")


def a_file(folder: Path, user: str, password: str) -> Given:
    """Write it into the file ``password`` in the folder."""
    file = folder / "password"
    file.write_text(f"{password}\n")
    file.chmod(0o600)
    return Given(f"password_file={file}", login=f"{user}@")


def a_command(_: Path, user: str, password: str) -> Given:
    """Print it."""
    command = shlex.join([sys.executable, "-S", "-c", "import sys; print(sys.argv[1])", password])
    return Given(f"password_command={quote(command, safe='')}", login=f"{user}@")


WAYS: list[Way] = [a_function, an_async_function, a_file, a_command]


class Answers:
    """A function that gives one password after the other, and then always the last one."""

    def __init__(self, *passwords: str) -> None:
        self.next = list(passwords)
        self.given: list[str] = []

    def __call__(self) -> str:
        self.given.append(self.next.pop(0) if len(self.next) > 1 else self.next[0])
        return self.given[-1]

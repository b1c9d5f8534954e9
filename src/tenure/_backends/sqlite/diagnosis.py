"""The facts that ``describe()`` and ``tenure doctor`` show of an SQLite file."""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
from contextlib import suppress
from datetime import UTC, datetime

from tenure._backends.sqlite.client import Database
from tenure._backends.sqlite.clock_setting import ClockState, clock_state
from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.operations import QUEUES
from tenure._backends.sqlite.schema import versions
from tenure._checks import LONGEST
from tenure._opened import Fact
from tenure._option_files import other_owner

CLOCK_AHEAD = 60.0
"""Seconds by which the clock of the queues may be ahead without a warning: a wall clock that is set is set by less."""

LIBRARY_SOUND = (3, 51, 3)  # fixes the reset of the write-ahead log, broken since 3.7.0


def diagnose(database: Database, clock: FileClock) -> list[Fact]:
    """Return facts about the file and the library.

    Raises:
        DiskFullError: There is no room to send anything.
    """
    database.require_room()
    journal = database.read(lambda connection: connection.execute("PRAGMA journal_mode").fetchone()[0])
    known = database.read(versions)
    sound = ".".join(map(str, LIBRARY_SOUND))
    return [
        Fact("file", database.path),
        Fact(
            "SQLite",
            sqlite3.sqlite_version,
            ""
            if sqlite3.sqlite_version_info >= LIBRARY_SOUND
            else f"before {sound}, a rare race at the reset of the log can damage a file; use {sound} or newer",
            "sqlite-version",
        ),
        Fact("journal mode", journal),
        Fact(
            "synchronous",
            database.options.synchronous,
            "" if database.options.synchronous == "full" else "a power failure can lose the newest changes, tokens too",
            "sqlite-synchronous",
        ),
        *_clock(database, clock),
        *_modes(database.path),
        *(Fact(f"tables of {part}", f"version {version}, by {by}") for part, (version, by) in known.items()),
    ]


def file_clock_state(database: Database, clock: FileClock) -> ClockState:
    """Return how far the clock of the queues is ahead of this machine's; it isn't where there are none."""
    if QUEUES.name not in database.read(versions):
        return ClockState(0.0)
    return database.read(lambda connection: clock_state(connection, clock.wall(), clock.read(connection)))


def _clock(database: Database, clock: FileClock) -> list[Fact]:
    """Return how far the clock of the queues is ahead of this machine's, if that matters."""
    if QUEUES.name not in database.read(versions):
        return []
    state = file_clock_state(database, clock)
    if state.ahead < CLOCK_AHEAD:
        return [Fact("file clock", "that of this machine" if not state.ahead else f"{state.ahead:.1f} s ahead")]
    advice = (
        f"it is {spoken(state.ahead)} ahead of this machine's, which a process has seen wrong: what is sent with at= "
        "comes that much too early, older delays and expiries have ended, and schedules are ahead; if this machine's "
        f"clock is right now, run: tenure migrate {shlex.quote(f'sqlite:///{database.path}')} --set-clock --yes"
    )
    return [Fact("file clock", spoken_state(state), advice, "sqlite-clock-ahead")]


def spoken_state(state: ClockState) -> str:
    """Return how far a clock is ahead, since when, and what was noted by it, in words."""
    noted = (
        f"{state.messages:,} messages, {state.dead:,} dead letters and {state.ids:,} remembered ids are of that time"
    )
    if state.since is None:
        return f"{spoken(state.ahead)} ahead; nothing is of that time"
    since = datetime.fromtimestamp(min(max(state.since, 0.0), LONGEST), UTC).isoformat(" ", "seconds")
    return f"{spoken(state.ahead)} ahead, since {since} or before; {noted}"


def spoken(seconds: float) -> str:
    """Return a span of time in the largest unit of which it has two, or one of years."""
    for unit, size in (("years", 365.25 * 86_400), ("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


def _modes(path: str) -> list[Fact]:
    """Return the modes of the file and of its folder, and what other users can do with them; nothing on Windows."""
    if not hasattr(os, "geteuid"):
        return []
    folder = os.path.dirname(path)
    is_reached, about, around = _is_reached(folder), os.stat(path), os.stat(folder)
    access, owner = _access_of_others(path) if is_reached else "", _unshared_owner(about)
    advice = ""
    if access:
        advice = f"every user of this machine can {access}; run: chmod o= {_files_of(path)}"
    elif owner is not None:
        command = f"chown {os.geteuid()} {_files_of(path)}"
        advice = f"it belongs to user {owner}, who can change everything in it; unless that is meant, run: {command}"
    facts = [Fact("file mode", _shown(about), advice, "sqlite-file-mode")]
    of_folder = _unshared_owner(around)
    if (open_to_all := _replaceable(folder)) is not None:
        command = f"chmod o-w {shlex.quote(open_to_all)}"
        advice = f"every user of this machine can remove or replace the file; run: {command}"
        facts.append(Fact("folder mode", _shown(os.stat(open_to_all)), advice, "sqlite-folder-mode"))
    elif of_folder is not None and of_folder != owner:
        command = f"chown {os.geteuid()} {shlex.quote(folder)}"
        advice = (
            f"it belongs to user {of_folder}, who can remove or replace the file; unless that is meant, run: {command}"
        )
        facts.append(Fact("folder mode", _shown(around), advice, "sqlite-folder-mode"))
    return facts


def _unshared_owner(about: os.stat_result) -> int | None:
    """Return the user that owns a file or folder, if it is another and no group shares it: a group is meant to."""
    return None if about.st_mode & stat.S_IWGRP else other_owner(about)


def _shown(about: os.stat_result) -> str:
    owner = other_owner(about)
    return stat.filemode(about.st_mode) + ("" if owner is None else f", of user {owner}")


def _access_of_others(path: str) -> str:
    """Return what users can do that neither own the file nor are in its group, in words; empty if nothing."""
    mode = 0
    for each in (path, f"{path}-wal", f"{path}-shm"):  # these two keep an older mode if that of the file is changed
        with suppress(FileNotFoundError):
            mode |= os.stat(each).st_mode
    if mode & stat.S_IWOTH:
        return "change everything in it"
    return "read all bodies in it" if mode & stat.S_IROTH else ""


def _is_reached(folder: str) -> bool:
    """Whether users that own nothing here can enter *folder*, and every folder around it."""
    while os.stat(folder).st_mode & stat.S_IXOTH:
        around = os.path.dirname(folder)
        if around == folder:
            return True
        folder = around
    return False


def _replaceable(folder: str) -> str | None:
    """Return the folder, *folder* or one around it, in which users that own nothing can replace what leads to the file.

    They must be able to reach that one only: what they put in place of the next folder is their own.
    """
    while True:
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and _is_reached(folder):
            return folder
        around = os.path.dirname(folder)
        if around == folder:
            return None
        folder = around


def _files_of(path: object) -> str:
    """Return the files of a database that are there, as a shell reads them."""
    files = [f"{path}{end}" for end in ("", "-wal", "-shm") if os.path.exists(f"{path}{end}")]
    return " ".join(map(shlex.quote, files))

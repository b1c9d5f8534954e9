"""Files that the options of a URL name: read within bounds, and who else can use those that hold a secret.

House rules:

- A path leads to anything: a pipe never answers, a device has no end. Only a regular file of at most ``SIZE_MAX`` bytes
  is read.
- No message has a word of what is in a file.
- A mode is judged through the descriptor from which the file is read: the file may be exchanged meanwhile.
- Only what its reader can mend is refused. Orchestrators mount secrets that every user can read, and that nobody in the
  container can change.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from tenure._opened import Fact
from tenure._secret import path_shown
from tenure.errors import ConfigError

SIZE_MAX = 4 * 2**20
"""Bytes that a file may have: some times as many as all certificates that a system trusts."""

UNMAPPED = 65_534
"""The owner that Linux shows in a rootless container for users without a number there: for root of the machine, too."""

_SECRETS = frozenset({"key", "sslkey", "tls_key", "creds", "nkey", "password_file"})
_PRIVATE_KEY = b"PRIVATE KEY-----"
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file at *path*; also if that can't be found out, as what reads it says so."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        pass
    return True


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of the regular file at *path*.

    Raises:
        OSError: It can't be read, is no regular file, or has more than ``SIZE_MAX`` bytes; ``strerror`` says which.
    """
    with _opened(path) as file:
        return _content(file)


def read_own_secret(option: str, path: str) -> tuple[bytes, tuple[Fact, ...]]:
    """Return the content of the file with a secret that *option* names, and a warning if others can read or replace it.

    Raises:
        OSError: As :func:`read_file`.
        ConfigError: Other users can read or write it, and this user can mend that.
    """
    with _opened(path) as file:
        content = _content(file)
        warnings = _warnings(option, path, file)
        about = os.fstat(file)
        if warnings and about.st_uid == os.geteuid() and not _is_on_read_only_mount(file):
            raise ConfigError(
                f"every user of this machine can {_access_of_others(about)} {option}={path} (mode {_mode(about)}), and "
                f"it holds a secret; run: chmod 600 {shlex.quote(path)}"
            )
        return content, warnings


def warnings_about(option: str, path: str | os.PathLike[str]) -> tuple[Fact, ...]:
    """Return a warning if other users can read, write or own the file with a secret that *option* names."""
    try:
        with _opened(path) as file:
            return _warnings(option, os.fspath(path), file)
    except OSError:  # what reads it reports that
        return ()


def require_readable(address: object, **files: str | None) -> tuple[Fact, ...]:
    """Refuse an option that names a file that can't be read: a driver would only report that it can't connect.

    Args:
        address: The store, for the message.
        files: The path in each option; None if it is not given.

    Returns:
        A warning for each file that holds a secret, and that other users can read or write, or that belongs to another.

    Raises:
        ConfigError: A file can't be read; the message has the option and the path.
    """
    warnings: tuple[Fact, ...] = ()
    for option, path in files.items():
        if path is None:
            continue
        try:
            with _opened(path) as file:
                content = _content(file)
                if option in _SECRETS or _PRIVATE_KEY in content:  # a certificate's file may hold its key, too
                    warnings += _warnings(option, path, file)
        except OSError as error:
            raise ConfigError(
                f"{option}={path_shown(path)} of {address} can't be read: {error.strerror}; name the file as this "
                "process finds it"
            ) from None  # the cause quotes the path, which may be the secret itself
    return warnings


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | _AT_ONCE | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can have this path") from error
    try:
        about = os.fstat(file)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and must be a regular file")
        yield file
    finally:
        os.close(file)


def _content(file: int) -> bytes:
    content = b""
    while len(content) <= SIZE_MAX:
        chunk = os.read(file, 2**16)
        if not chunk:
            return content
        content += chunk
    raise OSError(errno.EFBIG, f"it has more than {SIZE_MAX:,} bytes")


# --- who else can read it ----------------------------------------------------------------------------------------


def _access_of_others(about: os.stat_result) -> str:
    """Return what users can do with the file that neither own it nor are in its group; empty if nothing."""
    if not hasattr(os, "geteuid"):  # Windows: its modes say nothing of other users
        return ""
    return {0o4: "read", 0o2: "write", 0o6: "read and write"}.get(about.st_mode & 0o6, "")


def other_owner(about: os.stat_result) -> int | None:
    """Return the id of the user that owns a file, and so can change it, unless that is this process's user or root."""
    if not hasattr(os, "geteuid") or about.st_uid in (0, os.geteuid(), UNMAPPED):
        return None
    return about.st_uid


def _is_on_read_only_mount(file: int) -> bool:
    return bool(os.fstatvfs(file).f_flag & os.ST_RDONLY)


def _mode(about: os.stat_result) -> str:
    return f"{stat.S_IMODE(about.st_mode):04o}"


def _warnings(option: str, path: str, file: int) -> tuple[Fact, ...]:
    about, parts = os.fstat(file), list[str]()
    value = f"{path}, mode {_mode(about)}"
    if (owner := other_owner(about)) is not None:
        value += f", of user {owner}"
        parts.append(
            f"this secret belongs to user {owner}, who can replace it; unless that is meant, run, as root: "
            f"chown {os.geteuid()} {shlex.quote(path)}"
        )
    if access := _access_of_others(about):
        remedy = (
            "mount it with mode 0440 (Kubernetes: defaultMode, with fsGroup)"
            if _is_on_read_only_mount(file)
            else f"run, as its owner: chmod o= {shlex.quote(path)}"
        )
        parts.append(f"every user of this machine can {access} this secret; {remedy}")
    return (Fact(option, value, "; ".join(parts), "secret-file-mode"),) if parts else ()

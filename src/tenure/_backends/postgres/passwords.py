"""The login that the driver finds by itself, as libpq does: passwords, the user, and what is in the user's home."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from tenure._backends.postgres.address import Options
from tenure._backends.postgres.encryption import service_of
from tenure._connect_failures import user_unknown
from tenure._option_files import exists, read_file, require_readable
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError

_COLON = re.compile(r"(?<!\\):")
LINE_MAX = 4_096
"""Characters of a line of a password file: a longer one is of some other file."""
LINES_MAX = 200
"""Lines whose passwords are looked for."""


def passwords_of(url: Url, options: Options, env: Mapping[str, str] = MappingProxyType(os.environ)) -> list[Secret]:
    """Return the passwords in *url*, in the environment, of the service, and in the password file, if there are any."""
    found = [one for one in (url.password, options.password) if one]
    service: Mapping[str, str] = {}
    if options.service:
        with suppress(ConfigError):
            service = service_of(url, options.service, env)
    found += [Secret(text) for text in (env.get("PGPASSWORD"), service.get("password")) if text]
    named = options.passfile or env.get("PGPASSFILE") or service.get("passfile")
    return [*found, *islice(_in_file(named or _usual_file(env)), LINES_MAX)]


def require_user(url: Url, options: Options, env: Mapping[str, str] = MappingProxyType(os.environ)) -> None:
    """Refuse a URL without a user for whom the driver would fail with an error of Python, and a password file for it.

    Raises:
        ConfigError: No user is named, and this process's has no name; or the password file can't be read.
    """
    if options.passfile is not None and exists(options.passfile):  # a missing one is ignored, as by libpq
        require_readable(url, passfile=options.passfile)
    service = service_of(url, options.service, env) if options.service else {}
    if url.user or options.user or service.get("user") or env.get("PGUSER"):
        return
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError) as error:
        raise user_unknown(url, "name the user of the database in the URL, or in PGUSER") from error


def unreadable_in_home() -> str | None:
    """Return the file that the driver looks for by itself, and can't read; None if there is none."""
    for name in ("root.crt", "root.crl", "postgresql.crt", "postgresql.key"):
        path = os.path.expanduser(f"~/.postgresql/{name}")
        try:
            read_file(path)
        except PermissionError:
            return path
        except OSError:
            continue
    return None


def _usual_file(env: Mapping[str, str]) -> str:
    if sys.platform == "win32":
        return str(Path(env.get("APPDATA", ""), "postgresql", "pgpass.conf"))
    return os.path.expanduser("~/.pgpass")


def _in_file(path: str) -> Iterator[Secret]:
    """Yield the passwords in a file with lines of the form ``host:port:database:user:password``."""
    with suppress(OSError):
        for line in read_file(path).decode(errors="replace").splitlines():
            if len(line) > LINE_MAX or line.startswith("#"):
                continue
            fields = _COLON.split(line.strip().replace(r"\\", "\n"), maxsplit=4)  # as the driver splits it
            if len(fields) == 5 and fields[4]:
                yield Secret(fields[4].replace(r"\:", ":").replace("\n", "\\"))

"""Logins that are in files: read anew for each connection, as they may be exchanged, and checked before they are used.

nats-py fails with errors of Python on a file that is no login, and reads without end in one that has no JWT.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from nats.aio.client import RawCredentials

from tenure._backends.nats.address import Options
from tenure._option_files import read_file
from tenure._secret import Secret, path_shown

_JWT, _SEED = "BEGIN NATS USER JWT", "BEGIN USER NKEY SEED"


class BadLoginFile(Exception):
    """A file holds no login, or can't be read; *args* says which, and what was expected."""


def login_of(options: Options) -> tuple[dict[str, Any], list[Secret]]:
    """Return the driver's arguments for a login by ``creds`` or ``nkey``, none if neither is given; and what is secret.

    Raises:
        BadLoginFile: The file can't be read, or holds something else.
    """
    if options.creds is not None:
        lines = [line.strip() for line in _read(options.creds, "creds").splitlines()]
        secrets = list[Secret]()
        for mark in (_JWT, _SEED):
            after = next((next_ for line, next_ in pairwise(lines) if mark in line), "")
            if not after or after.startswith("-"):
                raise BadLoginFile(
                    f"creds={options.creds} has no line after -----{mark}-----; give the file that nsc generate creds "
                    "wrote, which has a JWT and a seed"
                )
            secrets.append(Secret(after))
            if mark == _SEED:
                _check_seed(after, f"creds={options.creds}")
        return {"user_credentials": RawCredentials("\n".join([*lines, ""]))}, secrets
    if options.nkey is not None:
        seed = _read(options.nkey, "nkey").strip()
        _check_seed(seed, f"nkey={options.nkey}")
        return {"nkeys_seed_str": seed}, [Secret(seed)]
    return {}, []


def _read(path: str, option: str) -> str:
    try:
        return read_file(path).decode("ascii")
    except UnicodeDecodeError:
        raise BadLoginFile(f"{option}={path_shown(path)} is no text") from None
    except OSError as error:
        # Without the cause: it quotes the path, which may be the secret itself.
        raise BadLoginFile(f"{option}={path_shown(path)} can't be read: {error.strerror}") from None


def _check_seed(seed: str, source: str) -> None:
    import nkeys  # slow to import, and not needed without a login of this kind

    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
        is_user = seed.startswith("SU")
    except Exception:  # of nkeys, base64 and nacl
        is_user = False
    if not is_user:
        raise BadLoginFile(f"{source} holds no seed of a user: that is one line, and begins with SU")

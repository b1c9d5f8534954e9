"""Whether connections to a PostgreSQL are encrypted and verified: the options of libpq, the one rule that differs.

libpq verifies nothing by default, also where an authority is named: it falls back to a connection in the clear. Here,
naming an authority means verifying, as for all other stores.

``channel_binding=require`` keeps others from passing a login on to the server. The driver has nothing of the kind, so
what is asked for is had in another way: the server's certificate and its name are verified, as with ``verify-full``.
"""

from __future__ import annotations

import configparser
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

from tenure._backends.postgres.address import Options
from tenure._opened import Fact
from tenure._option_files import read_file, require_readable, warnings_about
from tenure._url import Url
from tenure.errors import ConfigError

SYSTEM = "system"
"""In place of a file: the authorities that this machine trusts."""

UNVERIFIED = ("disable", "allow", "prefer")
"""The modes in which a server may be used without TLS, and none is verified."""
VERIFYING = ("verify-ca", "verify-full")
WEAK = ("require", "verify-ca")
"""The modes in which there is TLS, and no name is verified."""

USUAL = Path(".postgresql", "root.crt")
"""The file of authorities in which libpq looks for them, in the user's folder."""

_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where systems keep the authorities that they trust; a Python from elsewhere may look in another place."""


@dataclass(frozen=True, slots=True)
class Encryption:
    """How connections are encrypted: the mode, which is None if libpq's default holds, and whom they trust."""

    mode: str | None
    authority: str | None
    """The file with the certificates to trust; None if nothing is verified."""
    certificate: str | None = None
    """The file of the certificate that the client shows, if the options name it or its key."""
    binds: bool = False
    """Whether ``channel_binding=require`` was given, for which the server is verified in full."""
    warnings: tuple[Fact, ...] = ()
    """One for each file with a key, or a password, that other users can read."""
    files: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """The files that options name; the driver reads them for each connection."""

    def require_files(self, url: Url) -> None:
        """Refuse files that can't be read: the driver would only report that it can't connect, or wait for a pipe.

        Raises:
            ConfigError: One can't be read.
        """
        require_readable(url, **self.files)


class _Given(NamedTuple):
    """An option, and where it stands: the lower the rank, the more it concerns just this connection."""

    text: str
    where: str
    rank: int


def encryption_of(
    url: Url, options: Options, env: Mapping[str, str] = MappingProxyType(os.environ), home: Path | None = None
) -> Encryption:
    """Return how connections to *url* are encrypted.

    The options are read from the URL, the service file and the variables of libpq, in this order.

    Raises:
        ConfigError: The options contradict each other, or a file can't be read.
    """
    home = home or Path(os.path.expanduser("~"))
    given: dict[str, _Given] = {}
    file = _service_file(env, home)
    service = _service(url, file, options.service) if options.service else {}
    for rank, (where, found) in enumerate(_places(url, file, service, env)):
        for name, text in found.items():
            given.setdefault(name, _Given(text, where.format(name=name, variable=_variable(name)), rank))
    files = {name: given[name].text for name in _FILES if name in given and given[name].text != SYSTEM}
    warnings = require_readable(url, **files)
    if {"password", "sslpassword"} & service.keys():
        warnings += warnings_about("service", file)
    shown = given["sslcert"].text if "sslcert" in given else str(home / ".postgresql" / "postgresql.crt")
    certificate = shown if "sslcert" in given or "sslkey" in given else None
    binds = "channel_binding" in given and given["channel_binding"].text == "require"
    _require_agreement(url, given)
    mode, root = given.get("sslmode"), given.get("sslrootcert")
    chosen = mode.text if mode else "verify-full" if root or "sslcrl" in given else "require" if certificate else None
    if binds:
        chosen = "verify-full"
        hosts = unquote(url.hosts) or options.host or service.get("host") or env.get("PGHOST") or "/"
        if any(host.startswith("/") for host in hosts.split(",")):
            raise ConfigError(
                f"{given['channel_binding'].where}=require of {url} needs TLS, and a connection by a socket has none; "
                "write channel_binding=disable, or name a host"
            )
    direct = given.get("sslnegotiation")
    if chosen is None or chosen in UNVERIFIED:
        if direct is not None and direct.text == "direct":
            raise ConfigError(
                f"{direct.where}=direct of {url} is for TLS alone; write sslmode=verify-full, too, or leave it out"
            )
        return Encryption(chosen, None, certificate, warnings=warnings, files=files)
    authority = root.text if root else _usual(url, home)
    if authority is None and binds:
        authority = SYSTEM
    if authority == SYSTEM:
        authority = _of_system()
    if authority is None and chosen in VERIFYING:
        raise ConfigError(
            f"sslmode={chosen} of {url} needs an authority, and there is no {home / USUAL}; name its file with "
            "sslrootcert=FILE, or write sslrootcert=system for those that this machine trusts"
        )
    if chosen == "require" and authority is not None:
        chosen = "verify-ca"  # as libpq documents it
    return Encryption(chosen, authority, certificate, binds, warnings, files)


def _require_agreement(url: Url, given: Mapping[str, _Given]) -> None:
    """Refuse an ``sslmode`` that doesn't give what another option asks for."""
    mode = given.get("sslmode")
    if mode is None:
        return
    root = given.get("sslrootcert")
    named, cert = root or given.get("sslcrl"), given.get("sslcert") or given.get("sslkey")
    if named is not None and mode.text in UNVERIFIED and named.rank <= mode.rank:
        raise ConfigError(
            f"{named.where} of {url} says whom to trust, and {mode.where}={mode.text} trusts anybody; write "
            "sslmode=verify-full, or leave out one of them"
        )
    if root is not None and root.text == SYSTEM and mode.text in WEAK and root.rank <= mode.rank:
        raise ConfigError(
            f"{root.where}=system of {url} trusts authorities that certify anybody's servers, so their names must be "
            f"verified, too, and {mode.where}={mode.text} doesn't do that; write sslmode=verify-full, or leave it out"
        )
    if cert is not None and mode.text == "disable" and cert.rank <= mode.rank:
        raise ConfigError(
            f"{cert.where} of {url} is for TLS, which {mode.where}=disable excludes; write sslmode=verify-full and "
            "sslrootcert=…, or leave out one of them"
        )
    binding = given.get("channel_binding")
    if binding is not None and binding.text == "require" and mode.text in UNVERIFIED:
        raise ConfigError(
            f"{binding.where}=require of {url} needs TLS, and {mode.where}={mode.text} does without; write "
            "sslmode=verify-full, or channel_binding=disable"
        )


def _usual(url: Url, home: Path) -> str | None:
    """Return the file of authorities in which libpq looks for them; None if there is none.

    Raises:
        ConfigError: It can't be read.
    """
    file = home / USUAL
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{file}, where libpq looks for the authority of {url}, can't be read: {error.strerror}; let this process "
            "read it, set HOME to a folder of its own user, or name its file with sslrootcert=FILE (system means "
            "those that this machine trusts)"
        ) from None
    require_readable(url, sslrootcert=str(file))
    return str(file)


def _places(
    url: Url, file: Path, service: Mapping[str, str], env: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str]]]:
    names = ("sslmode", *_FILES, "sslnegotiation", "channel_binding")
    yield "the option {name}", {name: url.query[name].reveal() for name in names if name in url.query}
    yield f"{{name}} in {file}", {name: service[name] for name in names if service.get(name)}
    variables = {name: env.get(_variable(name)) for name in names}
    yield "the variable {variable}", {name: text for name, text in variables.items() if text}


def _variable(name: str) -> str:
    """Return the variable in which libpq looks for an option."""
    return f"PG{name.upper().replace('_', '')}"


def service_of(url: Url, name: str, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of a service; none if there is no such service.

    Raises:
        ConfigError: The service file can't be read.
    """
    return _service(url, _service_file(env, Path(os.path.expanduser("~"))), name)


def _service_file(env: Mapping[str, str], home: Path) -> Path:
    return Path(env.get("PGSERVICEFILE") or home / ".pg_service.conf")


def _service(url: Url, file: Path, name: str) -> Mapping[str, str]:
    """Return the options of a service, read as the driver reads them; none if there is no such file."""
    found = configparser.ConfigParser()  # with interpolation, as the driver
    try:
        found.read_string(read_file(file).decode())
        return dict(found[name]) if found.has_section(name) else {}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(
            f"the service file {file} of {url} can't be read: {error.strerror}; name the file as this process finds it"
        ) from None
    except (configparser.Error, UnicodeDecodeError) as error:
        # Without the cause: it may quote a line with a password.
        raise ConfigError(f"the service file {file} can't be read ({type(error).__name__}); check its form") from None


def _of_system() -> str:
    """Return the file of the authorities that this machine trusts: the driver has no name for them.

    Raises:
        ConfigError: It isn't where OpenSSL looks for it.
    """
    paths = ssl.get_default_verify_paths()
    files = [paths.cafile] if paths.cafile else []
    files += [f"{paths.capath}/ca-certificates.crt"] if paths.capath else []  # as Debian calls it
    if not {paths.openssl_cafile_env, paths.openssl_capath_env} & os.environ.keys():
        files += _BUNDLES
    for file in files:
        if os.path.exists(file):
            return file
    raise ConfigError(
        "sslrootcert=system: no file with the authorities of this machine was found; name it, as in "
        "sslrootcert=/etc/ssl/cert.pem, or in the variable SSL_CERT_FILE"
    )

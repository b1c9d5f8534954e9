"""The credentials of a client: a bearer token, from a text, from a file that rotates, or from a command; certificates.

A secret is never shown: no ``repr`` has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from tenure._credential_command import output_of
from tenure._foreign import a_text, an_object, read_object
from tenure._opened import Fact
from tenure._option_files import read_file as bytes_of
from tenure._runtime.threads import in_thread
from tenure._secret import Secret
from tenure._tls_context import ReloadingContext, Settings, no_password, own_certificate
from tenure._tls_failures import keep_certificates, lasting
from tenure.errors import ConfigError, Unavailable

TOKEN_AGE_MAX = 60.0
"""Seconds after which a token file is read again: a kubelet replaces it well before the old token expires."""
COMMAND_MAX = 60.0
"""Seconds that a credential command may take."""
EXPIRES_EARLY = 10.0
"""Seconds before its end at which a credential of a command is replaced."""

_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


@dataclass(frozen=True, slots=True)
class Login:
    """What a request is sent with: a bearer token, and a client certificate with its key, both as PEM."""

    token: Secret | None = None
    certificate: str | None = field(default=None, repr=False)
    key: Secret | None = None


class Credential(Protocol):
    """A source of logins."""

    async def login(self, *, refused: Login | None) -> Login:
        """Return the login to use; not *refused*, which the server did not accept, if there can be another one."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach an API server, and as whom. *origin* names its source, for messages.

    Its authority and its certificates are replaced while their readers run: see :func:`tls_of`.
    """

    origin: str
    server: str
    ca: str | None = field(default=None, repr=False)
    """The certificates to trust, as PEM; None: those of the system."""
    ca_file: Path | None = None
    """The file that they are from, if any."""
    files: tuple[Path, ...] = ()
    """All files that have these certificates, or the client's with its key."""
    again: Callable[[], Access] | None = field(default=None, repr=False, compare=False)
    """Reads them again; raises ``ConfigError``."""
    credential: Credential | None = None
    certificate: Login | None = field(default=None, repr=False)
    """A client certificate."""
    namespace: str = ""
    is_insecure: bool = False
    """Whether the server's certificate is not checked."""
    server_name: str | None = None
    """The name that the server's certificate must have, if not that of its address."""
    warnings: tuple[Fact, ...] = ()
    """One for each file with a secret that other users can read; a pod's token is for all its users, so not judged."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the server is asked over TLS."""
        return urlsplit(self.server).scheme == "https"


def require_server(server: str, origin: str) -> None:
    """Refuse the address of a server that isn't one.

    Raises:
        ConfigError: It isn't, or has a login in it.
    """
    try:
        parts = urlsplit(server)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_good = None, False
    if not is_good or parts is None or "@" in parts.netloc or parts.query or parts.fragment:
        found = f", not {server!r}" if "@" not in server and "?" not in server else ""  # these may hold a secret
        raise ConfigError(
            f"{origin} must be an address such as https://10.0.0.1:6443, without a login or a query{found}"
        )


def require_verified(access: Access) -> Access:
    """Refuse to name an authority for a server that nobody verifies, as kubectl does; return *access* else.

    Raises:
        ConfigError: It is asked without TLS, or its certificate is not to be checked.
    """
    if access.ca is not None and not access.is_encrypted:
        raise ConfigError(
            f"{access.origin} names an authority for {access.server}, which is asked without TLS; write https://, or "
            "leave the authority out"
        )
    if access.ca is not None and access.is_insecure:
        raise ConfigError(
            f"{access.origin} names an authority for {access.server}, and insecure-skip-tls-verify, which trusts "
            "anybody; leave out one of them"
        )
    return access


def read_file(path: Path, origin: str) -> str:
    """Return a file as text.

    Raises:
        ConfigError: It can't be read.
    """
    try:
        return bytes_of(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{origin} names {path}, which can't be read: {why}") from error


def tls_of(access: Access, login: Login) -> ReloadingContext | None:
    """Return the TLS settings for *access*; None for a server without TLS. It reads files, so call it in a thread.

    A kubeconfig is read again if it has changed, but for its server, and what else it says of that.

    Raises:
        ConfigError: A certificate or key can't be used.
    """
    if not access.is_encrypted:
        return None

    def read() -> Settings:
        found = access.again() if access.again is not None else access
        if found.server != access.server or (found.ca is None) != (access.ca is None):
            raise ConfigError(f"{access.origin} has another server by now, or another context is the current one")
        return _settings_of(require_verified(replace(access, ca=found.ca, certificate=found.certificate)), login)

    try:
        return ReloadingContext(ssl.Purpose.SERVER_AUTH, access.files, read)
    except OSError as error:
        raise ConfigError(f"a file of {access.origin} can't be read: {error.strerror}") from error


def _settings_of(access: Access, login: Login) -> Settings:
    try:
        if access.ca is not None and not access.ca.strip():  # then Python would trust the authorities of this machine
            raise ValueError("it is empty")
        context = ssl.create_default_context(cadata=access.ca)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificate authority of {access.origin} is no PEM certificate: {error}") from error
    keep_certificates(context)
    if access.is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif hasattr(ssl, "VERIFY_X509_STRICT"):
        # Python 3.13 sets it, and would refuse the authorities of many clusters, which lack a key identifier.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    shown = next((one for one in (login, access.certificate) if one and one.certificate), None)
    if shown is None or shown.certificate is None:
        return Settings(context, None)
    _load_certificate(context, shown, access.origin)
    return Settings(context, own_certificate(f"of {access.origin}", shown.certificate.encode()))


def _load_certificate(context: ssl.SSLContext, login: Login, origin: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tenure-") as folder:  # readable for this user only
        certificate, key = Path(folder, "client.pem"), Path(folder, "client.key")
        certificate.write_text(login.certificate or "")
        key.write_text(login.key.reveal() if login.key else "")
        try:
            context.load_cert_chain(certificate, key, password=no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"the client certificate of {origin} and its key can't be used: {error}") from error


# --- tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token that stays the same."""

    token: Secret

    async def login(self, *, refused: Login | None) -> Login:
        """Return the token."""
        return Login(self.token)


class TokenFile:
    """A token in a file, which is replaced from time to time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._login: Login | None = None
        self._read_at = 0.0

    async def login(self, *, refused: Login | None) -> Login:
        """Return the token in the file, read at most ``TOKEN_AGE_MAX`` seconds ago."""
        is_fresh = time.monotonic() - self._read_at < TOKEN_AGE_MAX
        if self._login is None or not is_fresh or self._login is refused:
            try:
                token = (await in_thread("tenure-token", partial(bytes_of, self._path))).decode().strip()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is no text"
                if self._login is not None and refused is None:
                    return self._login  # being replaced just now
                text = f"the token file {self._path} can't be read: {why}"
                raise lasting(text, worked=self._login is not None) from error
            if not token:
                raise Unavailable(f"the token file {self._path} is empty")
            self._login, self._read_at = Login(Secret(token)), time.monotonic()
        return self._login


# --- a command, as kubectl calls it ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A credential command of a kubeconfig."""

    version: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    hint: str = ""
    """How to install it."""
    cluster: Mapping[str, Any] | None = field(default=None, repr=False)
    """The cluster, if the command is to be told."""


class CommandLogin:
    """A credential from a command, kept until it expires. The command runs beside the loop, once for all requests."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._login: Login | None = None
        self._expires_at: float | None = None
        self._running: asyncio.Task[Login] | None = None

    @property
    def awaited(self) -> str:
        """The command in words, while it runs."""
        runs = self._running is not None and not self._running.done()
        return f"the credential command {self._command.argv[0]!r}" if runs else ""

    async def login(self, *, refused: Login | None) -> Login:
        """Return the newest credential, or wait for a new one."""
        is_over = self._expires_at is not None and time.time() > self._expires_at - EXPIRES_EARLY
        if self._login is not None and not is_over and self._login is not refused:
            return self._login
        if self._running is None or self._running.done() or self._running.get_loop() is not asyncio.get_running_loop():
            self._running = asyncio.get_running_loop().create_task(self._run())
        # A request that is given up doesn't end the command: the next one waits for it.
        return await asyncio.shield(self._running)

    async def _run(self) -> Login:
        command = self._command
        spec: dict[str, Any] = {"interactive": False}
        if command.cluster is not None:
            spec["cluster"] = command.cluster
        info = json.dumps({"apiVersion": command.version, "kind": "ExecCredential", "spec": spec})
        env = {**os.environ, **command.env, "KUBERNETES_EXEC_INFO": info}
        written = await output_of(
            command.argv,
            f"the kubeconfig's credential command {command.argv[0]!r}",
            within=COMMAND_MAX,
            env=env,
            install=command.hint,
        )
        self._login, self._expires_at = _credential_in(written, command)
        return self._login


def _credential_in(written: bytes, command: Command) -> tuple[Login, float | None]:
    """Return the credential that a command has written, and when it expires, in Unix seconds."""
    refused = f"the credential command {command.argv[0]!r} wrote no ExecCredential of {command.version}"
    try:
        found = read_object(written)
        status = an_object(found.get("status"))
        given = (status.get(name) for name in ("token", "clientCertificateData", "clientKeyData"))
        token, certificate, key = (a_text(one) if one else "" for one in given)
        login = Login(Secret(token) if token else None, certificate or None, Secret(key) if key else None)
        expires = status.get("expirationTimestamp")
        expires_at = datetime.fromisoformat(a_text(expires)).timestamp() if expires else None
    except (ValueError, OverflowError):  # also Unreadable
        raise ConfigError(f"{refused}; its output is not shown, as it may hold a secret") from None
    if found.get("apiVersion") not in _EXEC_VERSIONS or not (login.token or login.certificate):
        raise ConfigError(f"{refused} with a token or a certificate")
    return login, expires_at


def require_version(version: object) -> str:
    """Refuse a version of the interface of credential commands that tenure doesn't know.

    Raises:
        ConfigError: It is another one.
    """
    if version not in _EXEC_VERSIONS:
        raise ConfigError(
            f"the kubeconfig's credential command has apiVersion {version!r:.80}; tenure knows "
            f"{' and '.join(_EXEC_VERSIONS)}"
        )
    return str(version)

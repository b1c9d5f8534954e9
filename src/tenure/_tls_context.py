"""How the stores verify their servers, and show a client's certificate: one way for all that name files for it.

House rules:

- Certificates are renewed while their readers run. So each handshake uses what the files have by then, of a client and
  of a server.
- Files that can't be used when they are first read are refused. Later, they may be half-written, or a certificate may
  be there before its key: then the handshake uses what was read before, and the next one reads them again.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tenure._certificate import ends_at
from tenure._foreign import read_or
from tenure._opened import Fact
from tenure._option_files import read_file
from tenure._secret import path_shown
from tenure._tls_failures import OwnCertificate, keep_certificates, text_of, unusable_files
from tenure.errors import ConfigError


class Settings(NamedTuple):
    """What is made of the files: a context, and the certificate that it shows."""

    context: ssl.SSLContext
    own: OwnCertificate | None


class ReloadingContext(ssl.SSLContext):
    """A context of which each handshake uses the files as they are by then.

    Args:
        purpose: Which side the other one is.
        files: What *read* reads; their contents tell whether it is called again.
        read: Returns what to use.

    Raises:
        OSError: A file can't be read.
        Exception: What *read* raises: a ``ConfigError``, an ``OSError`` (an error of ssl is one) or a ``ValueError``.
    """

    def __new__(cls, purpose: ssl.Purpose, *_: Any) -> ReloadingContext:
        is_client = purpose is ssl.Purpose.SERVER_AUTH
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, purpose: ssl.Purpose, files: Iterable[str | Path], read: Callable[[], Settings]) -> None:
        self._files = tuple(files)
        self._read = read
        self._report: Callable[[Fact], None] | None = None
        self._lock = threading.Lock()  # connections are made on several loops and threads
        self._not_renewed = ""
        self._content = self._content_now()  # before reading them: what is written meanwhile is read again
        self._settings = read()
        self.check_hostname = self._settings.context.check_hostname
        self.verify_mode = self._settings.context.verify_mode

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report files that can't be used any more, once until they can; it may be called on any thread."""
        self._report = report

    @property
    def own(self) -> OwnCertificate | None:
        """The certificate of the last handshake; None without one."""
        own = self._settings.own
        return replace(own, not_renewed=self._not_renewed) if own is not None else None

    def latest(self) -> ssl.SSLContext:
        """Return the context for a handshake that begins now."""
        with self._lock:
            try:
                content = self._content_now()
                if content != self._content:
                    self._settings, self._content = self._read(), content
            except (ConfigError, OSError, ValueError) as error:
                self._keep(text_of(error))
            else:
                self._not_renewed = ""
            return self._settings.context

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Begin a handshake over a socket."""
        return self.latest().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake over buffers, as asyncio does."""
        return self.latest().wrap_bio(*arguments, **options)

    def _content_now(self) -> bytes:
        # By content: a file that is written twice within a tick of the file system's clock has the same times.
        return b"".join(sha256(read_file(file)).digest() for file in self._files)

    def _keep(self, why: str) -> None:
        is_new, self._not_renewed = not self._not_renewed, why
        if is_new and self._report is not None:
            files = ", ".join(path_shown(str(file)) for file in self._files)
            self._report(
                Fact(
                    "certificates",
                    f"what {files} have now can't be used: {why}",
                    "put certificate, key and authority there that belong together; until then, connections are made "
                    f"with those from before{self._until()}",
                    "certificate-not-renewed",
                )
            )

    def _until(self) -> str:
        own = self._settings.own
        return f", until {own.ends}" if own is not None and own.ends else ""


def tls_context(
    address: object,
    *,
    ca: str | None,
    cert: str | None,
    key: str | None,
    check_hostname: bool = True,
    verifies: bool = True,
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH,
) -> ReloadingContext:
    """Return a context that verifies the other side's certificate, and reads its files again when they have changed.

    Args:
        address: The store, for messages.
        ca: The file of whom to trust; None: the authorities of this machine, as they are now.
        cert: The file of our certificate, if we show one.
        key: The file of its key; None if the former has it.
        check_hostname: Whether its certificate must be for its host.
        verifies: Whether it is verified at all.
        purpose: Which side it is; a client must show a certificate, too.

    Raises:
        ConfigError: A file is no certificate or key, or they don't belong together.
    """
    named = ", ".join(f"{name}={path}" for name, path in (("ca", ca), ("cert", cert), ("key", key)) if path)

    def read() -> Settings:
        context = ssl.create_default_context(purpose, cafile=ca)
        keep_certificates(context)
        if cert:
            context.load_cert_chain(cert, key, password=no_password)
        if purpose is ssl.Purpose.SERVER_AUTH:
            context.check_hostname = check_hostname and verifies
        context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
        return Settings(context, own_certificate_in(cert) if cert else None)

    try:
        return ReloadingContext(purpose, [file for file in (ca, cert, key) if file], read)
    except (OSError, ValueError) as error:  # an error of ssl is one, too
        raise ConfigError(unusable_files(f"{address} ({named})", error)) from error


def shown_by(context: ReloadingContext | None) -> OwnCertificate | None:
    """Return the certificate that a client shows by *context*; None if it shows none."""
    return context.own if context is not None else None


def own_certificate(name: str, pem: bytes) -> OwnCertificate:
    """Return the certificate that this process shows: the first one in *pem*."""
    return OwnCertificate(name, read_or(ends_at, pem, None))


def own_certificate_in(file: str) -> OwnCertificate:
    """Return the certificate in *file*, which a driver reads itself for each connection."""
    try:
        return own_certificate(file, read_file(file))
    except OSError:
        return OwnCertificate(file)


def no_password() -> str:
    """Refuse a key with a password: OpenSSL would ask for it on the terminal, and wait."""
    raise ValueError("the key has a password; remove it with openssl pkey, and let no one else read the file")

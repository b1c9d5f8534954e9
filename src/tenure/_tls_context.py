"""How the stores verify their servers, and show a client's certificate: one way for all that name files for it."""

from __future__ import annotations

import ssl

from tenure._tls_failures import keep_certificates, unusable_files
from tenure.errors import ConfigError


def tls_context(
    address: object,
    *,
    ca: str | None,
    cert: str | None,
    key: str | None,
    check_hostname: bool = True,
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH,
) -> ssl.SSLContext:
    """Return a context that verifies the other side's certificate.

    Args:
        address: The store, for messages.
        ca: The file of whom to trust; None: the authorities of this machine.
        cert: The file of our certificate, if we show one.
        key: The file of its key; None if the former has it.
        check_hostname: Whether its certificate must be for its host.
        purpose: Which side it is.

    Raises:
        ConfigError: A file is no certificate or key, or they don't belong together.
    """
    try:
        context = ssl.create_default_context(purpose, cafile=ca)
        keep_certificates(context)
        if cert:
            context.load_cert_chain(cert, key, password=no_password)
    except (OSError, ValueError) as error:  # an error of ssl is one, too
        named = ", ".join(f"{name}={path}" for name, path in (("ca", ca), ("cert", cert), ("key", key)) if path)
        raise ConfigError(unusable_files(f"{address} ({named})", error)) from error
    if purpose is ssl.Purpose.SERVER_AUTH:
        context.check_hostname = check_hostname
    return context


def no_password() -> str:
    """Refuse a key with a password: OpenSSL would ask for it on the terminal, and wait."""
    raise ValueError("the key has a password; remove it with openssl pkey, and let no one else read the file")

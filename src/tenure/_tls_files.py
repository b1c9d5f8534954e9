"""The options of a URL that name files for TLS."""

from __future__ import annotations

from tenure.errors import ConfigError


def require_readable(address: object, **files: str | None) -> None:
    """Refuse an option that names a file that can't be read: a driver would only report that it can't connect.

    Args:
        address: The store, for the message.
        files: The path in each option; None if it is not given.

    Raises:
        ConfigError: A file can't be read; the message has the option and the path.
    """
    for option, path in files.items():
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{option}={path} of {address} can't be read: {error.strerror}; name the file as this process finds it"
            ) from error

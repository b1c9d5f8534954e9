"""What a store lets a client in by, as the caller of ``connect`` gives it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from tenure._checks import is_encodable
from tenure._secret import Secret
from tenure.errors import ConfigError

PASSWORD_MAX = 65_536
"""Characters of the longest user, password, or token."""
LASTS_MAX = 1e9
"""Seconds that one may last: some 30 years."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a store lets a client in by: the answer of the function that is given as ``credentials=``.

    Args:
        password: The password, or the token that stands in its place; it becomes a ``Secret``, which is never shown.
        user: The user; the one in the URL if empty.
        lasts: The seconds, from now on, for which the store accepts it; None if that isn't known. It is used for all
            connections that are made meanwhile, and asked for again after three quarters of this time. Connections to
            PostgreSQL, Redis and RabbitMQ then get the new one, or are replaced by others.

    Raises:
        ConfigError: An argument has another type, the password is empty, or *lasts* is not above 0.

    Example::

        def credentials() -> tenure.Credentials:
            token = boto3.client("rds").generate_db_auth_token(DBHostname=HOST, Port=5432, DBUsername="worker")
            return tenure.Credentials(token, user="worker")


        async with tenure.connect(f"postgresql://{HOST}/shop?sslmode=verify-full", credentials=credentials) as backend:
            ...
    """

    password: str | Secret
    user: str = ""
    lasts: float | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("password", (str, Secret)), ("user", (str,))):
            # Without the value: it may be the password in another form.
            if not isinstance(value := getattr(self, name), kinds):
                raise ConfigError(f"Credentials({name}=…) must be a str, not {type(value).__name__}")
        if isinstance(self.password, str):
            object.__setattr__(self, "password", Secret(self.password))
        if not self.password:
            raise ConfigError("Credentials(password=…) is empty; give the password, or the token")
        for name, text in (("password", self.secret.reveal()), ("user", self.user)):
            require_text(text, f"Credentials({name}=…)")
        lasts: object = self.lasts
        if lasts is not None and not (isinstance(lasts, (int, float)) and 0.0 < lasts <= LASTS_MAX):
            shown = lasts if isinstance(lasts, float) else type(lasts).__name__
            if isinstance(lasts, int):
                shown = lasts if abs(lasts) < LASTS_MAX else "so many"
            raise ConfigError(f"Credentials(lasts=…) must be a number of seconds above 0, not {shown}")

    @property
    def secret(self) -> Secret:
        """The password, which shows itself to nobody who doesn't ask for it by ``reveal()``."""
        return self.password if isinstance(self.password, Secret) else Secret(self.password)


def require_text(text: str, name: str) -> None:
    """Refuse what no store takes as a user, a password or a token; *name* is what it is called, as it isn't shown.

    Raises:
        ConfigError: It has a line end or a NUL, is no text, or too long.
    """
    if text != text.rstrip("\r\n"):
        raise ConfigError(f"{name} ends with a line end; take it off, as with .strip()")
    if not is_encodable(text):
        raise ConfigError(f"{name} has characters that are no text, such as of bytes that are not in UTF-8")
    if any(one in text for one in "\0\r\n"):
        raise ConfigError(f"{name} has a line end or a NUL, which no store takes")
    if len(text) > PASSWORD_MAX:
        raise ConfigError(f"{name} has {len(text):,} characters, and must have at most {PASSWORD_MAX:,}")


AskCredentials: TypeAlias = Callable[[], Credentials | str | Secret | Awaitable[Credentials | str | Secret]]
"""A function of the caller that returns credentials, or only the password; it may be ``async``."""

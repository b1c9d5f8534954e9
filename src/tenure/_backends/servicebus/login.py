"""Tokens of shared access policies, signed with the newest login: for each link, and for each request of management."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import parse_qs, quote_plus

from azure.core.credentials import AccessToken

from tenure._logins import Login, Logins
from tenure._secret import Secret
from tenure.errors import ConfigError

LASTS = 3600.0
"""Seconds that a token lasts at most: as long as those that the library signs."""
KEY_BYTES = 32
"""The length of a policy's key; an emulator's may have any."""
PREFIX = "SharedAccessSignature "


class _Attaching:
    """A link that is being attached with this login; None when it is."""

    def __init__(self, login: Login | None) -> None:
        self.login = login


_attaching: ContextVar[_Attaching | None] = ContextVar("attaching", default=None)


class Signer:
    """Signs for links as the library asks for it, with the newest login."""

    token_type = b"servicebus.windows.net:sastoken"

    def __init__(self, logins: Logins) -> None:
        self.logins = logins

    @contextmanager
    def attaching(self, login: Login) -> Iterator[None]:
        """Inside the block, links are attached with *login*.

        Their tasks go on with the context of the block, and are to sign with newer ones.
        """
        held = _Attaching(login)
        token = _attaching.set(held)
        try:
            yield
        finally:
            held.login = None
            _attaching.reset(token)

    async def get_token(self, *scopes: str, **_: object) -> AccessToken:
        """Return a token for the first of *scopes*, an address.

        Raises:
            ConfigError, Unavailable: There is no login now.
        """
        held = _attaching.get()
        return signed(scopes[0], (held and held.login) or await self.logins.login())


def signed(address: str, login: Login) -> AccessToken:
    """Return a token for *address* that ends no later than *login*."""
    text = "" if login.password is None else login.password.reveal()
    left, now = login.ends_at - time.monotonic(), time.time()
    if _is_signature(text):
        written = text.removeprefix(PREFIX)
        ends = int(parse_qs(written)["se"][0])
        return AccessToken(PREFIX + written, int(min(ends, now + left)) if left < math.inf else ends)
    ends = int(now + min(LASTS, left))
    audience = quote_plus(address)
    digest = hmac.new(text.encode(), f"{audience}\n{ends}".encode(), hashlib.sha256).digest()
    signature = quote_plus(base64.b64encode(digest))
    return AccessToken(f"{PREFIX}sr={audience}&sig={signature}&se={ends}&skn={quote_plus(login.user or '')}", ends)


def check_login(login: Login, source: str, *, emulator: bool) -> Sequence[Secret]:
    """Return what of *login* a server may quote: the signature's value.

    Raises:
        ConfigError: It is neither the key of a policy, with the policy's name, nor a signature.
    """
    text = "" if login.password is None else login.password.reveal()
    if _is_signature(text):
        return _check_signature(text, login.user, source)
    if not _is_key(text, emulator=emulator):
        raise ConfigError(
            f"{source} gives what is no key of a shared access policy (not shown); copy the primary or secondary key "
            "alone, 44 characters, not the connection string"
        )
    if not login.user:
        raise ConfigError(
            f"{source} gives the key of a shared access policy without the policy's name; write "
            "servicebus://POLICY@NAMESPACE, or return tenure.Credentials(key, user=policy)"
        )
    return ()


def _is_signature(text: str) -> bool:
    return "sig=" in text and "sr=" in text


def _check_signature(text: str, user: str | None, source: str) -> Sequence[Secret]:
    written = text.removeprefix(PREFIX)
    parts = parse_qs(written)
    if not all(len(parts.get(name, ())) == 1 for name in ("sr", "sig", "se", "skn")) or " " in written:
        raise ConfigError(
            f"{source} gives a shared access signature that can't be read; copy the whole of it, as "
            "SharedAccessSignature sr=…&sig=…&se=…&skn=…"
        )
    [ends] = parts["se"]
    if not (ends.isascii() and ends.isdigit() and len(ends) <= 11):
        raise ConfigError(f"{source} gives a shared access signature whose se= is no time in seconds; copy all of it")
    if user:
        raise ConfigError(
            f"{source} gives a shared access signature, which names its policy itself (skn=), and there is the user "
            f"{user!r}; leave out the user"
        )
    return [Secret(parts["sig"][0])]


def _is_key(text: str, *, emulator: bool) -> bool:
    if emulator and text and "=" not in text.rstrip("="):
        return True
    try:
        return len(base64.b64decode(text, validate=True)) == KEY_BYTES
    except ValueError:
        return False

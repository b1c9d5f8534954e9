"""Tokens of shared access policies, signed with the newest login: for each link, and for each request of management."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import time
from contextvars import ContextVar
from urllib.parse import parse_qs, quote_plus

from azure.core.credentials import AccessToken

from tenure._logins import Login, Logins
from tenure._secret import Secret, hide
from tenure.errors import ConfigError

LASTS = 3600.0
"""Seconds that a token lasts at most: as long as those that the library signs."""
PREFIX = "SharedAccessSignature "

link_login: ContextVar[Login | None] = ContextVar("link_login", default=None)
"""The login that the link which is being attached uses."""


class Signer:
    """Signs for links as the library asks for it, with the newest login."""

    token_type = b"servicebus.windows.net:sastoken"

    def __init__(self, logins: Logins, store: object, *, emulator: bool) -> None:
        self.logins = logins
        self._store = store
        self._emulator = emulator

    async def get_token(self, *scopes: str, **_: object) -> AccessToken:
        """Return a token for the first of *scopes*, an address.

        Raises:
            ConfigError: The login can't sign one.
            Unavailable: There is no login now.
        """
        return self.signed(scopes[0], link_login.get() or await self.logins.login())

    def signed(self, address: str, login: Login) -> AccessToken:
        """Return a token for *address* that ends no later than *login*.

        Raises:
            ConfigError: It can't sign one.
        """
        text = "" if login.password is None else login.password.reveal()
        left = login.ends_at - time.monotonic()
        if "sig=" in text and "sr=" in text:
            token, ends = self._given(text, login.user)
            return AccessToken(token, int(min(ends, time.time() + left)) if left < math.inf else ends)
        if not login.user:
            raise ConfigError(
                f"{self._store} has the key of a shared access policy without the policy's name; return "
                "tenure.Credentials(key, user=policy), or write servicebus://POLICY@NAMESPACE"
            )
        self._require_key(text)
        ends = int(time.time() + min(LASTS, left))
        audience = quote_plus(address)
        digest = hmac.new(text.encode(), f"{audience}\n{ends}".encode(), hashlib.sha256).digest()
        signature = quote_plus(base64.b64encode(digest))
        return AccessToken(f"{PREFIX}sr={audience}&sig={signature}&se={ends}&skn={quote_plus(login.user)}", ends)

    def _given(self, text: str, user: str | None) -> tuple[str, int]:
        written = text.removeprefix(PREFIX)
        parts = parse_qs(written)
        if not all(len(parts.get(name, ())) == 1 for name in ("sr", "sig", "se", "skn")) or " " in written:
            raise ConfigError(
                f"{self._store} has a shared access signature that can't be read; copy the whole of it, as "
                "SharedAccessSignature sr=…&sig=…&se=…&skn=…"
            )
        hide(Secret(parts["sig"][0]))
        if not (parts["se"][0].isascii() and parts["se"][0].isdigit() and len(parts["se"][0]) <= 11):
            raise ConfigError(
                f"{self._store} has a shared access signature whose se= is no time in seconds; copy the whole of it"
            )
        if user:
            raise ConfigError(
                f"{self._store} has a shared access signature, which names its policy itself (skn=), and the user "
                f"{user!r}; leave out the user"
            )
        return PREFIX + written, int(parts["se"][0])

    def _require_key(self, text: str) -> None:
        if self._emulator and text and "=" not in text.rstrip("="):
            return
        try:
            length = len(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            length = 0
        if length != 32:
            raise ConfigError(
                f"{self._store} has a password that is no key of a shared access policy (not shown); copy the primary "
                "or secondary key alone, 44 characters, not the connection string"
            )

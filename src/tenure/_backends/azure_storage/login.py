"""The login of an account that changes: a key or a signature, by which each request is signed.

HTTP has no connections that a login could belong to. So one is used for all requests of a loop, until it is refused or
a longer one is there. A request that is refused for its login was not carried out: it is signed anew, and sent once
more.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qs

from azure.storage.blob.aio import ExponentialRetry

from tenure._credentials import Credentials
from tenure._logins import QUOTABLE, Login, Logins
from tenure._secret import Secret, hide
from tenure.errors import ConfigError

Kind: TypeAlias = Literal["account key", "shared access signature"]

REFUSALS = frozenset(["AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"])
"""The codes of refusals for a login."""
KEY_MIN = 8
"""Bytes of an account's key: Azure's have 64, those of an Azurite are chosen."""
ENDED = "AuthorizationFailure"
"""The code of a refusal for lack of rights, which Azurite also gives for a signature that has ended."""


def kind_of(secret: Secret) -> Kind | None:
    """Return what *secret* is; None if an account has no such login."""
    text = secret.reveal()
    if signature_in(secret) is not None:
        return "shared access signature"
    try:
        return "account key" if len(base64.b64decode(text, validate=True)) >= KEY_MIN else None
    except ValueError:
        return None


def signature_in(sas: Secret | None) -> Secret | None:
    """Return the value of ``sig``, which is the secret in a shared access signature."""
    text = sas.reveal().lstrip("?") if sas is not None else ""
    found = parse_qs(text).get("sig") if text.isprintable() and not {" ", "#"} & set(text) else None
    return Secret(found[0]) if found else None


def require_login(found: Credentials, source: str) -> None:
    """Refuse what is no login of an account.

    Raises:
        ConfigError: It has a user, or is neither a key nor a signature.
    """
    if found.user:
        raise ConfigError(f"{source} gives a user, and an account has none; leave user= out")
    if kind_of(found.secret) is None:
        raise ConfigError(
            f"{source} gives neither an account key, which is base64, nor a shared access signature, in which is sig=; "
            "copy the whole of it from the account"
        )


class ChangingLogin:
    """The login that the requests of one loop have now."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins
        self._login: Login | None = None
        self._asking = asyncio.Lock()  # those that were refused together need one answer
        self._quotable = deque[Secret](maxlen=QUOTABLE)

    async def now(self) -> Login:
        """Return the login for a request that is sent now.

        Raises:
            Unavailable, ConfigError: There is none.
        """
        while (held := self._login) is None or self._logins.replaces(held):
            async with self._asking:
                if self._login is held:
                    self._login = await self._logins.login()
                    if (signature := signature_in(self._login.password)) is not None:
                        hide(signature)
                        self._quotable.append(signature)
        return held

    async def after(self, refused: Login) -> Login | None:
        """Return the login for a request that was *refused* with this one; None if there is no other."""
        if self._login is refused:  # else another request has asked for the next one
            self._logins.refused(refused)
            self._login = None
        newer = await self.now()
        return None if newer.is_same(refused) else newer


class SigningPolicy(ExponentialRetry):
    """Gives each request of a client its login; in place of the client's own repetitions, of which there are none.

    Args:
        login: That of the loop.
        use: Lets the client sign with a secret; whether it can, as it does with all of this kind.
    """

    def __init__(self, login: ChangingLogin, use: Callable[[Secret], bool]) -> None:
        super().__init__(retry_total=0)
        self._login = login
        self._use = use

    async def send(self, request: Any) -> Any:  # type: ignore[override]  # as the client's own does
        """Send *request*; twice if it is refused for its login and there is another one."""
        unsigned = request.http_request.url
        login = await self._login.now()
        if login.password is None or not self._use(login.password):
            raise LoginKindChanged
        response = await self._pass_on(request)
        if not _is_refused(response.http_response):
            return response
        newer = await self._login.after(login)
        if newer is None or newer.password is None or not self._use(newer.password):
            return response
        request.http_request.url = unsigned  # a signature is a part of it
        return await self._pass_on(request)

    async def _pass_on(self, request: Any) -> Any:
        return await super().send(request)  # type: ignore[no-untyped-call]


class LoginKindChanged(Exception):
    """There was a key, and is a signature now, or the other way round: other clients are needed."""


def _is_refused(response: Any) -> bool:
    code = response.headers.get("x-ms-error-code", "")
    return response.status_code == 401 or (response.status_code == 403 and (code in REFUSALS or code == ENDED))

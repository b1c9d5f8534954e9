"""The login of an account that changes: a key or a signature, by which each request is signed.

A request that is refused for its login was not carried out: it is signed anew, and sent once more.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qs

from azure.storage.blob.aio import ExponentialRetry

from tenure._logins import HeldLogin, Login
from tenure._secret import Secret
from tenure.errors import ConfigError

Kind: TypeAlias = Literal["account key", "shared access signature"]

_SIGNATURE = re.compile(r"\w+=[^&#\s]*(&\w+=[^&#\s]*)*", re.ASCII)
"""The query of a URL; not the whole URL, which the portal shows beside it."""
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
    text = sas.reveal().removeprefix("?") if sas is not None else ""
    found = parse_qs(text).get("sig") if _SIGNATURE.fullmatch(text) else None
    return Secret(found[0]) if found else None


def check_login(login: Login, source: str) -> Sequence[Secret]:
    """Return what of *login* a server may quote: the signature's value.

    Raises:
        ConfigError: It has a user, or is neither a key nor a signature.
    """
    if login.user:
        raise ConfigError(f"{source} gives a user, and an account has none; leave user= out")
    if login.password is None or kind_of(login.password) is None:
        raise ConfigError(
            f"{source} gives neither an account key, which is base64, nor a shared access signature, as "
            f"sv=…&sig=…; {_copied_instead(login.password)}"
        )
    signature = signature_in(login.password)
    return () if signature is None else (signature,)


def _copied_instead(found: Secret | None) -> str:
    text = found.reveal() if found is not None else ""
    if "://" in text and "sig=" in text:
        return "it is a whole URL: copy what follows its ?"
    if "AccountKey=" in text:
        return "it is a connection string: copy its AccountKey alone"
    return "copy the whole of it from the account, and nothing else"


class SigningPolicy(ExponentialRetry):
    """Gives each request of a client its login; in place of the client's own repetitions, of which there are none.

    Args:
        login: That of the loop.
        use: Lets the client sign with a secret; whether it can, as it does with all of this kind.
    """

    def __init__(self, login: HeldLogin, use: Callable[[Secret], bool]) -> None:
        super().__init__(retry_total=0)
        self._login = login
        self._use = use

    async def send(self, request: Any) -> Any:  # type: ignore[override]  # as the client's own does
        """Send *request*; twice if it is refused for its login and there is another one."""
        unsigned = request.http_request.url
        login = await self._login.now()
        response = await self._pass_on(request, login)
        if not _is_refused(response.http_response):
            return response
        newer = await self._login.after(login)
        if newer is None:
            return response
        request.http_request.url = unsigned  # a signature is a part of it
        return await self._pass_on(request, newer)

    async def _pass_on(self, request: Any, login: Login) -> Any:
        if login.password is None or not self._use(login.password):
            raise LoginKindChanged
        return await super().send(request)  # type: ignore[no-untyped-call]


class LoginKindChanged(Exception):
    """There was a key, and is a signature now, or the other way round: other clients are needed."""


def _is_refused(response: Any) -> bool:
    code = response.headers.get("x-ms-error-code", "")
    return response.status_code == 401 or (response.status_code == 403 and (code in REFUSALS or code == ENDED))

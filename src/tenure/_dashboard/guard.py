"""The rules for requests: host names, the token, and where a change may come from."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from hashlib import sha256

from starlette.requests import Request

COOKIE = "tenure_dashboard"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """Decides whether a request is answered.

    Args:
        hosts: The names under which the dashboard may be asked; None: any, as the caller checks.
        token: Needed to see anything; None: not needed.
    """

    def __init__(self, hosts: Collection[str] | None, token: str | None) -> None:
        self._hosts = None if hosts is None else frozenset(one.lower() for one in hosts)
        self._token = None if token is None else token.strip()  # one from a file often ends with a newline

    @property
    def needs_token(self) -> bool:
        """Whether a token is needed."""
        return self._token is not None

    def knows_host(self, request: Request) -> bool:
        """Whether the request asks for a name of ours. Another name may be an attacker's that resolves to us."""
        if self._hosts is None:
            return True
        host = request.headers.get("host", "").lower()
        name = re.sub(r":\d+$", "", host)
        return name != "" and name.strip("[]") in self._hosts

    def has_token(self, request: Request) -> bool:
        """Whether the request has the token, in its cookie or as a bearer."""
        if self._token is None:
            return True
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_token(given.strip().encode("latin-1"))  # as headers are decoded
        return hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self.cookie().encode())

    def is_token(self, given: str) -> bool:
        """Whether this is the token."""
        return self._is_token(given.strip().encode())

    def _is_token(self, given: bytes) -> bool:
        return self._token is not None and hmac.compare_digest(given, _encoded(self._token))

    def cookie(self) -> str:
        """Return the value of the cookie: it shows that its owner knew the token, and doesn't tell it."""
        assert self._token is not None
        return hmac.new(_encoded(self._token), b"tenure dashboard", sha256).hexdigest()

    @staticmethod
    def is_from_elsewhere(request: Request) -> bool:
        """Whether a browser says that a page of another site has made the request."""
        return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")

    @staticmethod
    def is_from_here(request: Request) -> bool:
        """Whether a change comes from a page of ours, and not from one of another site.

        Browsers say so in ``Sec-Fetch-Site``; on plain HTTP, some leave it out, and then the origin must be ours.
        """
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        origin = request.headers.get("origin", "")
        return origin.partition("://")[2] == request.headers.get("host", "") != ""


def _encoded(token: str) -> bytes:
    return token.encode(errors="surrogateescape")  # an environment variable may have any bytes

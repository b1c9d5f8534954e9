"""The login of one session, if the URL has no password: asked for on the thread of its connection.

House rules:

- It is asked for on the loop, before the request to connect. So a session without a login isn't renewed; nor is one
  whose loop is blocked.
- That thread waits for less time than a server waits for the request. An answer that comes later is used by the next
  attempt.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from typing import Literal

from tenure._logins import Login, Logins
from tenure._secret import revealed
from tenure.errors import Unavailable

Auth = Literal["digest", "sasl"]
WAIT_MAX = 1.0
"""Seconds at most that an attempt to connect waits for a login; a server closes a connection without a request after
ten (``zookeeper.nio.sessionlessCnxnTimeout``)."""


def sasl_options(login: Login) -> dict[str, str | None]:
    """Return how kazoo is told a login by SASL."""
    return {"mechanism": "DIGEST-MD5", "username": login.user, "password": revealed(login.password)}


def digest(login: Login) -> set[tuple[str, str]]:
    """Return how kazoo is told a login by ``addauth digest``."""
    return {("digest", f"{login.user}:{revealed(login.password)}")}


class SessionLogin:
    """What a session logs in by.

    Args:
        logins: The logins of the client.
        auth: How they are shown to a server.
        loop: The loop of the session, on which they are asked for.
    """

    def __init__(self, logins: Logins, auth: Auth, loop: asyncio.AbstractEventLoop) -> None:
        self.by_sasl: bool = auth == "sasl"
        self._logins = logins
        self._loop = loop
        self._asking: Future[Login] | None = None
        self._is_over = False

    def ask(self, within: float, *, refused: Login | None = None) -> Login:
        """Return the newest login, on the thread of the connection; *refused* is one that a server has refused.

        Raises:
            Unavailable: There is none within so many seconds, or ``give_up`` was called.
            ConfigError: There is none.
        """
        asking = self._asking = self._asking or self._begin(refused)
        if self._is_over:  # by now: it may have ended before this was begun
            self._cancel(asking)
        within = min(within, WAIT_MAX)
        settled = threading.Event()
        asking.add_done_callback(lambda _: settled.set())
        if not settled.wait(within):
            raise Unavailable(f"{self._logins.source} has given no password within {within:.3g} s")
        self._asking = None
        try:
            return asking.result()
        except CancelledError:
            raise Unavailable("the session has ended, or its event loop") from None

    def give_up(self) -> None:
        """Wait for no login any more."""
        self._is_over = True
        if (asking := self._asking) is not None:
            self._cancel(asking)

    def _cancel(self, asking: Future[Login]) -> None:
        if not self._loop.is_closed():  # it has nothing left to cancel
            asking.cancel()

    def _begin(self, refused: Login | None) -> Future[Login]:
        async def newest() -> Login:
            if refused is not None:
                self._logins.refused(refused)
            return await self._logins.login()

        asking = newest()
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # the loop is closed
            asking.close()
            over: Future[Login] = Future()
            over.cancel()
            return over

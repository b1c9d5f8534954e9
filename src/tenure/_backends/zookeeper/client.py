"""The client of an ensemble: a session for each length of lease, and one for reading.

House rules:

- Each request has a time limit, and nothing is retried here: the caller decides whether to repeat a request.
- Sessions belong to the loop on which the first request is made, which is the renewal loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

from tenure._backends.zookeeper.address import Address, Options, require_login
from tenure._backends.zookeeper.driver import Driver
from tenure._backends.zookeeper.login import SessionLogin, digest, sasl_options
from tenure._backends.zookeeper.session import Ensemble, Session
from tenure._backends.zookeeper.touches import lease_in, session_of
from tenure._logins import Login, Source, logins_of
from tenure._opened import Fact
from tenure._option_files import require_readable
from tenure._runtime.clock import Clock
from tenure._runtime.closing import close_together
from tenure._runtime.notifier import Notifier
from tenure._runtime.tasks import Tasks
from tenure._tls_context import ReloadingContext, tls_context
from tenure.errors import ConfigError, Unavailable

READING = 0.0
"""In place of the length of a lease: a session that carries no places."""
READING_LASTS = 10.0
"""The time-out of a session that carries no places, in seconds."""

ACLS = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL, "read": CREATOR_ALL_ACL + READ_ACL_UNSAFE}


def patience(lasts: float) -> float:
    """Return the seconds to wait for an answer about a lease of *lasts* seconds: there must be time left to repeat."""
    return max(1.0, lasts / 3)


class Client:
    """All sessions of this process with one ensemble.

    Args:
        address: The servers.
        options: The options of the URL.
        clock: Measures requests and places.
        credentials: Of the caller.
    """

    def __init__(self, address: Address, options: Options, clock: Clock, credentials: Source | None = None) -> None:
        self._logins = logins_of(
            address, options, credentials, user=address.user, password=address.password, needs_user=True
        )
        require_login(address, options, has_source=not self._logins.is_fixed)
        files = require_readable(address, ca=options.ca, cert=options.cert, key=options.key)
        self.warnings: tuple[Fact, ...] = (*files, *self._logins.warnings)
        self.address = address
        self.options = options
        self.clock = clock
        self.notifier: Notifier = Notifier()
        self.has_login: bool = bool(address.user) or not self._logins.is_fixed
        self.acl: list[ACL] = ACLS[options.acl or ("creator" if self.has_login else "open")]
        self.on_change: Callable[[Session], None] = lambda session: None
        """Is called when a session has lost its connection, has got one, has expired, or can't be used any more."""
        self.context: ReloadingContext | None = _tls_of(address, options) if options.tls else None
        login = options.auth if self.has_login else ""
        source = self._logins.source
        self._ensemble = Ensemble(str(address), len(address.hosts), options.tick, login, self.context, source)
        self._sessions: dict[float, Session] = {}
        self._abandoned: set[Session] = set()
        """Sessions that are over, and whose driver still asks the servers to end them."""
        self._leaving = Tasks()
        self._closed = False

    def until(self, lease: float | None = None) -> float:
        """Return when a request that begins now is given up; there must be time left to repeat one about a *lease*."""
        return self.clock.now() + self._waits(lease)

    def _waits(self, lease: float | None = None) -> float:
        timeout = self.options.timeout
        return timeout if lease is None else min(timeout, patience(lease))

    def session(self, lease: float = READING) -> Session:
        """Return the session for leases of so many seconds, opened if there is none.

        Without *lease*, it is any one that can be used.
        """
        self.require_open()
        if lease == READING:
            usable = [session for session in self._sessions.values() if not session.is_over]
            if usable:
                return next((session for session in usable if session.is_connected), usable[0])
        found = self._sessions.get(lease)
        if found is None or found.is_over:
            lasts = session_of(lease, self.options.tick) if lease else READING_LASTS
            self._sessions[lease] = found = self.open_session(lasts, self._waits(lease or None))
        return found

    def require_open(self) -> None:
        """Refuse to go on after ``close``."""
        if self._closed:
            raise Unavailable("the backend was closed")

    def open_session(self, lasts: float, waits: float | None = None) -> Session:
        """Open one more session with this time-out; its requests wait for *waits* seconds, or for those of the URL."""
        return Session(
            self._ensemble,
            lasts=lasts,
            clock=self.clock,
            make=partial(Driver, self.address.servers, waits=waits or self.options.timeout, **self._driver_options()),
            on_watch=self.notifier.notify,
            on_change=self._on_change,
        )

    def require_time(self, session: Session, lease: float) -> None:
        """Refuse a *session* that the server lets last for too short.

        Raises:
            ConfigError: The message has the figures.
        """
        needed = session_of(lease, self.options.tick)
        if session.negotiated >= needed - 0.001:
            return
        fits = lease_in(session.negotiated, self.options.tick)
        advice = f"use ttl={fits:g} or less, or " if fits >= 2 * self.options.tick else ""
        raise ConfigError(
            f"{self.address} lets a session last {session.negotiated:g} s at most, and ttl={lease:g} s needs "
            f"{needed:g} s; {advice}raise maxSessionTimeout on every server"
        )

    def _driver_options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"context": self.context}
        fixed = Login(self.address.user, self.address.password)
        if not self._logins.is_fixed:
            given["login"] = partial(SessionLogin, self._logins, self.options.auth)
        elif self.has_login and self.options.auth == "sasl":
            given["sasl_options"] = sasl_options(fixed)
        elif self.has_login:
            given["auth_data"] = digest(fixed)
        return given

    def _on_change(self, session: Session) -> None:
        self.on_change(session)
        if session.is_left:
            self._abandoned.discard(session)
            if not self._closed:
                self._leaving.spawn(session.close(ends_session=False))  # its thread ends by itself; sockets don't
        elif session.is_over:
            self._abandoned.add(session)
        if session.is_over or session.is_connected:
            # Watches are lost with each connection, so anything may have changed.
            self.notifier.notify_all()

    async def close(self, keeps: Callable[[Session], bool]) -> None:
        """End every session, except those that *keeps* says must run out by themselves, and their threads."""
        self._closed = True
        sessions = {*self._sessions.values(), *self._abandoned}
        self._sessions.clear()
        await close_together(*(partial(one.close, ends_session=not keeps(one)) for one in sessions))
        await asyncio.gather(*self._leaving, return_exceptions=True)
        self.notifier.close()


def _tls_of(address: Address, options: Options) -> ReloadingContext:
    return tls_context(
        address, ca=options.ca, cert=options.cert, key=options.key, check_hostname=options.check_hostname
    )

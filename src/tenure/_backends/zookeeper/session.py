"""One session: its requests, each with a time limit; its watches; and for how long it certainly lasts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kazoo.exceptions import AuthFailedError, KazooException, NoAuthError, SessionExpiredError
from kazoo.protocol.states import KeeperState, WatchedEvent

from tenure._backends.zookeeper.driver import OVER, Driver
from tenure._backends.zookeeper.errors import (
    LOGIN_REFUSED,
    NO_ANSWER,
    Broken,
    Expected,
    is_hopeless,
    not_connected,
    translate,
)
from tenure._backends.zookeeper.requests import Send, exists
from tenure._backends.zookeeper.touches import EVERY, EVERY_SHARE, HEARD_AFTER, RENEWED_EARLY, Touches
from tenure._runtime.clock import Clock
from tenure._runtime.threads import in_thread
from tenure._tls_context import ReloadingContext, shown_by
from tenure.errors import TenureError, Unavailable

SILENCE_SHARE = 1 / 6
"""The share of a session's time after which a server that answers nothing is left for another one."""
SILENCE_MIN, SILENCE_MAX = 0.2, 10.0
"""The least and the most seconds for that: a busy server is not left at once."""

ABANDONED = "ABANDONED"
"""The state of a session that is only to be ended, beside those of the driver."""

Watched = tuple[str, str]
"""What a watch is set on: the kind of request that has set it, and the path."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request: its answer, or an error of the driver."""

    value: Any = None
    error: Exception | None = None
    had_worked: bool = False
    """Whether a request that needs rights was carried out before this one was sent."""


@dataclass(slots=True)
class Ensemble:
    """The servers, as all sessions of this process know them.

    Args:
        place: Their addresses, for messages.
        servers: How many there are.
        tick: Their tick in seconds.
        login: How this client logs in, as in the option ``auth``; empty if it has no user.
        tls: What their connections are encrypted by, if they are.
        source: Where the password comes from; empty: from the URL.
        has_worked: Whether a request that needs rights was carried out before.
    """

    place: str
    servers: int
    tick: float
    login: str
    tls: ReloadingContext | None = None
    source: str = ""
    has_worked: bool = False


class Session:
    """A session, from its first request until it has expired or is closed.

    Args:
        ensemble: The servers.
        lasts: The time-out to ask for, in seconds.
        clock: Measures requests.
        make: Makes the driver, from the arguments that are added here.
        on_watch: Is called with the topic of a watch that has fired.
        on_change: Is called when the connection is made, again or for the first time, or has broken; when the session
            is over, and when it is left.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        *,
        lasts: float,
        clock: Clock,
        make: Callable[..., Driver],
        on_watch: Callable[[str], None],
        on_change: Callable[[Session], None],
    ) -> None:
        self.lasts = lasts
        self.id = 0
        self.negotiated: float = 0.0
        """The time-out that the server gave it, in seconds."""
        self.is_expired = False
        """Whether it has certainly ended, with all its nodes."""
        self.is_left = False
        """Whether no server is asked anything about it any more; one that is abandoned is over before that."""
        self.touches: Touches = Touches(ensemble.tick)
        self.connections: int = 0
        """The number of connections made so far."""
        self._ensemble = ensemble
        self._every = min(EVERY * ensemble.tick, EVERY_SHARE * lasts)
        self._clock = clock
        self._on_watch = on_watch
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._silence = min(SILENCE_MAX, max(SILENCE_MIN, lasts * SILENCE_SHARE))
        patience = max(SILENCE_MIN, self._silence * 2 / max(2, ensemble.servers))
        self._driver = make(
            lasts=lasts, patience=patience, loop=self._loop, clock=clock, on_state=self._on_state, on_failure=self._wake
        )
        self._is_connected = asyncio.Event()  # or over
        self._news = asyncio.Event()  # set when the connection has changed, or could not be made
        self._over: str | None = None
        self._armed: set[Watched] = set()
        self._unanswered: dict[asyncio.Future[Reply], float] = {}  # when each was sent; the oldest first
        self._heard_at = clock.now()  # when the newest answer came, to any request
        self._sent_at = clock.now()
        self._used_until = 0.0
        self._renewed_at = -math.inf
        self._touch_at = math.inf
        """When to send a request that the leader will have heard of by the next renewal; infinity after it was sent."""
        self._watchdog: asyncio.TimerHandle | None = None
        self._toucher: asyncio.TimerHandle | None = None
        self._driver.start_async()

    # --- the connection ---

    @property
    def is_over(self) -> bool:
        """Whether it is never used again; see ``is_expired``."""
        return self._over is not None

    @property
    def is_connected(self) -> bool:
        """Whether requests can be sent now."""
        return self._is_connected.is_set() and self._over is None

    async def connected(self, until: float) -> None:
        """Wait for a connection.

        Raises:
            Unavailable: There is none at *until*, or the session has expired.
            ConfigError: The login is wrong, or the certificate of the server or of this client.
        """
        began = self._clock.now()
        while not self._is_connected.is_set():
            news, failure, known = self._news, self._driver.failure, self._ensemble
            is_over = not known.has_worked and is_hopeless(failure, known.servers)
            if is_over or self._clock.now() >= until:
                raise self._not_connected(failure, until - began) from failure
            with suppress(TimeoutError):
                async with asyncio.timeout(until - self._clock.now()):
                    await news.wait()
        if self._over is not None:
            raise self._why_over() from self._driver.failure

    def _why_over(self) -> TenureError:
        failure, known = self._driver.failure, self._ensemble
        if self._over == KeeperState.AUTH_FAILED:
            is_told = isinstance(failure, KazooException)
            refused = failure if failure is not None and is_told else AuthFailedError()
            return self.translated(refused, had_worked=known.has_worked)
        if self._over == KeeperState.CLOSED and failure is not None:
            return self._not_connected(failure, 0.0)
        if self._over == ABANDONED:
            return Unavailable(
                f"{known.place} gave no answer until all claims and places of this client had run out, so their "
                "session is left to end; tenure opens a new one"
            )
        return self.translated(SessionExpiredError())

    def _not_connected(self, failure: Exception | None, within: float) -> TenureError:
        known = self._ensemble
        if isinstance(failure, LOGIN_REFUSED):
            return self.translated(failure, had_worked=known.has_worked)
        return not_connected(
            failure,
            known.place,
            within,
            worked=known.has_worked,
            is_tls=known.tls is not None,
            tried=self._driver.tried,
            own=shown_by(known.tls),
        )

    def abandon(self) -> None:
        """Never use the session again, so that it ends.

        A request to connect renews a session, whether its answer arrives or not. So without this, a client that gets no
        answers would keep up, for as long as that lasts, what it can neither use nor delete.
        """
        self._end(ABANDONED)
        self._driver.abandon()

    def drop(self) -> None:
        """Break the connection; the driver connects again, to any server."""
        self._driver.drop()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _on_state(self, state: str, session_id: int, negotiated: float, connecting_at: float) -> None:
        if self._over is not None:
            if state in OVER and not self.is_left:
                self.is_left = True
                self._on_change(self)
            return
        self._wake()
        self._armed.clear()  # the driver forgets its watches with each connection
        if state == KeeperState.CONNECTED:
            self.id, self.negotiated = session_id, negotiated
            self.connections += 1
            self.touches.connected(connecting_at)
            self._heard_at = self._clock.now()
            self._is_connected.set()
            self._on_change(self)
        elif state in OVER:
            self.is_expired, self.is_left = state == KeeperState.EXPIRED_SESSION, True
            self._end(state)
        else:
            self._is_connected.clear()
            self._on_change(self)

    def _end(self, state: str) -> None:
        self._over = state
        self._stop_timers()
        self._is_connected.set()
        self._wake()
        self._on_change(self)

    async def close(self, *, ends_session: bool) -> None:
        """End the connection and its thread; the session with its nodes too, unless it is to run out by itself."""
        self._over = self._over or KeeperState.CLOSED
        self._stop_timers()
        self._is_connected.set()
        self._wake()
        leave = partial(self._driver.leave, ends_session=ends_session, within=self._silence)
        await in_thread("tenure-zookeeper-closing", leave)

    # --- requests ---

    def translated(self, error: Exception, *, had_worked: bool = True) -> TenureError:
        """Return an error of the driver as one of ours."""
        known = self._ensemble
        return translate(error, known.place, login=known.login, worked=had_worked, source=known.source)

    async def ask(
        self, send: Send, until: float, *, after: Send | None = None, writes: bool = False, arms: Watched | None = None
    ) -> Any:
        """Send a request when there is a connection, and return its answer.

        If the connection breaks, it is sent again on the next one: so it must be one that may be carried out twice.

        Args:
            send: Hands the request to the driver.
            until: When to give up.
            after: A request that needs no rights, to be carried out before it, on the same connection.
            writes: Whether the request goes through the leader, and a majority of the servers.
            arms: The watch that it sets, if it succeeds.

        Raises:
            NoNodeError, NodeExistsError, BadVersionError, NotEmptyError: As the server has answered.
            Unavailable: There was no answer.
            ConfigError: The server will never do it.
        """
        while True:
            await self.connected(until)
            try:
                before = self.send(after, needs_rights=False) if after is not None else None
                reply = self.send(send, writes=writes, arms=arms)
                if before is not None:
                    await self.answer(before, until)
                return await self.answer(reply, until)
            except Broken:
                if self._clock.now() >= until:
                    raise

    async def ask_each(self, sends: Sequence[Send], until: float, *, after: Send | None = None) -> list[Any]:
        """Send many requests together as :meth:`ask` does; return of each the answer, or the error that is expected.

        A node that this client has no rights for must not hide the rest: then it is the ``TenureError`` that says so.
        They are answered in their order; those without an answer when the connection breaks are sent again.
        """
        found: list[Any] = []
        while True:
            await self.connected(until)
            try:
                before = self.send(after, needs_rights=False) if after is not None else None
                replies = [self.send(send) for send in sends[len(found) :]]
                if before is not None:
                    await self.answer(before, until)
                    after = None
                for reply in replies:
                    outcome = await self._outcome(reply, until)
                    found.append(outcome)  # one by one: they are kept if the connection breaks now
            except Broken:
                if self._clock.now() >= until:
                    raise
            else:
                return found

    async def _outcome(self, reply: asyncio.Future[Reply], until: float) -> Any:
        try:
            return await self.answer(reply, until)
        except Expected as error:
            return error
        except TenureError as error:
            if isinstance(error.__cause__, NoAuthError):
                return error
            raise

    def send(
        self, send: Send, *, writes: bool = False, arms: Watched | None = None, needs_rights: bool = True
    ) -> asyncio.Future[Reply]:
        """Send a request now; several of them are carried out in this order. There must be a connection."""
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._sent_at = sent_at = self._clock.now()
        note = partial(
            self._note, reply, sent_at, self.connections, writes, arms, needs_rights, self._ensemble.has_worked
        )
        self._unanswered[reply] = sent_at
        send(self._driver).rawlink(note)
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._silence, self._watch_silence)
        return reply

    async def answer(self, reply: asyncio.Future[Reply], until: float) -> Any:
        """Wait for the answer to a request that was sent; the request is not called off if this is cancelled."""
        asked_at = self._clock.now()
        await asyncio.wait({reply}, timeout=max(0.0, until - asked_at))
        if not reply.done():
            raise Unavailable(
                f"{self._ensemble.place} gave no answer within {until - asked_at:.3g} s; the request may have been "
                "executed"
            )
        return self.value(reply.result())

    def value(self, reply: Reply) -> Any:
        """Return the answer in *reply*, or raise its error."""
        if reply.error is None:
            return reply.value
        if isinstance(reply.error, Expected):
            raise reply.error
        if not isinstance(reply.error, KazooException):
            raise reply.error  # a bug, in tenure or in the driver
        raise self.translated(reply.error, had_worked=reply.had_worked) from reply.error

    def _note(
        self,
        reply: asyncio.Future[Reply],
        sent_at: float,
        connection: int,
        writes: bool,
        arms: Watched | None,
        needs_rights: bool,
        had_worked: bool,
        result: Any,
    ) -> None:
        """Note the outcome of a request; called on the loop."""
        error, now = result.exception, self._clock.now()
        del self._unanswered[reply]
        if not isinstance(error, NO_ANSWER) and connection == self.connections and self.is_connected:
            self._heard_at = now
            self.touches.answered(sent_at, now)
            if error is None:
                self._ensemble.has_worked |= needs_rights
                if writes:
                    self.touches.written(sent_at)
                if arms is not None:
                    self._armed.add(arms)
        if not reply.done():
            reply.set_result(Reply(result.value, error, had_worked))

    def _watch_silence(self) -> None:
        """Leave a server that answers nothing: it may be cut off, and another one may answer in time."""
        self._watchdog = None
        if not self._unanswered or self._over is not None:
            return
        now = self._clock.now()
        silent_since = max(next(iter(self._unanswered.values())), self._heard_at)
        if self.is_connected and now - silent_since >= self._silence:
            self.drop()
            silent_since = now
        wait = max(self._silence / 10, silent_since + self._silence - now)
        self._watchdog = self._loop.call_later(wait, self._watch_silence)

    # --- watches ---

    def is_armed(self, watched: Watched) -> bool:
        """Return whether the watch on *watched* is set, and has not fired: then nothing has changed there."""
        return watched in self._armed

    def watcher(self, watched: Watched, topic: str, *, anew: bool = False) -> Callable[[WatchedEvent], None] | None:
        """Return what to set as the watch on *watched*; None if it is set already, unless it is to be set *anew*."""
        if watched in self._armed and not anew:
            return None
        return partial(self._fired, watched, topic)

    def _fired(self, watched: Watched, topic: str, event: WatchedEvent) -> None:
        self._armed.discard(watched)
        self._on_watch(topic)

    # --- in use ---

    def use(self, until: float) -> None:
        """Keep the leader of the ensemble informed about this session, up to the time *until*; see ``touches``."""
        self._used_until = max(self._used_until, until)
        if self._toucher is None and self._over is None:
            self._toucher = self._loop.call_later(self._every, self._touch)

    def note_renewal(self, asked_at: float, lease: float) -> None:
        """Note that claims were renewed at *asked_at*; the next renewal is likely after as much time as this one."""
        since = asked_at - self._renewed_at
        if since == 0.0:  # more claims than one request holds
            return
        self._renewed_at = asked_at
        usual = since if since < lease else lease / 3
        wait = RENEWED_EARLY * usual - HEARD_AFTER * self._ensemble.tick
        self._touch_at = asked_at + wait if wait > 0.0 else math.inf  # a tick before it, there was this renewal
        if self._toucher is not None:
            self._toucher.cancel()
            self._toucher = self._loop.call_later(max(0.001, self._touch_due() - self._clock.now()), self._touch)

    def _touch(self) -> None:
        self._toucher = None
        now = self._clock.now()
        if now >= self._used_until or self._over is not None:
            return
        if now >= self._touch_due():
            if self.is_connected:
                self.send(exists("/"), needs_rights=False)
            self._sent_at, self._touch_at = now, math.inf
        self._toucher = self._loop.call_later(max(0.001, self._touch_due() - now), self._touch)

    def _touch_due(self) -> float:
        return min(self._sent_at + self._every, self._touch_at)

    def _stop_timers(self) -> None:
        for timer in (self._watchdog, self._toucher):
            if timer is not None:
                timer.cancel()
        self._watchdog = self._toucher = None

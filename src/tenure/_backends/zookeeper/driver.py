"""kazoo, with its results on an event loop: one thread for each session, and no code of ours or of users on it.

House rules:

- kazoo's own threads for callbacks are not started: the results of requests, watches and changes of the connection are
  posted to the loop.
- A session that has ended is not replaced by kazoo. Its nodes are gone, so this is for the caller to do.
- kazoo's thread keeps a session up by itself only while the loop runs: places end at the end of their time by requests
  from there, so if it is blocked, they end with the session.
- An abandoned session is never connected again: that would renew it. Its thread asks the servers to end it, without
  waiting for an answer first, so that this also works if no answer arrives.
- No wait of the connection's thread is longer than the session's ``patience``, so that a server that doesn't respond
  doesn't use up the time in which another one could be asked.
- Where the password has a source, each connection logs in by SASL with the newest one. One that is refused is asked for
  once more, at once. Then a session that was never let in is over; one that was is tried again until it has expired or
  is abandoned: its nodes stand meanwhile, and the servers, or the source, may learn of the password late.
- The state is connected when the login was accepted. Otherwise a request that is made just as it is refused would be
  told that the session has ended.
- With ``auth=digest``, the password is a part of the name of the user that owns the session's nodes. So a session keeps
  the one that it has begun with.

This is the only module that uses what kazoo doesn't document; :class:`Driver` lists it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped, SASLException
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler
from kazoo.protocol.connection import _CONNECTION_DROP, STOP_CONNECTING, ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect, Create2
from kazoo.protocol.states import KeeperState
from kazoo.retry import ForceRetryError, KazooRetry
from kazoo.security import ACL

from tenure._backends.zookeeper.errors import LOGIN_REFUSED
from tenure._backends.zookeeper.login import SessionLogin, digest, sasl_options
from tenure._logins import Login
from tenure._runtime.clock import Clock
from tenure.errors import TenureError

OVER = frozenset({KeeperState.EXPIRED_SESSION, KeeperState.AUTH_FAILED, KeeperState.CLOSED})
"""The states after which a session is never used again."""

RECONNECT_FIRST, RECONNECT_MAX = 0.02, 2.0
"""Seconds between two attempts to reach a server, at first and at most."""
RECONNECT_SHARE = 1 / 3
"""The share that such a pause takes at most of a session's time-out, before whose end a server must be reached; and of
the time that a request waits: one that is asked when the server is back is answered."""
ASKED_AGAIN = 1 / 16
"""Times a session's time-out until a request to end it is repeated that was sent, and not answered. This doubles each
time: where only the first half of it is carried out, which asks for the shortest time-out that the servers give, the
session must end in one of these pauses."""
ASKED_AGAIN_MAX = 2.0
"""The most that this grows to."""
ANSWERS_MAX = 8
"""How often more of the answer to that request is read; the whole answer is some 60 bytes."""
JITTER = 0.5
"""The share by which a pause is shorter or longer, at random."""

# In no tree of loggers: handlers of the root logger are user code, and would run on its thread.
_SILENT = logging.Logger("kazoo")  # noqa: LOG001
_SILENT.disabled = True


def reconnecting(lasts: float, waits: float) -> KazooRetry:
    """Return the pauses between attempts to reach a server, for a session that *lasts* so many seconds.

    Unlike those of our own clients, they delay requests, which wait for *waits* seconds.
    """
    longest = min(RECONNECT_MAX, RECONNECT_SHARE * min(lasts, waits))
    most = longest / (1.0 + JITTER)  # kazoo applies its jitter after its limit
    return KazooRetry(max_tries=-1, delay=RECONNECT_FIRST, backoff=2, max_jitter=JITTER, max_delay=most)


class CreateContainer(Create2):
    """The request to create a container, which kazoo doesn't know."""

    type = 19
    flags_of_containers = 4


class StateListener(Protocol):
    """Is told of a session's connection, on the loop."""

    def __call__(self, state: str, session_id: int, negotiated: float, connecting_at: float) -> None:
        """Note the new *state*; the rest is about the connection that was made last."""
        ...


class _ToLoop:
    """Stands in for kazoo's queue of completed requests: they are called on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def put(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and everything that waited on it
            self._loop.call_soon_threadsafe(call)


class _Handler(SequentialThreadingHandler):
    """kazoo's handler for threads, without its threads for callbacks.

    Args:
        loop: Gets all results.
        clock: Says when connecting began.
        patience: The longest wait for a server, in seconds.
        context: For TLS.
        on_failure: Is called on the loop when a server could not be reached; ``failure`` has the reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        patience: float,
        context: ssl.SSLContext | None,
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__()
        self.completion_queue = _ToLoop(loop)
        self.connecting_at = clock.now()
        self.tried = ""
        """Host and port of the server that was tried last."""
        self.failure: Exception | None = None
        """Why the last attempt to connect has failed; None after a success."""
        self._clock = clock
        self._patience = patience
        self._context = context
        self._on_failure = on_failure
        self._has_run = True

    def has_run(self) -> bool:
        """Return whether the loop has run since the last call."""
        has_run, self._has_run = self._has_run, False
        self.completion_queue.put(self._note_run)
        return has_run

    def _note_run(self) -> None:
        self._has_run = True

    @property
    def running(self) -> bool:
        """Always: its only queue is the loop."""
        return True

    def start(self) -> None:
        """Start no threads."""

    def stop(self) -> None:
        """Stop nothing."""

    def dispatch_callback(self, callback: Any) -> None:
        """Post the call of a watch to the loop."""
        self.completion_queue.put(lambda: callback.func(*callback.args))

    def async_result(self) -> AsyncResult:
        """Return what gets the answer to a request."""
        return AsyncResult(self)

    def spawn(self, func: Callable[..., object], *args: object, **kwargs: object) -> threading.Thread:
        """Start the thread of the connection."""
        thread = threading.Thread(target=func, args=args, kwargs=kwargs, name="tenure-zookeeper", daemon=True)
        thread.start()
        return thread

    def select(self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None = None) -> Any:
        """Wait for a socket, and not for too long: kazoo would wait for most of the session's time.

        It is called for each request and each answer, and kazoo's own function would make a selector each time.
        """
        most = self._patience if timeout is None else min(timeout, self._patience)
        wanted = {one.fileno(): (one, rlist) for one in rlist} | {one.fileno(): (one, wlist) for one in wlist}
        poll = select.poll()
        for number, (_, kind) in wanted.items():
            poll.register(number, select.POLLIN if kind is rlist else select.POLLOUT)
        ready = [wanted[number] for number, _ in poll.poll(math.ceil(most * 1_000))]
        return [one for one, kind in ready if kind is rlist], [one for one, kind in ready if kind is wlist], []

    def create_connection(self, address: tuple[str, int], hostname: str | None = None, **_: Any) -> socket.socket:
        """Connect to a server; kazoo itself leaves a socket open if it doesn't trust the server."""
        self.note_connecting()
        self.tried = f"{hostname or address[0]}:{address[1]}"
        try:
            made = socket.create_connection(address, self._patience)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                made = self._context.wrap_socket(made, server_hostname=hostname)
        except Exception as error:
            self.note_failure(error)
            raise
        self.failure = None
        return made

    def note_connecting(self) -> None:
        """Note that connecting begins now."""
        self.connecting_at = self._clock.now()

    def note_failure(self, error: Exception) -> None:
        """Note why an attempt to connect has failed."""
        self.failure = error
        self.tell_failure()

    def tell_failure(self) -> None:
        """Let the loop know that an attempt to connect has failed."""
        self.completion_queue.put(self._on_failure)


class _Refused(Exception):
    """A server has refused this login; *why* is the driver's error."""

    def __init__(self, login: Login, why: Exception) -> None:
        super().__init__("the login was refused")
        self.login = login
        self.why = why


class _Connection(ConnectionHandler):
    """kazoo's connection; it also notes how long the server lets the session last.

    Args:
        login: What it logs in by; None without a login, or with that of the options.
        patience: The longest wait for it, in seconds.
        options: Arguments of ``ConnectionHandler``.
    """

    def __init__(self, *arguments: Any, login: SessionLogin | None, patience: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.negotiated: float = 0.0
        self.login_failure: Exception | None = None
        """Why there was no login for the last attempt, or a server has refused it; None after a success."""
        self.is_let_in: bool = False
        """Whether the last attempt has connected, and logged in if there is a login."""
        self._login = login
        self._patience = patience
        self._shown: Login | None = None
        self._refused: _Refused | None = None
        self._was_let_in = False
        self._asked_again = ASKED_AGAIN

    def _invoke(self, timeout: float, request: Any, xid: Any = None) -> Any:
        if self._login is not None and isinstance(request, Connect):
            self._prepare_login(self._login)
        try:
            answer = super()._invoke(timeout, request, xid)
        except ConnectionDropped as error:
            # By TLS 1.3, a server refuses the client's certificate after the handshake.
            if isinstance(error.__context__, ssl.SSLError):
                self.handler.note_failure(error.__context__)
            raise
        if isinstance(request, Connect):
            self.negotiated = answer[0].time_out / 1_000
        return answer

    def _expand_client_hosts(self) -> Any:
        found = super()._expand_client_hosts()
        if not found:  # kazoo doesn't keep why
            host, port = self.client.hosts[0]
            self.handler.tried = f"{host}:{port}"
            try:
                socket.getaddrinfo(host, port)
            except OSError as error:
                self.handler.note_failure(error)
        return found

    def _connect_loop(self, retry: KazooRetry) -> Any:
        if not self.client.is_abandoned:
            return super()._connect_loop(retry)
        is_sent = False
        for place in self._expand_client_hosts():
            is_sent_here, is_answered = self._ask_to_end(*place)
            if is_answered or self.client._stopped.is_set():
                return STOP_CONNECTING
            is_sent |= is_sent_here
        if is_sent:
            self.client._stopped.wait(self.negotiated * self._asked_again)
            self._asked_again = min(2 * self._asked_again, ASKED_AGAIN_MAX)
        raise ForceRetryError("the session may not have ended")

    def _ask_to_end(self, host: str, address: str, port: int) -> tuple[bool, bool]:
        """Ask a server to end the session; return whether the request was sent, and whether it was answered.

        It is one message: connect, for the shortest time, and close. So nothing depends on an answer to the first part.
        """
        client = self.client
        connect = Connect(0, 0, 1, client._session_id or 0, client._session_passwd, False).serialize()
        close = struct.pack("!ii", 1, CloseInstance.type)
        is_sent = is_answered = False
        with suppress(OSError), self.handler.create_connection((address, port), hostname=host) as made:
            made.sendall(b"".join(struct.pack("!i", len(part)) + part for part in (connect, close)))
            is_sent = True
            for _ in range(ANSWERS_MAX):  # to the end: closed too early, the second part may be thrown away
                if not made.recv(4_096):
                    break
                is_answered = True
        return is_sent, is_answered

    def _send_ping(self, connect_timeout: float) -> None:
        if self.handler.has_run():
            super()._send_ping(connect_timeout)

    def _connect_attempt(self, *arguments: Any) -> Any:
        if self.client.is_abandoned:  # since the first one of this round
            return None
        try:
            return self._let_in(*arguments)
        except Exception as error:  # a refused login, for example; kazoo would let its thread fail
            self.handler.failure = error
            is_refused = isinstance(error, (SASLException, *LOGIN_REFUSED))
            self.client._session_callback(KeeperState.AUTH_FAILED if is_refused else KeeperState.CLOSED)
            return STOP_CONNECTING

    def _let_in(self, *arguments: Any) -> Any:
        """Connect; if the login is refused, again with another one: it may be replaced just now."""
        while True:
            try:
                return super()._connect_attempt(*arguments)
            except _Refused as refused:
                self._note_login_failure(refused.why)
                is_first, self._refused = self._refused is None, refused
                if is_first:
                    continue
                self._refused = None
                if not self._was_let_in:
                    raise refused.why from None
                return None

    def _connect(self, *arguments: Any) -> Any:
        self.is_let_in = False
        made = super()._connect(*arguments)
        self.is_let_in = self._was_let_in = True
        self.login_failure = self._shown = self._refused = None
        self.client._session_callback(KeeperState.CONNECTED)
        return made

    def _prepare_login(self, source: SessionLogin) -> None:
        """Get what this connection logs in by, before it connects.

        Raises:
            ConnectionDropped: There is nothing.
            _Refused: It was refused before.
        """
        if not source.by_sasl and self.client._session_id:
            return
        try:
            login = source.ask(self._patience, refused=self._refused.login if self._refused else None)
        except TenureError as error:
            self._note_login_failure(error)
            raise ConnectionDropped("there is no login") from error
        if self.client.is_abandoned or self.client._stopped.is_set():
            raise ConnectionDropped("it was given up")
        if self._refused is not None and self._refused.login.is_same(login):
            raise self._refused
        if not isinstance(self.login_failure, LOGIN_REFUSED):
            self.login_failure = None
        self.handler.note_connecting()
        if source.by_sasl:
            self._shown, self.sasl_options = login, sasl_options(login)
        else:
            self.client.auth_data = digest(login)

    def _authenticate_with_sasl(self, host: str, timeout: float) -> None:
        try:
            super()._authenticate_with_sasl(host, timeout)
        except LOGIN_REFUSED as error:
            if self._shown is None:
                raise
            raise _Refused(self._shown, error) from error

    def _note_login_failure(self, error: Exception) -> None:
        self.login_failure = error
        self.handler.tell_failure()

    def give_up(self) -> None:
        """Wait for no login any more."""
        if self._login is not None:
            self._login.give_up()


class Driver(KazooClient):
    """One session. The first ``start_async`` connects; after its end, it isn't used again.

    Undocumented parts of kazoo that are used here: ``_session_callback`` is called, on the connection's thread, at each
    change of state; ``_session_id`` and ``_session_passwd`` name the session; ``_connection`` has the connection, with
    ``_invoke`` for the requests while connecting, ``_send_ping`` for what keeps an idle session up,
    ``_expand_client_hosts`` for the addresses of all servers, ``_connect_attempt`` for one of them, and
    ``_connect_loop`` for an attempt at each; ``_connect`` connects and logs in, and calls ``_authenticate_with_sasl``
    for a login by ``sasl_options``; setting ``_stopped`` keeps it from connecting again; ``_call`` with
    ``_CONNECTION_DROP``, as in kazoo's own test harness, breaks the connection.

    Args:
        servers: Where to connect, as ``host:port,host:port``.
        lasts: The time-out of the session to ask for, in seconds.
        patience: The longest wait for one server, in seconds.
        waits: The seconds for which requests wait for an answer, the least patient of them.
        loop: Gets all results.
        clock: Says when connecting began.
        on_state: Is told of the connection, on the loop.
        on_failure: Is called, on the loop, when a server could not be reached.
        context: For TLS; None without.
        login: Makes what it logs in by, of its loop, if that is to be asked for.
        options: More arguments of ``KazooClient``.
    """

    def __init__(
        self,
        servers: str,
        *,
        lasts: float,
        patience: float,
        waits: float,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_state: StateListener,
        on_failure: Callable[[], None],
        context: ssl.SSLContext | None = None,
        login: Callable[[asyncio.AbstractEventLoop], SessionLogin] | None = None,
        **options: Any,
    ) -> None:
        self._loop = loop
        self._on_state = on_state
        self.is_abandoned = False
        """Whether its session is only to be ended."""
        handler = _Handler(loop, clock, patience, context, on_failure)
        retry = reconnecting(lasts, waits)
        super().__init__(servers, timeout=lasts, handler=handler, connection_retry=retry, logger=_SILENT, **options)
        self._connection = _Connection(
            self,
            self._conn_retry.copy(),
            login=login(loop) if login is not None else None,
            patience=patience,
            logger=_SILENT,
            sasl_options=options.get("sasl_options"),
        )

    @property
    def failure(self) -> Exception | None:
        """Why the last attempt to connect has failed; None after a success."""
        failure: Exception | None = self.handler.failure or self._connection.login_failure
        return failure

    @property
    def tried(self) -> str:
        """Host and port of the server that was tried last."""
        return str(self.handler.tried)

    def create_container_async(self, path: str, acl: Sequence[ACL]) -> AsyncResult:
        """Create a node without data, which the servers remove some time after its last child."""
        result = self.handler.async_result()
        self._call(CreateContainer(path, b"", acl, CreateContainer.flags_of_containers), result)
        return result

    def drop(self) -> None:
        """Break the connection, and connect to a server again."""
        self._call(_CONNECTION_DROP, self.handler.async_result())

    def abandon(self) -> None:
        """Never connect again, and ask the servers to end the session until one answers; then the state is closed."""
        self.is_abandoned = True
        self._connection.give_up()
        self.drop()

    def leave(self, *, ends_session: bool, within: float) -> None:
        """End the connection and its thread; call it in another thread than the loop's.

        Args:
            ends_session: Whether to end the session, with all its nodes; otherwise it runs out by itself.
            within: The longest time to wait for the server, in seconds.
        """
        thread = self._connection._connection_routine
        if thread is not None:
            if ends_session and self.connected:
                ended = threading.Thread(target=self._stop, name="tenure-zookeeper-end", daemon=True)
                ended.start()
                ended.join(within)
            self._stopped.set()
            self._connection.give_up()
            while thread.is_alive():
                with suppress(Exception):
                    self.drop()
                thread.join(0.2)
        with suppress(Exception):
            self.close()

    def _stop(self) -> None:
        with suppress(Exception):
            self.stop()

    def _session_callback(self, state: str) -> None:
        if state == self._state or (state == KeeperState.CONNECTED and not self._connection.is_let_in):
            return
        if state in OVER:
            self._stopped.set()
        super()._session_callback(state)
        made = self._connection.negotiated, self.handler.connecting_at
        self.handler.completion_queue.put(partial(self._on_state, state, self._session_id or 0, *made))

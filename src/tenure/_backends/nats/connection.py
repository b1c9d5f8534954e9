"""One connection to a NATS server, and the answers that come over it.

nats-py would reconnect by itself, and send later what was given up meanwhile. Here a connection that is lost ends: all
that waits for an answer is told so, and the client opens another one for the next request. So every request belongs to
one connection, and a lock to the server that gave it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.client import Client as Driver
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tenure._backends.nats.address import Options
from tenure._backends.nats.errors import (
    Disconnected,
    HandshakeFailed,
    NoJetStream,
    NotPermitted,
    is_login_refused,
)
from tenure._backends.nats.login_files import login_of
from tenure._backends.nats.transport import Transport
from tenure._logins import Login
from tenure._secret import Secret, hide, revealed
from tenure._tls_failures import NoTls

Headers = Mapping[str, str]
Request = tuple[str, bytes, Headers | None]
"""A subject, a body and headers."""

_PLAIN = b"NATS/1.0\r\n"

NO_RESPONDERS = "503"
CLOSE_MAX = 1.0
UNSUBSCRIBE_MAX = 5.0
_PENDING_BYTES = 256 * 2**20  # of messages that were received, and whose callback has not run


class _Driver(Driver):
    """The driver, which stops reading, without a word, at subjects and first lines that are no UTF-8."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if not subject.isascii():
            subject = subject.decode("utf-8", "replace").encode()
        if not reply.isascii():
            reply = reply.decode("utf-8", "replace").encode()
        await super()._process_msg(sid, subject, reply, data, headers)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        return (headers_of(headers) or None) if headers else None


def headers_of(raw: bytes) -> dict[str, str]:
    """Return the headers of a message, and the status in its first line; what is no UTF-8 is replaced.

    Lines that are no headers are left out. Any program can have written them.
    """
    found: dict[str, str] = {}
    lines = raw.split(b"\r\n")
    if not raw.startswith(_PLAIN):
        status, _, description = lines[0].partition(b" ")[2].strip().decode("ascii", "replace").partition(" ")
        if len(status) == 3 and status.isascii() and status.isdecimal():
            found["Status"] = status
            if description:
                found["Description"] = description
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        name = name.strip()
        if colon and name.isascii() and len(name.split()) == 1:
            found[name.decode()] = value.strip().decode("utf-8", "replace")
    return found


def status_of(message: Msg) -> str | None:
    """Return the status of an answer that is no message of a stream, such as ``404``."""
    return message.headers.get("Status") if message.headers else None


class Connection:
    """An open connection; it is used on the loop that opened it."""

    def __init__(self, driver: Driver, transport: Transport, server: str, login: Login) -> None:
        self._driver = driver
        self._transport = transport
        self.server: str = server
        self.login: Login = login
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._asked: OrderedDict[str, str] = OrderedDict()
        """By token, as sent: the subjects of requests without an answer or a refusal, also of those given up."""
        self._quotable: list[Secret] = []  # of a login file
        self._last = 0
        self._inbox = ""
        self._lost: Disconnected | None = None
        self._is_closing = False
        self._on_lost: set[Callable[[], None]] = set()
        self._on_refused: dict[str, set[Callable[[Exception], None]]] = {}
        self._failure: Exception | None = None  # of the last attempt to connect
        self._refused: set[str] = set()  # by the server, with the subject, of subscriptions

    @classmethod
    async def open(
        cls, server: str, login: Login, options: Options, tls: ssl.SSLContext | None, within: float
    ) -> Connection:
        """Connect to *server* within *within* seconds, with *login*, or with that of a file that *options* name."""
        of_file, secrets = login_of(options)
        hide(*secrets)
        secret = revealed(login.password)
        driver, transport = _Driver(), Transport(wants_tls=options.wants_tls)
        driver._transport = transport  # there is no option for that
        connection = cls(driver, transport, server, login)
        connection._quotable = secrets
        more: dict[str, Any] = {"tls": tls} if tls is not None else {}
        try:
            await driver.connect(
                f"{'tls' if options.wants_tls else 'nats'}://{server}",
                allow_reconnect=False,
                # Two attempts, one after the other: with 0, there would be no end of them.
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=within,  # type: ignore[arg-type]  # it takes a float, too
                ping_interval=10,
                error_cb=connection._on_error,
                closed_cb=connection._on_closed,
                user=login.user,
                password=secret if login.user else None,
                token=None if login.user else secret,
                name="tenure",
                inbox_prefix=options.inbox,
                **of_file,
                **more,
            )
            connection._inbox = driver.new_inbox()  # which begins as the option says from here on
            await driver.subscribe(
                f"{connection._inbox}.*", cb=connection._on_answer, pending_bytes_limit=_PENDING_BYTES
            )
        except BaseException as error:
            await connection.close()
            failure = (connection._failure or error) if isinstance(error, nats.errors.NoServersError) else error
            if isinstance(failure, Exception) and (cause := _of_tls(failure) or transport.lost_by_tls):
                raise HandshakeFailed(server) from cause
            if failure is error:
                raise
            raise failure from error
        return connection

    # --- the connection ---

    @property
    def is_lost(self) -> bool:
        """Whether it can't be used any more."""
        return self._lost is not None or self._driver.is_closed

    @property
    def is_login_over(self) -> bool:
        """Whether the server has ended it because it doesn't accept its login any more."""
        return self._lost is not None and is_login_refused(self._lost)

    @property
    def server_id(self) -> str:
        """The identity of the server's process: another one after each start."""
        return str(self._driver._server_info.get("server_id", ""))  # no public name

    @property
    def version(self) -> tuple[int, int, int]:
        """The version of the server."""
        found = self._driver.connected_server_version
        return found.major, found.minor, found.patch

    @property
    def cluster(self) -> str:
        """The name of the server's cluster; empty if it stands alone."""
        return str(self._driver._server_info.get("cluster", ""))

    @property
    def requires_tls(self) -> bool:
        """Whether the server takes encrypted connections only."""
        return bool(self._driver._server_info.get("tls_required"))

    @property
    def max_payload(self) -> int:
        """The largest message in bytes that the server takes, headers included."""
        return self._driver.max_payload

    def when_lost(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call *act* once the connection is lost or closed, at once if it is; return what takes that back."""
        if self.is_lost:
            act()
        else:
            self._on_lost.add(act)
        return lambda: self._on_lost.discard(act)

    def when_refused(self, subject: str, act: Callable[[Exception], None]) -> Callable[[], None]:
        """Call *act* if the server does not permit to publish to *subject*; return what takes that back."""
        acts = self._on_refused.setdefault(subject, set())
        acts.add(act)

        def take_back() -> None:
            acts.discard(act)
            if not acts:
                self._on_refused.pop(subject, None)

        return take_back

    def check(self) -> None:
        """Raise ``Disconnected`` if it is lost."""
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        """Close it; what still waits for an answer gets ``Disconnected``. A second call does nothing."""
        self._lose("this program has closed it")
        if self._is_closing:  # the driver returns at once then, although the first call may still write
            return
        self._is_closing = True
        try:
            with suppress(OSError, nats.errors.Error, TimeoutError):
                async with asyncio.timeout(CLOSE_MAX):  # it would wait until all is written
                    await self._driver.close()
        finally:
            self._transport.drop()

    # --- requests ---

    async def publish(
        self, subject: str, body: bytes = b"", *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Send a message, whose answer, if any, goes to the subject *reply*."""
        self.check()
        await self._driver.publish(subject, body, reply, dict(headers) if headers else None)

    async def begin(self, subject: str, body: bytes = b"", headers: Headers | None = None) -> asyncio.Future[Msg]:
        """Send a request, and return the future of its answer."""
        self._last += 1
        token = str(self._last)
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._answers[token], self._asked[token] = answer, subject
        try:
            await self.publish(subject, body, reply=f"{self._inbox}.{token}", headers=headers)
        except BaseException:
            del self._answers[token]
            raise
        if self._lost is not None and not answer.done():
            answer.set_exception(self._lost)
        answer.add_done_callback(lambda _: self._answers.pop(token, None))
        return answer

    async def request(self, subject: str, body: bytes = b"", headers: Headers | None = None) -> Msg:
        """Send a request, and return its answer.

        Raises:
            NoJetStream: Nothing listens to *subject*.
            Disconnected: The connection was lost first.
        """
        answer = await (await self.begin(subject, body, headers))
        if has_no_stream(answer):
            raise NoJetStream(subject)
        return answer

    async def request_all(
        self,
        requests: Sequence[Request],
        is_gone: Callable[[], Awaitable[bool]] | None = None,
        after: float = 0.0,
    ) -> list[Msg | None]:
        """Send many requests, and return their answers in order, also those of ``has_no_stream``.

        Args:
            is_gone: If given, asked beside each answer that takes *after* seconds, and again after twice as long:
                whether what the requests are for is gone. Then those that were not answered have None.

        Raises:
            Disconnected: The connection was lost first.
        """
        answers = [await self.begin(subject, body, headers) for subject, body, headers in requests]
        try:
            for answer in answers:
                if is_gone is not None and await _is_gone_before(answer, is_gone, after):
                    return [one.result() if one.done() else None for one in answers]
                await answer
        finally:
            for answer in answers:
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()  # it is reported by the first that fails
        return [answer.result() for answer in answers]

    async def subscribe(self, subject: str, on_message: Callable[[Msg], None]) -> Subscription:
        """Call *on_message* for every message to *subject*, a wildcard or the new inbox of a pull."""

        async def receive(message: Msg) -> None:
            on_message(message)

        return await self._driver.subscribe(subject, cb=receive, pending_bytes_limit=_PENDING_BYTES)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription, once all that the server has sent for it has been passed on."""
        with suppress(nats.errors.Error, OSError):  # TimeoutError is one; the connection is lost, or being closed
            async with asyncio.timeout(UNSUBSCRIBE_MAX):
                await self._driver._send_unsubscribe(subscription._id)
                await self.flush()
                await subscription._pending_queue.join()
                await subscription.unsubscribe()

    def may_subscribe(self, subject: str) -> bool:
        """Return whether the server has not refused this user a subscription; known after a ``flush``."""
        return not any(f'"{subject.lower()}"' in text for text in self._refused)

    async def flush(self) -> None:
        """Wait until the server has processed all that was sent."""
        # By itself, the driver's flush sends its PING before what waits to be sent.
        await self._driver._flush_pending(force_flush=True)
        await self._driver.flush()

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return self._driver.new_inbox()

    # --- called by the driver ---

    async def _on_answer(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        if self._asked.pop(token, None) is None:  # it had an answer, or a refusal
            return
        # A refusal comes before the answers to all later requests: those that were given up before this one get none.
        while self._asked and self._awaited(first := next(iter(self._asked))) is None and int(first) < int(token):
            del self._asked[first]
        if (answer := self._awaited(token)) is not None:
            answer.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        self._failure = error
        text = str(error).removeprefix("nats: ").lower()  # as the driver writes it, and some versions don't
        if "permissions violation" not in text:
            return
        if "for subscription" in text:
            self._refused.add(text)
            return
        # The server names the subject only. It refuses each request to it, in their order: a refusal that came late
        # must not reach a request that was permitted since.
        token = next((one for one, subject in self._asked.items() if f'"{subject.lower()}"' in text), None)
        if token is not None:
            subject = self._asked.pop(token)
            if (answer := self._awaited(token)) is not None:
                answer.set_exception(_not_permitted(subject))
        for subject, acts in list(self._on_refused.items()):
            if f'"{subject.lower()}"' in text:
                for act in list(acts):
                    act(_not_permitted(subject))

    def _awaited(self, token: str) -> asyncio.Future[Msg] | None:
        """Return the future of an answer; None if the request was given up."""
        answer = self._answers.get(token)
        return None if answer is None or answer.done() else answer

    async def _on_closed(self) -> None:
        self._lose(str(self._driver.last_error or "by the server"))

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        self._lost = Disconnected(why.removeprefix("nats: "))
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(self._lost)
        for act in list(self._on_lost):
            act()
        self._on_lost.clear()


def _not_permitted(subject: str) -> NotPermitted:
    """Return the refusal of a request in the server's words, with the *subject* as it was sent."""
    return NotPermitted(f'permissions violation for publish to "{subject}"')


def _of_tls(error: Exception) -> Exception | None:
    """Return why TLS has failed, if *error* says that it has."""
    if isinstance(error, nats.errors.SecureConnRequiredError | nats.errors.SecureConnWantedError):
        return NoTls()
    return error if isinstance(error, ssl.SSLError) else None


def has_no_stream(message: Msg) -> bool:
    """Whether *message* says that nothing listens to the subject of the request."""
    return not message.data and status_of(message) == NO_RESPONDERS


async def _is_gone_before(answer: asyncio.Future[Msg], is_gone: Callable[[], Awaitable[bool]], after: float) -> bool:
    """Wait for an *answer*; return whether *is_gone*, asked meanwhile, says that there will be none."""
    while not answer.done():
        await asyncio.wait((answer,), timeout=after)
        if answer.done():
            break
        asking = asyncio.ensure_future(is_gone())
        try:
            await asyncio.wait((answer, asking), return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.result() and not answer.done():
                return True
        finally:
            asking.cancel()
        after *= 2
    return False

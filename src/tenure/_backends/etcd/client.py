"""The client of an etcd: its JSON gateway over HTTP, each request on one member after another until one answers.

House rules:

- Each request has a time limit for everything: all members, the connections and the login included.
- A request that got no answer may be executed later, all the same. So every request can be repeated, and
  ``Reply.is_only`` says whether an attempt of it may still be under way.
- All members' answers are worth the same: etcd passes writes on to its leader. The members that have failed since they
  last answered are asked last; of these, the one that answered last is asked first.
- It is used on one event loop, the renewal loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial

import aiohttp

from tenure._backends.etcd.address import Address, Options
from tenure._backends.etcd.errors import NoAnswerInTime, NoTimeLeft, Refused, translate
from tenure._backends.etcd.requests import Json
from tenure._foreign import Unreadable, an_object, read_object, read_or
from tenure._logins import Login, Source, logins_of
from tenure._opened import Fact
from tenure._option_files import require_readable
from tenure._redaction import LOOKED_AT
from tenure._runtime.closing import close_together
from tenure._runtime.retired import Retired
from tenure._runtime.tasks import Tasks
from tenure._secret import Secret, hide, revealed
from tenure._tls_context import ReloadingContext, shown_by, tls_context
from tenure.errors import ConfigError, TenureError

TRUSTED_FOR = 5.0
"""Seconds in which the connections to a member are not replaced because it was too slow for one request."""

LINE_MAX = 2**28
"""Bytes of the longest message of a watch: it has the values of up to a thousand changes, whatever others have put."""

CONNECTIONS_MAX = 32
"""Connections to one member, besides those of watches; more requests than that wait for each other."""


def _is_login_refused(error: Exception) -> bool:
    return isinstance(error, Refused) and error.is_login_refused


def patience(lasts: float) -> float:
    """Return the seconds for a verb about a lease of *lasts* seconds, which sends up to four requests.

    There must be time left to repeat it.
    """
    return max(2.0, lasts / 3)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and whether no other attempt of the same request may still be executed."""

    body: Json
    is_only: bool


class Upload(AsyncIterator[bytes]):
    """The requests on a stream: those that were sent when it begins, and those that follow."""

    def __init__(self) -> None:
        self._waiting = asyncio.Queue[bytes]()

    def send(self, request: Mapping[str, object]) -> None:
        """Send *request* as soon as the stream has begun."""
        self._waiting.put_nowait(json.dumps(request).encode() + b"\n")

    async def __anext__(self) -> bytes:
        found = [await self._waiting.get()]
        while not self._waiting.empty():
            found.append(self._waiting.get_nowait())
        return b"".join(found)


class Member:
    """The connections to one member: replaced when one of them fails, as the others may be broken, too."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self.url = url
        self._tls = tls
        self._requests: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None
        self._running: set[aiohttp.StreamReader] = set()
        self._closing = Tasks()
        self._retired = Retired[aiohttp.ClientSession]()
        self.turns: asyncio.Semaphore = asyncio.Semaphore(CONNECTIONS_MAX)
        """For requests, first come, first served: those that wait for one have not been sent."""
        self._answered_at = -math.inf
        self._failed_at = -math.inf
        self._connected_at = -math.inf

    @property
    def rank(self) -> tuple[bool, float]:
        """The place of this member in the order in which members are asked; members of equal rank, in their own."""
        has_failed = self._failed_at > self._answered_at
        return has_failed, -self._answered_at if has_failed else 0.0

    def failed(self) -> None:
        """Note that a request got no answer."""
        self._failed_at = asyncio.get_running_loop().time()

    def is_slow(self, sent_at: float) -> bool:
        """Whether others were answered since a request was sent at *sent_at*, over connections that are quite new."""
        now = asyncio.get_running_loop().time()
        return self._answered_at > sent_at and now - self._connected_at < TRUSTED_FOR

    def connections(self) -> aiohttp.ClientSession:
        """Return the connections for requests."""
        if self._requests is None:
            self._requests = self._new_session(CONNECTIONS_MAX)
            self._connected_at = asyncio.get_running_loop().time()
        return self._requests

    async def post(self, path: str, body: Mapping[str, object], token: str) -> Json:
        """Return the answer to one request.

        Raises:
            Refused: etcd, or another server, refused it.
            aiohttp.ClientError, OSError: There was no answer.
        """
        url, data = f"{self.url}/v3/{path}", json.dumps(body)
        # A redirection would take the password, or the token, to another server.
        with self._retired.used(self.connections()) as connections:
            async with connections.post(url, data=data, headers=_headers(token), allow_redirects=False) as reply:
                raw = await reply.read()
        try:
            found = _read(reply.status, raw)
        except Refused as error:
            if error.is_of_etcd and not error.is_of_member:
                self._answered_at = asyncio.get_running_loop().time()
            raise
        self._answered_at = asyncio.get_running_loop().time()
        return found

    async def stream(self, path: str, upload: Upload, token: str) -> AsyncGenerator[Json, None]:
        """Yield the messages of an answer that goes on, as the requests do; raises as :meth:`post` does."""
        if self._streams is None:
            self._streams = self._new_session(0)
        # Without a leader, a member would keep a watch open in which nothing happens. On a connection that is to be
        # kept, Go's server would discard what has come of the requests by then, and wait for their end, before it
        # begins to answer.
        headers = _headers(token) | {"Grpc-Metadata-hasleader": "true", "Connection": "close"}
        url = f"{self.url}/v3/{path}"
        async with self._streams.post(url, data=upload, headers=headers, allow_redirects=False) as reply:
            if reply.status != 200:
                _read(reply.status, await reply.read())
            parts, size = list[bytes](), 0
            self._running.add(reply.content)
            try:
                async for data in reply.content.iter_any():
                    first, *lines = data.split(b"\n")
                    parts.append(first)
                    size += len(first)
                    for line in lines:
                        yield _read(reply.status, b"".join(parts))
                        parts, size = [line], len(line)
                    if size > LINE_MAX:
                        raise aiohttp.ClientPayloadError(f"a message has more than {LINE_MAX:,} bytes")
            finally:
                self._running.discard(reply.content)

    async def metrics(self) -> str:
        """Return its metrics as text; raises as :meth:`post` does."""
        async with self.connections().get(f"{self.url}/metrics", allow_redirects=False) as reply:
            if reply.status != 200:
                raise Refused(reply.status, (await reply.text())[:LOOKED_AT], is_of_etcd=False)
            return await reply.text()

    def retire(self, connections: aiohttp.ClientSession) -> None:
        """Send nothing more over *connections*, one of which has failed; end the streams, and let the requests end."""
        if self._requests is not connections:
            return
        streams, self._requests, self._streams = self._streams, None, None
        if streams is not None:
            self._closing.spawn(streams.close())
        for content in self._running:  # aiohttp does not wake a reader when it closes the connection
            content.set_exception(aiohttp.ClientConnectionError("another request to this member has failed"))
        self._retired.retire(connections)

    async def close(self) -> None:
        """Close every connection."""
        sessions = [one for one in (self._requests, self._streams) if one is not None]
        self._requests = self._streams = None
        await close_together(self._retired.close, *(one.close for one in sessions))
        await asyncio.gather(*self._closing)

    def _new_session(self, limit: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=limit, ssl=self._tls if self._tls is not None else True)
        # The time limits are ours: this one would be a second one.
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=None))


class Client:
    """All members of one etcd.

    Args:
        address: Where they are, and the login.
        options: The time limit, the files for TLS, and where the password is.
        credentials: Of the caller.

    Raises:
        ConfigError: A file can't be read, or is no certificate.
    """

    def __init__(self, address: Address, options: Options, credentials: Source | None = None) -> None:
        files = require_readable(address, ca=options.ca, cert=options.cert, key=options.key)
        self._logins = logins_of(
            address, options, credentials, user=address.username, password=address.password, needs_user=True
        )
        self.warnings: tuple[Fact, ...] = (*files, *self._logins.warnings)
        self.address: Address = address
        self.options: Options = options
        self.tls: ReloadingContext | None = _tls_of(address, options) if address.is_tls else None
        self.members: tuple[Member, ...] = tuple(Member(url, self.tls) for url in address.members)
        self._token: str | None = None
        """Of the present login; empty if the servers have no users, None if the login is still to be made."""
        self._quotable: Secret | None = None
        """The same, as what a server may quote."""
        self._login_turn = asyncio.Lock()
        self._worked = False
        self._permitted = False
        self._closed = False

    def until(self, within: float | None = None) -> float:
        """Return the time of the loop at which a request ends that begins now: after *within* seconds at most."""
        timeout = self.options.timeout
        return asyncio.get_running_loop().time() + (timeout if within is None else min(within, timeout))

    async def call(
        self,
        path: str,
        body: Mapping[str, object],
        *,
        until: float | None = None,
        handles: str | None = None,
        member: Member | None = None,
    ) -> Reply:
        """Return the answer to a request before the loop's time *until*, from any member, or from *member* only.

        Raises:
            Refused: etcd refused it with the text *handles*, which the caller handles.
            Unavailable: No member answered in time; the request may have been executed, or be executed later.
            ConfigError: It can't work as it is, or the client was closed.
        """
        self.require_open()
        end = self.until() if until is None else until
        loop = asyncio.get_running_loop()
        last: Exception = NoTimeLeft()
        # At least two: a connection that was kept may turn out to be broken, then the member is asked over another one.
        count = 1 if member else max(2, len(self.members))
        in_doubt, tried = False, list[Member]()
        for left in range(count, 0, -1):
            asked = member or self._next(tried)
            tried.append(asked)
            share = (end - loop.time()) / (left if len(self.members) > 1 else 1)
            if share <= 0:
                break
            connections, sent_at = None, math.inf
            try:
                async with asyncio.timeout(share), asked.turns:
                    connections, sent_at = asked.connections(), loop.time()
                    answer = await self._logged_in(asked, path, body)
            except Refused as error:
                error.was_only = not in_doubt and not error.may_be_executed
                if handles is not None and error.means(handles):
                    raise
                if not error.is_of_member:
                    raise self.translated(error) from error
                last, in_doubt = error, in_doubt or error.may_be_executed
                asked.failed()
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                slow = self._logins.unanswered(share) if self._token is None else None
                if slow is not None and isinstance(error, TimeoutError):  # no member was asked
                    raise slow from error
                if connections is None:  # other requests of this process took all the time: that says nothing of it
                    continue
                last = NoAnswerInTime(share) if isinstance(error, TimeoutError) else error
                in_doubt = in_doubt or not isinstance(error, aiohttp.ClientConnectorError)  # then it was never sent
                asked.failed()
                if not (isinstance(error, TimeoutError) and asked.is_slow(sent_at)):
                    asked.retire(connections)
            else:
                self._worked = True
                return Reply(answer, not in_doubt)
        raise self.translated(last) from last

    @property
    def present(self) -> Member:
        """The member that is asked first at present."""
        return self._next(())

    def _next(self, tried: Sequence[Member]) -> Member:
        """Return the member to ask after those that were *tried*."""
        return min([one for one in self.members if one not in tried] or self.members, key=lambda one: one.rank)

    async def _logged_in(self, member: Member, path: str, body: Mapping[str, object]) -> Json:
        """Return the answer of *member*; log in before, and again if the login has ended."""
        token = await self._login(member)
        try:
            return await member.post(path, body, token)
        except Refused as error:
            if not error.needs_login or not self._has_user:
                raise
            self.forget_login(token)
        return await member.post(path, body, await self._login(member))

    async def _login(self, member: Member) -> str:
        """Return the token of the present login; empty without a user."""
        if not self._has_user:
            return ""
        if self._token is not None:
            return self._token
        async with self._login_turn:
            if self._token is None:
                given = await self._logins.let_in(partial(self._authenticate, member), _is_login_refused)
                if not isinstance(given, str) or not given.isascii() or (given and not given.isprintable()):
                    raise Refused(200, "the login was answered without a token", is_of_etcd=False)
                self._token, self._quotable = given, Secret(given)
                hide(self._quotable)
            return self._token

    async def _authenticate(self, member: Member, login: Login) -> object:
        named = {"name": login.user, "password": revealed(login.password)}
        try:
            return (await member.post("auth/authenticate", named, "")).get("token")
        except Refused as error:
            if not error.is_without_users:
                raise
            return ""

    @property
    def _has_user(self) -> bool:
        return self.address.username is not None or not self._logins.is_fixed

    def forget_login(self, token: str) -> None:
        """Log in again before the next request, unless that was done since *token* was given."""
        if self._token == token:
            self._token = None

    async def stream(self, path: str, upload: Upload) -> AsyncGenerator[Json, None]:
        """Yield the messages of an answer that goes on, from the member that answers at present.

        It ends with an error when that member fails here or in another request. That a watch is not permitted is one
        of the messages.

        Raises:
            Unavailable: It can't be reached any more.
            ConfigError: It refuses this for good.
        """
        self.require_open()
        member, token = self.present, ""
        try:
            async with asyncio.timeout(self.options.timeout) as limit:
                token = await self._login(member)
                async with aclosing(member.stream(path, upload, token)) as messages:
                    async for message in messages:
                        limit.reschedule(None)  # the first answer must come in time, the others whenever they come
                        if (reason := message.get("cancel_reason")) and "compact_revision" not in message:
                            refused = Refused(200, str(reason))
                            if not refused.is_forbidden:
                                raise refused
                        yield message
                raise aiohttp.ClientConnectionError("it ended the watch")  # as a member does that has lost its leader
        except Refused as error:
            if error.needs_login:
                self.forget_login(token)
            raise self.translated(error) from error
        except (aiohttp.ClientError, OSError) as error:
            member.failed()
            raise self.translated(error) from error

    async def metric(self, member: Member, name: str) -> float:
        """Return the value of a metric of *member*; 0 if it has none of this *name*.

        Raises:
            Unavailable: Its metrics can't be read.
        """
        try:
            async with asyncio.timeout(self.options.timeout):
                text = await member.metrics()
        except (Refused, aiohttp.ClientError, OSError) as error:
            raise self.translated(error) from error
        found = (line.partition(" ") for line in text.splitlines())
        written = next((value for known, _, value in found if known == name), "0")
        with suppress(ValueError):
            if math.isfinite(value := float(written)):
                return value
        return 0.0

    @property
    def has_login(self) -> bool:
        """Whether it has logged in as a user."""
        return bool(self._token)

    def translated(self, error: Exception) -> TenureError:
        """Turn an error of a member into one of ours."""
        return translate(
            error,
            self.address,
            own=shown_by(self.tls),
            prefix=self.options.prefix,
            worked=self._worked,
            permitted=self._permitted,
            source=self._logins.source,
        )

    def note_permitted(self) -> None:
        """Note that a write was permitted: if one is refused later, rights are being changed."""
        self._permitted = True

    def require_open(self) -> None:
        """Raise ``ConfigError`` after :meth:`close`."""
        if self._closed:
            raise ConfigError("this backend was closed; connect again")

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(self.options.timeout):
                await close_together(*(member.close for member in self.members))


def _tls_of(address: Address, options: Options) -> ReloadingContext:
    return tls_context(
        address, ca=options.ca, cert=options.cert, key=options.key, check_hostname=options.check_hostname
    )


def _headers(token: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers | {"Authorization": token} if token else headers


def _read(status: int, raw: bytes) -> Json:
    """Return the answer, without the envelope in which the gateway puts streamed ones.

    Raises:
        Refused: It is an error, or not from etcd.
    """
    try:
        found = read_object(raw, most=len(raw))
    except Unreadable:
        raise Refused(status, raw[:LOOKED_AT].decode(errors="replace").strip(), is_of_etcd=False) from None
    wrapped = found.get("error")
    if isinstance(wrapped, dict):  # in a stream
        found = wrapped
    if status != 200 or wrapped is not None:
        code = found.get("code", found.get("grpc_code"))
        text = str(found.get("message") or found.get("error") or found)[:LOOKED_AT]
        raise Refused(status, text, code if type(code) is int else None)
    return read_or(an_object, found.get("result", found), {})

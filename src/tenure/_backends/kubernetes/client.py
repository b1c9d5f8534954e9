"""The client of an API server: its errors translated, a session for each loop, each request bounded in time.

It is small on purpose: five verbs on JSON objects, so that a Lease keeps every field that a newer API has.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

import aiohttp

from tenure._backends.kubernetes.address import Address, Options
from tenure._backends.kubernetes.credentials import Access, CommandLogin, Login, tls_of
from tenure._backends.kubernetes.records import Json
from tenure._connect_failures import Target
from tenure._foreign import Unreadable, digits, read_object, read_or
from tenure._opened import Fact
from tenure._redaction import LOOKED_AT, redacted, redacting
from tenure._runtime.closing import close_together
from tenure._runtime.on_loop import on_loop
from tenure._runtime.retired import Retired
from tenure._runtime.threads import in_thread
from tenure._secret import Secret, revealed
from tenure._tls_context import ReloadingContext, shown_by
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

AGENT = "tenure"
LINE_MAX = 16 * 2**20
"""The most bytes of one line of a watch: a Lease has two millions at most."""
LOGINS_KEPT = 4
"""Tokens that are known, after they were renewed, to the requests that are still answered: an answer may quote one."""
CONNECTIONS_MAX = 32
"""Connections for the requests of one loop, besides those of watches; more requests than that wait for each other."""
PAUSE_MIN = 0.1
"""Seconds to wait at least after the server has asked for a pause."""
PAUSE_UNTOLD = 1.0
"""Seconds to wait if it doesn't say for how long: what a real API server asks for."""

_NOT_CARRIED_OUT = 429
"""The status of a request that the server's flow control has refused before it was carried out."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, in words for a message: which right it needs, and for which Lease."""

    verb: str
    """The verb of RBAC."""
    name: str = ""
    resource: str = "leases"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: its status, and the object or ``Status`` in it."""

    status: int
    body: Json
    pause: float = PAUSE_UNTOLD
    """The seconds after which the server wants to be asked again."""
    priority: str = ""
    """The id of the priority level that the server's flow control has given the request."""

    @property
    def reason(self) -> str:
        """The reason of a refusal, such as ``AlreadyExists``."""
        return str(self.body.get("reason") or "")

    @property
    def message(self) -> str:
        """The server's own words about a refusal."""
        return str(self.body.get("message") or "no message")[:LOOKED_AT]

    @property
    def said(self) -> str:
        """The same for a message of ours: on one line, and without the secrets that it quotes."""
        return " ".join(redacted(self.message).split())[:500]


@redacting
def translate(problem: Answer | Exception, request: Request, where: Where) -> TenureError:
    """Turn a refusal of the server, or an error of the client, into an error of tenure.

    What can never work is a ``ConfigError``, unless it worked before: then rights or tokens are being changed.
    """
    # A login that is refused concerns all verbs, a right or a namespace the one that was asked for.
    is_about_all = not isinstance(problem, Answer) or problem.status == 401
    worked = bool(where.worked) if is_about_all else (request.verb, request.name) in where.worked
    tls = replace(_ADVICE, own=where.own)
    target = Target(where, where.place, worked=worked, software="the API server", tls=tls, timeout=where.timeout)
    lasting = target.lasting
    match problem:
        case Answer(status=401) if where.own is not None and where.own.is_over:
            return target.login_refused(str(where.own), "renew it")
        case Answer(status=401):
            return target.login_refused("", f"renew the token or the certificate from {where.origin}")
        case Answer(status=403) if "being terminated" in problem.message:
            return Unavailable(f"the namespace {where.namespace} on {where} is being deleted: {problem.said}")
        case Answer(status=403):
            return target.not_permitted(
                problem.said,
                f"grant the verb {request.verb!r} on {request.resource} of coordination.k8s.io in a Role to the login "
                f"from {where.origin}",
                f"to {request.verb} {request.resource} in the namespace {where.namespace}",
            )
        case Answer(status=404) if "namespaces" in problem.message:
            return lasting(f"{where} has no namespace {where.namespace!r}; create it, or correct the URL")
        case Answer(status=404):
            return lasting(
                f"{where} has no Leases (coordination.k8s.io/v1, in Kubernetes since 1.14): is it an API server? "
                f"({problem.said})"
            )
        case Answer(status=400 | 413 | 415 | 422):
            what = f"the Lease {request.name!r}" if request.name else request.resource
            about = f"{where} refuses to {request.verb} {what}: {problem.said}"
            return ConfigError(about) if problem.reason else lasting(about)  # a proxy gives no reason
        case Answer(status=429):
            return Unavailable(
                f"{where} is overloaded, and asks to wait {problem.pause:g} s (429); if that lasts, give these "
                "requests a FlowSchema of their own (API Priority and Fairness)"
            )
        case Answer():
            return Unavailable(f"{where} failed with status {problem.status}: {problem.said}")
        case TimeoutError(errno=None) if where.awaited:
            return Unavailable(f"{where.awaited} gave no answer within {where.within:.3g} s, so nothing was asked")
        case TimeoutError(errno=None):
            return target.no_answer(where.within)
        case Exception() if failed := target.failure(problem):
            return failed
        case aiohttp.ServerDisconnectedError():
            return target.closed(redacted(str(problem)))
        case aiohttp.ClientError() | OSError() | ValueError():
            said = redacted(str(problem))
            return Unavailable(f"the request to {where} failed: {type(problem).__name__}: {said}"[:500])
    raise AssertionError("translate() got an error that is not the client's") from problem  # a TypeError is a bug


_ADVICE = TlsAdvice(
    authority="name its authority in the kubeconfig, or with ca=FILE beside server=",
    certificate="name one, and its key, in the kubeconfig (client-certificate and client-key)",
    plain="for a server without TLS, write http://",
)


@dataclass(frozen=True, slots=True)
class Where:
    """The circumstances of a request, for messages; as text, the server."""

    server: str
    origin: str
    namespace: str
    within: float
    worked: Set[tuple[str, str]]
    """The verbs that have worked, each with the name of the Lease."""
    timeout: float = 0.0
    """The option of this name."""
    awaited: str = ""
    """What a request waits for before it can be sent, if not for the server."""
    own: OwnCertificate | None = None
    """The certificate that the client shows, if it does."""

    @property
    def place(self) -> str:
        """Host and port of the server."""
        netloc = urlsplit(self.server).netloc
        return netloc if ":" in netloc.rpartition("]")[2] else f"{netloc}:443"

    def __str__(self) -> str:
        return f"the API server {self.server}"


class Session:
    """The connections of one loop."""

    def __init__(self, access: Access, report: Callable[[Fact], None] | None = None) -> None:
        self._access = access
        self._report = report
        self._tls: ReloadingContext | None = None
        self._first: ssl.SSLContext | None = None  # what the first of the connections was encrypted by
        self._http: aiohttp.ClientSession | None = None
        self._login = Login()
        self._shown: tuple[str | None, Secret | None] | None = None  # the certificate of the connections
        self._quotable: deque[Secret | None] = deque(maxlen=LOGINS_KEPT)
        self._making = asyncio.Lock()
        self._retired = Retired[aiohttp.ClientSession]()
        self.turns: asyncio.Semaphore = asyncio.Semaphore(CONNECTIONS_MAX)
        """For requests, first come, first served: those that wait for one have not been sent."""
        self._closed = False

    async def send(self, method: str, path: str, query: Mapping[str, str], body: Json | None) -> Answer:
        """Send a request, and return its answer; after a refused login, once more with a new one."""
        refused: Login | None = None
        while True:
            async with self.open(method, path, query, body, refused=refused) as (response, login, http):
                content = await response.read()
                if response.status != 401 or refused is not None or not self.can_log_in_again(http):
                    return _answer_of(response, content)
                refused = login

    @asynccontextmanager
    async def open(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None, *, refused: Login | None = None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Login, aiohttp.ClientSession]]:
        """Send a request, and yield its response, and the login and the connections with which it was sent."""
        data = json.dumps(body).encode() if body is not None else None
        http, login = await self._ready(refused)
        with self._retired.used(http):
            async with http.request(
                method,
                self._access.server + path,
                params=query,
                data=data,
                headers=_headers(login, has_body=body is not None),
                allow_redirects=False,
                server_hostname=self._access.server_name,
            ) as response:
                yield response, login, http

    def can_log_in_again(self, http: aiohttp.ClientSession) -> bool:
        """Return whether another login, or certificate, may be accepted than the one of *http* that was refused.

        A server may refuse a certificate that ends while its connection stays open.
        """
        if self._http is http and self._tls is not None and self._tls.latest() is not self._first:
            self.retire()
        return self._access.credential is not None or self._http is not http

    @property
    def own(self) -> OwnCertificate | None:
        """The certificate that it shows, if it does."""
        return shown_by(self._tls)

    def retire(self) -> None:
        """Send no new request over the present connections: one is silent, and the others may be, too."""
        if self._http is not None:
            http, self._http = self._http, None
            self._retired.retire(http)

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        http, self._http = self._http, None
        await close_together(self._retired.close, *([http.close] if http is not None else []))

    async def _ready(self, refused: Login | None) -> tuple[aiohttp.ClientSession, Login]:
        credential = self._access.credential
        login = await credential.login(refused=refused) if credential is not None else Login()
        if login.token not in self._quotable:
            self._quotable.append(login.token)
        shown = (login.certificate, login.key)
        async with self._making:
            if self._http is not None and self._shown != shown:
                self.retire()
            if self._http is None:
                if self._shown != shown:
                    self._tls = await in_thread("tenure-tls", tls_of, self._access, login)
                    if self._tls is not None and self._report is not None:
                        self._tls.report_to(self._report)
                if self._closed:
                    raise Unavailable("the backend was closed while it connected; connect again")
                self._first = self._tls.latest() if self._tls is not None else None
                connector = aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True)
                self._http = aiohttp.ClientSession(
                    connector=connector,
                    timeout=aiohttp.ClientTimeout(total=None),
                    read_bufsize=2**16,
                    cookie_jar=aiohttp.DummyCookieJar(),
                )
                self._shown = shown
            return self._http, login


def _headers(login: Login, *, has_body: bool) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": AGENT}
    if login.token:
        headers["Authorization"] = f"Bearer {revealed(login.token)}"
    if has_body:
        headers["Content-Type"] = "application/json"
    return headers


def _answer_of(response: aiohttp.ClientResponse, content: bytes) -> Answer:
    try:
        body = read_object(content, most=len(content))
    except Unreadable as error:
        if response.status < 400:
            said = redacted(content[:LOOKED_AT].decode(errors="replace"))
            raise ValueError(f"the answer is no JSON object: {said[:80]!r}: {error}") from error
        body = {"message": content[:LOOKED_AT].decode(errors="replace")}
    pause = read_or(digits, response.headers.get("Retry-After", ""), PAUSE_UNTOLD)
    priority = response.headers.get("X-Kubernetes-PF-PriorityLevel-UID", "")
    return Answer(response.status, body, float(pause), priority)


class Client:
    """An API server in use: a session for each loop."""

    def __init__(self, url: Url, address: Address, options: Options) -> None:
        self.url: Url = url
        self.address: Address = address
        self.options: Options = options
        self.warnings: tuple[Fact, ...] = address.access.warnings
        self.report: Callable[[Fact], None] | None = None
        """Is called with what is found while it is used."""
        self._sessions: dict[asyncio.AbstractEventLoop, Session] = {}
        self._worked: set[tuple[str, str]] = set()
        self._closed = False

    @property
    def leases_path(self) -> str:
        """The path of all Leases of the namespace."""
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.address.namespace}/leases"

    def path_of(self, name: str) -> str:
        """Return the path of a Lease."""
        return f"{self.leases_path}/{name}"

    async def send(
        self,
        request: Request,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        expected: tuple[int, ...] = (),
        within: float | None = None,
    ) -> Answer:
        """Send a request; return its answer if it succeeded, or has one of the *expected* statuses.

        A request that the server's flow control refuses is repeated after the pause that it asks for, if there is time.

        Raises:
            Unavailable: There was no answer: the request may have been carried out, or not.
            ConfigError: The server can't be used as it is.
        """
        within = min(self.options.timeout, within or self.options.timeout)
        session = self._session_here()
        limit, is_sent = asyncio.timeout(within), False
        try:
            async with limit:
                while True:
                    is_sent = False
                    async with session.turns:
                        is_sent = True
                        answer = await session.send(method, path, query or {}, body)
                    if answer.status != _NOT_CARRIED_OUT:
                        break
                    await self._pause(answer, request, limit, within)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            if not is_sent:  # other requests of this process took all the time: that says nothing of the server
                raise Unavailable(
                    f"no time was left to ask {self._where()}: it, or this process, is too slow; the request was not "
                    "sent"
                ) from error
            if limit.expired():
                session.retire()
            raise translate(error, request, self._where(within)) from error
        if answer.status < 300:
            self.note_worked(request)
        elif answer.status not in expected:
            raise self.refusal(answer, request)
        return answer

    async def _pause(self, answer: Answer, request: Request, limit: asyncio.Timeout, within: float) -> None:
        pause, ends_at = max(PAUSE_MIN, answer.pause), limit.when()
        if ends_at is not None and asyncio.get_running_loop().time() + pause >= ends_at:
            raise translate(answer, request, self._where(within))
        await asyncio.sleep(pause)

    @asynccontextmanager
    async def stream(
        self, request: Request, path: str, query: Mapping[str, str], *, lasts: float
    ) -> AsyncIterator[AsyncIterator[Json]]:
        """Open a watch that *lasts* so many seconds, and yield an iterator over its events.

        Raises:
            Unavailable: There was no answer, or the connection was lost.
            ConfigError: The server refuses it.
        """
        session, refused = self._session_here(), None
        try:
            while True:
                async with (
                    asyncio.timeout(self.options.timeout) as limit,
                    session.open("GET", path, query, None, refused=refused) as (response, login, http),
                ):
                    if response.status == 200:
                        limit.reschedule(asyncio.get_running_loop().time() + lasts + self.options.timeout)
                        yield _lines_of(response)
                        return
                    answer = _answer_of(response, await response.read())
                    if answer.status == _NOT_CARRIED_OUT:
                        await asyncio.sleep(max(PAUSE_MIN, answer.pause))  # the caller will ask again at once
                    if answer.status == 403:  # even if other verbs work
                        raise ConfigError(str(self.refusal(answer, request)))
                    if answer.status != 401 or refused is not None or not session.can_log_in_again(http):
                        raise self.refusal(answer, request)
                    refused = login
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise translate(error, request, self._where()) from error

    def note_worked(self, request: Request) -> None:
        """Note that this user may do this, and that the server has what it is about."""
        self._worked.add((request.verb, request.name))

    def refusal(self, answer: Answer, request: Request) -> TenureError:
        """Return the error for an answer that refuses *request*."""
        return translate(answer, request, self._where())

    async def close(self) -> None:
        """Close the sessions of every loop."""
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        await close_together(*(partial(on_loop, loop, session.close) for loop, session in sessions.items()))

    def _session_here(self) -> Session:
        if self._closed:
            raise Unavailable(f"{self.url} is closed; connect again")
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for old in [one for one in self._sessions if one.is_closed()]:
                del self._sessions[old]
            session = self._sessions[loop] = Session(self.address.access, self.report)
        return session

    def _where(self, within: float | None = None) -> Where:
        access, within = self.address.access, within or self.options.timeout
        awaited = access.credential.awaited if isinstance(access.credential, CommandLogin) else ""
        session, timeout = self._sessions.get(asyncio.get_running_loop()), self.options.timeout
        own = session.own if session is not None else None
        return Where(access.server, access.origin, self.address.namespace, within, self._worked, timeout, awaited, own)


async def _lines_of(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """Yield the lines of a response, each a JSON object; raises ``ValueError`` for one that isn't, or is too long."""
    parts, size = list[bytes](), 0
    async for chunk in response.content.iter_any():
        first, *lines = chunk.split(b"\n")
        parts.append(first)
        size += len(first)
        for line in lines:
            yield read_object(b"".join(parts), most=LINE_MAX)
            parts, size = [line], len(line)
        if size > LINE_MAX:
            raise ValueError(f"a watch has a line of more than {LINE_MAX:,} bytes")

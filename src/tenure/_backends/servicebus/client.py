"""The client of a Service Bus namespace: translates its errors, opens its links, bounds every request.

All of the library runs on one thread (``io_thread``). Each link is opened when it is first needed, and again when it is
gone: the service detaches links that were idle for ten minutes, and moves connections at any time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar, cast

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import ServiceBusError

from tenure._backends.servicebus.address import Address, Options
from tenure._backends.servicebus.driver import (
    FAILURES,
    NOT_FOUND,
    Connection,
    Disconnected,
    Refused,
    readable,
)
from tenure._backends.servicebus.io_thread import IoThread
from tenure._backends.servicebus.library import Wire, check_library
from tenure._backends.servicebus.links import ReceiveLink, SendLink
from tenure._backends.servicebus.login import Signer, check_login
from tenure._backends.servicebus.names import Path
from tenure._connect_failures import Target
from tenure._logins import Login, Logins, Source, logins_of
from tenure._redaction import redacted, redacting
from tenure._runtime.clock import Clock
from tenure._runtime.closing import close_in_order, close_together
from tenure._secret import hide
from tenure._tls_context import tls_context
from tenure._tls_failures import TlsAdvice
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")
L = TypeVar("L", bound=Connection)

LOST = frozenset(
    ["com.microsoft:message-lock-lost", "com.microsoft:session-lock-lost", "com.microsoft:message-not-found"]
)
"""The conditions that say that a lock is over, or that its message is gone."""
GONE = LOST | {NOT_FOUND}
"""The same in the answer to a verdict: a link may call such a lock not found."""
NO_SESSION = frozenset(["com.microsoft:session-cannot-be-locked", "com.microsoft:timeout"])

NO_RIGHTS = frozenset(["amqp:unauthorized-access", "com.microsoft:auth-failed", "status 401", "status 403"])
LOGIN_REFUSED = frozenset(["amqp:unauthorized-access", "com.microsoft:auth-failed"])
_BUSY = frozenset(["com.microsoft:server-busy", "com.microsoft:timeout", "amqp:internal-error"])


_TLS_ADVICE = TlsAdvice(
    authority=(
        "check the namespace's name, and whether a proxy in between replaces certificates; its authority can be named "
        "by SSL_CERT_FILE"
    ),
    certificate="Azure asks for none, so another server, or a proxy, has answered",
    plain="check which server has answered; for the emulator, write emulator=true",
)


@redacting
def translate(
    error: Exception, url: Url, within: float, *, worked: bool, server: str = "", timeout: float | None = None
) -> TenureError:
    """Turn an error of the client or the service into one of ours.

    A permanent error is a ``ConfigError``, unless the namespace *worked* before: then rights or entities are being
    changed, and may fit soon.
    """
    said = redacted(error.text if isinstance(error, Refused) else str(error))
    target = Target(url, server, worked=worked, software="the namespace", tls=_TLS_ADVICE, timeout=timeout)
    match error:
        case TimeoutError(errno=None):
            return target.no_answer(within)
        case Refused(condition=condition) if condition in NO_RIGHTS:
            return target.not_permitted(
                condition,
                "give the identity the role Azure Service Bus Data Owner, or Sender and Receiver; or check the policy "
                "of the connection string",
            )
        case Refused(condition="amqp:resource-limit-exceeded"):
            return Unavailable(f"{url} is full, or has reached another quota: {said}")
        case Refused(condition="com.microsoft:entity-disabled"):
            return Unavailable(f"{url}: the entity is disabled; enable it in the portal: {said}")
        case Refused(condition=condition) if condition == NOT_FOUND:
            return Unavailable(f"{url}: {said}")
        case Refused(condition="amqp:link:message-size-exceeded"):
            return ConfigError(f"{url} takes no message of this size; send a reference to the data instead")
        case Refused(condition=condition) if condition in _BUSY:
            return Unavailable(f"{url} is busy or throttles ({condition}): {said}")
        case Refused(condition="amqp:not-allowed"):
            return ConfigError(f"{url} doesn't allow this: {said}")
        case Refused():
            return Unavailable(f"{url} refused the request: {redacted(str(error))}")
        case Disconnected() | ServiceRequestError() | ServiceResponseError() if failed := target.failure(error):
            return failed
        case Disconnected():
            return target.closed(said, "; check the namespace's name, and the network")
        case HttpResponseError(status_code=401 | 403):
            return target.not_permitted(
                f"status {error.status_code}",
                "entities are read, created and changed with the right Manage (role Azure Service Bus Data Owner)",
            )
        case ClientAuthenticationError():
            return target.lasting(
                f"no identity was found for {url}; log in with az login, or put a connection string into the "
                "environment: ?connection_string_env=…"
            )
        case HttpResponseError(status_code=400):
            return ConfigError(
                f"{url} can't have a queue with these settings (status 400): a Basic namespace has no duplicate "
                f"detection and no sessions. It says: {' '.join(redacted(error.message).split())[:300]}"
            )
        case HttpResponseError():
            return Unavailable(f"{url} failed: status {error.status_code}")
        case ServiceRequestError() | ServiceResponseError():
            return target.closed(type(error).__name__, "; check the namespace's name, and the network")
        case ServiceBusError() | AzureError() | OSError():
            failed = target.failure(error)
            return failed or Unavailable(f"the request to {url} failed: {type(error).__name__}")
    raise AssertionError("translate() got an error that is not the client's") from error  # a TypeError is a bug


class Namespace:
    """A namespace in use."""

    def __init__(
        self, url: Url, address: Address, options: Options, clock: Clock, credentials: Source | None = None
    ) -> None:
        check_library()
        check = partial(check_login, emulator=address.emulator)
        self.logins: Logins = logins_of(url, options, credentials, user=address.policy, password=None, check=check)
        self.signer: Signer | None = None
        """Signs with what the caller's sources say; None: a connection string, or the process's identity, is used."""
        if not self.logins.is_fixed:
            self.signer = Signer(self.logins)
        self.url: Url = url
        self.address: Address = address
        self.options: Options = options
        self.clock: Clock = clock
        self._thread = IoThread("tenure-servicebus")
        self._client: ServiceBusClient | None = None
        self._identity: Any = None
        self._links: dict[tuple[str, str], Any] = {}  # senders, receivers, and connections for requests
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        self._sessions: set[ReceiveLink] = set()
        self._at_close: list[Callable[[], Awaitable[None]]] = []
        self._worked = False
        self._closed = False

    async def run(self, request: Callable[[], Coroutine[Any, Any, T]], *, within: float | None = None) -> T:
        """Return the result of *request*, on the library's thread, within *within* seconds.

        Raises:
            Unavailable: There was no answer: the request may have been executed, wholly or in part, or not.
            ConfigError: The namespace can't be used as it is.
        """
        if self._closed:
            raise Unavailable(f"{self.url} is closed; connect again")
        try:
            return await self._thread.run(partial(self._bounded, request, within or self.options.timeout))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._closed_meanwhile() from None

    async def _bounded(self, request: Callable[[], Coroutine[Any, Any, T]], within: float) -> T:
        try:
            async with asyncio.timeout(within):
                answer = await request()
        except FAILURES as error:
            raise self._translated(error, within) from error
        except Exception as error:
            if self._closed and not isinstance(error, TenureError):  # the library fails with anything then
                raise self._closed_meanwhile() from error
            raise
        self._worked = True
        return answer

    def _closed_meanwhile(self) -> Unavailable:
        return Unavailable(f"{self.url} was closed while a request was under way")

    def translated(self, error: Exception) -> TenureError:
        """Return *error* as one of ours."""
        if isinstance(error, TenureError):
            return error
        return self._translated(error, self.options.timeout)

    def _translated(self, error: Exception, within: float) -> TenureError:
        told, (host, _, port) = readable(error), self.address.host.partition(":")
        # Links have a port of their own; management has that of the connection string.
        server = f"{host}:{port or 443}" if isinstance(told, AzureError) else f"{host}:5671"
        if told is not error:
            told.__cause__ = error  # a failure of TLS is found there
        timeout = self.options.timeout
        return translate(told, self.url, within, worked=self._worked, server=server, timeout=timeout)

    @property
    def is_closed(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._closed

    def post(self, act: Callable[[], object]) -> None:
        """Call *act* on the library's thread, unless the namespace is closed."""
        if not self._closed:
            self._thread.post(act)

    def at_close(self, act: Callable[[], Awaitable[None]]) -> None:
        """Call *act* on the library's thread before the links are closed."""
        self._at_close.append(act)

    async def close(self) -> None:
        """Close every link, and end the thread."""
        self._closed = True
        if self._thread.runs:
            await close_in_order(self._close_there, self._thread.stop)

    async def _close_there(self) -> None:
        with suppress(TimeoutError):
            # Only the end of the thread cuts it off, and when it has begun: otherwise, nothing would be closed.
            await asyncio.wait_for(asyncio.shield(self._thread.run(self._close_all)), 10.0)

    async def _close_all(self) -> None:
        acts = (*self._at_close, self._close_links, self._close_clients)
        await close_in_order(*(partial(_without_errors, act) for act in acts))

    async def _close_links(self) -> None:
        links = [*self._links.values(), *self._sessions]
        self._links.clear()
        self._sessions.clear()
        await close_together(*(link.close for link in links))

    async def _close_clients(self) -> None:
        clients = [one for one in (self._client, self._identity) if one is not None]
        await close_in_order(*(partial(_without_errors, one.close) for one in clients))

    # --- links; called on the library's thread ---

    async def sender(self, entity: str) -> SendLink:
        """Return the link to an entity."""
        return await self._link("send", entity, lambda: self._client_here().get_queue_sender(entity), SendLink)

    async def receiver(self, path: Path, arrived: Callable[[], None]) -> ReceiveLink:
        """Return the link from an entity; *arrived* is called when a message comes, and when the link is gone."""
        return await self._link(
            "receive", path.node, lambda: self._receiver(path), lambda owner, now: ReceiveLink(owner, now, arrived)
        )

    async def session(self, path: Path, name: str | None, wait: float) -> ReceiveLink:
        """Return a new link with the session called *name*, or with the next one that is free.

        Raises:
            Refused: There is none, or it is locked.
        """
        options = {"session_id": NEXT_AVAILABLE_SESSION if name is None else name, "max_wait_time": wait}
        link = await self._opened(
            lambda: self._receiver(path, **options), lambda owner, now: ReceiveLink(owner, now, lambda: None), wait
        )
        self._sessions.add(link)
        return link

    async def end_session(self, link: ReceiveLink) -> None:
        """Close the link of a session, which unlocks it."""
        self._sessions.discard(link)
        await link.close()

    async def requests(self, path: Path) -> Connection:
        """Return a connection for requests to the management node of an entity, with a login for just that."""
        return await self._link("manage", path.node, lambda: self._receiver(path), Connection, linked=False)

    async def ask(self, path: Path, operation: str, body: dict[str, Any], link: Connection | None = None) -> Any:
        """Send a request to the management node of an entity; return the value of the answer."""
        link = link or await self.requests(path)
        return await link.request(f"{path.node}/$management", operation, body, timeout=self.options.timeout)

    def _existing(self, kind: str, node: str) -> Any:
        """Return a link if it is open."""
        link = self._links.get((kind, node.lower()))
        return link if link is not None and link.lost is None else None

    async def forget(self, node: str) -> None:
        """Close the links of an entity, which is deleted."""
        low = node.lower()
        for key in [key for key in self._links if key[1] in (low, f"{low}/$deadletterqueue")]:
            await self._links.pop(key).close()

    async def _link(
        self, kind: str, node: str, make: Callable[[], Any], wrap: Callable[..., L], *, linked: bool = True
    ) -> L:
        key = kind, node.lower()
        async with self._opening.setdefault(key, asyncio.Lock()):
            known: L | None = self._existing(kind, node)
            if known is not None:
                return known
            old = self._links.pop(key, None)
            if old is not None:
                await old.close()
            self._links[key] = link = await self._opened(make, wrap, linked=linked)
            return link

    async def _opened(
        self, make: Callable[[], Any], wrap: Callable[..., L], wait: float = 0.0, *, linked: bool = True
    ) -> L:
        """Open a link, which the service may delay for *wait* seconds; or a connection without one."""
        has_login = False

        async def attach(login: Login) -> Any:
            nonlocal has_login
            has_login = True
            owner = make()
            try:
                with nullcontext() if self.signer is None else self.signer.attaching(login):
                    await Wire.attach(owner, linked=linked)
            except TenureError:
                raise
            except Exception as error:
                raise readable(error) from error
            return owner

        try:
            async with asyncio.timeout(self.options.timeout + wait):
                owner = await self.logins.let_in(attach, _is_login_refused)
        except TimeoutError:
            slow = None if has_login else self.logins.unanswered(self.options.timeout)
            raise slow or TimeoutError() from None
        link = wrap(owner, self.clock.now)
        link.silence_max = max(link.silence_max, self.options.timeout)
        link.start()
        if self._closed:  # meanwhile, and those that were open then may be closed already
            await link.close()
            raise self._closed_meanwhile()
        return link

    def _receiver(self, path: Path, **options: Any) -> Any:
        client = self._client_here()
        if path.is_dead:
            options["sub_queue"] = ServiceBusSubQueue.DEAD_LETTER
        if path.subscription is None:
            return client.get_queue_receiver(path.entity, **options)
        return client.get_subscription_receiver(path.entity, path.subscription, **options)

    def _client_here(self) -> ServiceBusClient:
        if self._client is None:
            # The callers retry: the library's own retries take longer than a lock.
            settings: dict[str, Any] = {"retry_total": 0, "ssl_context": _tls(self.url, self.address)}
            text = self.address.connection_string
            hide(self.address.key)
            if self.signer is not None:
                settings["use_tls"] = not self.address.emulator
                self._client = ServiceBusClient(self.address.host, cast(Any, self.signer), **settings)
            elif text is not None:
                self._client = ServiceBusClient.from_connection_string(text.reveal(), **settings)
            else:
                from azure.identity.aio import DefaultAzureCredential  # slow to import, and not needed with a secret

                self._identity = DefaultAzureCredential()
                self._client = ServiceBusClient(self.address.host, self._identity, **settings)
        return self._client

    @property
    def credential(self) -> Any:
        """The identity of the process, if that is used."""
        self._client_here()
        return self._identity


def _is_login_refused(error: Exception) -> bool:
    return isinstance(error, Refused) and error.condition in LOGIN_REFUSED


async def _without_errors(act: Callable[[], Awaitable[object]]) -> None:
    with suppress(Exception):
        await act()


def _tls(url: Url, address: Address) -> ssl.SSLContext:
    """Return the settings of TLS for all links.

    The library would trust the authorities of the package certifi instead of this machine's, which management trusts,
    and read them anew for each connection: that takes 20 ms of CPU time, in which no other link is served.
    """
    if address.emulator:  # which is reached without TLS
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return tls_context(url, ca=None, cert=None, key=None)

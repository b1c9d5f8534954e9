"""The client of an Azure Storage account: translates its errors, keeps two clients for each loop, bounds every request.

Microsoft's own client would repeat a request for longer than a lease lasts, and some requests must not be repeated.
So each is sent once here, and the caller decides whether to repeat it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.storage.blob.aio import BlobServiceClient, ContainerClient
from azure.storage.queue.aio import QueueServiceClient

from tenure._backends.azure_storage.address import Address, Options
from tenure._backends.azure_storage.login import (
    Kind,
    LoginKindChanged,
    SigningPolicy,
    kind_of,
    signature_in,
)
from tenure._connect_failures import Target
from tenure._logins import HeldLogin, Logins
from tenure._redaction import redacted, redacting
from tenure._runtime.closing import close_in_order, close_together
from tenure._runtime.on_loop import on_loop
from tenure._runtime.tasks import Tasks
from tenure._secret import Secret, hide
from tenure._tls_failures import TlsAdvice
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

CONCURRENCY = 32
"""Requests of one operation, such as the renewal of many leases, that run at the same time."""


class _Redacting(logging.Filter):
    """Logs the answers of the service without the signature that one may quote in its headers."""

    def filter(self, record: logging.LogRecord) -> bool:
        with suppress(Exception):  # the handler meets it again, and reports it
            text = record.getMessage()
            if (shown := redacted(text)) != text:
                record.msg, record.args = shown, ()
        return True


logging.getLogger("azure.core.pipeline.policies.http_logging_policy").addFilter(_Redacting())

NO_RIGHTS = frozenset(["AuthorizationFailure", "AuthorizationPermissionMismatch", "AuthorizationResourceTypeMismatch"])
NO_RIGHTS |= frozenset(["AuthorizationServiceMismatch", "InsufficientAccountPermissions"])
"""The codes of refusals for lack of rights."""
_LOGINS = {
    "AuthenticationFailed": "check the key or the signature, when it ends, and this machine's clock",
    "InvalidAuthenticationInfo": "check the identity that this process runs as",
}
_ADVICE = {
    "AuthorizationProtocolMismatch": "requires https",
    "AuthorizationSourceIPMismatch": "refuses this machine's address; check the account's network rules",
    "AccountIsDisabled": "is disabled",
    "KeyBasedAuthenticationNotPermitted": "permits no keys; use azure://ACCOUNT and an identity",
    "FeatureNotSupportedForAccount": "doesn't support this with its kind of account; use a general-purpose v2 account",
}
_ROLES = "check the key, if one is used; give the identity the roles Storage Blob Data Contributor and Storage Queue \
Data Contributor, or the signature the rights to read, add, create, write, update, process, delete and list; Azurite \
says the same of a signature that has ended"


def code_of(error: HttpResponseError) -> str:
    """Return the service's error code, such as ``BlobNotFound``."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


_TLS_ADVICE = TlsAdvice(
    authority="check whether a proxy in between replaces certificates; its authority can be named by SSL_CERT_FILE",
    certificate="Azure asks for none, so another server, or a proxy, has answered",
    plain="check which server has answered; the connection string of an emulator may say http://",
)


_AZURITE = "Azurite, with its blobs at the URL's port and its queues at queue_port (the next one),"


@redacting
def translate(
    error: Exception,
    url: Url,
    within: float,
    *,
    worked: bool,
    server: str = "the account",
    timeout: float | None = None,
) -> TenureError:
    """Turn an error of the client or the service into one of ours.

    A permanent error is a ``ConfigError``, unless the account *worked* before: then keys or rights are being changed,
    and may fit soon.
    """
    software = _AZURITE if url.scheme == "azurite" else "the endpoint of the account"
    target = Target(url, server, worked=worked, software=software, tls=_TLS_ADVICE, timeout=timeout)
    match error:
        case TimeoutError(errno=None):
            return target.no_answer(within)
        case HttpResponseError() if (code := code_of(error)) in NO_RIGHTS:
            return target.not_permitted(code, _ROLES)
        case HttpResponseError() if (code := code_of(error)) in _LOGINS:
            return target.login_refused(code, _LOGINS[code])
        case HttpResponseError() if code_of(error) == "NoAuthenticationInformation":
            return target.login_missing("use an identity, or name a secret: ?key_env=…")
        case HttpResponseError() if (code := code_of(error)) in _ADVICE:
            return target.lasting(f"{url} {_ADVICE[code]} ({code})")
        case HttpResponseError(status_code=401 | 403):
            said = f"status {error.status_code}, {redacted(code_of(error)) or 'no code'}"
            return target.login_refused(said, "check the key, the signature or the identity")
        case ClientAuthenticationError():
            return target.lasting(
                f"no identity was found for {url}; log in with az login, or name a secret: ?key_env=…"
            )
        case HttpResponseError():
            return Unavailable(f"{url} failed: status {error.status_code}, {redacted(code_of(error)) or 'no code'}")
        case AzureError() | OSError() if failed := target.failure(error):
            return failed
        case ServiceRequestError():  # without the client's own text, which may hold a signature
            return target.unreachable(ConnectionError(type(error).__name__))
        case ServiceResponseError():
            return target.closed(type(error).__name__)
        case AzureError() | OSError():
            return Unavailable(f"the request to {url} failed: {type(error).__name__}")
    raise AssertionError("translate() got an error that is not the client's") from error  # a TypeError is a bug


@dataclass(frozen=True, slots=True)
class Refused:
    """The refusal of a request, with the service's error code."""

    code: str


async def unless_refused(request: Awaitable[T], *codes: str) -> T | Refused:
    """Return the answer, or ``Refused`` if the error code is one of *codes*, which the caller handles."""
    try:
        return await request
    except HttpResponseError as error:
        if (code := code_of(error)) in codes:
            return Refused(code)
        raise


@dataclass(frozen=True, slots=True)
class Services:
    """The clients of both services; of each that the address names."""

    blobs: BlobServiceClient | None
    queues: QueueServiceClient | None

    @classmethod
    def of(cls, address: Address, settings: Mapping[str, Any]) -> Services:
        """Return clients with these *settings*."""
        return cls(
            BlobServiceClient(address.blobs, **settings) if address.blobs else None,
            QueueServiceClient(address.queues, **settings) if address.queues else None,
        )

    @classmethod
    def signing(cls, address: Address, settings: Mapping[str, Any], login: HeldLogin, secret: Secret) -> Services:
        """Return clients that sign with logins of the kind of *secret*."""
        kind, made = kind_of(secret), list[Any]()
        sas = AzureSasCredential("none yet")
        key = AzureNamedKeyCredential(address.account, secret.reveal())

        def use(newest: Secret) -> bool:
            if kind_of(newest) != kind:
                return False
            if kind == "shared access signature":
                sas.update(newest.reveal().removeprefix("?"))
            for one in made if kind == "account key" else ():
                one.credential.account_key = newest.reveal()  # the client reads it for each request
            return True

        def signed() -> dict[str, Any]:
            return {
                **settings,
                "credential": key if kind == "account key" else sas,
                "retry_policy": SigningPolicy(login, use),  # each client needs one of its own
            }

        blobs = BlobServiceClient(address.blobs, **signed()) if address.blobs else None
        queues = QueueServiceClient(address.queues, **signed()) if address.queues else None
        made += [one for one in (blobs, queues) if one is not None]
        return cls(blobs, queues)


class LoopConnections:
    """The clients of one loop, and the credential they share.

    Args:
        address: Where the services are, and the login if it stays the same.
        options: The time limit, and the container.
        login: The login of the loop, if it changes.
    """

    def __init__(self, address: Address, options: Options, login: HeldLogin | None) -> None:
        self._address = address
        self._quotable: tuple[Secret | None, ...] = (address.key, signature_in(address.sas))
        hide(*self._quotable)
        self._settings: dict[str, Any] = {
            # The callers retry: the client's own retries take longer than a lease.
            "retry_total": 0,
            "permit_redirects": False,  # only the servers that the URL names are asked, and never without its TLS
            "connection_timeout": options.timeout + 1.0,  # only if our own limit fails
            "read_timeout": options.timeout + 1.0,
        }
        self._container = options.container
        self._identity: Any = None
        self._login = login
        self._made: dict[Kind | None, Services] = {}
        """By the kind of their login; without one, if that is fixed."""
        self._kind: Kind | None = None
        if login is None:
            credential, self._identity = _credential(address)
            self._made[None] = Services.of(address, {**self._settings, "credential": credential})

    async def prepare(self) -> None:
        """Make clients for the login that there is now.

        Raises:
            Unavailable, ConfigError: There is none.
        """
        if self._login is None or (secret := (await self._login.now()).password) is None:
            return
        self._kind = kind_of(secret)
        if self._kind not in self._made:
            self._made[self._kind] = Services.signing(self._address, self._settings, self._login, secret)

    @property
    def kind(self) -> Kind | None:
        """The kind of the login, if that changes."""
        return self._kind

    @property
    def container(self) -> ContainerClient:
        """The container of the lease blobs."""
        blobs = self._made[self._kind].blobs
        if blobs is None:
            raise ConfigError("the connection string names no BlobEndpoint, which leases and schedules need")
        return blobs.get_container_client(self._container)

    @property
    def has_blobs(self) -> bool:
        """Whether the address has blobs."""
        return bool(self._address.blobs)

    @property
    def queues(self) -> QueueServiceClient:
        """The account's queues."""
        queues = self._made[self._kind].queues
        if queues is None:
            raise ConfigError("the connection string names no QueueEndpoint, which queues need")
        return queues

    async def close(self) -> None:
        """Close every connection."""
        parts = [one for services in self._made.values() for one in (services.blobs, services.queues)]
        await close_in_order(*(partial(_close, one) for one in (*parts, self._identity) if one is not None))


async def _close(part: Any) -> None:
    with suppress(AzureError, OSError):
        await part.close()


class Account:
    """An account in use: connections for each loop that uses it."""

    def __init__(self, url: Url, address: Address, options: Options, logins: Logins) -> None:
        self.url: Url = url
        self.logins: Logins = logins
        self.options: Options = options
        self.address: Address = address
        self._connections: dict[asyncio.AbstractEventLoop, LoopConnections] = {}
        self._held: WeakKeyDictionary[asyncio.AbstractEventLoop, HeldLogin] = WeakKeyDictionary()
        self._retired: dict[LoopConnections, asyncio.AbstractEventLoop] = {}
        self._closing = Tasks()  # their close(), under way
        self._worked = False
        self._closed = False

    async def run(
        self, request: Callable[[LoopConnections], Coroutine[Any, Any, T]], *, within: float | None = None
    ) -> T:
        """Return the result of *request* within *within* seconds; it may consist of several requests to the service.

        Raises:
            Unavailable: There was no answer: the request may have been executed, wholly or in part, or not.
            ConfigError: The account can't be used as it is.
        """
        if self._closed:
            raise Unavailable(f"{self.url} is closed; connect again")
        within = self.options.timeout if within is None else within
        connections = self._connections_here()
        limit = asyncio.timeout(within)
        try:
            async with limit:
                await connections.prepare()
                answer = await request(connections)
        except LoginKindChanged:
            raise Unavailable(
                f"{self.logins.source} has changed from a key to a signature, or back; ask again: the next request is "
                "signed by the new one"
            ) from None
        except (AzureError, OSError) as error:  # a TimeoutError is an OSError
            if limit.expired():
                if (slow := self._slow_login(within)) is not None:
                    raise slow from None
                self._retire(connections)  # if one connection is silent, the others may be, too
            found = translate(
                error,
                self.url,
                within,
                worked=self._worked,
                server=self.address.servers,
                timeout=self.options.timeout,
            )
            # Errors of aiohttp quote the URL of the request, and a signature is a part of that.
            raise found from (error if self.address.sas is None and self.logins.is_fixed else None)
        self._worked = True
        return answer

    async def login_kind(self) -> str:
        """Return the kind of the login that there is now.

        Raises:
            Unavailable, ConfigError: There is none.
        """

        async def prepared(connections: LoopConnections) -> str:
            return connections.kind or self.address.login

        return await self.run(prepared)

    async def run_all(
        self, requests: Sequence[Callable[[LoopConnections], Coroutine[Any, Any, T]]], *, within: float | None = None
    ) -> list[T]:
        """Return the results of many requests, in their order; up to ``CONCURRENCY`` run at a time.

        Raises:
            Unavailable: One of them had no answer; all of them were sent.
        """
        if len(requests) == 1:
            return [await self.run(requests[0], within=within)]
        found: list[T] = []
        for answer in await self.run_each(requests, within=within):
            if isinstance(answer, Unavailable):
                raise answer
            found.append(answer)
        return found

    async def run_each(
        self, requests: Sequence[Callable[[LoopConnections], Coroutine[Any, Any, T]]], *, within: float | None = None
    ) -> list[T | Unavailable]:
        """Return the results as :meth:`run_all` does, with ``Unavailable`` for each request that had no answer."""
        free = asyncio.Semaphore(CONCURRENCY)
        tasks = [self.begin(request, free, within=within) for request in requests]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        found: list[T | Unavailable] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Unavailable):
                raise answer
            found.append(answer)
        return found

    def begin(
        self,
        request: Callable[[LoopConnections], Coroutine[Any, Any, T]],
        free: asyncio.Semaphore,
        *,
        within: float | None = None,
    ) -> asyncio.Task[T]:
        """Start a task that runs *request* once *free* permits it, with a time limit of its own."""

        async def run() -> T:
            async with free:
                return await self.run(request, within=within)

        return asyncio.ensure_future(run())

    async def close(self) -> None:
        """Close the connections of every loop."""
        self._closed = True
        retiring = [*self._retired.items(), *((connections, loop) for loop, connections in self._connections.items())]
        self._connections.clear()
        self._retired.clear()
        await close_together(*(partial(on_loop, loop, connections.close) for connections, loop in retiring))

    def _connections_here(self) -> LoopConnections:
        loop = asyncio.get_running_loop()
        connections = self._connections.get(loop)
        if connections is None:
            for old in [one for one in self._connections if one.is_closed()]:
                del self._connections[old]
            # Connections are replaced when one is silent; the login of the loop is not.
            login = None if self.logins.is_fixed else self._held.setdefault(loop, HeldLogin(self.logins))
            connections = self._connections[loop] = LoopConnections(self.address, self.options, login)
        return connections

    def _slow_login(self, within: float) -> Unavailable | None:
        """Return an error if this task has waited for its login, and not for the service."""
        held = self._held.get(asyncio.get_running_loop())
        return self.logins.unanswered(within) if held is not None and held.has_kept_waiting() else None

    def _retire(self, connections: LoopConnections) -> None:
        """Use *connections* for no new request; close them when their requests have ended."""
        loop = asyncio.get_running_loop()
        if self._connections.get(loop) is connections:
            del self._connections[loop]
            self._retired[connections] = loop
            loop.call_later(2 * self.options.timeout, self._close_retired, connections)

    def _close_retired(self, connections: LoopConnections) -> None:
        if self._retired.pop(connections, None) is not None:
            self._closing.spawn(connections.close())


def _credential(address: Address) -> tuple[Any, Any]:
    """Return the credential for the account, and the part of it that must be closed."""
    if address.key is not None:
        return AzureNamedKeyCredential(address.account, address.key.reveal()), None
    if address.sas is not None:
        return AzureSasCredential(address.sas.reveal()), None
    from azure.identity.aio import DefaultAzureCredential  # slow to import, and not needed with a secret

    identity = DefaultAzureCredential()
    return SharedLogin(identity), identity


class SharedLogin:
    """A credential whose login continues when the request that began it is given up, for the next request."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential
        self._login: asyncio.Task[AccessToken] | None = None

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Log in, or wait for the login that is in progress."""
        if self._login is None or self._login.done():
            self._login = asyncio.ensure_future(self._credential.get_token(*scopes, **options))
        return await asyncio.shield(self._login)

    async def close(self) -> None:
        """Do nothing: :class:`LoopConnections` closes the credential."""

    async def __aenter__(self) -> SharedLogin:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

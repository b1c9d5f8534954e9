"""Entities by the namespace's HTTP interface: read, created, changed, counted. It needs the right Manage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from azure.core.exceptions import AzureError, HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.core.pipeline.transport import AioHttpTransport
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from tenure._backends.servicebus.address import connected
from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.login import Signer, signed
from tenure._backends.servicebus.names import Path
from tenure._logins import HeldLogin, Login
from tenure._runtime.remote_clock import RemoteClock
from tenure._secret import Secret
from tenure.errors import TenureError, Unavailable

T = TypeVar("T")

PAGE = 100
"""The number of queues that one answer lists."""

LISTINGS_MAX = 5
"""How often they are listed at most, while each time has more."""


@dataclass(frozen=True, slots=True)
class Entity:
    """What is configured of a queue or a subscription; times in seconds."""

    lock: float
    max_deliveries: int
    sessions: bool
    dedupe_window: float | None
    """None: it doesn't detect duplicates."""
    dead_letters_expired: bool
    metadata: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How many messages an entity has. Locked and deferred ones are among the active."""

    active: int
    scheduled: int
    dead: int


class NoRights(Exception):
    """This process may not read or change entities."""


class Administration:
    """The namespace's entities. All methods are called on the library's thread."""

    def __init__(self, namespace: Namespace, clock: RemoteClock) -> None:
        self._namespace = namespace
        self._clock = clock
        self._asked_at = namespace.clock.now()
        self._client: ServiceBusAdministrationClient | None = None
        self.may_manage: bool | None = None
        """Whether this process has the right Manage; None while that is not known."""
        namespace.at_close(self._close)

    async def find(self, path: Path) -> Entity | None:
        """Return an entity, or None if there is none of this name.

        Raises:
            NoRights: This process may not read it.
        """
        return await self._allowed(lambda: self._find(path))

    async def create(self, entity: str, options: dict[str, Any]) -> bool:
        """Create a queue; return whether it is new."""

        async def create() -> bool:
            try:
                await self._here().create_queue(entity, **options)
            except ResourceExistsError:
                return False
            return True

        return await self._allowed(create)

    async def update(self, path: Path, change: Callable[[Entity], dict[str, Any]]) -> bool:
        """Change an entity; return False if it is gone.

        It is written as a whole: what *change* returns, and all else as it was read with the entity that *change* gets.
        """

        async def update() -> bool:
            client = self._here()
            try:
                found: Any
                if path.subscription is None:
                    found = await self._read(client.get_queue(path.entity))
                else:
                    found = await self._read(client.get_subscription(path.entity, path.subscription))
                for name, value in change(_entity(path, found)).items():
                    setattr(found, name, value)
                if path.subscription is None:
                    await client.update_queue(found)
                else:
                    await client.update_subscription(path.entity, found)
            except ResourceNotFoundError:
                return False
            return True

        return await self._allowed(update)

    async def delete(self, path: Path) -> None:
        """Delete a queue or a subscription, if it exists."""

        async def delete() -> None:
            with suppress(ResourceNotFoundError):
                if path.subscription is None:
                    await self._here().delete_queue(path.entity)
                else:
                    await self._here().delete_subscription(path.entity, path.subscription)

        await self._allowed(delete)

    async def counts(self, path: Path) -> Counts | None:
        """Return how many messages an entity has; None if there is none of this name."""

        async def count() -> Counts | None:
            client = self._here()
            found: Any
            try:
                if path.subscription is None:
                    found = await self._read(client.get_queue_runtime_properties(path.entity))
                    scheduled = _count(found.scheduled_message_count)
                else:
                    asked = client.get_subscription_runtime_properties(path.entity, path.subscription)
                    found, scheduled = await self._read(asked), 0
            except ResourceNotFoundError:
                return None
            return Counts(_count(found.active_message_count), scheduled, _count(found.dead_letter_message_count))

        return await self._allowed(count)

    async def queues(self) -> list[tuple[str, str]]:
        """Return every queue: its name and its user metadata."""
        return await self._allowed(self._list_queues)

    async def _list_queues(self) -> list[tuple[str, str]]:
        found: dict[str, str] = {}
        # A page begins behind a number of queues, not behind a queue: if one of them is deleted meanwhile, another one
        # is missing. So if there are several pages, they are read until nothing new is found.
        for _ in range(LISTINGS_MAX):
            some = await self._read(self._listed())
            known = found.keys() & some.keys()
            found |= some
            if len(known) == len(some) or len(some) < PAGE:
                break
        return list(found.items())

    async def _listed(self) -> dict[str, str]:
        return {str(one.name): str(one.user_metadata or "") async for one in self._here().list_queues()}

    async def tier(self) -> str:
        """Return the tier of the namespace: Standard or Premium, say."""

        async def read() -> str:
            found = await self._read(self._here().get_namespace_properties())
            return str(found.messaging_sku)

        return await self._allowed(read)

    async def _find(self, path: Path) -> Entity | None:
        client = self._here()
        found: Any
        try:
            if path.subscription is None:
                try:
                    found = await self._read(client.get_queue(path.entity), (AttributeError,))
                except AttributeError:  # the library has looked for a queue in the description of a topic
                    return await self._topic(path.entity)
            else:
                found = await self._read(client.get_subscription(path.entity, path.subscription))
        except ResourceNotFoundError:
            return None
        return _entity(path, found)

    async def _topic(self, name: str) -> Entity:
        """Return a topic, which is only sent to: locks and deliveries are those of its subscriptions."""
        found: Any = await self._read(self._here().get_topic(name))
        window = found.duplicate_detection_history_time_window if found.requires_duplicate_detection else None
        return Entity(30.0, 10, False, _seconds(window), False, found.user_metadata or "")

    async def _allowed(self, ask: Callable[[], Awaitable[T]]) -> T:
        self._asked_at = self._namespace.clock.now()
        try:
            answer = await ask()
        except HttpResponseError as error:
            if error.status_code in (401, 403) and not self.may_manage:  # else rights are being changed
                self.may_manage = False
                raise NoRights from error
            raise
        self.may_manage = True
        return answer

    async def _read(self, answer: Awaitable[T], passed: tuple[type[Exception], ...] = ()) -> T:
        """Return an answer. The library fails with errors of any kind at one that it can't read; some are *passed* on.

        Raises:
            Unavailable: It can't be read.
        """
        try:
            return await answer
        except (AzureError, OSError, TenureError):
            raise
        except Exception as error:
            if isinstance(error, passed) or self._namespace.is_closed:  # closed, it fails with anything
                raise
            raise Unavailable(
                f"{self._namespace.url} gave an answer for management that can't be read: {error!r:.200}"
            ) from error

    def _here(self) -> ServiceBusAdministrationClient:
        if self._client is None:
            address, options = self._namespace.address, self._namespace.options
            settings: dict[str, Any] = {
                "retry_total": 0,
                "permit_redirects": False,  # only the servers that the URL names are asked, and never without its TLS
                "read_timeout": options.timeout + 1.0,
                "transport": _Transport(self._learn, is_plain=address.emulator, signer=self._namespace.signer),
            }
            signer = self._namespace.signer
            if signer is not None:
                host = f"{address.host.partition(':')[0]}:{options.admin_port}" if address.emulator else address.host
                # The transport writes the login of each request.
                self._client = ServiceBusAdministrationClient(host, cast(Any, signer), **settings)
            elif address.connection_string is None:
                self._client = ServiceBusAdministrationClient(address.host, self._namespace.credential, **settings)
            elif address.emulator:
                host, _, _ = address.host.partition(":")
                text = address.connection_string.reveal().replace(address.host, f"{host}:{options.admin_port}", 1)
                connected(Secret(text))
                self._client = ServiceBusAdministrationClient.from_connection_string(text, **settings)
            else:
                self._client = ServiceBusAdministrationClient.from_connection_string(
                    address.connection_string.reveal(), **settings
                )
        return self._client

    def _learn(self, headers: Any) -> None:
        """Note the service's clock, which every answer shows in whole seconds."""
        self._clock.learn_date(headers.get("Date"), self._asked_at)

    async def _close(self) -> None:
        if self._client is not None:
            async with asyncio.timeout(2.0):
                await self._client.__aexit__(None, None, None)


class _Transport(AioHttpTransport):
    """Tells *learn* of each answer; *is_plain*: without TLS, as the emulator speaks. The library knows https only."""

    def __init__(self, learn: Callable[[Any], None], *, is_plain: bool, signer: Signer | None) -> None:
        super().__init__()
        self._learn = learn
        self._is_plain = is_plain
        self._login = None if signer is None else HeldLogin(signer.logins)

    async def send(self, request: Any, **options: Any) -> Any:
        if self._is_plain:
            request.url = request.url.replace("https://", "http://", 1)
        login = None if self._login is None else await self._login.now()
        answer = await self._send(request, login, options)
        if self._login is not None and login is not None and answer.status_code == 401:
            newer = await self._login.after(login)
            if newer is not None:  # a request that is refused was not carried out
                answer = await self._send(request, newer, options)
        self._learn(answer.headers)
        return answer

    async def _send(self, request: Any, login: Login | None, options: dict[str, Any]) -> Any:
        if login is not None:
            request.headers["Authorization"] = signed(f"https://{urlsplit(request.url).netloc}", login).token
        return await super().send(request, **options)


def _entity(path: Path, found: Any) -> Entity:
    """Return what is configured of a queue or a subscription, as the library has *found* it."""
    detects = path.subscription is None and found.requires_duplicate_detection
    return Entity(
        _seconds(found.lock_duration) or 60.0,
        found.max_delivery_count or 10,
        bool(found.requires_session),
        _seconds(found.duplicate_detection_history_time_window) if detects else None,
        bool(found.dead_lettering_on_message_expiration),
        found.user_metadata or "",
    )


def _count(number: Any) -> int:
    return number if isinstance(number, int) and number > 0 else 0


def _seconds(length: Any) -> float | None:
    return length.total_seconds() if isinstance(length, timedelta) else None

"""Connections to the service, each read by one task: what the public methods of the client library can't do.

``azure-servicebus`` reads a connection only while a method runs on it. So two methods on one connection wait for each
other for up to 0.2 s; ``receive_messages`` leaves credit behind, for which the service locks messages that nobody
receives; it can't hand a message back uncounted, or set properties with a verdict; and each verdict takes a round trip
of its own. All of that is in the protocol.

So the library makes senders and receivers by its public methods, and its own parts connect, log in and attach the link
(``library``); from then on the link is used here. See docs/decisions/0024-service-bus-links.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from azure.core.exceptions import AzureError

from tenure._backends.servicebus import amqp
from tenure._backends.servicebus.codec import (
    CORRELATION,
    Incoming,
    Transfer,
    incoming,
    request_of,
    text_of,
    uint_of,
    value_in,
)
from tenure._backends.servicebus.library import (
    AMQPException,
    AuthenticationException,
    Link,
    SendingLink,
    TokenAuthFailure,
    Wire,
)

LISTEN = 1.0
"""Seconds after which a connection without traffic looks whether it must show that it is alive."""

LOGIN_EVERY = 10.0
"""Seconds between two looks whether the login ends soon."""

SILENCE = 10.0
"""Seconds without a frame while something is asked, after which a connection is given up."""

ANSWERS = 300
"""For how many answers to requests the service has leave."""

NOT_FOUND = "amqp:not-found"


class Refused(Exception):
    """The service's answer is an error: its AMQP condition, and its text."""

    def __init__(self, condition: str, text: str) -> None:
        super().__init__(f"{text} ({condition})")
        self.condition = condition
        self.text = text


class Disconnected(Exception):
    """The connection or the link is gone; what was asked on it may have been done or not."""


FAILURES = (Refused, Disconnected, AzureError, AMQPException, OSError, ValueError)  # a TimeoutError is an OSError
"""What a request may fail with, here and in the library, which raises a ``ValueError`` where something is closed."""


class Outcome(NamedTuple):
    """A verdict in the words of AMQP."""

    name: str
    state: bytes
    """The same, encoded."""
    changes: Mapping[str, object] = MappingProxyType({})
    """Of properties."""
    undeliverable: bool = False
    reason: str = ""
    description: str = ""


ACCEPTED = Outcome("accepted", amqp.described(0x24, ()))
RELEASED = Outcome("released", amqp.described(0x26, ()))


def modified(changes: Mapping[str, object], *, undeliverable: bool = False) -> Outcome:
    """Return the outcome that abandons, or defers if it is *undeliverable* here; with *changes* of properties."""
    parts = amqp.encoded(True), amqp.encoded(undeliverable), amqp.fields(changes)
    return Outcome("modified", amqp.described(0x27, parts), changes, undeliverable)


def rejected(reason: str, description: str, changes: Mapping[str, object]) -> Outcome:
    """Return the outcome that dead-letters, with *changes* of properties."""
    info = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description, **changes}
    error = amqp.symbol("com.microsoft:dead-letter"), amqp.encoded(description), amqp.fields(info)
    state = amqp.described(0x25, (amqp.described(0x1D, error),))
    return Outcome("rejected", state, changes, reason=reason, description=description)


class Connection:
    """A connection of the library, which opened it for a receiver, a sender, or requests alone."""

    def __init__(self, owner: Any, clock: Callable[[], float]) -> None:
        self._now = clock
        self._wire = Wire(owner, lambda: self._give_up(Disconnected("a transfer was cut off")))
        self.lost: Exception | None = None
        """Why it can't be used any more."""
        self._waiting: set[asyncio.Future[Any]] = set()
        self._asked: set[asyncio.Future[Any]] = set()
        """Those of them that are questions: the service certainly answers."""
        self._asked_since = 0.0
        """When the first question was asked after the last frame."""
        self.silence_max = SILENCE
        """Seconds without a frame while something is asked, after which it is given up."""
        self._logging_in: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._management: dict[str, _Requests] = {}
        self._management_lock = asyncio.Lock()
        self._next_login = time.monotonic() + LOGIN_EVERY

    def start(self) -> None:
        """Begin to read."""
        self._reading = asyncio.ensure_future(self._read())

    async def close(self) -> None:
        """Stop reading, and close the connection; what waits for it gets ``Disconnected``."""
        self._lose(Disconnected("the connection was closed"))
        try:
            if tasks := [task for task in (self._reading, self._logging_in) if task is not None]:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        finally:
            await self._wire.close()

    async def _read(self) -> None:
        try:
            while self.lost is None:
                if time.monotonic() >= self._next_login and (self._logging_in is None or self._logging_in.done()):
                    self._next_login = time.monotonic() + LOGIN_EVERY
                    self._logging_in = asyncio.ensure_future(self._keep_login())
                await self._wire.read(LISTEN)
                self._check()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._lose(error)
        # Else the service would go on to deliver here what nobody reads, until the next use finds out.
        self._wire.end()

    async def _keep_login(self) -> None:
        """Log in anew before the login ends. A failure is no loss before that: the next look tries again."""
        left = self._wire.login_ends_in
        if left is None:
            return
        try:
            await self._wire.log_in()
        except Exception as error:
            if left <= 0:
                self._give_up(error)
        else:
            if not self._wire.can_log_in and left < 3 * LOGIN_EVERY:
                self._give_up(Disconnected("the link for the login is gone"))

    def _check(self) -> None:
        """Raise an exception if the link is detached, or if the service is silent although it was asked."""
        if self._asked and time.time() - max(self._asked_since, self._last_frame) > self.silence_max:
            raise Disconnected(f"the service has sent nothing for {self.silence_max:g} s")
        if self._wire.link is not None and self._wire.link.is_attached() is False:
            raise Disconnected("the link was detached")

    def _lose(self, error: Exception) -> None:
        if self.lost is not None:
            return
        self.lost = error
        for future in self._waiting:
            if not future.done():
                future.set_exception(readable(error))
                future.exception()  # it was looked at, if nobody awaits it any more
        self._waiting.clear()
        self._ended()

    def _ended(self) -> None:
        """Note that it is lost; for subclasses."""

    @property
    def _last_frame(self) -> float:
        return self._wire.last_frame_at

    def _future(self, *, is_question: bool = True) -> asyncio.Future[Any]:
        """Return a future that fails when the connection is lost."""
        self.check_alive()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        if is_question:
            # The time runs from the first one, also if that was given up: a caller may have less patience.
            if self._last_frame >= self._asked_since:
                self._asked_since = time.time()
            self._asked.add(future)
            future.add_done_callback(self._asked.discard)
        return future

    def check_alive(self) -> None:
        """Raise the reason why it can't be used, if it can't."""
        if self.lost is not None:
            raise readable(self.lost)

    # --- requests to the entity's management node ---

    async def request(self, node: str, operation: str, body: Mapping[str, Any], *, timeout: float) -> Mapping[Any, Any]:
        """Ask the management *node* of the entity; return the value of its answer, which is empty if it has none.

        Raises:
            Refused: The answer is an error.
        """
        requests = await self._management_of(node)
        answer = self._future()
        properties = {
            "operation": f"com.microsoft:{operation}",
            "type": "entity-mgmt",
            "com.microsoft:server-timeout": uint_of(int(timeout * 1_000)),
        }
        if self._wire.link is not None:
            properties["associated-link-name"] = self._wire.link.name
        try:
            return await requests.ask(properties, body, answer)
        finally:
            answer.cancel()  # it may have been given up before it was awaited

    async def _management_of(self, node: str) -> _Requests:
        async with self._management_lock:
            known = self._management.get(node)
            if known is not None:
                return known
            opened = self._future()
            requests = _Requests(self._wire, node, opened, lambda: self._unmanaged(node))
            try:
                await requests.open()
            finally:
                opened.cancel()
            self._management[node] = requests
            return requests

    def _unmanaged(self, node: str) -> None:
        self._management.pop(node, None)
        self._give_up(Disconnected("the management link was detached"))


class _Requests:
    """The links to a management node and from it."""

    def __init__(self, wire: Wire, node: str, opened: asyncio.Future[None], lost: Callable[[], None]) -> None:
        self._node = node
        self._opened = opened
        self._lost = lost
        self._asked: dict[UUID, asyncio.Future[Incoming]] = {}
        self._is_begun = False
        """Whether the service was asked for both links."""
        self._links: tuple[SendingLink, Link] = wire.pair(node, self._look)
        self._payload = Payload()
        self._links[1].on_transfer(self._on_transfer)

    async def open(self) -> None:
        """Attach both links.

        Raises:
            Exception: One was refused.
        """
        for link in self._links:
            await link.attach()
        self._is_begun = True
        self._look()
        await self._opened

    def _look(self) -> None:
        """Tell that the links are attached, or that one is not, or is no more."""
        if not self._is_begun:
            return
        try:
            attached = [link.is_attached() for link in self._links]
        except Exception as error:
            self._end(error)
            return
        if all(attached):
            if not self._opened.done():
                self._opened.set_result(None)
        elif False in attached:
            if self._opened.done():
                self._end(Disconnected("the management link was detached"))
            else:  # the reason follows a link that is refused
                asyncio.get_running_loop().call_later(1.0, self._end, Disconnected("the management link was refused"))

    def _end(self, error: Exception) -> None:
        if not self._opened.done():
            self._opened.set_exception(readable(error))
        elif not self._opened.cancelled() and self._opened.exception() is None:
            self._lost()

    async def ask(
        self, properties: Mapping[str, object], body: Mapping[str, object], answer: asyncio.Future[Incoming]
    ) -> Mapping[Any, Any]:
        """Send a request; return the value of its answer, which is empty if it has none.

        Raises:
            Refused: It is an error.
        """
        id_ = uuid4()

        def sent(state: Mapping[str, Any] | None) -> None:
            if state is not None and "rejected" in state and not answer.done():
                answer.set_exception(refusal(state))

        self._asked[id_] = answer
        try:
            await self._links[0].send(Transfer(request_of(self._node, id_, properties, body)), sent)
            found = await answer
        finally:
            del self._asked[id_]
        told = found.application
        status = told.get("statusCode")
        if status in (200, 202):
            return _Answer(value_in(found))
        if status == 204:
            return _Answer()
        raise Refused(text_of(told.get("errorCondition")) or f"status {status}", text_of(told.get("statusDescription")))

    async def _on_transfer(self, frame: Sequence[Any]) -> None:
        """Take a frame of an answer."""
        found, is_last = self._payload.add(frame)
        if not is_last:
            return
        link = self._links[1]
        link.count += 1
        link.credit -= 1
        if link.credit <= 0:
            await link.give_leave(ANSWERS)
        if found is None:
            return
        message = incoming(found)
        id_ = message.properties[CORRELATION]
        answer = self._asked.get(id_) if isinstance(id_, UUID) else None
        if answer is not None and not answer.done():
            answer.set_result(message)


class _Answer(dict[Any, Any]):
    """The value of an answer; what it should have, and hasn't, is a failure of the service."""

    def __missing__(self, name: str) -> Any:
        raise Disconnected(f"an answer of the service has no {name}")


class Payload:
    """The frames of the message that comes on a link."""

    def __init__(self) -> None:
        self._parts = bytearray()
        self.first: Sequence[Any] = ()
        """The first of them, which names its delivery."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a message whose end has not come yet."""
        return bool(self._parts)

    def add(self, frame: Sequence[Any]) -> tuple[memoryview | None, bool]:
        """Take a frame; return the message if it is complete, and whether this was the last frame of one.

        A message that the service has begun and aborted is none.
        """
        is_aborted = bool(frame[9])
        is_last = is_aborted or not frame[5]
        if frame[1] is not None and not self._parts:
            self.first = frame
        payload = frame[11]
        if self._parts or not is_last:
            self._parts.extend(payload or b"")
            payload = self._parts
        if not is_last:
            return None, False
        self._parts = bytearray()
        return (None if is_aborted else memoryview(payload)), True


def refusal(state: Mapping[str, Any]) -> Exception:
    """Return the error in the state of a delivery."""
    error = error_in(state)
    if error is None:
        return Refused("unknown", f"the service answered with {', '.join(map(str, state))}")
    return Refused(text_of(error[0]), text_of(error[1]) if len(error) > 1 else "")


def error_in(state: Mapping[str, Any]) -> Any:
    """Return the error in the state of a delivery, as the library has it; None if there is none."""
    found = state.get("rejected")
    return found[0] if found and found[0] else None


def readable(error: Exception) -> Exception:
    """Return an error of the library's inner parts as one of ours.

    They also raise errors of any kind on frames that they don't expect: then the connection is as good as lost.
    """
    match error:
        case Refused() | Disconnected() | OSError() | AzureError():
            return error
        case TokenAuthFailure(status_code=404):  # an entity that is missing is refused at the login for it
            return Refused(NOT_FOUND, text_of(error.status_description))
        case AuthenticationException():
            return Refused("com.microsoft:auth-failed", text_of(error.description))
        case AMQPException():
            condition = text_of(getattr(error.condition, "value", error.condition))
            if condition.startswith(_CONNECTION):
                return Disconnected(text_of(error.description) or condition)
            return Refused(condition, text_of(error.description))
    return Disconnected(f"{type(error).__name__}: {error}")


_CONNECTION = ("amqp:socket", "amqp:connection", "amqp:link:detach", "amqp:client-error", "amqp:unknown")
"""The conditions, by their beginnings, of a connection or a link that is gone."""

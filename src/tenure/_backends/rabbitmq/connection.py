"""A connection to RabbitMQ by aiormq, on which locks may depend.

House rules:

- No request is ever cancelled: the driver would close the channel, and with it lose the locks of all messages on it.
  The requests of a channel are sent by a task of its own, each to its end. A caller waits for a future, and may give
  that up.
- What a channel is asked for is sent in the order of the calls. So the answer to a request proves that the server has
  taken the acknowledgements before it.
- A request without an answer ends its channel, and a server that is silent ends the connection; see ``SILENCE``.
- Of two messages with the same id, the second is published when the first is confirmed. The driver tells by the id
  which message has come back, so it would take the one for the other, and report it as confirmed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiormq
from aiormq import spec
from aiormq.abc import ChannelFrame, DeliveredMessage
from aiormq.auth import AuthBase

from tenure._backends.rabbitmq.address import Address, Options
from tenure._backends.rabbitmq.errors import (
    AmqpError,
    ChannelLost,
    ConnectionLost,
    NotTaken,
    Refused,
    Returned,
    is_login_over,
    refusal,
    refusal_to_connect,
)
from tenure._backends.rabbitmq.properties import Properties, read_properties
from tenure._backends.rabbitmq.wire import Message, Wire, connected, unread
from tenure._logins import Login
from tenure._runtime.closing import close_in_order
from tenure._runtime.tasks import Tasks
from tenure._secret import revealed

SILENCE = 1.25
"""How many times the heartbeat's interval a server may be silent. It sends two in one interval. The server gives up a
client after two to three intervals, so this process trusts no lock that the server has given to another."""

CLOSE_WITHIN = 1.0
"""Seconds for which the end waits for the server, and then for the driver."""

PATIENCE = 3.0
"""How many times the option ``timeout`` a request or a confirm may take before its channel is given up."""

LAST_WORDS = 0.02
"""Seconds for which a connection that is gone may still tell why: the driver reads what the server has said last."""

BLOCKED_AFTER = 0.02
"""Seconds after which a message that is not confirmed is a reason to ask the driver whether the server is full."""

FRAME_REST = 22
"""Bytes of a frame with the properties of a message that are for other things."""

GET = "get-"
"""How the name of a consumer begins that is the answer to a get; the rest is its tag."""

LARGE = 16_384
"""Bytes of a body from which on publishing waits until the network has taken it."""

# The driver logs what is an error to the caller here. Without handlers, Python would write it to stderr.
logging.getLogger("aiormq").addHandler(logging.NullHandler())


class _WithoutContent(logging.Filter):
    """Names by its id, or kind, what the driver would log with its content.

    That is a message that comes back too late, with body and headers; and, at ``DEBUG``, a new secret.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_named, record.args))
        return True


def _named(content: object) -> object:
    match content:
        case DeliveredMessage():
            return f"<message {content.header.properties.message_id!r}>"
        case ChannelFrame() if content.payload[_METHOD_AT : _METHOD_AT + len(_UPDATE_SECRET)] == _UPDATE_SECRET:
            return "<update-secret>"
    return content


_UPDATE_SECRET, _METHOD_AT = b"\0\x0a\0\x46", 7
"""How a frame with a new secret begins, behind its type, channel and length."""

logging.getLogger("aiormq.channel").addFilter(_WithoutContent())
logging.getLogger("aiormq.connection").addFilter(_WithoutContent())


class _Driver(aiormq.Connection):
    """The driver, which would log in as ``guest`` where no user is named: with a token, none is needed."""

    def _credentials_class(self, start_frame: spec.Connection.Start) -> Any:
        found = super()._credentials_class(start_frame)
        return found if self.url.user else SimpleNamespace(name=found.name, value=_WithoutUser)


class _WithoutUser(AuthBase):
    def encode(self) -> str:
        return f"\0\0{self.connector.url.password or ''}"


@dataclass(slots=True, eq=False)
class Delivered:
    """A message as it came, unacknowledged on its channel."""

    channel: AmqpChannel
    tag: int
    consumer: str
    redelivered: bool
    properties: Properties
    body: bytes
    at: float
    """When it came, by the loop's clock."""


@dataclass(slots=True, eq=False)
class Published:
    """A message that was sent and is not confirmed."""

    exchange: str
    properties: Properties
    body: bytes
    confirmed: asyncio.Future[None]


class AmqpChannel:
    """A channel. Made by :meth:`AmqpConnection.channel`."""

    def __init__(self, connection: AmqpConnection, raw: aiormq.Channel) -> None:
        self.connection = connection
        self.number = raw.number
        self.lost: AmqpError | None = None
        """Why it is over; None while it can be used."""
        self.on_lost: Callable[[AmqpError], None] = lambda _: None
        self.on_rejected: Callable[[AmqpError, list[Published]], None] | None = None
        """Called if the server has closed it with a code, with what was sent and is not confirmed, in order: instead of
        failing that."""
        self.on_delivery: Callable[[Delivered], None] = lambda _: None
        """Called with each message that comes."""
        self.on_cancelled: Callable[[str], None] = lambda _: None
        """Called with a consumer that the server has ended, as its queue is gone."""
        self._raw = raw
        self._orders: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any] | None]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._publishing: dict[str, asyncio.Task[None]] = {}  # by id; those that the driver has
        self._sent: dict[asyncio.Future[None], Published] = {}  # in the order in which the driver has it
        self._unconfirmed: dict[asyncio.Task[None], float] = {}  # since when, by the loop's clock; the oldest first
        raw.closing.add_done_callback(self._on_closed)
        raw.on_consumer_cancel_callbacks.add(self._on_consumer_cancelled)

    # --- requests ---

    def request(self, method: Any) -> asyncio.Future[Any]:
        """Send a request, and return its answer when it comes."""
        self._check()
        answer = self._future()
        self._order(partial(self._ask, method), answer)
        return answer

    def begin_close(self) -> None:
        """Close it, once all is sent that it was asked for; what is unacknowledged on it is delivered again."""
        if self.lost is None:
            self._order(self._close, None)
            self._lose(ChannelLost(0, "the channel is closed"))

    # --- publishing ---

    def publish(
        self, exchange: str, routing_key: str, properties: Properties, body: bytes, *, mandatory: bool = True
    ) -> asyncio.Future[None]:
        """Publish a message; the future is done when it is confirmed, or raises why it isn't.

        Args:
            exchange: Where to.
            routing_key: To be routed by.
            properties: With an id; of at most ``connection.properties_max`` bytes.
            body: The content.
            mandatory: Whether it comes back if no queue takes it, and the future raises ``Returned``.
        """
        self._check()
        confirmed: asyncio.Future[None] = self._future()
        publishing = self.connection.spawn(
            self._publish(exchange, routing_key, properties, body, mandatory, confirmed), "publish"
        )
        # Not with the future, which may be given up: the driver goes on.
        self._unconfirmed[publishing] = self.connection.loop.time()
        publishing.add_done_callback(self._unconfirmed.pop)
        self.connection.watch_unconfirmed()
        return confirmed

    async def _publish(
        self,
        exchange: str,
        routing_key: str,
        properties: Properties,
        body: bytes,
        mandatory: bool,
        confirmed: asyncio.Future[None],
    ) -> None:
        id_ = properties.message_id or ""
        while (earlier := self._publishing.get(id_)) is not None:
            await asyncio.wait({earlier})
        if self.lost is not None:
            return
        task = asyncio.current_task()
        assert task is not None
        if id_:
            self._publishing[id_] = task
        self._sent[confirmed] = Published(exchange, properties, body, confirmed)
        try:
            await self._raw.basic_publish(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=properties,
                mandatory=mandatory,
                wait=len(body) >= LARGE,
            )
        except aiormq.PublishError:
            _fail(confirmed, Returned())
        except aiormq.exceptions.DeliveryError:
            _fail(confirmed, Refused())
        except (aiormq.AMQPError, aiormq.ChannelInvalidStateError, asyncio.CancelledError) as error:
            self._fail_soon(error)
        except Exception as error:
            _fail(confirmed, error)
        else:
            if not confirmed.done():
                confirmed.set_result(None)
        finally:
            del self._sent[confirmed]
            if id_:
                del self._publishing[id_]

    @property
    def unconfirmed_since(self) -> float | None:
        """Since when the oldest message is not confirmed, by the loop's clock; None if all are."""
        return next(iter(self._unconfirmed.values()), None)

    def give_up(self, error: ChannelLost) -> None:
        """End it, as the server doesn't answer; also one that waits to be closed behind a request without an answer."""
        self._lose(error)
        if self._sender is not None:
            self._sender.cancel()
        self.connection.spawn(self._close(), "close")

    # --- verdicts ---

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a delivery; with *multiple*, all up to it. There is no answer: a request behind it has one."""
        self._check()
        self._order(partial(self._raw.basic_ack, tag, multiple, wait=False), None)

    def reject(self, tag: int, *, requeue: bool = True) -> None:
        """Let a delivery be delivered again, and count this one; or else let the server move it to the dead letters.

        There is no answer.
        """
        self._check()
        self._order(partial(self._raw.basic_reject, tag, requeue=requeue, wait=False), None)

    def reject_up_to(self, tag: int) -> None:
        """Let all deliveries up to this one be delivered again, and count these. There is no answer."""
        self._check()
        self._order(partial(self._raw.basic_nack, tag, multiple=True, requeue=True, wait=False), None)

    # --- the sender ---

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.connection.loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _order(self, act: Callable[[], Awaitable[Any]], answer: asyncio.Future[Any] | None) -> None:
        self._orders.append((act, answer))
        if self._sender is None:
            self._sender = self.connection.spawn(self._send(), "sender")

    async def _send(self) -> None:
        """Carry out what was ordered, one after the other."""
        try:
            while self._orders:
                act, answer = self._orders.popleft()
                if answer is not None:
                    self._be_patient()
                try:
                    found = await act()
                except (aiormq.AMQPError, aiormq.ChannelInvalidStateError, asyncio.CancelledError) as error:
                    self._orders.clear()
                    self._fail_soon(error)
                    return
                except Exception as error:  # a value that doesn't fit into its field
                    if answer is None:  # an acknowledgement that was not sent: nothing after it would prove it
                        self._lose(ChannelLost(0, f"an acknowledgement can't be sent: {error}"))
                        raise
                    _fail(answer, error)
                else:
                    if answer is not None and not answer.done():
                        answer.set_result(found)
        finally:
            self._sender = None
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    async def _ask(self, method: Any) -> object:
        match method:
            case spec.Basic.Get():
                message = await self._raw.basic_get(method.queue or "")
                if message.delivery_tag is None:
                    return None  # the queue is empty
                # Also if the request was given up meanwhile: it is ours. The server counts a consumer for each.
                consumer, properties = f"{GET}{message.delivery_tag}", unread(message.header.properties)
                delivered = self._delivered(
                    consumer, message.delivery_tag, bool(message.redelivered), properties, message.body
                )
                self._pass_on(delivered)
                return delivered
            case spec.Basic.Consume():
                return await self._raw.basic_consume(
                    method.queue or "",
                    _never,  # its messages don't reach the driver
                    consumer_tag=method.consumer_tag,
                    arguments=method.arguments,
                )
        return await self._raw.rpc(method)

    async def _close(self) -> None:
        await self._raw.close(aiormq.ChannelClosed(0, "closed"))

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.connection.loop.call_later(self.connection.patience, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        self.give_up(ChannelLost(0, f"a request had no answer within {self.connection.patience:g} s"))

    # --- what comes ---

    def receive(self, message: Message) -> None:
        """Take a message that has come to a consumer."""
        _, consumer, tag, redelivered, properties, body = message
        try:
            self._pass_on(self._delivered(consumer, tag, redelivered, properties, body))
        except Exception as error:  # a bug: it must not cost the connection
            self.connection.loop.call_exception_handler(
                {"message": f"receiving a message on channel {message.channel} failed", "exception": error}
            )

    def _pass_on(self, delivered: Delivered) -> None:
        if self.lost is None:  # else it is delivered again
            self.on_delivery(delivered)

    def _delivered(self, consumer: str, tag: int, redelivered: bool, properties: bytes, body: bytes) -> Delivered:
        at = self.connection.loop.time()
        return Delivered(self, tag, consumer, redelivered, read_properties(properties), body, at)

    def _on_consumer_cancelled(self, method: spec.Basic.Cancel) -> None:
        self.on_cancelled(method.consumer_tag or "")

    # --- the end ---

    def _fail_soon(self, error: BaseException) -> None:
        """Note that a request has failed with its channel: why, the driver tells when it has closed it."""
        if self._raw.closing.done():
            self._on_closed(self._raw.closing)
        elif isinstance(error, aiormq.AMQPError) and self.lost is None:  # such as an answer that makes no sense
            self._lose(refusal(error))
            self.connection.spawn(self._close(), "close")
        # else: it is being closed

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        self._lose(refusal(None if closing.cancelled() else closing.exception()))

    def _lose(self, error: AmqpError) -> None:
        """Note that it is over: every request fails, and every message is unconfirmed for good."""
        if self.lost is not None:
            return
        self.lost = error
        sent: dict[asyncio.Future[None], Published] = {}
        if self.on_rejected is not None and isinstance(error, ChannelLost) and error.code and self._sent:
            sent = self._sent.copy()
            self.on_rejected(error, list(sent.values()))
        for future in list(self._waiting):
            if future not in sent:
                _fail(future, NotTaken(0, f"the channel was closed before: {error}") if sent else error)
        self.connection.forget(self)
        if is_login_over(error):
            self.connection.login_over.set()
        self.on_lost(error)

    def end(self, error: AmqpError) -> None:
        """Note that the connection is over."""
        self._orders.clear()
        self._lose(error)


class AmqpConnection:
    """A connection. Made by :func:`connect`."""

    def __init__(self, options: Options) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: AmqpError | None = None
        self.is_replaced = False
        """Whether it is closed for a message that the server has refused: another one can do what it was asked for."""
        self.login_over = asyncio.Event()
        """Set when the server refuses a request as the token has ended that the connection was made with."""
        self.heartbeat = options.heartbeat
        self.patience = PATIENCE * options.timeout
        self._raw: aiormq.Connection | None = None
        self._wire: Wire | None = None
        self._channels: dict[int, AmqpChannel] = {}  # by number
        self._newest_number = 0  # of a channel
        self._tasks = Tasks()
        self._timer: asyncio.TimerHandle | None = None
        self._watching = False
        self._closing: asyncio.Task[None] | None = None
        self._while_open: list[asyncio.Task[None]] = []

    # --- for the client ---

    async def open(self, address: Address, login: Login, tls: ssl.SSLContext | None, purpose: str) -> None:
        """Connect, and log in."""
        self._wire = await connected(address.host, address.port, tls, self._on_wire_lost, self._on_message)
        named = ":".join(quote(part or "", safe="") for part in (login.user, revealed(login.password)))
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"amqp://{named}@{host}:{address.port}/{quote(address.vhost, safe='')}?heartbeat={self.heartbeat}"
        self._raw = _Driver(
            url,
            transport_factory=self._wire,
            client_properties={
                "product": "tenure",
                "platform": f"Python {sys.version_info.major}.{sys.version_info.minor}",
                "connection_name": f"tenure {purpose}",
            },
        )
        try:
            await self._raw.connect()
        except BaseException as error:
            self._wire.drop()
            closing = self.spawn(self._raw.close(aiormq.ConnectionClosed(0, "given up")), "close")
            await asyncio.wait({closing}, timeout=CLOSE_WITHIN)
            # By TLS 1.3, a server refuses the client's certificate after the handshake, and the driver doesn't tell it.
            if isinstance(error, Exception) and isinstance(self._wire.lost_by, ssl.SSLError):
                raise self._wire.lost_by from error
            if isinstance(error, (aiormq.AMQPError, EOFError)):
                raise refusal_to_connect(error) from error
            raise
        self._raw.closing.add_done_callback(self._on_closed)
        self._beat()

    @property
    def server(self) -> dict[str, Any]:
        """What the server tells about itself."""
        return dict(self._driver.server_properties or {})

    @property
    def tls_version(self) -> str:
        """The version of TLS, as Python writes it; empty without TLS."""
        return self._wire.tls_version if self._wire is not None else ""

    @property
    def properties_max(self) -> int:
        """Bytes of the properties of a message, at most: they must fit into one frame."""
        return (self._driver.connection_tune.frame_max or 131_072) - FRAME_REST

    async def channel(self, *, confirms: bool = False) -> AmqpChannel:
        """Open a channel, on which messages that are published are confirmed if asked for."""
        if self.lost is not None:
            raise self.lost
        opening = self.spawn(self._open_channel(confirms), "channel")
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    async def _open_channel(self, confirms: bool) -> AmqpChannel:
        try:
            raw = await self._driver.channel(self._free_number(), publisher_confirms=confirms)
        except (aiormq.AMQPError, RuntimeError, asyncio.CancelledError) as error:
            raise self.lost or refusal(error) from error
        except Exception as error:
            if self.lost is not None:  # then the driver raises any: a bare Exception, for lack of a reason
                raise self.lost from error
            raise
        if self.lost is not None:
            raise self.lost
        assert isinstance(raw, aiormq.Channel)
        channel = AmqpChannel(self, raw)
        self._channels[raw.number] = channel
        return channel

    def _free_number(self) -> int:
        """Return the number of a new channel: not one that was in use lately.

        When the server closes a channel, the driver takes its number for free before it has sent its answer. A new
        channel of that number would be a second one for the server, which ends the connection then.
        """
        most = self._driver.connection_tune.channel_max or 65_535
        for _ in range(most):
            self._newest_number = self._newest_number % most + 1
            if self._newest_number not in self._driver.channels:
                return self._newest_number
        raise ConnectionLost(0, f"all {most:,} channels of the connection are in use")

    async def update_secret(self, login: Login) -> None:
        """Let the server go on with the password, or token, of another *login*.

        Raises:
            AmqpError: It was refused, which ends the connection; or there was no answer.
        """
        try:
            await self._driver.update_secret(revealed(login.password) or "", reason="renewed", timeout=self.patience)
        except TimeoutError as error:
            raise AmqpError(0, f"a new secret had no answer within {self.patience:g} s") from error
        except aiormq.AMQPError as error:
            raise refusal(error) from error

    def do_while_open(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin *work*, which is cancelled when the connection is over."""
        self._while_open.append(self.spawn(work, name))

    async def close(self) -> None:
        """Say goodbye, and close it; or, if it is lost, wait until nothing of it is left."""
        if self.lost is None:
            self._end(ConnectionLost(0, "the connection is closed"))
        await close_in_order(self._wait_for_goodbye, self._drop_and_wait, self._tasks.cancel_all)

    async def _wait_for_goodbye(self) -> None:
        if self._closing is not None:
            await asyncio.wait({self._closing}, timeout=CLOSE_WITHIN)

    async def _drop_and_wait(self) -> None:
        self._drop()
        await self._wait_for_goodbye()

    # --- for channels ---

    @property
    def _driver(self) -> aiormq.Connection:
        assert self._raw is not None, "it is not open"
        return self._raw

    def spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        """Begin *work*, and keep it until it has ended."""
        return self._tasks.spawn(work, name=f"tenure-rabbitmq-{name}")

    def forget(self, channel: AmqpChannel) -> None:
        """Note that a channel is over."""
        if self._channels.get(channel.number) is channel:
            del self._channels[channel.number]

    def watch_unconfirmed(self) -> None:
        """Look, while messages are not confirmed, whether the server is full, or doesn't answer."""
        if not self._watching:
            self._watching = True
            self.spawn(self._watch_unconfirmed(), "watch")

    async def _watch_unconfirmed(self) -> None:
        try:
            await asyncio.sleep(BLOCKED_AFTER)
            while self.lost is None and (waiting := self._unconfirmed()):
                for channel, since in waiting:
                    if self.loop.time() - since > self.patience:
                        channel.give_up(ChannelLost(0, f"a message was not confirmed within {self.patience:g} s"))
                try:
                    async with asyncio.timeout(0):  # the driver tells it in no other way
                        await self._driver.ready()
                except TimeoutError:
                    # The server reads no more until it has room: then it would take what was given up.
                    self.fail(ConnectionLost(0, "the server is full and takes no messages"), reset=True)
                    return
                await asyncio.sleep(BLOCKED_AFTER)
        finally:
            self._watching = False

    def _unconfirmed(self) -> list[tuple[AmqpChannel, float]]:
        waiting = [(one, one.unconfirmed_since) for one in self._channels.values()]
        return [(one, since) for one, since in waiting if since is not None]

    # --- the end ---

    def _beat(self) -> None:
        """Give the connection up if the server was silent."""
        if self.lost is not None or self._wire is None:
            return
        silent = self.loop.time() - self._wire.heard_at
        if silent > self.heartbeat * SILENCE:
            self.fail(ConnectionLost(0, f"the server has sent nothing for {silent:.1f} s (option heartbeat)"))
            return
        self._timer = self.loop.call_later(self.heartbeat / 4, self._beat)

    def _on_message(self, message: Message) -> None:
        channel = self._channels.get(message.channel)
        if channel is not None:  # else it is over, and the server delivers again
            channel.receive(message)

    def _on_wire_lost(self, error: Exception | None) -> None:
        why = ConnectionLost(0, f"the connection was lost: {error or 'closed by the server'}")
        self.loop.call_later(LAST_WORDS, self.fail, why)

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        error = refusal(None if closing.cancelled() else closing.exception())
        self.fail(ConnectionLost(error.code, error.text))

    def fail(self, error: AmqpError, *, reset: bool = False) -> None:
        """Note that it is over, and everything on it; with *reset*, drop also what the server has not read yet."""
        if self.lost is None:
            self._end(error)
            self._drop(reset=reset)

    def _drop(self, *, reset: bool = False) -> None:
        if self._wire is not None:
            self._wire.drop(reset=reset)

    def _end(self, error: AmqpError) -> None:
        self.lost = error
        if self._timer is not None:  # it was opened
            self._timer.cancel()
            for task in self._while_open:
                task.cancel()
            self._closing = self.spawn(self._driver.close(aiormq.ConnectionClosed(error.code, error.text)), "close")
        for channel in list(self._channels.values()):
            channel.end(error)
        self._channels.clear()


async def _never(message: DeliveredMessage) -> None:
    raise AssertionError("the driver has got a message to a consumer")


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # it may be given up: then nobody asks for it


def _close_unused(opening: asyncio.Task[AmqpChannel]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().begin_close()


async def connect(
    address: Address, options: Options, login: Login, tls: ssl.SSLContext | None, purpose: str
) -> AmqpConnection:
    """Return a connection that can be used.

    Raises:
        AmqpError: The server refuses it.
        OSError: It can't be reached.
    """
    connection = AmqpConnection(options)
    await connection.open(address, login, tls, purpose)
    return connection

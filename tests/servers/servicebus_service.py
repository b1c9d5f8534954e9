"""A look-alike of Service Bus as a process: AMQP by qpid-proton, and the part of its HTTP interface that is needed.

Run as ``python -m tests.servers.servicebus_service PORT ADMIN_PORT FOLDER``. It does what the public documentation and
the clients say of the service, as far as tenure uses it, and a little more, so that the clients' own behaviour can be
tested: see ``control``.
"""

from __future__ import annotations

import hmac
import sys
import threading
import time
import urllib.parse
import uuid
import weakref
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any

from proton import (
    UNDESCRIBED,
    Array,
    Condition,
    Connection,
    Data,
    Delivery,
    Link,
    Message,
    Terminus,
    int32,
    symbol,
    timestamp,
    uint,
)
from proton.handlers import EndpointStateHandler, MessagingHandler
from proton.reactor import ApplicationEvent, Container, EventInjector

from tests.servers.servicebus_entities import DEAD, Entity, Ledger, Namespace, Refusal
from tests.servers.servicebus_http import KEYS, serve
from tests.servers.servicebus_wire import content_of, encoded, require_room, token_tag, unbatched

VENDOR = "com.microsoft:"
SESSION_FILTER = symbol(f"{VENDOR}session-filter")
EPOCH_TICKS = 621_355_968_000_000_000
"""The .NET ticks at the beginning of 1970."""
TICK = 0.01
BATCH_MAX = 1_048_576
FRAME_MAX = 65_536

KEY = "SAS_KEY_VALUE"
POLICIES = {"RootManageSharedAccessKey": "manage", "SendListen": "send listen", "Nothing": ""}
"""The policies of every look-alike, all with the same key; the emulator has the first."""


class Clock:
    """The wall clock, put forward by the file ``clock``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._stamp = 0, 0
        self._turned = 0.0

    def look(self) -> bool:
        """Read the file if it has changed; return whether it has."""
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return False
        stamp = found.st_mtime_ns, found.st_ino  # two may have been written within a tick of the file system's clock
        if stamp == self._stamp:
            return False
        self._stamp, self._turned = stamp, float(self._file.read_text())
        return True

    def now(self) -> float:
        return time.time() + self._turned


def rights_of(token: str) -> str | None:
    """Return the rights that a shared access signature gives; None if it is wrong."""
    parts = _parts_of(token)
    policy, audience, expiry = parts.get("skn", ""), parts.get("sr", ""), parts.get("se", "")
    key, rights = KEYS.get(policy) or (KEY, POLICIES.get(policy))
    if not expiry.isdigit() or int(expiry) <= time.time():
        return None
    signed = hmac.new(key.encode(), f"{audience}\n{expiry}".encode(), sha256).digest()
    if urllib.parse.unquote(parts.get("sig", "")) != b64encode(signed).decode():
        return None
    return rights


def _parts_of(token: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in token.removeprefix("SharedAccessSignature ").split("&") if "=" in part)


class Endpoints(EndpointStateHandler):
    """Opens what clients open; a link that waits for a session is opened when there is one."""

    def on_link_remote_open(self, event: Any) -> None:
        if event.link.state & Link.LOCAL_UNINIT:
            self.on_link_opening(event)
            if not getattr(event.link, "must_wait", False) and event.link.state & Link.LOCAL_UNINIT:
                event.link.open()


class Service(MessagingHandler):
    """The AMQP side. All state belongs to its thread; the HTTP side hands it functions to call."""

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(prefetch=0, auto_accept=False, auto_settle=False)
        self.handlers[0] = Endpoints(False, weakref.proxy(self))
        self._port = port
        self.ledger = Ledger(folder / "ledger.db")
        self.namespace = Namespace(self.ledger)
        self.clock = Clock(folder)
        self.rights: dict[tuple[Any, str], str] = {}  # by connection, and the path that a login is for
        self.policies: dict[tuple[Any, str], str] = {}  # which has signed that login
        self._receivers: dict[str, list[Link]] = {}  # our sending links, by entity
        self._replies: dict[tuple[Any, str], Link] = {}
        self._refused: list[tuple[Link, Condition]] = []
        self._begun: dict[Link, Delivery] = {}  # deliveries that are aborted in the next turn
        self._unsettled: dict[Delivery, tuple[Entity, uuid.UUID]] = {}
        self._waiting: list[tuple[float, Link, Entity]] = []  # links that wait for a session
        self._connections: set[Connection] = set()
        self.throttled = 0
        """So many requests get the answer that the service is busy."""
        self.revoked = False
        self.drains = True
        """Whether leave is taken back when clients ask for it: under load, the service does so late or never."""
        self.conflicts = 0
        """So many creations are refused since others are under way."""
        self.partitioned: set[str] = set()
        """The entities whose batches must be for one partition."""
        self.injector = EventInjector()

    # --- life ---

    def on_start(self, event: Any) -> None:
        container = event.container
        container.allowed_mechs = "ANONYMOUS"
        container.selectable(self.injector)
        container.listen(f"127.0.0.1:{self._port}")
        container.schedule(TICK, self)
        self._container = container

    def call(self, act: Callable[[], Any]) -> Any:
        """Call *act* on this thread, from another."""
        future: Future[Any] = Future()
        self.injector.trigger(ApplicationEvent("call", subject=(act, future)))
        return future.result(30)

    def on_call(self, event: Any) -> None:
        act, future = event.subject
        try:
            self.clock.look()
            result = act()
            self.ledger.write()
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)

    def on_timer_task(self, event: Any) -> None:
        self.clock.look()
        now = self.clock.now()
        for link, condition in self._refused:
            link.condition = condition
            link.close()
        self._refused.clear()
        for link, delivery in list(self._begun.items()):
            del self._begun[link]
            delivery.abort()
            self._flowed(link)
        for entity in self.namespace.entities():
            due = entity.next_due()
            if due is not None and due <= now and entity.tick(now):
                self._after(entity)
                if entity.dead is not None:
                    self._pump(entity.dead)
        self._retry_sessions(now)
        self.ledger.write()
        event.container.schedule(TICK, self)

    def _after(self, entity: Entity) -> None:
        """Deliver what is ready now, and detach the links of sessions that are over."""
        for link in list(self._receivers.get(entity.path, ())):
            if link.session_name is not None:
                held = entity.sessions.get(link.session_name)
                if held is None or held.holder != link.name:
                    self._drop(link)
                    text = "The session lock has expired on the session. Accept a new session."
                    link.condition = Condition(f"{VENDOR}session-lock-lost", text)
                    link.close()
        self._pump(entity)

    def on_connection_opening(self, event: Any) -> None:
        event.connection.container = "service"
        event.transport.idle_timeout = 240.0
        event.transport.max_frame_size = FRAME_MAX
        self._connections.add(event.connection)

    def on_disconnected(self, event: Any) -> None:
        connection = event.connection
        if connection is None:
            return
        self._connections.discard(connection)
        for known in (self.rights, self.policies, self._replies):
            for key in [key for key in known if key[0] == connection]:
                del known[key]
        link = connection.link_head(0)
        while link:
            self._drop(link)
            link = link.next(0)
        self.ledger.write()

    # --- links ---

    def on_link_opening(self, event: Any) -> None:
        link = event.link
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        link.snd_settle_mode, link.rcv_settle_mode = link.remote_snd_settle_mode, link.remote_rcv_settle_mode
        address = link.remote_source.address if link.is_sender else link.remote_target.address
        link.node = path_of(address or "")
        link.entity = link.session_name = None
        try:
            self._open(link, event.connection)
        except Refusal as refusal:
            self._refuse(link, refusal)
        self.ledger.write()

    def _open(self, link: Link, connection: Connection) -> None:
        if link.node == "$cbs" or link.node.endswith("/$management"):
            if link.node != "$cbs":
                self._check_rights(connection, link.node)
                self.namespace.entity(link.node.rpartition("/")[0]) if not self._is_topic(link.node) else None
            if link.is_sender:
                self._replies[connection, link.node] = link
            else:
                link.flow(1_000)
            return
        self._check_rights(connection, link.node)
        if link.is_receiver:
            self.namespace.targets(link.node)
            link.max_message_size = BATCH_MAX
            link.flow(1_000)
            return
        link.entity = entity = self.namespace.entity(link.node)
        if entity.settings.status in ("Disabled", "ReceiveDisabled"):
            raise Refusal("com.microsoft:entity-disabled", f"The messaging entity '{link.node}' is disabled.")
        wants, session = _session_filter(link)
        if wants:
            self._accept(link, entity, session)
        elif entity.settings.requires_session:
            text = (
                "It is not possible for an entity that requires sessions to create a non-sessionful message receiver."
            )
            raise Refusal("amqp:not-allowed", text)
        else:
            self._receivers.setdefault(entity.path, []).append(link)

    def _is_topic(self, node: str) -> bool:
        return node.rpartition("/")[0] in self.namespace.topics

    def _check_rights(self, connection: Connection, node: str) -> None:
        if self.revoked or not self.rights.get((connection, node.removesuffix("/$management"))):
            raise Refusal("amqp:unauthorized-access", f"Unauthorized access. 'Listen' or 'Send' is required: {node}")

    def _refuse(self, link: Link, refusal: Refusal) -> None:
        """Attach, then detach with an error, in the next turn of the loop, so that both frames are sent."""
        link.source.type = link.target.type = Terminus.UNSPECIFIED
        link.properties = {symbol("refused"): True}  # the client reads the properties of every link with a session
        link.open()
        self._refused.append((link, condition_of(refusal)))

    def _accept(self, link: Link, entity: Entity, session: str | None) -> None:
        found = entity.accept(session, link.name, self.clock.now())
        if found is not None:
            self._give_session(link, entity, *found)
            return
        link.must_wait = True
        properties = {str(name): value for name, value in (link.remote_properties or {}).items()}
        seconds = float(properties.get(f"{VENDOR}timeout", 65_000)) / 1_000
        self._waiting.append((time.monotonic() + seconds, link, entity))

    def _give_session(self, link: Link, entity: Entity, name: str, session: Any) -> None:
        link.session_name = name
        link.source.filter.clear()
        link.source.filter.put_object({SESSION_FILTER: name})
        link.properties = {symbol(f"{VENDOR}locked-until-utc"): EPOCH_TICKS + int(session.until * 10_000_000)}
        self._receivers.setdefault(entity.path, []).append(link)

    def _retry_sessions(self, now: float) -> None:
        left = []
        for until, link, entity in self._waiting:
            if link.state & Link.REMOTE_CLOSED or link.connection is None or not link.connection.transport:
                continue
            found = entity.accept(None, link.name, now)
            if found is not None:
                self._give_session(link, entity, *found)
                link.open()
            elif until <= time.monotonic():
                text = "The operation did not complete within the allocated time."
                self._refuse(link, Refusal(f"{VENDOR}timeout", text))
            else:
                left.append((until, link, entity))
        self._waiting = left

    def on_link_closing(self, event: Any) -> None:
        self._drop(event.link)
        self.ledger.write()

    def _drop(self, link: Link) -> None:
        entity = getattr(link, "entity", None)
        links = self._receivers.get(entity.path, []) if entity is not None else []
        if entity is not None and link in links:
            links.remove(link)
            entity.let_go(link.name, self.clock.now())
            self._retry_sessions(self.clock.now())
            self._pump(entity)

    # --- delivering ---

    def on_sendable(self, event: Any) -> None:
        self._flowed(event.link)

    def on_link_flow(self, event: Any) -> None:
        if event.link.is_sender:
            self._flowed(event.link)

    def _flowed(self, link: Link) -> None:
        entity = getattr(link, "entity", None)
        if entity is not None:
            self._pump(entity)
            self.ledger.write()
        if link.is_sender and link.drain_mode and self.drains:
            link.drained()

    def _pump(self, entity: Entity) -> None:
        """Deliver what is ready to the links that have credit, in turns."""
        links = self._receivers.get(entity.path, [])
        now = self.clock.now()
        while links:
            given = False
            for link in list(links):
                if link.credit <= 0 or not link.state & Link.LOCAL_ACTIVE or not self._holds(link, entity, now):
                    continue
                if link in self._begun:
                    continue
                settled = link.remote_snd_settle_mode == Link.SND_SETTLED
                item = entity.take(link.session_name, now, locks=not settled)
                if item is None:
                    continue
                given = True
                tag = token_tag(item.token) if item.token is not None else uuid.uuid4().bytes
                delivery = link.delivery(tag)
                link.stream(encoded(item, is_locked=not settled))
                link.advance()
                if settled:
                    delivery.settle()
                else:
                    assert item.token is not None
                    self._unsettled[delivery] = entity, item.token
            if not given:
                return
            links.append(links.pop(0))

    @staticmethod
    def _holds(link: Link, entity: Entity, now: float) -> bool:
        """Return whether a link still has its session, if it has one."""
        if link.session_name is None:
            return True
        entity.tick(now)
        held = entity.sessions.get(link.session_name)
        return held is not None and held.holder == link.name

    # --- what clients send ---

    def on_delivery(self, event: Any) -> None:
        delivery, link = event.delivery, event.link
        if link.is_receiver:
            if delivery.readable and not delivery.partial:
                raw = link.recv(delivery.pending)
                link.advance()
                self._incoming(event.connection, link, delivery, raw)
                link.flow(1)
        elif delivery.updated:
            self._settled(delivery)
        self.ledger.write()

    def _incoming(self, connection: Connection, link: Link, delivery: Delivery, raw: bytes) -> None:
        if link.node == "$cbs" or link.node.endswith("/$management"):
            request = Message()
            request.decode(raw)
            delivery.update(Delivery.ACCEPTED)
            delivery.settle()
            self._answer(connection, link, request)
            return
        try:
            self._throttle()
            self._check_rights(connection, link.node)
            if self.namespace.is_full:
                text = "The maximum entity size has been reached or exceeded for Queue."
                raise Refusal("amqp:resource-limit-exceeded", text, 403)
            contents = [content_of(one) for one in unbatched(raw)]
            if link.node in self.partitioned and len({one.session or one.message_id for one in contents}) > 1:
                text = "A batch must be for one partition: SessionId, PartitionKey or MessageId must be the same."
                raise Refusal("amqp:not-allowed", text)
            entities = self._store(link.node, contents)
        except Refusal as refusal:
            delivery.local.condition = condition_of(refusal)
            delivery.update(Delivery.REJECTED)
            entities = []
        else:
            delivery.update(Delivery.ACCEPTED)
        delivery.settle()
        for entity in entities:
            self._pump(entity)
        self._retry_sessions(self.clock.now())

    def _store(self, node: str, contents: list[Any]) -> list[Entity]:
        entities = self.namespace.targets(node)
        for entity in entities:
            if entity.settings.status in ("Disabled", "SendDisabled"):
                raise Refusal("com.microsoft:entity-disabled", f"The messaging entity '{node}' is disabled.")
            if entity.settings.requires_session and any(one.session is None for one in contents):
                raise Refusal("amqp:not-allowed", "The SessionId was not set on a message, and it cannot be sent.")
        for entity in entities:
            for content in contents:
                entity.send(content, self.clock.now())
        return entities

    def _throttle(self) -> None:
        if self.throttled > 0:
            self.throttled -= 1
            text = (
                "The request was terminated because the entity is being throttled. Please wait 2 seconds and try again."
            )
            raise Refusal(f"{VENDOR}server-busy", text, 503)

    def _settled(self, delivery: Delivery) -> None:
        found = self._unsettled.pop(delivery, None)
        if found is None:
            delivery.settle()
            return
        if self.revoked or not delivery.link.state & Link.LOCAL_ACTIVE:
            return  # it comes too late: the link is detached, the lock stays
        entity, token = found
        state, now = delivery.remote_state, self.clock.now()
        try:
            self._throttle()
            match state:
                case Delivery.ACCEPTED:
                    entity.complete(token, now)
                case Delivery.REJECTED:
                    condition = delivery.remote.condition
                    given = (condition.info if condition is not None else None) or {}
                    info = {str(name): value for name, value in given.items()}
                    require_room(entity.held(token, now), info)
                    entity.dead_letter(token, now, info)
                case Delivery.RELEASED:
                    entity.put_back(token, now, counts=False)
                case Delivery.MODIFIED:
                    given = delivery.remote.annotations or {}
                    changes = {str(name): value for name, value in given.items()}
                    require_room(entity.held(token, now), changes)
                    if delivery.remote.undeliverable:
                        entity.defer(token, now, changes)
                    else:
                        entity.put_back(token, now, counts=True, changes=changes)
                case _:
                    return  # settled without an outcome: the lock stays
        except Refusal as refusal:
            delivery.local.condition = condition_of(refusal)
            state = Delivery.REJECTED
        delivery.update(state)
        delivery.settle()
        self._changed(entity)

    def _changed(self, entity: Entity) -> None:
        self._pump(entity)
        if entity.dead is not None:
            self._pump(entity.dead)
        if entity.settings.requires_session:
            self._retry_sessions(self.clock.now())

    # --- requests and answers ---

    def _answer(self, connection: Connection, link: Link, request: Message) -> None:
        answer = Message(correlation_id=request.id, address=request.reply_to)
        if link.node == "$cbs":
            rights = rights_of(str(request.body))
            audience = str(request.properties["name"])
            path = path_of(audience)
            status, text = 202, "Accepted"
            if rights is None:
                status, text = 401, "Unauthorized: the signature is wrong."
            elif not self.namespace.has(path):
                status, text = 404, f"The messaging entity '{audience}' could not be found."
            else:
                self.rights[connection, path] = rights
                self.policies[connection, path] = _parts_of(str(request.body)).get("skn", "")
            answer.properties = {"status-code": int32(status), "status-description": text}
        else:
            try:
                self._throttle()
                self._check_rights(connection, link.node)
                status, body = self._operation(link.node.rpartition("/")[0], request)
                answer.properties = {"statusCode": int32(status), "statusDescription": "OK"}
                answer.body = body
            except Refusal as refusal:
                answer.properties = {
                    "statusCode": int32(refusal.status),
                    "statusDescription": refusal.text,
                    "errorCondition": symbol(refusal.condition),
                }
        reply = self._replies.get((connection, link.node))
        if reply is not None:
            reply.send(answer)

    def _operation(self, path: str, request: Message) -> tuple[int, Any]:
        operation = str(request.properties["operation"]).removeprefix(VENDOR)
        body, now = request.body or {}, self.clock.now()
        check_types(operation, body)
        if operation == "schedule-message":
            numbers = []
            if self.namespace.is_full:
                raise Refusal("amqp:resource-limit-exceeded", "The maximum entity size has been reached.", 403)
            for one in body["messages"]:
                content = content_of(bytes(one["message"]))
                for entity in self.namespace.targets(path):
                    number = entity.send(content, now)
                    numbers.append(number or 0)
            return 200, {"sequence-numbers": _longs(numbers)}
        if operation == "cancel-scheduled-message":
            for entity in self.namespace.targets(path):
                entity.cancel(_elements(body["sequence-numbers"]))
            return 200, None
        entity = self.namespace.entity(path)
        session: Any = body.get("session-id")
        match operation:
            case "renew-lock":
                ends = entity.renew(_elements(body["lock-tokens"]), now)
                return 200, {"expirations": Array(UNDESCRIBED, Data.TIMESTAMP, *map(_timestamp, ends))}
            case "update-disposition":
                self._dispose(entity, body, now)
                self._changed(entity)
                return 200, None
            case "peek-message":
                found = entity.peek(body["from-sequence-number"], body["message-count"], now, session)
                if not found:
                    return 204, None
                return 200, {"messages": [{"message": encoded(one, shows_state=True)} for one in found]}
            case "receive-by-sequence-number":
                items = entity.take_deferred(_elements(body["sequence-numbers"]), session, now)
                return 200, {
                    "messages": [{"message": encoded(one, is_locked=True), "lock-token": one.token} for one in items]
                }
            case "renew-session-lock":
                return 200, {"expiration": _timestamp(entity.renew_session(session, now))}
            case "get-session-state":
                return 200, {"session-state": entity.session_held(session, now).state}
            case "set-session-state":
                state = body.get("session-state")
                entity.set_state(session, None if state is None else bytes(state), now)
                return 200, None
        raise Refusal("amqp:not-implemented", f"{operation} is not in this look-alike", 501)

    def _dispose(self, entity: Entity, body: dict[str, Any], now: float) -> None:
        tokens = _elements(body["lock-tokens"])
        for token in tokens:
            entity.held(token, now)
        changes = {str(name): value for name, value in (body.get("properties-to-modify") or {}).items()}
        for token in tokens:
            require_room(entity.held(token, now), changes)
            match str(body["disposition-status"]):
                case "completed":
                    entity.complete(token, now)
                case "abandoned":
                    entity.put_back(token, now, counts=True, changes=changes)
                case "defered":
                    entity.defer(token, now, changes)
                case "suspended":
                    reason, text = body.get("deadletter-reason"), body.get("deadletter-description")
                    named = {"DeadLetterReason": reason, "DeadLetterErrorDescription": text}
                    entity.dead_letter(token, now, {**changes, **{k: v for k, v in named.items() if v}})
                case status:
                    raise Refusal("amqp:not-allowed", f"the disposition {status} is not known")

    def deleted(self, paths: list[str]) -> None:
        """Detach the links of entities that were deleted."""
        for path in paths:
            for link in self._receivers.pop(path, []):
                link.entity = None
                link.condition = Condition("amqp:not-found", f"The messaging entity '{path}' was deleted.")
                link.close()

    # --- faults, for tests ---

    def _close_all(self, text: str) -> None:
        """Close every connection, and deliver nothing more on it."""
        for connection in list(self._connections):
            link = connection.link_head(0)
            while link:
                self._drop(link)
                link.entity = None
                link = link.next(0)
            connection.condition = condition_of(Refusal("amqp:connection:forced", text))
            connection.close()

    def _end_logins(self, policy: str) -> None:
        """Detach every link whose token the key of *policy* has signed that was replaced."""
        ended = {at for at, signer in self.policies.items() if signer == policy}
        for at in ended:
            del self.rights[at], self.policies[at]
        for connection in list(self._connections):
            link = connection.link_head(0)
            while link:
                following = link.next(0)
                node = getattr(link, "node", "$cbs").removesuffix("/$management")
                if (connection, node) in ended and link.state & Link.LOCAL_ACTIVE:
                    self._drop(link)
                    link.entity = None
                    link.condition = Condition("amqp:unauthorized-access", "The key of the token was replaced.")
                    link.close()
                link = following

    def _reset(self) -> None:
        KEYS.clear()
        self._close_all("The namespace was emptied.")
        for link in [link for links in self._receivers.values() for link in links]:
            self._drop(link)
        self._waiting.clear()
        self._unsettled.clear()
        self.namespace.clear()
        self.throttled = self.conflicts = 0
        self.revoked, self.drains = False, True
        self._begun.clear()
        self.partitioned.clear()

    def control(self, what: str, value: str) -> str:
        """Make a fault: what a client of the real service may meet, and a test can't wait for."""
        match what:
            case "reset":  # as a new namespace, without entities, connections and faults
                self._reset()
            case "keys":  # POLICY=KEY: its key is replaced, and links end that were attached with the one before
                policy, _, key = value.partition("=")
                KEYS[policy] = (key, "manage send listen")
                self._end_logins(policy)
            case "full":
                self.namespace.is_full = value == "1"
            case "revoke":  # rights, for a while: links are detached, and new ones refused
                self.revoked = value == "1"
                if self.revoked:
                    self._close_all("The token was revoked.")
            case "drain":
                self.drains = value == "1"
                if self.drains:
                    for link in [link for links in self._receivers.values() for link in links]:
                        self._flowed(link)
            case "abort":  # a message of which the first frame is sent, as when its node fails meanwhile
                begun = [link for link in self._receivers.get(value.lower(), ()) if link.credit > 0]
                for link in begun:
                    self._begun[link] = link.delivery(uuid.uuid4().bytes)
                    link.stream(b"\0\x53\x75\xa0\x04body")
                return str(len(begun))
            case "conflicts":
                self.conflicts = int(value)
            case "partition":
                self.partitioned.add(value.lower())
            case "page":
                self.namespace.page = int(value)
            case "throttle":
                self.throttled = int(value)
            case "drop":  # connections, without a close
                for transport in [connection.transport for connection in self._connections]:
                    if transport is not None:  # else it is closed already
                        transport.close_tail()
                        transport.close_head()
            case "close":  # connections, as when the service moves them
                self._close_all(value or "It was closed.")
            case "detach":  # the links of an entity, as after ten idle minutes
                for path in (value.lower(), value.lower() + DEAD):
                    for link in list(self._receivers.get(path, ())):
                        self._drop(link)
                        text = "The link was force detached by the broker, as it was idle for more than 10 minutes."
                        link.condition = Condition("amqp:link:detach-forced", text)
                        link.close()
            case "take-lock":  # as when another node has taken over, and the lock is lost
                entity = self.namespace.entity(value)
                for item in list(entity.items.values()):
                    if item.token is not None:
                        entity.put_back(item.token, self.clock.now(), counts=True)
                self._pump(entity)
            case "lock-left":  # the seconds that the first lock of an entity has left
                locked = [item.until for item in self.namespace.entity(value).items.values() if item.token is not None]
                return str(min(locked) - self.clock.now())
            case "links":
                return str(sum(len(links) for links in self._receivers.values()))
            case "credit":
                links = self._receivers.get(value.lower(), [])
                return str(sum(link.credit for link in links))
            case _:
                raise Refusal("", f"no fault {what}", 404)
        return ""


def path_of(address: str) -> str:
    """Return the path of an entity, in small letters, from the address of a link."""
    rest = address.split("://", 1)[-1]
    return (rest.partition("/")[2] if "://" in address else rest).lower().strip("/")


_TYPES: dict[str, dict[str, type]] = {
    "peek-message": {"from-sequence-number": int, "message-count": int32},
    "receive-by-sequence-number": {"receiver-settle-mode": uint},
}
"""The types of fields: the service refuses any other. A ``long`` comes as ``int``."""


def check_types(operation: str, body: dict[str, Any]) -> None:
    """Refuse a field of another type."""
    for name, kind in _TYPES.get(operation, {}).items():
        if type(body.get(name)) is not kind:
            raise Refusal("amqp:internal-error", f"The service was unable to process the request: {name}.", 500)


def condition_of(refusal: Refusal) -> Condition:
    """Return the error of a frame; its third part is never absent, as the client doesn't expect that."""
    return Condition(refusal.condition, refusal.text, {symbol("tracking-id"): "look-alike"})


def _session_filter(link: Link) -> tuple[bool, str | None]:
    """Return whether a link wants a session, and which; None if any."""
    data = link.remote_source.filter
    data.rewind()
    if not data.next():
        return False, None
    for name, value in (data.get_object() or {}).items():
        if str(name) == str(SESSION_FILTER):
            found = getattr(value, "value", value)
            return True, None if found is None else str(found)
    return False, None


def _elements(array: Any) -> list[Any]:
    return list(array.elements if hasattr(array, "elements") else array)


def _longs(numbers: list[int]) -> Array:
    return Array(UNDESCRIBED, Data.LONG, *numbers)


def _timestamp(seconds: float) -> timestamp:
    return timestamp(int(seconds * 1_000))


def main(port: int, admin_port: int, folder: Path) -> None:
    service = Service(port, folder)
    container = Container(service)
    threading.Thread(target=serve, args=(service, admin_port), daemon=True).start()
    container.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""The HTTP interface of a look-alike of Service Bus: entities as Atom entries, and the faults for tests."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import isodate  # type: ignore[import-untyped]

from tests.servers.servicebus_entities import DEAD, SUBSCRIPTIONS, Namespace, Refusal, Settings

NS = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
ATOM = "http://www.w3.org/2005/Atom"
KEYS: dict[str, tuple[str, str]] = {}
"""The keys of policies that tests have set, and their rights; here, as the service runs as ``__main__``."""


class Served(Protocol):
    """The service, as this module uses it."""

    namespace: Namespace
    clock: Any
    revoked: bool
    conflicts: int

    def call(self, act: Any) -> Any: ...

    def deleted(self, paths: list[str]) -> None: ...

    def control(self, what: str, value: str) -> str: ...


def serve(service: Served, port: int) -> None:
    """Answer requests, for ever."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one packet: in two, each waits 40 ms, as Nagle holds back the second

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(service.clock.now() if timestamp is None else timestamp)

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._serve("GET")

        def do_PUT(self) -> None:
            self._serve("PUT")

        def do_DELETE(self) -> None:
            self._serve("DELETE")

        def do_POST(self) -> None:
            self._serve("POST")

        def _serve(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else b""
            address = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(address.query))
            path = urllib.parse.unquote(address.path).strip("/")
            try:
                if path.startswith("$control/"):
                    text = service.call(lambda: service.control(path.partition("/")[2], query.get("value", "")))
                    status = 200
                else:
                    status, text = self._manage(method, path, query, body)
            except Refusal as refusal:
                status, text = (
                    refusal.status,
                    f"<Error><Code>{refusal.status}</Code><Detail>{escape(refusal.text)}</Detail></Error>",
                )
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/atom+xml;type=entry;charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _manage(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, str]:
            from tests.servers.servicebus_service import rights_of

            rights = rights_of(self.headers.get("Authorization", ""))
            if rights is None:
                raise Refusal("", "Unauthorized: the signature is wrong.", 401)
            if "manage" not in rights or service.revoked:
                raise Refusal("", "Manage,EntityRead claims required for this operation.", 401)
            is_update = bool(self.headers.get("If-Match"))

            def act() -> tuple[int, str]:
                if method == "PUT" and not is_update and service.conflicts > 0:
                    service.conflicts -= 1
                    raise Refusal("", "SubCode=40901. Another conflicting operation is in progress.", 409)
                answer = manage(service.namespace, method, path, query, body, is_update)
                if method == "DELETE":
                    service.deleted([path.lower(), path.lower() + DEAD])
                return answer

            return service.call(act)  # type: ignore[no-any-return]

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


def manage(
    namespace: Namespace, method: str, path: str, query: dict[str, str], body: bytes, is_update: bool
) -> tuple[int, str]:
    """Carry out a request about entities; return the status and the answer."""
    low = path.lower()
    if method == "GET" and low == "$namespaceinfo":
        return 200, (
            f'<entry xmlns="{ATOM}"><title>look-alike</title><content type="application/xml"><NamespaceInfo '
            f'xmlns="{NS}"><MessagingSKU>Standard</MessagingSKU><Name>look-alike</Name>'
            "<NamespaceType>Messaging</NamespaceType></NamespaceInfo></content></entry>"
        )
    if method == "GET" and low == "$resources/queues":
        return 200, page(namespace, path, query, (key for key in namespace.settings if SUBSCRIPTIONS not in key))
    if method == "GET" and low.endswith("/subscriptions"):
        topic = low.removesuffix("/subscriptions")
        found = (key for key in namespace.settings if key.startswith(topic + SUBSCRIPTIONS))
        return 200, page(namespace, path, query, found)
    if method == "GET":
        if low not in namespace.settings and low not in namespace.topics:  # the service answers with an empty feed
            return 200, f'<feed xmlns="{ATOM}"><title type="text">Publicly Listed Services</title></feed>'
        return 200, entry(namespace, low)
    if method == "PUT":
        tree = ElementTree.fromstring(body)
        if tree.find(f".//{{{NS}}}TopicDescription") is not None:
            namespace.create_topic(path)
        elif is_update:
            namespace.update(path, settings_of(tree, replace(namespace.entity(path).settings)))
        else:
            namespace.create(path, settings_of(tree, Settings()))
        return (200 if is_update else 201), entry(namespace, low)
    if method == "DELETE":
        namespace.delete(path)
        return 200, ""
    raise Refusal("", f"{method} is not known", 405)


def settings_of(tree: ElementTree.Element, base: Settings) -> Settings:
    """Return *base* with what a description says."""

    def text(name: str) -> str | None:
        found = tree.find(f".//{{{NS}}}{name}")
        return None if found is None else found.text or ""

    def seconds(name: str) -> float | None:
        found = text(name)
        return None if not found else isodate.parse_duration(found).total_seconds()

    def flag(name: str) -> bool | None:
        found = text(name)
        return None if found is None else found == "true"

    count = text("MaxDeliveryCount")
    ttl = seconds("DefaultMessageTimeToLive")
    found = {
        "lock_duration": seconds("LockDuration"),
        "max_delivery_count": None if count is None else int(count),
        "requires_session": flag("RequiresSession"),
        "requires_duplicate_detection": flag("RequiresDuplicateDetection"),
        "duplicate_window": seconds("DuplicateDetectionHistoryTimeWindow"),
        "default_ttl": None if ttl is None or ttl > 10**9 else ttl,
        "dead_letters_expired": flag("DeadLetteringOnMessageExpiration"),
        "user_metadata": text("UserMetadata"),
        "status": text("Status"),
    }
    return replace(base, **{name: value for name, value in found.items() if value is not None})  # type: ignore[arg-type]


def page(namespace: Namespace, path: str, query: dict[str, str], found: Iterable[str]) -> str:
    """Return a page of entities as an Atom feed; a client reads on only where a second link names the next page."""
    skip, top = int(query.get("$skip", 0)), min(int(query.get("$top", 100)), namespace.page)
    rows = sorted(found)
    addresses = {"self": f"{path}?$skip={skip}&$top={top}"}
    if skip + top < len(rows):
        addresses["next"] = f"{path}?$skip={skip + top}&$top={top}"
    links = "".join(f'<link rel="{rel}" href="http://localhost/{escape(url)}"/>' for rel, url in addresses.items())
    return f'<feed xmlns="{ATOM}">{links}{"".join(entry(namespace, one) for one in rows[skip : skip + top])}</feed>'


def entry(namespace: Namespace, path: str) -> str:
    """Return a queue, topic or subscription as an Atom entry."""
    written = namespace.names[path]
    title = written.rpartition("/")[2] if SUBSCRIPTIONS in path else written
    if path in namespace.topics:
        described = f'<TopicDescription xmlns="{NS}"><MaxSizeInMegabytes>1024</MaxSizeInMegabytes></TopicDescription>'
    else:
        described = description(namespace, path)
    return (
        f'<entry xmlns="{ATOM}"><id>{escape(written)}</id><title type="text">{escape(title)}</title>'
        f'<content type="application/xml">{described}</content></entry>'
    )


def description(namespace: Namespace, path: str) -> str:
    entity = namespace.entity(path)
    settings = entity.settings
    kind = "SubscriptionDescription" if SUBSCRIPTIONS in path else "QueueDescription"
    states = [item.state for item in entity.items.values()]
    dead = len(entity.dead.items) if entity.dead is not None else 0
    fields = {
        "LockDuration": duration(settings.lock_duration),
        "MaxSizeInMegabytes": "1024",
        "RequiresDuplicateDetection": str(settings.requires_duplicate_detection).lower(),
        "RequiresSession": str(settings.requires_session).lower(),
        "DefaultMessageTimeToLive": duration(settings.default_ttl or 922_337_203_685.0),
        "DeadLetteringOnMessageExpiration": str(settings.dead_letters_expired).lower(),
        "DuplicateDetectionHistoryTimeWindow": duration(settings.duplicate_window),
        "MaxDeliveryCount": str(settings.max_delivery_count),
        "EnableBatchedOperations": "true",
        "SizeInBytes": "0",
        "MessageCount": str(len(states) + dead),
        "Status": settings.status,
        "UserMetadata": escape(settings.user_metadata),
        "CreatedAt": "2026-01-01T00:00:00Z",
        "UpdatedAt": "2026-01-01T00:00:00Z",
        "AccessedAt": "2026-01-01T00:00:00Z",
    }
    if kind == "SubscriptionDescription":
        for name in (
            "MaxSizeInMegabytes",
            "RequiresDuplicateDetection",
            "DuplicateDetectionHistoryTimeWindow",
            "SizeInBytes",
        ):
            del fields[name]
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items() if value)
    counts = {
        "ActiveMessageCount": states.count("active"),
        "DeadLetterMessageCount": dead,
        "ScheduledMessageCount": states.count("scheduled"),
        "TransferDeadLetterMessageCount": 0,
        "TransferMessageCount": 0,
    }
    counted = "".join(f"<d2p1:{name}>{value}</d2p1:{name}>" for name, value in counts.items())
    return f'<{kind} xmlns="{NS}">{inside}<CountDetails xmlns:d2p1="{COUNTS}">{counted}</CountDetails></{kind}>'


def duration(seconds: float) -> str:
    """Return a length of time as ISO 8601."""
    if seconds > 10**9:
        return "P10675199DT2H48M5.4775807S"
    return f"PT{seconds:.3f}S".replace(".000", "")

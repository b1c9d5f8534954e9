"""A double of the Lease API of a Kubernetes API server, as a program of the standard library alone.

``python kubernetes_api.py PORT FOLDER`` serves it on loopback until it is killed. Its objects and settings are in
FOLDER and survive that. ``Api.serve()`` runs it in a thread instead.

It checks what a real one checks: names, times with exactly six digits of a second, ``resourceVersion``, tokens, rights.
``POST /control`` changes its settings, injects faults and counts requests; see ``Api.control``.
"""

from __future__ import annotations

import copy
import json
import re
import select
import socket
import ssl
import sys
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Json = dict[str, Any]

GROUP = "coordination.k8s.io"
_LEASES = re.compile(rf"/apis/{re.escape(GROUP)}/v1(?:/namespaces/([^/]+))?/leases(?:/([^/]+))?")
_NAMESPACES = re.compile(r"/api/v1/namespaces(?:/([^/]+))?")
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_PUBLIC = ("/version", "/healthz", "/readyz", "/livez")

_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
_RFC1123 = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character"
)
SPEC = {
    "holderIdentity": str,
    "leaseDurationSeconds": int,
    "acquireTime": "time",
    "renewTime": "time",
    "leaseTransitions": int,
    "strategy": str,
    "preferredHolder": str,
}
ANNOTATIONS_MAX = 262_144
KEPT = 10_000  # events that a watch can begin with


class Refusal(Exception):
    """The answer to a request that is not carried out, as a ``Status``."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int | None = None) -> None:
        details = {"retryAfterSeconds": retry_after} if retry_after is not None else {}
        self.code, self.retry_after = code, retry_after
        self.body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details,
            "code": code,
        }


def invalid(name: str, field: str, value: object, why: str) -> Refusal:
    shown = json.dumps(value) if value is not None else "null"
    return Refusal(422, "Invalid", f'Lease.{GROUP} "{name}" is invalid: {field}: Invalid value: {shown}: {why}')


def in_utc(value: object) -> str | None:
    """Return a time as a real server stores it; None if it is none with six digits of a second."""
    if not isinstance(value, str) or not _MICRO_TIME.fullmatch(value):
        return None
    try:
        return datetime.fromisoformat(value).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        return None


def check(lease: Json, known: Json) -> None:
    """Refuse what a real server refuses, drop the fields that it doesn't know, and write times as it does."""
    metadata, spec = lease["metadata"], lease.get("spec")
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise Refusal(422, "Invalid", f'Lease.{GROUP} "" is invalid: metadata.name: Required value: name is required')
    lease["spec"] = spec = {field: value for field, value in (spec or {}).items() if field in known}
    for field, kind in known.items():
        value = spec.get(field)
        if value is None:
            spec.pop(field, None)
        elif kind == "time":
            spec[field] = in_utc(value)
            if spec[field] is None:
                layout = "2006-01-02T15:04:05.000000Z07:00"
                raise Refusal(
                    400,
                    "BadRequest",
                    f'Lease in version "v1" cannot be handled as a Lease: parsing time "{value}" as "{layout}": '
                    f'cannot parse "{value}" as "{layout}"',
                )
        elif not isinstance(value, kind) or isinstance(value, bool) or (kind is int and abs(value) > 2**31 - 1):
            raise Refusal(
                400,
                "BadRequest",
                f'Lease in version "v1" cannot be handled as a Lease: v1.LeaseSpec.{field}: unexpected value {value!r}',
            )
    if len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        raise invalid(name, "metadata.name", name, _RFC1123 if len(name) <= 253 else "must be no more than 253 bytes")
    if (duration := spec.get("leaseDurationSeconds")) is not None and duration < 1:
        raise invalid(name, "spec.leaseDurationSeconds", duration, "must be greater than 0")
    if (transitions := spec.get("leaseTransitions")) is not None and transitions < 0:
        raise invalid(name, "spec.leaseTransitions", transitions, "must be greater than or equal to 0")
    if spec.get("preferredHolder") and not spec.get("strategy"):
        raise Refusal(
            422,
            "Invalid",
            f'Lease.{GROUP} "{name}" is invalid: spec.preferredHolder: Forbidden: may only be specified if `strategy` '
            "is defined",
        )
    annotations = metadata.get("annotations") or {}
    for kind, pairs in (("annotations", annotations), ("labels", metadata.get("labels") or {})):
        for key, text in pairs.items():
            prefix, slash, last = key.rpartition("/")
            if not _QUALIFIED.fullmatch(last) or (slash and not _SUBDOMAIN.fullmatch(prefix)):
                raise invalid(name, f"metadata.{kind}", key, "name part must consist of alphanumeric characters")
            if not isinstance(text, str):
                raise Refusal(400, "BadRequest", f"metadata.{kind}: {key} must be a string")
            if kind == "labels" and text and not _QUALIFIED.fullmatch(text):
                raise invalid(name, "metadata.labels", text, "a valid label must be at most 63 characters")
    if sum(len(key.encode()) + len(text.encode()) for key, text in annotations.items()) > ANNOTATIONS_MAX:
        raise Refusal(
            422,
            "Invalid",
            f'Lease.{GROUP} "{name}" is invalid: metadata.annotations: Too long: must have at most {ANNOTATIONS_MAX} '
            "bytes",
        )


class Api:
    """The objects of the double, its settings and faults; every method may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._journal = folder / "journal.jsonl"
        self._settings = folder / "settings.json"
        self.objects: dict[tuple[str, str], Json] = {}
        self.version = 1
        self.events: list[tuple[int, tuple[str, str], str, Json]] = []
        self.oldest = 0  # the version after which all events are known
        self.namespaces = {"default", "kube-system", "other"}
        self.settings: Json = {
            "tokens": None,  # {token: user}; None: everyone is let in
            "roles": None,  # [{"users": [..], "verbs": [..], "names": [..], "namespaces": [..]}]; None: all is allowed
            "fields": [],  # names of further fields of the spec, as a newer server has
            "bookmark_every": 60.0,
        }
        self.faults: list[Json] = []
        self.requests: list[Json] = []
        self.streams = 0  # a watch ends when this number has changed
        self.is_silent = False  # watches get no events
        self._restore()

    # --- storage ---

    def _restore(self) -> None:
        with suppress(FileNotFoundError):
            self.settings |= json.loads(self._settings.read_text())
        with suppress(FileNotFoundError):
            for line in self._journal.read_text().splitlines():
                with suppress(ValueError):  # the last line of a killed process
                    self._replay(*json.loads(line))
        self.oldest = self.version  # a new process knows no earlier events
        self._file = self._journal.open("a")

    def _replay(self, version: int, kind: str, key: list[str], lease: Json | None) -> None:
        self.version = version
        if kind == "NAMESPACE":
            self.namespaces.add(key[0])
        elif kind == "NO NAMESPACE":
            self.namespaces.discard(key[0])
        elif kind == "DELETED":
            self.objects.pop((key[0], key[1]), None)
        else:
            assert lease is not None
            self.objects[key[0], key[1]] = lease

    def _write(self, kind: str, key: tuple[str, str], lease: Json | None) -> None:
        self.version += 1
        if lease is not None:
            lease["metadata"]["resourceVersion"] = str(self.version)
            self.events.append((self.version, key, kind, copy.deepcopy(lease)))
            if len(self.events) > KEPT:
                self.oldest = self.events.pop(0)[0]
        self._file.write(json.dumps([self.version, kind, key, lease]) + "\n")
        self._file.flush()
        self.changed.notify_all()

    def events_after(self, version: int) -> list[tuple[int, tuple[str, str], str, Json]]:
        return self.events[bisect_right(self.events, version, key=lambda event: event[0]) :]

    # --- verbs ---

    def get(self, key: tuple[str, str]) -> Json:
        with self.lock:
            if key not in self.objects:
                raise Refusal(404, "NotFound", f'leases.{GROUP} "{key[1]}" not found')
            return copy.deepcopy(self.objects[key])

    def find(self, namespace: str | None, query: Json) -> list[Json]:
        with self.lock:
            chosen = [(key, lease) for key, lease in sorted(self.objects.items()) if fits(key, lease, namespace, query)]
            return [copy.deepcopy(lease) for _, lease in chosen]

    def list_page(self, namespace: str | None, query: Json) -> Json:
        with self.lock:
            items, metadata = self.find(namespace, query), {"resourceVersion": str(self.version)}
            start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
            page = items[start : start + limit] if limit else items[start:]
            if start + len(page) < len(items):
                metadata["continue"] = str(start + len(page))
            return {"kind": "LeaseList", "apiVersion": f"{GROUP}/v1", "metadata": metadata, "items": page}

    def create(self, namespace: str, lease: Json, manager: str) -> Json:
        with self.lock:
            metadata = lease.setdefault("metadata", {})
            if metadata.setdefault("namespace", namespace) != namespace:
                raise Refusal(400, "BadRequest", "the namespace of the provided object does not match the request")
            check(lease, self._fields())
            if namespace not in self.namespaces:
                raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
            key = namespace, metadata["name"]
            if key in self.objects:
                raise Refusal(409, "AlreadyExists", f'leases.{GROUP} "{key[1]}" already exists')
            if metadata.get("resourceVersion"):
                raise Refusal(500, "", "resourceVersion should not be set on objects to be created")
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now}
            metadata["managedFields"] = managed_by(manager)
            lease |= {"kind": "Lease", "apiVersion": f"{GROUP}/v1"}
            self.objects[key] = lease
            self._write("ADDED", key, lease)
            return copy.deepcopy(lease)

    def replace(self, key: tuple[str, str], lease: Json, manager: str) -> tuple[int, Json]:
        with self.lock:
            metadata = lease.setdefault("metadata", {})
            if metadata.get("name") != key[1]:
                given = metadata.get("name", "")
                raise Refusal(
                    400, "BadRequest", f"the name of the object ({given}) does not match the name on the URL ({key[1]})"
                )
            if metadata.setdefault("namespace", key[0]) != key[0]:
                raise Refusal(400, "BadRequest", "the namespace of the provided object does not match the request")
            old = self.objects.get(key)
            given_uid, given_version = metadata.get("uid"), metadata.get("resourceVersion")
            if given_uid and given_uid != (old["metadata"]["uid"] if old else ""):
                raise conflict(key[1], f"Precondition failed: UID in precondition: {given_uid}")
            if old is None:  # a PUT may create a Lease
                metadata.pop("resourceVersion", None)
                return 201, self.create(key[0], lease, manager)
            if not given_version:
                raise invalid(key[1], "metadata.resourceVersion", 0, "must be specified for an update")
            check(lease, self._fields())
            if given_version != old["metadata"]["resourceVersion"]:
                raise conflict(
                    key[1],
                    "the object has been modified; please apply your changes to the latest version and try again",
                )
            metadata |= {field: old["metadata"][field] for field in ("uid", "creationTimestamp", "namespace")}
            metadata["managedFields"] = old["metadata"]["managedFields"]
            lease |= {"kind": "Lease", "apiVersion": f"{GROUP}/v1"}
            if lease == old:
                return 200, copy.deepcopy(old)  # a real server doesn't raise the version of an unchanged object
            metadata["managedFields"] = managed_by(manager)
            self.objects[key] = lease
            self._write("MODIFIED", key, lease)
            return 200, copy.deepcopy(lease)

    def delete(self, key: tuple[str, str], options: Json) -> Json:
        with self.lock:
            lease = self.get(key)
            wanted = options.get("preconditions") or {}
            if any(wanted.get(field) not in (None, lease["metadata"][field]) for field in ("uid", "resourceVersion")):
                raise conflict(key[1], "Precondition failed")
            del self.objects[key]
            self._write("DELETED", key, lease)
            details = {"name": key[1], "group": GROUP, "kind": "leases", "uid": lease["metadata"]["uid"]}
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _fields(self) -> Json:
        return SPEC | dict.fromkeys(self.settings["fields"], str)

    # --- rights ---

    def user_of(self, authorization: str | None, certificate: Any) -> str:
        """Return the user of a request; refuse an unknown token."""
        tokens = self.settings["tokens"]
        if certificate:
            names = [value for pair in certificate["subject"] for name, value in pair if name == "commonName"]
            return str(names[0])
        if tokens is None:
            return "admin"
        scheme, _, token = (authorization or "").partition(" ")
        if not authorization:
            return "system:anonymous"
        if scheme.lower() != "bearer" or token not in tokens:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        return str(tokens[token])

    def allows(self, user: str, verb: str, namespace: str, name: str) -> bool:
        if user == "system:anonymous":
            return False
        roles = self.settings["roles"]
        return roles is None or any(
            user in role.get("users", [user])
            and verb in role["verbs"]
            and (not role.get("names") or name in role["names"])
            and namespace in role.get("namespaces", [namespace])
            for role in roles
        )

    def require(self, user: str, verb: str, namespace: str, name: str) -> None:
        if not self.allows(user, verb, namespace, name):
            which = f' "{name}"' if name else ""
            raise Refusal(
                403,
                "Forbidden",
                f'leases.{GROUP}{which} is forbidden: User "{user}" cannot {verb} resource "leases" in API group '
                f'"{GROUP}" in the namespace "{namespace}"',
            )

    # --- tests ---

    def control(self, order: Json) -> Any:
        """Carry out an order of a test: ``{"do": NAME, …}``.

        ``set`` changes settings; ``fail`` adds a fault (``verb``, ``name``, ``user``: which requests; ``status``,
        ``retry_after``, ``message``: the answer; ``delay``: seconds before it is carried out; ``drop``: the connection
        is reset ``"before"`` or ``"after"`` that; ``times``: how often, None for always); ``heal`` ends all faults;
        ``requests`` returns those since the last call of ``forget``; ``compact`` forgets all events, so that a watch
        that continues is Gone; ``end_watches`` ends all; ``silence`` keeps events from them; ``namespaces`` adds and
        removes some.
        """
        with self.lock:
            match order.pop("do"):
                case "set":
                    self.settings |= order
                    self._settings.write_text(json.dumps(self.settings))
                case "fail":
                    self.faults.append(order)
                case "heal":
                    self.faults.clear()
                    self.is_silent = False
                case "requests":
                    return self.requests
                case "forget":
                    self.requests.clear()
                case "compact":
                    self.events.clear()
                    self.version += 1
                    self.oldest = self.version
                case "end_watches":
                    self.streams += 1
                case "silence":
                    self.is_silent = True
                case "namespaces":
                    for kind, names in (("NAMESPACE", order.get("add", [])), ("NO NAMESPACE", order.get("remove", []))):
                        for name in names:
                            self._change_namespace(kind, name)
                case unknown:
                    raise ValueError(unknown)
            self.changed.notify_all()
            return None

    def _change_namespace(self, kind: str, name: str) -> None:
        if kind == "NAMESPACE":
            self.namespaces.add(name)
        else:
            self.namespaces.discard(name)
            for key in [key for key in self.objects if key[0] == name]:
                self.delete(key, {})
        self._write(kind, (name, ""), None)

    def fault_of(self, request: Json) -> Json | None:
        """Return the first fault that a request meets, and count it."""
        with self.lock:
            for fault in self.faults:
                verbs = fault.get("verb")
                if verbs and request["verb"] not in ([verbs] if isinstance(verbs, str) else verbs):
                    continue
                if any(fault.get(part) not in (None, request[part]) for part in ("name", "user", "namespace")):
                    continue
                if fault.get("times") is not None:
                    fault["times"] -= 1
                    if fault["times"] == 0:
                        self.faults.remove(fault)
                return fault
        return None

    def serve(self, port: int = 0, context: ssl.SSLContext | None = None) -> ThreadingHTTPServer:
        """Serve on *port* of loopback, in threads that end with this process."""
        server = _Server(("127.0.0.1", port), self, context)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server


def conflict(name: str, why: str) -> Refusal:
    return Refusal(409, "Conflict", f'Operation cannot be fulfilled on leases.{GROUP} "{name}": {why}')


def managed_by(manager: str) -> list[Json]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry = {"manager": manager, "operation": "Update", "apiVersion": f"{GROUP}/v1", "time": now}
    return [entry | {"fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:holderIdentity": {}}}}]


def fits(key: tuple[str, str], lease: Json, namespace: str | None, query: Json) -> bool:
    """Return whether the selectors of a list or a watch choose this lease."""
    if namespace is not None and key[0] != namespace:
        return False
    for selector in filter(None, (query.get("fieldSelector") or "").split(",")):
        field, _, value = selector.partition("=")
        if field not in ("metadata.name", "metadata.namespace"):
            raise Refusal(400, "BadRequest", f"field label not supported: {field}")
        if value != (key[1] if field == "metadata.name" else key[0]):
            return False
    labels = lease["metadata"].get("labels") or {}
    for selector in filter(None, (query.get("labelSelector") or "").split(",")):
        label, equals, value = selector.partition("=")
        if label not in labels or (equals and labels[label] != value.lstrip("=")):
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """Return *old* after a JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], api: Api, context: ssl.SSLContext | None) -> None:
        self.api = api
        self._context = context
        super().__init__(address, _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._context is not None:  # here, in the thread of the connection
            request = self._context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    _is_reset = False

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def _answer(self, code: int, body: Json | str | list[Any] | None, headers: Json | None = None) -> None:
        if self._is_reset:
            return
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        kind = "text/plain" if isinstance(body, str) else "application/json"
        flow = {"X-Kubernetes-PF-FlowSchema-UID": "fs-1", "X-Kubernetes-PF-PriorityLevel-UID": "pl-1"}
        everything = {"Content-Type": kind, "Content-Length": str(len(data)), **flow, **(headers or {})}
        for name, value in everything.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        api, url = self.server.api, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(url.path)
        if path == "/control":
            self._answer(200, api.control(json.loads(body)))
            return
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        note: Json = {"method": self.command, "path": path, "query": query, "at": time.monotonic()}
        note |= {"agent": self.headers.get("User-Agent", ""), "user": "", "verb": "", "name": "", "namespace": ""}
        note["body"] = body.decode(errors="replace")
        with api.lock:
            api.requests.append(note)
        try:
            certificate = self.request.getpeercert() if isinstance(self.request, ssl.SSLSocket) else None
            note["user"] = api.user_of(self.headers.get("Authorization"), certificate)
            self._route(note, path, query, body)
        except Refusal as refused:
            note["status"] = refused.code
            after = {"Retry-After": str(refused.retry_after)} if refused.retry_after is not None else None
            self._answer(refused.code, refused.body, after)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            note["status"] = 400
            self._answer(400, Refusal(400, "BadRequest", f"the request was not understood: {error!r}").body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815  # the names that http.server calls

    def _route(self, note: Json, path: str, query: Json, body: bytes) -> None:
        api, user = self.server.api, note["user"]
        if path in _PUBLIC:
            note["verb"], note["status"] = "get", 200
            self._faulty(note, lambda: (200, _version() if path == "/version" else "ok"))
        elif found := _LEASES.fullmatch(path):
            self._lease(note, found[1], found[2], query, body)
        elif path == _REVIEWS and self.command == "POST":
            note["verb"] = "review"
            self._faulty(note, lambda: (201, review(api, user, json.loads(body))))
        elif (found := _NAMESPACES.fullmatch(path)) and found[1] and self.command == "GET":
            note["verb"] = "get namespace"
            self._faulty(note, lambda: (200, namespace_of(api, found[1])))
        else:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")

    def _lease(self, note: Json, namespace: str | None, name: str | None, query: Json, body: bytes) -> None:
        api, manager = self.server.api, note["agent"].partition("/")[0] or "unknown"
        is_watch = query.get("watch", "").lower() in ("1", "true")
        verbs = {"GET": "get" if name else "watch" if is_watch else "list", "POST": "create", "PUT": "update"}
        verb = note["verb"] = (verbs | {"PATCH": "patch", "DELETE": "delete"})[self.command]
        selected = (query.get("fieldSelector") or "").partition("metadata.name=")[2]
        note["name"], note["namespace"] = name or selected, namespace or ""
        api.require(note["user"], verb, namespace or "", name or selected)
        lease = json.loads(body) if body else {}
        if verb == "create":
            note["name"] = lease.get("metadata", {}).get("name", "")
        key = (namespace or "", name or "")
        match verb:
            case "get":
                self._faulty(note, lambda: (200, api.get(key)))
            case "list":
                self._faulty(note, lambda: (200, api.list_page(namespace, query)))
            case "create":
                self._faulty(note, lambda: (201, api.create(key[0], lease, manager)))
            case "update":
                self._faulty(note, lambda: api.replace(key, lease, manager))
            case "patch":
                self._faulty(note, lambda: api.replace(key, merged(api.get(key), lease), manager))
            case "delete":
                self._faulty(note, lambda: (200, api.delete(key, lease)))
            case "watch":
                self._watch(note, namespace, query)

    def _faulty(self, note: Json, carry_out: Callable[[], tuple[int, Json | str]]) -> None:
        """Carry a request out and answer it, unless a fault prevents the one or the other."""
        fault = self.server.api.fault_of(note) or {}
        if fault.get("delay"):
            time.sleep(fault["delay"])
        if fault.get("drop") == "before":
            self._reset()
            return
        if fault.get("status"):
            raise _refusal_of(fault)
        try:
            code, answer = carry_out()
        finally:
            if fault.get("drop") == "after":
                self._reset()
        note["status"] = code
        if fault.get("drop") != "after":
            self._answer(code, answer)

    def _reset(self) -> None:
        self.close_connection = self._is_reset = True
        with suppress(OSError):
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.wfile.close()
            self.request.close()

    # --- watches ---

    def _watch(self, note: Json, namespace: str | None, query: Json) -> None:
        fault = self.server.api.fault_of(note) or {}
        if fault.get("delay"):
            time.sleep(fault["delay"])
        if fault.get("status") and not fault.get("inside"):
            raise _refusal_of(fault)
        begun = self._begun(namespace, query)  # before the client is told, as the servers do: it may miss nothing then
        note["status"] = 200
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        with suppress(OSError):
            if fault.get("inside"):
                self._send_event("ERROR", _refusal_of(fault).body)
            else:
                for kind, found in self._events(namespace, query, *begun):
                    self._send_event(kind, found)
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True

    def _send_event(self, kind: str, found: Json) -> None:
        data = json.dumps({"type": kind, "object": found}).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _begun(self, namespace: str | None, query: Json) -> tuple[int, int, list[Json]]:
        """Return the number of the streams, the version after which a watch goes on, and what it begins with."""
        api = self.server.api
        with api.lock:
            if version := int(query.get("resourceVersion") or "0"):
                return api.streams, version, []
            return api.streams, api.version, api.find(namespace, query)

    def _events(
        self, namespace: str | None, query: Json, streams: int, version: int, present: list[Json]
    ) -> Iterator[tuple[str, Json]]:
        """Yield the events of a watch until its time is over, or its client has gone."""
        api = self.server.api
        ends_at = time.monotonic() + float(query.get("timeoutSeconds") or 1_800)
        marks = query.get("allowWatchBookmarks", "").lower() in ("1", "true")
        next_mark = time.monotonic() + api.settings["bookmark_every"]
        for lease in present:
            yield "ADDED", lease
        while time.monotonic() < ends_at:
            with api.lock:
                if api.streams != streams:
                    return
                gone = version < api.oldest and not api.is_silent
                new = [] if gone or api.is_silent else api.events_after(version)
                if not new and not gone:
                    api.changed.wait(min(0.2, max(0.0, min(ends_at, next_mark) - time.monotonic())))
            if gone:
                yield "ERROR", Refusal(410, "Expired", f"too old resource version: {version} ({api.oldest})").body
                return
            for one in new:
                version = one[0]
                if fits(one[1], one[3], namespace, query):
                    yield one[2], one[3]
            if marks and not api.is_silent and time.monotonic() >= next_mark:
                next_mark = time.monotonic() + api.settings["bookmark_every"]
                yield "BOOKMARK", _bookmark(version)
            if not new and self._client_has_gone():
                raise ConnectionResetError
        if marks and not api.is_silent:
            yield "BOOKMARK", _bookmark(version)

    def _client_has_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        if isinstance(self.connection, ssl.SSLSocket):
            return True  # a client that watches sends nothing more
        return not self.connection.recv(1, socket.MSG_PEEK)


def _refusal_of(fault: Json) -> Refusal:
    reasons = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"}
    reasons |= {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}
    code = fault["status"]
    reason = fault.get("reason", reasons.get(code, ""))
    return Refusal(code, reason, fault.get("message", f"the test made it fail: {reason}"), fault.get("retry_after"))


def _bookmark(version: int) -> Json:
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    return {"kind": "Lease", "apiVersion": f"{GROUP}/v1", "metadata": metadata, "spec": {}}


def _version() -> Json:
    return {"major": "1", "minor": "31", "gitVersion": "v1.31.0+double", "platform": "linux/amd64"}


def review(api: Api, user: str, asked: Json) -> Json:
    about = asked["spec"]["resourceAttributes"]
    allowed = (about.get("group"), about.get("resource")) == (GROUP, "leases") and api.allows(
        user, about["verb"], about.get("namespace", ""), about.get("name", "")
    )
    return asked | {"status": {"allowed": allowed}}


def namespace_of(api: Api, name: str) -> Json:
    if name not in api.namespaces:
        raise Refusal(404, "NotFound", f'namespaces "{name}" not found')
    return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}, "status": {"phase": "Active"}}


def main(port: int, folder: Path) -> None:
    context = None
    if (folder / "server.pem").exists():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        if (folder / "clients.pem").exists():
            context.load_verify_locations(folder / "clients.pem")
            context.verify_mode = ssl.CERT_OPTIONAL
    Api(folder).serve(port, context)
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

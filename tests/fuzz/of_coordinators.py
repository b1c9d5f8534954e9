"""Records and answers of Kubernetes, etcd and ZooKeeper, and the messages of peers."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml

from tenure._backends.etcd import diagnosis as etcd_diagnosis
from tenure._backends.etcd import requests
from tenure._backends.etcd import sessions as etcd_sessions
from tenure._backends.etcd.client import Upload, _read
from tenure._backends.etcd.errors import Refused
from tenure._backends.etcd.hints import Hints
from tenure._backends.etcd.hints import Stream as EtcdStream
from tenure._backends.etcd.leases import EtcdLeases
from tenure._backends.etcd.requests import Holder, Keys, KeyValue, Record, TxnAnswer
from tenure._backends.kubernetes import diagnosis, records
from tenure._backends.kubernetes.client import Answer, _answer_of, _lines_of
from tenure._backends.kubernetes.credentials import Command, _credential_in
from tenure._backends.kubernetes.kubeconfig import access_of, read_kubeconfig
from tenure._backends.kubernetes.leases import KubernetesLeases
from tenure._backends.kubernetes.observations import Observations
from tenure._backends.kubernetes.watch import NamespaceWatch, NameWatch
from tenure._backends.peers.keys import KEY_MIN, KEYS_MAX, keys_in
from tenure._backends.peers.seal import Broken, SharedKey, introduced, introduction, length_of, nonce_of
from tenure._backends.peers.wire import (
    BODY_MAX,
    Claim,
    Heartbeat,
    ListReply,
    Malformed,
    Refusal,
    StandingPromise,
    decode,
    encode,
)
from tenure._backends.zookeeper import names as zookeeper_names
from tenure._backends.zookeeper import records as zookeeper_records
from tenure._backends.zookeeper.names import Dialect
from tenure._frozen import FrozenDict
from tenure._lease import TOKEN_MAX, HeldBy, Vacant
from tenure._runtime.clock import SystemClock
from tenure.errors import ConfigError, TenureError, Unavailable
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    Answers,
    as_bytes,
    as_objects,
    as_text,
    drive,
    nothing,
    through_json,
    use_holder,
    use_lease,
    use_text,
)

# --- Kubernetes ---

WHEN = datetime(2026, 11, 23, 6, 0, 0, 120, tzinfo=UTC)


def lease() -> dict[str, Any]:
    """Return a Lease as the API server has it once tenure has acquired it."""
    found = records.new_lease("chair", "default")
    found["metadata"] |= {"resourceVersion": "7", "uid": "u-1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return records.acquired(found, "ann#1", 15.0, {"at": "Zürich"}, after=5, now=WHEN)


LEASE = lease()
LEASES = [
    LEASE,
    records.asked_to_resign(LEASE),
    records.released(LEASE, now=WHEN),
    records.renewed(LEASE, 9.0, left=3.0, now=WHEN),
]


def read_lease(given: Any) -> None:
    found = through_json(given)
    if not isinstance(found, dict):
        found = {"metadata": found, "spec": found}
    records.name_in(found)
    assert isinstance(records.is_lease(found, "chair"), bool)
    holder, token = records.holder_of(found), records.token_of(found)
    assert 0 <= token <= TOKEN_MAX
    assert isinstance(records.is_ours(found), bool)
    assert records.grant_of("chair", found).token == token
    use_text(records.strategy_of(found))
    held = (records.duration_of(found), records.metadata_of(found), records.is_asked_to_resign(found))
    use_lease(HeldBy("chair", holder, token, *held) if holder else Vacant("chair", token))
    observations = Observations(SystemClock())
    seen = observations.note("chair", found)
    assert math.isfinite(seen.left(1.0))
    assert seen.vacant_for(0.0) >= 0.0
    assert records.about(found) is not None
    writes: list[Callable[[], dict[str, Any]]] = [
        lambda: records.acquired(found, "bob#1", 15.0, {"a": "b"}, after=0, now=WHEN),
        lambda: records.renewed(found, 15.0, left=seen.left(1.0), now=WHEN),
        lambda: records.released(found, now=WHEN),
        lambda: records.asked_to_resign(found),
    ]
    for write in writes:
        with suppress(ConfigError):
            written = write()
            assert json.dumps(written)
            assert isinstance(records.is_kept(written, found), bool)
            assert records.token_of(written) >= token or not records.has_version(found)  # it isn't created yet
    of_one, of_all = cast(Any, NameWatch.__new__(NameWatch)), cast(Any, NamespaceWatch.__new__(NamespaceWatch))
    of_one._name, of_one._about, of_one._notifier = "chair", None, SimpleNamespace(notify=nothing)
    for watch in (of_one, of_all):
        watch._observed, watch.topics = observations, {"chair": {1}}
        for kind in ("ADDED", "BOOKMARK", "DELETED", "ERROR"):
            assert isinstance(watch._handle(kind, found), bool)


def response(status: int = 200, **headers: str) -> Any:
    return SimpleNamespace(status=status, headers=headers)


class Server(Answers):
    """A client of Kubernetes: the answers are bodies that were read."""

    leases_path = "/apis/coordination.k8s.io/v1/namespaces/default/leases"

    def __init__(self, answers: Any) -> None:
        super().__init__(answers, Unavailable("no more answers"))

    async def send(self, *_: object, **__: object) -> Answer:
        try:
            return _answer_of(response(), json.dumps(through_json(self.next())).encode())
        except ValueError as error:
            raise Unavailable("it is no answer") from error


def read_list(given: Any) -> None:
    leases = cast(Any, KubernetesLeases.__new__(KubernetesLeases))
    leases._client = Server(given)
    leases._no_answer = lambda what: Unavailable(f"it is not {what}")
    with suppress(Unavailable):
        for one in drive(leases._listed({})).values():
            read_lease(one)
    with suppress(Unavailable):
        assert repr(drive(diagnosis._rights(cast(Any, Server(given)), "default")))


def read_http(given: Any) -> None:
    content, pause = [*as_objects(given), "", ""][:2]
    for status in (200, 429, 500):
        try:
            answer = _answer_of(response(status, **{"Retry-After": as_text(pause)}), as_bytes(content))
        except ValueError:
            assert status == 200
        else:
            assert repr(answer)
            assert answer.pause >= 0.0


def read_lines(given: Any) -> None:
    chunks = [as_bytes(one) for one in as_objects(given)[:200]]

    async def chunk_by_chunk() -> AsyncIterator[bytes]:
        for one in chunks:
            yield one

    async def read() -> None:
        async for event in _lines_of(cast(Any, SimpleNamespace(content=SimpleNamespace(iter_any=chunk_by_chunk)))):
            read_lease(event.get("object"))

    drive(read())


COMMAND = Command("client.authentication.k8s.io/v1", ["login"], {})
GIVEN = {"token": "secret", "clientCertificateData": "x", "expirationTimestamp": "2026-11-23T06:00:00Z"}
CREDENTIAL = json.dumps({"apiVersion": COMMAND.version, "kind": "ExecCredential", "status": GIVEN})


def read_credential(given: Any) -> None:
    login, expires_at = _credential_in(as_bytes(given), COMMAND)
    assert "secret" not in repr(login)
    assert expires_at is None or isinstance(expires_at, float)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tenure-fuzz-")


def read_config(given: Any) -> None:
    path = Path(_folder().name) / "config"
    # The parser takes time by the square of open brackets; but the file is the user's own.
    path.write_bytes(re.sub(rb"([\[{\"':a]+?)\1{20,}", rb"\1", as_bytes(given))[:20_000])
    assert repr(access_of(read_kubeconfig([path]), None))


CONFIG = """\
apiVersion: v1
kind: Config
current-context: home
contexts:
- name: home
  context: {cluster: one, user: me, namespace: default}
clusters:
- name: one
  cluster: {server: "https://127.0.0.1:6443", certificate-authority-data: YQ==, tls-server-name: a}
users:
- name: me
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1, command: login, args: [a, b], env: [{name: A, value: B}]}
"""
CONFIGS = [CONFIG, json.dumps(yaml.safe_load(CONFIG))]
EVENT, BOOKMARK = (json.dumps({"type": kind, "object": LEASE}) for kind in ("ADDED", "BOOKMARK"))
LINES = [f"{EVENT}\n{BOOKMARK[:50]}", f"{BOOKMARK[50:]}\n"]
LISTED = {"kind": "LeaseList", "metadata": {"continue": "more"}, "items": [LEASE, LEASES[1]]}
LISTS: list[Any] = [[LISTED, {**LISTED, "metadata": {}}], [{"status": {"allowed": True}}] * 8]

# --- etcd ---

KEYS = Keys("tenure/")


def pair(key: bytes, value: bytes, **numbers: int) -> dict[str, Any]:
    """Return a key and its value as the gateway writes it."""
    texts = {name: str(number) for name, number in numbers.items()}
    return {"key": requests.encoded(key), "value": requests.encoded(value), **texts}


HEADER = {"cluster_id": "1", "member_id": "2", "revision": "17", "raft_term": "3"}
WON = Record(17, "ann#1", {"at": "Zürich"})
PLACE = pair(KEYS.place("chair", 5), b"ann#1", create_revision=17, mod_revision=17, version=1, lease=5)
NOTED = pair(KEYS.record("chair"), WON.written(), create_revision=9, mod_revision=18, version=3)
ASKED = pair(KEYS.resign("chair"), b"17", create_revision=19, mod_revision=19, version=1)
RANGES = [{"response_range": {"header": HEADER, "kvs": [one], "count": "1"}} for one in (PLACE, NOTED, ASKED)]
TXN: dict[str, Any] = {
    "header": HEADER,
    "succeeded": True,
    "responses": [*RANGES, {"response_put": {"header": HEADER}}],
}
CHANGES: list[Any] = [
    {"header": HEADER, "events": [{"kv": PLACE}, {"type": "DELETE", "kv": NOTED}]},
    {"header": HEADER, "created": True},
    {"header": HEADER, "created": True, "canceled": True, "cancel_reason": "permission denied"},
    {"header": HEADER, "watch_id": "1", "canceled": True, "compact_revision": "7"},
    {"header": HEADER, "watch_id": "-1"},
]
STATUS: dict[str, Any] = {
    "header": HEADER,
    "version": "3.5.9",
    "dbSize": "100",
    "dbSizeQuota": "101",
    "leader": "2",
    "TTL": "5",
    "grantedTTL": "15",
    "alarms": [{"memberID": "1", "alarm": "NOSPACE"}],
    "kvs": [NOTED],
    "members": [{"ID": "1", "name": "a"}, {"ID": "2", "isLearner": True}],
}


def read_txn(given: Any) -> None:
    answer = TxnAnswer.of(given if isinstance(given, dict) else {})
    first, record, asked = (answer.first(place) for place in range(3))
    known = Record.read(record)
    assert Record.read(KeyValue(b"k", known.written(), 1, 1, 0)) == known
    if first is not None:
        holder = Holder.of(first, known)
        use_holder(holder.holder)
        assert isinstance(requests.is_asked(asked, holder.token), bool)


def read_event(given: Any) -> None:
    for keys in (KEYS, Keys("")):
        hints = Hints(cast(Any, None), keys, lambda change, listeners: bool(repr((change, listeners))))
        hints.notifier = cast(Any, SimpleNamespace(notify=use_text, count=lambda topic: topic == "chair"))
        stream = EtcdStream(hints)
        stream._upload, stream._live_since = Upload(), 0.0
        stream.topics["chair"] = cast(Any, {1})
        for message in ({"created": True}, given, given):
            stream._begin()
            stream.read(through_json(message) if isinstance(message, dict) else {})


def read_gateway(given: Any) -> None:
    for status in (200, 500):
        with suppress(Refused):
            assert isinstance(_read(status, as_bytes(given)), dict)


class Gateway(Answers):
    """A client of etcd: the answers are bodies that were read."""

    def __init__(self, answers: Any) -> None:
        super().__init__(answers, Unavailable("no more answers"), members=[1, 2, 3], has_login=False)

    async def call(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(body=_read(200, json.dumps(through_json(self.next())).encode()), is_only=True)

    async def metric(self, *_: object) -> float:
        return 7.0


def read_etcd_answers(given: Any) -> None:
    def client() -> Any:
        return Gateway(given)

    def leases() -> Any:
        found = cast(Any, EtcdLeases.__new__(EtcdLeases))
        found._keys, found._client = KEYS, client()
        return found

    first = through_json(as_objects(given)[0]) if as_objects(given) else None
    status = first if isinstance(first, dict) else {}
    questions: list[Callable[[], Any]] = [
        lambda: leases().names(),
        lambda: leases()._remaining(5),
        lambda: leases()._look_at_once(["chair"]),
        lambda: etcd_diagnosis._members(client()),
        lambda: etcd_diagnosis._alarms(client()),
        lambda: etcd_diagnosis.shortest_lease(client()),
        lambda: etcd_diagnosis._member(client(), cast(Any, None), "a", status),
    ]
    for ask in questions:
        with suppress(TenureError, Refused):
            assert repr(drive(ask()))
    assert repr(etcd_diagnosis._versions([str(status.get("version", "unknown"))]))
    with suppress(Unavailable):
        etcd_sessions._seconds_in(status, "TTL")


# --- ZooKeeper ---

RECORD = zookeeper_records.Record(17, "ann#1", FrozenDict({"at": "Zürich"}), 17)
NODES = ["_c_x-latch-0000000017", "_c_y-latch--2147483648", "_c_z-lock-0000000003", "abc__lock__0000000005", "x"]
DIALECTS: tuple[Dialect, ...] = ("latch", "lock", "kazoo")


def read_zookeeper(given: Any) -> None:
    data = as_bytes(given)
    shown = zookeeper_records.shown_record(data)
    use_holder(shown.holder)
    assert not shown.token or zookeeper_records.shown_record(shown.written()) == shown
    assert isinstance(zookeeper_records.is_record(data), bool)
    assert isinstance(zookeeper_records.is_asked(shown, 17, data), bool)
    zookeeper_records.read_record(data, "/x")


def read_nodes(given: Any) -> None:
    children = [as_text(one) for one in as_objects(given)]
    for dialect in DIALECTS:
        queue = zookeeper_names.queue_of(children, dialect)
        assert {*queue.nodes, *queue.strangers} <= set(children)
        for node in queue.nodes[:5]:
            queue.before(node)
    for child in children:
        name = zookeeper_names.unescaped(child)
        assert name is None or zookeeper_names.escaped(name) == child


# --- peers ---

PROMISE = StandingPromise(2, "ann#1", 8, 1.5, FrozenDict({"at": "b"}), True, False)
MESSAGES = (
    Heartbeat(7),
    Claim(1, "chair", "ann#1", 8, 15.0, False, FrozenDict({"at": "b"})),
    Refusal(1, 8, PROMISE),
    ListReply(1, ("a", "b")),
)


def read_peer(given: Any) -> None:
    message = decode(as_bytes(given))
    assert repr(message)
    try:
        assert decode(encode(message)) == message
    except Malformed:  # what is one byte in UTF-8 may take six as JSON
        assert len(as_bytes(given)) > BODY_MAX // 6


def read_frame(given: Any) -> None:
    frame, counts = as_bytes(given), cast(Any, SimpleNamespace(drop=nothing))
    channel = SharedKey.of(b"key", "terms").channel(b"a", b"b", dialled=True)
    reads: list[Callable[[], object]] = [
        lambda: length_of(frame[:4].ljust(4, b"\0"), counts),
        lambda: channel.open(frame[4:].ljust(40, b"\0"), counts),
        lambda: nonce_of(frame, counts),
        lambda: introduced(frame, 1, 3),
    ]
    for read in reads:
        with suppress(Broken, Malformed):
            read()


FRAMES = [
    SharedKey.of(b"key", "terms").channel(b"b", b"a", dialled=False).seal(encode(MESSAGES[0])),
    introduction(2, 1),
]
HTTP = [[json.dumps(LEASE), "5"], [json.dumps({"message": "no", "code": 403}), ""]]
BODIES = [json.dumps(TXN), json.dumps({"error": {"code": 5, "message": "no"}})]


def read_keys(given: Any) -> None:
    found = keys_in(as_bytes(given))
    assert 1 <= len(found) <= KEYS_MAX
    assert all(len(key) >= KEY_MIN for key in found)
    assert len({*found}) == len(found)


DECODERS = [
    Decoder("kubernetes.lease", LEASES, read_lease),
    Decoder("kubernetes.list", LISTS, read_list),
    Decoder("kubernetes.http", HTTP, read_http),
    Decoder("kubernetes.lines", [LINES], read_lines, (ValueError,)),
    Decoder("kubernetes.credential", [CREDENTIAL], read_credential, (ConfigError,)),
    Decoder("kubernetes.kubeconfig", CONFIGS, read_config, (ConfigError,), share=0.3),
    Decoder("etcd.txn", [TXN], read_txn, (Unavailable,)),
    Decoder("etcd.event", CHANGES, read_event, (Unavailable,)),
    Decoder("etcd.gateway", BODIES, read_gateway),
    Decoder("etcd.answers", [[STATUS], [TXN]], read_etcd_answers),
    Decoder("zookeeper.record", [RECORD.written()], read_zookeeper, (ConfigError,)),
    Decoder("zookeeper.nodes", [NODES], read_nodes),
    Decoder("peers.message", [encode(one) for one in MESSAGES], read_peer, (Malformed,)),
    Decoder("peers.frame", FRAMES, read_frame),
    Decoder("peers.keys", [b"k" * 32, f"{'a' * 20}\n\n{'b' * 20}\n"], read_keys, (ValueError,)),
]

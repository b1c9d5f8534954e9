"""The facts that ``tenure doctor`` shows of a NATS: servers, versions with known faults, streams, rights, the login."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from tenure._backends.nats.address import Options
from tenure._backends.nats.client import Client, Json, part_of
from tenure._backends.nats.configuration import changed_in, changes_of, changes_of_stream
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_STREAM, Refusal
from tenure._backends.nats.leases import SERIALIZABLE, is_reporting, takes_rollup
from tenure._backends.nats.names import is_cut, word_of
from tenure._backends.nats.places import ack_wait_in
from tenure._foreign import a_count, a_list, a_text, an_object, read_or
from tenure._logins import Login
from tenure._opened import Fact
from tenure._queue.checks import DEAD_SUFFIX
from tenure._tls_facts import tls_fact
from tenure.errors import TenureError

Version = tuple[int, int, int]

NEARLY_FULL = 0.8
"""The share of its limit from which on the storage is reported as nearly full."""
REPLICAS_MIN = 3
SHOWN_MAX = 5
"""Changes of streams, and of consumers, that are shown."""
LONG = 60.0
"""Seconds for asking for all consumers."""

CONSISTENT: Version = (2, 11, 0)
"""From here on also while another server begins to lead the stream (pull request 6194)."""
FORGETTING: tuple[Version, Version] = ((2, 12, 7), (2, 12, 10))
"""From the first up to before the second, a server that was restarted may not find a key (pull request 8254)."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself when it is connected to, and the login that it has accepted."""

    version: Version
    cluster: str
    is_encrypted: bool
    login: Login


async def diagnose(client: Client) -> list[Fact]:
    """Return facts about the servers that the URL of *client* names, and what tenure keeps there; it only reads."""
    facts = [Fact("servers", str(client.address))]
    servers: list[Server] = []
    for name in client.address.servers:
        found = await _server(client, name)
        if isinstance(found, Server):
            servers.append(found)
            where = f", in the cluster {found.cluster}" if found.cluster else ", alone"
            facts.append(Fact(f"server {name}", f"NATS {_written(found.version)}{where}"))
        else:
            facts.append(Fact(f"server {name}", "does not answer", str(found), found.code))
    if not servers:
        return facts
    is_encrypted = all(one.is_encrypted for one in servers)
    hosts = [name.rpartition(":")[0] for name in client.address.servers]
    facts.append(tls_fact("certificate and name" if is_encrypted else None, hosts, authority=client.options.ca))
    streams: list[Json] | TenureError
    try:
        streams = await client.run(lambda connection: _streams(client, connection))
    except TenureError as error:
        streams = error
    replicas = max((_replicas(one) for one in streams), default=0) if isinstance(streams, list) else 0
    facts.append(_versions([one.version for one in servers], max(replicas, client.options.replicas)))
    facts += [await _jetstream(client), *_kept(client, servers, streams)]
    if isinstance(streams, list):
        facts += [_queue_streams(client, streams), await _queue_consumers(client, streams)]
    facts.append(await _hints(client, [] if isinstance(streams, TenureError) else streams))
    return [*facts, _login(client.options, servers[0].login, client.logins.source)]


# --- servers -----------------------------------------------------------------------------------------------------


async def _server(client: Client, name: str) -> Server | TenureError:
    """Connect to one of the servers."""
    alone = Client(replace(client.address, servers=(name,)), client.options, logins=client.logins)

    async def look(connection: Connection) -> Server:
        is_encrypted = connection.requires_tls or client.options.wants_tls
        return Server(connection.version, connection.cluster, is_encrypted, connection.login)

    try:
        return await alone.run(look)
    except TenureError as error:
        return error
    finally:
        await alone.close()


def _versions(versions: Sequence[Version], replicas: int) -> Fact:
    oldest, shown = min(versions), ", ".join(map(_written, sorted(set(versions))))
    advice = []
    if oldest < (2, 9, 0):
        advice.append("tenure needs NATS 2.9 or newer")
    if oldest < SERIALIZABLE:
        advice.append(
            "on a stream of several replicas, it may grant one name to two candidates (nats-server issue 4320), so "
            "tenure refuses to lead there; upgrade to 2.9.21 or newer"
        )
    elif oldest < CONSISTENT and replicas > 1:
        advice.append(
            "while another server begins to lead a stream, its replicas may come to differ (nats-server pull request "
            "6194); upgrade to 2.11 or newer"
        )
    if any(FORGETTING[0] <= one < FORGETTING[1] for one in versions):
        advice.append(
            "after a restart, it may not find a lease that is held (nats-server pull request 8254): then two "
            "candidates may lead for up to ttl; upgrade to 2.12.10, 2.14 or newer"
        )
    return Fact("version", shown, "; ".join(advice), "nats-version")


def _written(version: Version) -> str:
    return ".".join(map(str, version))


# --- JetStream ---------------------------------------------------------------------------------------------------


async def _jetstream(client: Client) -> Fact:
    try:
        found = await client.run(lambda connection: client.call(connection, "INFO"))
    except TenureError as error:
        return Fact("JetStream", "can't be asked", str(error), error.code)
    used, limits = read_or(a_count, found.get("storage"), 0), read_or(an_object, found.get("limits"), {})
    limit = read_or(a_count, limits.get("max_storage"), -1)
    advice = ""
    if limit > 0 and used >= NEARLY_FULL * limit:
        advice = "it is nearly full, and will refuse every write, renewals too; remove messages, or raise max_file"
    bound = f"of {limit} bytes" if limit > 0 else "bytes; its own limit, max_file_store, is not told to clients"
    value = f"{found.get('streams', 0)} streams, storage {used} {bound}"
    return Fact("JetStream", value, advice, "nats-nearly-full")


async def _streams(client: Client, connection: Connection) -> list[Json]:
    """Return the configurations of the streams that tenure keeps under its prefix."""
    prefix = client.options.prefix
    found = [one async for one in _listed(client, connection, f"{prefix}.>")]
    for bucket in ("leases", "queues", "inbox"):
        try:
            answer = await client.call(connection, f"STREAM.INFO.KV_{prefix}-{bucket}")
        except Refusal as error:
            if error.code != NO_STREAM:
                raise
            continue
        found.append(part_of(answer, "config"))
    return found


async def _listed(client: Client, connection: Connection, subject: str) -> AsyncIterator[Json]:
    """Yield the configurations of the streams that have such subjects, page by page."""
    async for answer in client.pages(connection, "STREAM.LIST", "streams", {"subject": subject}):
        for one in read_or(a_list, answer.get("streams"), []):
            if isinstance(one, dict):
                yield part_of(one, "config")


def _kept(client: Client, servers: Sequence[Server], streams: list[Json] | TenureError) -> Iterable[Fact]:
    """Yield facts about the streams, the bucket of leases first."""
    if isinstance(streams, TenureError):
        yield Fact("streams", "may not be read", str(streams), streams.code)
        return
    bucket = f"{client.options.prefix}-leases"
    leases = next((one for one in streams if one.get("name") == f"KV_{bucket}"), None)
    if leases is None:
        yield Fact("leases", f"the bucket {bucket} is made by the first leader")
    else:
        yield Fact("leases", f"in the bucket {bucket}", "; ".join(_wrong(leases)), "nats-lease-bucket")
    yield _rollup(streams)
    copies = sorted({_replicas(one) for one in streams}) or [client.options.replicas]
    has_few = copies[0] < REPLICAS_MIN
    is_cluster = any(one.cluster for one in servers)
    value = f"{' and '.join(map(str, copies))}, of {len(streams)} streams"
    few = _few(is_cluster=is_cluster, are_made=bool(streams))
    yield Fact("replicas", value, few if has_few else "", "nats-few-replicas")
    value = "within sync_interval: by default 2 minutes; it is not told to clients"
    yield Fact("on disk", value, _UNSYNCED if has_few else "", "nats-unsynced")


def _rollup(streams: Iterable[Json]) -> Fact:
    taking = sorted(read_or(a_text, one.get("name"), "?") for one in streams if takes_rollup(one))
    if not taking:
        return Fact("roll-ups", "refused")
    commands = ", ".join(f"nats stream edit {name} --no-allow-rollup" for name in taking)
    return Fact(
        "roll-ups",
        f"taken by {' and '.join(taking)}",
        "who may write to one subject there can empty the whole stream, by the header Nats-Rollup, which tenure never "
        f"uses; run {commands}",
        "nats-rollup",
    )


def _few(*, is_cluster: bool, are_made: bool) -> str:
    if not is_cluster:
        todo = "run a cluster of three, with replicas=3 in the URL"
    elif are_made:
        todo = "run nats stream edit --replicas 3 for each, and set replicas=3 in the URL for those to come"
    else:
        todo = "set replicas=3 in the URL before they are made"
    return f"when a server with the only copy stops, nobody can lead, and no message moves, until it is back; {todo}"


_UNSYNCED = (
    "what was acknowledged may be lost when the machine loses power, and two candidates may lead then; unless it does "
    "so already, let the server write each message first (jetstream: sync_interval: always)"
)


def _replicas(config: Json) -> int:
    return read_or(a_count, config.get("num_replicas"), 1)


def _wrong(config: Json) -> Iterable[str]:
    """Yield what is wrong with a bucket that somebody else has made."""
    if config.get("storage") == "memory":
        yield "it is in memory: after a restart, two candidates may lead for up to ttl; make it anew with file storage"
    if max_age := read_or(a_count, config.get("max_age"), 0):
        seconds = max_age / 1e9
        yield f"it forgets what is older than {seconds:g} s: a ttl must be much shorter; remove its ttl"
    if config.get("discard") != "new" and any(
        read_or(a_count, config.get(one), 0) for one in ("max_msgs", "max_bytes")
    ):
        yield "when it is full, it forgets the oldest lease; let it refuse new ones (discard: new)"
    if config.get("retention", "limits") != "limits" or config.get("sealed") or config.get("mirror"):
        yield "it is no bucket to write to; remove it, and tenure makes it anew"


# --- queues ---


def _of_queues(client: Client, streams: Iterable[Json]) -> dict[str, Json]:
    """Return the streams of queues, those of dead letters included, by the word that names each."""
    start = f"{client.options.prefix}_"
    named = {read_or(a_text, one.get("name"), ""): one for one in streams}
    return {name.removeprefix(start): one for name, one in named.items() if name.startswith(start)}


def _is_dead(word: str, config: Json) -> bool:
    """Whether a stream is of dead letters; a word that was cut doesn't tell."""
    said = read_or(a_text, config.get("description"), "")
    return said.startswith("dead letters of ") if is_cut(word) else word.endswith(word_of(DEAD_SUFFIX))


def _queue_streams(client: Client, streams: Iterable[Json]) -> Fact:
    found = _of_queues(client, streams)
    wrong = []
    for word, config in sorted(found.items()):
        subject = f"{client.options.prefix}.{word}"
        changes = changes_of_stream(config, [subject, f"{subject}.>"], is_dead=_is_dead(word, config))
        wrong += [f"of {config['name']}, {one}" for one in changes]
    advice = f"{'; '.join(wrong[:SHOWN_MAX])} (nats stream edit)" if wrong else ""
    return Fact("queues", f"{sum(not _is_dead(*one) for one in found.items())}", advice, "nats-queue-stream")


async def _queue_consumers(client: Client, streams: Iterable[Json]) -> Fact:
    """Look at the consumer that tenure has made for each queue."""
    names = [str(one["name"]) for word, one in _of_queues(client, streams).items() if not _is_dead(word, one)]

    async def look(connection: Connection) -> list[tuple[str, Json]]:
        found = []
        for stream in sorted(names):
            try:
                async for answer in client.pages(connection, f"CONSUMER.LIST.{stream}", "consumers"):
                    page = read_or(a_list, answer.get("consumers"), [])
                    found += [(stream, one) for one in page if isinstance(one, dict)]
            except Refusal as error:
                if error.code != NO_STREAM:
                    raise
        return found

    try:
        found = await client.run(look, within=LONG)
    except TenureError as error:
        return Fact("consumers", "may not be read", str(error), error.code)
    wrong = []
    for stream, one in found:
        name, config = read_or(a_text, one.get("name"), ""), part_of(one, "config")
        ack_wait = ack_wait_in(name)
        if ack_wait is None:
            continue  # another program's
        if changed := changed_in(config, ack_wait):
            wrong.append(f"of {name} of {stream}, {changes_of(config, changed)}")
        elif one.get("paused"):
            wrong.append(f"{name} of {stream} is paused")
    advice = ""
    if wrong:
        advice = f"{'; '.join(wrong[:SHOWN_MAX])}; set it back with nats consumer edit, or resume"
    return Fact("consumers", f"{len(found)}", advice, "nats-queue-consumer")


# --- rights ------------------------------------------------------------------------------------------------------


async def _hints(client: Client, streams: Iterable[Json]) -> Fact:
    bucket = f"{client.options.prefix}-leases"
    subject = f"{bucket}.tenure-doctor"
    leases = next((one for one in streams if one.get("name") == f"KV_{bucket}"), None)
    if leases is not None and not is_reporting(leases, bucket):
        return Fact(
            "hints",
            "none for leases",
            f"somebody else has made the bucket {bucket}, and it reports nothing, so candidates poll; run nats stream "
            f"edit KV_{bucket} --republish-source '$KV.{bucket}.>' --republish-destination '{bucket}.>'",
            "nats-no-republish",
        )

    async def may_subscribe(connection: Connection) -> bool:
        subscribed = await connection.subscribe(subject, lambda _: None)
        try:
            await connection.flush()
        finally:
            await subscribed.unsubscribe()
        return connection.may_subscribe(subject)

    try:
        is_permitted = await client.run(may_subscribe)
    except TenureError as error:
        return Fact("hints", "can't be tried", str(error), error.code)
    if is_permitted:
        return Fact("hints", "by subscription")
    return Fact(
        "hints",
        "refused",
        f"this user may not subscribe to {bucket}.*, so candidates poll; permit it",
        "nats-no-subscribe",
    )


def _login(options: Options, login: Login, source: str) -> Fact:
    kinds = {
        "a user and a password": bool(login.user),
        "a token": login.password is not None,
        "a creds file": options.creds is not None,
        "an nkey": options.nkey is not None,
        "a certificate": options.cert is not None,
    }
    kind = next((kind for kind, is_used in kinds.items() if is_used), "none")
    advice = ""
    if kind == "none":
        advice = "every program that reaches it can end leases and read all messages; require a login or certificates"
    return Fact("login", f"{kind}, from {source}" if source else kind, advice, "nats-no-login")

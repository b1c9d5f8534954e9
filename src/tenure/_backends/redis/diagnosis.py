"""The facts that ``tenure doctor`` shows of a Redis: the settings that the promises depend on, and possible losses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from tenure._backends.redis.address import Address, Options
from tenure._backends.redis.client import Client, is_forbidden
from tenure._backends.redis.cluster import ClusterClient
from tenure._backends.redis.scripts import Answer
from tenure._backends.redis.sentinel import SentinelClient
from tenure._opened import Fact
from tenure._set_aside import facts_set_aside
from tenure._tls_facts import Verifies, tls_fact
from tenure._url import is_loopback
from tenure.errors import ConfigError, TenureError

VERSION_MIN = (7, 0)

STEPS = "a complete and a send to another queue are not one atomic step here: handlers must be idempotent"


SETTINGS = "appendonly", "appendfsync", "save", "maxmemory", "maxmemory-policy"
"""What is read of the configuration; there are passwords in the rest of it."""


async def diagnose(client: Client) -> list[Fact]:
    """Return facts about the server of *client*, or each primary of its cluster; also which can't be read."""
    primaries = await client.each_primary() if isinstance(client, ClusterClient) else None
    facts = await _facts(client.command) if primaries is None else []
    hosts = await client.hosts()
    found = [
        Fact("server", str(client.address)),
        login_fact(client.address, client.options, hosts, client.logins.source),
        *_tls(client, hosts),
        *facts,
    ]
    found += facts_set_aside(client.options)
    if primaries is not None:
        found.append(Fact("cluster", f"{len(primaries)} primaries", STEPS, "redis-cluster-steps"))
    for name, command in primaries or ():
        found += [replace(fact, name=f"{fact.name} of {name}") for fact in await _facts(command)]
    return found


def login_fact(address: Address, options: Options, hosts: Sequence[str], source: str = "") -> Fact:
    """Return how this program logs in at *hosts*; without any login, others on the network can do what it does.

    Args:
        address: The login that the URL names.
        options: The certificate that is shown.
        hosts: The servers, by name or address.
        source: Where the password comes from instead; empty: the URL.
    """
    if source:
        return Fact("login", f"a password, from {source}")
    if address.password is not None:
        return Fact("login", "a password")
    if options.cert is not None:
        return Fact("login", "none; this program shows a certificate")
    if all(host.startswith("/") or is_loopback(host) for host in hosts):
        return Fact("login", "none, on this machine")
    advice = "every program that reaches it can end leases and read all messages; require a password or certificates"
    return Fact("login", "none", advice, "redis-no-login")


def _tls(client: Client, hosts: Sequence[str]) -> list[Fact]:
    """Return what is verified of the connections to *hosts*, and of those to sentinels."""
    found = [_tls_of(client.address, client.options, hosts)]
    if isinstance(client, SentinelClient):
        service = client.address.service
        at_sentinels = _tls_of(service.at_sentinels, client.options, [host for host, _ in service.sentinels])
        found.append(replace(at_sentinels, name="TLS of sentinels"))
    return found


def _tls_of(address: Address, options: Options, hosts: Sequence[str]) -> Fact:
    verifies: Verifies = "certificate and name" if options.check_hostname else "certificate"
    because = "check_hostname=no"
    if not options.verifies:
        verifies, because = "nothing", f"ssl_cert_reqs={options.ssl_cert_reqs}"
    return tls_fact(verifies if address.is_tls else None, hosts, authority=options.ca, because=because)


async def _facts(command: Callable[..., Awaitable[Answer]]) -> list[Fact]:
    """Return facts about one server; *command* runs a command there."""
    found: list[Fact] = []
    try:
        info = await command("INFO")
    except TenureError as error:
        if not _is_refused(error):
            raise
        return [*found, Fact("server's state", "may not be read", str(error), error.code)]
    found += [_version(info), _role(info), *_persistence_errors(info)]
    try:
        config = await command("CONFIG GET", *SETTINGS)
    except TenureError as error:
        if not _is_refused(error):
            raise
        advice = "doctor can't check what survives a crash: ask an administrator; docs/redis.md names the settings"
        return [*found, Fact("configuration", "may not be read", advice, "redis-config-unread")]
    return [*found, _durability(config), *_memory(config, info)]


def _is_refused(error: TenureError) -> bool:
    return isinstance(error, ConfigError) or is_forbidden(error)


def _version(info: Mapping[str, object]) -> Fact:
    version = str(info.get("valkey_version") or info.get("redis_version", "unknown"))
    numbers = [int(part) for part in str(info.get("redis_version", "0")).split(".") if part.isdecimal()]
    old = tuple(numbers[:2]) < VERSION_MIN
    advice = "tenure is tested with 7.0 and newer; use one of these" if old else ""
    return Fact("version", version, advice, "redis-version")


def _role(info: Mapping[str, object]) -> Fact:
    role = str(info.get("role", "unknown"))
    if role != "master":
        return Fact("role", role, "a replica refuses writes; name the primary", "redis-replica")
    replicas = int(str(info.get("connected_slaves", 0)))
    if not replicas:
        return Fact("role", "primary without replicas")
    return Fact(
        "role",
        f"primary with {replicas} replicas",
        "replication is asynchronous: a fail-over may lose the newest leases, tokens and messages; then two may lead, "
        "or a token may be given twice. Let the resource itself refuse old tokens, or use PostgreSQL",
        "redis-failover",
    )


def _persistence_errors(info: Mapping[str, object]) -> list[Fact]:
    broken = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(name, "ok") != "ok"]
    advice = "check the server's log and its disk"
    return [Fact("disk", f"{name} is {info[name]}", advice, "redis-disk") for name in broken]


def _durability(config: Mapping[str, str]) -> Fact:
    if config.get("appendonly") != "yes":
        return Fact(
            "durability",
            "snapshots only" if config.get("save") else "none",
            "a crash loses everything since the last snapshot, tokens too; set appendonly yes and appendfsync always",
            "redis-no-persistence",
        )
    policy = config.get("appendfsync", "unknown")
    advice = {
        "always": "",
        "everysec": "kill -9 loses nothing, but a power failure loses up to a second of answered writes; "
        "set appendfsync always if no message or token may be lost",
    }.get(policy, "a crash of the system may lose any number of answered writes; set appendfsync always")
    return Fact("durability", f"append-only file, appendfsync {policy}", advice, "redis-appendfsync")


NEARLY_FULL = 0.9
"""The share of its memory from which on a Redis is reported as nearly full."""


def _memory(config: Mapping[str, str], info: Mapping[str, object]) -> list[Fact]:
    """Return how full the memory is, and what happens when it is."""
    policy, limit = config.get("maxmemory-policy", "unknown"), int(config.get("maxmemory", "0"))
    used = int(str(info.get("used_memory", 0)))
    if not limit:
        return [Fact("memory", f"no limit, {policy}")]
    facts = []
    if used >= limit:
        advice = "it is full, and refuses to send; drain queues, purge dead letters, or raise maxmemory"
        facts.append(Fact("memory", f"{used} of maxmemory {limit} bytes", advice, "redis-full"))
    elif used >= NEARLY_FULL * limit:
        advice = "it is nearly full, and will refuse to send; drain queues, or raise maxmemory"
        facts.append(Fact("memory", f"{used} of maxmemory {limit} bytes", advice, "redis-nearly-full"))
    else:
        facts.append(Fact("memory", f"{used} of maxmemory {limit} bytes"))
    advice = "under memory pressure it evicts leases, tokens and messages, too; set maxmemory-policy noeviction"
    facts.append(Fact("maxmemory-policy", policy, advice if policy != "noeviction" else "", "redis-eviction"))
    return facts

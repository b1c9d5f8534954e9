"""What others write in place of a URL of a backend: told by its form, with what to write instead.

Managed services print commands, connection strings of other drivers, and bare hosts. Nothing of such a text is shown,
as a password may stand anywhere in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from tenure.errors import nearest

_HOST = r"(?:[\w.-]+|\[[\w:.%]+\])"
_HOSTS = rf"{_HOST}(?::\d{{1,5}})?(?:,{_HOST}(?::\d{{1,5}})?)*"

_POSTGRESQL = "write postgresql://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=verify-full&sslrootcert=system"

_FORMS: tuple[tuple[str, str, str], ...] = (
    (
        r"\s*(?:sudo\s+)?(?:psql|pgcli|pg_dump|redis-cli|valkey-cli|iredis|nats|etcdctl|zkcli(?:\.sh)?)\s",
        "a command",
        "write only the URL that is in it, without quotes",
    ),
    (
        r"Endpoint=sb://",
        "a connection string of Azure Service Bus",
        "put it into an environment variable, and write servicebus:?connection_string_env=NAME",
    ),
    (
        r"(?:DefaultEndpointsProtocol|AccountName|AccountKey|BlobEndpoint|QueueEndpoint|SharedAccessSignature)=",
        "a connection string of Azure Storage",
        "put it into an environment variable, and write azure:?connection_string_env=NAME",
    ),
    (
        r"\s*(?:export\s+)?[A-Z_][A-Z0-9_]*=[\"']?[a-z][a-z0-9+]*://",
        "an assignment",
        "write only what follows its =",
    ),
    (r"\s*[\"'`<]", "a text that begins with a quote", "leave out the quotes around the URL"),
    (r"\s+\S", "a text that begins with a space", "leave it out"),
    (r"jdbc:", "a URL of JDBC", f"leave out 'jdbc:', and the options user and password; {_POSTGRESQL}"),
    (
        r"\s*(?:host|hostaddr|port|dbname|user|password|service|sslmode|options)\s*=(?![^']*;)",
        "a connection string of libpq",
        _POSTGRESQL,
    ),
    (
        r"\s*(?:Server|Host|Data Source|Database|Port|User ?(?:Id|name)|Password|SSL ?Mode)\s*=.*;",
        "a connection string of ADO.NET",
        f"for a PostgreSQL, {_POSTGRESQL}",
    ),
    (
        rf"{_HOSTS},.*\b(?:password|user|ssl|abortConnect|defaultDatabase)=",
        "a connection string of StackExchange.Redis",
        "write rediss://:PASSWORD@HOST:PORT, or with ssl=False redis://:PASSWORD@HOST:PORT; percent-encode the "
        "special characters of the password, as / to %2F and = to %3D",
    ),
    (
        rf"(?=[^/]*:\d){_HOSTS}(?:/[\w./-]*)?\Z",
        "a host, without the scheme of its store",
        "begin with that, as in redis://HOST:PORT, etcd://HOST:PORT,HOST2:PORT or zookeeper://HOST:PORT,HOST2:PORT",
    ),
)
"""Each: how a text begins, what it is, and what to write instead. They are compiled when one is needed: at an error."""

_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "amqp+ssl": "amqps",
        "cockroachdb": "postgresql",
        "etcd3": "etcd",
        "file": "sqlite",
        "http": "etcd",
        "https": "etcds",
        "k8s": "kubernetes",
        "pg": "postgresql",
        "pgsql": "postgresql",
        "postgis": "postgresql",
        "postgre": "postgresql",
        "psql": "postgresql",
        "pyamqp": "amqp",
        "rabbit": "amqp",
        "rabbitmq": "amqp",
        "rabbitmqs": "amqps",
        "redis+ssl": "rediss",
        "redis+tls": "rediss",
        "sb": "servicebus",
        "sentinel": "redis+sentinel",
        "socket": "redis+unix",
        "sqlite3": "sqlite",
        "tls": "nats",
        "valkey": "redis",
        "valkey+unix": "redis+unix",
        "valkeys": "rediss",
        "wss": "nats",
        "ws": "nats",
        "zk": "zookeeper",
    }
)
"""What others call a store that there is: their scheme, and ours."""

_MORE: Mapping[str, str] = MappingProxyType(
    {
        "http": "; for a Kubernetes, write kubernetes://NAMESPACE?server=…",
        "https": "; for a Kubernetes, write kubernetes://NAMESPACE?server=…",
        "tls": ", with tls=true among its options",
        "ws": ": tenure doesn't speak to it by WebSocket",
        "wss": ", with tls=true among its options: tenure doesn't speak to it by WebSocket",
    }
)

_NONE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("mysql", "mysqls", "mariadb", "mysqlx"), "MySQL")
    | dict.fromkeys(("mongodb", "mongo"), "MongoDB")
    | dict.fromkeys(("mssql", "sqlserver"), "SQL Server")
    | {"oracle": "Oracle", "kafka": "Kafka", "memcached": "Memcached", "cassandra": "Cassandra", "sqs": "Amazon SQS"}
    | {
        "dynamodb": "DynamoDB",
        "mqtt": "MQTT",
        "mqtts": "MQTT",
        "pulsar": "Pulsar",
        "consul": "Consul",
        "s3": "Amazon S3",
    }
)
"""Stores that tenure can't use, by their schemes."""

LOOKED_AT = 2_000
"""Characters of a text whose form is told: nobody prints a longer one."""

CLOSE = 0.8
"""How much of a scheme must agree with one of ours to be a misspelling of it: ``mysql`` is none of ``sqlite``."""


def refusal_of_form(written: str) -> str | None:
    """Return why a text without a scheme of ours is no URL, and what to write, if its form tells; None otherwise."""
    if len(written) > LOOKED_AT:
        return None
    for form, what, instead in _FORMS:
        if re.match(form, written, re.IGNORECASE):
            return f"what was given is {what} (and not shown, as it may hold a secret); {instead}"
    return None


def refusal_of_scheme(scheme: str, schemes: Collection[str]) -> str:
    """Return that there is no backend for *scheme*, which may be the one of others for a store that there is."""
    known = ", ".join(sorted(schemes))
    kind, _, driver = scheme.partition("+")
    if kind in _NONE:
        return f"no backend serves {scheme!r}: tenure doesn't work on {_NONE[kind]}; there are {known}"
    meant = _KINDS.get(scheme) or (kind if driver and kind in schemes else _KINDS.get(kind))
    if meant is not None:
        return f"no backend serves {scheme!r}; did you mean {meant!r}{_MORE.get(scheme, '')}? (known: {known})"
    return f"no backend serves {scheme!r}{nearest(scheme, list(schemes), CLOSE)} (known: {known})"

"""The facts that ``describe()`` and ``tenure doctor`` show of a RabbitMQ."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.queue import RabbitBroker
from tenure._opened import Fact
from tenure._set_aside import facts_set_aside
from tenure._tls_facts import Verifies, tls_fact
from tenure._url import is_loopback
from tenure.errors import TenureError

OLDEST = (3, 10)
"""The first version whose quorum queues have a time to live, and dead-letter at least once."""


BODY_MAX_BEFORE_4, BODY_MAX = 128 * 2**20, 16 * 2**20
"""Bytes of the largest message that a server takes by default, before version 4 and from then on."""


def version_of(text: str) -> tuple[int, ...]:
    """Return a version such as ``3.10.8`` as numbers; empty if it has another form."""
    try:
        return tuple(int(part) for part in text.split("-")[0].split("+")[0].split(".")[:3])
    except ValueError:
        return ()


async def diagnose(client: Client, broker: RabbitBroker) -> Sequence[Fact]:
    """Return facts about the server."""
    connection = await client.run(lambda: client.connection("receiving"))
    version = str(connection.server.get("version", "unknown"))
    advice = f"tenure needs 3.10 or newer, not {version}" if () < version_of(version) < OLDEST else ""
    cluster = str(connection.server.get("cluster_name", "unknown"))
    return [
        Fact("server", f"RabbitMQ {version}, cluster {cluster}", advice, "rabbitmq-version"),
        _tls(client, connection.tls_version),
        Fact("virtual host", client.address.vhost),
        Fact("login", _login(client), _login_advice(client), "rabbitmq-guest"),
        await _queues(broker),
        Fact(
            "heartbeat",
            f"{connection.heartbeat:g} s: a process that hangs keeps its messages for up to three times as long",
        ),
        Fact(
            "consumer_timeout",
            f"{client.consumer_timeout:g} s, as the URL says: a handler runs for that long at most, less its lock",
        ),
        Fact("max_message_size", _body_max(client, version)),
        *facts_set_aside(client.options),
    ]


def _body_max(client: Client, version: str) -> str:
    """Return what is known of the largest body that the server takes."""
    if client.body_max is not None:
        return f"{client.body_max:,} bytes, as the server has told when it refused a larger message"
    usual = BODY_MAX_BEFORE_4 if version_of(version) < (4,) else BODY_MAX
    return f"{usual:,} bytes, unless it is configured otherwise: AMQP tells it only in the refusal of a larger message"


async def _queues(broker: RabbitBroker) -> Fact:
    """Return how many queues there are; the server can be examined without its records, too."""
    try:
        return Fact("queues", f"{len(await broker.names())}, without those that only other programs use")
    except TenureError as error:
        return Fact("queues", "unknown", str(error), "rabbitmq-records")


def _tls(client: Client, version: str) -> Fact:
    address, options = client.address, client.options
    verifies: Verifies = "certificate and name" if options.check_hostname else "certificate"
    return tls_fact(
        verifies if address.is_tls else None,
        [address.host],
        authority=options.ca,
        version=version,
        because="check_hostname=no",
    )


def _login(client: Client) -> str:
    user = client.user or "the user of the token"
    return f"{user}; the password is that of {client.source}" if client.source else user


def _login_advice(client: Client) -> str:
    if client.user == "guest" and not is_loopback(client.address.host):
        return "the server's well-known first user; add one of your own"
    return ""

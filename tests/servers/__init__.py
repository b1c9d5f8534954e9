"""Real servers for tests, started as processes: on free ports, in temporary folders, with nothing left behind.

::

    url = url_of(Redis)  # one for the whole run of this process, or the one given by URL
    with private(Redis, password="s3cret") as server:  # for one test, which may disturb it
        server.kill()
        server.start()
        server.pause()
        server.resume()

If a server isn't installed, the test is skipped, with the name of the package; under ``TENURE_REQUIRE`` it fails.
``TENURE_TEST_REDIS_URL``, ``TENURE_TEST_POSTGRESQL_URL``, ``TENURE_TEST_AZURE_URL``, ``TENURE_TEST_ETCD_URL``,
``TENURE_TEST_ZOOKEEPER_URL``, ``TENURE_TEST_NATS_URL`` and ``TENURE_TEST_AMQP_URL`` name servers to be used instead;
``TENURE_TEST_ETCD`` and ``TENURE_TEST_NATS`` other programs to start as etcd and as nats-server;
``TENURE_TEST_RABBITMQ`` the folder of another RabbitMQ's programs.

``ServiceBus`` is a look-alike. ``TENURE_TEST_SERVICEBUS`` names a connection string of a real namespace, or of the
official emulator, on which the suite of brokers runs, too.

``Kubernetes`` is a double of the Lease API. ``TENURE_TEST_KUBE_APISERVER`` names a real kube-apiserver, on which
the same tests run, too.
"""

from tests.servers.azurite import Azurite
from tests.servers.certificates import Authority
from tests.servers.etcd import Etcd, EtcdCluster
from tests.servers.kubernetes import KubeApiserver, Kubernetes
from tests.servers.nats import Nats, NatsCluster
from tests.servers.postgres import Postgres
from tests.servers.process import Server, free_port
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis
from tests.servers.servicebus import ServiceBus
from tests.servers.sharing import NO_SERVERS, patient, private, shared, url_of
from tests.servers.zookeeper import ZooKeeper, ZooKeeperEnsemble

__all__ = [
    "NO_SERVERS",
    "Authority",
    "Azurite",
    "Etcd",
    "EtcdCluster",
    "KubeApiserver",
    "Kubernetes",
    "Nats",
    "NatsCluster",
    "Postgres",
    "RabbitMQ",
    "Redis",
    "Server",
    "ServiceBus",
    "ZooKeeper",
    "ZooKeeperEnsemble",
    "free_port",
    "patient",
    "private",
    "shared",
    "url_of",
]

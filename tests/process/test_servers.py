"""The servers of other tests: they start, can be stopped and cut off, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError

import pytest

from scripts.servers import ROOT
from tests.process_states import states_of
from tests.servers import (
    Authority,
    Azurite,
    Etcd,
    EtcdCluster,
    Nats,
    NatsCluster,
    Postgres,
    Redis,
    Server,
    ZooKeeper,
    ZooKeeperEnsemble,
    private,
    shared,
)
from tests.servers.etcd import from_base64, in_base64
from tests.servers.guard import MARK, servers_of
from tests.servers.sharing import Startable, require

pytestmark = pytest.mark.process


def say(server: Server, question: bytes) -> bytes | None:
    return server.answers(question)


@pytest.mark.parametrize(
    "kind",
    [Redis, Postgres, Azurite, Etcd, EtcdCluster, Nats, NatsCluster, ZooKeeper, ZooKeeperEnsemble],
    ids=lambda kind: str(kind.__name__),
)
def test_a_server_starts_stops_and_starts_again(kind: type[Startable]) -> None:
    server = private(kind)
    try:
        schemes = ("redis://", "postgresql://", "azurite://", "etcd://", "nats://", "zookeeper://")
        assert server.url.startswith(schemes)
        server.stop()
        server.start()
        server.kill()
        server.start()
    finally:
        server.close()
    assert not server.folder.exists()


def test_a_shared_server_is_one() -> None:
    assert shared(Redis) is shared(Redis)


def test_a_server_that_is_down_keeps_its_port() -> None:
    with private(Redis) as server:
        server.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        server.start()


def test_redis_keeps_what_it_has_answered() -> None:
    with private(Redis) as server:
        assert say(server, b"SET key value\r\n") == b"+OK\r\n"
        server.kill()
        server.start()
        assert say(server, b"GET key\r\n") == b"$5\r\nvalue\r\n"


def test_a_clock_can_be_turned() -> None:
    with private(Redis, turnable=True) as server:
        assert say(server, b"SET key value PX 60000\r\n") == b"+OK\r\n"
        server.turn(50)
        assert say(server, b"GET key\r\n") == b"$5\r\nvalue\r\n"
        server.turn(10)
        assert say(server, b"GET key\r\n") == b"$-1\r\n"
        server.kill()
        server.start()  # later, and not earlier
        assert say(server, b"GET key\r\n") == b"$-1\r\n"
    with private(Postgres, turnable=True) as database:
        ask = ["psql", "-h", "127.0.0.1", "-p", str(database.port), "-U", "postgres", "-Atc"]
        question = "SELECT extract(epoch FROM clock_timestamp())::float8"
        before = float(database.run(*ask, question))
        database.turn(3_600)
        assert float(database.run(*ask, question)) >= before + 3_600


def test_a_paused_server_accepts_connections_and_does_not_answer() -> None:
    with private(Redis) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        server.pause()
        assert states_of(server.pid) == {"T"}
        connection.sendall(b"PING\r\n")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        server.resume()
        connection.settimeout(5)
        assert connection.recv(100) == b"+PONG\r\n"


def test_a_password_is_asked_for() -> None:
    with private(Redis, password="s3cret") as server:
        assert ":s3cret@" in server.url
        answer = say(server, b"PING\r\n")
        assert answer is not None
        assert answer.startswith(b"-NOAUTH")
    with private(Postgres, password="s3cret") as database:
        assert ":s3cret@" in database.url


def test_only_the_right_authority_is_trusted() -> None:
    right, wrong = Authority(), Authority("another authority")
    with private(Redis, authority=right) as server:
        assert server.url.startswith("rediss://")
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            context = ssl.create_default_context(cafile=str(right.certificate))
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                connection.sendall(b"PING\r\n")
                assert connection.recv(100) == b"+PONG\r\n"
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            wrong.context().wrap_socket(plain)
    with private(Postgres, authority=right, password="s3cret") as database:
        asked_for_tls = say(database, (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big"))
        assert asked_for_tls == b"S"


def test_azurite_can_have_a_faster_clock() -> None:
    with private(Azurite, speed=20.0) as server:
        answer = server.blob.answers(b"GET /devstoreaccount1 HTTP/1.0\r\n\r\n")
        assert answer is not None
        assert answer.startswith(b"HTTP/1.1")


def test_etcd_grants_short_leases_and_keeps_what_it_has_answered() -> None:
    with private(Etcd) as server:
        assert server.call("lease/grant", {"TTL": "1"})["TTL"] == "1"
        server.call("kv/put", {"key": in_base64("a"), "value": in_base64("kept")})
        assert server.requests()["Put"] == 1
        server.kill()
        server.start()
        (found,) = server.call("kv/range", {"key": in_base64("a")})["kvs"]
        assert from_base64(found["value"]) == "kept"


def test_etcd_requires_certificates_and_users() -> None:
    with private(Etcd, authority=Authority(), client_certificates=True, password="s3cret") as server:
        assert server.url.startswith("etcds://root:s3cret@")
        server.add_user("app", "pa55", "tenure/")
        token = server.login("app", "pa55")
        server.call("kv/put", {"key": in_base64("tenure/a")}, token=token)
        with pytest.raises(HTTPError) as refused:
            server.call("kv/put", {"key": in_base64("other")}, token=token)
        with refused.value:
            assert b"permission denied" in refused.value.read()


def test_the_leader_of_a_cluster_of_etcd_moves_and_is_replaced() -> None:
    with private(EtcdCluster) as cluster:
        first = cluster.leader()
        if shutil.which("etcdctl"):
            first = cluster.move_leader()
        assert first.call("lease/grant", {"TTL": "1"})["TTL"] == "1"
        first.kill()
        assert cluster.leader() is not first
        cluster.start()
        assert first in cluster.followers()


def test_zookeeper_keeps_what_it_has_answered() -> None:
    with private(ZooKeeper) as server:
        assert server.mode() == "standalone"
        with server.client() as client:
            client.create("/kept", b"yes")
        server.kill()
        server.start()
        with server.client() as client:
            assert client.get("/kept")[0] == b"yes"


def test_the_leader_of_an_ensemble_is_replaced() -> None:
    with private(ZooKeeperEnsemble) as ensemble:
        first = ensemble.leader
        first.kill()
        assert ensemble.leader is not first
        ensemble.start()
        assert first in ensemble.followers


RUN = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes started in the background ignore it
from tests.servers import Postgres, Redis, private
from tests.servers.process import run_folder
servers = [private(Redis), private(Postgres)]
print(run_folder(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_of_an_ended_run(number: signal.Signals) -> None:
    for kind in (Redis, Postgres):
        require(kind)
    env = {name: value for name, value in os.environ.items() if name != MARK}
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        try:
            assert folder.is_dir()
            assert len(servers_of(str(folder))) >= 2
        finally:
            run.send_signal(number)
    give_up = time.monotonic() + 60.0
    while folder.exists() or servers_of(str(folder)):
        assert time.monotonic() < give_up, "servers outlived their run"
        time.sleep(0.01)

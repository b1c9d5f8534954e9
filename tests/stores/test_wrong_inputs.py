"""Errors of servers on the command line: one line with advice, the documented exit code, no secret."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from redis import Redis as Plain

from tenure.cli import main
from tests import warm
from tests.servers import (
    Authority,
    Azurite,
    Etcd,
    Kubernetes,
    Nats,
    Postgres,
    Redis,
    ZooKeeper,
    free_port,
    private,
    shared,
    url_of,
)

pytest.importorskip("azure.storage.blob")

Captured = pytest.CaptureFixture[str]
SECRET, OTHER = "s3cret-of-the-server", "another-s3cret"
EVERY = ["doctor", "lead", "send", "work"]


# A handshake that fails may leave its transport to the garbage collector, deep in the driver: it is found here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def nothing_left_to_collect() -> Iterator[None]:
    gc.freeze()  # what the test before left has been collected; only what this one makes is visited
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENURE_URL", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def wrong_authority() -> Authority:
    return Authority("another authority")


@pytest.fixture(scope="module")
def guarded_postgres(authority: Authority) -> Iterator[Postgres]:
    with private(Postgres, password=SECRET, authority=authority) as server:
        yield server


@pytest.fixture(scope="module")
def guarded_redis(authority: Authority) -> Iterator[Redis]:
    with private(Redis, password=SECRET, authority=authority) as server:
        yield server


class Says:
    """Runs a command on a store, and checks how it fails."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __call__(self, command: str, url: str, *, code: int, words: list[str], more: tuple[str, ...] = ()) -> None:
        if code == 78 and "timeout=" not in url:  # a slow server must not turn the refusal into a time-out
            url += f"{'&' if '?' in url else '?'}timeout=60"
        arguments = {
            "doctor": ["doctor", url],
            "migrate": ["migrate", url],
            "lead": ["lead", "name", "--on", url, *more, "--", "true"],
            "send": ["send", "queue", "body", "--on", url, *more],
            "work": ["work", "queue", "--until-empty", "--on", url, *more, "--", "true"],
            "queue": ["queue", "--on", url],
        }[command]
        # Those two make their process one that adopts orphans, and these tests' must stay as it is.
        run = self._elsewhere if command in ("lead", "work") else self._here
        ended, out, error = run(arguments)
        assert (ended, out) == (code, ""), error
        assert [word for word in words if word not in error] == [], error
        assert error.count("\n") == 1
        assert SECRET not in error
        assert OTHER not in error

    def _here(self, arguments: list[str]) -> tuple[int, str, str]:
        return main(arguments), *self._captured.readouterr()

    def _elsewhere(self, arguments: list[str]) -> tuple[int, str, str]:
        ended = warm.run(arguments)
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def says(capsys: Captured) -> Says:
    return Says(capsys)


# --- PostgreSQL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*EVERY, "migrate"])
def test_postgresql_with_a_wrong_password(says: Says, guarded_postgres: Postgres, command: str) -> None:
    url = guarded_postgres.url.replace(SECRET, OTHER)
    # asyncpg before 0.32 tries again without TLS after a refusal, and reports the second one only.
    tells = [int(part) for part in asyncpg.__version__.split(".")[:2]] >= [0, 32]
    says(command, url, code=78, words=["refused the login", "~/.pgpass" if tells else "the password"])


@pytest.mark.parametrize("command", [*EVERY, "migrate"])
def test_postgresql_without_such_a_database(says: Says, guarded_postgres: Postgres, command: str) -> None:
    url = guarded_postgres.url.removesuffix("postgres") + "nowhere"
    says(command, url, code=78, words=["no such database", "createdb", '"nowhere"'])


@pytest.mark.parametrize("command", [*EVERY, "migrate"])
def test_postgresql_with_the_wrong_authority(
    says: Says, guarded_postgres: Postgres, wrong_authority: Authority, command: str
) -> None:
    url = f"{guarded_postgres.url}?sslmode=verify-full&sslrootcert={wrong_authority.certificate}"
    says(command, url, code=78, words=["not trusted", "sslrootcert="])


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslkey"])
def test_postgresql_with_a_file_that_is_not_there(says: Says, guarded_postgres: Postgres, name: str) -> None:
    url = f"{guarded_postgres.url}?sslmode=verify-full&{name}=/nowhere.pem"
    says("doctor", url, code=78, words=[f"{name}=/nowhere.pem", "No such file"])


@pytest.mark.parametrize("command", EVERY)
def test_postgresql_without_the_schema(says: Says, command: str) -> None:
    url = f"{url_of(Postgres)}?schema=not_made"
    says(command, url, code=78, words=["no schema 'not_made'", "tenure migrate URL"])


def test_postgresql_that_is_not_there(says: Says) -> None:
    url = f"postgresql://127.0.0.1:{free_port()}/orders"
    says("doctor", url, code=69, words=["can't be reached", "check host and port"])
    says("migrate", url, code=69, words=["can't be reached", "check host and port"])


# --- Redis -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", EVERY)
def test_redis_with_a_wrong_password(says: Says, guarded_redis: Redis, authority: Authority, command: str) -> None:
    url = f"{guarded_redis.url.replace(SECRET, OTHER)}?ca={authority.certificate}"
    says(command, url, code=78, words=["refused the login", "check user and password in the URL"])


def test_redis_without_a_password(says: Says, guarded_redis: Redis, authority: Authority) -> None:
    url = f"{guarded_redis.url.replace(f':{SECRET}@', '')}?ca={authority.certificate}"
    says("doctor", url, code=78, words=["requires a login, and got none", "redis://:PASSWORD@"])


@pytest.mark.parametrize("command", EVERY)
def test_redis_with_the_wrong_authority(
    says: Says, guarded_redis: Redis, wrong_authority: Authority, command: str
) -> None:
    url = f"{guarded_redis.url}?ca={wrong_authority.certificate}"
    says(command, url, code=78, words=["not trusted", "name its authority with ca=FILE"])


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_redis_with_a_file_that_is_not_there(says: Says, guarded_redis: Redis, name: str) -> None:
    says(
        "doctor",
        f"{guarded_redis.url}?{name}=/nowhere.pem",
        code=78,
        words=[f"{name}=/nowhere", "No such file"],
    )


def test_redis_with_the_wrong_scheme(says: Says, guarded_redis: Redis) -> None:
    plain = guarded_redis.url.replace("rediss:", "redis:")
    says("doctor", f"{plain}?timeout=20", code=69, words=["requires TLS, write rediss://"])
    says("doctor", f"{plain}?ca=/nowhere.pem", code=78, words=["options for TLS", "rediss://"])
    tls = url_of(Redis).replace("redis:", "rediss:")
    says("doctor", f"{tls}?timeout=0.5", code=69, words=["doesn't support TLS, write redis://"])


@pytest.mark.parametrize("command", EVERY)
def test_redis_without_rights(says: Says, command: str) -> None:
    url = url_of(Redis)
    with Plain.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "weak", "on", f">{SECRET}", "~*", "&*", "+@all", "-@scripting")
    login = url.replace("redis://", f"redis://weak:{SECRET}@")
    says(command, login, code=78, words=["does not permit this user", "docs/redis.md"])


@pytest.mark.parametrize("command", EVERY)
def test_redis_without_such_a_database(says: Says, command: str) -> None:
    says(command, f"{url_of(Redis)}/99", code=78, words=["no such database", "after the slash"])


def test_redis_that_is_not_there(says: Says) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    says("doctor", url, code=69, words=["can't be reached", "check host and port"])


# --- etcd --------------------------------------------------------------------------------------------------------

LEADING = ["doctor", "lead"]


@pytest.fixture(scope="module")
def guarded_etcd(authority: Authority) -> Iterator[Etcd]:
    with private(Etcd, password=SECRET, authority=authority) as server:
        yield server


@pytest.mark.parametrize("command", LEADING)
def test_etcd_with_a_wrong_password(says: Says, guarded_etcd: Etcd, command: str) -> None:
    url = guarded_etcd.url.replace(SECRET, OTHER)
    says(command, url, code=78, words=["refused the login", "check user and password in the URL"])


@pytest.mark.parametrize("command", LEADING)
def test_etcd_without_a_login(says: Says, guarded_etcd: Etcd, command: str) -> None:
    url = guarded_etcd.url.replace(f"root:{SECRET}@", "")
    says(command, url, code=78, words=["requires a login, and got none", "etcd://USER:PASSWORD@"])


@pytest.mark.parametrize("command", LEADING)
def test_etcd_with_the_wrong_authority(
    says: Says, guarded_etcd: Etcd, wrong_authority: Authority, command: str
) -> None:
    url = f"{guarded_etcd.url.partition('?')[0]}?ca={wrong_authority.certificate}"
    says(command, url, code=78, words=["not trusted", "name its authority with ca=FILE"])


@pytest.mark.parametrize("name", ["ca", "cert"])
def test_etcd_with_a_file_that_is_not_there(says: Says, name: str) -> None:
    says("doctor", f"etcds://a?{name}=/nowhere.pem", code=78, words=[f"{name}=/nowhere.pem", "No such file"])


@pytest.mark.parametrize("command", ["send", "work"])
def test_etcd_has_no_queues(says: Says, command: str) -> None:
    says(command, url_of(Etcd), code=78, words=["has elections, but no queues", "use another store"])


def test_etcd_that_is_not_there(says: Says) -> None:
    url = f"etcd://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/"
    says("doctor", url, code=69, words=["can't be reached: Connection refused", "check host and port"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("etcd:/orders", ["names no host", "write etcd://"]),
        ("etcd://a:port", ["no host:port", "percent-encode"]),
        ("etcd://a/orders", ["has a path", "?prefix=tenure/"]),
        ("etcd://a?prefx=orders/", ["no option 'prefx'", "did you mean 'prefix'?"]),
        ("etcd://a?kind=elect", ["one of election, lock, not 'elect'", "did you mean 'election'?"]),
        ("etcd3://a", ["no backend serves 'etcd3'", "did you mean 'etcd'?"]),
        (f"etcd://a:{SECRET}/x@b", ["has an @ after the address", "%2F"]),
    ],
)
@pytest.mark.parametrize("command", LEADING)
def test_etcd_with_a_wrong_url(says: Says, command: str, url: str, words: list[str]) -> None:
    says(command, url, code=78, words=words)


# --- Azure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "value", "words"),
    [
        ("key_env", OTHER, ["MINE holds no account key", "base64"]),
        ("key_env", "", ["MINE is not set"]),
        ("sas_env", "sv=2024", ["MINE holds no shared access signature", "sig="]),
        ("connection_string_env", f"AccountName=mine;AccountKey={OTHER}", ["no account key", "base64"]),
        ("connection_string_env", OTHER, ["the connection string can't be read"]),
    ],
)
@pytest.mark.parametrize("command", EVERY)
def test_azure_with_a_secret_that_is_none(
    says: Says, monkeypatch: pytest.MonkeyPatch, command: str, query: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv("MINE", value)
    account = "" if query == "connection_string_env" else "mine"
    says(command, f"azure://{account}?{query}=MINE", code=78, words=words)


@pytest.mark.parametrize("command", EVERY)
def test_azure_with_a_key_of_another_account(says: Says, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("MINE", shared(Azurite).connection_string.replace("Eby8", "AAAA"))
    says(command, "azure://?connection_string_env=MINE", code=78, words=["check", "key"])


def test_azurite_that_is_not_there(says: Says, capsys: Captured) -> None:
    port, url = free_port(), url_of(Azurite)
    words = ["Connection refused; check host and port, and whether Azurite", "its queues at queue_port"]
    says("doctor", f"azurite://127.0.0.1:{port}", code=69, words=["can't be reached: ", *words])
    elsewhere = f"{url.partition('?')[0]}?queue_port={port}"
    says("send", elsewhere, code=69, words=[f"can't be reached at 127.0.0.1:{port}: ", *words])
    assert main(["doctor", elsewhere, "--look-only"]) == 0
    assert main(["doctor", elsewhere]) == 69
    assert f"! queues: {elsewhere} can't be reached at 127.0.0.1:{port}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--session", "a"), ["have no sessions", "postgresql://"]),
        (("--priority", "1"), ["have no priorities", "postgresql://"]),
        (("--delay", "200h"), ["seven days"]),
    ],
)
def test_azure_with_an_impossible_operation(says: Says, more: tuple[str, ...], words: list[str]) -> None:
    says("send", url_of(Azurite), code=78, words=words, more=more)


# --- ZooKeeper ---------------------------------------------------------------------------------------------------

ELECTIONS = ["doctor", "lead"]


@pytest.fixture(scope="module")
def guarded_zookeeper(authority: Authority) -> Iterator[ZooKeeper]:
    with private(ZooKeeper, login=("ann", SECRET), needs_login=True, authority=authority) as server:
        yield server


@pytest.mark.parametrize("command", ELECTIONS)
def test_zookeeper_with_a_wrong_password(says: Says, guarded_zookeeper: ZooKeeper, command: str) -> None:
    url = f"{guarded_zookeeper.url.replace('//', f'//ann:{OTHER}@', 1)}&auth=sasl"
    says(command, url, code=78, words=["refused the login", "the option auth"])


@pytest.mark.parametrize("command", ELECTIONS)
def test_zookeeper_without_a_login(says: Says, guarded_zookeeper: ZooKeeper, command: str) -> None:
    says(command, guarded_zookeeper.url, code=78, words=["requires a login", "zookeeper://USER:PASSWORD@", "auth=sasl"])


@pytest.mark.parametrize("command", ELECTIONS)
def test_zookeeper_with_the_wrong_authority(
    says: Says, guarded_zookeeper: ZooKeeper, wrong_authority: Authority, command: str
) -> None:
    place = f"ann:{SECRET}@127.0.0.1:{guarded_zookeeper.port}"
    url = f"zookeeper://{place}/?auth=sasl&tls=true&ca={wrong_authority.certificate}"
    says(command, url, code=78, words=["not trusted", "name its authority with ca=FILE"])


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("tls=true&ca=/nowhere.pem", ["ca=/nowhere.pem", "No such file"]),
        ("ca=/nowhere.pem", ["options for TLS", "add tls=true"]),
        ("tls=true&cert=/nowhere.pem", ["cert and key are given together"]),
        ("check_hostname=false", ["options for TLS", "add tls=true"]),
        ("auth=sasl", ["needs a user and a password", "zookeeper://USER:PASSWORD@127.0.0.1:1/?auth=sasl"]),
        ("tick=2000", ["tick must be from 0.01 to 60 seconds", "tickTime"]),
        ("dialect=latc", ["must be one of latch, lock, kazoo", "did you mean 'latch'?"]),
        ("timout=1", ["no option 'timout'", "did you mean 'timeout'?"]),
    ],
)
def test_zookeeper_with_a_wrong_option(says: Says, query: str, words: list[str]) -> None:
    says("doctor", f"zookeeper://127.0.0.1:1/?{query}", code=78, words=words)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", ["names no host", "write zookeeper://"]),
        ("a:b", ["has a server that is no host:port"]),
        ("a:99999", ["has a server that is no host:port"]),
        ("a,b:1:2", ["has a server that is no host:port"]),
        ("ann@a", ["needs a user and a password before the @"]),
        ("a/x//y", ["which can't be one of ZooKeeper's"]),
        ("a/../y", ["which can't be one of ZooKeeper's"]),
        ("a/zookeeper/y", ["which is ZooKeeper's own"]),
    ],
)
def test_zookeeper_with_a_wrong_address(says: Says, place: str, words: list[str]) -> None:
    says("doctor", f"zookeeper://{place}", code=78, words=words)


def test_zookeeper_with_the_wrong_transport(says: Says, guarded_zookeeper: ZooKeeper) -> None:
    plain = f"zookeeper://127.0.0.1:{guarded_zookeeper.port}/?timeout=1"
    says("doctor", plain, code=69, words=["add tls=true if it requires TLS"])
    port = shared(ZooKeeper, tick=0.1).port
    says("doctor", f"zookeeper://127.0.0.1:{port}/?tls=true&timeout=1", code=69, words=["TLS"])


def test_zookeeper_that_is_not_there(says: Says) -> None:
    words = ["can't be reached: Connection refused", "check host and port"]
    says("doctor", f"zookeeper://127.0.0.1:{free_port()}/?timeout=0.5", code=69, words=words)


def test_zookeeper_with_a_lease_that_is_too_long(says: Says) -> None:
    words = ["lets a session last 60 s at most, and --ttl 120 s needs 120 s", "use --ttl 60 or less"]
    says("lead", shared(ZooKeeper, tick=0.1).url, code=78, words=words, more=("--ttl", "120"))


@pytest.mark.parametrize("command", ["send", "work"])
def test_zookeeper_has_no_queues(says: Says, command: str) -> None:
    says(command, "zookeeper://127.0.0.1:1", code=78, words=["has elections, but no queues"])


@pytest.mark.parametrize("kind", [Postgres, Redis, Azurite, Etcd, Nats])
@pytest.mark.parametrize("command", EVERY)
def test_an_unknown_option(says: Says, kind: type[Postgres | Redis | Azurite | Etcd | Nats], command: str) -> None:
    url = url_of(kind)
    more = "&" if "?" in url else "?"
    says(command, f"{url}{more}timout=1", code=78, words=["no option 'timout'", "did you mean 'timeout'?"])


# --- NATS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded_nats(authority: Authority) -> Iterator[Nats]:
    with private(Nats, password=SECRET, authority=authority) as server:
        yield server


@pytest.mark.parametrize("command", EVERY)
def test_nats_with_a_wrong_password(says: Says, guarded_nats: Nats, command: str) -> None:
    url = guarded_nats.url.replace(SECRET, OTHER)
    says(command, url, code=78, words=["refused the login", "check user, password, token, creds or nkey in the URL"])


@pytest.mark.parametrize("command", LEADING)
def test_nats_without_a_login(says: Says, guarded_nats: Nats, command: str) -> None:
    url = guarded_nats.url.replace(f"root:{SECRET}@", "")
    says(command, url, code=78, words=["refused the login", "check user, password, token, creds or nkey in the URL"])


@pytest.mark.parametrize("command", LEADING)
def test_nats_with_the_wrong_authority(
    says: Says, guarded_nats: Nats, wrong_authority: Authority, command: str
) -> None:
    url = f"{guarded_nats.url.partition('?')[0]}?ca={wrong_authority.certificate}"
    says(command, url, code=78, words=["not trusted", "name its authority with ca=FILE"])


@pytest.mark.parametrize("command", LEADING)
def test_nats_without_the_authority_that_it_needs(says: Says, guarded_nats: Nats, command: str) -> None:
    url = guarded_nats.url.partition("?")[0]  # the server requires TLS, and gets it unasked
    says(command, url, code=78, words=["not trusted", "name its authority with ca=FILE"])


@pytest.mark.parametrize("command", LEADING)
def test_nats_that_has_no_tls(says: Says, authority: Authority, command: str) -> None:
    url = f"nats://root:{SECRET}@127.0.0.1:{shared(Nats).port}/?ca={authority.certificate}"
    says(command, url, code=78, words=["the server has no TLS", "remove tls, ca, cert and key"])


@pytest.mark.parametrize("command", EVERY)
def test_nats_without_jetstream(says: Says, command: str) -> None:
    says(command, shared(Nats, jetstream=False).url, code=78, words=["has no JetStream", "start it with -js"])


@pytest.mark.parametrize("command", LEADING)
def test_nats_with_another_domain(says: Says, command: str) -> None:
    says(command, f"{url_of(Nats)}?domain=hub", code=78, words=["has no JetStream", "the option domain"])


@pytest.mark.parametrize("command", ["lead", "send"])
def test_nats_alone_with_replicas(says: Says, command: str) -> None:
    words = ["can't keep a stream on so many servers", "lower the option replicas"]
    says(command, f"{url_of(Nats)}?replicas=3&prefix=many", code=78, words=words)


@pytest.mark.parametrize("name", ["ca", "cert", "creds", "nkey"])
def test_nats_with_a_file_that_is_not_there(says: Says, name: str) -> None:
    says("doctor", f"nats://a?{name}=/nowhere", code=78, words=[f"{name}=/nowhere", "No such file"])


def test_nats_that_is_not_there(says: Says) -> None:
    url = f"nats://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/"
    says("doctor", url, code=69, words=["can't be reached: Connection refused", "check host and port"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nats:/orders", ["names no host", "write nats://"]),
        ("nats://a:port", ["no host:port", "percent-encode"]),
        ("nats://a/orders", ["has a path", "?prefix=tenure"]),
        ("nats://a?prefx=orders", ["no option 'prefx'", "did you mean 'prefix'?"]),
        ("nats://a?prefix=a.b", ["prefix must be one word", "not 'a.b'"]),
        ("nats://a?replicas=7", ["replicas must be from 1 to 5, not 7", "try replicas=3"]),
        ("nat://a", ["no backend serves 'nat'", "did you mean 'nats'?"]),
        (f"nats://a:{SECRET}/x@b", ["has an @ after the address", "%2F"]),
    ],
)
@pytest.mark.parametrize("command", LEADING)
def test_nats_with_a_wrong_url(says: Says, command: str, url: str, words: list[str]) -> None:
    says(command, url, code=78, words=words)


# --- Kubernetes --------------------------------------------------------------------------------------------------

ELECTIONS = ["doctor", "lead"]


@pytest.fixture(scope="module")
def guarded_kubernetes() -> Iterator[Kubernetes]:
    with private(Kubernetes, tls=True, tokens={SECRET: "ann"}) as server:
        yield server


@pytest.mark.parametrize("command", ELECTIONS)
def test_kubernetes_with_a_wrong_token(
    says: Says, guarded_kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("MINE", OTHER)
    says(command, f"{guarded_kubernetes.url}&token_env=MINE", code=78, words=["refused the login", "renew the token"])
    monkeypatch.setenv("MINE", "")
    says(command, f"{guarded_kubernetes.url}&token_env=MINE", code=78, words=["MINE is not set"])


@pytest.mark.parametrize("command", ELECTIONS)
def test_kubernetes_with_the_wrong_authority(
    says: Says, guarded_kubernetes: Kubernetes, wrong_authority: Authority, command: str
) -> None:
    url = f"kubernetes://default?server={guarded_kubernetes.server}&ca={wrong_authority.certificate}"
    says(command, url, code=78, words=["not trusted", "with ca=FILE beside server="])


def test_kubernetes_with_a_file_that_is_not_there(says: Says, guarded_kubernetes: Kubernetes) -> None:
    url = f"kubernetes://default?server={guarded_kubernetes.server}&ca=/nowhere.pem"
    says("doctor", url, code=78, words=["/nowhere.pem", "No such file"])


def test_kubernetes_without_rights(says: Says, guarded_kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", SECRET)
    guarded_kubernetes.set(roles=[{"verbs": ["get"]}])
    try:
        words = ["grant the verb 'create' on leases of coordination.k8s.io in a Role", 'User "ann" cannot create']
        says("lead", f"{guarded_kubernetes.url}&token_env=MINE", code=78, words=words)
    finally:
        guarded_kubernetes.set(roles=None)


@pytest.mark.parametrize("command", ELECTIONS)
def test_kubernetes_without_a_cluster(says: Says, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    says(command, "kubernetes://default", code=78, words=["no Kubernetes cluster was found", "set KUBECONFIG"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kubernetes://10.0.0.1:6443", ["names no namespace", "kubernetes://NAMESPACE?server=https://HOST:PORT"]),
        ("kubernetes://default/name", ["has a path", "name the election separately"]),
        ("kubernetes://default?server=10.0.0.1", ["the option server must be an address such as https://"]),
        ("kubernetes://?server=https://h", ["names no namespace", "add one to the URL"]),
        ("kubernetes://default?contxt=x", ["has no option 'contxt'; did you mean 'context'?"]),
        ("kubernetes://default?token_env=X", ["token_env is only for a server that the URL names"]),
        ("kubernetes://default?server=https://h&context=x", ["context and server can't both be given"]),
        ("kubernetes://default?watches=-1", ["watches must be from 0 to 10000, not -1; try watches=100"]),
        ("kubernetes://default?server=https://h&timeout=0", ["timeout must be from 0.1 to 60 seconds"]),
    ],
)
def test_kubernetes_with_an_address_that_is_none(says: Says, url: str, words: list[str]) -> None:
    says("doctor", url, code=78, words=words)


def test_kubernetes_that_is_not_there(says: Says) -> None:
    url = f"kubernetes://default?server=https://127.0.0.1:{free_port()}"
    says("doctor", url, code=69, words=["can't be reached", "check host and port"])


def test_kubernetes_has_no_queues(says: Says, guarded_kubernetes: Kubernetes) -> None:
    for command in ("send", "work", "queue"):
        says(command, guarded_kubernetes.url, code=78, words=["has elections, but no queues"])


def test_kubernetes_with_a_name_that_no_lease_can_have(guarded_kubernetes: Kubernetes, capsys: Captured) -> None:
    assert main(["status", "Nightly_Report", "--on", guarded_kubernetes.url]) == 78
    assert "must be a DNS name" in (error := capsys.readouterr().err)
    assert error.endswith("try 'nightly-report'\n")

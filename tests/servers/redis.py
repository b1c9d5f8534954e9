"""redis-server: every write is on disk before it is answered, so that a kill loses no answered write."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Sequence
from urllib.parse import quote

from tests.servers.certificates import Authority
from tests.servers.process import Server


class Redis(Server):
    """A Redis.

    Args:
        password: Of the user ``default``; without it, none is required.
        authority: Issues its certificate; it then accepts TLS only.
        options: More lines of its configuration, as ``("maxmemory", "10mb")``.
        turnable: Whether its clock can be put forward.
    """

    install = "redis-server (apt-get install redis-server)"
    scheme = "redis"

    def __init__(
        self,
        *,
        password: str = "",
        authority: Authority | None = None,
        options: Sequence[tuple[str, str]] = (),
        turnable: bool = False,
    ) -> None:
        super().__init__(turnable=turnable)
        self.password = password
        self.authority = authority
        self.options = options

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which("redis-server") else "redis-server is not installed"

    def prepare(self) -> None:
        # Without that line, it writes its title over its environment, which has the guard's mark.
        lines = [("bind", "127.0.0.1"), ("dir", str(self.folder)), ("save", '""'), ("set-proc-title", "no")]
        lines += [("appendonly", "yes"), ("appendfsync", "always"), ("port", "0" if self.authority else str(self.port))]
        lines.append(("repl-diskless-sync-delay", "0"))  # otherwise a replica waits 5 s for others
        if self.password:
            lines.append(("requirepass", self.password))
        lines += self.tls()
        lines += self.options
        self.write("redis.conf", "".join(f"{name} {value}\n" for name, value in lines))

    def tls(self) -> Sequence[tuple[str, str]]:
        """Return the lines for TLS, also with its primary or replicas; none without an authority."""
        if not self.authority:
            return []
        certificate, key = self.authority.issue(self.folder)
        lines = [("tls-port", str(self.port)), ("tls-auth-clients", "no"), ("tls-replication", "yes")]
        lines += [("tls-cert-file", str(certificate)), ("tls-key-file", str(key))]
        return [*lines, ("tls-ca-cert-file", str(self.authority.certificate))]

    def argv(self) -> Sequence[str]:
        return ["redis-server", str(self.folder / "redis.conf")]

    def ready(self) -> bool:
        request = b"PING\r\n"
        if self.password:
            request = f"AUTH {self.password}\r\n".encode() + request
        try:
            plain = socket.create_connection(("127.0.0.1", self.port), 1.0)
            with plain, self.authority.context().wrap_socket(plain) if self.authority else plain as connection:
                connection.sendall(request)
                answer = b""
                while answer.count(b"\r\n") < request.count(b"\r\n") and (more := connection.recv(4_096)):
                    answer += more
        except (OSError, ssl.SSLError):
            return False
        return answer.endswith(b"+PONG\r\n")

    @property
    def url(self) -> str:
        scheme = "rediss" if self.authority else "redis"
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"{scheme}://{login}127.0.0.1:{self.port}"

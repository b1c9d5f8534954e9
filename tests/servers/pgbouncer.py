"""PgBouncer in front of a PostgreSQL: each transaction may get another connection to the server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from tests.servers.postgres import Postgres
from tests.servers.process import Server


class PgBouncer(Server):
    """A pooler in transaction mode.

    Args:
        of: The server behind it, which requires no password.
        size: The number of connections to it.
    """

    install = "pgbouncer (apt-get install pgbouncer)"
    user = "postgres"
    scheme = "postgresql"

    def __init__(self, *, of: Postgres, size: int = 3) -> None:
        super().__init__()
        self._server = of
        self._size = size

    @classmethod
    def missing(cls) -> str:
        return (
            "" if shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin") else "PgBouncer is not installed"
        )

    def prepare(self) -> None:
        self.write("users.txt", '"postgres" ""\n')
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": self.folder / "users.txt",
            "pool_mode": "transaction",
            "default_pool_size": self._size,
        }
        lines = ["[databases]", f"postgres = host=127.0.0.1 port={self._server.port}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        self.write("pgbouncer.ini", "\n".join(lines) + "\n")

    def argv(self) -> Sequence[str]:
        return ["/usr/sbin/pgbouncer", str(self.folder / "pgbouncer.ini")]

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

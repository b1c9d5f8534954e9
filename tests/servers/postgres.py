"""PostgreSQL: a cluster of its own, copied from one that initdb has made."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

from tests.servers.certificates import Authority
from tests.servers.process import Server, run_folder


class Postgres(Server):
    """A PostgreSQL with the superuser ``postgres`` and the database of the same name.

    Args:
        password: Of the superuser; then every connection must give one. Without, none is required.
        authority: Issues its certificate; it then accepts TLS connections only.
        durable: Whether each commit waits for the disk. Otherwise it survives ``kill -9``, but not a power failure, and
            is faster.
        options: More settings, as ``("max_connections", "20")``.
        turnable: Whether its clock can be put forward.
    """

    install = "postgresql (apt-get install postgresql)"
    user = "postgres"
    scheme = "postgresql"
    stop_signal = signal.SIGINT  # "fast": doesn't wait until the clients have gone

    def __init__(
        self,
        *,
        password: str = "",
        authority: Authority | None = None,
        durable: bool = False,
        options: Sequence[tuple[str, str]] = (),
        turnable: bool = False,
    ) -> None:
        super().__init__(turnable=turnable)
        self.password = password
        self.authority = authority
        self._durable = durable
        self._options = options

    @classmethod
    def missing(cls) -> str:
        return "" if programs() else "PostgreSQL's initdb is not installed"

    def prepare(self) -> None:
        self.run("cp", "-r", str(_made(self)), str(self.folder / "data"))
        settings = [("listen_addresses", "127.0.0.1"), ("port", str(self.port))]
        settings.append(("unix_socket_directories", str(self.folder)))
        settings.append(("dynamic_shared_memory_type", "mmap"))  # in its folder, so that nothing outlives a kill
        if not self._durable:
            settings += [("fsync", "off"), ("full_page_writes", "off")]
        if self.authority:
            certificate, key = self.authority.issue(self.folder)
            self.give(certificate)
            self.give(key)
            settings += [("ssl", "on"), ("ssl_cert_file", str(certificate)), ("ssl_key_file", str(key))]
            method = "scram-sha-256" if self.password else "trust"
            rules = f"local all all {method}\nhostssl all all 127.0.0.1/32 {method}\n"
            (self.folder / "data" / "pg_hba.conf").write_text(rules)
        settings += self._options
        with open(self.folder / "data" / "postgresql.conf", "a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings)

    def argv(self) -> Sequence[str]:
        return [f"{programs()}/postgres", "-D", str(self.folder / "data")]

    def ready(self) -> bool:
        argv = [f"{programs()}/pg_isready", "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        return subprocess.run(argv, check=False).returncode == 0

    def close(self) -> None:
        self.kill()
        # The shared memory that kill -9 leaves outside the folder.
        with suppress(OSError, IndexError):
            segment = (self.folder / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
            self.run("ipcrm", "-m", segment)
        super().close()

    @property
    def url(self) -> str:
        login = f"postgres:{quote(self.password, safe='')}" if self.password else "postgres"
        return f"postgresql://{login}@127.0.0.1:{self.port}/postgres"


def _made(server: Postgres) -> Path:
    """Return a data folder with the password of *server*, made by initdb once in this process: a copy is much faster.

    The folder is beside those of the servers, and removed with them.
    """
    folder = _folders.get(server.password)
    if folder is None:
        _folders[server.password] = folder = Path(tempfile.mkdtemp(prefix="initdb-", dir=run_folder()))
        server.give(folder, 0o700)
        login = ["--auth=trust"]
        if server.password:
            login = ["--auth=scram-sha-256", f"--pwfile={server.write('password', server.password)}"]
        make = [f"{programs()}/initdb", "-D", str(folder), "-U", "postgres", "-E", "UTF8", "--no-locale"]
        server.run(*make, "--no-sync", "--wal-segsize=4", *login)
    return folder


_folders: dict[str, Path] = {}


@cache
def programs() -> Path | None:
    """Return the folder of the newest PostgreSQL's programs: Debian keeps them off the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parent.parent.name))
    if versions:
        return versions[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None

"""RabbitMQ: one node, with an epmd and a cookie of its own, so that it meets no other node of this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from tests.servers.certificates import Authority
from tests.servers.process import Server, _family, free_port, release

PROGRAM = "TENURE_TEST_RABBITMQ"
"""In the environment: the folder of the programs to start instead of the installed ones, to try another version."""

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
"""Debian's own; those on the path run as another user, in the folders of the service."""

VHOST = "%2F"


class RabbitMQ(Server):
    """A RabbitMQ.

    Args:
        authority: Issues its certificate; it then accepts TLS only.
        options: More lines of its configuration, as ``("consumer_timeout", "60000")``.
        plugins: Which are enabled, as ``("rabbitmq_management",)``.
    """

    install = "rabbitmq-server (apt-get install rabbitmq-server)"
    scheme = "amqp"

    def __init__(
        self,
        *,
        authority: Authority | None = None,
        options: Sequence[tuple[str, str]] = (),
        plugins: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.authority = authority
        self.options = tuple(options)
        self.plugins = tuple(plugins)
        self.epmd_port = free_port()
        self.distribution_port = free_port()
        self.management_port = free_port()
        if authority:
            self._own = authority.issue(self.folder)

    @classmethod
    def missing(cls) -> str:
        if not shutil.which("epmd"):
            return "RabbitMQ needs Erlang, which is not installed"
        return "" if (programs() / "rabbitmq-server").is_file() else "RabbitMQ is not installed"

    def prepare(self) -> None:
        self.write(".erlang.cookie", secrets.token_hex(16), 0o400)
        self.write("enabled_plugins", f"[{','.join(self.plugins)}].")
        listener = "listeners.ssl" if self.authority else "listeners.tcp"
        lines = [
            (f"{listener}.1", f"127.0.0.1:{self.port}"),
            ("log.console", "true"),
            ("log.console.level", "warning"),
            ("log.file", "false"),
            ("vm_memory_high_watermark.absolute", "512MB"),
            ("disk_free_limit.absolute", "10MB"),
            ("management.tcp.port", str(self.management_port)),
            ("management.tcp.ip", "127.0.0.1"),
        ]
        if self.authority:
            certificate, key = self._own
            lines += [
                ("listeners.tcp", "none"),
                ("ssl_options.cacertfile", str(self.authority.certificate)),
                ("ssl_options.certfile", str(certificate)),
                ("ssl_options.keyfile", str(key)),
            ]
        if "rabbitmq_management" not in self.plugins:
            lines = [line for line in lines if not line[0].startswith("management.")]
        given = {name for name, _ in self.options}
        lines = [line for line in lines if line[0] not in given]
        self.write("rabbitmq.conf", "".join(f"{name} = {value}\n" for name, value in (*lines, *self.options)))
        folder = self.folder
        self.env = {
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"tenure-{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            # Schedulers that don't spin while they are idle: tests run on few cores.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
            "LANG": "C.UTF-8",
        }

    def argv(self) -> Sequence[str]:
        # Its epmd is a child of the server, and no daemon, so that it ends with it.
        epmd = f"epmd -address 127.0.0.1 -port {self.epmd_port}"
        return ["sh", "-c", f"{epmd} & exec {programs() / 'rabbitmq-server'}"]

    def ready(self) -> bool:
        return bool(self.answers(b"AMQP\x00\x00\x09\x01")) if not self.authority else self.answers(b"") is not None

    def stop(self) -> None:
        family = _family(self.pid) if self.runs else []
        super().stop()
        for pid in family:  # its epmd, and the helpers of Erlang
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        for port in (self.epmd_port, self.distribution_port, self.management_port):
            release(port)

    # --- for tests ---

    @property
    def address(self) -> str:
        """Its address for other clients."""
        scheme = "amqps" if self.authority else "amqp"
        return f"{scheme}://guest:guest@127.0.0.1:{self.port}/{VHOST}"

    @property
    def url(self) -> str:
        options = f"?ca={quote(str(self.authority.certificate))}" if self.authority else ""
        return self.address + options

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl``, and return its output.

        It takes some seconds: beside a connection, run it in a thread, or its heartbeats are late.
        """
        done = subprocess.run(
            [str(programs() / "rabbitmqctl"), "--quiet", "-n", self.env["RABBITMQ_NODENAME"], *arguments],
            cwd=self.folder,
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} failed:\n{done.stdout[-2_000:]}")
        return done.stdout


def programs() -> Path:
    """Return the folder of RabbitMQ's programs."""
    return Path(os.environ.get(PROGRAM, PROGRAMS))

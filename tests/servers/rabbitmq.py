"""RabbitMQ: one node, with an epmd and a cookie of its own, so that it meets no other node of this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

from tests.durations import PATIENCE
from tests.servers.certificates import Authority
from tests.servers.process import _family, free_port, release
from tests.servers.turned_process import TurnedServer

PROGRAM = "TENURE_TEST_RABBITMQ"
"""In the environment: the folder of the programs to start instead of the installed ones, to try another version."""

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
"""Debian's own; those on the path run as another user, in the folders of the service."""

VHOST = "%2F"
PORTION = 1.6
"""Seconds by which its clocks are turned at once: a multiple of ``tenure._backends.rabbitmq.delays.STEP``."""

ROOT, ALL, US = '<<"/">>', '<<".*">>', '<<"test">>'
"""The virtual host, the names of everything, and who asks for it, as Erlang writes them."""


class RabbitMQ(TurnedServer):
    """A RabbitMQ.

    Args:
        authority: Issues its certificate; it then accepts TLS only.
        options: More lines of its configuration, as ``("consumer_timeout", "60000")``.
        plugins: Which are enabled, as ``("rabbitmq_management",)``.
        first: Another node, whose cluster it joins.
    """

    install = "rabbitmq-server (apt-get install rabbitmq-server)"
    scheme = "amqp"

    def __init__(
        self,
        *,
        authority: Authority | None = None,
        options: Sequence[tuple[str, str]] = (),
        plugins: Sequence[str] = (),
        first: RabbitMQ | None = None,
    ) -> None:
        super().__init__()
        self.first = first
        self.authority = authority
        self.options = tuple(options)
        self.plugins = tuple(plugins)
        self.epmd_port: int = free_port() if first is None else first.epmd_port
        self.distribution_port = free_port()
        self.management_port = free_port()
        self._cookie: str = secrets.token_hex(16) if first is None else first._cookie
        if authority:
            self._own = authority.issue(self.folder)

    @classmethod
    def missing(cls) -> str:
        if not (shutil.which("epmd") and shutil.which("erl")):
            return "RabbitMQ needs Erlang, which is not installed"
        return "" if (programs() / "rabbitmq-server").is_file() else "RabbitMQ is not installed"

    def prepare(self) -> None:
        self.write(".erlang.cookie", self._cookie, 0o400)
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
        if self.first is not None:
            lines += [
                ("cluster_formation.peer_discovery_backend", "classic_config"),
                ("cluster_formation.classic_config.nodes.1", f"tenure-{self.first.port}@localhost"),
                ("cluster_formation.classic_config.nodes.2", f"tenure-{self.port}@localhost"),
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
        program = str(programs() / "rabbitmq-server")
        if self.first is not None:
            return [program]  # the nodes of a cluster have one epmd
        return ["sh", "-c", f"epmd -address 127.0.0.1 -port {self.epmd_port} & exec {program}"]

    def ready(self) -> bool:
        return bool(self.answers(b"AMQP\x00\x00\x09\x01")) if not self.authority else self.answers(b"") is not None

    @property
    def clock_pid(self) -> int:
        """Erlang's process: the server begins with a script of the shell."""
        return next(pid for pid in _family(self.pid) if Path(f"/proc/{pid}/comm").read_text().startswith("beam"))

    def turn(self, seconds: float) -> None:
        """Put its clocks forward, in portions: of a long delay, each stage begins when the one before has ended."""
        while seconds > 0:
            super().turn(min(seconds, PORTION))
            seconds -= PORTION
            # Erlang may sleep until the next of its timers: wake it, so that it looks at its clocks.
            self.evaluate("ok")

    def stop(self) -> None:
        family = _family(self.pid) if self.runs else []
        super().stop()
        for pid in family:  # its epmd, and the helpers of Erlang
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        super().close()
        for port in (self.distribution_port, self.management_port):
            release(port)
        if self.first is None:
            release(self.epmd_port)

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

    def evaluate(self, expression: str) -> str:
        """Let the server evaluate an *expression* of Erlang, and return the result.

        ``rabbitmqctl`` is a program of Erlang, too: on a busy machine, it takes most of a minute.
        """
        try:
            done = subprocess.run(
                ["erl_call", "-c", self._cookie, "-n", self.env["RABBITMQ_NODENAME"], "-e"],
                cwd=self.folder,
                env={**os.environ, **self.env, "PATH": f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{erlang()}"},
                input=f"{expression}.\n",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"RabbitMQ hangs at {expression}") from error
        found = done.stdout.strip()
        if done.returncode or not found.startswith("{ok, ") or found.startswith("{ok, {badrpc"):
            raise RuntimeError(f"RabbitMQ could not evaluate {expression}:\n{found[-2_000:]}")
        return found.removeprefix("{ok, ").removesuffix("}")

    def order(self, expression: str) -> None:
        """Let the server carry out an *expression* of Erlang whose result is ``ok``."""
        if (answer := self.evaluate(expression)) != "ok":
            raise RuntimeError(f"RabbitMQ did not carry out {expression}: {answer}")

    def permit(self, user: str) -> None:
        """Give a *user* every right, as it is at first."""
        self.order(f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, {ROOT}, {ALL}, {ALL}, {ALL}, {US})')

    def forbid(self, user: str) -> None:
        """Take away every right of a *user*; connections remember theirs."""
        self.order(f'rabbit_auth_backend_internal:clear_permissions(<<"{user}">>, {ROOT}, {US})')

    def close_connections(self, reason: str) -> None:
        """Close all connections of clients."""
        self.order(f'rabbit_networking:close_connections(rabbit_networking:connections(), "{reason}")')

    def set_policy(self, name: str, pattern: str, definition: str) -> None:
        """Let a policy hold for the queues whose names match *pattern*; the *definition* is in JSON."""
        given = ", ".join(f"<<{json.dumps(text)}>>" for text in (name, pattern, definition, "0", "queues"))
        self.order(f"rabbit_policy:parse_set({ROOT}, {given}, {US})")

    def clear_policy(self, name: str) -> None:
        self.order(f'rabbit_policy:delete({ROOT}, <<"{name}">>, {US})')


def programs() -> Path:
    """Return the folder of RabbitMQ's programs."""
    return Path(os.environ.get(PROGRAM, PROGRAMS))


@cache
def erlang() -> Path:
    """Return the folder of Erlang's own programs, beside the one that ``erl`` starts."""
    told = ["erl", "-noshell", "-eval", 'io:format("~s", [code:root_dir()]), halt().']
    root = Path(subprocess.run(told, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return next(path.parent for path in sorted(root.glob("erts-*/bin/erl_call")))

"""A look-alike of Service Bus as a server for tests: see ``servicebus_service``. Its clock can be put forward."""

from __future__ import annotations

import http.client
import sys
import urllib.parse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from tests.servers.process import Server, free_port, release

KEY = "SAS_KEY_VALUE"
NAMESPACE = "TENURE_TEST_SERVICEBUS"
"""The environment variable with the connection string of a real namespace, or of the official emulator."""


class ServiceBus(Server):
    """The look-alike: a process, with what it stores in its folder. It survives ``kill -9`` and a restart."""

    install: ClassVar[str] = "python-qpid-proton (an extra of the development tools)"
    scheme: ClassVar[str] = "servicebus"

    def __init__(self) -> None:
        super().__init__()
        self.admin_port = free_port()

    @classmethod
    def missing(cls) -> str:
        return "" if find_spec("proton") else "the look-alike of Service Bus needs python-qpid-proton"

    def argv(self) -> Sequence[str]:
        root = str(Path(__file__).parents[2])
        run = f"import runpy, sys; sys.path.insert(0, {root!r}); runpy.run_module({SERVICE!r}, run_name='__main__')"
        return [sys.executable, "-c", run, str(self.port), str(self.admin_port), str(self.folder)]

    def ready(self) -> bool:
        return self.answers(b"") is not None and self._listens(self.admin_port)

    def close(self) -> None:
        super().close()
        release(self.admin_port)

    def turn(self, seconds: float) -> None:
        """Put its clock forward."""
        self._turned += seconds
        self.write("clock.new", f"{self._turned:.3f}").rename(self.folder / "clock")
        self.control("links")  # it has looked at the clock when it answers

    def reset(self) -> None:
        """Let it be as a new namespace: without queues, connections and faults, and at the true time."""
        self.turn(-self._turned)
        self.control("reset")

    def control(self, what: str, value: object = "") -> str:
        """Make a fault; see ``Service.control``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=30)
        try:
            connection.request("POST", f"/$control/{what}?value={urllib.parse.quote(str(value))}")
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            return text
        finally:
            connection.close()

    @property
    def connection_string(self) -> str:
        """The connection string for its AMQP port, with all rights."""
        return connection_string(self.port)

    @property
    def url(self) -> str:
        return f"servicebus://127.0.0.1:{self.port}?emulator=yes&admin_port={self.admin_port}&create=yes"

    def _listens(self, port: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("POST", "/$control/links")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


SERVICE = "tests.servers.servicebus_service"


def connection_string(port: int, policy: str = "RootManageSharedAccessKey", key: str = KEY) -> str:
    """Return the connection string of a look-alike, as the emulator has it."""
    return (
        f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName={policy};SharedAccessKey={key};"
        "UseDevelopmentEmulator=true;"
    )

"""Azurite, Azure Storage's emulator: its blob and its queue service, optionally under a clock that runs faster.

Its data is in memory, and saved only every few seconds: so killing it tests nothing of tenure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from scripts.servers import AZURITE, faketime, node
from tests.servers.process import Server

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of every Azurite: well known, not secret."""

Part = Literal["blob", "queue"]

_READS_KEYS = """
const fs = require("fs");
const path = require("path");
const accounts = require(path.join(path.dirname(process.argv[1]), "..", "common", "AccountDataStore.js")).default;
const known = accounts.prototype.getAccount;
accounts.prototype.getAccount = function (name) {
  process.env.AZURITE_ACCOUNTS = fs.readFileSync("accounts", "utf8");
  this.refresh();
  return known.call(this, name);
};
"""
"""Azurite reads the keys of its accounts from its environment, which nobody can change later: here, from a file."""


class AzuritePart(Server):
    """One of its services: a process of its own, which needs less memory than all of them in one."""

    install = "Azurite (python scripts/servers.py; needs npm)"
    scheme = "azure"

    def __init__(self, part: Part, speed: float, turnable: bool) -> None:
        super().__init__(turnable=turnable)
        self._part = part
        self._speed = speed

    @classmethod
    def missing(cls) -> str:
        if node() is None:
            return "Azurite needs node, which is not installed"
        return "" if (AZURITE / "node_modules" / "azurite").is_dir() else "Azurite is not installed"

    def prepare(self) -> None:
        if self._speed != 1:
            library = faketime()
            if library is None:
                raise RuntimeError("a faster clock needs libfaketime; install it: apt-get install faketime")
            # Timers run on the monotonic clock, and a server whose timers are faked hangs.
            self.clock = {"LD_PRELOAD": str(library), "FAKETIME": f"+0 x{self._speed:g}", "DONT_FAKE_MONOTONIC": "1"}

    def argv(self) -> Sequence[str]:
        program = AZURITE / "node_modules" / "azurite" / "dist" / "src" / self._part / "main.js"
        address = [f"--{self._part}Host", "127.0.0.1", f"--{self._part}Port", str(self.port)]
        quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        keyed = ["--require", "./keys.js"] if (self.folder / "accounts").exists() else []
        return [str(node()), *keyed, str(program), "--location", str(self.folder), *address, *quiet]

    def accept(self, key: str) -> None:
        """Let the account have another key. Before it is started, or when it was started with one."""
        self.write("keys.js", _READS_KEYS)
        self.write("accounts.new", f"{ACCOUNT}:{key}").rename(self.folder / "accounts")

    def ready(self) -> bool:
        answer = self.answers(f"GET /{ACCOUNT}?comp=list HTTP/1.0\r\n\r\n".encode())
        return answer is not None and answer.startswith(b"HTTP/1.1")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"


class Azurite:
    """Both services under one name.

    Args:
        speed: How many times faster than real time its clock runs: at 20, a lease of 15 s ends after 0.75 s.
        turnable: Whether its clock can be put forward instead.
        key: The key of its account, if not the well-known one.
    """

    install: ClassVar[str] = AzuritePart.install
    scheme: ClassVar[str] = AzuritePart.scheme

    def __init__(self, *, speed: float = 1.0, turnable: bool = False, key: str = KEY) -> None:
        self.speed = speed
        self.blob = AzuritePart("blob", speed, turnable)
        self.queue = AzuritePart("queue", speed, turnable)
        if key != KEY:
            for part in (self.blob, self.queue):
                part.accept(key)

    @classmethod
    def missing(cls) -> str:
        return AzuritePart.missing()

    def start(self) -> Self:
        for part in (self.blob, self.queue):
            part.launch()
        for part in (self.blob, self.queue):
            part.until_ready()
        return self

    def stop(self) -> None:
        self.blob.stop()
        self.queue.stop()

    def kill(self) -> None:
        self.blob.kill()
        self.queue.kill()

    def pause(self) -> None:
        self.blob.pause()
        self.queue.pause()

    def resume(self) -> None:
        self.blob.resume()
        self.queue.resume()

    def accept(self, key: str) -> None:
        """Let the account have another key, and no longer that of before. Only if it was made with one of its own."""
        for part in (self.blob, self.queue):
            part.accept(key)

    def turn(self, seconds: float) -> None:
        """Put both clocks forward. Only if it is turnable."""
        self.blob.turn(seconds)
        self.queue.turn(seconds)

    def close(self) -> None:
        self.blob.close()
        self.queue.close()

    def __enter__(self) -> Self:
        return self if self.blob.runs else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.blob.folder

    @property
    def url(self) -> str:
        return f"azurite://127.0.0.1:{self.blob.port}?queue_port={self.queue.port}"

    @property
    def connection_string(self) -> str:
        """The connection string for Microsoft's own clients."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.blob.url};QueueEndpoint={self.queue.url};"
        )

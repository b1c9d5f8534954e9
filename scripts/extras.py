"""
What each extra of pyproject.toml brings: all packages that pip installs for it, on any Python and system supported.

This follows from pyproject.toml and the metadata of the installed packages; one that is not installed brings nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

FOR_DEVELOPERS = {"test", "interop", "lookalike", "dev", "bench"}
FOR_USERS = sorted(EXTRAS.keys() - FOR_DEVELOPERS - {"all"})
"""The extras for users, one by one; `all` has all of them."""

PYTHON = "Programming Language :: Python :: 3."
SYSTEMS = [("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64")]


def supported(classifiers: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the environments in which markers are judged: the first and the last release of each Python."""
    for python in (f"3.{one.removeprefix(PYTHON)}" for one in classifiers if one.startswith(PYTHON)):
        for release in (f"{python}.0", f"{python}.99"):
            for sys_platform, platform_system, machine in SYSTEMS:
                yield {
                    "implementation_name": "cpython",
                    "implementation_version": release,
                    "os_name": "posix",
                    "platform_machine": machine,
                    "platform_python_implementation": "CPython",
                    "platform_release": "",
                    "platform_system": platform_system,
                    "platform_version": "",
                    "python_full_version": release,
                    "python_version": python,
                    "sys_platform": sys_platform,
                }


ENVIRONMENTS = list(supported(PROJECT["classifiers"]))


def brought(extras: Iterable[str]) -> dict[str, set[str]]:
    """Return the packages that these *extras* bring, each with those of them that bring it."""
    found: dict[str, set[str]] = defaultdict(set)
    for extra in extras:
        for name in closure(list(required(extra)), ENVIRONMENTS):
            found[name].add(extra)
    return dict(found)


def required(extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and in place of extras that it names itself, theirs."""
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for one in requirement.extras:
                yield from required(one)
        else:
            yield text


def closure(wanted: Sequence[str], environments: Sequence[dict[str, str]]) -> dict[str, set[str]]:
    """Return all packages that *wanted* bring in one of these environments, these themselves included.

    Each has the packages that it needs itself, for the extras of it that are asked for.
    """
    found: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [("", text, "") for text in wanted]  # who needs it, what, and for which extra
    while waiting:
        needer, text, extra = waiting.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({**each, "extra": extra}) for each in environments):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, set())
        if needer:
            found[needer].add(name)
        for asked in {"", *requirement.extras} - {one for known, one in seen if known == name}:
            seen.add((name, asked))
            waiting += [(name, needed, asked) for needed in needs(name)]
    return found


def needs(name: str) -> list[str]:
    """Return what the metadata of a package require; nothing if it is not installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def pinned(constraints: str) -> dict[str, str]:
    """Return the version of each package, by its canonical name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", constraints, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}

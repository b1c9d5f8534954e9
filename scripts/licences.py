"""
Write docs/licences.md: the packages that each extra brings, and their licences. ``--check`` only compares.

What an extra brings follows from pyproject.toml and the metadata of the installed packages, on every Python and system
that is supported; the versions are those of constraints/dev.txt. A licence comes from the metadata as well, or from
``DECIDED`` below. Either way of running it fails if a licence is unknown or is on neither list.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import NamedTuple

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from scripts.extras import FOR_USERS, ROOT, brought, pinned

PAGE = ROOT / "docs" / "licences.md"
CONSTRAINTS = ROOT / "constraints" / "dev.txt"


PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT-0",
    "PSF-2.0",
    "Unlicense",
    "Zlib",
}
"""They ask for a notice at most."""

OF_THE_PACKAGE_ALONE = {
    "LGPL-2.1-only",
    "LGPL-2.1-or-later",
    "LGPL-3.0-only",
    "LGPL-3.0-or-later",
    "MPL-2.0",
}
"""They ask that changes to the package itself be published, and nothing of a program that imports it unchanged."""

OF_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",  # there is no classifier of another version
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""The classifiers that name one licence; "BSD License" names several."""


class Decided(NamedTuple):
    licence: str
    why: str


DECIDED = {
    "async-timeout": Decided("Apache-2.0", "is not installed from Python 3.11.3 on; its wheel has this text"),
    "cronsim": Decided("BSD-3-Clause", "its metadata say BSD; its licence file has this text"),
    "isodate": Decided("BSD-3-Clause", "its metadata say BSD; its licence file has this text"),
    "jinja2": Decided("BSD-3-Clause", "its metadata say BSD; its licence file has this text"),
    "uvloop": Decided("Apache-2.0 OR MIT", "its metadata name two; its README says that one may choose"),
}
"""Licences that the metadata leave open, or that can't be read where the checks run; each by a look at the package."""

HEAD = """\
# Licences of dependencies

Written by `python -m scripts.licences` from the metadata of the packages, and checked by the tests. `tenure` itself is
under Apache-2.0 and needs no other package; an [extra](install.md#extras) brings those below, on Linux or macOS. The
versions are those that the tests run with; `pip` may choose others, within the bounds of `pyproject.toml`.

A package is accepted if its licence is permissive, or if it asks only that changes to the package itself be published
(MPL, LGPL): no package is changed or copied into ours. Of several licences by choice, one must be accepted; of several
that apply together, all. Any other licence, or none that can be read, fails the tests.
"""


@dataclass
class Package:
    """A package that some extras bring; without a version if constraints/dev.txt has none."""

    name: str
    version: str = ""
    licence: str = ""
    extras: set[str] = field(default_factory=set)


class UnknownLicenceError(Exception):
    """The metadata of a package name no licence, or name one in a way that leaves open which."""


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in ([], ["--check"]):
        print("usage: python -m scripts.licences [--check]", file=sys.stderr)
        return 2
    packages, complaints = judged(brought(FOR_USERS))
    page = page_of(packages)
    if not arguments and not complaints:
        PAGE.write_text(page, encoding="utf-8")
    elif arguments and not complaints and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page):
        complaints.append("docs/licences.md differs from the packages; run: python -m scripts.licences")
    print("".join(f"licences: {one}\n" for one in complaints), end="", file=sys.stderr)
    return 1 if complaints else 0


def page_of(packages: Sequence[Package]) -> str:
    rows = [["Package", "Version", "Licence", "Extras"], ["---"] * 4]
    rows += [
        [one.name, one.version, one.licence, ", ".join(f"`{name}`" for name in sorted(one.extras))] for one in packages
    ]
    return f"{HEAD}\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


# --- their licences ------------------------------------------------------------------------------------------------


def judged(extras_of: dict[str, set[str]]) -> tuple[list[Package], list[str]]:
    """Return the packages with versions and licences, and what is wrong with them."""
    versions = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    packages, complaints = [], []
    for name, extras in sorted(extras_of.items()):
        package = Package(name, versions.get(name, ""), "", extras)
        packages.append(package)
        try:
            found: metadata.PackageMetadata | None = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            found = None
        if not package.version:
            complaints.append(f"constraints/dev.txt has no version of {name}; add it")
        elif found is not None and found["Version"] != package.version:
            complaints.append(f"{name} {found['Version']} is installed, not {package.version} of constraints/dev.txt")
        try:
            package.licence = DECIDED[name].licence if name in DECIDED else licence_in(found)
            if not accepted(package.licence):
                complaints.append(f"{name} is under {package.licence}, which is on no list; do without it, or decide")
        except UnknownLicenceError as error:
            complaints.append(f"{name}: {error}; look into the package, and enter its licence in DECIDED")
    complaints += [
        f"DECIDED names {name}, which no extra brings; remove it" for name in DECIDED.keys() - extras_of.keys()
    ]
    return packages, complaints


def licence_in(found: metadata.PackageMetadata | None) -> str:
    """Return the licence that the metadata name, as an SPDX expression.

    Raises:
        UnknownLicenceError: They name none, or leave open which.
    """
    if found is None:
        raise UnknownLicenceError("it is not installed, so its licence can't be read")
    classifiers = [
        one.rpartition(" :: ")[2] for one in found.get_all("Classifier") or [] if one.startswith("License ::")
    ]
    stated = found["License"] or ""
    if expression := found["License-Expression"]:
        text = expression
    elif len(classifiers) == 1:
        text = OF_CLASSIFIERS.get(classifiers[0], "")
    elif not classifiers:
        text = stated
    else:
        text = ""
    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        named = ", ".join(classifiers) or stated.partition("\n")[0] or "none"
        raise UnknownLicenceError(f"its metadata leave its licence open ({named})") from None


def accepted(expression: str) -> bool:
    """Return whether an SPDX expression may be accepted: of OR, one part is; of AND, all are."""
    words = re.sub(r"([()])", r" \1 ", expression).split()

    def either() -> bool:
        result = both()
        while words and words[0] == "OR":
            words.pop(0)
            result |= both()
        return result

    def both() -> bool:
        result = one()
        while words and words[0] == "AND":
            words.pop(0)
            result &= one()
        return result

    def one() -> bool:
        word = words.pop(0)
        if word == "(":
            result = either()
            words.pop(0)
            return result
        if words and words[0] == "WITH":  # an exception only ever permits more
            del words[:2]
        return word in PERMISSIVE | OF_THE_PACKAGE_ALONE

    return either()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

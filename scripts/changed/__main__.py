"""
Run the tests that the difference to a base commit can reach::

    python -m scripts.changed                       # against the branch that this one is to be merged into
    python -m scripts.changed --base HEAD~3
    python -m scripts.changed --list                # print the files and run nothing
    python -m scripts.changed --why tests/unit/test_lease.py
    python -m scripts.changed -- -x --target test   # pytest's own arguments

Changes that are not committed and files that git doesn't know yet count, too. A change that no rule places, such as one
of pyproject.toml or of tests/conftest.py, chooses all tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.changed.reach import Reach, read
from scripts.stages import PYTEST, ROOT

EVERYTHING = (
    "pyproject.toml",
    "Makefile",
    "constraints/",
    ".ci/",
    "scripts/stages.py",
    "src/tenure/__init__.py",
    "src/tenure/_version.py",
    "src/tenure/testing/pytest_plugin.py",
    "tests/conftest.py",
    "tests/targets.py",
)
"""What concerns all tests."""
NOTHING = (".github/", ".gitignore", "LICENSE")
"""What no test reads."""


def main(arguments: Sequence[str]) -> int:
    ours = list(arguments)
    pytest_arguments: list[str] = []
    if "--" in ours:
        cut = ours.index("--")
        ours, pytest_arguments = ours[:cut], ours[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m scripts.changed", description="run the tests that a change reaches"
    )
    parser.add_argument("--base", help="the commit to compare with; by default, where this branch began")
    parser.add_argument("--list", action="store_true", help="print the files of the tests, and run nothing")
    parser.add_argument("--why", metavar="FILE", help="print the way from a test file to the change, and run nothing")
    chosen_by = parser.parse_args(ours)
    try:
        base = chosen_by.base or usual_base(ROOT)
        changed = changed_files(ROOT, base)
    except subprocess.CalledProcessError as error:
        print(f"git can't compare with {chosen_by.base or 'the usual base'}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    reach = Reach(read(ROOT, project_files(ROOT)))
    unplaced = [file for file in changed if concerns_all(file, reach)]
    ways = {file: [file] for file in reach.tests} if unplaced else reach.chosen(changed)
    if chosen_by.why:
        if chosen_by.why not in reach.tests:
            print(f"{chosen_by.why} is no test file; name one as tests/unit/test_lease.py", file=sys.stderr)
            return 2
        if chosen_by.why not in ways:
            print(f"{chosen_by.why} reaches none of the changed files")
            return 0
        print("\n  → ".join(unplaced[:1] or ways[chosen_by.why]))
        return 0
    if chosen_by.list:
        print("\n".join(ways))
        return 0
    print(f"{len(changed)} files differ from {base[:12]}; {len(ways)} of {len(reach.tests)} test files can reach them")
    if unplaced:
        print(f"all of them, because of {', '.join(unplaced)}")
    if not ways:
        return 0
    return subprocess.run([*PYTEST, *pytest_arguments, *ways], cwd=ROOT, check=False).returncode


def concerns_all(file: str, reach: Reach) -> bool:
    """Return whether a change of *file* may concern any test."""
    if file.startswith(NOTHING):
        return False
    return file.startswith(EVERYTHING) or not reach.places(file)


def usual_base(root: Path) -> str:
    """Return where this branch left its upstream, or the main branch; on that one itself, the last commit."""
    for branch in ("@{upstream}", "main", "origin/main"):
        try:
            base = git(root, "merge-base", "HEAD", branch)
        except subprocess.CalledProcessError:
            continue
        if base != git(root, "rev-parse", "HEAD"):
            return base
    return git(root, "rev-parse", "HEAD")


def changed_files(root: Path, base: str) -> list[str]:
    """Return the files that differ from *base*: both names of a renamed one, and those that are new or deleted."""
    differ = git(root, "diff", "--name-only", "--no-renames", "-z", base, "--")
    return sorted({*names(differ), *names(git(root, "ls-files", "-z", "--others", "--exclude-standard"))})


def project_files(root: Path) -> list[str]:
    return names(git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"))


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def names(listed: str) -> list[str]:
    return [name for name in listed.split("\0") if name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

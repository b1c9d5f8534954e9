"""
Install tenure, editable, into the environment that runs this: ``python scripts/install.py cli dashboard`` with extras.

Every package that pip downloads for it has its version and its hashes in constraints/hashes.txt, and pip refuses any
other file. What has no wheel is built with tools that were installed in the same way. Needs the standard library alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / "constraints" / "hashes.txt"
LOWEST_HASHES = ROOT / "constraints" / "lowest-hashes.txt"

ENTRY = re.compile(r"^# (.*)\n([\w.-]+)==.*\n(?: .*\n)*", re.MULTILINE)
"""A package in such a file: the extras that bring it, its name, and its hashes."""

BUILD = "build"
"""The tools that build tenure; with a colon and an extra, those that build the packages of it that have no wheel."""


def main(extras: list[str]) -> int:
    wanted = f".[{','.join(extras)}]" if extras else "."
    done, output = install(sys.executable, extras, HASHES.read_text(encoding="utf-8"), "--editable", wanted)
    if not done:
        print(output, file=sys.stderr)
    return 0 if done else 1


def install(python: str, extras: Collection[str], hashes: str, *wanted: str) -> tuple[bool, str]:
    """Install what *extras* bring, then *wanted* without any download; return whether it succeeded, and the output.

    The last step fails if *wanted* needs a package that *hashes* doesn't name for these extras.

    Raises:
        ValueError: No package in *hashes* is for one of the extras.
    """
    verified = ["--require-hashes", "--no-build-isolation", "--use-pep517"]
    tools = [f"{BUILD}:{extra}" for extra in extras] + ([BUILD] if "--editable" in wanted else [])
    with tempfile.TemporaryDirectory(prefix="tenure-install-") as folder:
        for groups, options in ((tools, ["--only-binary", ":all:"]), (list(extras), [])):
            file = Path(folder, "requirements.txt")
            file.write_text(requirements(groups, hashes), encoding="utf-8")
            if file.stat().st_size:
                done, output = pip(python, *verified, *options, "-r", str(file))
                if not done:
                    return False, output
    return pip(python, "--no-index", "--no-build-isolation", *wanted)


def requirements(groups: Iterable[str], hashes: str) -> str:
    """Return the part of constraints/hashes.txt that is for these extras, or for builds.

    Raises:
        ValueError: No package is for one of them.
    """
    wanted = set(groups)
    entries = [(set(entry[1].split()), entry[0]) for entry in ENTRY.finditer(hashes)]
    known = set().union(*(names for names, _ in entries))
    if unknown := sorted(one for one in wanted - known if not one.startswith(BUILD)):
        raise ValueError(f"constraints/hashes.txt has no package for {', '.join(unknown)}; see scripts/constraints.py")
    return "".join(text for names, text in entries if names & wanted)


def merged(hashes: str, others: str) -> str:
    """Return *hashes*, with the packages of *others* in place of those of the same name."""
    entries = {entry[2]: entry[0] for text in (hashes, others) for entry in ENTRY.finditer(text)}
    return "".join(entries.values())


def pip(python: str, *arguments: str) -> tuple[bool, str]:
    return run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *arguments], {})


def run(command: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    """Run *command*, with *environment* added to ours; return whether it succeeded, and what it printed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

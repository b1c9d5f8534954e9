"""
Run the tests of ``make quick`` on other Pythons, two at a time: ``python scripts/pythons.py 3.12 3.13 -- -x``.

Without arguments, it uses every version that pyproject.toml supports. Each is looked for as ``python3.N`` on the path,
then in the folders of pyenv and uv; an argument may also be the path of an interpreter. Each gets an environment,
``.venv-3.N``, in which only what the tests need is installed. What follows ``--`` goes to pytest.

With ``--next``, the newest release of each of NEXT is installed beside the other pins, pre-releases included, whatever
pyproject.toml allows; the tests of what stands on it run. This tells what a release to come will break.

With ``--lowest``, every dependency has the lowest version that pyproject.toml allows (constraints/lowest.txt), on the
lowest Python alone. This tests the drivers, so the tests of all stores run.
"""

import hashlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.install import HASHES, LOWEST_HASHES, install, merged, pip, run  # noqa: E402

VERSION = "Programming Language :: Python :: 3."

SIDE_BY_SIDE = 2
QUICK = ["-n", "2", "--dist", "loadfile", "--target", "quick"]
STORES = ["-n", "3", "--dist", "loadfile", "tests/unit", "tests/application", "tests/stores", "tests/conformance"]

NEXT = {"azure-servicebus": ["tests/stores/servicebus", "tests/conformance/test_cut_off.py", "-k", "servicebus"]}
"""Packages of which more is used than is public, and the tests of what stands on them."""

ASK = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.executable)"


@dataclass(frozen=True)
class Plan:
    """The tests to run on a version, and the versions of its dependencies, with their hashes."""

    tests: Sequence[str]
    hashes: str
    extras: Sequence[str] = ("all", "test")
    suffix: str = ""
    newest: Sequence[str] = ()
    """Packages whose newest release is to be installed, whatever the pins say. No hash of it is known."""


def main(arguments: list[str]) -> int:
    ours, more = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        ours, more = arguments[:cut], arguments[cut + 1 :]
    hashes = HASHES.read_text(encoding="utf-8")
    named = [argument for argument in ours if argument not in ("--lowest", "--next")]
    if "--next" in ours:
        tests = [one for each in NEXT.values() for one in each]
        versions, plan = (
            named or supported()[:1],
            Plan(
                ["-n", "2", "--dist", "loadfile", *tests, *more],
                hashes,
                ("all", "lookalike", "test"),
                "-next",
                list(NEXT),
            ),
        )
    elif "--lowest" in ours:
        versions, plan = (
            named or supported()[:1],
            Plan(
                [*STORES, *more],
                merged(hashes, LOWEST_HASHES.read_text(encoding="utf-8")),
                ("all", "lookalike", "test"),
                "-lowest",
            ),
        )
    else:
        versions, plan = named or supported(), Plan([*QUICK, *more], hashes)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        results = list(pool.map(partial(tried, plan=plan), versions))
    print(f"\n{'python':<10}{'seconds':>8}  result")
    for version, (result, seconds) in zip(versions, results, strict=True):
        print(f"{version:<10}{seconds:>8.1f}  {result}")
    outcomes = [result for result, _ in results]
    if "ok" not in outcomes and "FAILED" not in outcomes:
        print("none of these Pythons is installed, so no test was run", file=sys.stderr)
        return 1
    return 1 if "FAILED" in outcomes or (named and set(outcomes) != {"ok"}) else 0


def supported() -> list[str]:
    """Return the versions that pyproject.toml names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return ["3." + one.removeprefix(VERSION) for one in classifiers if one.startswith(VERSION)]


def tried(version: str, plan: Plan) -> tuple[str, float]:
    """Run the tests on one version, and print what they print at their end; return the result and the time."""
    python, why = asked(Path(version)) if os.sep in version else interpreter(version.removeprefix("python"))
    if not python:
        return f"absent: {why}", 0.0
    print(f"--- Python {version}: {python}", flush=True)
    begun = time.monotonic()
    passed, output = passes(python, plan)
    print(f"\n--- Python {version}\n{output}", flush=True)
    return "ok" if passed else "FAILED", time.monotonic() - begun


def interpreter(version: str, folders: Sequence[str | Path] | None = None) -> tuple[str, str]:
    """Return the first ``python3.N`` of these *folders* that can make environments; otherwise why there is none.

    A command of that name may be a shim for a version that is not installed.
    """
    found = []
    for folder in where_pythons_are() if folders is None else folders:
        command = Path(folder) / f"python{version}"
        if not command.is_file() or not os.access(command, os.X_OK):
            continue
        executable, why = asked(command, version)
        if executable:
            return executable, ""
        found.append(why)
    return "", "; ".join(found) or f"no python{version} on the path"


def where_pythons_are() -> Iterator[str | Path]:
    yield from os.get_exec_path()
    yield from Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin")
    yield from Path.home().glob(".local/share/uv/python/*/bin")


def asked(command: Path, version: str | None = None) -> tuple[str, str]:
    """Return the interpreter that *command* is, or nothing and what is wrong with it."""
    try:
        done = subprocess.run(
            [command, "-I", "-c", ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command} can't be run: {error}"
    found, _, executable = done.stdout.strip().partition(" ")
    if done.returncode == 0 and version in (None, found):
        return executable, ""
    output = (done.stderr or done.stdout).strip().splitlines() or ["it prints nothing"]
    return "", f"{command} can't make environments: {output[0]}"


def passes(python: str, plan: Plan) -> tuple[bool, str]:
    asks = [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(asks, capture_output=True, text=True, check=True).stdout.strip()
    venv = ROOT / f".venv-{version}{plan.suffix}"
    installed, output = environment(venv, python, plan)
    if not installed:
        return False, output
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    line = [str(venv / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *plan.tests]
    return run(line, {"PATH": path})


def environment(venv: Path, python: str, plan: Plan) -> tuple[bool, str]:
    """Install what the tests need into *venv*, unless the same interpreter and files have already been installed."""
    stamp = venv / ".stamp"
    made_of = hashlib.sha256(((ROOT / "pyproject.toml").read_text() + plan.hashes).encode()).hexdigest()
    wanted = f"{python} {made_of}\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return newest(venv, plan)
    print(f"installing tenure and what its tests need into {venv.name}", flush=True)
    made, output = run([python, "-m", "venv", "--clear", str(venv)], {})
    if not made:
        return False, output
    line = ["--editable", f".[{','.join(plan.extras)}]"]
    installed, output = install(str(venv / "bin" / "python"), plan.extras, plan.hashes, *line)
    if not installed:
        return False, output
    stamp.write_text(wanted)
    return newest(venv, plan)


def newest(venv: Path, plan: Plan) -> tuple[bool, str]:
    """Install the newest release of what the plan wants it of, and say which it is."""
    if not plan.newest:
        return True, ""
    python = str(venv / "bin" / "python")
    installed, output = pip(python, "--pre", "--upgrade", *plan.newest)
    if installed:
        _, found = run([python, "-m", "pip", "--disable-pip-version-check", "freeze"], {})
        print(*(one for one in found.splitlines() if one.partition("==")[0] in plan.newest), sep="\n", flush=True)
    return installed, output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

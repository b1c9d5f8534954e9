"""
Run the checks one after the other, cheapest first, and end with a table of their times.

Every stage runs, also after a failure, so that one run shows all failures; the exit status is 1 if any failed.
Arguments name the stages to run: ``python scripts/stages.py lint types``; the Makefile has those of each target. The
tests name their slowest twenty.
"""

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTHON = sys.executable

# More workers than a machine of two cores has: the tests of processes and servers mostly wait. The number is the same
# everywhere, so that a failure is, too. A file stays on one worker: its tests run one after the other.
# The files begin in the order of tests/targets.py, and not with those of most tests.
PYTEST = [PYTHON, "-m", "pytest", "-n", "5", "--dist", "loadfile", "--no-loadscope-reorder"]

STAGES: dict[str, list[list[str]]] = {
    "format": [["ruff", "format", "--check", "."]],
    "lint": [
        ["ruff", "check", "."],
        [PYTHON, "-m", "scripts.short_durations"],
        ["zizmor", "--offline", "--strict-collection", "--no-progress", "--quiet", ".github/workflows"],
    ],
    "layers": [["lint-imports", "--no-cache"]],
    "types": [
        ["mypy"],
        ["pyright", "--pythonpath", PYTHON],
        [PYTHON, "scripts/check_public_types.py"],
    ],
    # Every warning fails: a dead link, also one inside a page; a public name that is on no page.
    "docs": [
        ["sphinx-build", "-qEW", "--keep-going", "-j", "auto", "-c", "docs", "-d", "build/doctrees", ".", "build/site"]
    ],
    "wheel": [[PYTHON, "scripts/check_wheel.py"]],
    # Which tests they run is in tests/targets.py.
    "quick": [[*PYTEST, "--target", "quick"]],
    "tests": [[*PYTEST, "--target", "test", "--durations", "20"]],
    "full": [[*PYTEST, "--target", "full", "--durations", "20"]],
}

QUIET = {"layers", "types"}  # long output on success: shown only after a failure
SIDE_BY_SIDE = {"types"}  # its commands are independent, use a core each, and time nothing


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(STAGES))
    if unknown or not names:
        print(f"name stages, not {', '.join(unknown) or 'none'}; there are {', '.join(STAGES)}", file=sys.stderr)
        return 2
    results = [(name, *timed(name)) for name in names]
    print(f"\n{'stage':<10}{'seconds':>8}  result")
    for name, passed, seconds in results:
        print(f"{name:<10}{seconds:>8.1f}  {'ok' if passed else 'FAILED'}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = sum(seconds for _, _, seconds in results)
    print(f"{'total':<10}{total:>8.1f}  with {used.ru_utime + used.ru_stime:.0f} s of CPU time")
    return 0 if all(passed for _, passed, _ in results) else 1


def timed(name: str) -> tuple[bool, float]:
    print(f"\n--- {name}", flush=True)
    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=len(STAGES[name]) if name in SIDE_BY_SIDE else 1) as pool:
        passed = all(list(pool.map(partial(run, quiet=name in QUIET), STAGES[name])))
    seconds = time.monotonic() - begun
    print(f"--- {name}: {'ok' if passed else 'FAILED'} in {seconds:.1f} s", flush=True)
    return passed, seconds


def run(command: list[str], *, quiet: bool) -> bool:
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    # Without bytecode, each of the processes would compile all tests and all of tenure again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        check=False,
    )
    if quiet and done.returncode:
        print(done.stdout, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""
Run the unit, room and command-line tests on every Python that tenure is for and that is there.

The versions are those that pyproject.toml names as supported. Each is looked for as ``python3.N`` on the path, and
gets an environment of its own, ``.venv-3.N``, in which only what the tests need is installed. Arguments go to pytest.
"""

import hashlib
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/unit", "tests/application", "tests/cli"]
CONSTRAINTS = ROOT / "constraints" / "dev.txt"

# As in stages.py: enough workers to fill the waits, and a file stays on one of them.
WORKERS = ["-n", "3", "--dist", "loadfile"]

ASK = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.executable)"


def main(arguments: list[str]) -> int:
    results = {version: tried(version, arguments) for version in supported()}
    print(f"\n{'python':<10}{'seconds':>8}  result")
    for version, (result, seconds) in results.items():
        print(f"{version:<10}{seconds:>8.1f}  {result}")
    outcomes = [result for result, _ in results.values()]
    if "ok" not in outcomes and "FAILED" not in outcomes:
        print("none of them is there, so nothing was tried", file=sys.stderr)
        return 1
    return 1 if "FAILED" in outcomes else 0


def supported() -> list[str]:
    """Return the versions that pyproject.toml names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in classifiers)
    return [one[1] for one in found if one]


def tried(version: str, arguments: list[str]) -> tuple[str, float]:
    """Run the tests on one version; tell how that ended, and how long it took."""
    python, why = interpreter(version)
    if python is None:
        return f"absent: {why}", 0.0
    print(f"\n--- Python {version}: {python}", flush=True)
    begun = time.monotonic()
    passed = passes(version, python, arguments)
    return "ok" if passed else "FAILED", time.monotonic() - begun


def interpreter(version: str, path: str | None = None) -> tuple[str | None, str]:
    """Return the first ``python3.N`` on the *path* that can make environments; or else why there is none.

    What merely has the name may be a stand-in for a version that was never installed.
    """
    found = []
    for folder in os.get_exec_path() if path is None else path.split(os.pathsep):
        command = Path(folder) / f"python{version}"
        if not command.is_file() or not os.access(command, os.X_OK):
            continue
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
            found.append(f"{command} can't be run: {error}")
            continue
        says, _, executable = done.stdout.strip().partition(" ")
        if done.returncode == 0 and says == version:
            return executable, ""
        told = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        found.append(f"{command} can't make environments: {told[0]}")
    return None, "; ".join(found) or f"no python{version} on the path"


def passes(version: str, python: str, arguments: list[str]) -> bool:
    venv = ROOT / f".venv-{version}"
    if not install(venv, python):
        return False
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    line: list[str | Path] = [venv / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    line += [*WORKERS, *TESTS, *arguments]
    environment = os.environ | {"PATH": path}
    return subprocess.run(line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False).returncode == 0


def install(venv: Path, python: str) -> bool:
    """Install what the tests need into *venv*, unless what is there was made by the same interpreter and files."""
    stamp = venv / ".stamp"
    made_of = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    wanted = f"{python} {made_of}\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return True
    print(f"installing tenure and what its tests need into {venv.name}", flush=True)
    stamp.unlink(missing_ok=True)
    constraints = str(CONSTRAINTS)
    # The variables pin what pip installs to build tenure, for old and new pips.
    environment = os.environ | {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    steps: list[list[str | Path]] = [
        [python, "-m", "venv", "--clear", venv],
        [*pip, "install", "-c", constraints, "-e", ".[all,test]"],
    ]
    for step in steps:
        if subprocess.run(step, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False).returncode:
            return False
    stamp.write_text(wanted)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""
Build the sdist and the wheel, install the wheel alone into a fresh environment, and import it there.

Three promises are checked: the wheel is complete and typed, ``import tenure`` needs no third-party package (and
imports none that is installed), and it is quick.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT_MS_MAX = 50.0
ATTEMPTS = 20

TIME_THE_IMPORT = "import time; t = time.perf_counter(); import tenure; print((time.perf_counter() - t) * 1000)"
NAME_THIRD_PARTY = """
import sys
before = set(sys.modules)
import tenure
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(added - sys.stdlib_module_names - {"tenure"}))
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tenure-wheel-") as folder:
        wheel = build(Path(folder) / "dist")
        python = install(wheel, Path(folder) / "venv")
        faults = [*missing_files(wheel), *third_party(python), *third_party(Path(sys.executable)), *slowness(python)]
        shutil.copytree(wheel.parent, ROOT / "dist", dirs_exist_ok=True)
    for fault in faults:
        print(f"wheel: {fault}", file=sys.stderr)
    return 1 if faults else 0


def build(dist: Path) -> Path:
    # Without isolation: hatchling is in the environment already, pinned.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT))
    (wheel,) = dist.glob("*.whl")
    return wheel


def install(wheel: Path, venv: Path) -> Path:
    run(sys.executable, "-m", "venv", str(venv))
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--no-deps", str(wheel))
    return python


def missing_files(wheel: Path) -> list[str]:
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*.py")} | {"tenure/py.typed"}
    missing = sorted(wanted - set(zipfile.ZipFile(wheel).namelist()))
    return [f"{name} is not in the wheel" for name in missing]


def third_party(python: Path) -> list[str]:
    names = run(str(python), "-I", "-c", NAME_THIRD_PARTY).split()
    return [f"import tenure imports the third-party package {name}" for name in names]


def slowness(python: Path) -> list[str]:
    best = min(float(run(str(python), "-I", "-c", TIME_THE_IMPORT)) for _ in range(ATTEMPTS))
    print(f"import tenure: {best:.0f} ms (best of {ATTEMPTS}; at most {IMPORT_MS_MAX:.0f} ms)")
    return [f"import tenure takes {best:.0f} ms, more than {IMPORT_MS_MAX:.0f} ms"] if best > IMPORT_MS_MAX else []


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}wheel: failed: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

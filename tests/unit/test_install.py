"""What `make` installs: files whose hashes are known, for the extras that are asked for, and nothing else."""

from __future__ import annotations

import hashlib
import os
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from scripts.install import HASHES, install, merged, requirements

SEVERAL = """\
# A head of two lines; it is
# for no extra.

# all cli
click==8.1 \\
    --hash=sha256:01 \\
    --hash=sha256:02
# build build:nats
setuptools==84
# all nats
nats-py==2.15 \\
    --hash=sha256:03
"""


def test_the_part_for_extras_is_chosen() -> None:
    assert requirements(["nats"], SEVERAL) == "# all nats\nnats-py==2.15 \\\n    --hash=sha256:03\n"
    assert requirements(["build:nats", "build:cli"], SEVERAL) == "# build build:nats\nsetuptools==84\n"
    assert requirements(["cli", "nats"], SEVERAL) == requirements(["all"], SEVERAL)
    assert requirements([], SEVERAL) == ""


def test_an_extra_of_no_package_is_refused() -> None:
    with pytest.raises(ValueError, match="no package for natz; see"):
        requirements(["natz", "cli"], SEVERAL)


def test_packages_of_another_version_take_the_place_of_those_of_the_same_name() -> None:
    lowest = "# all nats\nnats-py==2.0 \\\n    --hash=sha256:04\n# all\nold==1\n"
    both = merged(SEVERAL, lowest)
    assert requirements(["nats"], both) == "# all nats\nnats-py==2.0 \\\n    --hash=sha256:04\n"
    assert requirements(["cli"], both) == requirements(["cli"], SEVERAL)
    assert "old==1" in requirements(["all"], both)


def test_each_package_that_is_installed_has_a_hash() -> None:
    parts = requirements(["all", "dev", "test", "build"], HASHES.read_text(encoding="utf-8")).split("# ")[1:]
    assert len(parts) > 100
    assert all("--hash=sha256:" in part for part in parts)


def a_wheel(folder: Path, name: str, *headers: str) -> Path:
    """Make a wheel of nothing but metadata."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *headers])
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds packages, and nowhere else; what it installs goes into an environment of its own."""
    environment, folder = tmp_path / "environment", tmp_path / "index"
    venv.create(environment, symlinks=True)  # without pip, which would take seconds
    folder.mkdir()
    for name, value in {
        "PYTHON": str(environment / "bin" / "python"),
        "CONFIG_FILE": os.devnull,
        "CONSTRAINT": "",
        "NO_INDEX": "1",
        "FIND_LINKS": str(folder),
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def hashed(*wheels: Path) -> str:
    entries = [(wheel.name.partition("-")[0], hashlib.sha256(wheel.read_bytes()).hexdigest()) for wheel in wheels]
    return "".join(f"# cli\n{name}==1.0 \\\n    --hash=sha256:{digest}\n" for name, digest in entries)


def installed(index: Path) -> list[str]:
    return sorted(one.name for one in index.parent.glob("environment/lib/*/site-packages/*.dist-info"))


def test_files_with_known_hashes_are_installed(index: Path) -> None:
    needed, ours = a_wheel(index, "needed"), a_wheel(index.parent, "ours", "Requires-Dist: needed")
    done, output = install(sys.executable, ["cli"], hashed(needed), str(ours))
    assert done, output
    assert installed(index) == ["needed-1.0.dist-info", "ours-1.0.dist-info"]


def test_a_file_of_another_hash_is_refused(index: Path) -> None:
    needed = a_wheel(index, "needed")
    hashes = hashed(needed)
    a_wheel(index, "needed", "Summary: another file of the same name")
    done, output = install(sys.executable, ["cli"], hashes, str(a_wheel(index.parent, "ours")))
    assert not done
    assert "DO NOT MATCH THE HASHES" in output
    assert installed(index) == []


def test_a_package_that_the_list_lacks_is_refused(index: Path) -> None:
    needed, _ = a_wheel(index, "needed", "Requires-Dist: more"), a_wheel(index, "more")
    done, output = install(sys.executable, ["cli"], hashed(needed), str(a_wheel(index.parent, "ours")))
    assert not done
    assert "more" in output
    assert installed(index) == []

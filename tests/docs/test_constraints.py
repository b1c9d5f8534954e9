"""The files of hashes are those of the pinned versions and of the extras, and have no address."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import constraints
from scripts.constraints import FILES, faults, hashes_in, page_of_hashes, unpinned
from scripts.install import HASHES, LOWEST_HASHES


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of constraints, to be changed."""
    folder = tmp_path / "constraints"
    shutil.copytree(HASHES.parent, folder)
    monkeypatch.setattr(constraints, "HASHES", folder / HASHES.name)
    monkeypatch.setattr(constraints, "LOWEST_HASHES", folder / LOWEST_HASHES.name)
    copied = {folder / file.name: folder / pins.name for file, pins in FILES.items()}
    monkeypatch.setattr(constraints, "FILES", copied)
    return folder


def test_the_files_are_those_of_the_pins_and_extras(capsys: pytest.CaptureFixture[str]) -> None:
    code = constraints.main(["--check"])
    assert (code, capsys.readouterr().err) == (0, "")


def test_unknown_arguments_are_refused() -> None:
    assert constraints.main(["--chekc"]) == 2


def test_another_version_a_lost_hash_and_an_address_are_found(copy: Path) -> None:
    file, pins = copy / "hashes.txt", copy / "dev.txt"
    assert faults(file, pins) == unpinned() == []
    text = file.read_text(encoding="utf-8")

    pins.write_text(pins.read_text().replace("\nclick==", "\nclick==1."))
    assert "constraints/hashes.txt is not that of dev.txt and pyproject.toml" in faults(file, pins)[-1]
    pins.write_text(pins.read_text().replace("\nclick==1.", "\n"))
    assert unpinned() == ["constraints/dev.txt has no version of click"]

    file.write_text("".join(line for line in text.splitlines(keepends=True) if "--hash" not in line))
    assert "constraints/hashes.txt has no hash of " in faults(file, pins)[0]
    file.write_text(f"--index-url https://packages.invalid\n{text}")
    assert "constraints/hashes.txt has an address" in unpinned()
    file.unlink()
    assert faults(file, pins) != []


def test_the_hashes_of_a_version_are_found_however_it_is_written(copy: Path) -> None:
    digest = "0" * 64
    found = hashes_in(f"nats-py==2.15.0 ; sys_platform == 'linux' \\\n    --hash=sha256:{digest}\nold==1\n")
    assert found == {"nats-py==2.15": [digest], "old==1": []}
    (copy / "lowest.txt").write_text("# a comment\nnats-py==2.15\n")
    page = page_of_hashes(copy / "lowest.txt", found)
    assert page.endswith(f"# all nats\nnats-py==2.15 \\\n    --hash=sha256:{digest}\n")

"""What `make dist` builds and writes: the same bytes each time, and the bill of materials of the wheel."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scripts import licences, sbom
from scripts.check_dist import differences
from scripts.extras import FOR_USERS, PROJECT, brought
from scripts.sbom import BROUGHT_BY, bill_of_materials

MADE = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    file = tmp_path / "tenure-py3-none-any.whl"
    file.write_bytes(b"a wheel")
    return file


@pytest.fixture
def bill(wheel: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(bill_of_materials(wheel, MADE))
    return read


def test_the_bill_names_the_wheel_by_its_hash(bill: dict[str, Any]) -> None:
    library = bill["metadata"]["component"]
    assert (library["name"], library["version"]) == (PROJECT["name"], PROJECT["version"])
    assert library["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"a wheel").hexdigest()}]
    assert bill["metadata"]["timestamp"] == "2026-01-02T00:00:00+00:00"


def test_the_bill_has_each_package_that_an_extra_brings(bill: dict[str, Any]) -> None:
    found = {
        one["name"]: {each["value"] for each in one["properties"] if each["name"] == BROUGHT_BY}
        for one in bill["components"]
    }
    assert found == brought(FOR_USERS)
    assert all(one["scope"] == "optional" and one["licenses"] and one["version"] for one in bill["components"])


def test_the_bill_says_what_needs_what(bill: dict[str, Any]) -> None:
    reference = {one["name"]: one["bom-ref"] for one in [bill["metadata"]["component"], *bill["components"]]}
    needs = {one["ref"]: set(one.get("dependsOn", ())) for one in bill["dependencies"]}
    assert reference["rich"] in needs[reference["tenure"]]
    assert reference["mdurl"] not in needs[reference["tenure"]]
    assert needs[reference["rich"]] == {reference["markdown-it-py"], reference["pygments"]}
    assert set(needs) == set(reference.values())


def test_the_same_wheel_and_time_give_the_same_bill(wheel: Path) -> None:
    first = bill_of_materials(wheel, MADE)
    assert bill_of_materials(wheel, MADE) == first
    wheel.write_bytes(b"another wheel")
    assert json.loads(bill_of_materials(wheel, MADE))["serialNumber"] != json.loads(first)["serialNumber"]


def test_no_bill_names_an_unknown_licence(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(licences, "DECIDED", {})
    with pytest.raises(ValueError, match="cronsim: its metadata leave its licence open"):
        sbom.bill_of_materials(wheel, MADE)


def test_files_that_differ_or_are_absent_are_found(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "same").write_bytes(b"same")
        (folder / "other").write_text(folder.name)
    assert list(differences(first, second)) == ["other has other bytes when it is built again"]
    (second / "other").unlink()
    (second / "more").touch()
    assert list(differences(first, second)) == [
        "more is built the second time alone",
        "other is built the first time alone",
    ]

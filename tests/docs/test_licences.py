"""The page of licences equals the installed packages; a licence that is unknown or not accepted is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import licences
from scripts.extras import FOR_USERS, brought
from scripts.licences import DECIDED, accepted, judged, page_of
from tests.packages import installed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that are installed during the test, and pinned to 1.0 where they are needed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "constraints.txt").write_text("needed==1.0\n")
    monkeypatch.setattr(licences, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(licences, "DECIDED", {})
    return tmp_path


def test_the_page_equals_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    code = licences.main(["--check"])
    assert (code, capsys.readouterr().err) == (0, "")


def test_a_page_that_differs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "licences.md"
    monkeypatch.setattr(licences, "PAGE", page)
    assert licences.main(["--check"]) == 1
    assert "differs from the packages; run: python -m scripts.licences" in capsys.readouterr().err
    assert licences.main([]) == 0
    assert page.read_text(encoding="utf-8") == page_of(judged(brought(FOR_USERS))[0])
    assert licences.main(["--check"]) == 0


def test_unknown_arguments_are_refused() -> None:
    assert licences.main(["--chekc"]) == 2


@pytest.mark.parametrize(
    ("headers", "licence"),
    [
        (["License-Expression: mit or gpl-3.0-only"], "MIT OR GPL-3.0-only"),
        (
            ["License-Expression: MIT", "License: any other", "Classifier: License :: OSI Approved :: BSD License"],
            "MIT",
        ),
        (["License: MPL-2.0"], "MPL-2.0"),
        (["License: Apache", "Classifier: License :: OSI Approved :: Apache Software License"], "Apache-2.0"),
    ],
)
def test_metadata_that_name_a_licence(folder: Path, headers: list[str], licence: str) -> None:
    installed(folder, "needed", *headers)
    (package,), complaints = judged({"needed": {"cli"}})
    assert (package.licence, package.version, complaints) == (licence, "1.0", [])


@pytest.mark.parametrize(
    ("headers", "complaint"),
    [
        ([], "its metadata leave its licence open (none)"),
        (["License: see the file"], "(see the file)"),
        (["Classifier: License :: OSI Approved :: BSD License"], "(BSD License)"),
        (
            [f"Classifier: License :: OSI Approved :: {one} License" for one in ("MIT", "Apache Software")],
            "(MIT License, Apache Software License)",
        ),
        (["License-Expression: GPL-3.0-or-later"], "needed is under GPL-3.0-or-later, which is on no list"),
        (["License-Expression: MIT AND AGPL-3.0-only"], "needed is under MIT AND AGPL-3.0-only, which is on no list"),
    ],
)
def test_metadata_that_name_none_or_one_that_is_not_accepted(folder: Path, headers: list[str], complaint: str) -> None:
    installed(folder, "needed", *headers)
    _, (found,) = judged({"needed": {"cli"}})
    assert complaint in found


def test_a_package_that_is_not_installed_needs_a_decision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (found,) = judged({"needed": {"cli"}})
    assert "it is not installed" in found
    monkeypatch.setattr(licences, "DECIDED", {"needed": licences.Decided("MIT", "by its licence file")})
    assert judged({"needed": {"cli"}})[1] == []


def test_a_decision_for_a_package_that_no_extra_brings_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(licences, "DECIDED", {"left": licences.Decided("MIT", "by its licence file")})
    assert judged({})[1] == ["DECIDED names left, which no extra brings; remove it"]


def test_a_version_that_is_not_pinned_or_another_one_is_found(folder: Path) -> None:
    installed(folder, "needed", "License-Expression: MIT", version="2.0")
    installed(folder, "forgotten", "License-Expression: MIT")
    _, complaints = judged({"needed": {"cli"}, "forgotten": {"cli"}})
    assert complaints == [
        "constraints/dev.txt has no version of forgotten; add it",
        "needed 2.0 is installed, not 1.0 of constraints/dev.txt",
    ]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("MIT", True),
        ("GPL-2.0-only", False),
        ("GPL-2.0-only OR MIT", True),
        ("GPL-2.0-only AND MIT", False),
        ("MIT OR GPL-2.0-only AND AGPL-3.0-only", True),
        ("(MIT OR GPL-2.0-only) AND AGPL-3.0-only", False),
        ("(MIT OR GPL-2.0-only) AND (BSD-2-Clause OR AGPL-3.0-only)", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-only WITH GCC-exception-3.1", False),
    ],
)
def test_of_a_choice_one_is_accepted_and_of_several_together_all(expression: str, result: bool) -> None:
    assert accepted(expression) is result


def test_each_decision_has_an_accepted_licence_and_a_reason() -> None:
    for decided in DECIDED.values():
        assert accepted(decided.licence)
        assert decided.why

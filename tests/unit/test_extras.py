"""What the extras bring: by requirements, extras and markers of the installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.extras import FOR_DEVELOPERS, FOR_USERS, PYTHON, brought, closure, needs, pinned, required, supported
from tests.packages import installed

BOTH_ENDS = list(supported([f"{PYTHON}{minor}" for minor in (11, 14)]))


def test_what_is_brought_follows_extras_and_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    installed(
        tmp_path,
        "first",
        "Requires-Dist: always>=1",
        "Requires-Dist: by-extra; extra == 'more'",
        "Requires-Dist: not-asked; extra == 'other'",
        "Requires-Dist: old; python_full_version < '3.11.3'",
        "Requires-Dist: older; python_version < '3.11'",
        "Requires-Dist: new; python_version >= '3.14'",
        "Requires-Dist: apple; sys_platform == 'darwin'",
        "Requires-Dist: windows; sys_platform == 'win32'",
    )
    installed(tmp_path, "always", "Requires-Dist: First")  # a circle ends
    assert closure(["First[more]>=1"], BOTH_ENDS) == {
        "first": {"always", "by-extra", "old", "new", "apple"},
        "always": {"first"},
        **{name: set() for name in ("by-extra", "old", "new", "apple")},
    }
    assert needs("windows") == []


def test_each_extra_of_ours_is_there_and_none_for_developers() -> None:
    assert {"cli", "postgres", "zookeeper"} <= set(FOR_USERS)
    assert not {*FOR_DEVELOPERS, "all"} & set(FOR_USERS)
    assert set(required("all")) == {one for extra in FOR_USERS for one in required(extra)}


def test_extras_that_name_others_bring_theirs() -> None:
    pytest.importorskip("kubernetes")  # what isn't installed brings nothing
    packages = brought(["all", "dev"])
    assert packages["redis"] == {"all"}
    assert packages["pytest"] == {"dev"}
    assert packages["aiohttp"] == {"all", "dev"}  # kubernetes needs it, which `interop` brings


def test_pins_are_read_with_hashes_and_markers() -> None:
    text = "# a comment\nPyYAML==6.0.3 \\\n    --hash=sha256:00\nold_name==1.0; python_version < '3.12'\n"
    assert pinned(text) == {"pyyaml": "6.0.3", "old-name": "1.0"}

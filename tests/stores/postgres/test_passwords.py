"""The passwords that the driver finds by itself are known, so that no text of a server shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("asyncpg")

from asyncpg.connect_utils import _read_password_file  # type: ignore[attr-defined]

from tenure._backends.postgres.address import Options
from tenure._backends.postgres.passwords import LINE_MAX, LINES_MAX, passwords_of, require_user
from tenure._redaction import redacted
from tenure._secret import hide
from tenure._url import Url
from tenure.errors import ConfigError


@pytest.mark.parametrize(
    "written", ["hush", "with:colons:in it", r"an\:escaped", r"back\\slashes\\", r"both\\\\:of them"]
)
def test_what_the_driver_reads_is_hidden(tmp_path: Path, written: str) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"# a comment\nno line: of these\n*:*:*:ann:{written}\n")
    file.chmod(0o600)
    found = passwords_of(Url.parse("postgresql://ann@host/db"), Options(passfile=str(file)), env={})
    hide(*found)
    [_, (*_, sent)] = _read_password_file(file)
    assert len(found) == 1
    assert redacted(f"the login {sent} of ann") == "the login *** of ann"


def test_a_file_of_another_kind_takes_no_time(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("\n".join(["a" * LINE_MAX + ":b", *["h:1:d:u:p"] * 2 * LINES_MAX]))
    assert len(passwords_of(Url.parse("postgresql://h/d"), Options(passfile=str(file)), env={})) == LINES_MAX


def test_a_missing_file_is_ignored_as_by_libpq_and_another_one_must_be_readable(tmp_path: Path) -> None:
    url = Url.parse("postgresql://ann@h/d")
    require_user(url, Options(passfile=str(tmp_path / "missing")), env={})
    with pytest.raises(ConfigError, match=r"passfile=.* can't be read: Is a directory"):
        require_user(url, Options(passfile=str(tmp_path)), env={})

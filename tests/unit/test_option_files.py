"""Files that options name: what is read, how much of it, and who else may read a file with a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenure._option_files import SIZE_MAX, other_owner, read_file, read_own_secret, require_readable, warnings_about
from tenure.errors import ConfigError

SECRET = b"0123456789abcdef"
has_modes = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows: its modes say nothing of other users")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs two users, so root")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "peers.key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


# --- what is read ---


def test_a_file_is_read_to_its_end_if_it_is_not_too_long(file: Path) -> None:
    assert read_file(file) == SECRET
    file.write_bytes(bytes(SIZE_MAX))
    assert len(read_file(file)) == SIZE_MAX
    with file.open("ab") as more:
        more.write(b"!")
    with pytest.raises(OSError, match="it has more than 4,194,304 bytes"):
        read_file(file)


@has_modes
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="it is a pipe or a device, and must be a regular file"):
            read_file(path)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no file can have this path"):
        read_file(f"{tmp_path}/a\0b")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


def test_a_link_is_followed(tmp_path: Path, file: Path) -> None:
    """Kubernetes mounts a secret as a link to a file in a folder that is exchanged."""
    (tmp_path / "link").symlink_to(file)
    assert read_file(tmp_path / "link") == SECRET


@has_modes
def test_an_option_whose_file_can_not_be_read_is_named_with_its_path(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "pipe", "it is a pipe"), (tmp_path / "no", "No such")):
        with pytest.raises(ConfigError, match=rf"^ca={path} of the store can't be read: {why}.*; name the file"):
            require_readable("the store", ca=str(path))


# --- who else may read it ---


@has_modes
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640, 0o660])
def test_a_file_for_its_owner_and_a_group_is_private(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_own_secret("key_file", str(file)) == (SECRET, ())
    assert warnings_about("key", file) == ()


@has_modes
@pytest.mark.parametrize(
    ("mode", "access"), [(0o644, "read"), (0o604, "read"), (0o602, "write"), (0o666, "read and write")]
)
def test_a_file_of_this_user_that_others_may_use_is_refused_or_told(file: Path, mode: int, access: str) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError) as refused:
        read_own_secret("key_file", str(file))
    assert str(refused.value) == (
        f"every user of this machine can {access} key_file={file} (mode {mode:04o}), and it holds a secret; "
        f"run: chmod 600 {file}"
    )
    [warning] = warnings_about("key", file)
    assert (warning.name, warning.value, warning.code) == ("key", f"{file}, mode {mode:04o}", "secret-file-mode")
    assert warning.advice == f"every user of this machine can {access} this secret; run, as its owner: chmod o= {file}"
    assert SECRET.decode() not in f"{refused.value}{warning}"


@as_root
def test_a_file_of_another_user_is_told(file: Path) -> None:
    """Its reader can't mend it: as ssh, which judges only keys that belong to this user."""
    os.chown(file, 12345, 12345)
    file.chmod(0o444)
    content, [warning] = read_own_secret("key_file", str(file))
    assert content == SECRET
    assert warning.advice.endswith(f"run, as its owner: chmod o= {file}")


@as_root
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640], ids=oct)
def test_a_file_that_another_user_owns_is_told_although_nobody_else_may_use_it(file: Path, mode: int) -> None:
    os.chown(file, 12345, 0)
    file.chmod(mode)
    content, [warning] = read_own_secret("key_file", str(file))
    assert content == SECRET
    assert warning.value == f"{file}, mode {mode:04o}, of user 12345"
    assert warning.advice == (
        "this secret belongs to user 12345, who can replace it; unless that is meant, run, as root: "
        f"chown {os.geteuid()} {file}"
    )
    assert warnings_about("key_file", file) == (warning,)


@as_root
def test_an_owner_without_a_number_in_a_container_is_not_told(file: Path) -> None:
    """It is root of the machine, as a rule."""
    os.chown(file, 65_534, 0)
    file.chmod(0o400)
    assert read_own_secret("key_file", str(file)) == (SECRET, ())


@as_root
def test_a_file_of_root_is_told_to_nobody(file: Path) -> None:
    """As orchestrators mount it."""
    about = file.stat()
    os.seteuid(12345)
    try:
        assert other_owner(about) is None
    finally:
        os.seteuid(0)


@has_modes
def test_a_file_on_a_mount_that_can_only_be_read_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do Kubernetes and Docker mount secrets, with mode 0644 or 0444 and root as the owner, who may be this user."""
    file.chmod(0o644)
    real = os.fstatvfs

    def read_only(file: int) -> os.statvfs_result:
        found = list(real(file))
        found[8] |= os.ST_RDONLY
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", read_only)
    content, [warning] = read_own_secret("key_file", str(file))
    assert content == SECRET
    assert "mount it with mode 0440 (Kubernetes: defaultMode, with fsGroup)" in warning.advice


@has_modes
def test_only_files_with_secrets_are_told(file: Path, tmp_path: Path) -> None:
    certificate, both = tmp_path / "cert.pem", tmp_path / "both.pem"
    certificate.write_text("-----BEGIN CERTIFICATE-----\n")
    both.write_text("-----BEGIN CERTIFICATE-----\n-----BEGIN EC PRIVATE KEY-----\n")
    for each in (file, certificate, both):
        each.chmod(0o644)
    warnings = require_readable("the store", ca=str(certificate), cert=str(both), key=str(file), nkey=None)
    assert [warning.name for warning in warnings] == ["cert", "key"]

"""One way to read the files for TLS."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from tenure._tls_context import tls_context
from tenure.errors import ConfigError
from tests.servers import Authority


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_certificate_and_name_are_verified(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue(tmp_path, usage="clientAuth")
    context = tls_context("h:1", ca=str(authority.certificate), cert=str(certificate), key=str(key))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len(context.get_ca_certs()) == 1
    context = tls_context("h:1", ca=None, cert=None, key=None, check_hostname=False)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)


def test_files_that_can_not_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = map(str, authority.issue(tmp_path))
    other, nothing = str(authority.certificate), tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for files in (
        {"ca": str(nothing), "cert": None, "key": None},
        {"ca": None, "cert": str(nothing), "key": None},
        {"ca": None, "cert": certificate, "key": None},
        {"ca": None, "cert": other, "key": key},
    ):
        named = ", ".join(f"{name}={path}" for name, path in files.items() if path)
        with pytest.raises(ConfigError) as raised:
            tls_context("h:1", ca=files["ca"], cert=files["cert"], key=files["key"])
        assert str(raised.value).startswith(f"the files for TLS with h:1 ({named}) can't be used: ")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue(tmp_path, usage="clientAuth")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:hush", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="the key has a password; remove it with openssl pkey"):
        tls_context("h:1", ca=None, cert=str(certificate), key=str(locked))

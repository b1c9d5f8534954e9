"""When a certificate ends."""

from __future__ import annotations

import re
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tenure._certificate import CERTIFICATE_MAX, ends_at
from tenure._foreign import Unreadable
from tests.servers import Authority

BEGIN, END = "-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n"


def said_by_openssl(certificate: Path) -> float:
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-enddate"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return datetime.strptime(said.strip(), "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("days", [-1, 2, 36_500])  # after 2049, the date is written in another form
def test_it_is_the_date_that_openssl_tells(tmp_path: Path, days: int) -> None:
    authority = Authority()
    certificate, key = authority.issue(tmp_path, days=days)
    assert ends_at(certificate.read_bytes()) == said_by_openssl(certificate)
    chain = key.read_bytes() + b"a comment\n" + certificate.read_bytes() + authority.certificate.read_bytes()
    assert ends_at(chain) == said_by_openssl(certificate)


@pytest.mark.parametrize(
    "pem",
    [
        "",
        BEGIN,
        BEGIN + END,
        f"{BEGIN}!{END}",
        f"{BEGIN}MIIB{END}",
        ssl.DER_cert_to_PEM_cert(b"\x30\x80"),
        ssl.DER_cert_to_PEM_cert(b"\x30\x88" + b"\xff" * 8),
        f"{BEGIN}{'A' * CERTIFICATE_MAX}{END}",
    ],
)
def test_what_is_none_has_no_date(pem: str) -> None:
    with pytest.raises(Unreadable, match="certificate"):
        ends_at(pem.encode())


def test_a_date_that_is_none_is_refused(tmp_path: Path) -> None:
    certificate, _ = Authority().issue(tmp_path)
    der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    [first, second] = re.findall(rb"\d{12}Z", der)
    for other in (b"269901000000Z", b"26010100000xZ"):
        broken = ssl.DER_cert_to_PEM_cert(der.replace(second, other)).encode()
        with pytest.raises(Unreadable, match="date"):
            ends_at(broken)
    swapped = ssl.DER_cert_to_PEM_cert(der.replace(second, b"510101000000Z")).encode()
    assert ends_at(swapped) == datetime(1951, 1, 1, tzinfo=UTC).timestamp()
    assert first != second

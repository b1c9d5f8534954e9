"""What ``tenure doctor`` says about TLS."""

from __future__ import annotations

import pytest

from tenure._opened import Fact
from tenure._tls_facts import Verifies, tls_fact


@pytest.mark.parametrize(
    ("verifies", "version", "says"),
    [
        ("certificate and name", "TLSv1.3", "TLS 1.3; the server's certificate and name are verified against ca.pem"),
        ("certificate and name", "", "TLS; the server's certificate and name are verified against ca.pem"),
        ("certificate", "", "TLS; the server's certificate is verified against ca.pem; its name is not (check=no)"),
        ("nothing", "TLSv1.2", "TLS 1.2; nothing is verified (check=no)"),
    ],
)
def test_what_is_verified(verifies: Verifies, version: str, says: str) -> None:
    found = tls_fact(verifies, ["a"], authority="ca.pem", version=version, because="check=no")
    assert found == Fact("TLS", says)


def test_the_authorities_of_the_machine() -> None:
    says = "TLS; the server's certificate and name are verified against the authorities of this machine"
    assert tls_fact("certificate and name", ["a"]) == Fact("TLS", says)


@pytest.mark.parametrize(
    ("hosts", "is_here"),
    [
        (["localhost", "127.0.0.1", "::1", "[::1]", "/run/postgresql"], True),
        (["127.0.0.1", "store.example"], False),
        (["10.0.0.1"], False),
        ([], False),  # they are not known
    ],
)
def test_who_can_read_it_without_tls(hosts: list[str], is_here: bool) -> None:
    says = "no TLS: the connection stays on this machine" if is_here else "no TLS: the connection is readable on the"
    fact = tls_fact(None, hosts, name="TLS of sentinels")
    assert fact.value.startswith(says)
    assert fact.code == ("no-tls" if hosts and not is_here else "")

"""TLS, on every store: a certificate of the right authority that is for another host is not trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

from tests.servers import Authority
from tests.stores.test_tls import STORES, asked, told_to_a_foreign_server

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

UNCHECKED = {
    "etcd": "check_hostname=false",
    "postgres": "sslmode=verify-ca",
    "rabbitmq": "check_hostname=false",
    "redis": "check_hostname=false",
    "zookeeper": "check_hostname=false",
}
"""Stores that have an option for not verifying the name, and that option; docs/security.md lists them."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cert, key = authority.issue(tmp_path_factory.mktemp("client"), "client", "clientAuth")
    return {"ca": authority.certificate, "cert": cert, "key": key}


@pytest.fixture(scope="module")
def misnamed(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate and its key, of the authority that the URL names, for a host that it does not name."""
    return authority.issue(tmp_path_factory.mktemp("misnamed"), "another.example")


@pytest.mark.parametrize("name", STORES)
async def test_a_certificate_for_another_host_is_told_nothing(
    files: dict[str, Path], misnamed: tuple[Path, Path], name: str
) -> None:
    assert await told_to_a_foreign_server(asked, STORES[name], STORES[name].url, files, misnamed) == []


@pytest.mark.parametrize(("name", "option"), UNCHECKED.items())
async def test_only_the_options_that_are_listed_switch_that_off(
    files: dict[str, Path], misnamed: tuple[Path, Path], name: str, option: str
) -> None:
    url = f"{STORES[name].url}&{option}"
    assert await told_to_a_foreign_server(asked, STORES[name], url, files, misnamed)


@pytest.mark.parametrize(("name", "option"), UNCHECKED.items())
async def test_they_switch_off_nothing_else(files: dict[str, Path], tmp_path: Path, name: str, option: str) -> None:
    """A server of another authority is told nothing, whatever its name."""
    foreign = Authority("another authority").issue(tmp_path)
    url = f"{STORES[name].url}&{option}"
    assert await told_to_a_foreign_server(asked, STORES[name], url, files, foreign) == []

"""Whether connections are encrypted and verified: what the options, the service file and the variables say together."""

from __future__ import annotations

import asyncio
import gc
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("asyncpg")

from tenure._backends import postgres
from tenure._backends.postgres import encryption
from tenure._backends.postgres.address import Options, dsn_of
from tenure._backends.postgres.encryption import Encryption, encryption_of
from tenure._lease import Vacant
from tenure._url import Url
from tenure.errors import ConfigError, TenureError
from tests.servers import Authority, Postgres, private
from tests.servers.tls_listener import TlsListener

SECRET = "s3cret"


@pytest.fixture
def ca(tmp_path: Path) -> str:
    file = tmp_path / "ca.pem"
    file.write_text("certificates")
    return str(file)


def decided(written: str, home: Path, **env: str) -> Encryption:
    url = Url.parse(written)
    return encryption_of(url, url.options(Options), env, home)


def test_by_default_libpq_decides(tmp_path: Path) -> None:
    assert decided("postgresql://h/d", tmp_path) == Encryption(None, None)
    assert decided("postgresql://h/d?sslmode=prefer", tmp_path) == Encryption("prefer", None)
    assert decided("postgresql://h/d?sslmode=require", tmp_path) == Encryption("require", None)
    assert decided("postgresql://h/d", tmp_path, PGSSLMODE="disable") == Encryption("disable", None)


def test_an_authority_means_verifying(tmp_path: Path, ca: str) -> None:
    everything = Encryption("verify-full", ca)
    assert decided(f"postgresql://h/d?sslrootcert={ca}", tmp_path) == everything
    assert decided("postgresql://h/d", tmp_path, PGSSLROOTCERT=ca) == everything
    assert decided(f"postgresql://h/d?sslmode=verify-full&sslrootcert={ca}", tmp_path) == everything
    assert decided(f"postgresql://h/d?sslmode=verify-ca&sslrootcert={ca}", tmp_path) == Encryption("verify-ca", ca)
    assert decided(f"postgresql://h/d?sslmode=require&sslrootcert={ca}", tmp_path) == Encryption("verify-ca", ca)
    (tmp_path / "services").write_text(f"[orders]\nhost=h\nsslrootcert={ca}\n[plain]\nhost=h\nsslmode=disable\n")
    by_service = {"PGSERVICEFILE": str(tmp_path / "services")}
    assert decided("postgresql:///d?service=orders", tmp_path, **by_service) == everything
    assert decided("postgresql:///d?service=plain", tmp_path, **by_service) == Encryption("disable", None)


def test_a_list_of_revoked_certificates_means_an_authority(tmp_path: Path, ca: str) -> None:
    """The usual file has it: a list alone verifies nothing."""
    by_service = {"PGSERVICEFILE": str(tmp_path / "services")}
    (tmp_path / "services").write_text(f"[orders]\nhost=h\nsslcrl={ca}\n")
    places: list[tuple[str, dict[str, str]]] = [
        (f"postgresql://h/d?sslcrl={ca}", {}),
        ("postgresql://h/d", {"PGSSLCRL": ca}),
        ("postgresql:///d?service=orders", by_service),
    ]
    for url, env in places:
        with pytest.raises(ConfigError, match=r"sslmode=verify-full .* needs an authority, and there is no .*root.crt"):
            decided(url, tmp_path, **env)
    usual = tmp_path / ".postgresql" / "root.crt"
    usual.parent.mkdir()
    usual.write_text("certificates")
    for url, env in places:
        assert decided(url, tmp_path, **env) == Encryption("verify-full", str(usual))
    assert decided(f"postgresql://h/d?sslcrl={ca}&sslrootcert={ca}", tmp_path) == Encryption("verify-full", ca)


@pytest.mark.parametrize("option", ["sslrootcert", "sslcrl"])
@pytest.mark.parametrize("mode", ["disable", "allow", "prefer"])
def test_an_authority_beside_a_mode_that_trusts_anybody_is_refused(
    tmp_path: Path, ca: str, mode: str, option: str
) -> None:
    with pytest.raises(ConfigError, match=f"={mode} trusts anybody; write sslmode=verify-full"):
        decided(f"postgresql://h/d?sslmode={mode}&{option}={ca}", tmp_path)
    with pytest.raises(ConfigError, match=f"the variable PGSSLMODE={mode} trusts anybody"):
        decided(f"postgresql://h/d?{option}={ca}", tmp_path, PGSSLMODE=mode)
    services = tmp_path / "services"
    by_service = {"PGSERVICEFILE": str(services)}
    services.write_text(f"[both]\nhost=h\nsslmode={mode}\n{option}={ca}\n[mode]\nhost=h\nsslmode={mode}\n")
    for url in ("postgresql:///d?service=both", f"postgresql:///d?service=mode&{option}={ca}"):
        with pytest.raises(ConfigError, match=f"sslmode in .*services={mode} trusts anybody"):
            decided(url, tmp_path, **by_service)
    # What stands in the URL is about this connection, and wins over what holds for all.
    variable = {f"PG{option.upper()}": ca}
    assert decided(f"postgresql://h/d?sslmode={mode}", tmp_path, **variable) == Encryption(mode, None)
    by_url = f"postgresql:///d?service=both&sslmode={mode}"
    assert decided(by_url, tmp_path, **by_service) == Encryption(mode, None)


def test_a_certificate_of_the_client_means_tls(tmp_path: Path, ca: str) -> None:
    for name in ("sslcert", "sslkey"):
        found = decided(f"postgresql://h/d?{name}={ca}", tmp_path)
        shown = ca if name == "sslcert" else str(tmp_path / ".postgresql" / "postgresql.crt")
        assert (found.mode, found.authority, found.certificate) == ("require", None, shown)
    assert decided("postgresql://h/d", tmp_path, PGSSLCERT=ca) == Encryption("require", None, certificate=ca)
    both = decided(f"postgresql://h/d?sslcert={ca}&sslrootcert={ca}", tmp_path)
    assert both == Encryption("verify-full", ca, certificate=ca)
    with pytest.raises(ConfigError, match="is for TLS, which the option sslmode=disable excludes"):
        decided(f"postgresql://h/d?sslmode=disable&sslcert={ca}", tmp_path)


def test_the_file_that_libpq_looks_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs an authority, and there is no .*root.crt; name its file"):
        decided("postgresql://h/d?sslmode=verify-full", tmp_path)
    usual = tmp_path / ".postgresql" / "root.crt"
    usual.parent.mkdir()
    usual.write_text("certificates")
    assert decided("postgresql://h/d?sslmode=verify-full", tmp_path) == Encryption("verify-full", str(usual))
    verified = Encryption("verify-ca", str(usual))
    assert decided("postgresql://h/d?sslmode=require", tmp_path) == verified
    with_certificate = decided(f"postgresql://h/d?sslcert={usual}&sslkey={usual}", tmp_path)
    assert (with_certificate.mode, with_certificate.authority) == (verified.mode, verified.authority)
    assert decided("postgresql://h/d", tmp_path) == Encryption(None, None)


def test_the_authorities_of_the_machine(tmp_path: Path, ca: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    assert decided("postgresql://h/d?sslrootcert=system", tmp_path) == Encryption("verify-full", ca)
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    monkeypatch.setenv("SSL_CERT_DIR", "/nowhere")
    with pytest.raises(ConfigError, match="no file with the authorities of this machine was found"):
        decided("postgresql://h/d?sslrootcert=system", tmp_path)


def test_the_authorities_of_a_system_whose_python_looks_elsewhere(
    tmp_path: Path, ca: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = ssl.DefaultVerifyPaths("", "", "SSL_CERT_FILE", "/opt/ssl/cert.pem", "SSL_CERT_DIR", "/opt/ssl/certs")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: none)
    monkeypatch.setattr(encryption, "_BUNDLES", ("/nowhere.pem", ca))
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert decided("postgresql://h/d?sslrootcert=system", tmp_path) == Encryption("verify-full", ca)


@pytest.mark.parametrize("mode", ["require", "verify-ca"])
def test_the_authorities_of_the_machine_certify_anybody_so_the_name_is_verified(
    tmp_path: Path, ca: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libpq refuses it: else, a server with any certificate of a public authority would be trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    said = rf"names must be verified, too, and .*={mode} doesn't do that; write sslmode=verify-full"
    with pytest.raises(ConfigError, match=said):
        decided(f"postgresql://h/d?sslmode={mode}&sslrootcert=system", tmp_path)
    with pytest.raises(ConfigError, match=said):
        decided("postgresql://h/d", tmp_path, PGSSLMODE=mode, PGSSLROOTCERT="system")
    full = Encryption("verify-full", ca)
    assert decided("postgresql://h/d?sslmode=verify-full&sslrootcert=system", tmp_path) == full
    assert decided("postgresql://h/d?sslmode=verify-full", tmp_path, PGSSLROOTCERT="system") == full


def test_the_usual_file_that_can_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    usual = tmp_path / ".postgresql" / "root.crt"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", denied)  # as root, a test is denied nothing
        for mode in ("require", "verify-full"):
            with pytest.raises(
                ConfigError, match=rf"{usual}, where libpq looks .* Permission denied; let this process"
            ):
                decided(f"postgresql://h/d?sslmode={mode}", tmp_path)
        assert decided("postgresql://h/d", tmp_path) == Encryption(None, None)  # it isn't looked at
    usual.mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"sslrootcert={usual} of .* can't be read: Is a directory"):
        decided("postgresql://h/d?sslmode=verify-full", tmp_path)


@pytest.mark.parametrize("mode", ["", "&sslmode=require", "&sslmode=verify-ca", "&sslmode=verify-full"])
def test_a_binding_that_the_driver_can_not_give_is_had_by_verifying_the_server(
    tmp_path: Path, ca: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    bound = Encryption("verify-full", ca, binds=True)
    required = f"postgresql://h/d?channel_binding=require{mode}"
    assert decided(required, tmp_path) == bound
    assert decided(f"postgresql://h/d?{mode[1:]}", tmp_path, PGCHANNELBINDING="require") == bound
    (tmp_path / "services").write_text("[orders]\nhost=h\nchannel_binding=require\n")
    by_service = {"PGSERVICEFILE": str(tmp_path / "services")}
    assert decided(f"postgresql:///d?service=orders{mode}", tmp_path, **by_service) == bound
    other = tmp_path / "other.pem"
    other.write_text("certificates")
    assert decided(f"{required}&sslrootcert={other}", tmp_path).authority == str(other)
    usual = tmp_path / ".postgresql" / "root.crt"
    usual.parent.mkdir()
    usual.write_text("certificates")
    assert decided(required, tmp_path).authority == str(usual)
    for weaker in ("prefer", "disable"):
        chosen = decided(f"postgresql://h/d?channel_binding={weaker}{mode}", tmp_path, PGCHANNELBINDING="require")
        assert not chosen.binds


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer"])
def test_a_binding_without_tls_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"=require of .* needs TLS, and the option sslmode={mode} does without"):
        decided(f"postgresql://h/d?sslmode={mode}&channel_binding=require", tmp_path)
    with pytest.raises(ConfigError, match=rf"the variable PGCHANNELBINDING=require of .*sslmode={mode} does without"):
        decided(f"postgresql://h/d?sslmode={mode}", tmp_path, PGCHANNELBINDING="require")


@pytest.mark.parametrize(
    ("url", "env"),
    [
        ("postgresql://%2Frun%2Fpostgresql/d?channel_binding=require", {}),
        ("postgresql://u@/d?host=/run/postgresql&channel_binding=require", {}),
        ("postgresql:///d?channel_binding=require", {}),
        ("postgresql:///d?channel_binding=require", {"PGHOST": "/run/postgresql"}),
    ],
)
def test_a_binding_by_a_socket_is_refused(tmp_path: Path, url: str, env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs TLS, and a connection by a socket has none"):
        decided(url, tmp_path, **env)


@pytest.mark.parametrize("mode", ["", "&sslmode=prefer"])
def test_tls_from_the_first_byte_on_needs_a_mode_that_has_it(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match=r"the option sslnegotiation=direct of .* is for TLS alone; write sslmode="):
        decided(f"postgresql://h/d?sslnegotiation=direct{mode}", tmp_path)
    assert decided("postgresql://h/d?sslnegotiation=direct&sslmode=require", tmp_path).mode == "require"


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sslrootcert= of .* can't be read"):
        decided("postgresql://h/d?sslrootcert=", tmp_path)  # as of a variable that is not set
    with pytest.raises(ConfigError, match=r"sslcrl=/nowhere of .* can't be read"):
        decided("postgresql://h/d", tmp_path, PGSSLCRL="/nowhere")
    (tmp_path / ".pg_service.conf").write_text("host=h\n")
    with pytest.raises(ConfigError, match=r"the service file .*pg_service.conf can't be read"):
        decided("postgresql://h/d?service=orders", tmp_path)


def test_what_is_decided_is_what_the_driver_gets() -> None:
    url = Url.parse("postgresql://h/d?sslmode=require&schema=orders&sslcert=a.pem")
    dsn = dsn_of(url, sslmode="verify-ca", sslrootcert="ca.pem")
    assert dsn.reveal() == "postgresql://h/d?sslmode=verify-ca&sslcert=a.pem&sslrootcert=ca.pem"
    assert dsn_of(Url.parse("postgresql://h/d"), sslmode=None, sslrootcert=None).reveal() == "postgresql://h/d"


# --- what servers are told ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return authority.issue(tmp_path_factory.mktemp("client"), "postgres", "clientAuth")


@pytest.mark.parametrize("has_tls", [True, False])
async def test_a_server_that_is_not_trusted_is_told_nothing(
    authority: Authority, tmp_path: Path, has_tls: bool
) -> None:
    own = Authority("another authority").issue(tmp_path) if has_tls else None
    with TlsListener("postgres", own) as listener:
        await refused(f"postgresql://u:{SECRET}@127.0.0.1:{listener.port}/d?sslrootcert={authority.certificate}")
        assert (listener.told, listener.handshakes) == ([], int(has_tls))


async def test_where_a_binding_is_required_a_server_that_is_not_trusted_is_told_nothing(tmp_path: Path) -> None:
    own = Authority("another authority").issue(tmp_path)
    with TlsListener("postgres", own) as listener:
        url = f"postgresql://u:{SECRET}@127.0.0.1:{listener.port}/d?sslmode=require&channel_binding=require"
        error = await refused(url)
        assert (listener.told, listener.handshakes) == ([], 1)
    assert "channel_binding=require means that the server is verified; name its authority" in str(error)


async def test_with_a_certificate_of_the_client_nothing_is_told_in_the_clear(certificate: tuple[Path, Path]) -> None:
    file, key = certificate
    with TlsListener("postgres", None) as listener:
        await refused(f"postgresql://u:{SECRET}@127.0.0.1:{listener.port}/d?sslcert={file}&sslkey={key}")
        assert listener.told == []


async def test_a_key_with_a_password_is_opened_by_the_one_in_the_url(
    server: Postgres, authority: Authority, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    file, key = certificate
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-aes256", "-passout", f"pass:{SECRET}", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    locked.chmod(0o600)
    url = f"{server.url}?sslrootcert={authority.certificate}&sslcert={file}&sslkey={locked}"
    await postgres.migrate(f"{url}&sslpassword={SECRET}")
    backend = postgres.open(Url.parse(f"{url}&sslpassword={SECRET}"))
    try:
        assert await backend.leases.inspect("name") == Vacant("name", 0)
    finally:
        await backend.close()
    assert "has a password that is missing or wrong" in str(await refused(f"{url}&sslpassword=another"))
    assert "has a password that is missing or wrong" in str(await refused(url))


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_an_attempt_given_up_at_any_step_leaves_nothing_behind(
    server: Postgres, authority: Authority, is_trusted: bool
) -> None:
    """No connection, and no traceback of a future that the driver has forgotten."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    known = authority if is_trusted else Authority("another authority")
    backend = postgres.open(Url.parse(f"{server.url}?sslrootcert={known.certificate}"))
    client = backend.leases._client
    for turns in range(40):
        connecting = asyncio.ensure_future(client.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        [end] = await asyncio.gather(connecting, return_exceptions=True)
        if not isinstance(end, BaseException):
            end.terminate()
    await backend.close()
    await asyncio.sleep(0)  # what was terminated ends
    gc.collect()
    assert complaints == []


async def refused(url: str) -> TenureError:
    backend = postgres.open(Url.parse(url))
    try:
        with pytest.raises(ConfigError) as caught:
            await backend.leases.inspect("name")
    finally:
        await backend.close()
    return caught.value


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[Postgres]:
    with private(Postgres, authority=authority, password=SECRET) as server:
        yield server


async def test_a_server_with_a_certificate_for_another_name(server: Postgres, authority: Authority) -> None:
    elsewhere = server.url.replace("127.0.0.1", "localhost")  # its certificate is for 127.0.0.1
    await refused(f"{elsewhere}?sslrootcert={authority.certificate}")
    trusted = f"{elsewhere}?sslmode=require&sslrootcert={authority.certificate}"
    await postgres.migrate(trusted)
    for url in (trusted, f"{server.url}?sslrootcert={authority.certificate}"):
        backend = postgres.open(Url.parse(url))
        try:
            assert await backend.leases.inspect("name") == Vacant("name", 0)
        finally:
            await backend.close()

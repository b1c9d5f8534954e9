"""Names that can be decoded, texts of messages, addresses without secrets."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("azure.storage.blob")

from tenure._backends.azure_storage import lease_id
from tenure._backends.azure_storage.address import DEVELOPMENT_KEY, address_of, connected
from tenure._backends.azure_storage.message_format import TEXT_MAX, Properties, decode, encode, encode_to_fit
from tenure._backends.azure_storage.names import (
    BLOB_MAX,
    POISON_SUFFIX,
    blob_of,
    common_beginning,
    decode_metadata,
    encode_metadata,
    name_of,
    queue_of,
)
from tenure._lease import Grant
from tenure._queue.delivery_ends import history_noted, noted
from tenure._queue.failures import Failure
from tenure._queue.message import Attempt
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError
from tests.stores.ended import ABANDONED, AT_ABANDON, AT_DEATH, ENDED, ERROR, REJECTED

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200)


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blobs", "beginning"),
    [
        (["orders"], "orders"),
        (["orders/12", "orders/1", "orders/15"], "orders/1"),
        (["orders", "mails"], ""),
        (["a", "a", "ab"], "a"),
    ],
)
def test_the_common_beginning_of_blobs(blobs: list[str], beginning: str) -> None:
    assert common_beginning(blobs) == beginning


@given(NAMES)
def test_a_blob_name_can_be_read_back(name: str) -> None:
    blob = blob_of(name)
    assert name_of(blob) in (name, None)
    assert (name_of(blob) is None) == blob.startswith(".long/")
    assert re.fullmatch(r"[\w.~/ -]{1,1024}", blob, re.ASCII)
    assert not re.search(r"(^|/)[./ ]|[. ](/|$)|/$", blob.removeprefix("."))


@pytest.mark.parametrize("name", ["leader", "MyLeaderCoordinatorTask", "jobs/nightly.v2/report_1", "two words"])
def test_ordinary_names_stay_as_they_are(name: str) -> None:
    assert blob_of(name) == name


def test_long_names_are_hashed() -> None:
    assert blob_of("x" * BLOB_MAX) == "x" * BLOB_MAX
    assert blob_of("x" * (BLOB_MAX + 1)).startswith(".long/")
    assert blob_of("~" * 400).startswith(".long/")


@given(NAMES, NAMES)
def test_queue_names_are_azures_and_differ(first: str, second: str) -> None:
    names = queue_of(first), queue_of(second)
    for name in names:
        assert re.fullmatch(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", name + POISON_SUFFIX)
    assert (names[0] == names[1]) == (first == second)


@pytest.mark.parametrize("name", ["orders", "a1b", "nightly-report-2"])
def test_ordinary_queues_stay_as_they_are(name: str) -> None:
    assert queue_of(name) == name


@pytest.mark.parametrize("name", ["Orders", "orders-poison", "a", "a--b", "orders/eu", "ä", "x" * 57])
def test_other_queues_get_names_of_their_own(name: str) -> None:
    made = queue_of(name)
    assert made != name
    assert queue_of(made) != made, "nobody else's queue may be called so"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_metadata_can_be_read_back(text: str) -> None:
    value = encode_metadata(text)
    assert decode_metadata(value) == text
    assert value.isascii()
    assert value.isprintable()
    assert value == value.strip()


def test_a_lease_id_is_a_terms_own() -> None:
    grant = Grant("chair", "ann#1", 3)
    assert lease_id(grant) == lease_id(Grant("chair", "ann#1", 3))
    others = [replace(grant, name="desk"), replace(grant, holder="bob#1"), replace(grant, token=4)]
    assert len({lease_id(one) for one in [grant, *others]}) == 4


# --- texts -------------------------------------------------------------------------------------------------------

FAILURE = Failure("ValueError", "no such customer: 'Ünïcödé'", "Traceback …" * 1_000)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(
    st.binary(max_size=300),
    st.dictionaries(TEXTS.filter(bool), TEXTS | st.integers(-(2**63), 2**63 - 1) | st.booleans()),
)
def test_a_text_can_be_read_back(body: bytes, headers: dict[str, str | int | bool]) -> None:
    properties = Properties(
        id="id", headers=headers, ttl=3.5, uncounted=2, history=(Attempt(1, 5.0, "abandoned", FAILURE),), error=FAILURE
    )
    got, back = decode(encode(body, properties))
    assert (got, replace(back, headers=dict(back.headers))) == (body, properties)


def test_a_plain_message_is_plain_base64() -> None:
    assert encode(b"Hello", Properties()) == "SGVsbG8="
    assert decode("SGVsbG8=") == (b"Hello", Properties())
    assert decode(None) == (b"", Properties())


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        "SGVsbG8=.{broken",
        "a.b",
        "SGVsbG8=.7",
        "data.[]",
        'data.["x"]',
        'data."hello"',
        "data.null",
        "data." + "[" * 60_000,
        'data.{"id":' + "[" * 60_000,
        'data.{"foreign": 1}',
        'data.{"id": 5}',
        'data.{"id": ""}',
        'data.{"reply_to": "a$b"}',
        'data.{"correlation_id": "\\ud800"}',
        'data.{"headers": [["a"]]}',
        'data.{"headers": null}',
        'data.{"ttl": "soon"}',
        'data.{"ttl": -1}',
        'data.{"ttl": NaN}',
        f'data.{{"ttl": 1{"0" * 400}}}',
        'data.{"uncounted": "1"}',
        'data.{"uncounted": -1}',
        'data.{"sequence": 1.5}',
        f'data.{{"sequence": {2**70}}}',
        'data.{"enqueued_at": Infinity}',
        f'data.{{"dead_at": 1{"0" * 400}}}',
        'data.{"reason": null}',
        'data.{"description": 5}',
        'data.{"history": 5}',
        'data.{"history": [[1]]}',
        'data.{"error": {"type": "x", "message": 5}}',
        'data.{"error": "x"}',
        "text\n.{}",
        'text\n.{"foreign": 1}',
        'text\n.["reason"]',
    ],
)
def test_a_text_of_another_client_is_a_body(text: str) -> None:
    assert decode(text) == (text.encode(), Properties())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=9), inside, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([one.name for one in fields(Properties)]), _JSON), st.sampled_from([".", "\n."]))
def test_properties_that_are_read_can_be_written(said: dict[str, object], dot: str) -> None:
    text = f"data{dot}{json.dumps(said)}"
    body, properties = decode(text)
    if body != text.encode():
        assert decode(encode(body, properties))[1] == properties


def test_what_becomes_of_a_message_is_written_as_ever() -> None:
    """Releases of before read it, too."""
    properties = history_noted(Properties(id="x", ttl=9.0), AT_ABANDON, 5.0, fills=True)
    assert encode(b"a", properties) == f'YQ==.{{"history": [{ENDED}, {ABANDONED}], "id": "x", "ttl": 9.0}}'
    assert encode(b"a", noted(properties, AT_DEATH, 6.0, fills=True)) == (
        f'YQ==.{{"deliveries": 3, "history": [{ENDED}, {ABANDONED}, {REJECTED}], "reason": "bad", '
        f'"description": "why", "dead_at": 6.0, "error": {ERROR}, "id": "x", "ttl": 9.0}}'
    )


@pytest.mark.parametrize("size", [0, 45_000, 48_000, 49_152])
def test_properties_are_shortened_to_fit(size: int) -> None:
    history = tuple(Attempt(number, 5.0, "abandoned", FAILURE) for number in range(50))
    properties = Properties(id="id", history=history, reason="bad", description="d" * 9_000, error=FAILURE)
    before = base64.b64encode(b"x" * size).decode()
    text = encode_to_fit(before, b"x" * size, properties)
    assert (text is None) == (size > 49_000), "then it stays unchanged"
    assert len(text or "") <= TEXT_MAX
    body, kept = decode(text or before)
    assert body == b"x" * size
    assert kept.reason == (None if text is None else "bad")


@pytest.mark.parametrize("text", ["x," * 25_000, "é" * 32_000, "x.\n." * 13_000, 'AAAA.{"ttl": 5}' * 4_000])
def test_a_text_too_long_for_base64_stays_plain(text: str) -> None:
    properties = Properties(
        id="id", reason="bad", description="d" * 9_000, history=(Attempt(1, 5.0, "abandoned", FAILURE),)
    )
    noted = encode_to_fit(text, text.encode(), properties)
    assert noted is not None
    assert len(noted.encode()) <= TEXT_MAX
    assert noted.startswith(text)
    body, kept = decode(noted)
    assert (body.decode(), kept.id, kept.reason) == (text, "id", "bad")
    again = encode_to_fit(noted, body, replace(kept, reason="worse"))
    assert again is not None
    assert decode(again) == (body, replace(kept, reason="worse"))


def test_properties_without_room_change_nothing() -> None:
    long = "x," * 32_768
    assert encode_to_fit(long, long.encode(), Properties(reason="bad")) is None
    body, properties = b"x" * 45_000, Properties(headers={"a": "b" * 5_500})
    text = encode(body, properties)
    assert len(text) < TEXT_MAX
    assert encode_to_fit(text, body, replace(properties, uncounted=10**9)) is None, "rather than without its headers"


# --- addresses ---------------------------------------------------------------------------------------------------

SECRET = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="


def test_an_account_and_its_identity() -> None:
    address, options = address_of(Url.parse("azure://mine?container=locks"), {})
    assert (address.blobs, address.queues) == (
        "https://mine.blob.core.windows.net",
        "https://mine.queue.core.windows.net",
    )
    assert (address.login, options.container) == ("identity", "locks")
    assert address_of(Url.parse("azure://mine.blob.core.chinacloudapi.cn"), {})[0].queues.endswith("chinacloudapi.cn")


def test_azurite_has_its_ports() -> None:
    address, _ = address_of(Url.parse("azurite://localhost:20000"), {})
    assert (address.blobs, address.key) == ("http://localhost:20000/devstoreaccount1", Secret(DEVELOPMENT_KEY))
    assert address.queues == "http://localhost:20001/devstoreaccount1"
    assert ":7/" in address_of(Url.parse("azurite://localhost:20000?queue_port=7"), {})[0].queues


STRING = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={SECRET};EndpointSuffix=core.windows.net"
SAS = "sv=2024-08-04&ss=bq&srt=sco&sp=rwdlacup&se=2030-01-01T00:00:00Z&sig=" + SECRET.replace("=", "%3D")


@pytest.mark.parametrize(
    ("url", "env", "login"),
    [
        ("azure://?connection_string_env=MINE", {"MINE": STRING}, "account key"),
        ("azure://mine?connection_string_env=MINE", {"MINE": STRING}, "account key"),
        ("azure://", {"AZURE_STORAGE_CONNECTION_STRING": STRING}, "account key"),
        ("azure://", {"AZURE_STORAGE_ACCOUNT": "mine", "AZURE_STORAGE_KEY": SECRET}, "account key"),
        ("azure://", {"AZURE_STORAGE_ACCOUNT": "mine"}, "identity"),
        ("azure://mine", {"AZURE_STORAGE_CONNECTION_STRING": STRING}, "identity"),
        ("azure://mine?key_env=KEY", {"KEY": SECRET}, "account key"),
        ("azure://mine?sas_env=SAS", {"SAS": f"?{SAS}"}, "shared access signature"),
        (f"azure://mine?{SAS}&container=locks", {}, "shared access signature"),
    ],
)
def test_secrets_are_found_and_never_shown(url: str, env: dict[str, str], login: str) -> None:
    parsed = Url.parse(url)
    address, options = address_of(parsed, env)
    assert (address.account, address.login) == ("mine", login)
    for shown in (repr(address), str(address), repr(options), str(parsed)):
        assert SECRET.rstrip("=") not in shown
    if login == "shared access signature":
        assert address.sas == Secret(SAS)


@pytest.mark.parametrize(
    ("url", "env", "hint"),
    [
        ("azure://", {}, "AZURE_STORAGE_CONNECTION_STRING"),
        ("azure://mine?key_env=KEY", {}, "KEY is not set"),
        ("azure://mine?key_env=A&sas_env=B", {}, "can't both"),
        ("azure://mine?continer=x", {}, "container"),
        ("azure://mine?container=NO", {}, "container=leases"),
        ("azure://mine?timeout=0", {}, "timeout"),
        ("azure://mine/path", {}, "path"),
        ("azure://My_Account", {}, "3 to 24"),
        ("azure://mine?queue_port=1", {}, "azurite"),
        ("azure://other?connection_string_env=MINE", {"MINE": STRING}, "names the account"),
        ("azure://?connection_string_env=MINE", {"MINE": f"AccountKey={SECRET}"}, "is incomplete"),
        ("azure://?connection_string_env=MINE", {"MINE": SECRET.rstrip("=")}, "can't be read"),
        ("azurite://", {}, "must have a host"),
        ("azurite://host:port", {}, "no number"),
    ],
)
def test_an_invalid_address_is_refused(url: str, env: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as raised:
        address_of(Url.parse(url), env)
    assert SECRET.rstrip("=") not in str(raised.value)


@pytest.mark.parametrize(
    "endpoint", ["http://[x/", "https://a:70000/", "https://a:b/", "ftp://a/", "https://", "a.example"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    for kind in ("Blob", "Queue"):
        with pytest.raises(ConfigError, match="has an account or an endpoint that is none"):
            connected(Secret(f"AccountName=mine;AccountKey={SECRET};{kind}Endpoint={endpoint}"))


def test_a_real_account_is_not_asked_in_clear_text() -> None:
    clear = STRING.replace("https;", "http;")
    with pytest.raises(ConfigError, match=r"asks for http://mine.blob.core.windows.net, which anybody .*=https"):
        connected(Secret(clear))
    with pytest.raises(ConfigError, match=r"asks for http://gate\.example"):
        connected(Secret(f"BlobEndpoint=http://gate.example/mine;SharedAccessSignature={SAS}"))
    emulated = f"AccountName=devstoreaccount1;AccountKey={SECRET};BlobEndpoint=http://azurite:10000/devstoreaccount1"
    assert connected(Secret(emulated)).blobs == "http://azurite:10000/devstoreaccount1"
    assert connected(Secret(f"AccountName=a;AccountKey={SECRET};BlobEndpoint=http://127.0.0.1:1/a")).account == "a"


@pytest.mark.parametrize(
    ("host", "key", "is_asked"),
    [
        ("gate.example", SECRET, False),
        ("8.8.8.8:10000", SECRET, False),
        ("mine.blob.core.windows.net", SECRET, False),
        ("mine.blob.core.windows.net", DEVELOPMENT_KEY, False),
        ("10.0.0.7:10000", SECRET, True),
        ("azurite:10000", SECRET, True),
        ("gate.example", DEVELOPMENT_KEY, True),
    ],
)
def test_only_an_emulator_is_asked_in_clear_text(host: str, key: str, is_asked: bool) -> None:
    text = f"AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint=http://{host}/devstoreaccount1"
    if is_asked:
        assert connected(Secret(text)).blobs == f"http://{host}/devstoreaccount1"
        return
    with pytest.raises(
        ConfigError, match=f"asks for http://{re.escape(host)}/devstoreaccount1, which anybody"
    ) as caught:
        connected(Secret(text))
    assert key not in str(caught.value)


def test_no_host_of_azure_is_azurite() -> None:
    with pytest.raises(ConfigError, match="as an emulator, without TLS; write azure://ACCOUNT"):
        address_of(Url.parse("azurite://mine.blob.core.windows.net"), {})


def test_connection_strings_in_other_forms() -> None:
    assert connected(Secret("UseDevelopmentStorage=true")).blobs == "http://127.0.0.1:10000/devstoreaccount1"
    signed = connected(Secret(f"BlobEndpoint=https://mine.blob.core.windows.net/;SharedAccessSignature={SAS}"))
    assert (signed.account, signed.sas, signed.queues) == ("mine", Secret(SAS), "")

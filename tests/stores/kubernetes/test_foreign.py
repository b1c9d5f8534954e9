"""Leases that others have edited: whatever stands in one, it can be read, and written again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tenure._backends.kubernetes import records
from tenure._backends.kubernetes.credentials import Command, _credential_in
from tenure._backends.kubernetes.observations import Observations
from tenure._lease import NO_METADATA, TOKEN_MAX, HeldBy, Vacant
from tenure._runtime.clock import SystemClock
from tenure._secret import Secret
from tenure.errors import ConfigError

Json = dict[str, Any]

NOW = datetime(2026, 11, 23, 6, 0, 0, 120, tzinfo=UTC)
CREATED = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    10**400,
    2**63,
    "",
    "x",
    "9" * 30,
    [],
    [1],
    {},
]


def lease(annotations: object = None, **spec: object) -> Json:
    metadata: Json = {"name": "x", "resourceVersion": "7", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"holderIdentity": "ann", "leaseDurationSeconds": 15, **spec}}


def check(found: Json) -> None:
    """Read *found* in every way, and write it in every way."""
    holder, token = records.holder_of(found), records.token_of(found)
    assert 0 <= token <= TOKEN_MAX
    assert 0.0 <= records.duration_of(found) <= records.DURATION_MAX
    if holder:
        HeldBy("x", holder, token, records.duration_of(found), records.metadata_of(found))
        holder.encode()
    else:
        Vacant("x", token)
    records.is_asked_to_resign(found)
    records.strategy_of(found).encode()
    observations = Observations(SystemClock())
    seen = observations.note("x", found)
    assert observations.note("x", found) is seen, "a record that stays the same expires"
    assert math.isfinite(seen.left(1.0))
    assert seen.vacant_for(0.0) >= 0.0
    assert records.about(found) == records.about(found)
    acquired = records.acquired(found, "bob#1", 15.0, {"a": "b"}, after=0, now=NOW)
    renewed = records.renewed(found, 15.0, left=seen.left(1.0), now=NOW)
    released = records.released(found, now=NOW)
    records.asked_to_resign(found)
    assert records.token_of(acquired) == token + 1
    assert records.token_of(renewed) == records.token_of(released) == token
    assert 0 <= acquired["spec"]["leaseTransitions"] <= records.TRANSITIONS_MAX
    assert acquired["spec"]["leaseDurationSeconds"] == 15
    assert acquired["spec"]["renewTime"].startswith("2026-11-23T06:00:0")
    assert renewed["spec"]["renewTime"].startswith("2026-11-23T06:00:0")


@pytest.mark.parametrize("value", ODD, ids=lambda value: ascii(value)[:20])
@pytest.mark.parametrize(
    "field",
    ["leaseDurationSeconds", "leaseTransitions", "renewTime", "acquireTime", "preferredHolder", "strategy"],
)
def test_a_field_of_the_record_may_be_anything(field: str, value: object) -> None:
    found = lease(**{field: value})
    if value == value:  # a parser refuses the text NaN
        check(found)
    else:
        assert records.duration_of(found) >= 0.0
        assert records.token_of(found) >= CREATED


@pytest.mark.parametrize(
    "time",
    [
        "9999-12-31T23:59:59.999999Z",
        "9999-12-31T23:59:59.999999-12:00",
        "0001-01-01T00:00:00.000000Z",
        "0001-01-01T00:00:00+14:00",
        "2026-11-23T06:00:00",  # without a zone
        "9892-01-01T00:00:00Z",
        "2026-11-23T06:00:00." + "9" * 100_000 + "Z",
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_time_may_be_any(time: str) -> None:
    check(lease(renewTime=time, acquireTime=time))
    found = lease()
    found["metadata"]["creationTimestamp"] = time
    check(found)


@pytest.mark.parametrize("value", ["an identity", 7, True, ["x"], {"a": 1}, "\ud800", "x" * 100_000])
def test_a_holder_is_a_holder_whatever_it_is_called(value: object) -> None:
    check(lease(holderIdentity=value))
    assert records.holder_of(lease(holderIdentity=value))


@pytest.mark.parametrize("annotations", [7, "x", [], ["tenure/token"], {records.TOKEN: 7}, {records.METADATA: {}}])
def test_annotations_may_be_anything(annotations: object) -> None:
    check(lease(annotations))
    found = lease(annotations)
    found["metadata"]["labels"] = annotations
    check(found)
    check({**found, "spec": annotations})


@pytest.mark.parametrize(
    "written",
    [
        "",
        "x",
        "[]",
        '{"a": 1}',
        '{"a": null}',
        '{"a": "\\ud800"}',
        '{"a": "\\u0000"}',
        "[" * 100_000,
        '{"a": NaN}',
        "{",
    ],
    ids=lambda text: str(text)[:20],
)
def test_metadata_that_are_none_are_not_shown(written: str) -> None:
    found = lease({records.HOLDER: "ann", records.METADATA: written})
    assert records.metadata_of(found) is NO_METADATA
    check(found)


@pytest.mark.parametrize("text", ["9" * 18, str(10**18), str(TOKEN_MAX - 4)])
def test_a_high_token_rises_and_never_falls(text: str) -> None:
    found = lease({records.TOKEN: text, records.HOLDER: "ann"})
    for number in range(1, 4):
        found = records.acquired(found, f"bob#{number}", 15.0, {}, after=0, now=NOW)
        assert records.token_of(found) == int(text) + number


@pytest.mark.parametrize("text", [str(TOKEN_MAX), "9" * 19, "9" * 5_000])
@pytest.mark.parametrize("holder", ["ann", "another program", ""])
def test_a_token_that_cannot_rise_is_named(text: str, holder: str) -> None:
    found = lease({records.TOKEN: text, records.HOLDER: "ann"}, holderIdentity=holder)
    assert records.token_of(found) == TOKEN_MAX
    with pytest.raises(
        ConfigError, match=r"the token of the Lease 'x' can't rise any more: .*annotation tenure/token;"
    ):
        records.acquired(found, "bob#1", 15.0, {}, after=0, now=NOW)
    observations = Observations(SystemClock())
    observations.note("x", found)
    repaired = lease({records.TOKEN: "7", records.HOLDER: "ann"}, holderIdentity=holder)
    after = observations.newest_token("x")
    assert records.token_of(records.acquired(repaired, "bob#1", 15.0, {}, after=after, now=NOW)) < TOKEN_MAX


def test_a_token_rises_although_the_time_of_creation_cannot_be_read() -> None:
    found = lease({records.TOKEN: "41", records.HOLDER: "ann"})
    found["metadata"]["creationTimestamp"] = "yesterday"
    assert records.token_of(records.acquired(found, "bob#1", 15.0, {}, after=0, now=NOW)) == 42


def test_a_number_beyond_32_bits_is_the_highest() -> None:
    assert records.duration_of(lease(leaseDurationSeconds=1e300)) == records.DURATION_MAX
    assert records.token_of(lease(leaseTransitions=10**400)) == CREATED + records.TRANSITIONS_MAX


# --- credential commands -----------------------------------------------------------------------------------------


def _token(text: object) -> Json:
    return {"apiVersion": "client.authentication.k8s.io/v1", "status": {"token": text}}


def _expires(text: object) -> Json:
    found = _token("s3cret")
    found["status"]["expirationTimestamp"] = text
    return found


@pytest.mark.parametrize(
    "answer",
    [
        lambda: "[" * 100_000,
        lambda: json.dumps(_token(["s3cret"])),
        lambda: json.dumps(_token("s3cret\0")),
        lambda: json.dumps({**_token("s3cret"), "status": ["s3cret"]}),
        lambda: json.dumps(_expires("0001-01-01T00:00:00")),
        lambda: json.dumps(_expires(10**30)),
        lambda: json.dumps(_expires({"s3cret": 1})),
        lambda: json.dumps({**_token("s3cret"), "apiVersion": ["v1"]}),
    ],
)
def test_a_credential_of_another_form_is_refused_and_not_shown(answer: Callable[[], str]) -> None:
    command = Command("client.authentication.k8s.io/v1", ["get-token"], {})
    with pytest.raises(ConfigError, match="the credential command 'get-token' wrote no ExecCredential") as raised:
        _credential_in(answer().encode(), command)
    assert "s3cret" not in str(raised.value)


def test_a_credential_may_last_for_ever() -> None:
    command = Command("client.authentication.k8s.io/v1", ["get-token"], {})
    login, expires_at = _credential_in(json.dumps(_expires("9999-12-31T23:59:59Z")).encode(), command)
    assert login.token == Secret("s3cret")
    assert expires_at is not None
    assert expires_at > 250e9

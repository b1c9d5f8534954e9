"""Messages in NATS: every property survives its way through NATS headers, and each page is sorted right."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._queue.delivery_ends import noted
from tenure._queue.failures import Failure
from tenure._queue.message import Attempt
from tenure._queue.note_headers import SEQUENCE_MAX

pytest.importorskip("nats")

from tenure._backends.nats.errors import HeadersTooLong, TooLarge
from tenure._backends.nats.message_format import (
    ADDED,
    HEADERS,
    ID,
    LOCK_MAX,
    NATIVE_ID,
    NO_STATE,
    STATE,
    Properties,
    State,
    decode,
    encode,
    encode_to_fit,
    size_of,
    without_headers,
)
from tenure._backends.nats.messages import Found
from tenure._backends.nats.names import WORD_MAX, name_of, short_word_of, word_of
from tenure._backends.nats.receiving import deliveries_before, locked_for, sort
from tests.stores.ended import ABANDONED, AT_ABANDON, AT_DEATH, ENDED, ERROR, REJECTED

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
NAMES = st.text(st.characters(categories=["L", "N", "P"], exclude_characters="$"), min_size=1, max_size=30)
VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
FAILURES = st.none() | st.builds(Failure, TEXTS, TEXTS, TEXTS)
MOMENTS = st.floats(0.0, 4e9)
STATES = st.builds(
    State,
    sequence=st.integers(0, SEQUENCE_MAX),
    enqueued_at=MOMENTS,
    deliveries=st.integers(0, 100),
    history=st.lists(
        st.builds(Attempt, st.integers(1, 9), MOMENTS, st.sampled_from(["abandoned", "expired"]), FAILURES), max_size=3
    ).map(tuple),
    reason=st.none() | TEXTS,
    description=TEXTS,
    dead_at=MOMENTS,
    error=FAILURES,
    locked_for=st.floats(0.0, LOCK_MAX),
    lock=st.text("0123456789abcdef", max_size=16),
)


def over_the_wire(headers: dict[str, str]) -> dict[str, str]:
    """Return headers as nats-py writes and reads them: values are stripped, and end at a line break."""
    raw = b"".join(f"{name.strip()}: {value.strip()}\r\n".encode() for name, value in headers.items())
    assert raw.count(b"\r\n") == len(headers), "a line break in a header"
    found = {}
    for line in raw.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().decode("ascii")] = value.strip().decode()
    return found


@given(
    st.none() | TEXTS,
    st.dictionaries(TEXTS, VALUES, max_size=4),
    st.none() | NAMES,
    st.none() | TEXTS,
    st.just(math.inf) | st.floats(0.1, 1e6),
    st.just(NO_STATE) | STATES,
)
def test_every_property_survives(
    id_: str | None,
    headers: dict[str, str | int | float | bool],
    reply_to: str | None,
    correlation_id: str | None,
    expires_in: float,
    state: State,
) -> None:
    properties = Properties(id_, headers, reply_to, correlation_id, 0.0, expires_in, state)
    for once in (None, id_, "another name"):
        decoded = decode(over_the_wire(encode(properties, once)))
        if id_ is None and once is not None:
            decoded = replace(decoded, id=None)
        assert decoded == properties
        assert {name: type(value) for name, value in decoded.headers.items()} == {
            name: type(value) for name, value in headers.items()
        }


def test_plain_messages_have_no_headers_and_plain_headers_are_native() -> None:
    assert encode(Properties()) == {}
    assert encode(Properties("17", {"tenant": "blue"}), "17") == {NATIVE_ID: "17", "tenant": "blue"}


@given(st.dictionaries(st.sampled_from([STATE, HEADERS, ID, NATIVE_ID, "Tenure-Due", "x"]), st.text(max_size=40)))
def test_headers_of_other_programs_never_fail(headers: dict[str, str]) -> None:
    found = decode(headers)
    assert found.headers.keys() <= {"x"} or HEADERS in headers


def test_what_another_program_wrote_wrong_does_not_cost_the_rest() -> None:
    found = decode({NATIVE_ID: "17", "tenant": "blue", "Tenure-Reply-To": "no $name", "Tenure-Correlation-Id": "c"})
    assert (found.id, dict(found.headers), found.reply_to) == ("17", {"tenant": "blue"}, None)


@pytest.mark.parametrize(
    "written",
    ['{"sequence": -1}', '{"history": [1]}', '{"history": [{"number": 1}]}', '{"deliveries": "3"}', "[]", '{"no": 1}'],
)
def test_a_state_that_tenure_can_not_have_written_is_ignored(written: str) -> None:
    assert decode({STATE: written}).state == NO_STATE


def test_what_becomes_of_a_message_is_written_as_ever() -> None:
    """Releases of before read it, too."""
    state = noted(State(sequence=7, enqueued_at=1.0), AT_ABANDON, 5.0, fills=True)
    assert encode(Properties("x", state=state))[STATE] == (
        f'{{"deliveries": 2, "history": [{ENDED}, {ABANDONED}], "sequence": 7, "enqueued_at": 1.0}}'
    )
    assert encode(Properties("x", state=noted(state, AT_DEATH, 6.0, fills=True)))[STATE] == (
        f'{{"deliveries": 3, "history": [{ENDED}, {ABANDONED}, {REJECTED}], "reason": "bad", '
        f'"description": "why", "dead_at": 6.0, "error": {ERROR}, "sequence": 7, "enqueued_at": 1.0}}'
    )


def test_the_history_is_shortened_until_the_message_fits() -> None:
    error = Failure("ValueError", "m" * 4_000, "t" * 16_000)
    state = State(history=tuple(Attempt(number, 1.0, "abandoned", error) for number in range(50)), description="why")
    body = b"x" * 1_000_000
    headers = encode_to_fit(Properties("x", {"tenant": "blue"}, state=state), body, 1_048_576)
    assert size_of(headers) + len(body) <= 1_048_576
    decoded = decode(over_the_wire(headers))
    assert (decoded.id, dict(decoded.headers), decoded.state.description) == ("x", {"tenant": "blue"}, "why")
    assert decoded.state.history  # as much of it as there is room for


@pytest.mark.parametrize("letter", ["m", "ü", "\x01", "😀"])
def test_the_history_is_shortened_until_the_headers_fit(letter: str) -> None:
    error = Failure("ValueError", letter * 4_000, letter * 16_000)
    state = State(
        history=tuple(Attempt(number, 1.0, "abandoned", error) for number in range(1, 11)),
        reason=letter * 255,
        description=letter * 4_000,
        error=error,
    )
    headers = encode_to_fit(Properties("x", {"tenant": "blue"}, state=state), b"", 64 * 2**20)
    assert size_of(headers) <= 65_535 - ADDED
    assert decode(over_the_wire(headers)).state.reason == state.reason


def test_headers_of_which_the_least_does_not_fit_are_told_from_bodies() -> None:
    state = State(reason="r", description="d" * 200)
    least = size_of(encode(Properties("x", {"h": "h"}, state=replace(state, description=""))))
    longest = Properties("x", {"h": "h" * (65_535 - ADDED - least + 1)}, state=state)
    headers = encode_to_fit(longest, b"", 2**20)
    assert size_of(headers) == 65_535 - ADDED
    assert encode_to_fit(longest, b"x" * 10, 65_535 + 10) == headers
    with pytest.raises(TooLarge) as too_large:
        encode_to_fit(longest, b"x" * 11, 65_535 + 10)
    assert too_large.type is TooLarge
    longer = replace(longest, headers={"h": longest.headers["h"] + "h"})  # type: ignore[operator]
    with pytest.raises(HeadersTooLong):
        encode_to_fit(longer, b"", 2**20)
    kept = encode_to_fit(without_headers(longer), b"", 2**20)
    assert "65,535 bytes" in decode(over_the_wire(kept)).state.description


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200))
def test_a_name_is_one_word(name: str) -> None:
    word = short_word_of(name)
    assert len(word) <= WORD_MAX
    assert not set(word) & set(" .*>/\\\t\r\n")
    assert name_of(word_of(name)) == name


# --- sorting a page ----------------------------------------------------------------------------------------------

ACK_WAIT, NOW = 10.0, 1_000.0


def found(*, delivered: int = 1, due: float = 0.0, expires_in: float = math.inf, **state: object) -> Found:
    properties = Properties(due=due, expires_in=expires_in, state=State(**state))  # type: ignore[arg-type]
    return Found("q", "tenure.q.m.k", 7, NOW - 100.0, b"", properties, "reply", delivered)


@pytest.mark.parametrize(
    ("one", "place"),
    [
        (found(), "deliverable"),
        (found(delivered=2), "again"),  # a lock has ended
        (found(due=NOW + 5), "put_off"),
        (found(due=NOW - 5), "again"),  # so that no later delivery is taken for one that put it off
        (found(delivered=2, due=NOW + 5), "put_off"),
        (found(expires_in=50.0), "expired"),
        (found(expires_in=50.0, due=NOW + 5), "expired"),
        (found(expires_in=50.0, locked_for=10.0), "put_off"),  # under a lock, no message expires
        (found(expires_in=50.0, locked_for=10.0, delivered=2), "expired"),
        (found(locked_for=10.0), "put_off"),
        (found(locked_for=10.0, delivered=2), "again"),
        (found(locked_for=30.0, delivered=2), "put_off"),  # who pulled it may have died before it was put off
        (found(locked_for=30.0, delivered=4), "again"),
        (found(reason="bad"), "marked"),
        (found(reason="bad", delivered=3, locked_for=10.0), "marked"),
    ],
)
def test_a_page_is_sorted(one: Found, place: str) -> None:
    result = sort([one], ACK_WAIT, NOW)
    assert {name for name in result._fields if getattr(result, name)} == {place}


def test_a_message_is_put_off_for_what_is_left() -> None:
    page = [found(due=NOW + 5), found(locked_for=30.0), found(locked_for=30.0, delivered=2)]
    assert [left for _, left in sort(page, ACK_WAIT, NOW).put_off] == [5.0, 30.0, ACK_WAIT]
    assert locked_for(found(), ACK_WAIT) == 0.0


def test_only_deliveries_to_somebody_count() -> None:
    assert deliveries_before(found()) == 0
    assert deliveries_before(found(delivered=3)) == 1  # it was handed out once; then claims failed
    assert deliveries_before(found(delivered=3, due=NOW)) == 0
    assert deliveries_before(found(delivered=3, locked_for=10.0, deliveries=4)) == 4
    assert deliveries_before(found(delivered=2, deliveries=4)) == 5
    assert deliveries_before(found(delivered=9, deliveries=4)) == 5


def test_a_message_without_headers_has_no_properties() -> None:
    assert decode(None) == Properties() == decode({})

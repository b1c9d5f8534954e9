"""The slots of cron expressions and intervals: in order, wherever one begins to look, and right when clocks change."""

from __future__ import annotations

import itertools
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure._checks import LONGEST
from tenure._schedule import slots as module
from tenure._schedule.plan import EXPRESSION_MAX, Plan, Record, plan_of
from tenure._schedule.slots import first_after, id_of, newest, shown, slots_of
from tenure.errors import BackendNotInstalled, ConfigError

EXPRESSIONS = (
    "* * * * *",
    "*/15 * * * *",
    "*/15 2 * * *",
    "0 3 * * *",
    "30 2 * * *",
    "0,30 1-3 * * *",
    "0 */2 * * *",
    "0 0 * * *",
    "15 0 1 * *",
    "0 12 * * MON-FRI",
    "0 0 L * *",
    "59 23 31 12 *",
    "*/20 * * * * *",
)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Africa/Cairo", "Australia/Lord_Howe", "Asia/Kathmandu")
DAY = 86_400.0


def plan(every: object = "0 3 * * *", timezone: str = "UTC", missed: str = "once", missed_after: object = 60.0) -> Plan:
    return plan_of(every, timezone, missed, missed_after)


def local(expression: str, zone: str, begin: str, count: int) -> list[str]:
    """Return the first slots after *begin*, as they are shown in *zone*."""
    slots = slots_of(plan(expression, zone))
    moment = datetime.fromisoformat(begin).timestamp()
    return [shown(slot, slots.zone).isoformat() for slot in itertools.islice(slots.after(moment), count)]


moments = st.floats(1.5e9, 2.0e9)
# the hours around changes of the clocks, too
changes = st.sampled_from(
    [
        datetime.fromisoformat(text).timestamp()
        for text in (
            "2026-03-29T00:00+00:00",
            "2026-10-25T00:00+00:00",
            "2026-04-23T21:00+00:00",
            "2026-10-29T20:00+00:00",
            "2026-11-01T05:00+00:00",
            "2026-03-08T06:00+00:00",
            "2026-04-04T14:00+00:00",
        )
    ]
)
near_changes = st.builds(float.__add__, changes, st.floats(-2 * 3600, 4 * 3600))
begins = st.one_of(moments, near_changes)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES), begins)
def test_slots_come_in_order_and_after_the_moment(expression: str, zone: str, begin: float) -> None:
    found = list(itertools.islice(slots_of(plan(expression, zone)).after(begin), 30))
    assert begin < found[0]
    assert all(one < other for one, other in itertools.pairwise(found))
    assert all(one == int(one) for one in found)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXPRESSIONS[:11]), st.sampled_from(ZONES), begins, st.floats(0.0, 5 * 3600.0))
def test_the_slots_do_not_depend_on_where_one_begins(expression: str, zone: str, begin: float, later: float) -> None:
    slots = slots_of(plan(expression, zone))
    until = begin + 9 * 3600.0
    whole = [one for one in itertools.takewhile(lambda slot: slot <= until, slots.after(begin)) if one > begin + later]
    assert whole == list(itertools.takewhile(lambda slot: slot <= until, slots.after(begin + later)))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EXPRESSIONS[:11]), st.sampled_from(ZONES), begins, st.floats(0.0, 2 * DAY), st.integers(1, 7))
def test_the_newest_are_the_last_of_all(expression: str, zone: str, begin: float, span: float, most: int) -> None:
    slots = slots_of(plan(expression, zone))
    every = list(itertools.takewhile(lambda slot: slot <= begin + span, slots.after(begin)))
    assert newest(slots, begin, begin + span, most) == every[-most:]


@settings(max_examples=200)
@given(st.integers(100, 10**9), st.floats(1.0e9, 3.0e9))
def test_intervals_count_from_the_epoch(milliseconds: int, begin: float) -> None:
    every = milliseconds / 1_000
    found = list(itertools.islice(slots_of(plan(every)).after(begin), 3))
    assert begin < found[0] <= begin + every + 0.001
    assert [round(one * 1_000) % milliseconds for one in found] == [0, 0, 0]
    assert newest(slots_of(plan(every)), begin, found[-1], 2) == found[-2:]


def test_a_fixed_hour_that_is_left_out_comes_right_after_it() -> None:
    assert local("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00+01:00", 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
    ]
    assert local("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00+02:00", 2) == [
        "2026-04-24T01:00:00+03:00",
        "2026-04-25T00:00:00+03:00",
    ]


def test_a_fixed_hour_that_is_repeated_comes_once() -> None:
    assert local("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00+02:00", 2) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]
    # also if one begins to look in the second pass, before the time that is over
    assert local("30 2 * * *", "Europe/Berlin", "2026-10-25T02:15+01:00", 1) == ["2026-10-26T02:30:00+01:00"]


def test_a_frequent_one_comes_in_both_passes() -> None:
    found = local("*/30 * * * *", "Europe/Berlin", "2026-10-25T01:45+02:00", 6)
    assert [one[11:] for one in found] == [
        "02:00:00+02:00",
        "02:30:00+02:00",
        "02:00:00+01:00",
        "02:30:00+01:00",
        "03:00:00+01:00",
        "03:30:00+01:00",
    ]


@pytest.mark.parametrize(
    ("nickname", "same"),
    [("@hourly", "0 * * * *"), ("@Daily", "0 0 * * *"), ("@weekly", "0 0 * * 0"), ("@yearly", "0 0 1 1 *")],
)
def test_a_nickname_is_an_expression(nickname: str, same: str) -> None:
    assert plan(nickname) == plan(same)
    assert plan(f"  {same.replace(' ', '   ')} ") == plan(same)


def test_timedeltas_are_seconds() -> None:
    assert plan(timedelta(minutes=5)) == plan(300) == plan(300.0)
    assert isinstance(plan(300).every, float)


def test_the_newest_slot_of_a_long_time_is_found_soon() -> None:
    slots, now = slots_of(plan("* * * * * *")), 1.8e9
    begun = time.process_time()
    assert len(newest(slots, now - 300 * DAY, now, 100)) == 100
    assert time.process_time() - begun < 1.0


def test_the_newest_slot_before_a_long_pause_is_found_soon() -> None:
    """Each second of January, looked for in December: a span that is large enough holds millions."""
    slots = slots_of(plan("* * * * 1 *"))
    january, december = (datetime(2026, month, 15, tzinfo=UTC).timestamp() for month in (1, 12))
    begun = time.process_time()
    found = newest(slots, january, december, 100)
    assert time.process_time() - begun < 1.0
    assert found[-1] == datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    assert [other - one for one, other in itertools.pairwise(found)] == [1.0] * 99


def test_ids_and_moments_of_slots() -> None:
    slot = datetime(2026, 10, 25, 1, 30, tzinfo=UTC).timestamp()
    assert id_of("tidy", slot) == "tidy@2026-10-25T01:30:00Z"
    assert id_of("tidy", slot + 0.1) == "tidy@2026-10-25T01:30:00.100Z"
    assert shown(slot, ZoneInfo("Europe/Berlin")).isoformat() == "2026-10-25T02:30:00+01:00"
    assert shown(slot + 0.1, UTC).isoformat() == "2026-10-25T01:30:00.100000+00:00"


@pytest.mark.parametrize(
    ("every", "timezone", "said"),
    [
        ("0 3 * *", "UTC", "five fields"),
        ("61 * * * *", "UTC", "Bad minute"),
        ("0 0 30 2 *", "UTC", "Bad day-of-month"),
        ("* * */20 * 1L", "UTC", "no moment in the next 50 years"),
        ("0 3 * * *", "Europe/Berlim", "no time zone 'Europe/Berlim'"),
        ("0 3 * * *", "Europe", "no time zone 'Europe'"),
        ("0 3 * * *", "../../etc/passwd", "no time zone"),
        ("0 3 * * *", "", "timezone must not be empty"),
        ("@reboot", "UTC", "five fields"),
        ("", "UTC", "five fields"),
        ("0 0 ٣ * *", "UTC", "not ASCII"),
        ("0," * 60 + "0 * * * *", "UTC", f"may have {EXPRESSION_MAX}"),
        (0, "UTC", "at least 0.1"),
        (-5, "UTC", "at least 0.1"),
        (float("nan"), "UTC", "a cron expression, a timedelta"),
        (float("inf"), "UTC", "a cron expression, a timedelta"),
        (True, "UTC", "a cron expression, a timedelta"),
        (None, "UTC", "a cron expression, a timedelta"),
        (0.10005, "UTC", "whole milliseconds"),
        (60, "Europe/Berlin", "for cron expressions"),
    ],
)
def test_what_is_no_plan_is_refused(every: object, timezone: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slots_of(plan(every, timezone))


@pytest.mark.parametrize("missed", ["latest", "", None, 1])
def test_an_unknown_way_to_treat_missed_slots_is_refused(missed: object) -> None:
    with pytest.raises(ConfigError, match="missed must be one of 'skip', 'once', 'all', not"):
        plan_of("0 3 * * *", "UTC", missed, 60.0)


@pytest.mark.parametrize("missed_after", [0, -1, "60", None, float("inf")])
def test_a_bad_limit_is_refused(missed_after: object) -> None:
    with pytest.raises(ConfigError, match="missed_after must be"):
        plan(missed_after=missed_after)


def test_without_cronsim_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    module.slots_of.cache_clear()
    with pytest.raises(BackendNotInstalled, match=r"pip install 'tenure\[cron\]'"):
        slots_of(plan("1 2 3 4 *"))
    assert first_after(slots_of(plan(60)), 0.0) == 60.0


# --- what is kept ---


def kept(**changes: object) -> str:
    """Return the text of a record in which somebody has changed some values."""
    fields = json.loads(Record(Plan(60.0), 1.0).encoded())
    for name, value in changes.items():
        (fields["plan"] if name in fields["plan"] else fields)[name] = value
    return json.dumps(fields)


def test_a_record_without_changes_is_read() -> None:
    assert Record.decoded(kept(), "tidy") == Record(Plan(60.0), 1.0)


@pytest.mark.parametrize("every", [0.1, 60.0, "* * * * *"])
def test_there_is_no_slot_after_the_latest_time(every: str | float) -> None:
    assert first_after(slots_of(plan(every)), LONGEST) is None
    assert list(slots_of(plan(every)).after(LONGEST - 0.05)) in ([], [LONGEST])


@given(
    st.sampled_from((*EXPRESSIONS, 60.0, 0.1)),
    st.sampled_from(["skip", "once", "all"]),
    st.floats(0, 3e9),
    st.one_of(st.none(), st.floats(0, 3e9)),
    st.booleans(),
)
def test_a_record_survives_its_round_trip(
    every: str | float, missed: str, settled: float, last: float | None, paused: bool
) -> None:
    record = Record(plan(every, missed=missed), settled, last, paused)
    assert Record.decoded(record.encoded(), "tidy") == record
    assert len(record.encoded()) <= 1_000
    assert record.encoded().isascii()


def test_the_longest_record_has_a_thousand_characters_at_most() -> None:
    expression = "0" + ",0" * 45 + " * * * *"
    zone = max(available_timezones(), key=len)
    assert len(expression) <= EXPRESSION_MAX
    assert len(Record(plan(expression, zone, missed_after=1e11 / 3), 1e11 / 3, 1e11 / 3).encoded()) <= 1_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"format":2}',
        '{"format":1}',
        '{"format":1,"plan":{"every":1},"more":1}',
        '{"format":1,"plan":{"every":[]},"settled_until":1}',
        '{"format":1,"plan":{"every":1},"settled_until":"x"}',
        kept(every=-1),  # slots would be looked for without an end
        kept(every=0.0001),
        kept(every=1e300),
        kept(every=True),
        kept(every=[60]),
        kept(timezone=7),
        kept(missed="never"),
        kept(missed_after=-1.0),
        kept(settled_until=1e300),
        kept(settled_until=-1.0),
        kept(settled_until=True),
        kept(last="now"),
        kept(paused=1),
        kept(more=1),
        kept()[:-1],
        kept().replace("60.0", "Infinity"),
        kept().replace("1.0", "NaN"),
        "[" * 100_000,
    ],
)
def test_a_record_that_can_not_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="the schedule 'tidy' what this tenure can't read"):
        Record.decoded(text, "tidy")

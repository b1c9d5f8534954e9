"""The verdict on a message when its handler has ended: each entry of the table."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tenure._queue.outcomes import RULES, Ending, Reason

TABLE = """
              returned  cancelled             raised             not begun          never begins
none          success   failure error         failure error      give back error    give back error, ends
closing       success   give back             failure error      give back error    give back error, ends
drain         success   give back             failure error      give back error    give back error, ends
leave         success   give back             failure error      give back error    give back error, ends
left behind   success   let expire overrun    failure error      give back error    give back error, ends
denied        success   let expire lock lost  let expire error   let expire error   let expire error, ends
unanswered    success   failure lock lost     failure error      give back error    give back error, ends
stalled       success   give back lock lost   give back error    give back error    give back error, ends
max_hold      success   failure lock lost     failure error      give back error    give back error, ends
too late      success   let expire lock lost  let expire error   let expire error   let expire error, ends
"""


def entries() -> list[Any]:
    head, *rows = TABLE.strip("\n").splitlines()
    names = [ending.value for ending in Ending if ending is not Ending.INBOX_UNANSWERED]
    starts = [head.index(name) for name in names]
    found = []
    for row in rows:
        reason = Reason(row[: starts[0]].strip())
        for name, start, end in zip(names, starts, [*starts[1:], None], strict=True):
            found.append(pytest.param(reason, Ending(name), row[start:end].strip(), id=f"{reason.value}-{name}"))
    return found


@pytest.mark.parametrize(("reason", "ending", "expected"), entries())
def test_each_entry(reason: Reason, ending: Ending, expected: str) -> None:
    rule = RULES[reason, ending]
    reports = "" if rule.reports.value == "nothing" else f" {rule.reports.value}"
    assert f"{rule.disposition.value}{reports}{', ends' if rule.ends else ''}" == expected


@pytest.mark.parametrize("reason", Reason)
def test_a_message_without_a_handler_call_is_given_back(reason: Reason) -> None:
    rule = RULES[reason, Ending.INBOX_UNANSWERED]
    assert (rule.disposition.value, rule.reports.value, rule.ends) == ("give back", "nothing", False)


def test_the_table_is_complete() -> None:
    assert set(RULES) == set(product(Reason, Ending))


@pytest.mark.parametrize(
    ("why", "closing", "left_behind", "over", "reason"),
    [
        (None, False, False, False, Reason.NONE),
        (None, False, False, True, Reason.NONE),
        (None, True, False, False, Reason.CLOSING),
        (None, True, True, False, Reason.LEFT_BEHIND),
        (None, False, True, False, Reason.LEFT_BEHIND),
        ("drain", True, False, True, Reason.DRAIN),
        ("drain", True, True, True, Reason.LEFT_BEHIND),
        ("leave", False, False, True, Reason.LEAVE),
        ("leave", False, True, False, Reason.LEFT_BEHIND),
        ("denied", False, False, True, Reason.DENIED),
        ("denied", False, True, True, Reason.DENIED),
        ("unanswered", False, False, False, Reason.UNANSWERED),
        ("unanswered", False, False, True, Reason.TOO_LATE),
        ("stalled", False, False, False, Reason.STALLED),
        ("stalled", False, True, False, Reason.LEFT_BEHIND),
        ("stalled", False, False, True, Reason.TOO_LATE),
        ("max_hold", False, False, False, Reason.MAX_HOLD),
        ("max_hold", False, True, False, Reason.LEFT_BEHIND),
        ("max_hold", True, True, True, Reason.TOO_LATE),
    ],
)
def test_the_order_of_reasons(why: Any, closing: bool, left_behind: bool, over: bool, reason: Reason) -> None:
    assert Reason.of(why, closing=closing, left_behind=left_behind, over=over) is reason

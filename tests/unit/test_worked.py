"""Which kinds of requests have worked: so whether one that is refused for lack of rights is tried again."""

from __future__ import annotations

import pytest

from tenure._worked import Kind, Worked


def test_at_first_nothing_was_permitted() -> None:
    worked = Worked()
    assert not worked
    assert not any(map(worked.was_permitted, Kind))


@pytest.mark.parametrize(
    ("kind", "permitted"),
    [
        (Kind.READ, {Kind.READ}),
        (Kind.LEAD, {Kind.READ, Kind.LEAD}),
        (Kind.QUEUE, {Kind.READ, Kind.QUEUE}),
    ],
)
def test_what_was_permitted_is_of_one_kind_and_reading(kind: Kind, permitted: set[Kind]) -> None:
    worked = Worked()
    worked.note(kind)
    assert worked
    assert set(filter(worked.was_permitted, Kind)) == permitted

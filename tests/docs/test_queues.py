"""The page of queues names every header that no sender may set."""

from __future__ import annotations

import pytest

from tenure._queue.headers import RESERVED_NAMES, RESERVED_PREFIXES
from tests.docs.pages import text_of

BEGIN = "These names of headers are reserved"


@pytest.mark.parametrize("name", [*RESERVED_PREFIXES, *sorted(RESERVED_NAMES)])
def test_each_reserved_header_is_named(name: str) -> None:
    paragraph = text_of("docs/queues.md").partition(BEGIN)[2].partition("\n\n")[0]
    assert f"`{name}`" in paragraph


def test_no_other_is_named() -> None:
    paragraph = text_of("docs/queues.md").partition(BEGIN)[2].partition("\n\n")[0]
    assert paragraph.count("`") == 2 * len([*RESERVED_PREFIXES, *RESERVED_NAMES]) + 2  # and the error

"""What foreign clients store, byte for byte but for ids, and what we store beside them: files in ``golden``.

``TENURE_UPDATE_GOLDEN=1`` rewrites them. They are what ``docs/interop.md`` describes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.interop.contest import Contest
from tests.interop.handovers import until_places
from tests.interop.stores import PAIRS, Store, slug

GOLDEN = Path(__file__).with_name("golden")
each_client = pytest.mark.parametrize(("store", "client"), PAIRS, ids=[client for _, client in PAIRS])


@each_client
def test_both_store_what_they_stored_before(store: type[Store], client: str, tmp_path: Path) -> None:
    with Contest(store, client, tmp_path) as contest:
        found = {}
        for side, contestant in (("foreign", contest.foreign()), ("ours", contest.ours())):
            name = f"golden-{side}-{slug(client)}"
            contestant.stand(name)
            contestant.until_leads(name)
            leads = contest.store.stored(name, contestant.contestant)
            contestant.release(name)
            contestant.until_released(name)
            until_places(contest.store, name, 0)  # Curator's selector says so before it has deleted its node
            found[side] = {"leads": leads, "released": contest.store.stored(name, contestant.contestant)}
    assert places(found["foreign"]["leads"]) <= places(found["ours"]["leads"])
    file = GOLDEN / f"{slug(client)}.json"
    if os.environ.get("TENURE_UPDATE_GOLDEN"):
        file.write_text(json.dumps(found, indent=2) + "\n")
    expected: dict[str, Any] = json.loads(file.read_text())
    assert found == expected, "if this is as wanted: TENURE_UPDATE_GOLDEN=1, and read the diff"


def places(stored: list[dict[str, Any]]) -> set[str]:
    """Return the names of keys and nodes, or of the fields of a Lease."""
    return {name for each in stored for name in each.get("spec") or [each.get("key") or each["name"]]}

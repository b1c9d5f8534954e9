"""What foreign clients store, byte for byte but for ids, and what we store beside them: files in ``golden``.

Where no real client runs, in ``client-go.json``, the foreign part is what a double of its rules stores, see
``programs/client_go.py``. ``TENURE_UPDATE_GOLDEN=1`` rewrites the files. They are what ``docs/interop.md`` describes.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tenure._backends.kubernetes import leases as kubernetes
from tenure._backends.kubernetes.records import micro_time
from tenure._election.store import LeaseStore
from tenure._lease import NO_METADATA, Grant, Granted, Metadata, Released
from tenure._registry import load
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.interop.contest import Contest
from tests.interop.handovers import until_places
from tests.interop.stored import in_etcd
from tests.interop.stores import LONG, PAIRS, EtcdStore, KubernetesStore, Store, ZooKeeperStore, slug
from tests.servers import shared
from tests.servers.etcd import Etcd

GOLDEN = Path(__file__).with_name("golden")
METADATA = {"url": 'http://ann/ü%2F"'}
MOMENTS = [datetime(2026, 11, 23, 6, tzinfo=UTC) + number * timedelta(seconds=2.5) for number in range(8)]
OURS = (
    ("ours-etcd-election", EtcdStore, "kind=election", "election/b%", "election%2Fb%25"),
    ("ours-etcd-lock", EtcdStore, "kind=lock", "lock/b%", "lock%2Fb%25"),
    ("ours-zookeeper-latch", ZooKeeperStore, "dialect=latch", "latch/b%", "latch%2Fb%25"),
    ("ours-zookeeper-lock", ZooKeeperStore, "dialect=lock", "lock/b%", "lock%2Fb%25"),
    ("ours-zookeeper-kazoo", ZooKeeperStore, "dialect=kazoo", "kazoo/b%", "kazoo%2Fb%25"),
    ("ours-kubernetes", KubernetesStore, "", "lease", "lease"),
)
"""Files, each with the store, the option of its URL, an election's name, and the name that the store has of it."""
each_client = pytest.mark.parametrize(("store", "client"), PAIRS, ids=[client for _, client in PAIRS])


@each_client
def test_both_store_what_they_stored_before(store: type[Store], client: str, tmp_path: Path) -> None:
    with Contest(store, client, tmp_path) as contest:
        found = {}
        for side, contestant in (("foreign", contest.foreign()), ("ours", contest.ours())):
            name = f"golden-{side}-{slug(client)}"
            contestant.stand(name)
            token = contestant.until_leads(name)
            known = {name: "NAME", contestant.contestant: "<contestant>", token: "<token>"}
            if store is KubernetesStore:
                known["0"] = "<token>"  # of a new Lease until its first renewal, which may come before we read it
            leads = contest.store.stored(name, known)
            contestant.release(name)
            contestant.until_released(name)
            until_places(contest.store, name, 0)  # Curator's selector says so before it has deleted its node
            found[side] = {"leads": leads, "released": contest.store.stored(name, known)}
    assert places(found["foreign"]["leads"]) <= places(found["ours"]["leads"])
    compare(slug(client), found)


def places(stored: list[dict[str, Any]]) -> set[str]:
    """Return the names of keys and nodes, or of the fields of a Lease."""
    return {name for each in stored for name in each.get("spec") or [each.get("key") or each["name"]]}


def compare(file_name: str, found: dict[str, Any]) -> None:
    """Compare what was *found* with a file."""
    file = GOLDEN / f"{file_name}.json"
    if os.environ.get("TENURE_UPDATE_GOLDEN"):
        file.write_text(json.dumps(found, indent=2) + "\n")
    expected: dict[str, Any] = json.loads(file.read_text())
    assert found == expected, "if this is as wanted: TENURE_UPDATE_GOLDEN=1, and read the diff"


@pytest.mark.parametrize(
    ("file_name", "kind", "option", "name", "stored_name"), OURS, ids=[file_name for file_name, *_ in OURS]
)
async def test_each_verb_of_ours_stores_what_it_stored_before(
    file_name: str, kind: type[Store], option: str, name: str, stored_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With metadata, after a renewal, a request to resign, a release, and acquisitions by the same and another one."""
    moments = iter(MOMENTS)
    monkeypatch.setattr(kubernetes, "_wall_clock", lambda: next(moments))  # of other stores, nothing shows the time
    known = {micro_time(moment): micro_time(moment) for moment in MOMENTS}
    found = {}
    with closing(kind()) as store:
        async with opened(store.url(option)) as leases:

            async def acquire(step: str, holder: str, metadata: Metadata = NO_METADATA) -> Grant:
                grant = await granted(leases, name, holder, metadata)
                known[str(grant.token)] = f"<token of {step}>"
                found[step] = store.stored(stored_name, known)
                return grant

            ann = await acquire("ann", "ann", METADATA)
            assert await leases.renew([ann], LONG) == [Granted(ann)]
            found["renewed"] = store.stored(stored_name, known)
            assert await leases.ask_to_resign(name)
            found["asked to resign"] = store.stored(stored_name, known)
            assert await leases.release(ann) == Released(ann)
            found["released"] = store.stored(stored_name, known)
            assert isinstance(await leases.release(await acquire("ann again", "ann")), Released)
            assert isinstance(await leases.release(await acquire("bob", "bob")), Released)
    compare(file_name, found)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Any]:
    """Yield the leases of the store at *url*."""
    parsed = Url.parse(url)
    backend = load(parsed).open(parsed)
    try:
        yield backend.leases
    finally:
        await backend.close()


async def granted(leases: LeaseStore, name: str, holder: str, metadata: Metadata = NO_METADATA) -> Grant:
    answer = await leases.acquire(name, holder, LONG, metadata)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def test_ours_ends_a_place_on_etcd_for_good_as_before() -> None:
    """A request to enter that got no answer may be executed later; a fence for its lease prevents that."""
    server = shared(Etcd)
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(f"etcd://{proxy.host}:{proxy.port}/?prefix=fenced/") as leases,
    ):
        other = await granted(leases, "other", "ann")  # in the same session
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await leases.acquire("ended", "ann", LONG)
        proxy.heal()
        await leases.withdraw("ended", "ann")
        found = in_etcd(server, "fenced/", {str(other.token): "<token>"})
        await leases.release(other)
    compare("ours-etcd-fence", {"ended": found})

"""The Roles of docs/kubernetes.md and its example: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("yaml")

import yaml

import tenure
from tenure.events import CampaignFailed, Event, StandingBy, TermBegan
from tests.docs.pages import ROOT, commands
from tests.durations import until
from tests.servers import Kubernetes, patient, private
from tests.stores.rights import TTL, Act, acting, lead, outlasts, refused

NAME = "nightly-report"
"""The election of the example."""


@pytest.fixture
def server() -> Iterator[Kubernetes]:
    with private(Kubernetes) as own:
        yield own


def roles_in(documents: str) -> Iterable[dict[str, Any]]:
    """Yield the rights on Leases of the Roles in YAML, as the double takes them."""
    for one in yaml.safe_load_all(documents):
        for rule in one.get("rules", ()) if one["kind"] == "Role" else ():
            assert rule["apiGroups"] == ["coordination.k8s.io"]
            assert rule["resources"] == ["leases"]
            names = {"names": rule["resourceNames"]} if "resourceNames" in rule else {}
            yield {"verbs": rule["verbs"], **names}


CANDIDATE = list(roles_in((ROOT / "examples" / "kubernetes" / "rbac.yaml").read_text(encoding="utf-8")))
OBSERVER = list(roles_in(commands("docs/kubernetes.md", "Rights", "apiVersion")))


def test_the_role_of_the_page_only_looks() -> None:
    assert OBSERVER == [{"verbs": ["get", "list", "watch"]}]


async def test_a_candidate_leads_its_election(server: Kubernetes) -> None:
    server.set(roles=CANDIDATE)
    async with acting(server.url) as backend:
        assert await lead(backend, NAME) < await lead(backend, NAME)
        assert await backend.election(NAME).leader() is None


async def test_an_observer_sees_leaders(server: Kubernetes) -> None:
    async with acting(server.url) as backend:
        await lead(backend, NAME)
    server.set(roles=OBSERVER)
    async with acting(server.url) as backend:
        assert NAME in await backend.leaders()
        assert await backend.election(NAME).leader() is None


REFUSED: dict[str, tuple[list[dict[str, Any]], Act, str]] = {
    "a candidate leads another name": (CANDIDATE, lambda backend: lead(backend, "other"), "get"),
    "a candidate ends another term": (CANDIDATE, lambda backend: backend.election("other").ask_to_resign(), "get"),
    "a candidate lists": (CANDIDATE, lambda backend: backend.leaders(), "list"),
    "an observer leads": (OBSERVER, lambda backend: lead(backend, NAME), "update"),
    "an observer leads a new name": (OBSERVER, lambda backend: lead(backend, "fresh"), "create"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused_with_the_verb(server: Kubernetes, what: str) -> None:
    roles, act, verb = REFUSED[what]
    async with acting(server.url) as backend:
        await lead(backend, NAME)
    server.set(roles=roles)
    async with acting(server.url) as backend:
        await refused(backend, act, f"'{verb}'", "leases")


@pytest.mark.parametrize(("name", "verb"), [(NAME, "update"), ("fresh", "create")])
async def test_a_campaign_without_the_right_fails_although_reading_has_worked(
    server: Kubernetes, name: str, verb: str
) -> None:
    async with acting(server.url) as backend:
        await lead(backend, NAME)
    server.set(roles=OBSERVER)
    async with acting(server.url) as backend:
        assert NAME in await backend.leaders()
        assert await backend.election(name).leader() is None
        await refused(backend, lambda backend: lead(backend, name), f"'{verb}'", "leases")


async def test_an_observer_can_not_ask_a_leader_to_resign(server: Kubernetes) -> None:
    async with acting(server.url) as candidate, candidate.election(NAME, ttl=TTL).campaign():
        server.set(roles=OBSERVER)
        async with acting(server.url) as observer:
            await refused(observer, lambda backend: backend.election(NAME).ask_to_resign(), "'update'", "leases")
        server.set(roles=CANDIDATE)  # to release it


async def work(term: tenure.Term) -> None:
    term.check()


async def test_a_candidate_that_has_stood_by_asks_again_without_the_right_to_lead(server: Kubernetes) -> None:
    """To stand by is to read here: so it has worked before, and the right may come."""
    events: list[Event] = []
    spec = {"holderIdentity": "another program", "leaseDurationSeconds": 1}  # it renews nothing
    server.put({"metadata": {"name": NAME}, "spec": spec})
    server.set(roles=OBSERVER)
    async with tenure.connect(patient(server.url), on_event=events.append) as backend:
        campaign = asyncio.create_task(backend.election(NAME, ttl=TTL, retry_every=0.2).run(work))
        await until(lambda: len([one for one in events if isinstance(one, CampaignFailed)]) > 1)
        assert isinstance(events[0], StandingBy)
        assert "'update'" in next(one.why for one in events if isinstance(one, CampaignFailed))
        server.set(roles=CANDIDATE)
        await campaign
        assert [one for one in events if isinstance(one, TermBegan)]


async def test_a_term_outlasts_a_right_that_comes_back(server: Kubernetes) -> None:
    async def change(roles: list[dict[str, Any]]) -> None:
        server.set(roles=roles)

    await change(CANDIDATE)
    await outlasts(server.url, NAME, revoke=lambda: change(OBSERVER), grant=lambda: change(CANDIDATE))


async def test_who_may_update_a_lease_can_lower_its_token(server: Kubernetes) -> None:
    """So a resource that refuses old tokens refuses the next leaders, or takes an old leader for the newest."""
    server.set(roles=CANDIDATE)
    async with acting(server.url) as witness:
        high = [await lead(witness, NAME) for _ in range(5)][-1]
        found = server.lease(NAME)
        found["metadata"]["annotations"]["tenure/token"] = "1"
        found["spec"]["leaseTransitions"] = 0
        server.put(found)
        async with acting(server.url) as fresh:
            lowered = await lead(fresh, NAME)
            assert lowered < high
        assert await lead(witness, NAME) > high  # who has seen the higher one goes on from there

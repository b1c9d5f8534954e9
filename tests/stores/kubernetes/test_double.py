"""The double of the Lease API answers as a real kube-apiserver does: the same checks on both."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.servers import KubeApiserver, Kubernetes, private, shared
from tests.servers.kubernetes import apis, lease_path

Json = dict[str, Any]
Api = Kubernetes | KubeApiserver

TIME = "2026-01-02T03:04:05.000006Z"


@pytest.fixture(params=apis(), name="api")
def _api(request: pytest.FixtureRequest) -> Api:
    found: Api = shared(request.param)
    return found


@pytest.fixture(name="name")
def _name(request: pytest.FixtureRequest, api: Api) -> Iterator[str]:
    name = f"check-{abs(hash(request.node.nodeid)):x}"
    yield name
    api.ask("DELETE", lease_path(name))


def lease(name: str, **spec: Any) -> Json:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"holderIdentity": "ann", "leaseDurationSeconds": 15, "acquireTime": TIME, "renewTime": TIME, **spec},
    }


def create(api: Api, name: str, **spec: Any) -> Json:
    status, made = api.ask("POST", lease_path(""), lease(name, **spec))
    assert status == 201, made
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("written", ["2026-01-02T03:04:05.000006+00:00", "2026-01-02T05:34:05.000006+02:30"])
def test_times_are_stored_in_utc(api: Api, name: str, written: str) -> None:
    assert create(api, name, renewTime=written)["spec"]["renewTime"] == TIME
    assert api.ask("GET", lease_path(name))[1]["spec"]["renewTime"] == TIME


def test_a_lease_is_created_once(api: Api, name: str) -> None:
    made = create(api, name, leaseTransitions=0)
    assert made["spec"] == lease(name, leaseTransitions=0)["spec"]
    assert made["metadata"]["creationTimestamp"].endswith("Z")
    assert made["metadata"]["resourceVersion"].isdigit()
    status, refused = api.ask("POST", lease_path(""), lease(name))
    assert (status, refused["reason"]) == (409, "AlreadyExists")
    assert api.ask("GET", lease_path(name))[1]["spec"] == made["spec"]


def test_a_missing_lease_is_not_found(api: Api, name: str) -> None:
    status, refused = api.ask("GET", lease_path(name))
    assert (status, refused["reason"]) == (404, "NotFound")
    assert refused["message"] == f'leases.coordination.k8s.io "{name}" not found'


def test_a_missing_namespace_is_found_missing_when_a_lease_is_created(api: Api, name: str) -> None:
    status, refused = api.ask("GET", lease_path(name, "nowhere"))
    assert (status, refused["reason"]) == (404, "NotFound")
    made = lease(name)
    made["metadata"]["namespace"] = "nowhere"
    status, refused = api.ask("POST", lease_path("", "nowhere"), made)
    assert (status, refused["message"]) == (404, 'namespaces "nowhere" not found')


def test_a_replacement_needs_the_newest_version(api: Api, name: str) -> None:
    made = create(api, name)
    changed = made | {"spec": made["spec"] | {"holderIdentity": "bob"}}
    status, new = api.ask("PUT", lease_path(name), changed)
    assert status == 200
    assert int(new["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert new["metadata"]["creationTimestamp"] == made["metadata"]["creationTimestamp"]
    status, refused = api.ask("PUT", lease_path(name), changed)
    assert (status, refused["reason"]) == (409, "Conflict")
    assert "the object has been modified" in refused["message"]


def test_a_replacement_without_a_version_is_invalid(api: Api, name: str) -> None:
    made = create(api, name)
    del made["metadata"]["resourceVersion"]
    status, refused = api.ask("PUT", lease_path(name), made)
    assert (status, refused["reason"]) == (422, "Invalid")
    assert "must be specified for an update" in refused["message"]


def test_an_unchanged_lease_keeps_its_version(api: Api, name: str) -> None:
    made = create(api, name)
    status, same = api.ask("PUT", lease_path(name), made)
    assert status == 200
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_a_replacement_of_a_deleted_lease_does_not_create_it_again(api: Api, name: str) -> None:
    made = create(api, name)
    assert api.ask("DELETE", lease_path(name))[0] == 200
    status, refused = api.ask("PUT", lease_path(name), made)
    assert (status, refused["reason"]) == (409, "Conflict")
    create(api, name)
    assert api.ask("PUT", lease_path(name), made)[0] == 409


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({"renewTime": "2026-01-02T03:04:05Z"}, 400),
        ({"renewTime": "2026-01-02T03:04:05.123Z"}, 400),
        ({"renewTime": "2026-01-02T03:04:05.123456"}, 400),
        ({"renewTime": 17}, 400),
        ({"leaseDurationSeconds": 0}, 422),
        ({"leaseDurationSeconds": 1.5}, 400),
        ({"leaseDurationSeconds": 2**31}, 400),
        ({"leaseTransitions": -1}, 422),
        ({"leaseTransitions": "1"}, 400),
        ({"holderIdentity": 17}, 400),
        ({"renewTime": "2026-01-02T03:04:05.123456+00:00"}, 201),
        ({"holderIdentity": ""}, 201),
        ({"holderIdentity": None, "renewTime": None}, 201),
    ],
)
def test_fields_are_checked(api: Api, name: str, spec: Json, status: int) -> None:
    assert api.ask("POST", lease_path(""), lease(name, **spec))[0] == status


@pytest.mark.parametrize(
    ("named", "status"),
    [("Upper", 422), ("under_score", 422), ("-edge", 422), ("a..b", 422), ("x" * 254, 422), ("", 422), ("a.b-c", 201)],
)
def test_names_are_checked(api: Api, named: str, status: int) -> None:
    assert api.ask("POST", lease_path(""), lease(named))[0] == status
    if status == 201:
        api.ask("DELETE", lease_path(named))


@pytest.mark.parametrize(
    ("key", "text", "status"),
    [("tenure/token", "7", 201), ("tenure/a/b", "7", 422), ("tenure/", "7", 422), ("plain", "Ü \n", 201)],
)
def test_annotations_are_checked(api: Api, name: str, key: str, text: str, status: int) -> None:
    made = lease(name)
    made["metadata"]["annotations"] = {key: text}
    assert api.ask("POST", lease_path(""), made)[0] == status


def test_annotations_have_a_limit(api: Api, name: str) -> None:
    made = lease(name)
    made["metadata"]["annotations"] = {"much": "x" * 262_145}
    status, refused = api.ask("POST", lease_path(""), made)
    assert (status, refused["reason"]) == (422, "Invalid")


def test_unknown_fields_are_dropped(api: Api, name: str) -> None:
    assert "unknown" not in create(api, name, unknown="x")["spec"]


def test_a_list_selects_by_name_and_by_label(api: Api, name: str) -> None:
    made = lease(name)
    made["metadata"]["labels"] = {"check": "yes"}
    api.ask("POST", lease_path(""), made)
    for selector in (f"fieldSelector=metadata.name%3D{name}", "labelSelector=check%3Dyes", "labelSelector=check"):
        status, found = api.ask("GET", f"{lease_path('')}?{selector}")
        assert status == 200
        assert name in [each["metadata"]["name"] for each in found["items"]], selector
    status, found = api.ask("GET", f"{lease_path('')}?labelSelector=check%3Dno")
    assert found["items"] == []


def test_a_merge_patch_is_applied(api: Api, name: str) -> None:
    if isinstance(api, KubeApiserver):
        pytest.skip("a patch has a content type of its own there")
    create(api, name)
    status, new = api.ask("PATCH", lease_path(name), {"spec": {"holderIdentity": "bob", "renewTime": None}})
    assert status == 200
    assert new["spec"]["holderIdentity"] == "bob"
    assert "renewTime" not in new["spec"]


def test_a_watch_continues_after_a_version(api: Api, name: str) -> None:
    made = create(api, name)
    api.ask("PUT", lease_path(name), made | {"spec": made["spec"] | {"holderIdentity": "bob"}})
    api.ask("DELETE", lease_path(name))
    after = made["metadata"]["resourceVersion"]
    events = watched(api, f"fieldSelector=metadata.name%3D{name}&resourceVersion={after}&timeoutSeconds=1")
    assert [event["type"] for event in events] == ["MODIFIED", "DELETED"]
    assert events[0]["object"]["spec"]["holderIdentity"] == "bob"


def test_a_watch_without_a_version_begins_with_what_is_there(api: Api, name: str) -> None:
    create(api, name)
    events = watched(api, f"fieldSelector=metadata.name%3D{name}&timeoutSeconds=1&allowWatchBookmarks=true")
    assert [event["type"] for event in events if event["type"] != "BOOKMARK"] == ["ADDED"]


def test_a_watch_after_a_forgotten_version_is_gone(api: Api, name: str) -> None:
    if isinstance(api, KubeApiserver):
        api.restart_and_forget()
    made = create(api, name)
    if isinstance(api, Kubernetes):
        api.control("compact")
        version = made["metadata"]["resourceVersion"]
    else:
        version = "1"
    events = watched(api, f"resourceVersion={version}&timeoutSeconds=1")
    assert [(event["type"], event["object"]["code"]) for event in events] == [("ERROR", 410)]


def test_the_rights_of_a_user_can_be_asked_for(api: Api) -> None:
    about = {"namespace": "default", "verb": "update", "group": "coordination.k8s.io", "resource": "leases"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": about},
    }
    status, answer = api.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    assert (status, answer["status"]["allowed"]) == (201, True)


def test_the_version_is_told(api: Api) -> None:
    status, found = api.ask("GET", "/version")
    assert status == 200
    assert found["gitVersion"].startswith("v")


def watched(api: Api, query: str) -> list[Json]:
    """Return the events of a watch that ends by itself."""
    status, text = api.ask("GET", f"{lease_path('')}?watch=1&{query}", lines=True)
    assert status == 200, text
    return [json.loads(line) for line in text.splitlines()]


def test_tokens_and_rights_are_checked() -> None:
    with private(Kubernetes, tokens={"good": "ann", "weak": "bob"}) as api:
        api.set(roles=[{"users": ["ann"], "verbs": ["get", "create"]}, {"users": ["bob"], "verbs": ["get"]}])
        assert api.ask("GET", lease_path("x"), token="bad")[0] == 401
        assert api.ask("GET", lease_path("x"))[0] == 403
        assert api.ask("POST", lease_path(""), lease("x"), token="good")[0] == 201
        status, refused = api.ask("POST", lease_path(""), lease("y"), token="weak")
        assert status == 403
        assert refused["message"] == (
            'leases.coordination.k8s.io is forbidden: User "bob" cannot create resource "leases" in API group '
            '"coordination.k8s.io" in the namespace "default"'
        )


def test_leases_survive_a_kill() -> None:
    with private(Kubernetes) as api:
        made = api.put(lease("kept"))
        api.put(lease("gone"))
        api.delete("gone")
        api.kill()
        api.start()
        assert api.lease("kept") == made
        assert api.ask("GET", lease_path("gone"))[0] == 404
        made["spec"]["holderIdentity"] = "bob"
        assert int(api.put(made)["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


def test_faults_are_injected_and_requests_counted() -> None:
    with private(Kubernetes) as api:
        api.put(lease("x"))
        api.forget()
        api.fail(verb="get", status=429, retry_after=3, times=1)
        connection = http.client.HTTPConnection(urlsplit(api.server).netloc, timeout=10)
        connection.request("GET", lease_path("x"))
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (429, "3")
        assert json.loads(answer.read())["details"] == {"retryAfterSeconds": 3}
        connection.close()
        assert api.ask("GET", lease_path("x"))[0] == 200
        assert [one["verb"] for one in api.requests()] == ["get", "get"]
        api.fail(verb="update", drop="after")
        found = api.lease("x")
        found["spec"]["holderIdentity"] = "bob"
        with pytest.raises((OSError, http.client.HTTPException)):
            api.put(found)
        assert api.lease("x")["spec"]["holderIdentity"] == "bob"  # it was carried out
        api.heal()
        api.put(api.lease("x") | {"spec": {"holderIdentity": "eve"}})


def test_it_serves_over_tls() -> None:
    with private(Kubernetes, tls=True) as api:
        api.put(lease("x"))
        assert api.lease("x")["spec"]["holderIdentity"] == "ann"

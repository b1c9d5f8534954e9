"""The facts that ``describe()`` and ``tenure doctor`` show of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from tenure._backends.kubernetes.client import Client, Request
from tenure._backends.kubernetes.credentials import CommandLogin, TokenFile, TokenText
from tenure._foreign import an_object, read_or
from tenure._opened import Fact
from tenure._tls_facts import Verifies, tls_fact
from tenure.errors import TenureError

VERBS = ("get", "create", "update", "list", "watch")
"""The rights that tenure uses."""
_WITHOUT = {
    "get": "no election works without it",
    "create": "an election whose Lease doesn't exist yet fails without it",
    "update": "no election works without it",
    "list": "names(), and tenure status without a name, fail without it",
    "watch": "candidates poll without it, and hear late of a vacancy",
}


async def diagnose(client: Client) -> Sequence[Fact]:
    """Return facts about the server, this user's rights, and the namespace."""
    access, namespace = client.address.access, client.address.namespace
    return [
        Fact("server", f"{access.server}, from {access.origin}", _tls_advice(client), "kubernetes-tls"),
        _tls(client),
        Fact("version", await _version(client)),
        Fact("login", _login(client)),
        await _namespace(client, namespace),
        await _rights(client, namespace),
        await _flow(client),
        Fact("new candidates", "wait for a whole lease, even if its holder is long dead"),
    ]


def _tls_advice(client: Client) -> str:
    access = client.address.access
    if access.is_insecure:
        return "its certificate is not checked (insecure-skip-tls-verify): anybody on the way can read the token"
    if not access.is_encrypted and access.credential is not None:
        return "the token is sent without TLS"
    return ""


def _tls(client: Client) -> Fact:
    access = client.address.access
    authority = str(access.ca_file) if access.ca_file else f"the authority of {access.origin}" if access.ca else None
    verifies: Verifies = "nothing" if access.is_insecure else "certificate and name"
    return tls_fact(
        verifies if access.is_encrypted else None,
        [urlsplit(access.server).hostname or ""],
        authority=authority,
        because="insecure-skip-tls-verify",
    )


def _login(client: Client) -> str:
    access = client.address.access
    match access.credential:
        case TokenFile():
            return "a token file, read again at least once a minute"
        case TokenText():
            return "a token that stays the same"
        case CommandLogin():
            return "a credential command"
    return "a client certificate" if access.certificate is not None else "none"


async def _version(client: Client) -> str:
    request = Request("get", resource="the version")
    answer = await client.send(request, "GET", "/version", expected=(403, 404))
    return str(answer.body.get("gitVersion") or "unknown")[:80]


async def _namespace(client: Client, namespace: str) -> Fact:
    request = Request("get", resource="namespaces")
    answer = await client.send(request, "GET", f"/api/v1/namespaces/{namespace}", expected=(403, 404))
    match answer.status:
        case 404:
            advice = "it doesn't exist: create it, or correct the URL"
            return Fact("namespace", namespace, advice, "kubernetes-no-namespace")
        case 403:
            return Fact("namespace", f"{namespace} (this user may not look whether it exists)")
    return Fact("namespace", namespace)


async def _rights(client: Client, namespace: str) -> Fact:
    """Ask for each right; name those that are missing."""
    missing = []
    for verb in VERBS:
        about = {"namespace": namespace, "verb": verb, "group": "coordination.k8s.io", "resource": "leases"}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": about},
        }
        request = Request("create", resource="selfsubjectaccessreviews")
        try:
            answer = await client.send(
                request, "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review
            )
        except TenureError as error:
            return Fact("rights", "unknown", str(error), error.code)
        if not read_or(an_object, answer.body.get("status"), {}).get("allowed"):
            missing.append(verb)
    if not missing:
        return Fact("rights", f"{', '.join(VERBS)} on leases")
    advice = "; ".join(f"{verb}: {_WITHOUT[verb]}" for verb in missing)
    only_some = "; rights to single Leases (resourceNames) are not seen here" if "list" in missing else ""
    value = f"without {', '.join(missing)} on leases"
    return Fact("rights", value, f"add to a Role: {advice}{only_some}", "kubernetes-rights")


async def _flow(client: Client) -> Fact:
    """Return which priority the server's flow control gives these requests."""
    request = Request("get", "tenure-doctor")  # rights may be limited to other names: the refusal has a priority, too
    answer = await client.send(request, "GET", client.path_of("tenure-doctor"), expected=(403, 404))
    if answer.priority:
        return Fact("priority", f"level {answer.priority} of API Priority and Fairness")
    return Fact("priority", "the server has no API Priority and Fairness")

"""The facts that ``tenure doctor`` shows of an etcd: members, leader, alarms, space, and versions with known faults."""

from __future__ import annotations

import re
import secrets
from functools import partial
from urllib.parse import urlsplit

from tenure._backends.etcd.client import Client, Member
from tenure._backends.etcd.requests import Json, number
from tenure._foreign import a_list, an_object, read_or
from tenure._opened import Fact
from tenure._tls_facts import Verifies, tls_fact
from tenure.errors import TenureError

NEARLY_FULL = 0.8
"""The share of its quota from which on a member's database is reported as nearly full."""

QUOTA_DEFAULT = 2 * 1024**3
"""The quota of a member that names none: from 3.4 to 3.6, 2 GiB."""

MEMBERS_MIN = 3
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})")

Release = tuple[int, int, int]
FULL: dict[int, int] = {4: 20, 5: 7}
"""For each minor version of 3, the first patch in which a full etcd still answers requests that need no space."""
REVOKING: dict[int, int] = {4: 31, 5: 13}
"""The same for a former leader that ends no leases (etcd issue 15247)."""
STALE: dict[int, int] = {4: 42, 5: 28, 6: 9}
"""The same for reads that are stale after a pause (etcd issue 20418)."""
ANONYMOUS: dict[int, int] = {4: 42, 5: 28, 6: 9}
"""The same for leases that are listed and renewed without a login (CVE-2026-33413)."""


async def diagnose(client: Client) -> list[Fact]:
    """Return facts about the members that the URL of *client* names, and about their cluster."""
    facts = [Fact("servers", str(client.address)), _tls(client)]
    statuses: list[Json] = []
    for member in client.members:
        name = member.url.partition("://")[2]
        try:
            status = (await client.call("maintenance/status", {}, member=member)).body
        except TenureError as error:
            facts.append(Fact(f"member {name}", "does not answer", str(error), error.code))
            continue
        statuses.append(status)
        facts += await _member(client, member, name, status)
    if not statuses:
        return facts
    facts += _versions([str(status.get("version", "unknown")) for status in statuses])
    return [*facts, await _members(client), await _alarms(client), _login(client)]


def _tls(client: Client) -> Fact:
    options = client.options
    hosts = [urlsplit(url).hostname or "" for url in client.address.members]
    verifies: Verifies = "certificate and name" if options.check_hostname else "certificate"
    is_tls = client.address.is_tls
    return tls_fact(verifies if is_tls else None, hosts, authority=options.ca, because="check_hostname=no")


async def _member(client: Client, member: Member, name: str, status: Json) -> list[Fact]:
    if "leader" not in status:
        advice = "it can't reach a majority of the cluster; check the network between the members"
        return [Fact(f"member {name}", "has no leader", advice, "etcd-no-leader")]
    header = read_or(an_object, status.get("header"), {})
    role = "leader" if status["leader"] == header.get("member_id") else "follower"
    size, quota = (read_or(partial(number, status), name, 0) for name in ("dbSize", "dbSizeQuota"))
    quota = quota or await _quota(client, member)
    advice = ""
    if quota and size >= NEARLY_FULL * quota:
        advice = "it is nearly full, and will refuse new candidates; compact it and defragment it, or raise the quota"
    limit = f"of {quota} bytes" if quota else "bytes; its quota can't be read"
    value = f"{role}, {status.get('version', 'unknown')}, database {size} {limit}"
    return [Fact(f"member {name}", value, advice, "etcd-nearly-full")]


async def _quota(client: Client, member: Member) -> int:
    """Return the quota of a member's database; 0 if it can't be read."""
    try:
        found = await client.metric(member, "etcd_server_quota_backend_bytes")
    except TenureError:
        return 0
    return int(found) or QUOTA_DEFAULT


def release_of(version: str) -> Release | None:
    """Return the numbers of a *version*; None if it has another form."""
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def is_before(release: Release, fixed: dict[int, int]) -> bool:
    """Return whether *release* is older than the first patch, by minor version, that has a fault *fixed*."""
    major, minor, patch = release
    if major != 3:
        return major < 3
    return minor < min(fixed) or patch < fixed.get(minor, 0)


def _versions(versions: list[str]) -> list[Fact]:
    oldest = min((release for one in versions if (release := release_of(one))), default=None)
    shown = ", ".join(sorted(set(versions)))
    if oldest is None:
        return [Fact("version", shown)]
    advice = []
    if oldest < (3, 4, 0):
        advice.append("tenure needs etcd 3.4 or newer")
    if is_before(oldest, FULL):
        advice.append("when it is full, it refuses renewals, too; upgrade to 3.4.20, 3.5.7 or newer")
    if is_before(oldest, REVOKING):
        advice.append(
            "a leader of etcd that was paused or slow may end leases of others although they were renewed (etcd issue "
            "15247): then two candidates may lead for up to ttl; upgrade to 3.4.31, 3.5.13 or newer"
        )
    if is_before(oldest, STALE):
        advice.append(
            "after a pause of a member, status and observe may show an earlier leader (etcd issue 20418); tenure "
            "decides nothing by such reads; upgrade to 3.4.42, 3.5.28, 3.6.9 or newer"
        )
    if is_before(oldest, ANONYMOUS):
        advice.append(
            "whoever reaches a member can renew the lease of a leader that died, without a login, so that no other "
            "leads (CVE-2026-33413); restrict the network, require client certificates, or upgrade to 3.4.42, 3.5.28, "
            "3.6.9 or newer"
        )
    return [Fact("version", shown, "; ".join(advice), "etcd-version")]


async def _members(client: Client) -> Fact:
    try:
        found = _objects_in((await client.call("cluster/member/list", {})).body, "members")
    except TenureError as error:
        return Fact("members", "may not be read", str(error), error.code)
    voting = [one for one in found if not one.get("isLearner")]
    names = ", ".join(str(one.get("name") or one.get("ID")) for one in voting)
    advice, code = "", ""
    if len(voting) < MEMBERS_MIN:
        code = "etcd-few-members"
        stops = "if it stops" if len(voting) == 1 else "if one of them stops"
        advice = f"{stops}, no candidate can lead until it is back; run three members"
    elif len(client.members) == 1:
        code = "etcd-one-address"
        advice = "the URL names one of them: if that one stops, this program can't use the others; name them all"
    return Fact("members", f"{len(voting)}: {names}", advice, code)


def _objects_in(answer: Json, name: str) -> list[Json]:
    return [one for one in read_or(a_list, answer.get(name), []) if isinstance(one, dict)]


async def _alarms(client: Client) -> Fact:
    try:
        found = _objects_in((await client.call("maintenance/alarm", {"action": "GET"})).body, "alarms")
    except TenureError as error:
        return Fact("alarms", "may not be read", str(error), error.code)
    kinds = sorted({str(one.get("alarm", "unknown")) for one in found})
    advice = []
    if "NOSPACE" in kinds:
        advice.append("it refuses new candidates; compact it, defragment its members, then run etcdctl alarm disarm")
    if "CORRUPT" in kinds:
        advice.append("the data of its members differ, and it refuses all requests; replace the corrupt member")
    return Fact("alarms", ", ".join(kinds) or "none", "; ".join(advice), "etcd-alarm")


def _login(client: Client) -> Fact:
    if client.has_login:
        return Fact("users", "this program has logged in")
    if client.options.cert:
        return Fact("users", "none; this program shows a certificate")
    advice = "every program that reaches it can end leases and read all keys; require a login or TLS"
    return Fact("users", "none", advice, "etcd-no-login")


async def shortest_lease(client: Client) -> Fact:
    """Return the shortest lease that it grants, by asking for one, which is revoked at once."""
    lease = str(secrets.randbits(62) + 1)
    try:
        granted = read_or(partial(number, (await client.call("lease/grant", {"TTL": "1", "ID": lease})).body), "TTL", 0)
        await client.call("lease/revoke", {"ID": lease})
    except TenureError as error:
        return Fact("shortest lease", "can't be asked for", str(error), error.code)
    return Fact("shortest lease", f"{granted} s")

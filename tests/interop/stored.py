"""What contestants store for an election, read back; ids that differ from run to run are replaced by their form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kazoo.client import KazooClient

from tests.servers.etcd import Etcd, end_of, from_base64, in_base64

FORMS = (
    (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>"),
    (r"[0-9a-f]{32}", "<32 hex digits>"),
    (r"(?<=[0-9a-f]#)\d+", "<number>"),  # of a candidate's acquisitions: more than 1 if it had to ask anew
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}", "<time with 6 digits>"),
    (r"(?<=[-_])\d{10}$", "<sequence>"),
    (r"^\d{1,3}(?:\.\d{1,3}){3}$", "<address>"),
)
"""Every other byte is kept."""
BY_SERVER = {"uid", "resourceVersion", "creationTimestamp", "managedFields"}
"""What the API server writes into the metadata of a Lease."""


def formed(text: str, known: Mapping[str, str]) -> str:
    """Return *text* with its ids replaced: the *known* ones where they stand alone, and those of FORMS."""
    forms = [(rf"(?<![\w%]){re.escape(one)}(?!\w)", form) for one, form in known.items() if one] + [*FORMS]
    pattern = "|".join(f"({one})" for one, _ in forms)
    return re.sub(pattern, lambda found: forms[(found.lastindex or 0) - 1][1], text)


def in_etcd(server: Etcd, prefix: str, known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the keys below *prefix*."""
    answer = server.call("kv/range", {"key": in_base64(prefix), "range_end": in_base64(end_of(prefix))})
    found = []
    for kv in answer.get("kvs", []):
        lease = int(kv.get("lease", 0))
        key = formed(from_base64(kv["key"]), {**known, f"{lease:x}": "<lease>"} if lease else known)
        value = formed(from_base64(kv.get("value", "")), known)
        found.append({"key": key, "value": value, "has a lease": bool(lease)})
    return found


def in_zookeeper(client: KazooClient, path: str, known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the node of an election, and the nodes below it."""
    data, stat = client.get(path)
    acl, _ = client.get_acls(path)
    found = [
        {
            "name": formed(path.rpartition("/")[2], known),
            "data": formed(data.decode(errors="backslashreplace"), known),
            "ephemeral": stat.ephemeralOwner != 0,
            "rights": [[each.id.scheme, each.id.id, each.perms] for each in acl],
        }
    ]
    for child in sorted(client.get_children(path)):
        found += in_zookeeper(client, f"{path}/{child}", known)
    return found


def in_kubernetes(lease: dict[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec of a Lease, and of its metadata what a client chooses."""
    metadata = {key: value for key, value in lease["metadata"].items() if key not in BY_SERVER}
    found: dict[str, Any] = _formed({"metadata": metadata, "spec": lease["spec"]}, known)
    return found


def _formed(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _formed(inner, known) for key, inner in value.items()}
    return formed(value, known) if isinstance(value, str) else value

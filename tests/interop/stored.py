"""What contestants store for an election, read back; ids that differ from run to run are replaced by their form."""

from __future__ import annotations

import re
from typing import Any

from kazoo.client import KazooClient

from tests.servers.etcd import Etcd, end_of, from_base64, in_base64

FORMS = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<uuid>"),
    (r"\b[0-9a-f]{32}", "<uuid hex>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}", "<time with 6 digits>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "<time>"),
    (r"(?<=[-_])\d{10}$", "<sequence>"),
    (r'(?<="token":) ?\d+', "<token>"),
    (r"^\d+$", "<token>"),
    (r"\b\d{1,3}(\.\d{1,3}){3}\b", "<address>"),
)


def formed(text: str, contestant: str) -> str:
    """Return *text* with its ids replaced; a holder of ours is the contestant's name and an addition."""
    text = re.sub(re.escape(contestant) + r"[#\w.-]*", "<holder>", text)
    for pattern, form in FORMS:
        text = re.sub(pattern, form, text)
    return text


def in_etcd(server: Etcd, prefix: str, name: str, contestant: str) -> list[dict[str, Any]]:
    """Return the keys below *prefix* that have the name in them."""
    answer = server.call("kv/range", {"key": in_base64(prefix), "range_end": in_base64(end_of(prefix))})
    found = []
    for kv in answer.get("kvs", []):
        key, lease = from_base64(kv["key"]), int(kv.get("lease", 0))
        if name in key:
            value = formed(from_base64(kv.get("value", "")), contestant)
            key = key.replace(f"{lease:x}", "<lease>") if lease else key
            found.append({"key": key.replace(name, "NAME"), "value": value, "has a lease": bool(lease)})
    return found


def in_zookeeper(client: KazooClient, path: str, contestant: str) -> list[dict[str, Any]]:
    """Return the node of an election, and the nodes below it."""
    data, stat = client.get(path)
    acl, _ = client.get_acls(path)
    found = [
        {
            "name": formed(path.rpartition("/")[2], contestant),
            "data": formed(data.decode(errors="backslashreplace"), contestant),
            "ephemeral": stat.ephemeralOwner != 0,
            "rights": [[each.id.scheme, each.id.id, each.perms] for each in acl],
        }
    ]
    for child in sorted(client.get_children(path)):
        found += in_zookeeper(client, f"{path}/{child}", contestant)
    return found


def in_kubernetes(lease: dict[str, Any], contestant: str) -> dict[str, Any]:
    """Return the spec of a Lease, and of its metadata what a client chooses."""
    metadata = {kind: lease["metadata"][kind] for kind in ("labels", "annotations") if lease["metadata"].get(kind)}
    found: dict[str, Any] = _formed({"metadata": metadata, "spec": lease["spec"]}, contestant)
    return found


def _formed(value: Any, contestant: str) -> Any:
    if isinstance(value, dict):
        return {key: _formed(inner, contestant) for key, inner in value.items()}
    return formed(value, contestant) if isinstance(value, str) else value

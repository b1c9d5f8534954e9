"""The Lease as client-go writes and reads it, and what tenure keeps beside it in annotations. Pure: JSON in, JSON out.

House rules:

- Every write is made from the whole object that was read: fields, annotations, labels and owners that tenure doesn't
  know are kept.
- The token of a Lease is the second of its creation (by the API server's clock, since 1970) plus ``leaseTransitions``,
  which client-go raises at each take-over, and tenure at each acquisition. So it also rises if the Lease was deleted
  and created again. The annotation ``tenure/token`` keeps it from falling if another program lowers the number.
- ``tenure/holder`` is the holder to which that token belongs. If ``holderIdentity`` differs, another program has taken
  over since, under a token that is higher.
- client-go compares records in whole seconds. So each renewal gets a ``renewTime`` in another second than the last one.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Metadata

Json = dict[str, Any]

API_VERSION = "coordination.k8s.io/v1"
TOKEN, HOLDER, METADATA, RESIGN = "tenure/token", "tenure/holder", "tenure/metadata", "tenure/resign-asked"
LABEL = "tenure/election"
"""The label of each Lease that tenure has ever acquired; ``names()`` selects them by it."""

TRANSITIONS_MAX = 2**31 - 1
AHEAD_MAX = timedelta(seconds=60)
"""How far a ``renewTime`` may be ahead of the clock, if renewals follow within a second.

Then it falls back to the clock, to a second that was written before. client-go must not have read that one last: it is
``AHEAD_MAX`` times the pause between two renewals ago, so 20 leases.
"""
RELEASED_DURATION = 1
"""The duration that client-go writes when it releases: it must be at least 1."""

_RECORD = (
    "holderIdentity",
    "leaseDurationSeconds",
    "acquireTime",
    "renewTime",
    "leaseTransitions",
    "strategy",
    "preferredHolder",
)


# --- reading -----------------------------------------------------------------------------------------------------


def has_version(found: object) -> bool:
    """Return whether *found* is an object of the API, and not something that a proxy has answered instead."""
    metadata = found.get("metadata") if isinstance(found, dict) else None
    return isinstance(metadata, dict) and bool(metadata.get("resourceVersion"))


def is_lease(found: Json, name: str) -> bool:
    """Return whether *found* is the Lease of this *name*."""
    return has_version(found) and found["metadata"].get("name") == name and isinstance(found.get("spec") or {}, dict)


def is_kept(sent: Json, stored: Json) -> bool:
    """Return whether the server has stored the claim that was *sent*: an admission webhook may change any write."""
    return (
        holder_of(stored) == holder_of(sent)
        and duration_of(stored) >= duration_of(sent)
        and token_of(stored) >= token_of(sent)
    )


def holder_of(lease: Json) -> str:
    """Return the holder; empty if there is none."""
    return str(_spec(lease).get("holderIdentity") or "")


def duration_of(lease: Json) -> float:
    """Return the seconds for which the record is valid after each change; 0 if none are given, as in client-go."""
    return float(_number(_spec(lease).get("leaseDurationSeconds")))


def record_of(lease: Json) -> tuple[object, ...]:
    """Return what a candidate compares: if it has changed, the holder has renewed, or there is another one."""
    spec = _spec(lease)
    return (_metadata(lease).get("uid"), *(spec.get(field) for field in _RECORD))


def is_ours(lease: Json) -> bool:
    """Return whether the holder is a candidate of tenure, and not another program."""
    return bool(holder_of(lease)) and _annotations(lease).get(HOLDER) == holder_of(lease)


def token_of(lease: Json) -> int:
    """Return the token of the present holder; if there is none, the newest one."""
    annotations = _annotations(lease)
    created_at = _created_at(lease)
    counted = created_at + _number(_spec(lease).get("leaseTransitions"))
    if TOKEN not in annotations:
        return counted
    # When tenure creates a Lease, it can't know yet that its first token is the second of its creation.
    noted = max(_number(annotations[TOKEN]), created_at)
    is_newest = annotations.get(HOLDER, "") == holder_of(lease)
    return max(counted, noted + (not is_newest))


def grant_of(name: str, lease: Json) -> Grant:
    """Return the claim that the record is about."""
    return Grant(name, holder_of(lease), token_of(lease))


def metadata_of(lease: Json) -> Metadata:
    """Return the metadata of the present holder."""
    written = _annotations(lease).get(METADATA)
    if not written or not is_ours(lease):
        return NO_METADATA
    try:
        found = json.loads(written)
    except ValueError:
        return NO_METADATA  # another program has changed it
    return FrozenDict(found) if isinstance(found, dict) else NO_METADATA


def strategy_of(lease: Json) -> str:
    """Return the strategy of a coordinated election, in which the API server chooses the holder; usually empty."""
    return str(_spec(lease).get("strategy") or "")


def is_asked_to_resign(lease: Json) -> bool:
    """Return whether the holder was asked to step down, by tenure or by a coordinated election."""
    preferred = _spec(lease).get("preferredHolder")
    asked = _number(_annotations(lease).get(RESIGN))
    return bool(asked and asked == token_of(lease)) or bool(preferred and preferred != holder_of(lease))


def about(lease: Json) -> tuple[object, ...]:
    """Return what followers and the holder want to be told of: everything but a mere renewal."""
    return (
        _metadata(lease).get("uid"),
        holder_of(lease),
        token_of(lease),
        is_asked_to_resign(lease),
        strategy_of(lease),
        _annotations(lease).get(METADATA),
    )


# --- writing -----------------------------------------------------------------------------------------------------


def new_lease(name: str, namespace: str) -> Json:
    """Return a Lease that nobody holds, to be acquired and created."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": {}}


def acquired(lease: Json, holder: str, ttl: float, metadata: Metadata, *, after: int, now: datetime) -> Json:
    """Return *lease* held by *holder*, under a token higher than all that it had, and higher than *after*.

    A Lease that isn't created yet gets its base, the second of its creation, from the server.
    """
    changed = copy.deepcopy(lease)
    spec, annotations = _for_change(changed)
    created_at = _created_at(lease)
    token = max(token_of(lease), after) + 1 if created_at else after + 1 if after else 0
    transitions = token - created_at if created_at else 0
    written = micro_time(_next_renewal(spec.get("renewTime"), now))
    spec |= {
        "holderIdentity": holder,
        "leaseDurationSeconds": math.ceil(ttl),
        "acquireTime": written,
        "renewTime": written,
        "leaseTransitions": min(max(0, transitions), TRANSITIONS_MAX),
    }
    for old in (METADATA, RESIGN):
        annotations.pop(old, None)
    annotations |= {HOLDER: holder, TOKEN: str(token)}
    if metadata:
        annotations[METADATA] = json.dumps(dict(metadata))
    labels = changed["metadata"].get("labels") or {}
    changed["metadata"]["labels"] = {**labels, LABEL: "true"}
    return changed


def renewed(lease: Json, ttl: float, *, left: float, now: datetime) -> Json:
    """Return *lease* renewed for *ttl* seconds, and at least for the *left* ones: a renewal never shortens it."""
    changed = copy.deepcopy(lease)
    token = token_of(lease)
    spec, annotations = _for_change(changed)
    spec["renewTime"] = micro_time(_next_renewal(spec.get("renewTime"), now))
    spec["leaseDurationSeconds"] = max(math.ceil(ttl), math.ceil(left))
    # Again, as another program may have removed them.
    annotations |= {HOLDER: holder_of(lease), TOKEN: str(token)}
    return changed


def released(lease: Json, *, now: datetime) -> Json:
    """Return *lease* without a holder, as client-go releases it; its token is kept."""
    changed = copy.deepcopy(lease)
    token = token_of(lease)
    spec, annotations = _for_change(changed)
    written = micro_time(_next_renewal(spec.get("renewTime"), now))
    spec |= {"holderIdentity": "", "leaseDurationSeconds": RELEASED_DURATION}
    spec |= {"acquireTime": written, "renewTime": written}
    for old in (METADATA, RESIGN):
        annotations.pop(old, None)
    annotations |= {HOLDER: "", TOKEN: str(token)}
    return changed


def asked_to_resign(lease: Json) -> Json:
    """Return *lease* with a request to its holder to step down; the record stays the same, so this is no renewal."""
    changed = copy.deepcopy(lease)
    _, annotations = _for_change(changed)
    annotations[RESIGN] = str(token_of(lease))
    return changed


def micro_time(moment: datetime) -> str:
    """Return *moment* as a MicroTime: always six digits, then Z. The API refuses any other form."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S}.{moment.microsecond:06d}Z"


# --- inner -------------------------------------------------------------------------------------------------------


def _spec(lease: Json) -> Mapping[str, Any]:
    return lease.get("spec") or {}


def _metadata(lease: Json) -> Mapping[str, Any]:
    return lease.get("metadata") or {}


def _annotations(lease: Json) -> Mapping[str, str]:
    return _metadata(lease).get("annotations") or {}


def _for_change(lease: Json) -> tuple[Json, Json]:
    """Return the spec and the annotations of a copy, to be changed."""
    spec = lease["spec"] = lease.get("spec") or {}
    annotations = lease["metadata"]["annotations"] = lease["metadata"].get("annotations") or {}
    return spec, annotations


def _number(value: object) -> int:
    """Return a number that another program may have written."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else 0
    return int(value) if isinstance(value, int | float) else 0


def _created_at(lease: Json) -> int:
    """Return the second in which the server created the Lease; 0 if it hasn't yet."""
    moment = _moment(_metadata(lease).get("creationTimestamp"))
    return int(moment.timestamp()) if moment else 0


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC) if text else None
    except ValueError:
        return None


def _next_renewal(last: object, now: datetime) -> datetime:
    """Return *now*, or the begin of the next second if *last* is in the same one."""
    before = _moment(last)
    if before is None:
        return now
    is_same = before.replace(microsecond=0) == now.replace(microsecond=0)
    is_ahead = now < before <= now + AHEAD_MAX
    following = before.replace(microsecond=0) + timedelta(seconds=1)
    return following if (is_same or is_ahead) and following <= now + AHEAD_MAX else now

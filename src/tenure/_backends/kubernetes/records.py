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
- Anybody who may write Leases can write anything there. What can't be read counts as absent; but a holder is a holder,
  whatever it is called, and a number that is too high is the highest: then nothing is taken from a live holder, and no
  token falls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tenure._checks import LONGEST
from tenure._election.store import NAME_MAX
from tenure._foreign import a_text, digits, read_object, read_or, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, TOKEN_MAX, Grant, Metadata
from tenure.errors import ConfigError

Json = dict[str, Any]

API_VERSION = "coordination.k8s.io/v1"
TOKEN, HOLDER, METADATA, RESIGN = "tenure/token", "tenure/holder", "tenure/metadata", "tenure/resign-asked"
LABEL = "tenure/election"
"""The label of each Lease that tenure has ever acquired; ``names()`` selects them by it."""

TRANSITIONS_MAX = 2**30
"""So that there is room for the transitions of other programs: they count in 32 bits. The annotation counts on."""

DURATION_MAX = 2**31 - 1
"""The API keeps both in 32 bits."""
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
    version = _metadata(found).get("resourceVersion") if isinstance(found, dict) else None
    return isinstance(version, str) and bool(version)


def is_lease(found: Any, name: str) -> bool:
    """Return whether *found* is the Lease of this *name*."""
    return has_version(found) and found["metadata"].get("name") == name and isinstance(found.get("spec") or {}, dict)


def name_in(item: object) -> str | None:
    """Return the name of a Lease in a list; None if it is none."""
    name = _metadata(item).get("name") if isinstance(item, dict) and has_version(item) else None
    return name if isinstance(name, str) else None


def is_kept(sent: Json, stored: Json) -> bool:
    """Return whether the server has stored the claim that was *sent*: an admission webhook may change any write."""
    return (
        holder_of(stored) == holder_of(sent)
        and duration_of(stored) >= duration_of(sent)
        and token_of(stored) >= token_of(sent)
    )


def holder_of(lease: Json) -> str:
    """Return the holder; empty if there is none."""
    return _text_of(_spec(lease).get("holderIdentity"))


def duration_of(lease: Json) -> float:
    """Return the seconds for which the record is valid after each change.

    0 if none are given, as in client-go. What is no number lasts: nothing is taken from a live holder.
    """
    given = _spec(lease).get("leaseDurationSeconds")
    is_odd = given is not None and type(given) not in (int, float)
    return float(DURATION_MAX if is_odd else _clipped(given, DURATION_MAX))


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
    counted = created_at + _clipped(_spec(lease).get("leaseTransitions"), TRANSITIONS_MAX)
    if TOKEN not in annotations:
        return counted
    # When tenure creates a Lease, it can't know yet that its first token is the second of its creation.
    noted = max(_noted(annotations[TOKEN]), created_at)
    is_newest = annotations.get(HOLDER, "") == holder_of(lease)
    return min(max(counted, noted + (not is_newest)), TOKEN_MAX)


def grant_of(name: str, lease: Json) -> Grant:
    """Return the claim that the record is about."""
    return Grant(name, holder_of(lease), token_of(lease))


def metadata_of(lease: Json) -> Metadata:
    """Return the metadata of the present holder."""
    written = _annotations(lease).get(METADATA)
    if not written or not is_ours(lease):
        return NO_METADATA
    found = read_or(lambda text: texts(read_object(text)), written, None)
    return FrozenDict(found) if found else NO_METADATA  # also if another program has changed it


def strategy_of(lease: Json) -> str:
    """Return the strategy of a coordinated election, in which the API server chooses the holder; usually empty."""
    return _text_of(_spec(lease).get("strategy"))


def is_asked_to_resign(lease: Json) -> bool:
    """Return whether the holder was asked to step down, by tenure or by a coordinated election."""
    preferred = _text_of(_spec(lease).get("preferredHolder"))
    asked = _noted(_annotations(lease).get(RESIGN))
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

    Raises:
        ConfigError: Somebody has written a token that can't rise any more.
    """
    changed, spec, annotations = _for_change(lease)
    created_at = _created_at(lease)
    if created_at or has_version(lease):
        token = max(token_of(lease), after) + 1
        transitions = token - created_at
    else:
        token, transitions = after + 1 if after else 0, 0
    if token > TOKEN_MAX:
        raise ConfigError(
            f"the token of the Lease {_metadata(lease).get('name')!r} can't rise any more: another program has written "
            f"{annotations.get(TOKEN)!r:.40} into its annotation {TOKEN}; write the newest token there that your "
            "resources have seen"
        )
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
    changed["metadata"]["labels"] = {**_dict(changed["metadata"].get("labels")), LABEL: "true"}
    return changed


def renewed(lease: Json, ttl: float, *, left: float, now: datetime) -> Json:
    """Return *lease* renewed for *ttl* seconds, and at least for the *left* ones: a renewal never shortens it."""
    token = token_of(lease)
    changed, spec, annotations = _for_change(lease)
    spec["renewTime"] = micro_time(_next_renewal(spec.get("renewTime"), now))
    spec["leaseDurationSeconds"] = max(math.ceil(ttl), math.ceil(left))
    # Again, as another program may have removed them.
    annotations |= {HOLDER: holder_of(lease), TOKEN: str(token)}
    return changed


def released(lease: Json, *, now: datetime) -> Json:
    """Return *lease* without a holder, as client-go releases it; its token is kept."""
    token = token_of(lease)
    changed, spec, annotations = _for_change(lease)
    written = micro_time(_next_renewal(spec.get("renewTime"), now))
    spec |= {"holderIdentity": "", "leaseDurationSeconds": RELEASED_DURATION}
    spec |= {"acquireTime": written, "renewTime": written}
    for old in (METADATA, RESIGN):
        annotations.pop(old, None)
    annotations |= {HOLDER: "", TOKEN: str(token)}
    return changed


def asked_to_resign(lease: Json) -> Json:
    """Return *lease* with a request to its holder to step down; the record stays the same, so this is no renewal."""
    changed, _, annotations = _for_change(lease)
    annotations[RESIGN] = str(token_of(lease))
    return changed


def micro_time(moment: datetime) -> str:
    """Return *moment* as a MicroTime: always six digits, then Z. The API refuses any other form."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S}.{moment.microsecond:06d}Z"


# --- inner -------------------------------------------------------------------------------------------------------


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _spec(lease: Json) -> Mapping[str, Any]:
    return _dict(lease.get("spec"))


def _metadata(lease: Json) -> Mapping[str, Any]:
    return _dict(lease.get("metadata"))


def _annotations(lease: Json) -> Mapping[str, object]:
    return _dict(_metadata(lease).get("annotations"))


def _for_change(lease: Json) -> tuple[Json, Json, Json]:
    """Return a copy of *lease*, with its spec and its annotations, which may be changed."""
    spec, annotations = dict(_spec(lease)), dict(_annotations(lease))
    return {**lease, "spec": spec, "metadata": {**_metadata(lease), "annotations": annotations}}, spec, annotations


def _text_of(value: object) -> str:
    """Return a name in the record as text that can be shown; empty if there is none."""
    if not isinstance(value, str):
        return str(value)[:NAME_MAX] if value else ""
    return value if value.isascii() else value.encode(errors="replace").decode()


def _noted(annotation: object) -> int:
    """Return the token in an annotation: 0 if that is no number, the highest if it is higher than a token can be."""
    is_number = isinstance(annotation, str) and annotation.isascii() and annotation.isdecimal()
    return read_or(digits, annotation, TOKEN_MAX if is_number else 0)


def _clipped(value: object, most: int) -> int:
    """Return a number in the record: 0 if it is none, *most* if it is higher."""
    is_number = type(value) in (int, float) and value > 0  # type: ignore[operator]
    return int(min(value, most)) if is_number else 0  # type: ignore[call-overload]


def _created_at(lease: Json) -> int:
    """Return the second in which the server created the Lease; 0 if it hasn't yet."""
    moment = _moment(_metadata(lease).get("creationTimestamp"))
    return int(moment.timestamp()) if moment else 0


def _moment(text: object) -> datetime | None:
    """Return a time that every clock can represent; None if it is none."""
    try:
        found = datetime.fromisoformat(a_text(text))
        found = found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return found if 0.0 <= found.timestamp() <= LONGEST else None
    except (ValueError, OverflowError):  # also Unreadable
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

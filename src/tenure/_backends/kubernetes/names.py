"""The names of elections and namespaces, which Kubernetes requires to be DNS names."""

from __future__ import annotations

import re

from tenure._election.store import require_name
from tenure.errors import ConfigError

NAME_MAX = 253
"""The most characters of the name of a Lease: a DNS subdomain."""
NAMESPACE_MAX = 63
"""The most characters of a namespace: a DNS label."""

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_RULE = "small letters, digits, '-' and '.', with a letter or digit at the beginning and end and beside each '.'"


def require_lease_name(name: str) -> None:
    """Refuse a *name* that no Lease can have.

    Raises:
        ConfigError: The message has the rule, and a name that fits.
    """
    require_name(name)
    if len(name) <= NAME_MAX and _SUBDOMAIN.fullmatch(name):
        return
    shown = repr(name) if len(name) <= 60 else f"{name[:40]!r}… ({len(name)} characters)"
    raise ConfigError(
        f"an election on Kubernetes is a Lease, whose name must be a DNS name: up to {NAME_MAX} of {_RULE}; {shown} is "
        f"none; try {fitting_name(name)!r}"
    )


def fitting_name(name: str) -> str:
    """Return a DNS name that resembles *name*."""
    dashed = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    labels = (label.strip("-") for label in dashed[:NAME_MAX].split("."))
    return ".".join(filter(None, labels)) or "leader"


def is_namespace(name: str) -> bool:
    """Return whether a namespace can have this *name*."""
    return len(name) <= NAMESPACE_MAX and re.fullmatch(_LABEL, name) is not None

"""Which servers may be emulators of Azure's services, and so be asked without TLS: one rule for all of them."""

from __future__ import annotations

import ipaddress
import re

_CLOUDS = "windows.net", "azure.net", "chinacloudapi.cn", "usgovcloudapi.net", "cloudapi.de"
"""The domains of the services themselves, in all clouds."""
_PRIVATE = "localhost", "local", "internal"
"""The domains that are never a host of the internet, such as those of Kubernetes and of Docker."""
_SINGLE = re.compile(r"[a-z][a-z0-9_-]*")
"""A name of one part. One that begins with a digit may be an address: 134744072 is 8.8.8.8."""


def may_be_emulator(host: str, *, has_known_key: bool) -> bool:
    """Return whether *host* may be an emulator; what is sent to one can be read on the way.

    Args:
        host: A name or an address, without a port.
        has_known_key: Whether the login is the one of every emulator. Another one may be that of a real account: then
            the host must be on this machine or a private network, as far as that can be told without a look-up.
    """
    name = host.lower().rstrip(".")
    if _is_below(name, _CLOUDS):
        return False
    return has_known_key or _is_private(name)


def _is_private(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return bool(_SINGLE.fullmatch(name)) or _is_below(name, _PRIVATE)
    mapped = getattr(address, "ipv4_mapped", None)  # Pythons before 3.13 call every such address private
    return (mapped or address).is_private


def _is_below(name: str, domains: tuple[str, ...]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in domains)

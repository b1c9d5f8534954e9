"""What ``tenure doctor`` says about TLS: one line for every store, in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tenure._opened import Fact
from tenure._url import is_loopback

Verifies = Literal["certificate and name", "certificate", "nothing"]
"""What a client verifies of a server, over TLS."""


def tls_fact(
    verifies: Verifies | None,
    hosts: Iterable[str],
    *,
    authority: str | None = None,
    version: str = "",
    because: str = "",
    name: str = "TLS",
) -> Fact:
    """Return what is verified of the connections of a store.

    Args:
        verifies: What its client verifies; None without TLS.
        hosts: The servers, to tell whether anything leaves this machine.
        authority: Whom it trusts; None: the authorities of this machine.
        version: The version of TLS, as Python writes it; empty if it is not known.
        because: The option that leaves something unverified.
        name: What the fact is about, where a store has connections of two kinds.
    """
    shown = version.replace("TLSv", "TLS ") or "TLS"
    against, why = authority or "the authorities of this machine", f" ({because})" if because else ""
    if verifies is None:
        known = list(hosts)
        is_here = bool(known) and all(host.startswith("/") or is_loopback(host) for host in known)
        return Fact(
            name,
            f"no TLS: the connection {'stays on this machine' if is_here else 'is readable on the network'}",
            "anybody on the way can read what is sent, a password too; use TLS" if known and not is_here else "",
            "no-tls",
        )
    if verifies == "nothing":
        return Fact(name, f"{shown}; nothing is verified{why}")
    if verifies == "certificate":
        return Fact(name, f"{shown}; the server's certificate is verified against {against}; its name is not{why}")
    return Fact(name, f"{shown}; the server's certificate and name are verified against {against}")

"""What ``describe()`` and ``tenure doctor`` show of a fleet."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tenure._backends.peers.address import Settings
from tenure._backends.peers.client import COMPARE, Member
from tenure._backends.peers.tcp import address
from tenure._backends.peers.transport import CROWDED
from tenure._opened import Fact
from tenure._tls_facts import tls_fact

AHEAD_MAX = 60.0
"""Seconds that tokens may be ahead of the wall clock without a warning."""


def warnings_of(settings: Settings) -> list[Fact]:
    """Return what is reported whenever the fleet is opened: there is no key, or others can read a secret."""
    if settings.has_key:
        return list(settings.warnings)
    reached = "any host that reaches the members' ports" if settings.options.insecure else "every user of this machine"
    none = Fact("key", "none", f"{reached} may vote and lead; give all members the same key_file", "peers-no-key")
    return [none, *settings.warnings]


def keys_of(settings: Settings) -> list[Fact]:
    """Return how many keys are accepted, if they are in a file: more than one while the key is replaced."""
    return [] if settings.key_file is None else [Fact("keys", f"{len(settings.key_file.keys)} accepted")]


def tls_of(settings: Settings) -> Fact:
    """Return what is verified of the connections: each side verifies the other's certificate."""
    authority = settings.options.tls_ca
    hosts = [address(one)[0] for one in settings.addresses]
    return tls_fact("certificate and name" if authority else None, hosts, authority=authority)


async def diagnose(member: Member) -> Sequence[Fact]:
    """Return the members that are alive, as seen from here, and the fleet's rules."""
    asked = await member.or_client()
    fleet, machine, transport = asked.running()
    now = asked.now
    me = "none: a client" if fleet.me is None else fleet.members[fleet.me]
    alive = [fleet.members[member] for member in machine.liveness.alive(now)]
    facts = [Fact("members", ", ".join(fleet.members)), Fact("me", me)]
    for number, error in sorted(transport.counts.unreached.items()):
        facts.append(Fact(f"connection to {fleet.members[number]}", "fails", str(error), error.code))
    if fleet.me is not None:
        facts.append(Fact("alive", ", ".join(alive)))
    facts.append(Fact("strategy", fleet.strategy))
    rule = f"{fleet.needed} of {fleet.size} votes"
    if fleet.quorum == "none":
        advice = "a partition may give two leaders; use quorum=majority if that matters"
        facts.append(Fact("quorum", "none", advice, "peers-no-quorum"))
    else:
        facts.append(Fact("quorum", f"majority: {rule}"))
    if fleet.me is not None:
        facts.append(_clock_fact(machine.voter.newest))
    dropped = ", ".join(f"{count} {why}" for why, count in sorted(transport.counts.dropped.items()))
    advice = COMPARE if set(transport.counts.dropped) - {CROWDED} else ""
    facts.append(Fact("dropped frames", dropped or "none", advice, "peers-dropped-frames"))
    return facts


def _clock_fact(newest: int) -> Fact:
    """Return how far tokens are ahead of the wall clock: they would restart from it if no member remembered them."""
    ahead = newest / 1000 - time.time()
    if ahead < AHEAD_MAX:
        return Fact("tokens", "not ahead of the clock")
    advice = "set the clocks of all members: with a clock that is behind, tokens might not rise after restarts"
    return Fact("tokens", f"{ahead:.0f} s ahead of the clock", advice, "peers-tokens-ahead")

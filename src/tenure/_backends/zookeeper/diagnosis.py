"""The facts that ``tenure doctor`` shows of an ensemble: its servers, its ticks, and the sessions that it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kazoo.exceptions import NoNodeError

from tenure._backends.zookeeper.client import Client
from tenure._backends.zookeeper.requests import get
from tenure._backends.zookeeper.touches import lease_in
from tenure._opened import Fact
from tenure._tls_facts import Verifies, tls_fact
from tenure.errors import TenureError

VERSION_MIN = (3, 5)
SHORTEST, LONGEST = 0.2, 1_000_000.0
"""The time-outs to ask for, in seconds, in order to find out which the servers give."""
CONFIG = "/zookeeper/config"
"""Where an ensemble keeps the list of its members."""


async def diagnose(client: Client) -> list[Fact]:
    """Return facts about the servers of *client*, and the sessions that they give."""
    asked = await asyncio.gather(*(_server(client, host, port) for host, port in client.address.hosts))
    modes = [mode for _, mode in asked]
    found = [Fact("server", str(client.address)), _tls(client), *(fact for fact, _ in asked)]
    return [*found, *_standalone(modes), *await _members(client), *await _sessions(client), _rights(client)]


def _tls(client: Client) -> Fact:
    options, hosts = client.options, [host for host, _ in client.address.hosts]
    verifies: Verifies = "certificate and name" if options.check_hostname else "certificate"
    return tls_fact(verifies if options.tls else None, hosts, authority=options.ca, because="check_hostname=no")


async def _server(client: Client, host: str, port: int) -> tuple[Fact, str]:
    """Return the version and the mode of one server, and the mode alone; empty if it doesn't say."""
    name = f"server {host}:{port}"
    try:
        async with asyncio.timeout(client.options.timeout):
            answer = await _srvr(client, host, port)
    except (OSError, TimeoutError) as error:
        value = f"can't be reached: {str(error) or 'no answer'}"
        return Fact(name, value, "check whether it runs", "zookeeper-unreachable"), ""
    said = dict(line.partition(": ")[::2] for line in answer.splitlines())
    version, mode = said.get("Zookeeper version", "").split("-")[0].split(",")[0], said.get("Mode", "")
    if not mode:
        advice = "add srvr to its 4lw.commands.whitelist"
        return Fact(name, "does not say whether it leads", advice, "zookeeper-no-srvr"), ""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < 10)
    advice = "tenure needs 3.5 or newer, and is tested with 3.8" if numbers < VERSION_MIN else ""
    return Fact(name, f"{version}, {mode}", advice, "zookeeper-version"), mode


async def _srvr(client: Client, host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port, ssl=client.context)
    try:
        writer.write(b"srvr")
        await writer.drain()
        return (await reader.read()).decode(errors="replace")
    finally:
        writer.close()


def _standalone(modes: Sequence[str]) -> list[Fact]:
    if "standalone" not in modes:
        return []
    advice = "while it is away, nobody can be elected; use an ensemble of three or five"
    return [Fact("ensemble", "one server", advice, "zookeeper-standalone")]


async def _members(client: Client) -> list[Fact]:
    """Return how many members the ensemble has, if this client may read that."""
    try:
        data, _ = await client.session().ask(get(CONFIG), client.until())
    except (TenureError, NoNodeError):
        return []
    members = [line for line in data.decode(errors="replace").splitlines() if line.startswith("server.")]
    if not members:
        return []
    fewer = len(client.address.hosts) < len(members)
    advice = "name all of them in the URL, so that one of them is found when others are away" if fewer else ""
    return [Fact("ensemble", f"{len(members)} members", advice, "zookeeper-one-address")]


async def _sessions(client: Client) -> list[Fact]:
    """Return how long sessions may last, and whether the option ``tick`` fits to that."""
    shortest = await _negotiated(client, SHORTEST)
    longest = await _negotiated(client, LONGEST)
    if shortest is None or longest is None:
        return [Fact("sessions", "could not be tried", "run it again", "zookeeper-sessions-untried")]
    tick = client.options.tick
    facts = [Fact("ttl at most", f"{lease_in(longest, tick):g} s")]
    value, likely = f"{shortest:g} to {longest:g} s, by default 2 to 20 ticks", shortest / 2
    advice = ""
    if likely > 1.01 * tick:
        advice = (
            f"so the tickTime of the servers is probably {likely:g} s, and the option tick is {tick:g}; add "
            f"tick={likely:g} to the URL, or a term may be trusted for longer than its session surely lasts"
        )
    elif likely < 0.99 * tick:
        advice = (
            f"so the tickTime of the servers is probably {likely:g} s, and the option tick is {tick:g}; with "
            f"tick={likely:g} in the URL, another candidate takes over sooner"
        )
    return [Fact("sessions", value, advice, "zookeeper-tick"), *facts]


async def _negotiated(client: Client, lasts: float) -> float | None:
    """Return the time-out of a session that asks for *lasts* seconds; None if there was none in time."""
    session = client.open_session(lasts)
    try:
        await session.connected(client.until())
        return session.negotiated
    except TenureError:
        return None
    finally:
        await session.close(ends_session=True)


def _rights(client: Client) -> Fact:
    options, user = client.options, client.address.user
    who = f"{f'user {user!r}' if user else 'a user'} by {options.auth}" if client.has_login else "no login"
    if (options.acl or ("creator" if client.has_login else "open")) == "open":
        advice = "anyone who reaches the servers can end a term; write a user and a password into the URL"
        return Fact(
            "rights", f"{who}; everybody has all rights on the nodes of tenure", advice, "zookeeper-open-rights"
        )
    return Fact("rights", f"{who}; all rights on the nodes of tenure are with their creator")

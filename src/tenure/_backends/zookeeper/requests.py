"""The requests to the servers: each function returns what hands one to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kazoo.exceptions import RolledBackError, RuntimeInconsistency
from kazoo.security import ACL

from tenure._backends.zookeeper.driver import Driver

Send = Callable[[Driver], Any]
"""Hands a request to the driver, and returns the driver's own future."""
Watch = Callable[[Any], None] | None
"""Is called once when something has changed; None for no watch."""


def get(path: str, watch: Watch = None) -> Send:
    """Read the data of a node, and its status."""
    return lambda driver: driver.get_async(path, watch=watch)


def exists(path: str, watch: Watch = None) -> Send:
    """Read the status of a node; None if there is none."""
    return lambda driver: driver.exists_async(path, watch=watch)


def children(path: str, watch: Watch = None) -> Send:
    """Read the names of the nodes below a node."""
    return lambda driver: driver.get_children_async(path, watch=watch)


def sync(path: str) -> Send:
    """Let the server catch up with the leader of the ensemble before it carries out later requests of the session."""
    return lambda driver: driver.sync_async(path)


def create(path: str, acl: Sequence[ACL]) -> Send:
    """Create a node that stays, without data."""
    return lambda driver: driver.create_async(path, b"", acl=list(acl))


def create_container(path: str, acl: Sequence[ACL]) -> Send:
    """Create a node without data that the servers remove some time after its last child."""
    return lambda driver: driver.create_container_async(path, acl)


def create_candidate(prefix: str, data: bytes, acl: Sequence[ACL]) -> Send:
    """Create a node that ends with the session, with a sequence number; the answer is its path and its status."""
    return lambda driver: driver.create_async(
        prefix, data, acl=list(acl), ephemeral=True, sequence=True, include_data=True
    )


def set_data(path: str, data: bytes, version: int) -> Send:
    """Write the data of a node, if it has this version."""
    return lambda driver: driver.set_async(path, data, version)


def delete(path: str) -> Send:
    """Delete a node."""
    return lambda driver: driver.delete_async(path)


def check(paths: Iterable[str], written: tuple[str, bytes, int] | None = None) -> Send:
    """In one step that goes through the leader: check that these nodes exist, and write data as ``set_data`` does.

    The answer has a result for each; see ``failure_of``.
    """

    def send(driver: Driver) -> Any:
        transaction = driver.transaction()
        for path in paths:
            transaction.check(path, -1)
        if written is not None:
            transaction.set_data(*written)
        return transaction.commit_async()

    return send


def failure_of(results: Sequence[object]) -> Exception | None:
    """Return why the step failed that had these *results*; None if it was carried out."""
    failures = [one for one in results if isinstance(one, Exception)]
    told = [one for one in failures if not isinstance(one, (RolledBackError, RuntimeInconsistency))]
    return next(iter(told or failures), None)

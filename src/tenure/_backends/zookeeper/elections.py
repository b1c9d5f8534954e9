"""The nodes of elections: read, made and watched; nothing here is about our own places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, UnimplementedError

from tenure._backends.zookeeper.client import Client
from tenure._backends.zookeeper.errors import Expected
from tenure._backends.zookeeper.names import Dialect, Queue, dialect_of, escaped, queue_of, unescaped
from tenure._backends.zookeeper.records import NO_RECORD, Record, is_asked, is_record, read_record, shown_record
from tenure._backends.zookeeper.requests import (
    Send,
    children,
    create,
    create_container,
    exists,
    get,
    set_data,
    sync,
)
from tenure._backends.zookeeper.session import Session
from tenure._election.store import NAME_MAX
from tenure._lease import HeldBy, Vacant
from tenure.errors import ConfigError, TenureError, Unavailable

ATTEMPTS = 10
"""How often a queue that changes meanwhile is read anew, in one verb."""
READ_AT_ONCE = 200
"""How many nodes are read at once."""
GUID = 32
"""The characters of the shortest id in the name of a node; without one, a later node may have the same name."""
SURE_AFTER = 2
"""How often a holder without a record is read, until it is surely none of ours: ours writes its record soon."""


@dataclass(slots=True)
class _Seen:
    """The holder of a name as it was read last, and how often."""

    node: str
    held: HeldBy
    is_known: bool
    times: int = 1

    @property
    def is_sure(self) -> bool:
        """Whether it need not be read again: its node can't be another one of that name, and neither its record."""
        return len(self.node) > GUID and (self.is_known or self.times >= SURE_AFTER)


class Elections:
    """All elections under the path of the URL."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._root = client.address.root
        self._dialect: Dialect = client.options.dialect
        self._seen: dict[str, _Seen] = {}
        self._has_containers: bool | None = None
        """Whether the servers know containers; None until they were asked."""

    def path(self, name: str) -> str:
        """Return the path of the node of an election."""
        return f"{self._root}/{escaped(name)}"

    # --- the queue ---

    async def queue(self, session: Session, path: str, until: float, *, is_newest: bool = False) -> Queue:
        """Return the candidates in the queue of the election at *path*, in order.

        Unless it *is_newest*, it may be some ticks old, as the server that answers may be behind. What is read after it
        in this session is never older.
        """
        try:
            nodes = await session.ask(children(path), until, after=sync(path) if is_newest else None)
        except NoNodeError:
            nodes = []
        return queue_of(nodes, self._dialect)

    def require_one_dialect(self, queue: Queue, path: str) -> None:
        """Refuse to stand beside candidates of another dialect: each of the two would take itself for the first.

        Raises:
            ConfigError: There is one.
        """
        if queue.strangers:
            stranger = queue.strangers[0]
            raise ConfigError(
                f"{path} has the candidate {stranger!r}, which is of {dialect_of(stranger)}, and this one is of the "
                f"dialect {self._dialect}; they do not see each other, so both would lead; use one dialect for all, or "
                "another name or path"
            )

    async def creation(self, session: Session, path: str, until: float) -> Send:
        """Return the request that creates the node of an election: a container, where the servers know them.

        A server that doesn't know them breaks the connection, and no request beside that one is sure of an answer. So
        the first one is sent alone, whatever its answer is otherwise.
        """
        if self._has_containers is None:
            try:
                await session.ask(create_container(path, self._client.acl), until, writes=True)
            except Expected:
                self._has_containers = True
            except ConfigError as error:
                self._has_containers = not isinstance(error.__cause__, UnimplementedError)
            else:
                self._has_containers = True
        return (create_container if self._has_containers else create)(path, self._client.acl)

    async def make(self, session: Session, path: str, until: float) -> None:
        """Create the node of an election and those above it, which stay."""
        missing = [path]
        while missing:
            above = missing[-1]
            try:
                is_last = above == path
                send = await self.creation(session, path, until) if is_last else create(above, self._client.acl)
                await session.ask(send, until, writes=True)
            except NodeExistsError:
                pass
            except NoNodeError:
                missing.append(above.rpartition("/")[0])
                continue
            missing.pop()

    async def watch(self, session: Session, path: str, name: str, until: float) -> bool:
        """Set a watch on the node at *path*, if there is none; return whether the node exists.

        The request reads the node, because a watch on a node that doesn't exist would stay for ever.
        """
        watched = ("node", path)
        watcher = session.watcher(watched, name)
        if watcher is None:
            return True
        try:
            await session.ask(get(path, watcher), until, arms=watched)
        except NoNodeError:
            return False
        return True

    # --- the holder ---

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of *names*, in their order."""
        if not names:
            return []
        session, found = self._client.session(), dict[str, HeldBy | Vacant]()
        left, synced = list(dict.fromkeys(names)), sync(self._root or "/")
        for attempt in range(ATTEMPTS):
            for start in range(0, len(left), READ_AT_ONCE):
                is_first = attempt == start == 0  # what is read later in this session is never older
                found |= await self._inspect(session, left[start : start + READ_AT_ONCE], synced if is_first else None)
            left = [name for name in left if name not in found]
            if not left:
                return [found[name] for name in names]
        raise _unsteady(self.path(left[0]))

    async def _inspect(self, session: Session, names: Sequence[str], after: Send | None) -> dict[str, HeldBy | Vacant]:
        """Return the holders of *names*, without those whose queue has changed meanwhile."""
        until = self._client.until()
        listings = await session.ask_each([children(self.path(name)) for name in names], until, after=after)
        firsts: dict[str, str] = {}
        for name, nodes in zip(names, listings, strict=True):
            _require_rights(nodes)
            first = None if isinstance(nodes, NoNodeError) else queue_of(nodes, self._dialect).first
            if first is not None:
                firsts[name] = first
        # Each record is read after the node that it may be about, as its holder writes it later.
        readings = [get(f"{self.path(name)}/{first}") for name, first in firsts.items()]
        answers = await session.ask_each([*readings, *(get(self.path(name)) for name in names)], until)
        leaders = dict(zip(firsts, answers, strict=False))
        hidden = [name for name, answer in leaders.items() if isinstance(answer, TenureError)]
        if hidden:  # by a candidate of others; whether a node exists, everybody may ask
            statuses = await session.ask_each([exists(f"{self.path(name)}/{firsts[name]}") for name in hidden], until)
            leaders |= {
                name: (b"", stat) if stat else NoNodeError() for name, stat in zip(hidden, statuses, strict=True)
            }
        found: dict[str, HeldBy | Vacant] = {}
        for name, answer in zip(names, answers[len(firsts) :], strict=True):
            _require_rights(answer)
            is_gone = isinstance(answer, NoNodeError)
            record = NO_RECORD if is_gone else shown_record(answer[0])
            if name not in firsts:
                found[name] = Vacant(name, record.token)
            elif not is_gone and not isinstance(leaders[name], NoNodeError):
                data, stat = leaders[name]
                held = _held_by(name, firsts[name], data, stat, record)
                found[name] = replace(held, resign_asked=is_asked(record, stat.czxid, data))
        return found

    async def held_by(self, session: Session, name: str, first: str, until: float) -> HeldBy | None:
        """Return the holder of *name* by its node, which is the *first* one, for a candidate; None if it is gone.

        One without a record is soon taken for another program, and not read again. If it is one of ours that was slow,
        its metadata are missing then, which candidates don't need.
        """
        seen = self._seen.get(name)
        if seen is not None and seen.node == first and seen.is_sure:
            return seen.held
        path = self.path(name)
        node = f"{path}/{first}"
        await session.connected(until)
        reading = session.send(get(node))
        record_reading = session.send(get(path))
        try:
            data, stat = await session.answer(reading, until)
            record = read_record((await session.answer(record_reading, until))[0], path) or NO_RECORD
        except NoNodeError:
            self._seen.pop(name, None)
            return None
        held = _held_by(name, first, data, stat, record)
        times = seen.times + 1 if seen is not None and seen.node == first else 1
        self._seen[name] = _Seen(first, held, record.token == held.token, times)
        return held

    # --- the record ---

    async def record(self, session: Session, path: str, until: float) -> tuple[Record | None, int]:
        """Return the record at *path* and its version; no record if somebody else's data is there."""
        try:
            data, stat = await session.ask(get(path), until)
        except NoNodeError:
            return NO_RECORD, -1
        return read_record(data, path), stat.version

    async def names(self) -> Sequence[str]:
        """List the elections in which a candidate of tenure has led, sorted."""
        session, root = self._client.session(), self._root or "/"
        try:
            nodes: list[str] = await session.ask(children(root), self._client.until(), after=sync(root))
        except NoNodeError:
            return []
        found = []
        for start in range(0, len(nodes), READ_AT_ONCE):
            some = nodes[start : start + READ_AT_ONCE]
            readings = [get(f"{self._root}/{node}") for node in some]
            answers = await session.ask_each(readings, self._client.until())  # each time, a time limit of its own
            for node, answer in zip(some, answers, strict=True):
                data = b"" if isinstance(answer, (NoNodeError, TenureError)) else answer[0]
                if is_record(data) and (name := unescaped(node)) is not None:
                    found.append(name)
        return sorted(found)

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none, or it is no candidate of tenure."""
        session, path, until = self._client.session(), self.path(name), self._client.until()
        for _ in range(ATTEMPTS):
            queue = await self.queue(session, path, until, is_newest=True)
            if queue.first is None:
                return False
            node = f"{path}/{queue.first}"
            stat: Any = await session.ask(exists(node), until)
            record, version = await self.record(session, path, until)
            if stat is None:
                continue
            if record is None or record.token != stat.czxid:
                return False
            if record.resign == record.token:
                return True
            asked = replace(record, resign=record.token).written()
            try:
                await session.ask(set_data(path, asked, version), until, writes=True)
            except (BadVersionError, NoNodeError):
                continue
            return True
        raise _unsteady(path)

    # --- changes ---

    async def follow(self, name: str) -> bool:
        """Set watches that report changes of the leader of *name*; return whether one was missing."""
        session, path, until = self._client.session(), self.path(name), self._client.until()
        await session.connected(until)
        try:
            is_new = await self._arm(session, "followed", path, name, until)
        except NoNodeError:  # there is no such election yet: its creation is reported
            return await self._arm(session, "made", path, name, until)
        queue = await self.queue(session, path, until)
        if queue.first is None:
            return await self._arm(session, "children", path, name, until) or is_new
        if session.is_armed(("node", f"{path}/{queue.first}")):
            return is_new
        await self.watch(session, f"{path}/{queue.first}", name, until)  # if it is gone, that is a change, too
        return True

    async def _arm(self, session: Session, kind: str, path: str, name: str, until: float) -> bool:
        """Set one watch, if it isn't set; return whether it was not."""
        watched = (kind, path)
        watcher = session.watcher(watched, name)
        if watcher is None:
            return False

        ask = {"followed": get, "made": exists, "children": children}[kind]
        await session.ask(ask(path, watcher), until, arms=watched)
        return True


def _held_by(name: str, first: str, data: bytes, stat: Any, record: Record) -> HeldBy:
    """Return the holder of *name* by the *data* and the status of its node, which is the *first* one."""
    if record.token == stat.czxid:
        return HeldBy(name, record.holder, record.token, None, record.metadata)
    shown = data[: 4 * NAME_MAX].decode(errors="replace")[:NAME_MAX]
    return HeldBy(name, shown or first, stat.czxid, None)


def _require_rights(answer: object) -> None:
    """Refuse an answer that says that this client may not read what it has asked about."""
    if isinstance(answer, TenureError):
        raise answer


def _unsteady(path: str) -> Unavailable:
    return Unavailable(f"the queue at {path} changes too often to be read; ask again")

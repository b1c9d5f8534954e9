"""``Backend``: makes the elections and queues of one store, and answers questions about it.

A program that sends one message loads no elections, schedules and partitions: what they are made of is imported where
they are made. Their types are named as ``tenure.Election``, which loads them, so that hints can be evaluated all the
same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import tenure
from tenure import _registry as registry
from tenure._connection import Connection
from tenure._election.store import require_name, usable_names
from tenure._lease import Leader, Vacant, leader_of
from tenure._opened import Opened
from tenure._queue.broker import Broker, QueueOptions, checked_changes, settings_with
from tenure._queue.checks import check_count, check_name
from tenure._queue.context import QueueContext
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.process_name import process_name
from tenure._runtime.renewal_thread import RenewalThread
from tenure._url import Url
from tenure.errors import ConfigError, refuse_unknown

if TYPE_CHECKING:
    from tenure._election.term import MakeTerm
    from tenure._partitions.partitions import MakePartitionTerm
    from tenure._telemetry.telemetry import Guarded

LISTED_AT_ONCE = 16
"""The queues whose schedules are asked for at once, as the store may be far away."""


class Backend:
    """A store that coordinates equal instances; made by :func:`tenure.connect`.

    It is used inside ``async with``; or between :meth:`open` and :meth:`aclose`, where a block doesn't fit.
    """

    def __init__(
        self,
        url: str,
        *,
        renewal_thread: RenewalThread | None = None,
        clock: Clock | None = None,
        credentials: tenure.AskCredentials | None = None,
        on_event: Callable[[tenure.Event], None] | None = None,
        telemetry: tenure.telemetry.Telemetry | Sequence[tenure.telemetry.Telemetry] | None = None,
    ) -> None:
        parsed = Url.parse(url)
        if credentials is not None:
            from tenure._logins import require_credentials

            require_credentials(credentials, parsed)
        self._module = registry.load(parsed)
        self._clock = clock or SystemClock()
        self._given_on_event = on_event
        self._telemetry: Guarded | None = None
        self._on_event = on_event
        if telemetry is not None:
            from tenure._telemetry.telemetry import given_telemetry

            self.observe(*given_telemetry(telemetry))
        self._connection = Connection(parsed, self._module, self._clock, renewal_thread, credentials)

    @property
    def url(self) -> Url:
        """The address of the store. Another one that is set before the backend is opened is opened instead."""
        return self._connection.url

    @url.setter
    def url(self, url: Url) -> None:
        self._connection.url = url

    def observe(self, *telemetry: tenure.telemetry.Telemetry) -> None:
        """Add metrics or traces to those that :func:`tenure.connect` was given, for queues and elections made later.

        Raises:
            ConfigError: One of them is no :class:`tenure.telemetry.Telemetry`.
        """
        from tenure._telemetry.hook import ObservedHook
        from tenure._telemetry.telemetry import Guarded, given_telemetry

        added = given_telemetry(telemetry)
        if added:
            before = () if self._telemetry is None else self._telemetry.each
            self._telemetry = Guarded([*before, *added])
            self._on_event = ObservedHook(self._telemetry, self._given_on_event)

    async def open(self) -> Backend:
        """Open the backend unless it is open, and return it: for frameworks whose start and end are two functions.

        ``async with`` does the same. It starts the renewal thread; the first question connects. After :meth:`aclose`,
        and in a child by fork of a process that has it open, it is opened anew; elections and queues that were made
        before stay closed.

        Example::

            backend = await tenure.connect("sqlite:///work.db").open()
            ...
            await backend.aclose()
        """
        await self._connection.open()
        return self

    async def aclose(self) -> None:
        """Close the backend, if open: end campaigns and consumers, release leases and locks, close the store.

        Handlers are cancelled; await ``queue.drain()`` before, to let them finish. So is a handler that calls this: it
        gets no further than that line, and ``consume`` raises ``Unavailable``. Let the opener close it.
        """
        await self._connection.close()

    async def __aenter__(self) -> Backend:
        await self._connection.open(anew=True)
        return self

    if not TYPE_CHECKING:  # so that type checkers go on refusing it

        def __enter__(self) -> None:
            raise TypeError(
                "tenure.connect() is for 'async with'; in a program without asyncio, "
                "write 'with tenure.sync.connect(…) as backend:'"
            )

        __exit__ = __enter__  # Python looks for both first

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every campaign and every consumer, release leases and locks, close the store. See :meth:`aclose`."""
        await self.aclose()

    def election(self, name: str, **options: Unpack[tenure.ElectionOptions]) -> tenure.Election:
        """Return an election for *name*, in which this object is one candidate.

        Args:
            name: 1 to 1,024 characters. All instances that use it compete.
            ttl: Length of a lease in seconds (15, or the nearest within this backend's limits). A dead leader's
                name is free after this time.
            renew_every, retry_every, drift, margin, grace: See :class:`tenure.Timing`; unset, they follow from *ttl*.
            stall_after: Renew only while ``term.beat()`` was called within so many seconds.
            health: Renew only while this function (plain or async, called on the work's loop) returns true.
            overrun: The reaction when work still runs at the end of its term: ``"report"`` leaves the lease to run out
                and says so; ``"exit"`` ends the process with code 70, from a thread of its own.
            metadata: Text about the leader for others to read, such as its address.
            label: The readable part of the holder's identity (default: host name and process id). A random part is
                always appended: identities must never be shared.

        Raises:
            ConfigError: The times leave too little room, or don't fit this backend's limits; or it has queues only.
            TypeError: There is no such option; the message names the nearest one.
        """
        return self._election(name, options, tenure.Term)

    def _election(self, name: str, options: tenure.ElectionOptions, make_term: MakeTerm) -> tenure.Election:
        """Return an election whose terms are made by *make_term*."""
        from tenure._election.options import ElectionOptions, timing_of

        renewal_thread, opened = self._connection.require_open()
        driver = self._connection.require_driver()
        refuse_unknown("election", options, ElectionOptions.__annotations__)
        return tenure.Election(
            name,
            timing_of(options, opened.leases.traits),
            driver=driver,
            renewal_thread=renewal_thread,
            label=options.get("label"),
            metadata=options.get("metadata"),
            stall_after=options.get("stall_after"),
            health=options.get("health"),
            overrun=options.get("overrun", "report"),
            on_event=self._on_event,
            make_term=make_term,
        )

    def partitions(
        self, name: str, partitions: int | Iterable[str], *, weight: int = 1, **options: Unpack[tenure.ElectionOptions]
    ) -> tenure.Partitions:
        """Return the partitions of the group *name*, which its members share; this object is one member.

        Every member owns a fair share of them, each under a lease of its own, and runs the work of each: without a
        coordinator, and without two owners of one. See :meth:`tenure.Partitions.run`.

        Args:
            name: 1 to some 1,000 characters. The leases are called ``NAME.partition-0`` and so on, and those
                that say which members there are, ``NAME.member-0`` and so on.
            partitions: How many, or their names: the same for all members.
            weight: The weight of this member's share, from 1 to 1,000: one of weight 2 owns twice as many.
            options: Those of :meth:`election`, for the lease of each partition. The keys of the metadata that begin
                with ``tenure-`` are tenure's own.

        Raises:
            ConfigError: As :meth:`election`; or the partitions or the weight can't be used.
            TypeError: There is no such option; the message names the nearest one.

        Example::

            partitions = backend.partitions("orders", 64)
            await partitions.run(work)  # work(term) for each term.partition owned
        """
        from tenure._partitions.partitions import make_partition_term

        return self._partitions(name, partitions, weight, options, make_partition_term)

    def _partitions(
        self,
        name: str,
        partitions: int | Iterable[str],
        weight: int,
        options: tenure.ElectionOptions,
        make_term: MakePartitionTerm,
    ) -> tenure.Partitions:
        """Return partitions whose terms are made by *make_term*."""
        from tenure._election.options import ElectionOptions, timing_of
        from tenure._partitions.plan import Layout, checked_partitions

        renewal_thread, opened = self._connection.require_open()
        driver = self._connection.require_driver()
        refuse_unknown("partitions", options, ElectionOptions.__annotations__)
        require_name(name)
        return tenure.Partitions(
            Layout(name, checked_partitions(partitions)),
            timing_of(options, opened.leases.traits),
            driver=driver,
            renewal_thread=renewal_thread,
            options=options,
            weight=weight,
            on_event=self._on_event,
            make_term=make_term,
        )

    def queue(self, name: str, **settings: Unpack[QueueOptions]) -> Queue:
        """Return the queue called *name*. It comes into being when it is first used.

        This program expects the settings given here. The first use declares those that are not declared yet, for all
        programs; where one was declared otherwise, every use raises ``ConfigError``. Use
        :meth:`tenure.Queue.declare` to change them. A setting not given is neither checked nor written: its declared
        value holds, or else the default in brackets below.

        Args:
            name: 1 to 200 printable characters, without ``$``. All instances that use it compete.
            lock: For how many seconds a received message belongs to its consumer (30). Consumers renew it themselves.
            max_deliveries: How often a message is handed out before it is dead-lettered (10).
            dedupe_window: For how many seconds a message's id is remembered, so that it is kept once (600).
            body_max: The largest body in bytes (1 MiB, or the most that the backend takes).
            dead_retention: For how many seconds a dead letter is kept (``math.inf``: until it is redriven or purged).
                After that, a process that uses the queue removes it for good.
            max_locked: How many messages may be locked at once over all consumers of the fleet (``math.inf``: any
                number). A consumer that dies frees its places when its locks end. This limit and the next two are kept
                on SQLite, PostgreSQL, Redis and in memory (trait ``limits``).
            rate: How many messages may be received in how many seconds over all consumers (``math.inf``: any number):
                ``(100, 60)``. In no 60 seconds are there more, and after an idle time, all of them come at once; for an
                even flow, ``(1, 0.6)``. Each delivery counts, a second one of the same message, too.
            session_rate: The same for each session by itself: a limit for each key that messages have as their session.
                (At once, a session has one consumer.)

        Raises:
            ConfigError: A setting can't work, or doesn't fit this backend. (That one was declared otherwise is raised
                by the first use.)
        """
        renewal_thread, opened = self._connection.require_open()
        broker = self._broker_of(opened)
        expected = checked_changes("queue", settings)
        if "paused" in expected:
            raise ConfigError(
                "paused is declared by an operator, not expected by a program: await queue.declare(paused=True), or "
                f"tenure queue pause {name}"
            )
        usual = settings_with(expected, broker.traits)
        holder = process_name()
        context = QueueContext(
            check_name(name), broker, renewal_thread, self._clock, usual, holder, self._on_event, expected
        )
        context.hints = self._connection.queues.hints
        context.looks = self._connection.queues.looks
        context.telemetry = self._telemetry
        context.tracing = None if self._telemetry is None else self._telemetry.tracing()
        queue = Queue(context, self._connection.queues.requests)
        self._connection.queues.add(queue)
        return queue

    def _broker_of(self, opened: Opened) -> Broker:
        broker: Broker | None = getattr(opened, "broker", None)
        if broker is None:
            raise ConfigError(f"{self.url} has elections, but no queues; use another store for them")
        return broker

    def schedule(
        self,
        name: str,
        every: str | float | timedelta,
        *,
        queue: str,
        timezone: str = "UTC",
        missed: tenure.Missed = "once",
        missed_after: float = 60.0,
        message: Outgoing | None = None,
    ) -> tenure.Schedule:
        """Return a schedule, which sends a message to *queue* at each of its times, once in the whole fleet.

        ``await schedule.run()`` in every instance of the program. They need no leader: the store notes each slot in the
        step that sends its message, and lets only one of them do it. Its clock decides when a slot is due. A new
        schedule begins with its next slot. If the plan is changed, the program that is started last writes the new one,
        and all that run go by it.

        The message has the id ``NAME@2026-10-25T02:00:00Z``, and the headers ``schedule`` (the name) and ``slot`` (the
        time of the slot, in *timezone*). On stores whose trait ``schedules`` is ``emulated``, a process that dies in
        the moment of sending leaves a slot that is sent a second time, under the same id.

        Args:
            name: 1 to 200 printable characters, without ``$``.
            every: A cron expression (``"0 3 * * *"``: minute, hour, day of the month, month, day of the week; six
                fields begin with the second; also ``"@daily"``), for the extra ``cron``. Or an interval, in seconds or
                as a ``timedelta``, counted from the Unix epoch.
            queue: The name of the queue.
            timezone: Of the cron expression, such as ``"Europe/Berlin"``. When its clocks change, it is as in Debian's
                cron: an expression with a fixed hour neither skips a day nor comes twice.
            missed: The treatment of slots that could not be sent in time, as no process ran or the store was away.
                ``"once"``: only the newest of them is sent, however late. ``"skip"``: none that is later than
                *missed_after*. ``"all"``: each of them, but only the newest 100.
            missed_after: For ``"skip"``: seconds.
            message: Its body, and its properties other than ``id`` and ``at``. In place of an empty body, it has the
                time of the slot as JSON text.

        Raises:
            ConfigError: The expression or the time zone can't be read, or another value can't be used.
            BackendNotInstalled: It is a cron expression, and cronsim is not installed.

        Example::

            nightly = backend.schedule("nightly", "0 3 * * *", queue="reports", timezone="Europe/Berlin")
            await nightly.run()
        """
        from tenure._schedule.plan import plan_of
        from tenure._schedule.schedule import template_of

        check_name(name, "the schedule's name")
        to = self.queue(queue)
        template = template_of(message, to.traits.body_max)
        return tenure.Schedule(to, name, plan_of(every, timezone, missed, missed_after), template)

    async def schedules(self) -> list[tenure.ScheduleStatus]:
        """Return all schedules that this store keeps, sorted by the names of their queues, then by their own.

        Raises:
            Unavailable: The store could not be asked.
            ConfigError: It has elections only.
        """
        _, opened = self._connection.require_open()
        names = await _queue_names(self._broker_of(opened))
        found: list[tenure.ScheduleStatus] = []
        for start in range(0, len(names), LISTED_AT_ONCE):
            some = names[start : start + LISTED_AT_ONCE]
            for one in await asyncio.gather(*(self.queue(name).schedules.list() for name in some)):
                found += one
        return found

    async def queues(self) -> list[str]:
        """Return the names of all queues that were ever used on this store, sorted.

        The queues in which processes receive answers to their requests are left out, unless something is in them.

        Raises:
            Unavailable: The store could not be asked.
            ConfigError: It has elections only.
        """
        from tenure._queue.requests import is_reply_queue

        _, opened = self._connection.require_open()
        broker = self._broker_of(opened)
        names = await _queue_names(broker)
        return [name for name in names if not is_reply_queue(name) or await broker.stats(name) != Stats()]

    async def leaders(self) -> dict[str, Leader | None]:
        """Return every name that was ever led on this store, sorted, with its present leader.

        Raises:
            Unavailable: The store could not be asked.
            ConfigError: It has queues only.
        """
        renewal_thread, _ = self._connection.require_open()
        leases = self._connection.require_leases()

        async def look() -> dict[str, Leader | None]:
            found = await leases.inspect_many(usable_names(await leases.names()))
            return {one.name: leader_of(one) for one in found}

        return await renewal_thread.call(look)

    async def vacancies(self, *names: str) -> dict[str, float | None]:
        """Return those names that have no leader now, with the least number of seconds since they had one.

        That is by the store's clock, and None where the store doesn't know it: on Azure, etcd, ZooKeeper and
        among peers, on Redis if the last leader did not release its lease, and for a name that was never led. On
        Kubernetes it is the time since this process saw the name vacant.

        Args:
            names: Which names to look at; without any, all that were ever led on this store, sorted.

        Raises:
            Unavailable: The store could not be asked.
            ConfigError: It has queues only.
        """
        renewal_thread, _ = self._connection.require_open()
        leases = self._connection.require_leases()

        async def look() -> dict[str, float | None]:
            found = await leases.inspect_many(names or usable_names(await leases.names()))
            return {one.name: one.vacant_for for one in found if isinstance(one, Vacant)}

        return await renewal_thread.call(look)

    async def diagnose(self, *, write: bool = False) -> tenure.Diagnosis:
        """Reach the store; return its facts, its round trip, and warnings.

        Args:
            write: Whether to find out more by writing what is then removed: a message is sent, received and completed
                in a queue of its own; on etcd, the shortest lease is asked for.

        Raises:
            Unavailable: The store could not be asked.
        """
        _ = tenure.Diagnosis  # loads the type of the answer under its public name
        from tenure._diagnosis import diagnose

        renewal_thread, opened = self._connection.require_open()
        return await renewal_thread.call(lambda: diagnose(str(self.url), opened, self._clock, write=write))

    async def migrate(self) -> str:
        """Create or upgrade the schema that the store needs, if it needs one; return a text that says which.

        On RabbitMQ, it declares what delayed messages go through, for users who may not. Any number of processes may do
        it at once, and again.

        Raises:
            ConfigError: The schema is newer than this tenure, or the user may not create it.
            Unavailable: The store could not be asked. Then nothing has changed; RabbitMQ may have a part of it.
        """
        renewal_thread, opened = self._connection.require_open()
        migrate: Callable[[], Coroutine[Any, Any, object]] | None = getattr(opened, "migrate", None)
        if migrate is None:
            return f"{self.url} needs no schema; there is nothing to do"
        return str(await renewal_thread.call(migrate))

    async def set_clock(self, *, dry_run: bool = False) -> str:
        """Set the clock of the queues in an SQLite file back to this machine's; return a text that says what was done.

        It never goes back by itself. What was noted while it was ahead is shifted with it, so no message is lost or
        delivered twice by it. Schedules go on with their next slots: those that were sent for times which are yet to
        come are sent again, under the same ids. Other processes may use the file meanwhile.

        Args:
            dry_run: Whether only to say what would be done.

        Raises:
            ConfigError: The store is not an SQLite file.
            Unavailable: The file could not be written. Then do it again: schedules go on after the clock is set.
        """
        renewal_thread, opened = self._connection.require_open()
        set_clock: Callable[..., Coroutine[Any, Any, object]] | None = getattr(opened, "set_clock", None)
        if set_clock is None:
            raise ConfigError(f"{self.url} has no clock that can be set; only an SQLite file has")
        said = str(await renewal_thread.call(lambda: set_clock(dry_run=dry_run)))
        if not dry_run:  # also if the clock is right: an earlier call may have ended in between
            for one in await self.schedules():
                if not (one.paused or one.problem):
                    await self.queue(one.queue).schedules.resume(one.name)
        return said

    async def migration_sql(self, since: int | None = None) -> str:
        """Return the SQL that :meth:`migrate` would run, to be read first, and run as another user.

        Nothing is changed. If there is nothing to run, it is an SQL comment that says so.

        Args:
            since: The version that the schema has, 0 for none yet. Then the store is not asked, and the backend need
                not be open. If unset, it is found out.

        Raises:
            ConfigError: There is no such version, or the schema is newer than this tenure.
            Unavailable: The store could not be asked.
        """
        if since is not None:
            check_count("since", since, least=0)
            write: Callable[[Url, int], str] | None = getattr(self._module, "migration_sql", None)
            if write is not None:
                return write(self.url, since)
        else:
            renewal_thread, opened = self._connection.require_open()
            ask: Callable[[], Coroutine[Any, Any, str]] | None = getattr(opened, "migration_sql", None)
            if ask is not None:
                return await renewal_thread.call(ask)
        return f"-- {self.url} has no schema, so there is no SQL to run"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}, {self._connection.state}>"


async def _queue_names(broker: Broker) -> list[str]:
    """Return the queues of a store, without those of other programs there whose name no queue of tenure can have."""
    found = []
    for name in await broker.names():
        with suppress(ConfigError):
            found.append(check_name(name))
    return found


def import_late_modules() -> None:
    """Import what methods of backends, queues and messages import when they are called first.

    For ``tenure.sync``, which calls them on the renewal thread: there, an import would delay renewals.
    """
    import tenure._diagnosis
    import tenure._queue.bodies
    import tenure._queue.lock_renewer
    import tenure._queue.requests
    import tenure._queue.selections  # noqa: F401


def url_given(url: str | None) -> str:
    """Return *url*, or the URL that the environment names in its place.

    Raises:
        ConfigError: Neither is set.
    """
    found = os.environ.get("TENURE_URL") if url is None else url
    if url is None and not found:
        raise ConfigError(
            "no store is named: connect() was given no URL, and the environment variable TENURE_URL is "
            f"{'empty' if found == '' else 'not set'}; set it, or write for example connect('sqlite:///work.db')"
        )
    assert found is not None
    return found


def connect(
    url: str | None = None,
    *,
    credentials: tenure.AskCredentials | None = None,
    on_event: Callable[[tenure.Event], None] | None = None,
    telemetry: tenure.telemetry.Telemetry | Sequence[tenure.telemetry.Telemetry] | None = None,
) -> Backend:
    """Connect to the store at *url*; use it as ``async with tenure.connect(url) as backend:``.

    Where a block doesn't fit, there are ``await backend.open()`` and ``await backend.aclose()``.

    Args:
        url: ``sqlite:///path``, ``postgresql://…``, ``redis://…``, ``amqp://…``, ``azure://…``, ``servicebus://…``,
            ``peers://…`` or ``memory:``; options stand in the query and are checked. Without, the environment variable
            ``TENURE_URL`` names the store.
        credentials: A function, ``async`` or not, that returns :class:`Credentials`, or the password: for logins that
            change, such as the tokens of a cloud. It is called for each new connection, unless it has said for how long
            an answer lasts; in a thread, and what it awaits on this loop. Without, the URL has the password, or names a
            file (``password_file=``) or a command (``password_command=``).
        on_event: Called on the caller's loop with everything that happens to its candidates and consumers: an
            ``Event``, of one of the kinds in ``tenure.events``. It must return soon.
        telemetry: Metrics and traces, of which an event for each message would be too slow: see
            :mod:`tenure.telemetry`. One, or several. Without, nothing is measured.

    Raises:
        ConfigError: The URL names no backend, or an option is unknown or doesn't fit; or there is none; or its store
            has no passwords, and *credentials* are given.
        BackendNotInstalled: The backend's driver is missing; the message names the pip command.
    """
    return Backend(url_given(url), credentials=credentials, on_event=on_event, telemetry=telemetry)

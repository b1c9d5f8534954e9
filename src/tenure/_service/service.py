"""``Service``: handlers, schedules, leaders and hooks, declared in one place and run side by side."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, cast, overload

import tenure
from tenure import (
    Backend,
    CandidateStatus,
    ConfigError,
    ConsumeOptions,
    Event,
    Message,
    Outgoing,
    QueueOptions,
    ScheduleStatus,
)
from tenure._queue.checks import check_name
from tenure._queue.handlers import is_async_function
from tenure._runtime.signals import on_shutdown_signal
from tenure._service.bodies import check_kind, name_of
from tenure._service.calls import called
from tenure._service.opening import Opening
from tenure._service.parts import Consumption, Leadership, Part, Sending, ThreadLeadership, UntilEmpty, run_parts
from tenure._service.signatures import (
    UNKNOWN,
    check_callable,
    check_leader,
    check_parameters,
    check_parameters_at_times,
    name_of_function,
    required,
    signature_of,
)
from tenure._service.status import HandlerStatus, ServiceStatus
from tenure._service.typed_queue import TypedQueue
from tenure.errors import refuse_unknown

if TYPE_CHECKING:
    from tenure._schedule.plan import Plan
    from tenure.telemetry import Telemetry

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
LeaderT = TypeVar("LeaderT", bound="Callable[[tenure.Term], Awaitable[Any]] | Callable[[tenure.sync.Term], Any]")
HookT = TypeVar("HookT", bound=Callable[[], Any])

Lifespan = Callable[["Service"], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]]
"""``lifespan(service)``: a block, async or not, around all that the service does."""

_log = logging.getLogger("tenure")


class TypedHandler(Protocol[T]):
    """The decorator for handlers of a typed queue: their first argument is its body."""

    @overload
    def __call__(self, function: Callable[[T], R], /) -> Callable[[T], R]: ...
    @overload
    def __call__(self, function: Callable[[T, Message], R], /) -> Callable[[T, Message], R]: ...
    @overload
    def __call__(self, function: Callable[[T, tenure.sync.Message], R], /) -> Callable[[T, tenure.sync.Message], R]: ...
    @overload
    def __call__(self, function: Callable[[Message], R], /) -> Callable[[Message], R]: ...
    @overload
    def __call__(self, function: Callable[[tenure.sync.Message], R], /) -> Callable[[tenure.sync.Message], R]: ...


class Service:
    """Handlers of queues, schedules, leaders and hooks, declared in one place and run side by side.

    All instances of a program run the same service: they compete for the messages, and one of them leads each name.

    Args:
        url: The store, as for :func:`tenure.connect`; without, the environment variable ``TENURE_URL`` names it when
            the service is opened. A :class:`tenure.Backend` in its place is opened and closed by its owner.
        credentials: As for :func:`tenure.connect`.
        on_event: As for :func:`tenure.connect`; events of leaders that are plain functions come on a thread of
            tenure's own.
        telemetry: As for :func:`tenure.connect`.
        lifespan: ``lifespan(service)`` returns a block, async or not, that is entered once the backend is open, and
            left when all handlers and leaders have ended: the place for what they depend on.

    Example::

        service = tenure.Service("postgresql://db/shop")
        receipts = service.queue("receipts", Receipt)


        @service.handler("orders", concurrency=10)
        async def serve(order: Order) -> None:
            await receipts.send(Receipt(order.id))


        @service.leader("nightly-report", ttl=15)
        async def report(term: tenure.Term) -> None: ...


        if __name__ == "__main__":
            service.run()
    """

    def __init__(
        self,
        url: str | Backend | None = None,
        *,
        credentials: tenure.AskCredentials | None = None,
        on_event: Callable[[Event], None] | None = None,
        telemetry: tenure.telemetry.Telemetry | Sequence[tenure.telemetry.Telemetry] | None = None,
        lifespan: Lifespan | None = None,
    ) -> None:
        own = {"credentials": credentials, "on_event": on_event}
        if isinstance(url, Backend) and (given := [name for name, value in own.items() if value is not None]):
            raise ConfigError(f"{url!r} has {given[0]} of its own; give it to tenure.connect()")
        if lifespan is not None:
            check_callable("lifespan", lifespan, "the service and returns a block")
        self._connect = partial(tenure.connect, credentials=credentials, on_event=on_event)
        self._lifespan = lifespan
        self._is_owner = not isinstance(url, Backend)
        self._given: Backend | None = None
        if url is not None:
            self._given = url if isinstance(url, Backend) else self._connect(url)
        self._telemetry: list[Telemetry] = []  # until the backend is there
        if telemetry is not None:
            from tenure._telemetry.telemetry import given_telemetry

            self.observe(*given_telemetry(telemetry))
        self._queues: dict[str, TypedQueue[Any]] = {}
        self._handlers: list[_Handler] = []
        self._schedules: list[_Scheduled] = []
        self._leaders: list[_Leader] = []
        self._startup: list[Callable[[], Any]] = []
        self._shutdown: list[Callable[[], Any]] = []
        self._opening: Opening | None = None
        self._users = 0
        self._running: list[Part] = []
        self._stopping: asyncio.Event | None = None  # of the present run

    # --- declaring ---

    @overload
    def queue(self, name: str, **settings: Unpack[QueueOptions]) -> TypedQueue[bytes]: ...
    @overload
    def queue(self, name: str, kind: type[T], **settings: Unpack[QueueOptions]) -> TypedQueue[T]: ...
    @overload
    def queue(self, name: str, kind: object, **settings: Unpack[QueueOptions]) -> TypedQueue[Any]: ...
    def queue(self, name: str, kind: Any = bytes, **settings: Unpack[QueueOptions]) -> TypedQueue[Any]:
        """Return the queue called *name*, whose bodies are all of one type.

        It can be declared before the service is open, and used while it is.

        Args:
            name: As for :meth:`tenure.Backend.queue`.
            kind: The type of the bodies: ``bytes``, ``str``, or what :meth:`tenure.Received.decode` reads.
            settings: As for :meth:`tenure.Backend.queue`.

        Raises:
            ConfigError: It was declared here with another type or other settings.
            TypeError: There is no such setting.

        Example::

            orders = service.queue("orders", Order, lock=60)
            await orders.send(Order("kettle", 2))
        """
        refuse_unknown("queue", settings, QueueOptions.__annotations__)
        known = self._queues.get(name)
        if known is None:
            known = self._queues[name] = TypedQueue(self._opened, name, kind, settings)
        elif (known.kind, known.settings) != (kind, settings):
            raise ConfigError(
                f"the queue {name!r} was declared as {_described(known.kind, known.settings)}, and now as "
                f"{_described(kind, settings)}; declare it once, and use the object that this returns"
            )
        return known

    @overload
    def handler(self, queue: str, **options: Unpack[ConsumeOptions]) -> Callable[[F], F]: ...
    @overload
    def handler(self, queue: TypedQueue[T], **options: Unpack[ConsumeOptions]) -> TypedHandler[T]: ...
    def handler(self, queue: str | TypedQueue[Any], **options: Unpack[ConsumeOptions]) -> Any:
        """Declare the decorated function as the handler of the messages of a queue.

        It takes the body, the message (a :class:`tenure.Message`; a plain function: a :class:`tenure.sync.Message`), or
        both in this order. A body that is not of its type is dead-lettered at once, as ``undecodable``. If the sender
        asks for an answer, the result is the reply, unless the function is annotated to return None. It may return or
        raise ``Retry`` and ``Reject``, as in :meth:`tenure.Queue.consume`. The function itself is returned unchanged.

        Args:
            queue: Its name; or what :meth:`queue` returned, whose type the body has. With a name that was not declared
                there, the annotation of the parameter is the type.
            options: As for :meth:`tenure.Queue.consume`, without ``sigterm`` and ``until_empty``, which are
                options of :meth:`run`.

        Raises:
            ConfigError: The function can't be a handler, or the queue has one.
            TypeError: There is no such option.
        """
        self._check_consume_options("handler", options)
        name = queue if isinstance(queue, str) else queue.name
        if not isinstance(queue, str) and self._queues.get(name) is not queue:
            raise ConfigError(f"{queue!r} is a queue of another service; declare it here with service.queue()")

        def declare(function: Any) -> Any:
            check_callable("handler", function, "the body, the message, or both")
            check_parameters(function)
            self._add_handler(_Handler(name, function, options))
            return function

        return declare

    def _add_handler(self, new: _Handler) -> None:
        for other in self._handlers:
            if (other.queue, other.is_for_sessions) == (new.queue, new.is_for_sessions):
                raise ConfigError(
                    f"the queue {new.queue!r} has a handler in this service: {name_of_function(other.function)}; with "
                    "a second one, each message would go to either of them. Let one handler take a union of types, "
                    "and match them"
                )
        self._handlers.append(new)

    def every(
        self,
        every: str | float | timedelta,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        missed: tenure.Missed = "once",
        missed_after: float = 60.0,
        **options: Unpack[ConsumeOptions],
    ) -> Callable[[F], F]:
        """Declare the decorated function as the handler of a schedule: it is called once for each slot in the fleet.

        Each slot is a message of the queue *name*, and treated like any other: it is locked while it is handled, tried
        again if the function raises, and dead-lettered in the end. The function takes nothing, the time of the slot (an
        aware ``datetime`` in *timezone*), the message, or both in this order. It is returned unchanged.

        Args:
            every: A cron expression such as ``"0 3 * * *"``, or an interval; see :meth:`tenure.Backend.schedule`.
            name: The name of the schedule and of its queue; without, the function's.
            timezone, missed, missed_after: As for :meth:`tenure.Backend.schedule`.
            options: As for :meth:`handler`. With ``sessions=True``, a slot is handled only when the one before it has
                ended, in the whole fleet.

        Raises:
            ConfigError: The function can't be a handler, the name is taken, or the times can't be read.
            BackendNotInstalled: It is a cron expression, and cronsim is not installed.
            TypeError: There is no such option.

        Example::

            @service.every("0 3 * * *", timezone="Europe/Berlin")
            async def tidy() -> None: ...
        """
        from tenure._schedule.plan import plan_of
        from tenure._schedule.slots import slots_of

        self._check_consume_options("every", options)
        plan = plan_of(every, timezone, missed, missed_after)
        slots_of(plan)

        def declare(function: F) -> F:
            check_callable("handler", function, "the time of the slot, the message, both, or nothing")
            check_parameters_at_times(function)
            scheduled = self._schedule_name(name, function)
            self._add_handler(_Handler(scheduled, function, options, kind=datetime))
            self._schedules.append(_Scheduled(scheduled, plan, is_in_order=bool(options.get("sessions", False))))
            return function

        return declare

    def _schedule_name(self, name: str | None, function: Callable[..., Any]) -> str:
        """Return the name of a schedule: *name*, or else the function's.

        Raises:
            ConfigError: It can't be one, or is taken.
        """
        if name is None:
            name = name_of_function(function).rpartition(".")[2]
            if not name.isidentifier():  # of a lambda: all have the same
                raise ConfigError(f"{function!r:.80} has no name that its schedule could have; give name=")
        check_name(name, "the schedule's name")
        if any(one.name == name for one in self._schedules):
            raise ConfigError(
                f"the schedule {name!r} is declared twice in this service; give one of them another name="
            )
        return name

    @staticmethod
    def _check_consume_options(function: str, options: ConsumeOptions) -> None:
        refuse_unknown(function, options, set(ConsumeOptions.__annotations__) - {"sigterm", "until_empty"})

    def leader(
        self, name: str, *, again: bool = False, **options: Unpack[tenure.ElectionOptions]
    ) -> Callable[[LeaderT], LeaderT]:
        """Declare the decorated function as the work that only the leader of *name* does.

        It is called with the term, when this instance is elected, and again with each further one that it wins. If it
        returns, this instance does not campaign again; if it raises, the service stops, and raises the error. A plain
        function runs on a thread of its own with a :class:`tenure.sync.Term`; as a thread can't be cancelled, it must
        watch ``term.lost`` or call ``term.check()``.

        Args:
            name: As for :meth:`tenure.Backend.election`.
            again: Campaign again when the function returns.
            options: As for :meth:`tenure.Backend.election`.

        Raises:
            ConfigError: It can't be the work of a leader, or the name has one.
            TypeError: There is no such option.
        """
        refuse_unknown("leader", options, tenure.ElectionOptions.__annotations__)

        def declare(function: LeaderT) -> LeaderT:
            check_callable("leader", function, "a term")
            check_leader(function)
            for other in self._leaders:
                if other.name == name:
                    raise ConfigError(
                        f"the name {name!r} has a leader in this service: {name_of_function(other.work)}; they would "
                        "compete with each other. Call both from one, or use two names"
                    )
            self._leaders.append(_Leader(name, function, again, options))
            return function

        return declare

    def on_startup(self, hook: HookT) -> HookT:
        """Declare a hook that is called once the backend is open, before any handler or leader; async or not.

        If it raises, the service does not start. Hooks are called in the order in which they were declared, plain ones
        on the loop. *lifespan* does the same with a block.
        """
        self._startup.append(self._checked_hook("on_startup", hook))
        return hook

    def on_shutdown(self, hook: HookT) -> HookT:
        """Declare a hook that is called when all handlers and leaders have ended, while the backend is still open.

        The last one declared is called first; each is called, also if another one raises.
        """
        self._shutdown.append(self._checked_hook("on_shutdown", hook))
        return hook

    @staticmethod
    def _checked_hook(what: str, hook: HookT) -> HookT:
        check_callable(what, hook, "nothing")
        if needed := required(hook):
            raise ConfigError(
                f"{what} must be a function that takes nothing, and {name_of_function(hook)} needs {needed[0].name}"
            )
        return hook

    def observe(self, *telemetry: tenure.telemetry.Telemetry) -> None:
        """Add metrics or traces. Call it before the service is opened.

        Raises:
            ConfigError: One of them is no :class:`tenure.telemetry.Telemetry`.
        """
        from tenure._telemetry.telemetry import given_telemetry

        added = given_telemetry(telemetry)
        if self._given is None:
            self._telemetry += added
        else:
            self._given.observe(*added)

    # --- opening ---

    @property
    def backend(self) -> Backend:
        """The open backend.

        Raises:
            ConfigError: The service is not open.
        """
        return self._opened().backend

    @property
    def blocking(self) -> tenure.sync.Backend:
        """The open backend, for threads, such as those of handlers that are plain functions.

        Raises:
            ConfigError: The service is not open.
        """
        return self._opened().blocking

    def _opened(self) -> Opening:
        if self._opening is None or self._opening.pid != os.getpid():
            raise ConfigError(
                "the service is not open; use it in its handlers, leaders and hooks, in a block 'async with service:' "
                "(of tenure.sync: 'with service:'), or after its open()"
            )
        return self._opening

    async def open(self) -> Service:
        """Open the backend, so that queues can be used, and return the service. No handler and no leader is started.

        ``async with service:`` does the same, and closes it. Each call is undone by one of :meth:`aclose`.

        Raises:
            ConfigError: No store is named, or it can never be used as it is.
        """
        self._leave_to_parent()
        if self._given is None:
            self._given = self._connect(telemetry=self._telemetry)
        backend = self._given
        if self._is_owner:
            await backend.open()
        if self._opening is None:
            self._opening = Opening(backend)
        self._users += 1
        return self

    def _leave_to_parent(self) -> None:
        """In a forked child, forget what the parent has opened and runs."""
        if self._opening is not None and self._opening.pid != os.getpid():
            self._opening, self._users, self._stopping, self._running = None, 0, None, []

    async def aclose(self) -> None:
        """Close the backend; if :meth:`open` was called several times, only the last of these calls does."""
        self._users = max(self._users - 1, 0)
        opening = self._opening
        if self._users > 0 or opening is None or opening.pid != os.getpid():
            return
        self._opening, self._users = None, 0
        try:
            if self._is_owner:
                await opening.backend.aclose()  # first, so that a call of open() that comes meanwhile waits for it
        finally:
            await opening.close_view()

    async def __aenter__(self) -> Service:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- running ---

    def run(self, *, until_empty: bool = False) -> None:
        """Run the service in an event loop of its own, until SIGTERM or Ctrl-C, or until all its work has ended.

        Handlers may finish for their ``grace``, and leaders are cancelled; a second Ctrl-C cancels the handlers, too.

        Args:
            until_empty: End as soon as no queue of a handler has anything ready, for tests and for jobs.

        Raises:
            ConfigError: It can't work as it is declared; or a loop runs here: ``await service.serve()`` is for that.
        """
        if _running_loop() is not None:
            raise ConfigError("an event loop runs here, so service.run() can't start one; use: await service.serve()")
        asyncio.run(self.serve(until_empty=until_empty))

    async def serve(
        self, *, stop: asyncio.Event | None = None, until_empty: bool = False, sigterm: bool | None = None
    ) -> None:
        """Run the service in the running event loop. See :meth:`run`.

        Args:
            stop: Set it to end gracefully.
            until_empty: End as soon as no queue of a handler has anything ready.
            sigterm: Whether SIGTERM or a first SIGINT ends it gracefully. They do in the main thread, if nothing else
                has handled the signal before; with False, never.

        Raises:
            ConfigError: It can't work as it is declared.
        """
        handlers = self._check(until_empty)
        self._stopping = stopping = asyncio.Event()
        with on_shutdown_signal(stopping.set, sigterm, self._log_interrupt):
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(_forwarded(stop, stopping))
                parts: list[Part] = []
                async with _cancelled_by(stopping):  # a hook may wait for something that does not come
                    parts = await stack.enter_async_context(self._started(handlers, until_empty))
                if not stopping.is_set():
                    await run_parts(parts, stopping)

    @asynccontextmanager
    async def running(self, *, sigterm: bool | None = False) -> AsyncIterator[Service]:
        """Run the service beside the code of a block: for the lifespan of a web application.

        When the block is left, the service ends gracefully. If a handler's consumer or a leader fails for good, the
        block is cancelled, and the error raised.

        Args:
            sigterm: As for :meth:`serve`; the web server handles the signals, so the default is False.

        Raises:
            ConfigError: It can't work as it is declared.

        Example::

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[None]:
                async with service.running():
                    yield
        """
        handlers = self._check(until_empty=False)
        self._stopping = stopping = asyncio.Event()
        with on_shutdown_signal(stopping.set, sigterm, self._log_interrupt):
            async with self._started(handlers, until_empty=False) as parts:
                try:
                    async with asyncio.TaskGroup() as group:
                        work = group.create_task(run_parts(parts, stopping), name="tenure-service")
                        try:
                            yield self
                        finally:
                            stopping.set()
                            await asyncio.wait({work})  # before the group would cancel it, if the block has failed
                except BaseExceptionGroup as failed:
                    if len(failed.exceptions) > 1:
                        raise
                    raise failed.exceptions[0] from failed.exceptions[0].__cause__

    def stop(self, grace: float | None = None) -> None:
        """End the run of the service gracefully, and don't wait for that. Call it on the event loop on which it runs.

        Nothing happens if the service does not run.

        Args:
            grace: How many seconds handlers have to finish. Unset, their option ``grace`` holds. A second call may
                shorten the time.
        """
        if grace is not None:
            given: object = grace
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 0:
                raise ConfigError(f"grace must be a number of seconds, at least 0, not {grace!r:.80}")
            for part in self._running:
                part.drain(grace)
        if self._stopping is not None and (grace is None or not self._running):
            self._stopping.set()

    async def status(self) -> ServiceStatus:
        """Return what runs here, for the probes of an orchestrator; nothing does, if the service does not run.

        It asks no store, but the thread that renews leases and locks. So, with a time limit around it, it also finds a
        process that hangs.

        Raises:
            Unavailable: The backend is being closed.

        Example::

            async with asyncio.timeout(1):
                status = await service.status()
            return 200 if status.is_ready else 503
        """
        found = [one for part in self._running for one in await part.status()]
        handlers = tuple(one for one in found if isinstance(one, HandlerStatus))
        leaders = tuple(one for one in found if isinstance(one, CandidateStatus))
        schedules = tuple(one for one in found if isinstance(one, ScheduleStatus))
        is_ready = bool(self._running) and len(handlers) == len(self._handlers)
        is_ready = is_ready and all(one.is_ready for one in handlers) and all(one.is_ready for one in leaders)
        return ServiceStatus(handlers, leaders, schedules, all(one.is_live for one in leaders), is_ready)

    @asynccontextmanager
    async def _started(self, handlers: Sequence[_Called], until_empty: bool) -> AsyncIterator[list[Part]]:
        """Open the backend, enter the lifespan and call the hooks around the block; yield the parts to run."""
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self)
                await _enter(stack, self._lifespan, self)
                for hook in self._startup:
                    await _call_hook(hook)
                for hook in self._shutdown:
                    stack.push_async_callback(_call_hook, hook)
                parts = self._parts(handlers, until_empty)
                _log.info("the service %s", ", ".join(part.title for part in parts))
                self._running = parts
                yield parts
        finally:
            self._running = []
            self._stopping = None

    def _check(self, until_empty: bool) -> list[_Called]:
        """Refuse to run what can't work as it is declared; return the handlers, as :meth:`_called_handlers` does.

        Raises:
            ConfigError: It can't work, or runs already.
        """
        handlers = self._called_handlers()
        if not handlers and not self._leaders:
            raise ConfigError(
                "the service has nothing to run: declare a handler or a leader, as with @service.handler('orders'); "
                "to only send, use 'async with service:'"
            )
        if until_empty and not handlers:
            raise ConfigError("until_empty is for services with handlers, and this one has leaders only")
        self._leave_to_parent()
        if self._stopping is not None:
            raise ConfigError("the service runs already; one object runs once at a time")
        return handlers

    def _called_handlers(self) -> list[_Called]:
        """Return the handlers, each with the function that is called with a message.

        Raises:
            ConfigError: The annotations of one of them can't be resolved or don't fit its queue, or no body can be read
                as its type.
        """
        for queue in self._queues.values():
            check_kind(queue.kind)
        made = []
        for one in self._handlers:
            kind = self._queues[one.queue].kind if one.queue in self._queues else one.kind
            signature = signature_of(one.function, kind, one.options.get("run_in", "auto"))
            if signature.body is not UNKNOWN:
                check_kind(signature.body)
            made.append((one, called(one.function, signature)))
        return made

    def _parts(self, handlers: Sequence[_Called], until_empty: bool) -> list[Part]:
        opening = self._opened()
        consumptions = []
        for one, function in handlers:
            declared = self._queues.get(one.queue)
            queue = declared.queue if declared is not None else opening.backend.queue(one.queue)
            consumptions.append(Consumption(queue, function, one.options))
        parts: list[Part] = [UntilEmpty(consumptions)] if until_empty else list(consumptions)
        if not until_empty:
            parts += [Sending(one.on(opening.backend)) for one in self._schedules]
        for leader in self._leaders:
            what = (leader.name, leader.work, leader.again, leader.options)
            if is_async_function(leader.work):
                parts.append(Leadership(opening.backend, *what))
            else:
                parts.append(ThreadLeadership(self.blocking, *what))
        return parts

    @staticmethod
    def _log_interrupt() -> None:
        _log.warning("interrupted: handlers may finish; interrupt again to stop without waiting")

    def __repr__(self) -> str:
        count = f"{len(self._handlers)} handlers, {len(self._leaders)} leaders"
        state = "running" if self._stopping is not None else "open" if self._opening is not None else "not open"
        return f"<Service {'' if self._given is None else f'{self._given.url}, '}{count}, {state}>"


class _Handler:
    """A declared handler."""

    def __init__(self, queue: str, function: Callable[..., Any], options: ConsumeOptions, kind: Any = UNKNOWN) -> None:
        self.queue = queue
        self.function = function
        self.options = options
        self.kind = kind

    @property
    def is_for_sessions(self) -> bool:
        return bool(self.options.get("sessions", False))


_Called = tuple[_Handler, Callable[..., Any]]
"""A handler, and the function that is called with a message."""


class _Scheduled:
    """A declared schedule."""

    def __init__(self, name: str, plan: Plan, *, is_in_order: bool) -> None:
        self.name = name
        self._plan = plan
        self._is_in_order = is_in_order

    def on(self, backend: Backend) -> tenure.Schedule:
        """Return it on an open backend."""
        plan = self._plan
        return backend.schedule(
            self.name,
            plan.every,
            queue=self.name,
            timezone=plan.timezone,
            missed=plan.missed,
            missed_after=plan.missed_after,
            message=Outgoing(session=self.name) if self._is_in_order else None,
        )


class _Leader:
    """A declared leader."""

    def __init__(self, name: str, work: Callable[..., Any], again: bool, options: tenure.ElectionOptions) -> None:
        self.name = name
        self.work = work
        self.again = again
        self.options = options


async def _enter(stack: AsyncExitStack, lifespan: Lifespan | None, service: Service) -> None:
    if lifespan is None:
        return
    block = lifespan(service)
    if isinstance(block, AbstractAsyncContextManager):
        await stack.enter_async_context(block)
    elif isinstance(block, AbstractContextManager):
        stack.enter_context(block)
    else:
        raise ConfigError(
            f"lifespan must return a block, and {name_of_function(lifespan)} returned {type(block).__name__}; "
            "decorate it with contextlib.asynccontextmanager"
        )


async def _call_hook(hook: Callable[[], Any]) -> None:
    result = hook()
    if inspect.isawaitable(result):
        await result


@asynccontextmanager
async def _cancelled_by(event: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the block when *event* is set; the code after it goes on."""
    task = asyncio.current_task()
    assert task is not None
    before, is_ours = task.cancelling(), False

    async def cancel() -> None:
        nonlocal is_ours
        await event.wait()
        is_ours = True
        task.cancel()

    waiting = asyncio.create_task(cancel())
    try:
        yield
        if is_ours:  # too late for the block: receive it here
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        if not is_ours or task.uncancel() > before:
            raise
    finally:
        waiting.cancel()


@asynccontextmanager
async def _forwarded(stop: asyncio.Event | None, into: asyncio.Event) -> AsyncIterator[None]:
    """Inside the block, set *into* as soon as *stop* is set."""
    if stop is None:
        yield
        return

    async def wait() -> None:
        await stop.wait()
        into.set()

    if stop.is_set():
        into.set()
    waiting = asyncio.create_task(wait())
    waiting.add_done_callback(lambda _: into.set())  # also if the event belongs to another loop
    try:
        yield
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


def _described(kind: Any, settings: QueueOptions) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in cast("dict[str, object]", settings).items())
    return f"{name_of(kind)}{f' with {given}' if given else ''}"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

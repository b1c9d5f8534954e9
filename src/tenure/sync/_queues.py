"""Queues for threads."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar, Unpack

import tenure
from tenure import ConsumeOptions, Handler, Message
from tenure._queue.hooks import ThreadedHook
from tenure._queue.received import BlockingMessage
from tenure._runtime.loop_thread import LoopThread
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.signals import on_shutdown_signal
from tenure.sync._blocking import blocking
from tenure.sync._schedules import Schedules
from tenure.sync._stopping import StopRequest, forwarded

T = TypeVar("T")


class Queue:
    """A queue of messages, each for one of the consumers that compete for them. See :class:`tenure.Queue`."""

    def __init__(
        self, queue: tenure.Queue, renewal_thread: RenewalThread, consumer_thread: Callable[[], LoopThread]
    ) -> None:
        self.name: str = queue.name
        self.traits: tenure.QueueTraits = queue.traits
        self.dead_letters: DeadLetters = DeadLetters(queue.dead_letters, renewal_thread)
        self.schedules: Schedules = Schedules(queue.schedules, renewal_thread)
        self._behind = queue
        self._renewal_thread = renewal_thread
        self._consumer_thread = consumer_thread

    def __repr__(self) -> str:
        return repr(self._behind)

    declare = blocking(tenure.Queue.declare)
    settings = blocking(tenure.Queue.settings)
    send = blocking(tenure.Queue.send)
    send_batch = blocking(tenure.Queue.send_batch)
    request = blocking(tenure.Queue.request)
    peek_deferred = blocking(tenure.Queue.peek_deferred)
    peek = blocking(tenure.Queue.peek)
    purge = blocking(tenure.Queue.purge)
    stats = blocking(tenure.Queue.stats)
    delete = blocking(tenure.Queue.delete)
    handled = blocking(tenure.Queue.handled)

    def receive(self, max: int = 1, *, wait: float = 0.0) -> list[BlockingMessage]:  # noqa: A002  # as in tenure.Queue
        """Lock up to *max* messages, and return them. See :meth:`tenure.Queue.receive`."""
        return _for_threads(self._renewal_thread, lambda: self._behind.receive(max, wait=wait))

    def receive_deferred(self, *sequences: int) -> list[BlockingMessage]:
        """Lock deferred messages by their ``sequence``. See :meth:`tenure.Queue.receive_deferred`."""
        return _for_threads(self._renewal_thread, lambda: self._behind.receive_deferred(*sequences))

    def session(self, name: str | None = None, *, wait: float | None = None) -> Session:
        """Lock a session as a block. See :meth:`tenure.Queue.session`; a thread must watch ``session.lost`` itself."""
        return Session(self._behind.session(name, wait=wait), self._renewal_thread)

    def consume(
        self, handler: Handler, *, stop: threading.Event | None = None, **options: Unpack[ConsumeOptions]
    ) -> None:
        """Call *handler* with message after message, in threads of their own, until stopped. Blocks until then.

        See :meth:`tenure.Queue.consume`, also for the *options*. In the main thread, SIGTERM or a first SIGINT ends it
        gracefully, if the program does not handle that signal (``sigterm=False``: never).
        """
        request = StopRequest()
        hook = None
        if callable(on_error := options.get("on_error")):
            options["on_error"] = hook = ThreadedHook(on_error)

        async def consume() -> None:
            with forwarded(stop, request.event()) as stopping:
                await self._behind.consume(handler, stop=stopping, **options)

        try:
            with on_shutdown_signal(request.make, options.get("sigterm")):
                self._consumer_thread().call_blocking(consume)  # not on the renewal loop: on_event may block
        finally:
            if hook is not None:
                hook.close()

    def pause(self) -> None:
        """Stop claiming messages in the calls of :meth:`consume` of this object, until :meth:`resume`."""
        self._behind.pause()

    def resume(self) -> None:
        """Let them claim messages again."""
        self._behind.resume()

    def drain(self, grace: float | None = None) -> None:
        """End the calls of :meth:`consume` of this object, and wait for their end. See :meth:`tenure.Queue.drain`.

        Called by a handler or a hook, it doesn't wait, as they would wait for themselves.
        """
        if self._consumer_thread().is_current:
            self._behind._begin_drain(grace)
        else:
            # Its context variables show whether a handler calls.
            self._renewal_thread.call_blocking(lambda: self._behind.drain(grace), contextvars.copy_context())


class DeadLetters:
    """The dead letters of a queue. See :class:`tenure.DeadLetters`."""

    def __init__(self, letters: tenure.DeadLetters, renewal_thread: RenewalThread) -> None:
        self.name: str = letters.name
        self._behind = letters
        self._renewal_thread = renewal_thread

    def __repr__(self) -> str:
        return repr(self._behind)

    peek = blocking(tenure.DeadLetters.peek)
    redrive = blocking(tenure.DeadLetters.redrive)
    purge = blocking(tenure.DeadLetters.purge)

    def receive(self, max: int = 1, *, wait: float = 0.0) -> list[BlockingMessage]:  # noqa: A002  # as in tenure.Queue
        """Lock up to *max* dead letters, and return them; ``complete()`` removes one for good."""
        return _for_threads(self._renewal_thread, lambda: self._behind.receive(max, wait=wait))


class Session:
    """A session that is locked for this process, as a block. See :class:`tenure.Session`.

    A thread can't be cancelled: when the lock is lost, ``lost`` is set, every verb raises ``LockLost``, and so does the
    end of the block.
    """

    def __init__(self, session: tenure.Session, renewal_thread: RenewalThread) -> None:
        self._behind = session
        self._renewal_thread = renewal_thread

    def __repr__(self) -> str:
        return repr(self._behind)

    set_state = blocking(tenure.Session.set_state)
    renew = blocking(tenure.Session.renew)

    @property
    def name(self) -> str:
        """The ``session=`` that the messages were sent with."""
        return self._behind.name

    @property
    def state(self) -> bytes | None:
        """The value last stored with :meth:`set_state`."""
        return self._behind.state

    @property
    def is_lost(self) -> bool:
        """Whether the lock is lost."""
        return self._behind.lost.is_set()

    def remaining(self) -> float:
        """Return for how many seconds the lock is safe to rely on without another renewal; 0.0 if it is over."""
        return self._behind.remaining()

    def receive(self, max: int = 1, *, wait: float = 0.0) -> list[BlockingMessage]:  # noqa: A002  # as in tenure.Queue
        """Return the next up to *max* messages, in order."""
        return _for_threads(self._renewal_thread, lambda: self._behind.receive(max, wait=wait))

    def __iter__(self) -> Generator[BlockingMessage, None, None]:
        while messages := self.receive():
            yield messages[0]

    def __enter__(self) -> Session:
        try:
            self._renewal_thread.call_blocking(self._behind.__aenter__)
            return self
        except BaseException:
            self._renewal_thread.call_blocking(self._behind.withdraw)  # after an interrupt, we may still have entered
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(error)
        except BaseException:  # an interrupt, perhaps before it was sent: nothing else would ever leave
            self._leave(error)
            raise

    def _leave(self, error: BaseException | None) -> None:
        # In a forked child, the lock stayed with the parent; at the end of the process, it is left to run out.
        if not self._renewal_thread.is_forked and not sys.is_finalizing():
            self._renewal_thread.call_blocking(lambda: self._behind.withdraw(error))


def _for_threads(
    renewal_thread: RenewalThread, receive: Callable[[], Coroutine[Any, Any, list[Message]]]
) -> list[BlockingMessage]:
    return [BlockingMessage(message, renewal_thread.call_blocking) for message in renewal_thread.call_blocking(receive)]

"""Elections for threads."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import tenure
from tenure import Campaign, Leader, Timing
from tenure._election.term import BlockingTerm as Term
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import TenureError, Unavailable
from tenure.sync._blocking import blocking, iterated
from tenure.sync._work_threads import WorkThreads

Work = Callable[[Term], Any]
"""``work(term)``: it is called, on a thread of its own, when this process is elected."""


class Election:
    """An election for one name, in which this object is one candidate. See :class:`tenure.Election`."""

    def __init__(self, election: tenure.Election, renewal_thread: RenewalThread) -> None:
        self.name: str = election.name
        self.timing: Timing = election.timing
        self._behind = election
        self._renewal_thread = renewal_thread
        self._worker: threading.Thread | None = None  # of the newest term

    def __repr__(self) -> str:
        return repr(self._behind)

    def run(
        self, work: Work, *, again: bool = False, stop: threading.Event | None = None, sigterm: bool | None = None
    ) -> None:
        """Campaign for the name and run *work*, on a thread of its own, during every term won.

        Blocks until the campaign and the work have ended. See :meth:`tenure.Election.run`; as a thread can't be
        cancelled, *work* must watch ``term.lost`` or call ``term.check()``. Until it has ended, the lease is not
        released, and this candidate does not campaign again.
        """
        threads = WorkThreads(work, self._renewal_thread, self._note_worker)
        self._behind.context = contextvars.copy_context()
        threads.run(
            lambda serve, stopping: self._behind.run(serve, again=again, stop=stopping, sigterm=sigterm),
            stop=stop,
            sigterm=sigterm,
        )

    @contextmanager
    def campaign(self) -> Iterator[Term]:
        """Campaign for the name as a block, which runs on this thread once elected.

        A program that ends without having left the block releases the lease at its exit, unless the block was entered
        on a daemon thread that still runs: then the lease runs out.

        Raises:
            TermLost: The term ended before the block did.
        """
        self._behind.context = contextvars.copy_context()
        campaign = self._behind.campaign(cancel=False)
        failure: BaseException | None = None
        term: Term | None = None
        at_exit: Callable[[], None] | None = None
        try:
            term = cast("Term", self._renewal_thread.call_blocking(campaign.__aenter__))  # we had it made
            self._worker = threading.current_thread()
            at_exit = functools.partial(self._leave_at_exit, campaign, term, self._worker)
            atexit.register(at_exit)
            yield term
        except BaseException as error:
            failure = error
            raise
        finally:
            try:
                if term is not None:
                    term._note_work_end()
                if not self._renewal_thread.is_forked:
                    self._renewal_thread.call_blocking(lambda: campaign.withdraw(failure))
                elif term is not None and failure is None:
                    term.check()  # its error says that the term stayed with the parent
            except Unavailable:  # the backend was closed meanwhile
                if failure is None:
                    raise
            except BaseException:  # an interrupt, perhaps before it was sent: nothing else would ever leave
                self._renewal_thread.call_blocking(lambda: campaign.withdraw(failure))
                raise
            finally:
                self._worker = None
                if at_exit is not None:
                    atexit.unregister(at_exit)

    def _leave_at_exit(self, campaign: Campaign, term: Term, owner: threading.Thread) -> None:
        """Release the lease when the program ends inside the block, but not while a thread may still work in it."""
        if self._renewal_thread.is_forked or (owner is not threading.current_thread() and owner.is_alive()):
            return
        term._note_work_end()
        patience = self.timing.grace + self.timing.retry_every
        with suppress(TenureError, TimeoutError):  # then the lease is left to run out
            self._renewal_thread.call_blocking(lambda: asyncio.wait_for(campaign.withdraw(), patience))

    leader = blocking(tenure.Election.leader)
    status = blocking(tenure.Election.status)
    ask_to_resign = blocking(tenure.Election.ask_to_resign)

    def observe(self) -> Generator[Leader | None, None, None]:
        """Yield the leader, at first and at every change. See :meth:`tenure.Election.observe`."""
        return iterated(self._renewal_thread, self._behind.observe())

    def resign(self) -> bool:
        """End the term of this candidate. See :meth:`tenure.Election.resign`.

        Called by the work itself, it returns at once, with ``term.lost`` set: the lease is released when it ends.
        """
        wait = threading.current_thread() is not self._worker
        return self._renewal_thread.call_blocking(lambda: self._behind.resign(wait=wait))

    def _note_worker(self, thread: threading.Thread) -> None:
        self._worker = thread

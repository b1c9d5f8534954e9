"""The workers of a simulated consumer: they call handlers, pass verdicts, and call the hooks, which may misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from tenure._lease import NoAnswer
from tenure._queue.effects import Settle
from tenure._queue.hooks import HOOK_MAX
from tenure._queue.message import Delivery
from tenure._queue.outcomes import RULES, CancelReason, Disposition, Ending, Reason, Reports, Rule
from tenure._queue.retry import verdict_on_failure
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Lapsed, Settlement, Verdict
from tenure.errors import LockLost, Unavailable
from tenure.testing._misbehaving import odd_error
from tenure.testing._sim.queues.plan import BLOCKS_MAX
from tenure.testing._sim.queues.protocols import Host, Hosted
from tenure.testing._sim.queues.requests import WriteState
from tenure.testing._sim.queues.tracked import Key, Stage, delivery_key
from tenure.testing._sim.queues.work import Work, fails, kept_for, length, runs_on_for


class Workers:
    """The handlers of one consumer that run, each in a slot, and its hooks.

    Args:
        run: The simulation.
        consumer: Takes messages, and gets what becomes of them.
    """

    def __init__(self, run: Host, consumer: Hosted) -> None:
        self.run = run
        self.consumer = consumer
        self.world = run.world
        self.works: dict[Key, Work] = {}
        self.error_hook = self.event_hook = ""
        """What the error hook and the event hook do beside returning, at present."""
        self._writes = run.plan.sessions.writes if run.plan.sessions else 0.0

    # --- handlers ---

    def serve(self) -> None:
        """Let idle workers take what waits."""
        consumer = self.consumer
        while consumer.running and len(self.works) < consumer.settings.concurrency and not consumer.blocked:
            delivery = consumer.take()
            if delivery is None:
                break
            self._begin(delivery)
        consumer.tick_soon()

    def _begin(self, delivery: Delivery) -> None:
        group = self.consumer.lock_groups.get(delivery.token)
        work = Work(delivery, group.session if group is not None else None)
        self.consumer.checkers.began(self.consumer, delivery)
        self.works[delivery_key(delivery)] = work
        seconds = length(self.run, delivery)
        nature = work.nature
        if nature == "blocking" and not self.run.healed:
            self.consumer.block(seconds / self.consumer.clock.rate)
            self.run.hung(self.consumer, seconds / self.consumer.clock.rate)
        if nature == "deadly" and not self.run.healed and self.world.rng.random() < 0.7:
            self.consumer.after(seconds, self._killed, work)
        elif seconds == 0.0 and nature == "fine":
            self._come_to_an_end(work)
        else:
            self.consumer.after(seconds, self.consumer.on_loop, self._come_to_an_end, work)

    def _killed(self, work: Work) -> None:
        if self.run.healed:
            self._end_work(work)
        elif not work.ended:
            self.consumer.die("killed by a message")
            self.run.restart_later(self.consumer.number)

    def _come_to_an_end(self, work: Work) -> None:
        """The handler may first complete its message by itself, or store a state: also if it was cancelled."""
        if work.ended:
            return
        delivery, session = work.delivery, work.session
        if work.nature == "settles" and self.consumer.tracked.find(delivery) is not None:
            work.is_settling = True
            self._complete(delivery)
        elif session is not None and self.world.rng.random() < self._writes:
            state = f"{delivery.sequence}/{delivery.delivery_count}".encode()
            self.consumer.ask(
                lambda request_id: WriteState(request_id, session, state), lambda answer: self._written(work, answer)
            )
        else:
            self._end_work(work)

    def _written(self, work: Work, answer: Any) -> None:
        if isinstance(answer, NoAnswer):
            work.error = Unavailable(answer.why)
        elif isinstance(answer, Lapsed):
            work.error = LockLost("the state was not stored")
        self._end_work(work)

    def _complete(self, delivery: Delivery) -> None:
        """Complete a message by itself, without the pump."""
        tracked = self.consumer.tracked.find(delivery)
        if tracked is not None:
            tracked.is_settling = tracked.is_asking = True
        self.consumer.pump.settling_begins(delivery)
        settlements = [Settlement(delivery, COMPLETE)]
        self.consumer.ask(
            lambda request_id: Settle(request_id, settlements), lambda answer: self._completed(settlements, answer)
        )

    def _completed(self, settlements: Sequence[Settlement], answer: Any) -> None:
        delivery = settlements[0].delivery
        work = self.works.get(delivery_key(delivery))
        if work is None or work.ended:
            self._kept_completed(settlements, answer)  # or it was cancelled while it waited for this
            return
        self._waits_no_more(delivery)
        if not isinstance(answer, NoAnswer):
            work.is_settling = False
            self.consumer.checkers.settled(self.consumer, settlements, answer)
            self.consumer.pump.settled(delivery)
            self.consumer.tick_soon()
        elif self.world.rng.random() < 0.5:
            work.is_settling = False  # it takes no answer for a yes
        self.consumer.after(runs_on_for(self.run, work), self.consumer.on_loop, self._end_work, work)

    def _waits_no_more(self, delivery: Delivery) -> None:
        """The handler does not wait for an answer of the broker any more."""
        self.consumer.pump.settling_ends(delivery)
        if (tracked := self.consumer.tracked.find(delivery)) is not None:
            tracked.is_asking = False

    def _end_work(self, work: Work) -> None:
        if not work.ended and self.consumer.running:
            self._finish(work)
            self.serve()

    def _finish(self, work: Work) -> None:
        """The handler of *work* has ended: call the error hook, then pass the verdict."""
        work.ended = True
        self._waits_no_more(work.delivery)
        work.error = asyncio.CancelledError() if work.is_cancelled else fails(self.run, work)
        if isinstance(work.error, KeyboardInterrupt):
            self._interrupted()
        reports = self._rule(work).reports
        if reports is Reports.LOCK_LOST:
            work.error = LockLost(f"cancelled: {work.why}")
        is_reported = reports in (Reports.ERROR, Reports.LOCK_LOST)
        if not is_reported or not self.error_hook or self._complain(work):
            self._conclude(work)

    def _conclude(self, work: Work) -> None:
        """Nothing of *work* runs any more: pass the verdict, and free its slot."""
        consumer, delivery = self.consumer, work.delivery
        try:
            verdict = self._judge(work)
        except (Exception, SystemExit) as error:
            self._misbehaved(error)
            return
        del self.works[delivery_key(delivery)]
        if verdict is Disposition.LET_EXPIRE:
            consumer.checkers.ends(consumer, delivery, None, is_kept=False)
            consumer.pump.let_expire(delivery)
            return
        is_kept = verdict is COMPLETE and work.nature == "keeps" and work.session is None  # a session allows no others
        consumer.checkers.ends(consumer, delivery, None if is_kept else verdict, is_kept=is_kept)
        if is_kept:
            consumer.after(kept_for(self.run), consumer.on_loop, self._complete_kept, delivery)
        consumer.pump.done(delivery, None if is_kept else verdict)
        if isinstance(verdict, Abandon):
            self.call_event_hook()

    def _rule(self, work: Work) -> Rule:
        """Return the rule for how *work* has ended, as a real consumer does."""
        error, why = work.error, work.why
        over = self.consumer.pump.trusted_until(work.delivery) <= self.consumer.now()
        reason = Reason.of(why, closing=False, left_behind=why == "leave", over=over)
        if error is None:
            return RULES[reason, Ending.RETURNED]
        is_cancelled = work.is_cancelled or isinstance(error, asyncio.CancelledError)
        return RULES[reason, Ending.CANCELLED if is_cancelled else Ending.RAISED]

    def _judge(self, work: Work) -> Verdict | Literal[Disposition.LET_EXPIRE]:
        match self._rule(work).disposition:
            case Disposition.SUCCESS:
                return COMPLETE
            case Disposition.GIVE_BACK:
                return GIVE_BACK
            case Disposition.LET_EXPIRE:
                return Disposition.LET_EXPIRE
        assert work.error is not None
        return self._verdict(work.error, work.delivery)

    def _verdict(self, error: BaseException, delivery: Delivery) -> Verdict:
        return verdict_on_failure(error, delivery.delivery_count, self.run.plan.retry, self.world.rng)

    # --- kept messages ---

    def _complete_kept(self, delivery: Delivery) -> None:
        """Complete a kept message, again until there is an answer."""
        tracked = self.consumer.tracked.find(delivery)
        if tracked is not None and tracked.stage is Stage.KEPT:
            self._complete(delivery)

    def _kept_completed(self, settlements: Sequence[Settlement], answer: Any) -> None:
        delivery = settlements[0].delivery
        tracked = self.consumer.tracked.find(delivery)
        if tracked is None or tracked.stage is not Stage.KEPT:
            return
        self._waits_no_more(delivery)
        if isinstance(answer, NoAnswer):
            retry_every = self.run.plan.timing.retry_every
            self.consumer.after(retry_every, self.consumer.on_loop, self._complete_kept, delivery)
            return
        self.consumer.checkers.settled(self.consumer, settlements, answer)
        self.consumer.pump.settled(delivery)
        self.consumer.tick_soon()

    # --- cancellations ---

    def cancel(self, delivery: Delivery, why: CancelReason) -> None:
        """Cancel the handler of *delivery*, if it runs."""
        if (work := self.works.get(delivery_key(delivery))) is not None:
            self._cancel(work, why)

    def cancel_all(self, why: CancelReason) -> None:
        """Cancel every handler; with ``leave``, leave those behind that were cancelled before."""
        for work in list(self.works.values()):
            self._cancel(work, why)

    def _cancel(self, work: Work, why: CancelReason) -> None:
        if work.ended:  # only its error hook goes on, and is not cancelled
            return
        first = work.why is None
        if first or why == "leave":
            work.why = why
        if why == "leave":  # a thread that runs on
            work.is_cancelled = True
            self.consumer.checkers.left(self.consumer, work.delivery)
            self._finish(work)
        elif first:
            self._tell(work)

    def _tell(self, work: Work) -> None:
        rng, plan = self.world.rng, self.run.plan
        if rng.random() < plan.ignores:
            work.is_cancelled = rng.random() < 0.6  # the others end as if they had not been cancelled
            seconds = self.run.ignores_max * rng.random()
        else:
            work.is_cancelled = True
            seconds = 0.9 * plan.timing.grace * rng.random()
        self.consumer.after(seconds, self.consumer.on_loop, self._end_work, work)

    # --- hooks ---

    def _complain(self, work: Work) -> bool:
        """Call the error hook; False if it goes on, and *work* is concluded when it has ended."""
        match self.error_hook:
            case "raises" if not self._reports_error_hook(error := odd_error(self.world.rng)):
                self._misbehaved(error)
                return False
            case "interrupts":
                self._interrupted()
            case "blocks":
                self.consumer.block(self._blocks_for())
            case "lasts":
                self.consumer.after(self._hook_patience(), self.consumer.on_loop, self._hook_ended, work)
                return False
        return True

    def _hook_ended(self, work: Work) -> None:
        if self.consumer.running:
            self._conclude(work)
            self.serve()

    def _hook_patience(self) -> float:
        """Return for how many seconds a hook is waited for that never ends."""
        return HOOK_MAX

    def _reports_error_hook(self, error: BaseException) -> bool:
        """Whether *error*, which the error hook has raised, is reported to the loop and harms nothing else."""
        return True

    def _reports_event_hook(self, error: BaseException) -> bool:
        """Whether *error*, which the event hook has raised, is reported to the loop and harms nothing else."""
        return True

    def call_event_hook(self) -> None:
        """Call the event hook, if it does anything at present."""
        match self.event_hook:
            case "blocks":
                self.consumer.block(self._blocks_for())
            case "raises" if not self._reports_event_hook(error := odd_error(self.world.rng)):
                self._misbehaved(error)

    def _blocks_for(self) -> float:
        return BLOCKS_MAX / 4 * self.run.plan.timing.ttl * self.world.rng.random()

    def _interrupted(self) -> None:
        """Ctrl-C has come while code of the user's ran: end gracefully."""
        self._end_with_interrupt()
        self.consumer.checkers.interrupted(self.consumer)

    def _end_with_interrupt(self) -> None:
        self.consumer.drain(0.0)
        self.run.restart_later(self.consumer.number)

    def _misbehaved(self, error: BaseException) -> None:
        """An object of the user's has broken this consumer."""
        self.consumer.checkers.broken(self.consumer, error)
        self.consumer.die("broken")

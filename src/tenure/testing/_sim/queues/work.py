"""One call of a simulated handler: how long it takes, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outcomes import CancelReason
from tenure._queue.retry import Reject, Retry
from tenure.errors import Unavailable
from tenure.testing._misbehaving import odd_error
from tenure.testing._sim.queues.plan import BLOCKS_MAX, HEALED_WORK, LONGEST
from tenure.testing._sim.queues.protocols import Run


@dataclass(slots=True, eq=False)
class Work:
    """A handler that runs."""

    delivery: Delivery
    session: SessionLock | None = None
    """The lock of its session."""
    why: CancelReason | None = None
    """Why it was cancelled; None if it was not."""
    is_cancelled: bool = False
    """Whether it ends because of that."""
    is_settling: bool = False
    """Whether it has asked the broker itself to complete its message, and waits for the answer."""
    ended: bool = False
    error: BaseException | None = None
    """The exception with which it ends, or has ended. Its slot is not free before the error hook has ended, too."""

    @property
    def nature(self) -> str:
        """The nature of its message."""
        return nature_of(self.delivery)


def nature_of(delivery: Delivery) -> str:
    """Return the nature of a message, which its label names: how its handler behaves."""
    return delivery.body.decode().rpartition(".")[2]


def length(run: Run, delivery: Delivery) -> float:
    """Draw how many seconds the handler runs."""
    rng, plan = run.world.rng, run.plan
    lock = plan.timing.ttl
    if run.healed:
        return min(HEALED_WORK, plan.pace) * lock * rng.random()
    match nature_of(delivery):
        case "slow":
            return LONGEST * lock * rng.random()
        case "blocking":
            return BLOCKS_MAX * lock * rng.random()
    if rng.random() < 0.2:
        return 0.0  # it never suspends
    return plan.pace * lock * rng.random()


def runs_on_for(run: Run, work: Work) -> float:
    """Draw for how many seconds a handler runs on that has settled its message by itself."""
    if work.session is not None and not run.healed and run.world.rng.random() < 0.3:  # there, max_hold ends it, too
        return LONGEST * run.plan.timing.ttl * run.world.rng.random()
    return length(run, work.delivery)


def kept_for(run: Run) -> float:
    """Draw for how many seconds a message is kept that its handler has not settled."""
    rng, lock = run.world.rng, run.plan.timing.ttl
    return (HEALED_WORK if run.healed else LONGEST) * lock * rng.random()


def fails(run: Run, work: Work) -> BaseException | None:
    """Draw how a handler ends that does not end by a cancellation."""
    rng = run.world.rng
    if work.error is not None:
        return work.error
    match work.nature:
        case "poison":
            return ValueError("this message always fails")
        case "reject":
            return Reject("unwanted", f"at delivery {work.delivery.delivery_count}")
        case "settles" if work.is_settling:
            return Unavailable("no answer to my complete")
        case "odd" if rng.random() < 0.7:
            return odd_error(rng)
        case "interrupts" if not run.healed and rng.random() < 0.5:
            return KeyboardInterrupt()
        case "slow" | "blocking" if work.session is not None and rng.random() < 0.5:
            return Retry(0.0)  # so it may come again in the same session
        case "flaky" if rng.random() < 0.5:
            return _retry(run, work) if rng.random() < 0.5 else OSError("not now")
    return None


def _retry(run: Run, work: Work) -> Retry:
    share = run.world.rng.random()
    return Retry(0.0 if work.session is not None and share < 0.5 else run.plan.retry.maximum * share)

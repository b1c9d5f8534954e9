"""The suite of every broker."""

from __future__ import annotations

from tenure.testing._conformance.queues.changed import ChangeTests
from tenure.testing._conformance.queues.dead_letters import DeadLetterTests
from tenure.testing._conformance.queues.defer import DeferTests
from tenure.testing._conformance.queues.deletion import DeletionTests
from tenure.testing._conformance.queues.expiry import ExpiryTests
from tenure.testing._conformance.queues.foreign import ForeignMessageTests
from tenure.testing._conformance.queues.limits import LimitTests
from tenure.testing._conformance.queues.model import ModelTests
from tenure.testing._conformance.queues.outcomes import OutcomeTests
from tenure.testing._conformance.queues.receive import ReceiveTests
from tenure.testing._conformance.queues.redrive import RedriveTests
from tenure.testing._conformance.queues.renew import RenewTests
from tenure.testing._conformance.queues.schedules import ScheduleTests
from tenure.testing._conformance.queues.send import SendTests
from tenure.testing._conformance.queues.sessions import SessionTests
from tenure.testing._conformance.queues.settings import SettingTests
from tenure.testing._conformance.queues.settle import SettleTests
from tenure.testing._conformance.queues.unclaimed import UnclaimedTests


class BrokerSuite(
    SendTests,
    ReceiveTests,
    ExpiryTests,
    RenewTests,
    UnclaimedTests,
    SettleTests,
    OutcomeTests,
    DeferTests,
    DeadLetterTests,
    RedriveTests,
    SessionTests,
    SettingTests,
    ScheduleTests,
    DeletionTests,
    ChangeTests,
    LimitTests,
    ForeignMessageTests,
    ModelTests,
):
    """The promises of :class:`tenure.ports.Broker`, one test for each."""

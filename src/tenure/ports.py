"""The ports: the protocols that a backend implements, and the values that pass through them.

For authors of backends, and for tests that put an object of their own between tenure and a store. A program that uses
tenure needs none of this. The suites that a backend has to pass are in :mod:`tenure.testing.conformance`.

- Leases: :class:`LeaseStore`, or :class:`QueuedLeaseStore` where candidates stand in a queue, or
  :class:`FollowedLeaseStore` where a process can follow the renewals of others. It gets a
  :class:`Grant`, and answers :class:`Granted`, :class:`HeldBy`, :class:`Vacant`, :class:`Lost`, :class:`Released` or
  :class:`NoAnswer`. Its hints are of the type ``Hint``.
- Queues: :class:`Broker`, or :class:`SurveyingBroker` where one request tells of many queues, or :class:`PagingBroker`
  where dead letters can't be shown by sequence. It gets
  :class:`tenure.Outgoing` and :class:`Settlement`, and answers :class:`Claim`,
  :class:`NoSession`, :class:`SessionLock`, :class:`Renewed`, :class:`Settled`, :class:`Lapsed`, :class:`Deleted`,
  :class:`NotEmpty`, :class:`Schedules`, :class:`Advanced` or :class:`NoAnswer`.
"""

from __future__ import annotations

from tenure._election.store import FollowedLeaseStore, Hint, LeaseStore, QueuedLeaseStore
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._public import publish_all
from tenure._queue.broker import (
    CLAIM_BYTES,
    Advanced,
    Broker,
    Claim,
    LiveSelection,
    NoSession,
    PagingBroker,
    PushingBroker,
    Schedules,
    Selection,
    SurveyingBroker,
)
from tenure._queue.generations import Generations
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Died, SessionLock, Token
from tenure._queue.verdicts import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Deleted,
    GiveBack,
    Lapsed,
    NotEmpty,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)

__all__ = [
    "CLAIM_BYTES",
    "Abandon",
    "Advanced",
    "Broker",
    "Claim",
    "Complete",
    "DeadLetter",
    "Defer",
    "Deleted",
    "Died",
    "FollowedLeaseStore",
    "Generations",
    "GiveBack",
    "Grant",
    "Granted",
    "HeldBy",
    "Hint",
    "Lapsed",
    "LeaseStore",
    "LiveSelection",
    "Lost",
    "NoAnswer",
    "NoSession",
    "NotEmpty",
    "PagingBroker",
    "PushingBroker",
    "QueuedLeaseStore",
    "Released",
    "Renewed",
    "Schedules",
    "Selection",
    "SessionLock",
    "Settled",
    "Settlement",
    "SurveyingBroker",
    "Token",
    "Vacant",
    "Verdict",
    "dead_letters_of",
]

publish_all(__name__)

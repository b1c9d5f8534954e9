"""Leader election and competing consumers, on the store that you already run.

Start at :func:`connect`. Names are loaded when they are first used, so that ``import tenure`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from tenure._version import VERSION

if TYPE_CHECKING:
    from tenure import dashboard as dashboard
    from tenure import events as events
    from tenure import http as http
    from tenure import sync as sync
    from tenure import telemetry as telemetry
    from tenure._backend import Backend as Backend
    from tenure._backend import connect as connect
    from tenure._credentials import AskCredentials as AskCredentials
    from tenure._credentials import Credentials as Credentials
    from tenure._diagnosis import Diagnosis as Diagnosis
    from tenure._election.elector import Campaign as Campaign
    from tenure._election.elector import Election as Election
    from tenure._election.elector import Work as Work
    from tenure._election.health import Health as Health
    from tenure._election.options import ElectionOptions as ElectionOptions
    from tenure._election.status import CandidateState as CandidateState
    from tenure._election.status import CandidateStatus as CandidateStatus
    from tenure._election.store import LeaseTraits as LeaseTraits
    from tenure._election.term import Term as Term
    from tenure._lease import Leader as Leader
    from tenure._lease import Metadata as Metadata
    from tenure._opened import Fact as Fact
    from tenure._partitions.group import PartitionGroup as PartitionGroup
    from tenure._partitions.group import PartitionMember as PartitionMember
    from tenure._partitions.partitions import Partitions as Partitions
    from tenure._partitions.partitions import PartitionTerm as PartitionTerm
    from tenure._partitions.partitions import PartitionWork as PartitionWork
    from tenure._queue.broker import QueueOptions as QueueOptions
    from tenure._queue.broker import QueueSettings as QueueSettings
    from tenure._queue.broker import QueueTraits as QueueTraits
    from tenure._queue.broker import Support as Support
    from tenure._queue.consumer import Consumer as Consumer
    from tenure._queue.dead_letters import DeadLetters as DeadLetters
    from tenure._queue.dead_letters import Filter as Filter
    from tenure._queue.failures import Failure as Failure
    from tenure._queue.handlers import Handler as Handler
    from tenure._queue.handlers import RunIn as RunIn
    from tenure._queue.hooks import OnError as OnError
    from tenure._queue.identity import partition_of as partition_of
    from tenure._queue.limits import Rate as Rate
    from tenure._queue.message import Attempt as Attempt
    from tenure._queue.message import DeadMessage as DeadMessage
    from tenure._queue.message import Death as Death
    from tenure._queue.message import Delivery as Delivery
    from tenure._queue.message import Headers as Headers
    from tenure._queue.message import HeaderValue as HeaderValue
    from tenure._queue.message import LiveMessage as LiveMessage
    from tenure._queue.message import State as State
    from tenure._queue.message import Stats as Stats
    from tenure._queue.options import ConsumeOptions as ConsumeOptions
    from tenure._queue.outgoing import Outgoing as Outgoing
    from tenure._queue.outgoing import SendOptions as SendOptions
    from tenure._queue.queue import Queue as Queue
    from tenure._queue.received import Message as Message
    from tenure._queue.received import Received as Received
    from tenure._queue.reply import Reply as Reply
    from tenure._queue.retry import Reject as Reject
    from tenure._queue.retry import Retry as Retry
    from tenure._queue.retry import RetryPolicy as RetryPolicy
    from tenure._queue.session import Session as Session
    from tenure._schedule.plan import Missed as Missed
    from tenure._schedule.schedule import Schedule as Schedule
    from tenure._schedule.schedules import Schedules as Schedules
    from tenure._schedule.status import ScheduleStatus as ScheduleStatus
    from tenure._secret import Secret as Secret
    from tenure._service.service import Lifespan as Lifespan
    from tenure._service.service import Service as Service
    from tenure._service.service import TypedHandler as TypedHandler
    from tenure._service.status import HandlerStatus as HandlerStatus
    from tenure._service.status import ServiceStatus as ServiceStatus
    from tenure._service.typed_queue import TypedQueue as TypedQueue
    from tenure._timing import Timing as Timing
    from tenure._url import Url as Url
    from tenure.errors import BackendNotInstalled as BackendNotInstalled
    from tenure.errors import ConfigError as ConfigError
    from tenure.errors import DecodeError as DecodeError
    from tenure.errors import LockLost as LockLost
    from tenure.errors import MessageRefused as MessageRefused
    from tenure.errors import QueueNotEmpty as QueueNotEmpty
    from tenure.errors import TenureError as TenureError
    from tenure.errors import TermLost as TermLost
    from tenure.errors import TimedOut as TimedOut
    from tenure.errors import Unavailable as Unavailable
    from tenure.events import Event as Event

__version__ = VERSION

_HOMES = {
    "tenure._backend": ("Backend", "connect"),
    "tenure._credentials": ("AskCredentials", "Credentials"),
    "tenure._diagnosis": ("Diagnosis",),
    "tenure._election.elector": (
        "Campaign",
        "Election",
        "Work",
    ),
    "tenure._election.status": ("CandidateState", "CandidateStatus"),
    "tenure._election.term": ("Term",),
    "tenure._election.options": ("ElectionOptions",),
    "tenure.errors": (
        "BackendNotInstalled",
        "ConfigError",
        "DecodeError",
        "LockLost",
        "MessageRefused",
        "QueueNotEmpty",
        "TenureError",
        "TermLost",
        "TimedOut",
        "Unavailable",
    ),
    "tenure._queue.options": ("ConsumeOptions",),
    "tenure._opened": ("Fact",),
    "tenure._queue.handlers": (
        "Handler",
        "RunIn",
    ),
    "tenure._partitions.group": ("PartitionGroup", "PartitionMember"),
    "tenure._partitions.partitions": ("PartitionTerm", "PartitionWork", "Partitions"),
    "tenure._election.health": ("Health",),
    "tenure._election.store": ("LeaseTraits",),
    "tenure._queue.hooks": ("OnError",),
    "tenure.events": ("Event",),
    "tenure._lease": (
        "Leader",
        "Metadata",
    ),
    "tenure._timing": ("Timing",),
    "tenure._secret": ("Secret",),
    "tenure._url": ("Url",),
    "tenure._queue.broker": (
        "QueueOptions",
        "QueueSettings",
        "QueueTraits",
        "Support",
    ),
    "tenure._queue.consumer": ("Consumer",),
    "tenure._queue.dead_letters": (
        "DeadLetters",
        "Filter",
    ),
    "tenure._queue.received": ("Message", "Received"),
    "tenure._queue.failures": ("Failure",),
    "tenure._queue.identity": ("partition_of",),
    "tenure._queue.limits": ("Rate",),
    "tenure._queue.message": (
        "Attempt",
        "DeadMessage",
        "Death",
        "Delivery",
        "HeaderValue",
        "Headers",
        "LiveMessage",
        "State",
        "Stats",
    ),
    "tenure._queue.outgoing": ("Outgoing", "SendOptions"),
    "tenure._queue.queue": ("Queue",),
    "tenure._queue.reply": ("Reply",),
    "tenure._queue.retry": ("Reject", "Retry", "RetryPolicy"),
    "tenure._queue.session": ("Session",),
    "tenure._schedule.plan": ("Missed",),
    "tenure._schedule.schedule": ("Schedule",),
    "tenure._schedule.schedules": ("Schedules",),
    "tenure._schedule.status": ("ScheduleStatus",),
    "tenure._service.service": (
        "Lifespan",
        "Service",
        "TypedHandler",
    ),
    "tenure._service.status": ("HandlerStatus", "ServiceStatus"),
    "tenure._service.typed_queue": ("TypedQueue",),
}
_MODULES = ("dashboard", "events", "http", "sync", "telemetry")
_unpublished = set(_HOMES)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AskCredentials",
    "Attempt",
    "Backend",
    "BackendNotInstalled",
    "Campaign",
    "CandidateState",
    "CandidateStatus",
    "ConfigError",
    "ConsumeOptions",
    "Consumer",
    "Credentials",
    "DeadLetters",
    "DeadMessage",
    "Death",
    "DecodeError",
    "Delivery",
    "Diagnosis",
    "Election",
    "ElectionOptions",
    "Event",
    "Fact",
    "Failure",
    "Filter",
    "Handler",
    "HandlerStatus",
    "HeaderValue",
    "Headers",
    "Health",
    "Leader",
    "LeaseTraits",
    "Lifespan",
    "LiveMessage",
    "LockLost",
    "Message",
    "MessageRefused",
    "Metadata",
    "Missed",
    "OnError",
    "Outgoing",
    "PartitionGroup",
    "PartitionMember",
    "PartitionTerm",
    "PartitionWork",
    "Partitions",
    "Queue",
    "QueueNotEmpty",
    "QueueOptions",
    "QueueSettings",
    "QueueTraits",
    "Rate",
    "Received",
    "Reject",
    "Reply",
    "Retry",
    "RetryPolicy",
    "RunIn",
    "Schedule",
    "ScheduleStatus",
    "Schedules",
    "Secret",
    "SendOptions",
    "Service",
    "ServiceStatus",
    "Session",
    "State",
    "Stats",
    "Support",
    "TenureError",
    "Term",
    "TermLost",
    "TimedOut",
    "Timing",
    "TypedHandler",
    "TypedQueue",
    "Unavailable",
    "Url",
    "Work",
    "connect",
    "partition_of",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tenure.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tenure' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    _publish_loaded()
    globals()[name] = value
    return value


def _publish_loaded() -> None:
    """Make what is public in the modules that are loaded now say that it is of ``tenure``."""
    from tenure._public import publish

    for home in [home for home in list(_unpublished) if home in modules]:  # another thread may do the same
        module = modules[home]
        found = {name: getattr(module, name) for name in _HOMES[home] if hasattr(module, name)}
        if len(found) == len(_HOMES[home]):  # else it is being imported just now
            _unpublished.discard(home)
            publish("tenure", found)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Questions, answers and effects in few words, for the log of a run."""

from __future__ import annotations

from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim
from tenure._queue.effects import (
    Accept,
    CancelHandler,
    LocksEffect,
    LocksEnded,
    PumpEffect,
    Receive,
    ReceiveSession,
    Release,
    Renew,
    Settle,
)
from tenure._queue.message import SessionLock
from tenure.testing._sim.queues.requests import Send, WriteState


def describe(what: Any) -> str:
    """Return a question or an answer in few words, for the log."""
    match what:
        case Receive(request_id, limit):
            return f"receive #{request_id}, up to {limit}"
        case Settle(request_id, settlements):
            verdicts = " ".join(f"{type(verdict).__name__}:{label(one)}" for one, verdict in settlements)
            return f"settle #{request_id} {verdicts}"
        case Renew(request_id, held):
            return f"renew #{request_id} {' '.join(map(label, held))}"
        case Send(request_id, messages):
            return f"send #{request_id} {' '.join(message.body.decode() for message in messages)}"
        case Accept(request_id):
            return f"accept #{request_id}"
        case ReceiveSession(request_id, held):
            return f"receive #{request_id} of {label(held)}"
        case Release(request_id, held):
            return f"release #{request_id} {label(held)}"
        case WriteState(request_id, held, state):
            return f"write state #{request_id} {state!r} of {label(held)}"
        case SessionLock():
            return label(what)
        case Claim(deliveries, due_in):
            return f"{' '.join(map(label, deliveries)) or 'nothing'}" + (f", due {due_in:.3f}" if due_in else "")
        case NoAnswer(why):
            return f"no answer ({why})"
        case [*answers]:
            return " ".join(type(answer).__name__.lower() for answer in answers)
    return str(what)


def label(delivery: Any) -> str:
    """Return what a delivery is called in the log: its body, which delivery it is, and its token."""
    if isinstance(delivery, SessionLock):
        return f"{delivery.session}@{delivery.token}"
    return f"{delivery.body.decode()}/{delivery.delivery_count}@{delivery.token}"


def describe_effect(effect: PumpEffect | LocksEffect) -> str:
    """Return an effect in few words, for the log."""
    match effect:
        case Receive(request_id, limit):
            return f"receive #{request_id}, up to {limit}"
        case Settle(request_id, settlements):
            return f"settle #{request_id}, {len(settlements)} verdicts"
        case Renew(request_id, held):
            return f"renew #{request_id}, {len(held)} locks"
        case CancelHandler(delivery, why):
            return f"cancel {delivery.sequence}: {why}"
        case LocksEnded(_, locks):
            return f"ended {' '.join(f'{held[1]}: {why}' for held, why in locks)}"
    return type(getattr(effect, "event", effect)).__name__

"""Runs the scenarios of this folder: golden texts of the inputs and effects of a consumer's two machines.

A line has a time, a word and its arguments; the indented lines below are the effects. Messages are named by their
sequence, requests by ``#number``; ``locks`` begins an input of :class:`Locks` instead of :class:`Pump`, which is a
:class:`SessionPump` after ``with sessions …``. The rng returns 0, so there is no jitter. To rewrite the effects:
``SCENARIOS=write pytest …``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tenure._lease import NoAnswer
from tenure._queue.effects import (
    Accept,
    Accepted,
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Hint,
    LocksEffect,
    LocksEnded,
    MessagesGivenBack,
    Pause,
    PumpEffect,
    Receive,
    ReceiveSession,
    Release,
    Renew,
    Report,
    Resume,
    Settle,
    Tick,
    WakeWorkers,
)
from tenure._queue.lock_group import LockGroup
from tenure._queue.locks import Locks
from tenure._queue.message import NO_HEADERS, Delivery, SessionLock, Token
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.session_pump import SessionPump
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    DeadLetter,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._timing import Timing

HERE = Path(__file__).parent
SCENARIOS = sorted(HERE.glob("*.txt"))
VERDICTS: dict[str, Verdict] = {
    "complete": COMPLETE,
    "back": GIVE_BACK,
    "abandon": Abandon(),
    "reject": DeadLetter("bad"),
}
ANSWERS: dict[str, Settled | Lapsed] = {"yes": SETTLED, "dead": SETTLED_DEAD, "no": LAPSED}
PUMP_EVENTS = {"tick": Tick(), "hint": Hint(), "pause": Pause(), "resume": Resume()}


class NoJitter:
    def random(self) -> float:
        return 0.0


class Machines:
    """Both machines, and the messages by their numbers."""

    def __init__(self, options: str) -> None:
        words = options.split()
        has_sessions = "sessions" in words
        given = dict(one.split("=") for one in words if one != "sessions")
        timing = Timing(float(given.pop("lock", "30")))
        more: dict[str, Any] = {name: int(value) for name, value in given.items()}
        settings = PumpSettings(timing, **more)
        holds: dict[Token, LockGroup] = {}
        kind = SessionPump if has_sessions else Pump
        self.pump = kind("orders", "me", settings, NoJitter(), holds, now=0.0)
        self.locks = Locks("orders", "me", settings, NoJitter(), holds, now=0.0)
        self.messages: dict[str, Delivery] = {}
        self.sessions: dict[str, SessionLock] = {}
        self.claims = 0

    def step(self, now: float, line: str) -> list[str]:
        """Carry out *line*, and return the effects."""
        head, _, tail = line.partition(":")
        word, *words = head.split()
        if word == "locks":
            effects = self.locks.handle(self._locks_event(words, tail.split()), now)
            lines = self._lines(effects, self.locks.wake_at)
            for message in effects:
                if isinstance(message, LocksEnded | MessagesGivenBack):
                    lines += self._lines(self.pump.handle(message, now), self.pump.wake_at)
            return lines
        if word == "take":
            taken = self.pump.take(now)
            return [f"message {taken.sequence}" if taken else "nothing"]
        if word == "done":
            verdict = None if words[1:] == ["keep"] else VERDICTS[words[1] if words[1:] else "complete"]
            passed = self.pump.done(self.messages[words[0]], verdict)
            return ["noted" if passed else "kept" if verdict is None else "discarded"]
        if word == "settled":
            self.pump.settled(self.messages[words[0]])
            return []
        if word == "forget":
            self.pump.let_expire(self.messages[words[0]])
            return []
        return self._lines(self.pump.handle(self._pump_event(word, words, tail.split()), now), self.pump.wake_at)

    def _pump_event(self, word: str, words: list[str], rest: list[str]) -> Any:
        match word:
            case "accepted":
                self.claims += 1
                for session in rest:
                    self.sessions[session] = SessionLock("orders", session, f"claim {self.claims}", 0.0)
                return Accepted(_number(words[0]), self.sessions[rest[0]] if rest else None)
            case "received":
                found = [self._message_in(rest[0], one) for one in rest[1:]]
                return Claimed(_number(words[0]), found)
            case "claimed":
                self.claims += 1
                due = [float(one.removeprefix("due=")) for one in rest if one.startswith("due=")]
                found = [self._message(one) for one in rest if not one.startswith("due=")]
                return Claimed(_number(words[0]), found, due[0] if due else None)
            case "answered":
                return Answered(_number(words[0]), [ANSWERS[one] for one in rest])
            case "unanswered":
                return Answered(_number(words[0]), NoAnswer("timed out"))
            case "drain":
                return Drain(float(words[0]))
        return PUMP_EVENTS[word]

    def _locks_event(self, words: list[str], rest: list[str]) -> Any:
        match words[0]:
            case "renewed":
                return Answered(_number(words[1]), [LAPSED if one == "no" else Renewed(0.0) for one in rest])
            case "answered":
                return Answered(_number(words[1]), [ANSWERS[one] for one in rest])
            case "unanswered":
                return Answered(_number(words[1]), NoAnswer("timed out"))
        return Tick()

    def _message(self, number: str) -> Delivery:
        token = f"claim {self.claims}"
        self.messages[number] = Delivery("orders", int(number), token, number, b"", NO_HEADERS, 1, 0.0, 0.0)
        return self.messages[number]

    def _message_in(self, session: str, number: str) -> Delivery:
        lock, last = self.sessions[session], self.messages.get(number)
        count = last.delivery_count + 1 if last is not None else 1
        self.messages[number] = Delivery(
            "orders", int(number), lock.token, number, b"", NO_HEADERS, count, 0.0, 0.0, session
        )
        return self.messages[number]

    def _lines(self, effects: Sequence[PumpEffect | LocksEffect], wake_at: float) -> list[str]:
        return [*(_line(one) for one in effects), f"{self.pump.state.value}, wake at {wake_at:g}"]


def _line(effect: PumpEffect | LocksEffect) -> str:
    match effect:
        case Receive(request_id, limit):
            return f"receive #{request_id}: up to {limit}"
        case Accept(request_id):
            return f"accept #{request_id}"
        case ReceiveSession(request_id, session):
            return f"receive #{request_id}: in {session.session}"
        case Release(request_id, session):
            return f"release #{request_id}: {session.session}"
        case Settle(request_id, settlements):
            return f"settle #{request_id}: {', '.join(_judged(one) for one in settlements)}"
        case Renew(request_id, held):
            return f"renew #{request_id}: {' '.join(_held(one) for one in held)}"
        case WakeWorkers():
            return "serve"
        case LocksEnded(_, locks):
            return f"to the pump: ended {', '.join(f'{_held(held)} {why}' for held, why in locks)}"
        case MessagesGivenBack(counts):
            return f"to the pump: returned {', '.join(f'{count} of {token}' for token, count in counts)}"
        case CancelHandler(delivery, why):
            return f"cancel the handler of {delivery.sequence}: {why}"
        case CancelAll(why):
            return f"cancel all handlers: {why}"
        case Report(settlement, answer):
            return f"report {_judged(settlement)}: {answer}"
        case Emit(event):
            named = f" {event.sequence}" if hasattr(event, "sequence") else ""
            return f"emit {type(event).__name__}{named}"
    raise AssertionError(effect)


def _judged(settlement: Settlement) -> str:
    verdict = settlement.verdict
    name = next((name for name, one in VERDICTS.items() if one == verdict), repr(verdict))
    return f"{settlement.delivery.sequence} {name}"


def _held(held: Delivery | SessionLock) -> str:
    return str(held.sequence) if isinstance(held, Delivery) else held.session


def _number(word: str) -> int:
    return int(word.removeprefix("#"))


def run(text: str) -> str:
    """Return *text* with the present effects."""
    machines: Machines | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            lines.append(line)
        elif line.startswith("with"):
            machines = Machines(line.removeprefix("with"))
            lines.append(line)
        elif not line.startswith(" "):
            assert machines is not None, "a scenario begins with 'with …'"
            moment, _, what = line.partition(" ")
            lines.append(line)
            lines += [f"        {answer}" for answer in machines.step(float(moment), what)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    result = run(text)
    if os.environ.get("SCENARIOS") == "write":
        path.write_text(result)
    assert result == text


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 8

"""``tenure status --me``: ask the running ``tenure lead`` of this machine for their status, and judge it."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any

from tenure import CandidateStatus
from tenure._cli import lead_sockets
from tenure._cli.exits import Exit, Failure
from tenure._cli.lead_sockets import LeadSocket
from tenure._cli.output import lead_on, print_error, print_json, print_line, seconds
from tenure._foreign import RECORD_MAX, Unreadable, a_count, a_flag, a_text, read_object
from tenure._foreign import seconds as read_seconds
from tenure._one_line import one_line

Answer = CandidateStatus | str
"""The status of a process, or why it gave none."""

NONE = ""
"""There was no answer in time."""

CHUNK = 65_536


def _a_problem(value: object) -> str:
    if not isinstance(value, str):
        raise Unreadable("it is no text")
    return value  # of an exception: it may have any characters


def _or_none(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


_READERS: dict[str, Callable[[object], Any]] = {
    "name": a_text,
    "state": a_text,  # also one that a newer version may have
    "token": _or_none(a_count),
    "trusted_for": read_seconds,
    "answered_ago": _or_none(read_seconds),
    "problem": _a_problem,
    "overran": a_flag,
    "is_live": a_flag,
    "is_ready": a_flag,
}
"""The fields of a status, and how each is read."""


def show(name: str | None, base: str | None, wait: float, *, ready: bool, as_json: bool) -> int:
    """Print the status of each ``tenure lead NAME`` (of every name, if None is given); return the exit code.

    Args:
        name: Of the election.
        base: Where the folder of the sockets is, unless in the usual place.
        wait: Seconds that all processes together have for their answers.
        ready: Whether they must be ready, and not only live.
        as_json: Whether JSON is printed.

    Raises:
        Failure: No such process runs here, or its socket can't be used.
    """
    if not lead_sockets.IS_SUPPORTED:
        raise Failure(Exit.USAGE, "--me needs Unix sockets, and this system has none")
    answers = _ask(lead_sockets.found(name, base), name, time.monotonic() + wait)
    if not answers:
        what = "tenure lead" if name is None else f"tenure lead {name}"
        where = lead_sockets.folder_in(base)
        raise Failure(Exit.VACANT, f"no process `{what}` of this user runs here: none has a socket in {where}")
    if as_json:
        print_json([_record(pid, answer) for pid, answer in answers])
    code: int = Exit.DONE
    for pid, status in answers:
        if isinstance(status, str):
            code = Exit.UNAVAILABLE
            why = f"did not answer within {seconds(wait)}: it is stopped, or its event loop is blocked"
            print_error(f"{'' if name is None else f'{name}: '}process {pid} {status or why}")
        elif not status.is_live or (ready and not status.is_ready):
            code = max(code, Exit.BROKEN)
            print_error(f"{status.name} is not {'ready' if status.is_live else 'live'}: {_sentence(pid, status)}")
        elif not as_json:
            print_line(one_line(f"{status.name}: {_sentence(pid, status)}"))
    if code != Exit.DONE:
        lead_on(f"exit-{int(code)}")
    return code


# --- the answers -------------------------------------------------------------------------------------------------


def _ask(places: list[LeadSocket], name: str | None, deadline: float) -> list[tuple[int, Answer]]:
    """Return the answer of each process, all of which have until *deadline*."""
    asked: list[tuple[int, socket.socket | None]] = []
    for place in places:
        asking = socket.socket(socket.AF_UNIX)
        asking.settimeout(_left(deadline))
        try:
            asking.connect(place.path)
        except (ConnectionRefusedError, FileNotFoundError):  # it was killed, or has just ended
            asking.close()
        except OSError:  # it has not taken the last questions yet
            asking.close()
            asked.append((place.pid, None))
        else:
            asked.append((place.pid, asking))
    answers = [(pid, NONE if asking is None else _answer(asking, deadline)) for pid, asking in asked]
    return [(pid, answer) for pid, answer in answers if isinstance(answer, str) or name in (None, answer.name)]


def _answer(asking: socket.socket, deadline: float) -> Answer:
    text = b""
    with asking:
        try:
            while len(text) <= RECORD_MAX:
                asking.settimeout(_left(deadline))
                chunk = asking.recv(CHUNK)
                if not chunk:
                    break
                text += chunk
        except OSError:
            return NONE
    return _read(text) if text else "closed the connection without an answer: it is ending"


def _read(text: bytes) -> Answer:
    """Return the status in an answer, which may be of another version of tenure, with more fields or fewer."""
    try:
        record = read_object(text)
        given = {"name": a_text(record.get("name")), **{key: record[key] for key in _READERS if key in record}}
        return CandidateStatus(**{key: _READERS[key](value) for key, value in given.items()})
    except Unreadable:  # it was killed while it wrote, or that version has other types
        return "gave an answer that can't be read; if tenure was upgraded, restart the process"


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())  # 0 would mean not to wait even for what has come already


# --- for people and programs -------------------------------------------------------------------------------------


def _record(pid: int, answer: Answer) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"pid": pid, "answered": False}
    return {"pid": pid, "answered": True, **dataclasses.asdict(answer)}


def _sentence(pid: int, status: CandidateStatus) -> str:
    if status.state == "idle" and not status.overran:
        return f"process {pid} does not campaign at present"
    return f"process {pid} {_doing(status)}; {_answered(status)}"


def _doing(status: CandidateStatus) -> str:
    if status.overran:
        return f"still runs the work of {_term(status)}, whose lease is over"
    match status.state:
        case "leading":
            return f"leads in {_term(status)}, trusted for {seconds(status.trusted_for)}"
        case "ending":
            return f"is ending {_term(status)}, trusted for {seconds(status.trusted_for)}"
        case _:
            return "stands by"


def _term(status: CandidateStatus) -> str:
    return "a term" if status.token is None else f"term {status.token}"


def _answered(status: CandidateStatus) -> str:
    if status.answered_ago is None:
        return f"the store has not answered yet{f': {status.problem}' if status.problem else ''}"
    last = f"the store answered {seconds(status.answered_ago)} ago"
    return f"{last}; since then: {status.problem}" if status.problem else last

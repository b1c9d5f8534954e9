"""The exit codes: one table, which ``tenure --help`` shows and every command uses."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The meaning of exit codes, after sysexits.h and the shells."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "done; status: there is a leader; work: ended by INT or TERM, or the queue was empty"
    BROKEN = (
        1,
        "status --me: not live, or not ready; resign: the leader can't be asked; sim, demo: a promise was "
        "broken; doctor --strict: there are warnings; queue delete: not empty",
    )
    USAGE = 2, "the command line is wrong"
    VACANT = (
        3,
        "status, resign: the name has no leader; status --me: no tenure lead runs here; queue, dead, schedule, "
        "partitions: no such queue, schedule or group; dead show: no such dead letter",
    )
    UNAVAILABLE = 69, "the store did not answer; status --me: the process did not answer"
    INTERNAL = 70, "a bug in tenure"
    NO_PROCESS = 71, "lead, run: the system gave no process, pipe or socket"
    OUTPUT = 74, "the output can't be written, as on a full disk"
    NOT_YET = 75, "resign --wait: the leader was asked, and has not stepped down in time"
    CONFIG = 78, "a setting, a URL or a file is wrong; work, run: the module raises an error"
    NOT_RUNNABLE = 126, "lead, work: the command can't be run"
    NOT_FOUND = 127, "lead, work, run: there is no such command, handler or service"
    SIGNAL = 128, "128 + n: ended by signal n; lead: the signal ended the command, or tenure while no command ran"


OTHER_CODES = (
    "lead: otherwise CMD's own code; work: CMD's code decides about its message, see tenure work --help; run: the code "
    "of a process that could not begin"
)


class Failure(Exception):  # reported to people, and never raised out of the command line
    """A command fails with this text and this exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

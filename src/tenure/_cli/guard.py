"""The guard of a command: a small process that starts it, and ends all its processes by the term's deadline.

``tenure lead`` runs this file with ``python -I -S``: it imports only the standard library, and starts quickly.

Rules:

- Whatever happens to ``tenure``, the command ends in time. If ``tenure`` is killed, the control pipe closes; if it is
  stopped or blocked, it sends no new deadline. Both end here: TERM, then KILL.
- The deadline is a time of a clock that all processes of the machine share, and that counts in suspend. It is checked
  before the command is started, too.
- The command leads a process group of its own, so that the guard can signal the group and survive. The session is the
  guard's, so that a terminal's signals come through ``tenure`` only, and are not delivered twice.
- On Linux, the guard adopts orphans (PR_SET_CHILD_SUBREAPER): a daemon that forks twice and leaves group and session
  becomes the guard's child, so it is found in /proc and stopped as well. And if the guard itself is killed, the kernel
  kills the command (PR_SET_PDEATHSIG), and ``tenure``, which adopts orphans too, the rest. If both
  are killed at the same instant, only the command itself certainly ends. On other systems, only its group is reached.
- Only the kernel knows whether all processes have ended. A listing of /proc is no snapshot: a process that forks
  meanwhile, and ends, hides its child from it. But orphans are adopted in the same step in which their parent ends, so
  a guard without children has no descendants (ECHILD). /proc only serves to find the processes to signal.
- ``tenure`` must not release its lease before the guard has ended: the guard ends when no process is left.

Control pipe, from tenure, a line each: ``deadline SECONDS``, ``signal NUMBER``, ``stop`` (the term is lost), ``kill``.
Report pipe, to tenure: ``running PID`` (the command, and its group), ``stuck 0`` (not all could be killed yet; the
guard keeps trying), and at the end one of ``ended CODE`` (by itself, or by a signal passed on), ``lost CODE`` (stopped
because of the term), ``late 0`` (too late to start it), ``failed ERRNO`` (it can't be started).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable

KILL_SHARE = 0.25
"""The share of the grace that is left between KILL and the end of the trusted time."""

CHECK_EVERY = 0.5
"""Seconds between checks of the clock, at most: poll() does not count the time of a suspend."""

CHECK_EVERY_STOPPING = 0.05
"""The same while processes are being stopped: not every end is signalled."""

KILL_AGAIN = 0.01
"""Seconds from KILL to the next one, if a process is left; then growing, up to CHECK_EVERY."""

LISTINGS = 200
"""Listings of one KILL, at most, to find processes that were forked meanwhile."""

TO_THE_GROUP = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGWINCH})
"""Signals that a terminal, too, sends to a whole group. Others (HUP, USR1, USR2) are for the command itself,
and would end children that don't handle them."""

_HANDLED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored in every Python; a command expects the default
HAS_PROC = os.path.exists("/proc/self/stat")

_LATE = b"late"
_FOREVER = float("inf")


def now() -> float:
    """Return the time by the clock that deadlines are given in; it counts in suspend, as tenure's own does."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    return time.monotonic()


# --- processes ---------------------------------------------------------------------------------------------------


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies; return whether this system supports that."""
    return _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _die_with_parent() -> None:
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _prctl(option: int, argument: int) -> bool:
    if sys.platform != "linux":
        return False
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, a C library without prctl
        import ctypes

        return bool(ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))) == 0)
    return False


def living(root: int, session: int | None = None, spared: Iterable[int] = ()) -> dict[int, int]:
    """Return every live descendant of *root*, and other processes of *session*: process id → process group.

    Without those *spared* and their descendants. Empty without /proc. Zombies have ended, and don't count, except
    *root*'s own, which show that the listing was too late: one may have left a child that did not exist yet when /proc
    was listed. So all have ended only if *root* has reaped its children, and none is found then.
    """
    children: dict[int, list[int]] = {}
    alive: dict[int, int] = {}
    found: set[int] = set()
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The name is in brackets and may contain anything; after it: state, parent, group, session.
                    state, parent, group, its_session, *_ = file.read().rpartition(b")")[2].split()
            except (OSError, ValueError):
                continue  # it has just ended
            pid = int(entry)
            children.setdefault(int(parent), []).append(pid)
            if state not in (b"Z", b"X") or int(parent) == root:
                alive[pid] = int(group)
                if int(its_session) == session:
                    found.add(pid)
    frontier = [root]
    while frontier:
        below = set(children.get(frontier.pop(), [])).difference(spared)
        found.update(below)
        frontier += below
    return {pid: alive[pid] for pid in found if pid in alive and pid != root}


def send(number: int, *, group: int = 0, processes: Iterable[int] = ()) -> None:
    """Send a signal to a whole group, from which no fork escapes, and to single processes."""
    # EPERM: a command that changed its user. We can't signal it, only wait for it.
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(root: int, session: int, spared: Iterable[int] = ()) -> None:
    """Kill every descendant of *root*, and other processes of *session*, except those *spared* and their descendants.

    Also those that keep forking: each is stopped before its children are listed, so it can neither fork, nor end and
    leave them to *root* unseen, nor take the place of one that was killed. It may still be too late, above all if the
    kernel has no lists of children. So call this again as long as a process is left.
    """
    passed = {root, *spared}
    stopped: set[int] = set()
    for _ in range(LISTINGS):
        new = _children(root) - passed
        if not new:
            break
        while new:
            pid = new.pop()
            send(signal.SIGSTOP, processes=[pid])
            passed.add(pid)
            stopped.add(pid)
            new |= _children(pid) - passed
    send(signal.SIGKILL, processes=stopped.union(living(root, session, spared)))


def _children(pid: int) -> set[int]:
    """Return the children of a process by the kernel's own lists: far quicker than reading all of /proc."""
    found: set[int] = set()
    with suppress(OSError):  # it has just ended, or there are no such lists
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.update(map(int, file.read().split()))
    return found


def reap() -> tuple[dict[int, int], bool]:
    """Collect every child that has ended: process id → exit code, 128 + n for signal n; and whether others live."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            ended[found[0]] = code if code >= 0 else 128 - code
    except ChildProcessError:
        return ended, False
    return ended, True


# --- the guard ---------------------------------------------------------------------------------------------------


class Guard:
    """One command, from before its start until all its processes have ended.

    Args:
        control: The pipe with tenure's lines; its end means that tenure has ended.
        report: The pipe for answers.
        deadline: Until when the term is trusted, by :func:`now`.
        grace: Seconds before the deadline at which the command gets TERM.
    """

    def __init__(self, control: int, report: int, deadline: float, grace: float) -> None:
        self._control = control
        self._report = report
        self._deadline = deadline
        self._grace = grace
        self._stop_at = _FOREVER  # when to send TERM, if that is earlier than the deadline demands
        self._kill_at = _FOREVER  # the same for KILL
        self._lost = False  # the term is over for the command: later deadlines are ignored
        self._term_sent = False  # TERM was sent
        self._kill_again_at = 0.0  # KILL was sent, and when to send it again
        self._command = 0
        self._code: int | None = None
        self._failure = b""
        self._exec_pipe = -1
        self._kill_pause = KILL_AGAIN
        self._text = b""
        self._adopts = adopt_orphans()
        self._wake_pipe = _catch_signals()
        os.set_blocking(control, False)

    def run(self, command: list[str]) -> None:
        """Start *command*, wait until all its processes have ended, and report."""
        self._report_line(self._run(command))

    def _run(self, command: list[str]) -> str:
        self._read_control()
        if self._lost or self._kill_at <= now() or now() >= self._deadline - self._grace:
            return "late 0"
        try:
            self._spawn(command)
        except OSError as error:  # no process could be started, or no pipe opened
            return f"failed {error.errno or 0}"
        while self._code is None or self._left():
            self._wait()
            self._act()
        return self._outcome(self._code)

    def _outcome(self, code: int) -> str:
        self._read_exec_result()
        if self._failure:
            return "late 0" if self._failure == _LATE else f"failed {int(self._failure)}"
        return f"{'lost' if self._lost else 'ended'} {code}"

    def _report_line(self, line: str) -> None:
        with suppress(OSError):  # the reader has ended
            os.write(self._report, f"{line}\n".encode())

    # --- the command ---

    def _spawn(self, command: list[str]) -> None:
        self._exec_pipe, report = os.pipe()  # reports why it could not be started; closes by itself once it runs
        guard = os.getpid()
        # Signals wait until the child has reset our handlers; otherwise one that comes in between would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._become(command, guard, report, before)
        with suppress(OSError):  # the child does it too: either way, the group exists before we signal it
            os.setpgid(pid, pid)
        self._command = pid
        self._report_line(f"running {pid}")
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(report)

    def _become(self, command: list[str], guard: int, report: int, mask: set[int]) -> NoReturn:
        try:
            os.setpgid(0, 0)
            _die_with_parent()
            if os.getppid() != guard:
                os._exit(128 + signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in _HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or & in a script: stays ignored
                    signal.signal(number, signal.SIG_DFL)
            for number in _SET_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if now() >= self._deadline - self._grace:
                os.write(report, _LATE)
            else:
                os.execvp(command[0], command)
        except OSError as error:
            os.write(report, b"%d" % (error.errno or 0))
        finally:
            os._exit(127)

    # --- the loop ---

    def _wait(self) -> None:
        """Sleep until there is input or an action is due."""
        due = min(self._kill_due(), _FOREVER if self._term_sent else self._stop_due())
        longest = CHECK_EVERY_STOPPING if self._term_sent else CHECK_EVERY
        poll = select.poll()
        for pipe in (self._control, self._exec_pipe, self._wake_pipe):
            if pipe >= 0:
                poll.register(pipe, select.POLLIN)
        ready = {pipe for pipe, _ in poll.poll(max(0.0, min(due - now(), longest)) * 1000)}
        if self._wake_pipe in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_pipe, 4096)
        if self._exec_pipe in ready:
            self._read_exec_result()
        if self._control in ready:
            self._read_control()

    def _read_exec_result(self) -> None:
        if self._exec_pipe >= 0:
            self._failure = os.read(self._exec_pipe, 64)
            os.close(self._exec_pipe)
            self._exec_pipe = -1

    def _read_control(self) -> None:
        """Read lines from tenure."""
        try:
            while chunk := os.read(self._control, 4096):
                self._text += chunk
        except BlockingIOError:
            pass
        else:  # the end of the pipe: tenure has ended, and does not renew any more
            os.close(self._control)
            self._control = -1
            self._lose(kill_at=now() + self._grace)
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            with suppress(ValueError):  # no line of tenure's: whatever it is, the guard must not end before the command
                self._execute(line.decode().split())

    def _execute(self, words: list[str]) -> None:
        match words:
            case ["deadline", text] if (deadline := float(text)) == deadline:  # not NaN, which never comes
                # It may move closer (a renewal was refused), but not away once the command is being stopped.
                stopping = self._term_sent or self._stop_at < _FOREVER
                self._deadline = min(self._deadline, deadline) if stopping else deadline
            case ["signal", number]:
                self._pass_on(signal.Signals(int(number)))
            case ["stop"]:
                self._lose()
            case ["kill"]:
                self._kill_at = now()

    def _pass_on(self, number: signal.Signals) -> None:
        if not self._command:  # the signal came before the start: do not start it
            self._lose()
        elif self._code is None:
            if number in TO_THE_GROUP:
                send(number, group=self._command)
            else:
                send(number, processes=[self._command])

    def _lose(self, kill_at: float = _FOREVER) -> None:
        # If the command has already ended by itself, its code counts: only the processes that it left are stopped.
        self._lost = self._lost or self._code is None
        self._stop_at = min(self._stop_at, now())
        self._kill_at = min(self._kill_at, kill_at)

    def _act(self) -> None:
        """Perform the actions that are due."""
        self._note(reap()[0])
        if not self._term_sent and now() >= self._stop_due():
            if self._stop_at > now():
                self._lose()
            self._term_sent = True
            self._term_all()
        if now() >= self._kill_due():
            self._kill_all()

    def _term_all(self) -> None:
        found = living(os.getpid(), os.getsid(0))
        # Once the command has ended, its number names its group only as long as that has a process.
        has_group = self._code is None or not HAS_PROC or self._command in found.values()
        others = [pid for pid, group in found.items() if group != self._command]
        send(signal.SIGTERM, group=self._command if has_group else 0, processes=others)

    def _kill_all(self) -> None:
        if self._code is None or not HAS_PROC:
            send(signal.SIGKILL, group=self._command)
        kill_all(os.getpid(), os.getsid(0))
        # The processes left are blocked in the kernel, fork faster than we list, or belong to another user.
        pause, self._kill_pause = self._kill_pause, min(self._kill_pause * 1.5, CHECK_EVERY)
        self._kill_again_at = now() + pause
        if pause < self._kill_pause == CHECK_EVERY:
            self._report_line("stuck 0")

    def _note(self, ended: dict[int, int]) -> None:
        if self._command in ended and self._code is None:
            self._code = ended[self._command]
            # The processes that it left are stopped as well: TERM first, then KILL.
            self._stop_at = min(self._stop_at, now())
            self._kill_at = min(self._kill_at, now() + self._grace)

    def _left(self) -> bool:
        """Whether a process that the command started is still alive, after it has ended."""
        ended, others_live = reap()
        self._note(ended)
        if others_live or self._adopts:
            return others_live
        # If orphans are not adopted, only those in the listing are known.
        if HAS_PROC:
            return bool(living(os.getpid(), os.getsid(0)))
        try:
            os.killpg(self._command, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _stop_due(self) -> float:
        return min(self._stop_at, self._deadline - self._grace)

    def _kill_due(self) -> float:
        return self._kill_again_at or min(self._kill_at, self._deadline - self._grace * KILL_SHARE)


def _catch_signals() -> int:
    """Let no signal end the guard, which must outlive the command; return a pipe that wakes it at each signal."""
    reading, writing = os.pipe()
    for pipe in (reading, writing):
        os.set_blocking(pipe, False)
    for number in _HANDLED:
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def main() -> None:
    control, report, deadline, grace, *command = sys.argv[1:]
    for pipe in (int(control), int(report)):
        os.set_inheritable(
            pipe, False
        )  # the command must not inherit them: when they are closed, the other side has ended
    Guard(int(control), int(report), float(deadline), float(grace)).run(command)


if __name__ == "__main__":
    main()

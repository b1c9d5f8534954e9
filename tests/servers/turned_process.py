"""The clocks of a running process, put forward: also of a program in Go, which doesn't ask the C library for the time.

Programs read the clocks in the vDSO, a page of code that the kernel maps into each process. A process has its own copy
as soon as somebody writes to it. Here the function ``__vdso_clock_gettime`` of one process is replaced by one that asks
the kernel, and adds what the test has turned. Sleeps and time limits that the process has begun last as long as before,
so this is for programs that look at the clock often, as those in Go do; a program that waits *until* a time on a clock,
as those in Java do, would wait too long.
"""

from __future__ import annotations

import math
import os
import platform
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Self

from tests.durations import wait_until
from tests.process_states import STOPPED, states_of
from tests.servers.process import Server

CAN_TURN = sys.platform == "linux" and platform.machine() == "x86_64" and Path("/proc/self/task").is_dir()
"""Whether clocks of processes can be turned on this machine: the code below is machine code."""

IDLE, IDLE_WITHIN = frozenset("SI"), 1.0
"""The states of threads that wait; and the seconds within which a process has some moment in which all do."""

FUNCTION = b"__vdso_clock_gettime"
DYNSYM = 11
"""The type of the section with the symbols."""
_CODE = bytes.fromhex(
    "b8e4000000"  #     mov  eax, 228           ; the system call clock_gettime
    "0f05"  #           syscall
    "85c0"  #           test eax, eax
    "752c"  #           jnz  end
    "85ff"  #           test edi, edi           ; the CPU time of some process or thread
    "7828"  #           js   end
    "83ff02"  #         cmp  edi, 2             ; the CPU time of this process
    "7423"  #           je   end
    "83ff03"  #         cmp  edi, 3             ; the CPU time of this thread
    "741e"  #           je   end
    "488b0518000000"  # mov  rax, [turned]
    "48034608"  #       add  rax, [rsi + 8]     ; nanoseconds
    "31d2"  #           xor  edx, edx
    "b900ca9a3b"  #     mov  ecx, 1_000_000_000
    "48f7f1"  #         div  rcx
    "480106"  #         add  [rsi], rax         ; seconds
    "48895608"  #       mov  [rsi + 8], rdx
    "31c0"  #           xor  eax, eax
    "c3"  #        end: ret
)
_TURNED_AT = -(-len(_CODE) // 8) * 8
"""Where the turned nanoseconds are: behind the code, on a multiple of 8."""


class TurnedProcess:
    """The clocks of a child process.

    Args:
        pid: The process; it must run already, not be about to execute another program.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._turned = 0
        self._vdso = _vdso_of(pid)
        with self._memory() as memory:
            image = os.pread(memory, len(self._vdso), self._vdso.start)
        offset, size = _function(image)
        assert size >= _TURNED_AT + 8, "the function of the vDSO is shorter than its replacement"
        self._function = self._vdso.start + offset

    def turn(self, seconds: float) -> None:
        """Put its clocks forward, when it has done what it was asked before, or is not idle for ``IDLE_WITHIN``."""
        self._until_idle()
        self._turned += round(seconds * 1e9)
        is_new = self._turned == round(seconds * 1e9)
        code = _CODE.ljust(_TURNED_AT, b"\x90")
        written = struct.pack("<Q", self._turned)
        with self._stopped(outside_vdso=is_new), self._memory() as memory:
            if is_new:
                os.pwrite(memory, code + written, self._function)
            else:
                os.pwrite(memory, written, self._function + _TURNED_AT)

    def _until_idle(self) -> None:
        """Wait until no thread runs: what a client has sent, and what has no answer, would count from later on."""
        with suppress(AssertionError):
            wait_until(lambda: states_of(self._pid) <= IDLE | STOPPED, within=IDLE_WITHIN)

    @contextmanager
    def _memory(self) -> Iterator[int]:
        memory = os.open(f"/proc/{self._pid}/mem", os.O_RDWR)
        try:
            yield memory
        finally:
            os.close(memory)

    @contextmanager
    def _stopped(self, *, outside_vdso: bool) -> Iterator[None]:
        """Stop the process, unless it is stopped already: no thread may execute the code while it is written."""
        was_stopped = states_of(self._pid) <= STOPPED
        try:
            while True:
                os.kill(self._pid, signal.SIGSTOP)
                wait_until(lambda: states_of(self._pid) <= STOPPED, lambda: "a process did not stop")
                if not (outside_vdso and any(place in self._vdso for place in _executed(self._pid))):
                    break
                os.kill(self._pid, signal.SIGCONT)
            yield
        finally:
            if not was_stopped:
                os.kill(self._pid, signal.SIGCONT)


def steps(seconds: float, longest: float, now: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Yield by how much to put clocks forward now, until *seconds* have passed on them.

    The time that the steps take passes, too: on a busy machine, more than a test leaves of a lock.
    """
    began, turned = now(), 0.0
    while (left := seconds - turned - (now() - began)) > 0:
        step = min(left, longest)
        turned += step
        yield step


class TurnedServer(Server):
    """A server whose clocks are put forward while it runs."""

    step_max: ClassVar[float] = math.inf
    """Seconds by which they may be put forward at once."""
    goes_on: ClassVar[bool] = True
    """Whether its clocks are put forward again when it was restarted; else it has the true time then."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0
        """The seconds by which its clocks are ahead of the true time."""
        self._clocks: TurnedProcess | None = None

    @property
    def clock_pid(self) -> int:
        """The process that reads the clocks."""
        return self.pid

    def launch(self) -> None:
        self._clocks = None
        super().launch()

    def until_ready(self) -> Self:
        super().until_ready()
        if self._clocks is None and self.ahead:
            before, self.ahead = self.ahead, 0.0
            if self.goes_on:
                TurnedServer.turn(self, before)  # at once: no test has begun anything since it was started
        return self

    def turn(self, seconds: float) -> None:
        """Put its clocks forward: wall clock, timers and all. Only where ``CAN_TURN``."""
        if self._clocks is None:
            self._clocks = TurnedProcess(self.clock_pid)
        self._clocks.turn(seconds)
        self.ahead += seconds


def _vdso_of(pid: int) -> range:
    """Return the addresses of the process's vDSO."""
    found = re.search(r"^(\w+)-(\w+) .*\[vdso\]$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    assert found is not None, "the process has no vDSO"
    return range(int(found[1], 16), int(found[2], 16))


def _executed(pid: int) -> Iterator[int]:
    """Yield the address of the instruction that each thread of a stopped process executes next."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield int((task / "syscall").read_text().split()[-1], 16)


def _function(image: bytes) -> tuple[int, int]:
    """Return where the function begins in the *image* of the vDSO, and its length: its symbol has them (ELF)."""
    (headers,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, headers + number * size) for number in range(count)]
    symbols = next(section for section in sections if section[1] == DYNSYM)
    names = sections[symbols[6]][4]
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, value, length = struct.unpack_from("<I4xQQ", image, at)
        if image[names + name :].startswith(FUNCTION + b"\0"):
            return value, length
    raise AssertionError("the vDSO has no clock_gettime")

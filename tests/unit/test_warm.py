"""A process of tests/warm.py behaves as a cold one: its exit code, streams, folder, environment, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

PROGRAMS = {
    "streams": "import sys; print(sys.stdin.read()); sys.stderr.write('error')",
    "place": "import os, sys; print(os.getcwd(), sys.argv[1:], os.environ['MINE'], __name__, 'PATH' in os.environ)",
    "files": "import os, sys; print(sys.platform != 'linux' or sorted(os.listdir('/proc/self/fd')))",
    "code": "import sys; sys.exit(7)",
    "text for a code": "import sys; sys.exit('a reason')",
    "failure": "raise ValueError('a reason')",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at exit": "import atexit; atexit.register(print, 'the end')",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('the end'))).start()",
    "never awaited": "async def main(): ...\nmain()",
    "never awaited, in a cycle": "async def main(): ...\nloop = [main()]\nloop.append(loop)\ndel loop",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_ends_as_a_cold_process(program: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "PATH"} | {"MINE": "é"}
    cold = subprocess.run(
        [sys.executable, file, "a", "b c"],
        cwd=tmp_path,
        env=environment,
        input="given",
        capture_output=True,
        text=True,
        check=False,
    )
    found = warm.run([file, "a", "b c"], cwd=tmp_path, env=environment, text="given")
    assert (found.returncode, found.stdout) == (cold.returncode, cold.stdout)
    assert bool(found.stderr) == bool(cold.stderr)
    for line in cold.stderr.splitlines()[-1:]:  # before that, a traceback of its own
        assert line.rpartition(": ")[2] in found.stderr


def test_a_process_gets_nothing_from_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import os, tenure; print(getattr(tenure, 'left', None)); tenure.left = os.environ['OTHER'] = 'x'")
    for _ in range(2):
        assert warm.run([file]).stdout == "None\n"


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import time; time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([file], timeout=0.3)


def test_it_runs_commands(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    assert warm.run(["send", "orders", "-", "--on", url], text="a body").returncode == 0
    ended = warm.run(["work", "orders", "--until-empty", "--on", url, "--", "cat"], cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "a body")
    assert warm.run(["nothing"]).returncode == 2


def test_a_process_that_runs_can_be_signalled_and_keeps_no_file_of_another(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import os, sys; os.write(1, b'begun\\n'); sys.stdin.read(); sys.exit(3)")
    pipe = subprocess.PIPE
    first, second = (warm.start([file], stdin=pipe) for _ in range(2))
    try:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            assert process.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.communicate(timeout=warm.PATIENCE) == ("", "")  # to the ends of its outputs
        assert first.returncode == -signal.SIGTERM
        assert second.poll() is None
        assert second.communicate(timeout=warm.PATIENCE) == ("", "")  # at the end of its input
        assert second.wait() == 3
    finally:
        first.kill()
        second.kill()

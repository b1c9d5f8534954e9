"""Handlers in processes of their own: where none can be made, how they end, and that they never outlast the lock."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def told_by(program: str, folder: Path, *arguments: str, stdin: bool = False) -> str:
    """Run *program* from a file, or let it be read from where there is none; return what it prints."""
    text = textwrap.dedent(program)
    file = folder / "program.py"
    file.write_text(text)
    how = arguments or (str(file),)
    ended = subprocess.run(
        [sys.executable, *how],
        input=text if stdin else None,
        stdin=None if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        cwd=folder,
    )
    return ended.stdout


UNFIT = """
import asyncio, multiprocessing, tenure

def handler(message):
    print("handled", flush=True)

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders", lock=30)
        await queue.send(b"x", session=SESSION)
        try:
            await queue.consume(handler, run_in="process", until_empty=True, sessions=SESSION is not None)
        except tenure.ConfigError as error:
            stats = await queue.stats()
            counts = [one.delivery_count for one in await queue.receive()]
            print("refused:", error, stats.locked, stats.dead, counts, flush=True)
        if multiprocessing.parent_process() is not None:
            await asyncio.sleep(3600)  # who goes on here is a second copy of the whole program
"""

DAEMONIC = """
def run():
    asyncio.run(main())

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=run, daemon=True)
    process.start()
    process.join(5)
"""


@pytest.mark.parametrize("session", [None, "s"])
def test_a_script_that_would_consume_in_each_process_is_told_so(session: str | None, tmp_path: Path) -> None:
    program = UNFIT.replace("SESSION", repr(session)) + "\nasyncio.run(main())\n"
    told = told_by(program, tmp_path)
    assert "refused: each process for handlers runs the script once more" in told
    assert "if __name__ == '__main__': 0 0 " in told
    assert session is not None or told.endswith("0 0 [1]\n")  # given back, uncounted
    assert "Traceback" not in told


def test_a_process_without_children_is_refused(tmp_path: Path) -> None:
    told = told_by(UNFIT.replace("SESSION", "None") + DAEMONIC, tmp_path)
    assert "refused: run_in='process' makes processes, which the daemonic process" in told
    assert "0 0 [1]" in told


@pytest.mark.parametrize("how", ["-c", "-"])
def test_a_handler_in_no_file_is_refused(how: str, tmp_path: Path) -> None:
    program = UNFIT.replace("SESSION", "None") + "\nif __name__ == '__main__': asyncio.run(main())\n"
    if how == "-c":
        told = told_by(program, tmp_path, "-c", program)
        assert "is in no file" in told
    else:
        told = told_by(program, tmp_path, "-", stdin=True)
        assert "there is no file '<stdin>'" in told
    assert "0 0 [1]" in told

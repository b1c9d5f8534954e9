"""A copy of an example project in a folder of its own, run by the commands of its README."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tests.examples.project_pages import LEFT_BEHIND, PROJECTS

WITHIN = 60.0
"""Seconds that a step may take on a slow machine."""


@dataclass(frozen=True)
class Answer:
    """The answer of a web server; the code is 0 if there is none."""

    code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Process:
    """A process that was started by a command of a README."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,
            )
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it by ``kill -9``."""
        if self.runs:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """Wait for its end, and return its exit code; it is negative after a signal."""
        return self._process.wait(WITHIN)


class Project:
    """A project of ``examples/projects``, copied to *folder*, as its reader would do.

    At the end of the block, all processes that it has started are killed.

    Args:
        name: Its folder.
        folder: Where the copy is put.
        ports: For each port in the README, the one of this run.
        environment: Variables for all processes.
    """

    def __init__(self, name: str, folder: Path, ports: Mapping[str, int], **environment: str) -> None:
        self.folder = folder / name
        shutil.copytree(
            PROJECTS / name,
            self.folder,
            ignore=lambda _, names: {one for one in names if LEFT_BEHIND.search(one) and one != ".gitignore"},
        )
        self.readme = (self.folder / "README.md").read_text()
        self.ports = ports
        self._environment = {name: value for name, value in os.environ.items() if name != "TENURE_URL"} | environment
        self._started: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._started:
            with suppress(ProcessLookupError):
                one.kill()

    def command(self, part: str) -> str:
        """Return the one command of the README that has this *part*."""
        blocks: list[str] = re.findall(r"^```sh\n(.*?)^```$", self.readme, re.MULTILINE | re.DOTALL)
        [line] = {line for block in blocks for line in block.splitlines() if part in line}
        return line

    def start(self, command: str, **environment: str) -> Process:
        """Start a *command*."""
        program, *arguments = shlex.split(self._on_our_ports(command))
        line = [sys.executable, *(arguments if program == "python" else ["-m", program, *arguments])]
        output = self.folder.parent / f"output-{len(self._started)}"
        process = Process(line, self.folder, {**self._environment, **environment}, output)
        self._started.append(process)
        return process

    def run(self, command: str) -> str:
        """Run a *command*, and return what it has printed."""
        process = self.start(command)
        code = process.wait()
        assert code == 0, process.output
        return process.output

    def curl(self, command: str) -> Answer:
        """Do what a *command* with ``curl`` does, which need not be installed."""
        parser = ArgumentParser()
        parser.add_argument("url")
        parser.add_argument("-H", dest="headers", action="append", default=[])
        parser.add_argument("-d", dest="fields", action="append", default=[])
        parser.add_argument("--json")
        given = parser.parse_args(shlex.split(self._on_our_ports(command))[1:])
        headers = dict(header.split(": ", 1) for header in given.headers)
        body = given.json or "&".join(given.fields)
        if given.json:
            headers["Content-Type"] = "application/json"
        url = "http://" + given.url.replace("localhost", "127.0.0.1")
        try:
            with urlopen(Request(url, body.encode() or None, headers), timeout=WITHIN) as answer:
                return Answer(answer.status, answer.read().decode())
        except HTTPError as error:
            with error:
                return Answer(error.code, error.read().decode())
        except (URLError, OSError) as error:  # nothing listens
            return Answer(0, str(error))

    def explain(self) -> str:
        """Return what all processes have printed, for a test that fails."""
        return "\n".join(f"--- {one.pid} {'runs' if one.runs else 'has ended'}\n{one.output}" for one in self._started)

    def _on_our_ports(self, command: str) -> str:
        for port, ours in self.ports.items():
            command = command.replace(port, str(ours))
        return command

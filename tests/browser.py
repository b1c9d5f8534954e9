"""A real Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

import websocket

from tests.absent import skip_or_fail
from tests.durations import wait_until

ANSWER_WITHIN = 60.0


class Browser:
    """One page of a Chromium, which is ended with the block."""

    def __init__(self) -> None:
        if (program := shutil.which("chromium")) is None:
            skip_or_fail("chromium is not installed; to run this test, install chromium")
        self._folder = Path(tempfile.mkdtemp(prefix="chromium-"))
        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",  # as root, as in a container
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--remote-debugging-port=0",
                "--remote-allow-origins=*",
                f"--user-data-dir={self._folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(self._folder), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        """What the page has reported: errors, messages of the console, dialogs."""

    def __enter__(self) -> Self:
        try:
            ports = self._folder / "DevToolsActivePort"
            wait_until(lambda: ports.exists() and ports.read_text().count("\n") >= 1)
            port = ports.read_text().splitlines()[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            self._socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=ANSWER_WITHIN)
            for domain in ("Page", "Runtime", "Log"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self.close()

    def close(self) -> None:
        """End the browser, with all its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") in (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        ):
            self.events.append(message)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self.ask("Page.navigate", url=url)
        wait_until(lambda: self.evaluate("location.href !== 'about:blank' && document.readyState") == "complete")

    def text(self) -> str:
        """Return the text of the page."""
        return str(self.evaluate("document.body === null ? '' : document.body.innerText"))

    def until_shown(self, *parts: str) -> str:
        """Wait until the page has all these texts; return its text."""
        wait_until(lambda: all(part in self.text() for part in parts), lambda: f"{parts} not in:\n{self.text()}")
        return self.text()

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Let the user prefer a ``dark`` or a ``light`` page."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        """Press a key of the keyboard, such as ``Tab`` or ``Enter``."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if kind == "keyDown" and text else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, file: Path) -> None:
        """Write a picture of the page."""
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

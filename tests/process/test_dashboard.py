"""``tenure dashboard`` as a process, and in a real browser, against a store with a hostile message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener, urlopen

import pytest

import tenure
import tenure.sync
from tests.durations import PATIENCE, wait_until
from tests.ports import bound

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("websocket")

from tests.browser import Browser  # it needs the package

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

HOSTILE = "<script>window.hacked=1</script>\"'><img src=x onerror='window.hacked=2'>"


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with tenure.sync.connect(url) as backend:
        orders = backend.queue("orders")
        orders.send_batch([tenure.Outgoing(b'{"item": "kettle"}', id=f"order-{number}") for number in range(5)])
        hostile = backend.queue(HOSTILE, max_deliveries=1)
        hostile.send(HOSTILE.encode(), id=HOSTILE, headers={HOSTILE: HOSTILE})

        def fail(message: tenure.sync.Message) -> None:
            raise ValueError(HOSTILE)

        hostile.consume(fail, until_empty=True)
        hostile.send(HOSTILE.encode(), id=f"{HOSTILE}2")
        hostile.receive()[0].dead_letter(HOSTILE, HOSTILE)
        hostile.send(HOSTILE.encode())
        with backend.election(HOSTILE, metadata={HOSTILE: HOSTILE}).campaign():
            pass
    return url


@contextmanager
def served(url: str, *options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``tenure dashboard``; yield its address, and the process."""
    line = [sys.executable, "-m", "tenure.cli", "dashboard", "--on", url, "--listen", "0", *options]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+", said)
        assert found is not None, said
        yield found[0], process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def refused(url: str, *options: str, **environment: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "tenure.cli", "dashboard", "--on", url, *options]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **environment}, check=False
    )
    return done.returncode, done.stderr


# --- the process ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_a_browser_listens(url: str, number: signal.Signals) -> None:
    with served(url) as (address, process), urlopen(f"{address}/events", timeout=PATIENCE) as stream:
        while b"event: look" not in stream.readline():
            pass
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - begun < 15


def test_others_need_a_token(url: str) -> None:
    code, said = refused(url, "--listen", "0.0.0.0:0")
    assert (code, "set TENURE_DASHBOARD_TOKEN" in said) == (78, True)
    with served(url, "--listen", "0.0.0.0:0", TENURE_DASHBOARD_TOKEN="s3cret") as (address, _):
        address = address.replace("0.0.0.0", "127.0.0.1")
        with urlopen(f"{address}/", timeout=PATIENCE) as page:
            shown = page.read().decode()
        assert "Token" in shown
        assert "orders" not in shown
        with pytest.raises(HTTPError, match="401") as raised:
            urlopen(Request(f"{address}/", headers={"Authorization": "Bearer wrong"}), timeout=PATIENCE)
        assert "orders" not in raised.value.read().decode()
        with urlopen(Request(f"{address}/", headers={"Authorization": "Bearer s3cret"}), timeout=PATIENCE) as page:
            assert "orders" in page.read().decode()


def test_a_cookie_of_before_the_token_was_changed_is_refused(url: str) -> None:
    def answer_to(address: str, cookie: str) -> tuple[int, str]:
        try:
            with urlopen(Request(f"{address}/", headers={"Cookie": cookie}), timeout=PATIENCE) as page:
                return page.status, page.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def cookie_of(address: str, token: str) -> str:
        class Stay(HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                return None

        login = Request(f"{address}/login", f"token={token}".encode(), {"Origin": address})
        with pytest.raises(HTTPError, match="303") as raised:
            build_opener(Stay).open(login, timeout=PATIENCE)
        with raised.value as answer:
            return str(answer.headers["Set-Cookie"]).partition(";")[0]

    with served(url, TENURE_DASHBOARD_TOKEN="first") as (address, _):
        old = cookie_of(address, "first")
        assert "orders" in answer_to(address, old)[1]
    with served(url, "--listen", address.rpartition(":")[2], TENURE_DASHBOARD_TOKEN="second") as (again, _):
        assert again == address
        code, shown = answer_to(address, old)
        assert "orders" not in shown
        assert "The token of this dashboard" in shown
        assert answer_to(address, "")[0] == code
        assert "orders" in answer_to(address, cookie_of(address, "second"))[1]


def test_another_host_name_is_refused_unless_it_is_allowed(url: str) -> None:
    with served(url, "--allowed-host", "shop.example") as (address, _):
        with urlopen(Request(f"{address}/", headers={"Host": "shop.example"}), timeout=PATIENCE) as page:
            assert page.status == 200
        with pytest.raises(HTTPError, match="421"):
            urlopen(Request(f"{address}/", headers={"Host": "evil.example"}), timeout=PATIENCE)


def test_wrong_input_is_refused(url: str, tmp_path: Path) -> None:
    with bound() as taken:
        taken.listen()
        code, said = refused(url, "--listen", str(taken.getsockname()[1]))
        assert (code, "can't listen on 127.0.0.1" in said) == (78, True)
    assert refused(url, "--listen", "here")[0] == 2
    assert refused(url, "--listen", "localhost:99999")[0] == 2
    code, said = refused(f"sqlite:///{tmp_path / 'none.db'}", "--listen", "0")
    assert (code, "there is no file" in said) == (78, True)
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("name", ["", "*", "https://shop.example", "shop.example:443", "shop example", "[::1"])
def test_what_is_no_host_name_is_refused(url: str, name: str) -> None:
    code, said = refused(url, "--listen", "0", "--allowed-host", name)
    assert (code, "is no host name" in said) == (2, True)


def test_a_blank_token_is_refused(url: str) -> None:
    code, said = refused(url, "--listen", "0.0.0.0:0", TENURE_DASHBOARD_TOKEN=" ")
    assert (code, "TENURE_DASHBOARD_TOKEN is blank" in said) == (78, True)


@pytest.mark.parametrize(
    ("missing", "store", "extra"),
    [("uvicorn", "", "dashboard"), ("jinja2", "", "dashboard"), ("redis", "redis://127.0.0.1:1", "redis")],
)
def test_the_package_that_is_missing_is_named(url: str, missing: str, store: str, extra: str) -> None:
    line = ["dashboard", "--on", store or url, "--listen", "0"]
    code = f"import sys; sys.modules[{missing!r}] = None; from tenure.cli import main; sys.exit(main({line}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 78
    assert f"needs the package {missing!r}" in done.stderr
    assert f"pip install 'tenure[{extra}]'" in done.stderr


# --- in a browser ---


def test_a_hostile_message_is_text_on_every_page(url: str) -> None:
    with served(url, "--show-bodies", "--allow-changes") as (address, _), Browser() as browser:
        browser.open(f"{address}/")
        browser.until_shown("orders", "window.hacked=1")
        pages = [browser.evaluate(f"document.querySelectorAll('main a')[{place}].href") for place in range(3)]
        pages = sorted({page for page in pages if "hacked" in page})
        assert pages
        seen = set(pages)
        for page in pages:
            browser.open(page)
            links = browser.evaluate("[...document.querySelectorAll('main a')].map(a => a.href)")
            seen |= {link for link in links if "/message" in link}
        for page in sorted(seen):
            browser.open(page)
            assert "window.hacked=1" in browser.text()
            assert browser.evaluate("typeof window.hacked") == "undefined"
            assert browser.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
        assert len(seen) >= 4
        assert browser.events == []  # no error, no dialog, nothing that the policy has refused


def test_numbers_change_without_a_reload(url: str) -> None:
    with served(url) as (address, _), Browser() as browser, tenure.sync.connect(url) as backend:
        browser.open(f"{address}/")
        browser.until_shown("orders")
        browser.evaluate("window.loadedOnce = true")
        backend.queue("bills").send(b"x")
        browser.until_shown("bills")
        begun = threading.Event()
        with backend.election("chair", label="host-1").campaign():
            browser.until_shown("chair", "host-1-")
            begun.set()
        browser.until_shown("no leader")
        assert browser.evaluate("window.loadedOnce") is True
        assert browser.events == []


def test_a_dashboard_that_has_ended_is_noticed_and_found_again(url: str) -> None:
    with Browser() as browser:
        with served(url) as (address, _):
            browser.open(f"{address}/")
            browser.until_shown("orders")
        browser.until_shown("The dashboard does not answer")
        port = address.rpartition(":")[2]
        with served(url, "--listen", port):
            wait_until(lambda: "does not answer" not in browser.text())
            browser.until_shown("orders")


def test_a_page_that_can_not_be_shown_anew_says_so(url: str) -> None:
    with served(url) as (address, _), Browser() as browser:
        browser.open(f"{address}/queue?name=orders")
        browser.until_shown("order-0")
        browser.evaluate("window.before = fetch")
        browser.evaluate("fetch = async () => new Response('<h1>The store is silent</h1>', {status: 503}), 0")
        browser.until_shown("The store is silent. This page shows what was known before.", "order-0")
        browser.evaluate("fetch = before, 0")
        wait_until(lambda: "known before" not in browser.text())


def test_a_page_finds_the_dashboard_again_after_answers_of_something_else(url: str) -> None:
    class Elsewhere(BaseHTTPRequestHandler):
        """A proxy that has no dashboard to ask."""

        def do_GET(self) -> None:
            asked.set()
            self.send_error(404)

        def log_message(self, *parts: object) -> None:
            pass

    asked = threading.Event()
    with Browser() as browser:
        with served(url) as (address, _):
            browser.open(f"{address}/")
            browser.until_shown("orders")
        port = address.rpartition(":")[2]
        proxy = ThreadingHTTPServer(("127.0.0.1", int(port)), Elsewhere)
        threading.Thread(target=proxy.serve_forever).start()
        try:
            assert asked.wait(PATIENCE)
        finally:
            proxy.shutdown()
            proxy.server_close()
        with served(url, "--listen", port), tenure.sync.connect(url) as backend:
            backend.queue("bills").send(b"x")
            browser.until_shown("bills")


def test_the_login_comes_when_the_token_has_changed(url: str) -> None:
    with Browser() as browser:
        with served(url) as (address, _):
            browser.open(f"{address}/")
            browser.until_shown("orders")
        with served(url, "--listen", address.rpartition(":")[2], TENURE_DASHBOARD_TOKEN="s3cret"):
            browser.until_shown("The token of this dashboard")
            browser.evaluate("document.querySelector('[name=token]').value = 's3cret'")
            browser.evaluate("document.querySelector('form').requestSubmit()")
            browser.until_shown("orders")


def test_dead_letters_are_put_back_by_the_keyboard_alone(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        orders = backend.queue("orders")
        for message in orders.receive(max=2):
            message.dead_letter("unreadable")
        with served(url, "--allow-changes") as (address, _), Browser() as browser:
            browser.open(f"{address}/queue?name=orders")
            browser.until_shown("unreadable")
            _press_until(browser, "Put back all…")
            browser.press("Enter")
            browser.until_shown("2 dead letters of 'orders' will be put back")
            wait_until(lambda: browser.evaluate("document.activeElement.innerText") == "Put back")
            browser.press("Enter")
            browser.until_shown("2 dead letters put back")
            assert orders.stats().dead == 0
            assert browser.events == []


def _press_until(browser: Browser, label: str) -> None:
    """Press Tab until what has this label has the focus."""
    for _ in range(60):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.innerText") == label:
            return
    raise AssertionError(f"{label!r} can't be reached by Tab")


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_any_width_and_both_schemes(url: str, width: int, scheme: str) -> None:
    with served(url, "--show-bodies", "--allow-changes") as (address, _), Browser() as browser:
        browser.resize(width, 800)
        browser.prefer(scheme)
        for page in ("/", "/queue?name=orders"):
            browser.open(f"{address}{page}")
            browser.until_shown("orders")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            shade = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            light = sum(map(int, re.findall(r"\d+", shade)[:3])) / 3
            assert (light > 128) == (scheme == "light")


def test_nothing_moves_when_numbers_change(url: str) -> None:
    with served(url) as (address, _), Browser() as browser, tenure.sync.connect(url) as backend:
        browser.resize(1000, 800)
        browser.open(f"{address}/queue?name=orders")
        browser.until_shown("order-0")
        tops = "[...document.querySelectorAll('h1, h2')].map(h => h.getBoundingClientRect().top)"
        before = browser.evaluate(tops)
        orders = backend.queue("orders")
        held = orders.receive(max=3)
        wait_until(lambda: browser.text().count("locked") > 2)
        assert browser.evaluate(tops) == before
        for message in held:
            message.abandon()

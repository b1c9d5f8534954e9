"""The dashboard's pages and actions: what they show, what they refuse, and that nothing in a message is markup."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure import dashboard
from tenure._dashboard import shown
from tenure._dashboard.sampler import Sampler
from tenure.errors import ConfigError, Unavailable
from tests.durations import until
from tests.sharing import sharing_in

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("jinja2")

pytestmark = pytest.mark.asyncio

HOSTILE = "<script>window.hacked=1</script>\"'><img src=x onerror=alert(1)>"
SAME = {"Sec-Fetch-Site": "same-origin"}


@asynccontextmanager
async def asked(url: str = "memory:", **options: Any) -> AsyncIterator[tuple[tenure.Backend, Any]]:
    """Yield an open backend, and a client of its dashboard."""
    async with tenure.connect(url) as backend:
        app = dashboard.app(backend, **options)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield backend, client


async def with_dead(backend: tenure.Backend, name: str = "orders", count: int = 2, reason: str = "bad") -> None:
    queue = backend.queue(name)
    before = (await queue.stats()).dead
    await queue.send_batch([tenure.Outgoing(b"x", id=f"m{before + number}") for number in range(count)])
    for message in await queue.receive(count):
        await message.dead_letter(reason, "why it died")


class Markup(HTMLParser):
    """Fails if a page has markup that is not ours."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert tag not in ("img", "iframe", "object", "embed", "style", "base")
        assert not [name for name in names if name.startswith("on") or name == "style"]
        assert tag != "script" or "src" in names
        for name, value in attrs:
            assert name not in ("href", "src", "action") or (value or "").startswith(("/", "#")), (tag, name, value)


# --- what is shown ---


async def test_the_overview_has_elections_queues_and_schedules() -> None:
    async with asked() as (backend, client):
        await with_dead(backend)
        await backend.queue("orders").send(b"x")
        running = asyncio.create_task(backend.schedule("tidy", 60, queue="tidy").run())
        await until(backend.schedules)
        async with backend.election("chair", label="host-1").campaign():
            page = (await client.get("/")).text
        running.cancel()
    for part in ("chair", "host-1-", "orders", "tidy", "60 s", "read-only"):
        assert part in page
    assert "<button" not in page


async def test_an_empty_store_says_so() -> None:
    async with asked() as (_, client):
        page = (await client.get("/")).text
    assert "No queue was ever used on this store." in page
    assert "No name was ever led on this store." in page


async def test_a_queue_has_its_numbers_settings_messages_and_dead_letters() -> None:
    async with asked(show_bodies=True) as (backend, client):
        queue = backend.queue("orders", lock=60)
        await with_dead(backend)
        await queue.send(b"two kettles", id="late", delay=60)
        await queue.send(b"\x00\xff", id="binary")
        page = (await client.get("/queue", params={"name": "orders"})).text
        delayed = (await client.get("/queue", params={"name": "orders", "state": "delayed"})).text
        wrong = await client.get("/queue", params={"name": "orders", "state": "lost"})
    assert "60 s" in page
    for part in ("late", "two kettles", "binary", "m0", "m1", "bad", "why it died"):
        assert part in page
    assert "late" in delayed
    assert ">binary<" not in delayed
    assert wrong.status_code == 400


async def test_dead_letters_are_chosen_by_reason() -> None:
    async with asked() as (backend, client):
        await with_dead(backend, reason="bad & ugly", count=1)
        await with_dead(backend, reason="late", count=3)
        page = (await client.get("/queue", params={"name": "orders", "reason": "bad & ugly"})).text
    letters = page[page.index('id="dead"') :]
    assert letters.count("<tr><td") == 1
    assert "bad &amp; ugly" in letters


async def test_reasons_are_those_of_more_letters_than_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenure._dashboard.app import SHOWN_MAX

    looks: list[int] = []
    async with asked() as (backend, client):
        kind = type(backend.queue("orders").dead_letters)
        peek = kind.peek

        async def counted(self: Any, limit: int, **chosen: Any) -> Any:
            looks.append(limit)
            return await peek(self, limit, **chosen)

        monkeypatch.setattr(kind, "peek", counted)
        await with_dead(backend, reason="early", count=SHOWN_MAX - 1)
        await with_dead(backend, reason="late", count=1)
        assert ">late</a>" in (await client.get("/queue", params={"name": "orders"})).text
        assert looks == [SHOWN_MAX + 1]  # all of them are known: no second look
        await with_dead(backend, reason="later", count=2)
        assert ">later</a>" in (await client.get("/queue", params={"name": "orders"})).text
        page = (await client.get("/queue", params={"name": "orders", "reason": "late"})).text
        assert ">early</a>" in page


async def test_a_dead_letter_has_its_history() -> None:
    async with asked(show_bodies=True) as (backend, client):
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send(b'{"a": [1, 2]}', id="one", headers={"tenant": "north"}, correlation_id="c-1")

        def fail(message: tenure.sync.Message) -> None:
            raise ValueError("no such customer")

        await queue.consume(fail, until_empty=True)
        [letter] = await queue.dead_letters.peek()
        found = {"queue": "orders", "sequence": letter.sequence, "dead": 1}
        page = (await client.get("/message", params=found)).text
    for part in ("max_deliveries", "ValueError: no such customer", "Traceback", "tenant", "north", "c-1", "JSON"):
        assert part in page
    assert "&#34;a&#34;: [" in page


async def test_an_election_has_the_terms_that_were_seen() -> None:
    async with asked() as (backend, client):
        page = ""
        for label in ("first", "second"):
            async with backend.election("chair", label=label, metadata={"addr": "h:1"}).campaign():

                async def is_shown(label: str = label) -> bool:
                    nonlocal page
                    page = (await client.get("/election", params={"name": "chair"})).text
                    return f"{label}-" in page

                await until(is_shown)
    assert "first-" in page
    assert "second-" in page
    assert "h:1" in page
    assert page.count('class="current"') == 1


async def test_partitions_have_a_section_and_a_page_of_their_own() -> None:
    async with asked() as (backend, client), backend.election("chair").campaign(), sharing_in(backend) as group:
        front = (await client.get("/")).text
        page = (await client.get("/partitions", params={"name": "orders"})).text
        owner = (await client.get("/election", params={"name": "orders.partition-2"})).text
    section = front[front.index('id="partitions"') : front.index('id="queues"')]
    assert [f"{one}" in section for one in ("orders", ">2<", ">4 of 4<", "balanced")] == [True] * 4
    assert "chair" in front
    assert "orders.partition" not in front
    assert "orders.member" not in front
    for member in group.members:
        first, second = (int(one.removeprefix("partition-")) for one in member.owned)
        ranges = f"{first}-{second}" if second == first + 1 else f"{first}, {second}"
        row = page[page.index(f"{member.identity[:8]}") :]
        row = row[: row.index("</tr>")]
        assert [part in row for part in (">2 of 2<", f">{ranges}<", member.metadata["addr"])] == [True] * 3
    owners = page[page.index('id="owners"') :]
    assert owners.count(" s</td>") == 4  # time left
    assert [one.identity[:8] in owner for one in group.members if "partition-2" in one.owned] == [True]
    for text in (front, page):
        Markup().feed(text)


async def test_partitions_without_an_owner_are_shown() -> None:
    async with asked() as (backend, client):
        async with sharing_in(backend, labels=["ann"]):
            pass
        front = (await client.get("/")).text
        page = (await client.get("/partitions", params={"name": "orders"})).text
        outline = Outline()
        outline.feed(page)
    assert "no members" in front
    assert "0 of 4" in front
    assert "No other name was ever led" in front
    assert "No members." in page
    assert page.count("no owner") == 4
    assert "0-3" in page
    assert outline.headings == ["h1", "h2", "h2"]
    assert all(title.get("scope") == "col" for title in outline.titles)


async def test_a_page_of_very_many_partitions_shows_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure._dashboard.app.OWNERS_MAX", 3)
    async with asked() as (backend, client), sharing_in(backend, labels=["ann"]):
        page = (await client.get("/partitions", params={"name": "orders"})).text
    assert "1 more: tenure partitions" in page
    assert page.count(" s</td>") == 3


async def test_bodies_and_tracebacks_are_hidden_unless_asked_for() -> None:
    async with asked() as (backend, client):
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send(b"secret-body", id="live", headers={"a": "of-a-header"}, correlation_id="of-a-request")
        page = (await client.get("/queue", params={"name": "orders"})).text

        async def fail(message: tenure.Message) -> None:
            secret_variable = "secret-in-a-trace"
            raise ValueError("why") from KeyError(secret_variable)

        await queue.consume(fail, until_empty=True)
        [letter] = await queue.dead_letters.peek()
        found = {"queue": "orders", "sequence": letter.sequence, "dead": 1}
        page += (await client.get("/message", params=found)).text
        page += (await client.get("/queue", params={"name": "orders"})).text
    assert "secret-body" not in page
    assert "secret-in-a-trace" not in page
    assert "--show-bodies" in page
    assert "of-a-header" in page  # as docs/security.md warns
    assert "of-a-request" in page


async def test_nothing_in_a_message_or_a_name_is_markup() -> None:
    async with asked(show_bodies=True, allow_changes=True) as (backend, client):
        queue = backend.queue(HOSTILE, max_deliveries=1)
        await queue.send(HOSTILE.encode(), id=HOSTILE, headers={HOSTILE: HOSTILE}, correlation_id=HOSTILE)
        await queue.send(b"x", session=HOSTILE)
        [message] = await queue.receive()
        await message.dead_letter(HOSTILE, HOSTILE)
        await queue.send(HOSTILE.encode(), id=f"{HOSTILE}2")

        async def fail(message: tenure.Message) -> None:
            raise ValueError(HOSTILE)

        await queue.consume(fail, until_empty=True)
        letters = await queue.dead_letters.peek()
        pages = [(await client.get("/")).text, (await client.get("/queue", params={"name": HOSTILE})).text]
        for letter in letters:
            found = {"queue": HOSTILE, "sequence": letter.sequence, "dead": 1}
            pages.append((await client.get("/message", params=found)).text)
        async with backend.election(HOSTILE, label=HOSTILE, metadata={HOSTILE: HOSTILE}).campaign():
            pages.append((await client.get("/election", params={"name": HOSTILE})).text)
        async with sharing_in(backend, HOSTILE, [HOSTILE.replace(".", "_")], [HOSTILE]):
            await until(partial(_has_group, client))
            pages += [(await client.get(path, params={"name": HOSTILE})).text for path in ("/", "/partitions")]
        pages.append((await client.get("/queue", params={"name": f"{HOSTILE}?"})).text)
        form = {"queue": HOSTILE, "reason": HOSTILE}
        pages.append((await client.post("/do/purge", data=form, headers=SAME)).text)
    assert len(pages) >= 7
    for page in pages:
        assert "window.hacked" in page or "There is no" in page
        Markup().feed(page)


async def _has_group(client: Any) -> bool:
    return "There is no" not in (await client.get("/partitions", params={"name": HOSTILE})).text


async def test_text_that_can_not_be_encoded_is_shown_nevertheless() -> None:
    async with asked(show_bodies=True) as (backend, client):
        await backend.queue("orders").send(b'{"half": "\\ud800"}')
        [message] = await backend.queue("orders").peek()
        page = await client.get("/queue", params={"name": "orders"})
        whole = await client.get("/message", params={"queue": "orders", "sequence": message.sequence})
    for answer in (page, whole):
        assert answer.status_code == 200
        assert "\\ud800" in answer.text


async def test_a_long_body_is_text_in_a_list_wherever_it_is_cut() -> None:
    async with asked(show_bodies=True) as (backend, client):
        for first in (b"", b"x"):
            await backend.queue("orders").send(first + "é".encode() * 300)
        page = (await client.get("/queue", params={"name": "orders"})).text
    assert page.count("éééééééééé") >= 2
    assert "c3 a9" not in page


# --- what is refused ---


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/queue", 400),
        ("/queue?name=nothing", 404),
        ("/queue?name=%00", 400),
        ("/message?queue=orders", 400),
        ("/message?queue=orders&sequence=x", 400),
        ("/message?queue=orders&sequence=-1", 400),
        ("/message?queue=orders&sequence=99999999999999999999", 400),
        ("/message?queue=orders&sequence=999", 404),
        ("/election?name=nobody", 404),
        ("/partitions", 400),
        ("/partitions?name=nobody", 404),
        ("/nothing", 404),
        ("/static/../app.py", 404),
    ],
)
async def test_a_wrong_address_is_explained(path: str, code: int) -> None:
    async with asked() as (backend, client):
        await with_dead(backend)
        answer = await client.get(path)
    assert answer.status_code == code
    assert "Traceback" not in answer.text


async def test_a_read_only_dashboard_changes_nothing() -> None:
    async with asked() as (backend, client):
        await with_dead(backend)
        before = await backend.queue("orders").stats()
        routes = dashboard.app(backend)._inner.routes  # type: ignore[attr-defined]
        refused = [one.path for one in routes if "POST" in (getattr(one, "methods", None) or ())]
        refused.remove("/login")
        assert {f"/do/{action}" for action in ("redrive", "purge", "resign", "pause", "pause-queue")} <= set(refused)
        form = {"queue": "orders", "name": "orders", "confirmed": "yes", "typed": "orders"}
        for path in refused:
            answer = await client.post(path, data=form, headers=SAME)
            assert (path, answer.status_code) == (path, 403)
            assert "--allow-changes" in answer.text
        assert await backend.queue("orders").stats() == before


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 303),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Origin": "http://localhost"}, 303),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({}, 403),
    ],
)
async def test_a_change_must_come_from_a_page_of_ours(headers: dict[str, str], code: int) -> None:
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend)
        form = {"queue": "orders", "confirmed": "yes"}
        answer = await client.post("/do/redrive", data=form, headers=headers)
        assert (await backend.queue("orders").stats()).dead == (0 if code == 303 else 2)
    assert answer.status_code == code


async def test_a_change_is_never_made_by_get() -> None:
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend)
        answer = await client.get("/do/redrive?queue=orders&confirmed=yes", headers=SAME)
        assert (await backend.queue("orders").stats()).dead == 2
    assert answer.status_code == 405


async def test_a_form_that_is_too_large_is_refused() -> None:
    async with asked(allow_changes=True) as (_, client):
        answer = await client.post("/do/redrive", data={"queue": "q" * 20_000}, headers=SAME)
    assert answer.status_code == 413


async def test_a_form_that_ends_in_the_middle_is_no_fault_of_ours() -> None:
    headers = [(b"host", b"localhost"), (b"sec-fetch-site", b"same-origin")]
    scope = {"type": "http", "method": "POST", "path": "/do/redrive", "query_string": b"", "headers": headers}
    received = iter([{"type": "http.request", "body": b"queue=or", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    async with tenure.connect("memory:") as backend:
        await dashboard.app(backend, allow_changes=True)(scope, receive, send)
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_gets_no_stream(site: str) -> None:
    async with asked() as (_, client):
        answer = await client.get("/events", headers={"Sec-Fetch-Site": site})
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
async def test_an_unknown_host_is_refused(host: str) -> None:
    async with asked(hosts=["localhost", "::1", "Shop.Example", ""]) as (_, client):
        answer = await client.get("/", headers={"Host": host})
        assert answer.status_code == 421
        assert "evil" not in answer.text
        for known in ("localhost", "localhost:8160", "LOCALHOST", "[::1]:8160", "shop.example:443"):
            assert (await client.get("/", headers={"Host": known})).status_code == 200


async def test_without_the_token_nothing_is_shown() -> None:
    async with asked(token="open sesame") as (backend, client):
        await with_dead(backend)
        for path in ("/", "/queue?name=orders", "/events", "/election?name=x"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        for header in ("Bearer wrong", "Basic open sesame"):
            answer = await client.get("/", headers={"Authorization": header})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        client.cookies.set("tenure_dashboard", "open sesame")
        assert (await client.get("/")).status_code == 303
        client.cookies.clear()
        assert (await client.get("/", headers={"Authorization": "Bearer open sesame"})).status_code == 200
        assert (await client.get("/login")).status_code == 200


async def test_a_page_for_those_without_the_token_tells_nothing_of_the_store(tmp_path: Path) -> None:
    async with asked(f"sqlite:///{tmp_path / 'payroll.db'}", token="open sesame") as (_, client):
        pages = [(await client.get("/login")).text]
        pages.append((await client.post("/login", data={"token": "x"}, headers=SAME)).text)
        pages.append((await client.post("/login", data={"token": "x"})).text)
        await client.post("/login", data={"token": "open sesame"}, headers=SAME)
        assert "payroll" in (await client.get("/")).text
    for page in pages:
        assert "payroll" not in page


@pytest.mark.parametrize("token", ["café ☕", "caf\udce9"])
async def test_a_token_may_have_any_letters(token: str) -> None:
    content = token.encode(errors="surrogateescape")
    async with asked(token=token) as (_, client):
        bearer = [(b"Authorization", b"Bearer " + content)]
        assert (await client.get("/", headers=bearer)).status_code == 200
        assert (await client.get("/", headers=[(b"Authorization", b"Bearer caf\xff")])).status_code == 401
        assert (await client.get("/", headers=[(b"Cookie", b"tenure_dashboard=caf\xe9")])).status_code == 303


async def test_a_token_from_a_file_may_end_with_a_newline() -> None:
    async with asked(token="open sesame\n") as (_, client):
        assert (await client.get("/", headers={"Authorization": "Bearer open sesame"})).status_code == 200
        assert (await client.post("/login", data={"token": "open sesame"}, headers=SAME)).status_code == 303


async def test_the_token_is_asked_for_once() -> None:
    async with asked(token="open sesame") as (_, client):
        wrong = await client.post("/login", data={"token": "open says me"}, headers=SAME)
        assert wrong.status_code == 403
        assert "not the token" in wrong.text
        assert (await client.post("/login", data={"token": "open sesame"}, headers={})).status_code == 403
        right = await client.post("/login", data={"token": "open sesame"}, headers=SAME)
        cookie = right.headers["set-cookie"]
        assert right.status_code == 303
        assert "open sesame" not in cookie
        for part in ("HttpOnly", "SameSite=strict", "Path=/"):
            assert part in cookie
        assert (await client.get("/")).status_code == 200


async def test_every_answer_has_the_headers_of_safety() -> None:
    async with asked(hosts=["localhost"]) as (_, client):
        for path in ("/", "/nothing", "/queue", "/static/style.css", "/static/live.js"):
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
        page = (await client.get("/")).text
    assert "style=" not in page  # the policy allows none
    assert re.search(r"<script(?![^>]*src=)", page) is None
    assert "http" not in re.sub(r"http-equiv", "", page)  # works offline


class Outline(HTMLParser):
    """Collects what assistive technology needs of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.ticking: list[str] = []
        self.titles: list[dict[str, str | None]] = []
        self.labels: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)
        if given.get("id") == "state" and ("role" in given or "aria-live" in given):
            self.ticking.append(tag)
        if tag == "th":
            self.titles.append(given)
        if tag == "button" and "aria-label" in given:
            self.labels.append(given["aria-label"])


async def test_pages_have_headings_titles_and_names_that_can_be_read_aloud() -> None:
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend)
        running = asyncio.create_task(backend.schedule("tidy", 60, queue="tidy").run())
        await until(backend.schedules)
        outlines = []
        for path in ("/", "/queue?name=orders", "/nothing?", "/queue?name=none"):
            outline = Outline()
            outline.feed((await client.get(path)).text)
            outlines.append(outline)
        running.cancel()
    for outline in outlines:
        assert outline.headings[:1] in (["h1"], [])
        assert outline.headings.count("h1") <= 1
        assert outline.ticking == []  # a time that changes every 2 s must not be read aloud
        assert all(title.get("scope") == "col" for title in outline.titles)
    assert outlines[0].headings[0] == "h1"
    assert outlines[0].titles
    assert outlines[0].labels == ["Pause tidy"]


async def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shows a tenure\.Backend, not 'sqlite"):
        dashboard.app("sqlite:///work.db")  # type: ignore[arg-type]


async def test_options_that_would_let_in_all_or_none_are_refused() -> None:
    async with tenure.connect("memory:") as backend:
        for token in ("", " \n"):
            with pytest.raises(ConfigError, match="the token is blank"):
                dashboard.app(backend, token=token)
        with pytest.raises(ConfigError, match=r"write hosts=\['shop.example'\]"):
            dashboard.app(backend, hosts="shop.example")


# --- actions ---


async def test_dead_letters_are_put_back_after_a_question() -> None:
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend, count=3)
        question = await client.post("/do/redrive", data={"queue": "orders"}, headers=SAME)
        assert "3 dead letters of &#39;orders&#39; will be put back" in question.text
        assert (await backend.queue("orders").stats()).dead == 3
        done = await client.post("/do/redrive", data={"queue": "orders", "confirmed": "yes"}, headers=SAME)
        assert (await backend.queue("orders").stats()).ready == 3
        page = await client.get(done.headers["location"])
        assert "3 dead letters put back" in page.text
        again = await client.get(done.headers["location"])
        assert "put back" not in again.text


async def test_one_dead_letter_or_one_reason_is_put_back() -> None:
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend, reason="bad")
        await with_dead(backend, "orders", 1, reason="late")
        letters = await backend.queue("orders").dead_letters.peek()
        form = {"queue": "orders", "confirmed": "yes", "sequence": str(letters[0].sequence)}
        await client.post("/do/redrive", data=form, headers=SAME)
        assert (await backend.queue("orders").stats()).dead == 2
        form = {"queue": "orders", "confirmed": "yes", "reason": "late"}
        await client.post("/do/redrive", data=form, headers=SAME)
        assert [one.reason for one in await backend.queue("orders").dead_letters.peek()] == ["bad"]


async def test_a_reason_of_several_lines_survives_the_form() -> None:
    reason = "no such file:\nbill 50%25.pdf"
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend, reason=reason)
        await with_dead(backend, reason="late")
        page = (await client.get("/queue", params={"name": "orders", "reason": reason})).text
        [given, *_] = re.findall(r'name="reason" value="([^"]*)"', page)
        assert "\n" not in given  # browsers send "\\r\\n" instead
        question = await client.post("/do/redrive", data={"queue": "orders", "reason": given}, headers=SAME)
        [again] = re.findall(r'name="reason" value="([^"]*)"', question.text)
        form = {"queue": "orders", "reason": again, "confirmed": "yes"}
        await client.post("/do/redrive", data=form, headers=SAME)
        assert {one.reason for one in await backend.queue("orders").dead_letters.peek()} == {"late"}


async def test_a_removal_wants_the_name_of_the_queue() -> None:
    async with asked(allow_changes=True) as (backend, client):
        await with_dead(backend)
        for typed in ("", "order", "ORDERS"):
            form = {"queue": "orders", "confirmed": "yes", "typed": typed}
            answer = await client.post("/do/purge", data=form, headers=SAME)
            assert "will be removed for good" in answer.text
            assert (await backend.queue("orders").stats()).dead == 2
        form = {"queue": "orders", "confirmed": "yes", "typed": "orders"}
        await client.post("/do/purge", data=form, headers=SAME)
        assert await backend.queue("orders").stats() == tenure.Stats()


async def test_a_leader_is_asked_to_step_down(caplog: pytest.LogCaptureFixture) -> None:
    async with asked(allow_changes=True) as (backend, client):
        with pytest.raises(tenure.TermLost):
            async with backend.election("chair").campaign() as term:
                question = await client.post("/do/resign", data={"name": "chair"}, headers=SAME)
                assert "will be asked to step down" in question.text
                assert term.remaining() > 0
                await client.post("/do/resign", data={"name": "chair", "confirmed": "yes"}, headers=SAME)
                await asyncio.sleep(60)
    assert "the leader was asked to step down" in caplog.text


async def test_a_schedule_is_paused_and_resumed() -> None:
    async with asked(allow_changes=True) as (backend, client):
        running = asyncio.create_task(backend.schedule("tidy", 60, queue="tidy").run())
        await until(backend.schedules)
        form = {"queue": "tidy", "name": "tidy"}
        done = await client.post("/do/pause", data=form, headers=SAME)
        assert done.status_code == 303
        assert (await backend.schedules())[0].paused
        await client.post("/do/resume", data=form, headers=SAME)
        assert not (await backend.schedules())[0].paused
        wrong = await client.post("/do/pause", data={"queue": "tidy", "name": "tidi"}, headers=SAME)
        assert wrong.status_code == 400
        assert "did you mean" in wrong.text
        running.cancel()


async def test_a_queue_is_paused_and_resumed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asked(allow_changes=True) as (backend, client):
        queue = backend.queue("orders")
        await queue.send(b"x")
        page = await client.get("/queue?name=orders")
        assert "Pause…" in page.text
        assert "no limit" in page.text
        question = await client.post("/do/pause-queue", data={"queue": "orders"}, headers=SAME)
        assert "No consumer on any machine will receive messages of &#39;orders&#39;" in question.text
        assert "1 ready" in question.text
        assert not (await queue.settings()).paused
        form = {"queue": "orders", "confirmed": "yes"}
        done = await client.post("/do/pause-queue", data=form, headers=SAME)
        assert done.headers["location"].startswith("/queue?name=orders&note=")
        assert "the queue is paused" in caplog.text
        assert (await queue.settings()).paused
        page = await client.get("/queue?name=orders")
        assert "Paused: no consumer receives its messages" in page.text
        assert "Resume" in page.text
        monkeypatch.setattr("tenure._dashboard.sampler.FRESH", -1.0)  # look anew
        assert ">paused</span>" in (await client.get("/")).text
        assert (await client.post("/do/resume-queue", data={"queue": "orders"}, headers=SAME)).status_code == 303
        assert not (await queue.settings()).paused
        await queue.declare(max_locked=5, rate=(100, 60))
        page = await client.get("/queue?name=orders")
        assert "100 in 60 s" in page.text


@pytest.mark.parametrize("path", ["/do/pause-queue", "/do/resume-queue"])
async def test_a_pause_is_refused_that_can_not_be_meant(path: str) -> None:
    form = {"queue": "orders", "confirmed": "yes"}
    async with asked(allow_changes=True) as (backend, client):
        unknown = await client.post(path, data=form, headers=SAME)
        assert unknown.status_code == 404
        assert (await client.post(path, data={}, headers=SAME)).status_code == 404
        assert await backend.queues() == []
        await backend.queue("orders").send(b"x")
        elsewhere = await client.post(path, data=form, headers={"Sec-Fetch-Site": "cross-site"})
        assert elsewhere.status_code == 403
        assert (await client.get(path)).status_code == 405
        assert not (await backend.queue("orders").settings()).paused
    async with asked() as (backend, client):
        await backend.queue("orders").send(b"x")
        assert (await client.post(path, data=form, headers=SAME)).status_code == 403
        assert "Pause" not in (await client.get("/queue?name=orders")).text
        assert not (await backend.queue("orders").settings()).paused


# --- faults ---


async def test_a_store_that_is_silent_is_shown_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asked() as (backend, client):
        await with_dead(backend)
        assert "orders" in (await client.get("/")).text

        async def silent(self: object) -> list[str]:
            raise Unavailable("no route to the store")

        monkeypatch.setattr(tenure.Backend, "queues", silent)
        await asyncio.sleep(0)
        monkeypatch.setattr("tenure._dashboard.sampler.FRESH", -1.0)
        page = (await client.get("/")).text
        assert "The store does not answer: no route to the store" in page
        assert "orders" in page  # what was known last


async def test_a_look_that_takes_long_blocks_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure._dashboard.sampler.FRESH", -1.0)
    async with asked() as (backend, client):
        await with_dead(backend)
        await client.get("/")
        begun, answered = asyncio.Event(), asyncio.Event()
        leaders = tenure.Backend.leaders

        async def slow(self: tenure.Backend) -> Any:
            begun.set()
            await answered.wait()
            return await leaders(self)

        monkeypatch.setattr(tenure.Backend, "leaders", slow)
        first = asyncio.create_task(client.get("/"))
        await begun.wait()
        for path in ("/", "/queue?name=orders"):
            assert "orders" in (await asyncio.wait_for(client.get(path), 5)).text
        monkeypatch.setattr("tenure._dashboard.sampler.KNOWN", 0.0)
        second = asyncio.create_task(client.get("/"))  # what is known is too old: it waits
        await asyncio.sleep(1)
        assert not first.done()
        assert not second.done()
        answered.set()
        assert {(await first).status_code, (await second).status_code} == {200}


async def test_old_numbers_have_the_time_of_their_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asked() as (_, client):
        await client.get("/")
        monkeypatch.setattr("tenure._dashboard.sampler.FRESH", -1.0)
        monkeypatch.setattr("tenure._dashboard.sampler.time.time", lambda: 1e9)
        assert "2001-09-09 01:46:40Z" in (await client.get("/")).text

        async def silent(self: object) -> list[str]:
            raise Unavailable("no route to the store")

        monkeypatch.setattr(tenure.Backend, "queues", silent)
        monkeypatch.setattr("tenure._dashboard.app.time.time", lambda: 2e9)
        page = (await client.get("/")).text
    assert "no route to the store" in page
    assert "2001-09-09 01:46:40Z" in page


async def test_the_stream_tells_of_each_look_and_looking_ends_with_the_last_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenure._dashboard.sampler.EVERY", 0.01)
    async with tenure.connect("memory:") as backend:
        sampler = Sampler(backend)
        streams = [sampler.listen() for _ in range(3)]
        for stream in streams:
            assert await anext(stream) == "retry: 3000\n\n"
        events = await asyncio.gather(*(anext(stream) for stream in streams))
        assert all(event.startswith("event: look\ndata: ") for event in events)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        assert sampler._task is not None
        await until(sampler._task.done)
        await sampler.close()


async def test_it_works_below_a_path_of_another_application() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with tenure.connect("memory:") as backend:
        await with_dead(backend)
        app = Starlette(routes=[Mount("/ops/tenure", dashboard.app(backend, allow_changes=True))])
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
            page = (await client.get("/ops/tenure/")).text
            links = set(re.findall(r'(?:href|src|action|data-events)="([^"#]*)"', page))
            assert links
            assert all(link.startswith("/ops/tenure/") for link in links), links
            for link in sorted(links - {"/ops/tenure/events"}):
                assert (await client.get(link.replace("&amp;", "&"))).status_code == 200
            form = {"queue": "orders", "confirmed": "yes"}
            done = await client.post("/ops/tenure/do/redrive", data=form, headers=SAME)
            assert done.headers["location"].startswith("/ops/tenure/queue?name=orders")


# --- bodies ---


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (b'{"a": 1}', "JSON", '{\n  "a": 1\n}'),
        (b"{not json", "text", "{not json"),
        ("zwei Kessel ☕".encode(), "text", "zwei Kessel ☕"),
        (b"", "text", ""),
        (b"\x00\x01", "binary", f"000000  {'00 01':<47}  .."),
        (b"\xff", "binary", f"000000  {'ff':<47}  ."),
        (b"[1e400]", "text", "[1e400]"),
        (b"[NaN]", "text", "[NaN]"),
        (b"[" + b"9" * 5_000 + b"]", "text", f"[{'9' * 5_000}]"),
        (b'{"a":' * 5_000, "text", '{"a":' * 5_000),
        (b"[" * 100_000, "text", None),
        (b"x" * 100_000, "text", None),
        (b"\xff" * 100_000, "binary", None),
    ],
)
async def test_the_type_of_a_body_is_guessed(content: bytes, kind: str, text: str | None) -> None:
    found = shown.body(content)
    assert found[0] == kind
    if text is None:
        assert len(found[1]) < shown.BODY_MAX + 100
        assert "bytes more" in found[1]
    else:
        assert found[1] == text


@pytest.mark.parametrize("first", ["[", '["' + "]" * 999 + '\\"", ['])
async def test_json_that_is_nested_deep_is_not_made_larger(first: str) -> None:
    content = first + "[" * 899 + "1," * 30_000 + "1" + "]" * (899 + first.count("[", 0, 1) + first.count(", ["))
    json.loads(content)
    assert shown.body(content.encode()) == ("text", content)


async def test_a_graph_fits_its_box() -> None:
    for values in ([], [0], [5], [0, 10, 5], list(range(300))):
        points = [tuple(map(float, point.split(","))) for point in shown.polyline(values).split()]
        assert len(points) == len(values)
        assert all(0 <= x <= 120 and 0 <= y <= 24 for x, y in points)

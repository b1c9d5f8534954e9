"""The pages, as an ASGI application."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from jinja2 import Environment, PackageLoader, select_autoescape
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenure import Backend, DeadMessage, LiveMessage, PartitionGroup, Queue, ScheduleStatus, Stats
from tenure._dashboard import shown
from tenure._dashboard.guard import COOKIE, HEADERS, Guard
from tenure._dashboard.sampler import Sampler
from tenure._overview import in_ranges, other_owners, state_of
from tenure.errors import ConfigError, TenureError

SHOWN_MAX = 50
"""How many messages, and dead letters, one page has."""

OWNERS_MAX = 500
"""How many partitions with their owners one page has: it is loaded again every two seconds."""

REASONS_FROM = 500
"""From how many dead letters the reasons are collected."""

NOTES_MAX = 100

FORM_MAX = 16 * 1024
"""Bytes of a form, at most."""

STATES = ("all", "ready", "locked", "delayed", "deferred")

LATE = 5.0
"""Seconds after which a slot that was not sent counts as late here."""

_log = logging.getLogger("tenure")
_FOLDER = Path(__file__).resolve().parent


class Problem(Exception):  # shown as a page
    """A request that can't be answered."""

    def __init__(self, code: int, title: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.title = title


class Dashboard:
    """The pages of one store.

    Args:
        backend: The store, open while the application runs.
        guard: Decides whether a request is answered.
        may_change: Whether there are actions.
        show_bodies: Whether bodies and tracebacks are shown.
    """

    def __init__(self, backend: Backend, guard: Guard, *, may_change: bool, show_bodies: bool) -> None:
        self._backend = backend
        self._guard = guard
        self._may_change = may_change
        self._show_bodies = show_bodies
        self._sampler = Sampler(backend)
        self._notes: dict[str, str] = {}  # the result of an action, shown once on the page after it
        self._pages = Environment(
            loader=PackageLoader("tenure._dashboard", "pages"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def application(self) -> ASGIApp:
        """Return the application."""
        page, action = self._page, self._action
        routes = [
            Route("/", page(self._overview)),
            Route("/queue", page(self._queue)),
            Route("/message", page(self._message)),
            Route("/election", page(self._election)),
            Route("/partitions", page(self._partitions)),
            Route("/events", page(self._events)),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/do/redrive", action(self._redrive), methods=["POST"]),
            Route("/do/purge", action(self._purge), methods=["POST"]),
            Route("/do/resign", action(self._resign), methods=["POST"]),
            Route("/do/pause-queue", action(self._pause_queue), methods=["POST"]),
            Route("/do/resume-queue", action(self._resume_queue), methods=["POST"]),
            Route("/do/pause", action(self._pause), methods=["POST"]),
            Route("/do/resume", action(self._resume), methods=["POST"]),
            Mount("/static", StaticFiles(directory=_FOLDER / "static")),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await self._sampler.close()

        return _Guarded(Starlette(routes=routes, lifespan=lifespan), self._guard)

    # --- how requests are answered ---

    def _page(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if not self._guard.has_token(request):
                if "authorization" in request.headers:  # a script: a page to log in would look like an answer to it
                    return PlainTextResponse("wrong token\n", 401, {"WWW-Authenticate": "Bearer"})
                return RedirectResponse(f"{_root(request)}/login", 303)
            return await self._answered(request, answer)

        return handle

    def _action(
        self, act: Callable[[Request, Mapping[str, str]], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not self._may_change:
                raise Problem(403, "Read-only", "This dashboard changes nothing; start it with --allow-changes.")
            return await act(request, await self._form(request))

        return self._page(answer)

    async def _answered(self, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            return await answer(request)
        except Problem as problem:
            return self._render(request, "problem.html", problem.code, title=problem.title, text=str(problem))
        except ConfigError as error:
            return self._render(request, "problem.html", 400, title="This can't be done", text=str(error))
        except TenureError as error:
            return self._render(request, "problem.html", 503, title="The store does not answer", text=str(error))

    async def _form(self, request: Request) -> Mapping[str, str]:
        """Return the fields of a form that one of our pages has sent."""
        if not self._guard.is_from_here(request):
            raise Problem(403, "Refused", "This request does not come from a page of this dashboard.")
        content = b""
        try:
            async for part in request.stream():
                content += part
                if len(content) > FORM_MAX:
                    raise Problem(413, "Refused", "The form is too large.")
        except ClientDisconnect:  # nobody reads the answer; without it, the log would have a traceback
            raise Problem(400, "Refused", "The form is not complete.") from None
        fields = parse_qs(content.decode(errors="replace"), keep_blank_values=True)
        return {name: values[-1] for name, values in fields.items()}

    def _render(self, request: Request, page: str, code: int = 200, **values: Any) -> Response:
        common = {
            "root": _root(request),
            "now": shown.moment(time.time()),
            "may_change": self._may_change,
            "show_bodies": self._show_bodies,
            "live": False,
        }
        if self._guard.has_token(request):
            common |= {
                "store": str(self._backend.url),
                "trouble": self._sampler.trouble,
                "said": self._notes.pop(request.query_params.get("note", ""), ""),
            }
        text = self._pages.get_template(page).render({**common, **values})
        return HTMLResponse(text.encode(errors="backslashreplace"), code)  # JSON may have half a surrogate pair

    async def _login(self, request: Request) -> Response:
        if not self._guard.needs_token:
            return RedirectResponse(f"{_root(request)}/", 303)
        wrong = False
        if request.method == "POST":
            try:
                given = (await self._form(request)).get("token", "")
            except Problem as problem:
                return self._render(request, "problem.html", problem.code, title=problem.title, text=str(problem))
            if self._guard.is_token(given):
                response: Response = RedirectResponse(f"{_root(request)}/", 303)
                secure = request.url.scheme == "https"
                response.set_cookie(
                    COOKIE,
                    self._guard.cookie(),
                    httponly=True,
                    samesite="strict",
                    secure=secure,
                    path=_root(request) or "/",
                )
                return response
            wrong = True
            _log.warning("the dashboard was asked with a wrong token, by %s", _asker(request))
        return self._render(request, "login.html", 403 if wrong else 200, wrong=wrong)

    async def _events(self, request: Request) -> Response:
        if self._guard.is_from_elsewhere(request):  # a stream keeps the store being asked
            raise Problem(403, "Refused", "This request does not come from a page of this dashboard.")
        return StreamingResponse(self._sampler.listen(), media_type="text/event-stream")

    # --- pages ---

    async def _overview(self, request: Request) -> Response:
        found = await self._sampler.recent()
        history, now, wall = self._sampler.history, time.monotonic(), time.time()
        leaders = queues = None
        schedules: list[dict[str, Any]] = []
        if found is not None and found.elections is not None:
            leaders = [
                {
                    "name": name,
                    "leader": leader,
                    "holder": shown.holder(leader.holder) if leader else "",
                    "left": shown.duration(leader.remaining) if leader else "",
                    "since": shown.duration(history.led_for(name, now)),
                }
                for name, leader in sorted(found.elections.items())
            ]
        if found is not None and found.queues is not None:
            queues = [
                {
                    "name": name,
                    "stats": stats,
                    "oldest": shown.duration(stats.oldest_age) if stats.ready else "",
                    "change": _signed(history.change(name)),
                    "points": shown.polyline(history.backlogs(name)),
                }
                for name, stats in sorted(found.queues.items())
            ]
            schedules = [_schedule(one, wall) for one in found.schedules]
        return self._render(
            request,
            "overview.html",
            now=shown.moment(self._sampler.answered_at),
            leaders=leaders,
            groups=[] if found is None else [_group(one) for one in found.groups],
            queues=queues,
            schedules=schedules,
            unreadable={} if found is None else found.unreadable,
            live=True,
        )

    async def _queue(self, request: Request) -> Response:
        name = _wanted(request, "name")
        queue = self._backend.queue(name)
        stats = await queue.stats()
        overview = await self._sampler.recent()
        if stats == Stats() and (overview is None or name not in (overview.queues or {})):
            raise Problem(404, "There is no such queue", f"No queue {name!r} was ever used on this store.")
        state = request.query_params.get("state", "all")
        messages: list[LiveMessage] = []
        trouble = ""
        try:
            if state not in STATES:
                raise Problem(400, "Wrong state", f"{state!r} is none of {', '.join(STATES)}.")
            chosen: dict[str, Any] = {} if state == "all" else {"states": [state]}
            messages = await queue.peek(SHOWN_MAX + 1, **chosen)
        except ConfigError as error:  # some stores show only some of them
            trouble = str(error)
        reason = request.query_params.get("reason", "")
        letters = await queue.dead_letters.peek(SHOWN_MAX + 1, reason=reason or None)
        if reason or len(letters) > SHOWN_MAX:
            reasons = {one.reason for one in await queue.dead_letters.peek(REASONS_FROM)}
        else:  # these are all; a look at more is dear, as they come with their bodies
            reasons = {one.reason for one in letters}
        settings = dataclasses.asdict(await queue.settings())
        history = self._sampler.history
        return self._render(
            request,
            "queue.html",
            name=name,
            stats=stats,
            oldest=shown.duration(stats.oldest_age) if stats.ready else "",
            points=shown.polyline(history.backlogs(name)),
            settings=[(key.replace("_", " "), _setting(key, value)) for key, value in settings.items()],
            pauses=queue.traits.limits != "impossible",
            tells_holder=queue.traits.tells_holder,
            states=STATES,
            state=state,
            messages=[self._of_message(one) for one in messages[:SHOWN_MAX]],
            more=len(messages) > SHOWN_MAX,
            live_trouble=trouble,
            reasons=sorted(reasons) if len(reasons) > 1 or reason else [],
            reason=reason,
            letters=[_of_letter(one) for one in letters[:SHOWN_MAX]],
            more_letters=len(letters) > SHOWN_MAX,
            live=True,
        )

    def _of_message(self, one: LiveMessage) -> dict[str, Any]:
        until = one.locked_until if one.locked_until is not None else one.due_at
        short = ""
        if self._show_bodies:
            text = " ".join(shown.body(one.body, 400)[1].split())
            short = text if len(text) <= 80 else f"{text[:79]}…"
        return {
            "message": one,
            "sent": shown.moment(one.enqueued_at),
            "until": shown.moment(until),
            "held": "" if one.locked_since is None else shown.duration(max(0.0, time.time() - one.locked_since)),
            "short": short,
        }

    async def _message(self, request: Request) -> Response:
        name, sequence = _wanted(request, "queue"), _number(_wanted(request, "sequence"))
        is_dead = request.query_params.get("dead") == "1"
        queue = self._backend.queue(name)
        found: list[LiveMessage] | list[DeadMessage]
        if is_dead:
            found = await queue.dead_letters.peek(1, sequences=[sequence])
        else:
            found = await queue.peek(1, sequences=[sequence])
        if not found:
            raise Problem(404, "It is gone", f"The queue {name!r} has no such message {sequence}, or not any more.")
        [message] = found
        kind, text = shown.body(message.body) if self._show_bodies else ("", "")
        history = message.history if isinstance(message, DeadMessage) else ()
        return self._render(
            request,
            "message.html",
            queue=name,
            sequence=sequence,
            is_dead=is_dead,
            fields=_fields(message),
            headers=sorted(message.headers.items()),
            kind=kind,
            size=f"{len(message.body):,}",
            body=text,
            history=[
                {
                    "number": one.number,
                    "outcome": one.outcome,
                    "at": shown.moment(one.at),
                    "error": f"{one.error.type}: {one.error.message}" if one.error else "",
                    "traceback": one.error.traceback if one.error else "",
                }
                for one in history
            ],
        )

    async def _election(self, request: Request) -> Response:
        name = _wanted(request, "name")
        found = await self._sampler.recent()
        leaders = {} if found is None or found.leaders is None else found.leaders
        if name not in leaders:
            raise Problem(404, "There is no such election", f"The name {name!r} was never led on this store.")
        leader = leaders[name]
        terms = [
            {
                "token": one.token,
                "holder": shown.holder(one.holder),
                "began": shown.moment(one.began),
                "ended": shown.moment(one.ended),
                "lasted": shown.duration((one.ended or time.time()) - one.began),
            }
            for one in reversed(self._sampler.terms.get(name, []))
        ]
        return self._render(
            request,
            "election.html",
            now=shown.moment(self._sampler.answered_at),
            name=name,
            leader=leader,
            left="" if leader is None else shown.duration(leader.remaining),
            metadata=sorted(leader.metadata.items()) if leader else [],
            terms=terms,
            live=True,
        )

    async def _partitions(self, request: Request) -> Response:
        name = _wanted(request, "name")
        found = await self._sampler.recent()
        group = next((one for one in found.groups if one.name == name), None) if found is not None else None
        if group is None:
            raise Problem(404, "There is no such group", f"No group {name!r} has shared partitions on this store.")
        return self._render(
            request,
            "partitions.html",
            now=shown.moment(self._sampler.answered_at),
            **_group(group),
            rows=[
                {
                    "identity": shown.identity(one.identity),
                    "weight": one.weight,
                    "owned": len(one.owned),
                    "share": one.share,
                    "partitions": in_ranges(one.owned),
                    "metadata": sorted(one.metadata.items()),
                }
                for one in group.members
            ],
            others=[
                {"identity": shown.identity(identity), "owned": len(some), "partitions": in_ranges(some)}
                for identity, some in other_owners(group).items()
            ],
            owners=[
                {
                    "partition": partition,
                    "lease": f"{name}.{partition}",
                    "holder": shown.identity(owner.holder.rpartition("-")[0]) if owner else "",
                    "owner": owner,
                    "left": shown.duration(owner.remaining) if owner else "",
                }
                for partition, owner in islice(group.owners.items(), OWNERS_MAX)
            ],
            more=max(0, len(group.owners) - OWNERS_MAX),
            live=True,
        )

    # --- actions ---

    async def _redrive(self, request: Request, form: Mapping[str, str]) -> Response:
        name, chosen = form.get("queue", ""), _chosen(form)
        letters = self._backend.queue(name).dead_letters
        if form.get("confirmed") != "yes":
            count = await letters.redrive(dry_run=True, **chosen)
            text = f"{_letters(count)} of {name!r} will be put back into the queue, and delivered anew."
            return self._confirm(request, "redrive", form, "Put back dead letters", text, "Put back")
        count = await letters.redrive(**chosen)
        return self._done(request, _page_of(name), f"{_letters(count)} put back", form)

    async def _purge(self, request: Request, form: Mapping[str, str]) -> Response:
        name, chosen = form.get("queue", ""), _chosen(form)
        letters = self._backend.queue(name).dead_letters
        if form.get("confirmed") != "yes" or form.get("typed") != name:
            count = await letters.redrive(dry_run=True, **chosen)
            text = f"{_letters(count)} of {name!r} will be removed for good."
            return self._confirm(request, "purge", form, "Remove dead letters", text, "Remove", typed=name)
        count = await letters.purge(**chosen)
        return self._done(request, _page_of(name), f"{_letters(count)} removed", form)

    async def _resign(self, request: Request, form: Mapping[str, str]) -> Response:
        name = form.get("name", "")
        if form.get("confirmed") != "yes":
            text = f"The present leader of {name!r} will be asked to step down; another instance can lead then."
            return self._confirm(request, "resign", form, "Ask to step down", text, "Ask")
        asked = await self._backend.election(name).ask_to_resign()
        said = "the leader was asked to step down" if asked else "there is no leader that could be asked"
        return self._done(request, f"/election?name={quote(name, safe='')}", said, form)

    async def _pause_queue(self, request: Request, form: Mapping[str, str]) -> Response:
        queue = await self._known_queue(form)
        if form.get("confirmed") != "yes":
            text = (
                f"No consumer on any machine will receive messages of {queue.name!r} until it is resumed. Those that "
                f"were received go on. The queue holds {await queue.stats()}."
            )
            return self._confirm(request, "pause-queue", form, "Pause the queue", text, "Pause")
        await queue.declare(paused=True)
        return self._done(request, _page_of(queue.name), "the queue is paused, for all consumers", form)

    async def _resume_queue(self, request: Request, form: Mapping[str, str]) -> Response:
        queue = await self._known_queue(form)
        await queue.declare(paused=False)
        return self._done(request, _page_of(queue.name), "the queue goes on", form)

    async def _known_queue(self, form: Mapping[str, str]) -> Queue:
        """Return the queue of *form*; a declaration would make one that doesn't exist."""
        name = form.get("queue", "")
        if name not in await self._backend.queues():
            raise Problem(404, "There is no such queue", f"No queue {name!r} was ever used on this store.")
        return self._backend.queue(name)

    async def _pause(self, request: Request, form: Mapping[str, str]) -> Response:
        await self._backend.queue(form.get("queue", "")).schedules.pause(form.get("name", ""))
        return self._done(request, "/", "the schedule is paused, in all processes", form)

    async def _resume(self, request: Request, form: Mapping[str, str]) -> Response:
        await self._backend.queue(form.get("queue", "")).schedules.resume(form.get("name", ""))
        return self._done(request, "/", "the schedule goes on with its next time", form)

    def _confirm(
        self,
        request: Request,
        action: str,
        form: Mapping[str, str],
        title: str,
        text: str,
        button: str,
        typed: str = "",
    ) -> Response:
        given = [(key, value) for key, value in form.items() if key not in ("confirmed", "typed")]
        name = form.get("queue") or form.get("name", "")
        page = "queue" if "queue" in form else "election"
        back = f"{_root(request)}/{page}?name={quote(name, safe='')}"
        return self._render(
            request,
            "confirm.html",
            action=action,
            given=given,
            title=title,
            text=text,
            button=button,
            typed=typed,
            back=back,
        )

    def _done(self, request: Request, path: str, said: str, form: Mapping[str, str]) -> Response:
        what = {key: value for key, value in form.items() if key not in ("confirmed", "typed")}
        _log.warning("dashboard: %s by %s: %s %s", said, _asker(request), request.url.path, what)
        mark = "&" if "?" in path else "?"
        note = secrets.token_hex(8)  # not the text itself: a link must not put words into this page
        self._notes[note] = said
        while len(self._notes) > NOTES_MAX:
            del self._notes[next(iter(self._notes))]
        return RedirectResponse(f"{_root(request)}{path}{mark}note={note}", 303)


class _Guarded:
    """Refuses unknown hosts, and adds the headers of safety to every answer."""

    def __init__(self, inner: ASGIApp, guard: Guard) -> None:
        self._inner = inner
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if self._guard.knows_host(Request(scope)):
            await self._inner(scope, receive, send_safely)
            return
        text = "this dashboard is not asked by this name; start it with --allowed-host NAME\n"
        await PlainTextResponse(text, 421)(scope, receive, send_safely)


def _root(request: Request) -> str:
    """Return the path under which the application is mounted."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _asker(request: Request) -> str:
    user = request.scope.get("user")
    name = getattr(user, "display_name", "") or ""
    address = request.client.host if request.client else "unknown"
    return f"{name} ({address})" if name else address


def _page_of(queue: str) -> str:
    """Return the address of the page of *queue*."""
    return f"/queue?name={quote(queue, safe='')}"


def _wanted(request: Request, name: str) -> str:
    value = request.query_params.get(name, "")
    if not value:
        raise Problem(400, "Incomplete address", f"The address has no {name}=….")
    return value


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise Problem(400, "Wrong address", f"{text[:50]!r} is no sequence of a message.")
    return int(text)


def _chosen(form: Mapping[str, str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if form.get("reason"):
        chosen["reason"] = unquote(form["reason"])  # browsers would change its ends of lines
    if form.get("sequence"):
        chosen["sequences"] = [_number(form["sequence"])]
    return chosen


def _letters(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"


def _signed(change: float | None) -> str:
    return "" if change is None or abs(change) < 0.05 else f"{change:+,.1f}"


def _setting(name: str, value: float | tuple[int, float]) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:,} in {value[1]:.15g} s"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == math.inf:
        return "for ever" if name == "dead_retention" else "no limit"
    return f"{value:,}" if name in ("max_deliveries", "body_max", "max_locked") else f"{value:.15g} s"


def _schedule(one: ScheduleStatus, wall: float) -> dict[str, Any]:
    following, is_alarming = shown.moment(one.next), False
    if one.problem or one.paused:
        following, is_alarming = one.problem or "paused", True
    elif one.next is not None and one.next < wall - LATE:
        following, is_alarming = f"{following}, late: is no process running it?", True
    every = one.every if isinstance(one.every, str) else f"{one.every:.15g} s"
    return {
        "status": one,
        "every": every,
        "last": shown.moment(one.last),
        "next": following,
        "alarm": is_alarming,
    }


def _group(one: PartitionGroup) -> dict[str, Any]:
    return {
        "name": one.name,
        "members": len(one.members),
        "partitions": len(one.owners),
        "owned": len(one.owners) - len(one.vacant),
        "vacant": in_ranges(one.vacant),
        "state": state_of(one),
    }


def _of_letter(one: DeadMessage) -> dict[str, Any]:
    error = one.error
    return {
        "letter": one,
        "died": shown.moment(one.dead_at),
        "error": f"{error.type}: {error.message}"[:200] if error else one.description[:200],
    }


def _fields(message: LiveMessage | DeadMessage) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if field.name in ("body", "headers", "history", "error", "queue") or value in (None, ""):
            continue
        text = shown.moment(value) if field.name in _MOMENTS else str(value)
        found.append((field.name.replace("_", " "), text))
    if isinstance(message, DeadMessage) and message.error is not None:
        found.append(("error", f"{message.error.type}: {message.error.message}"))
    return found


_MOMENTS = frozenset({"enqueued_at", "locked_since", "locked_until", "due_at", "dead_at"})

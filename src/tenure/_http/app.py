"""The application: ``/live``, ``/ready``, ``/metrics`` and ``/keda/v1/queues/QUEUE``."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable

from tenure import Stats
from tenure._http.source import Health, Source
from tenure._telemetry.prometheus import exposed
from tenure.errors import BackendNotInstalled, TenureError

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise BackendNotInstalled(
        "the HTTP endpoints need the package 'starlette', which is not installed; run: pip install 'tenure[http]'"
    ) from error

NO_STORE = {"Cache-Control": "no-store"}


def make_app(source: Source, token: str | None) -> Starlette:
    """Return the application that asks *source*; with *token*, metrics and numbers of queues need it."""

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def check(request: Request) -> Response:
            if token is not None and not _has_token(request, token):
                return PlainTextResponse(
                    "a token is needed: Authorization: Bearer TOKEN\n", 401, {**NO_STORE, "WWW-Authenticate": "Bearer"}
                )
            return await answer(request)

        return check

    async def live(_: Request) -> Response:
        return _probed(await source.live())

    async def ready(_: Request) -> Response:
        return _probed(await source.ready())

    async def metrics(_: Request) -> Response:
        text, kind = exposed(await source.metrics())
        return Response(text, headers=NO_STORE, media_type=kind)

    async def keda(request: Request) -> Response:
        name = request.path_params["queue"]
        try:
            stats = await source.stats()
        except TenureError:  # its text may name hosts
            return JSONResponse({"error": "the store did not answer"}, 503, NO_STORE)
        if name not in stats:
            return JSONResponse({"error": f"this service has no handler of the queue {name!r}"}, 404, NO_STORE)
        return JSONResponse(backlog_of(name, stats[name]), headers=NO_STORE)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", guarded(metrics)),
            Route("/keda/v1/queues/{queue:path}", guarded(keda)),
        ]
    )


def _probed(health: Health) -> Response:
    return PlainTextResponse(f"{health.why}\n", 200 if health.passes else 503, NO_STORE)


def _has_token(request: Request, token: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are read as Latin-1; a token from a file often ends with a newline.
    is_right = hmac.compare_digest(given.strip().encode("latin-1"), os.fsencode(token.strip()))
    return kind.lower() == "bearer" and is_right


def backlog_of(queue: str, stats: Stats) -> dict[str, object]:
    """Return the numbers of a queue as KEDA reads them.

    ``backlog`` has the locked messages, too: without them, it would be 0 while the last ones are handled, and an
    autoscaler would end the processes that do that. Of a paused queue it has only these: more processes would be idle.
    """
    return {
        "queue": queue,
        "backlog": stats.backlog,
        "ready": stats.ready,
        "locked": stats.locked,
        "delayed": stats.delayed,
        "deferred": stats.deferred,
        "dead": stats.dead,
        "oldest_age": stats.oldest_age,
        "paused": stats.paused,
    }

"""HTTP endpoints of a service, for probes, Prometheus and KEDA: an ASGI application to mount in your own.

``tenure run --http HOST:PORT`` serves the same. It needs the extra ``http``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import tenure.sync
from tenure import Service
from tenure._public import publish_all
from tenure.errors import ConfigError
from tenure.telemetry import Metrics

__all__ = ["Application", "app"]

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

TOKEN_VARIABLE = "TENURE_HTTP_TOKEN"  # noqa: S105  # the name of the variable


def app(service: Service | tenure.sync.Service, *, metrics: Metrics | None = None) -> Application:
    """Return an ASGI application with the endpoints of *service*.

    - ``/live``: 200 if the event loop and the thread that renews leases and locks answer, and no work of a leader has
      overrun; else 503. It does not depend on the store.
    - ``/ready``: 200 if the service runs, and the store has answered its handlers and candidates lately; else 503.
    - ``/metrics``: for Prometheus.
    - ``/keda/v1/queues/QUEUE``: the numbers of the queue of a handler, as JSON, for KEDA's scaler ``metrics-api``. Its
      ``backlog`` is what is ready or locked. 503 if the store does not answer, 404 if no handler has the queue.

    With the environment variable ``TENURE_HTTP_TOKEN``, the last two need ``Authorization: Bearer TOKEN``. There is
    nothing secret in any of them: names of queues, elections and schedules, and numbers.

    Args:
        service: Call this before it is opened.
        metrics: Measures already what this service does; without, they are made here.

    Raises:
        BackendNotInstalled: ``starlette`` or ``prometheus-client`` is not installed.

    Example::

        service = tenure.Service("postgresql://db/shop")
        app.mount("/tenure", tenure.http.app(service))
    """
    from tenure._http.app import make_app
    from tenure._http.source import ServiceSource

    if metrics is None:
        metrics = Metrics()
        service.observe(metrics)
    elif not isinstance(metrics, Metrics):
        raise ConfigError(f"metrics must be a tenure.telemetry.Metrics, not {metrics!r:.80}")
    source = ServiceSource(service.service if isinstance(service, tenure.sync.Service) else service, metrics)
    return make_app(source, os.environ.get(TOKEN_VARIABLE) or None)


publish_all(__name__)

"""Metrics and traces: what a program does with each message, for Prometheus and OpenTelemetry.

::

    metrics = tenure.telemetry.Metrics()
    async with tenure.connect(url, telemetry=[metrics, tenure.telemetry.OpenTelemetry()]) as backend:
        ...

- :class:`Metrics` counts, and needs no other package; :class:`PrometheusCollector` (extra ``prometheus``) shows it.
- :class:`OpenTelemetry` (extra ``otel``) makes spans and metrics by the conventions for messaging.
- :class:`Telemetry` is the base class of both, and of one of your own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tenure._public import publish
from tenure._telemetry.families import Family, Histogram, Key, Kind, Snapshot
from tenure._telemetry.metrics import Metrics
from tenure._telemetry.telemetry import Handled, Outcome, Telemetry, Tracing

if TYPE_CHECKING:
    from tenure._telemetry.opentelemetry import OpenTelemetry
    from tenure._telemetry.prometheus import PrometheusCollector

__all__ = [
    "Family",
    "Handled",
    "Histogram",
    "Key",
    "Kind",
    "Metrics",
    "OpenTelemetry",
    "Outcome",
    "PrometheusCollector",
    "Snapshot",
    "Telemetry",
    "Tracing",
]

_HOMES = {"OpenTelemetry": "opentelemetry", "PrometheusCollector": "prometheus"}
"""The modules of names that need other packages: they are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tenure.telemetry' has no attribute {name!r}")
    found = getattr(import_module(f"tenure._telemetry.{_HOMES[name]}"), name)
    publish(__name__, {name: found})
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


publish(__name__, {name: globals()[name] for name in __all__ if name in globals()})

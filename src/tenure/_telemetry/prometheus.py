"""Metrics as Prometheus reads them, by its own library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tenure._telemetry.families import FAMILIES, Histogram, Snapshot
from tenure.errors import BackendNotInstalled

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise BackendNotInstalled(
        "metrics for Prometheus need the package 'prometheus-client', which is not installed; run: "
        "pip install 'tenure[prometheus]'"
    ) from error


class PrometheusCollector(Collector):
    """Shows the values of :class:`tenure.telemetry.Metrics` to Prometheus, in a registry of your own or the usual one.

    Args:
        read: Returns the values: ``metrics.snapshot``.

    Example::

        metrics = tenure.telemetry.Metrics()
        prometheus_client.REGISTRY.register(tenure.telemetry.PrometheusCollector(metrics.snapshot))
    """

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Describe all metrics, so that a registry need not read them to find conflicts."""
        return families_of({})

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics with their present values."""
        return families_of(self._read())


def families_of(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield every metric of tenure, with its values in *snapshot*."""
    for name, family in FAMILIES.items():
        values = sorted((labels, value) for (known, labels), value in snapshot.items() if known == name)
        found: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        match family.kind:
            case "counter":
                found = CounterMetricFamily(name, family.help, labels=family.labels)
            case "gauge":
                found = GaugeMetricFamily(name, family.help, labels=family.labels)
            case "histogram":
                found = HistogramMetricFamily(name, family.help, labels=family.labels)
        for labels, value in values:
            if isinstance(value, Histogram):
                assert isinstance(found, HistogramMetricFamily)
                found.add_metric(labels, _buckets(value, family.bounds), sum_value=value.total)
            else:
                assert not isinstance(found, HistogramMetricFamily)
                found.add_metric(labels, value)
        yield found


def _buckets(histogram: Histogram, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    buckets, count = [], 0
    for bound, here in zip((*map(str, bounds), "+Inf"), histogram.counts, strict=True):
        count += here
        buckets.append((bound, float(count)))
    return buckets


def exposed(snapshot: Snapshot) -> tuple[bytes, str]:
    """Return *snapshot* in the text format of Prometheus, and its content type."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(lambda: snapshot))
    return generate_latest(registry), CONTENT_TYPE_LATEST

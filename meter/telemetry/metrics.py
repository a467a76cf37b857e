"""Every Prometheus collector. Labels come from the configuration and from fixed words, never from a caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meter.ledger.record import UsageRecord

OTHER = "other"
"""The label of a model or backend that the configuration does not name."""

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 5)


class Metrics:
    """One process's collectors, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.requests = self._counter(
            "weir_requests", "Requests answered.", "endpoint", "model", "backend", "verdict", "status"
        )
        self.tokens = self._counter("weir_tokens", "Tokens booked.", "model", "backend", "route", "kind")
        self.cost = self._counter("weir_cost_usd", "Cost booked, in US dollars.", "model", "backend")
        self.duration = self._histogram(
            "weir_request_duration_seconds", "From the request's head to its end.", LATENCY_BUCKETS
        )
        self.first_token = self._histogram(
            "weir_first_token_seconds", "From the request's head to its first content.", LATENCY_BUCKETS
        )
        self.overhead = self._histogram(
            "weir_overhead_seconds", "Time in this process before the engine was asked.", OVERHEAD_BUCKETS
        )
        self.estimate_error = self._histogram(
            "weir_estimate_error_ratio", "Estimated prompt tokens ÷ the engine's figure.", RATIO_BUCKETS
        )
        self.inflight = Gauge("weir_inflight", "Requests being served.", registry=self.registry)
        self.refusals = self._counter("weir_refusals", "Requests refused by a quota.", "rule", "shadow")
        self.store_seconds = Histogram(
            "weir_quota_store_seconds",
            "Quota store calls.",
            ["op"],
            buckets=OVERHEAD_BUCKETS,
            registry=self.registry,
        )
        self.store_up = Gauge("weir_quota_store_up", "1 while the quota store answers.", registry=self.registry)
        self.store_failures = self._counter("weir_quota_store_failures", "Quota store calls that failed.", "op")

        self.dropped = self._counter("weir_journal_dropped", "Usage records that the journal could not take.")

    def gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A gauge that is read when scraped."""
        self.registry.register(_Read(lambda: [GaugeMetricFamily(name, documentation, value=read())]))

    def counter(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A counter that somebody else keeps, read when scraped."""
        self.registry.register(_Read(lambda: [CounterMetricFamily(name, documentation, value=read())]))

    def labelled_gauge(
        self, name: str, documentation: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """One series for each of a few fixed words, read when scraped."""
        self.registry.register(_Read(lambda: [_filled(GaugeMetricFamily(name, documentation, labels=[label]), read())]))

    def labelled_counter(
        self, name: str, documentation: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """Counters that somebody else keeps, read when scraped."""
        self.registry.register(
            _Read(lambda: [_filled(CounterMetricFamily(name, documentation, labels=[label]), read())])
        )

    def observe(self, record: UsageRecord, *, model: str, backend: str) -> None:
        """What one booked exchange adds; `model` and `backend` are configured names."""
        for kind, tokens in (
            ("prompt", record.prompt_tokens - record.cached_prompt_tokens),
            ("cached_prompt", record.cached_prompt_tokens),
            ("completion", record.completion_tokens),
        ):
            if tokens > 0:
                self.tokens.labels(model, backend, record.route, kind).inc(tokens)
        if record.cost_nanousd:
            self.cost.labels(model, backend).inc(record.cost_nanousd / 1e9)
        self.duration.observe(record.duration_ms / 1000)
        if record.first_token_ms is not None:
            self.first_token.observe(record.first_token_ms / 1000)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for word, value in values.items():
        family.add_metric([word], value)
    return family


class _Read(Collector):
    def __init__(self, families: Callable[[], list[Metric]]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families()

"""Counters of a server in Prometheus' text form. Layer 8.

Each server has a registry of its own. What the engine and the desk know is read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pyggml_dflash.measures import Histogram as Durations
from pyggml_dflash.requests import EngineStats, GenerationResult, SnapshotStats, TrimStats

if TYPE_CHECKING:
    from pyggml_dflash.serve.service import Reading, Service

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What is counted as it happens."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("dflash_requests", "HTTP requests.", ["path", "status"], registry=registry)
        self._prompt = Counter("dflash_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter("dflash_cached_tokens", "Prompt tokens not computed again.", registry=registry)
        self._generated = Counter("dflash_generated_tokens", "Tokens of answers.", registry=registry)
        self._finished = Counter(
            "dflash_answers", "Answers by how they ended.", ["reason"], registry=registry
        )
        self._drafted = Counter("dflash_drafted_tokens", "Tokens that were proposed.", registry=registry)
        self._accepted = Counter("dflash_accepted_tokens", "Proposed tokens that held.", registry=registry)
        self._verifies = Counter("dflash_verify_steps", "Forwards over proposed tokens.", registry=registry)
        self._first = Histogram(
            "dflash_first_token_seconds", "From request to first text.", buckets=SECONDS, registry=registry
        )
        self._next = Histogram(
            "dflash_next_token_seconds", "Between tokens of an answer.", buckets=SECONDS, registry=registry
        )
        self._phases = {
            phase: Histogram(
                f"dflash_{phase}_seconds",
                f"Seconds of answers in {phase}.",
                buckets=SECONDS,
                registry=registry,
            )
            for phase in ("queue", "prefill", "decode")
        }

    def on_request(self, path: str, status: int) -> None:
        """Count an HTTP request; `path` is a route's, never what a client made up."""
        self.requests.labels(path, str(status)).inc()

    def on_piece(self, seconds: float, n_tokens: int, *, first: bool) -> None:
        """Text came `seconds` after what was before."""
        if first:
            self._first.observe(seconds)
        elif n_tokens:
            self._next.observe(seconds / n_tokens)

    def on_cancel(self) -> None:
        """Count an answer that nobody wants any more."""
        self._finished.labels("cancelled").inc()

    def on_result(self, result: GenerationResult) -> None:
        """Count an answer that is over."""
        usage, timings, spec = result.usage, result.timings, result.speculation
        self._finished.labels(result.finish_reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._phases["queue"].observe(timings.queue_s)
        self._phases["prefill"].observe(timings.prefill_s)
        self._phases["decode"].observe(timings.decode_s)
        if spec is not None:
            self._drafted.inc(spec.drafted)
            self._accepted.inc(spec.accepted)
            self._verifies.inc(spec.verify_steps)

    def text(self, service: Service, reading: Reading) -> bytes:
        """Everything, as Prometheus reads it."""
        now = CollectorRegistry()
        now.register(_Now(service, reading))
        return generate_latest(self._registry) + generate_latest(now)


class _Now(Collector):
    """What is so at this moment."""

    def __init__(self, service: Service, reading: Reading) -> None:
        self._service, self._reading = service, reading

    def collect(self) -> Iterator[Metric]:
        """Gauges of the desk, gauges and counters of the engine."""
        desk, info = self._service.desk, self._service.engine.info
        yield GaugeMetricFamily("dflash_slots", "Answers that can run at a time.", desk.n_slots)
        yield GaugeMetricFamily("dflash_slots_busy", "Answers that run.", len(desk.running))
        yield GaugeMetricFamily("dflash_queue_depth", "Answers that wait.", len(desk.waiting))
        yield GaugeMetricFamily("dflash_max_ctx", "Context of a slot in tokens.", info.n_ctx)
        held = GaugeMetricFamily("dflash_memory_bytes", "Bytes held.", labels=["device", "kind"])
        for device, by_kind in self._reading.memory.items():
            for kind, n_bytes in by_kind.items():
                held.add_metric([device, kind], n_bytes)
        yield held
        stats = self._reading.stats
        yield from _devices(stats)
        yield from _trims(stats.trims)
        for name, what, n in (
            ("step_failures", "Steps of a slot that failed.", stats.step_failures),
            (
                "allocation_retries",
                "Refused allocations, tried again after a trim.",
                stats.allocation_retries,
            ),
            ("joined_prompts", "Forwards that prompts of several slots shared.", stats.joined_prompts),
        ):
            yield CounterMetricFamily(f"dflash_{name}", what, n)
        yield _durations(
            "granule", "Of prompts' forwards in one step, for which answers wait.", stats.granule_times
        )
        if stats.snapshots is not None:
            yield from _stored(stats.snapshots)


def _devices(stats: EngineStats) -> Iterator[Metric]:
    """Gauges of devices: memory as the system tells it, the most that was held, scratch pools."""
    peak = GaugeMetricFamily("dflash_memory_peak_bytes", "Most bytes held.", labels=["device"])
    for device, n_bytes in stats.peak_bytes.items():
        peak.add_metric([device], n_bytes)
    free = GaugeMetricFamily("dflash_device_free_bytes", "Bytes that anybody may take.", labels=["device"])
    total = GaugeMetricFamily("dflash_device_total_bytes", "Bytes of a device.", labels=["device"])
    for device, memory in stats.devices.items():
        free.add_metric([device], memory.free_bytes)
        total.add_metric([device], memory.total_bytes)
    yield from (peak, free, total)
    for name, what, n_bytes in (
        ("live", "Bytes of legacy scratch pools in use.", stats.pool.live_bytes),
        ("cached", "Bytes of legacy scratch pools that a trim gives back.", stats.pool.cached_bytes),
        ("vmm", "Bytes mapped by virtual-memory scratch pools.", stats.pool.vmm_bytes),
    ):
        yield GaugeMetricFamily(f"dflash_pool_{name}_bytes", what, n_bytes)


def _trims(stats: Sequence[TrimStats]) -> Iterator[Metric]:
    """Counters of trims by reason."""
    trims = CounterMetricFamily("dflash_trims", "Trims of scratch pools.", labels=["reason"])
    freed = CounterMetricFamily("dflash_trimmed_bytes", "Bytes that trims gave back.", labels=["reason"])
    took = CounterMetricFamily("dflash_trim_seconds", "Seconds of trims.", labels=["reason"])
    for trim in stats:
        trims.add_metric([trim.reason], trim.n_trims)
        freed.add_metric([trim.reason], trim.released_bytes)
        took.add_metric([trim.reason], trim.seconds)
    yield from (trims, freed, took)


def _durations(name: str, what: str, times: Durations) -> Metric:
    """A histogram, whose buckets have all that is below their bound."""
    bounds = (*map(str, times.bounds_s), "+Inf")
    buckets = list(zip(bounds, accumulate(times.counts), strict=True))
    return HistogramMetricFamily(f"dflash_{name}_seconds", what, buckets=buckets, sum_value=times.sum_s)


def _stored(stats: SnapshotStats) -> Iterator[Metric]:
    """Gauges and counters of stored states."""
    yield GaugeMetricFamily("dflash_snapshots", "Stored states in memory.", stats.n_states)
    yield GaugeMetricFamily("dflash_snapshot_bytes", "Bytes of stored states in memory.", stats.n_bytes)
    yield GaugeMetricFamily("dflash_snapshot_limit_bytes", "Most bytes of them.", stats.limit_bytes)
    for name, what, n in (
        ("captures", "States that were stored.", stats.captured),
        ("restores", "Stored states that prompts continued.", stats.restored),
        ("evictions", "Stored states that gave way to others.", stats.evicted),
    ):
        yield CounterMetricFamily(f"dflash_{name}", what, n)
    yield _durations("capture", "Of storing a state.", stats.capture_times)
    yield _durations("restore", "Of restoring a stored state.", stats.restore_times)
    for name, what, label, counts in (
        ("capture_failures", "States that could not be stored.", "reason", stats.capture_failures),
        ("capture_skips", "States that were not worth storing.", "reason", stats.capture_skips),
        ("invalid_restores", "Stored states that could not be restored.", "reason", stats.unusable),
        ("prefix_hits", "Prompts that continued a stored state.", "place", stats.hits),
        ("prefix_misses", "Prompts that continued none.", "reason", stats.misses),
    ):
        family = CounterMetricFamily(f"dflash_{name}", what, labels=[label])
        for value, n in counts.items():
            family.add_metric([value], n)
        yield family

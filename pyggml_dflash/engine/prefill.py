"""When scratch memory is given back: between prompt chunks, when idle, after a failed allocation. Layer 6.

A legacy pool keeps every block it ever needed (`plan.legacy_pool`), so a long prompt that grows its
temporaries from chunk to chunk ends in what is free. Between chunks nothing is queued and the chunk is
committed, which is where a trim is safe. Virtual-memory pools, and devices without a pool, are never
touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from pyggml_dflash.errors import BackendError, EngineClosed
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.pool import PoolStats, has_legacy_pool, pool_stats, trim_pool
from pyggml_dflash.measures import PoolReport
from pyggml_dflash.options import Auto
from pyggml_dflash.requests import TrimStats

LOG: Final = logging.getLogger(__name__)
LOW_BYTES: Final = 512 * 2**20  # 'auto' trims below this much free memory, whatever the growth
TrimReason = Literal["prefill", "idle", "allocation"]


class Pools(Protocol):
    """The scratch pools of the backends that one model computes on."""

    @property
    def is_busy(self) -> bool:
        """True while queued work may still use what they have cached."""

    def has_legacy(self) -> bool:
        """True once one of them has made a legacy pool."""

    def trim(self) -> int:
        """Give cached blocks back; the bytes released."""

    def stats(self) -> PoolStats:
        """What they hold, together."""

    def memory_free(self) -> int:
        """Bytes free on the first backend's device."""


class BackendPools:
    """The pools of real backends, each named once."""

    def __init__(self, backends: Sequence[Backend], ledger: Ledger) -> None:
        self._backends, self._ledger = tuple(dict.fromkeys(backends)), ledger

    @property
    def is_busy(self) -> bool:
        """True while queued work may still use what they have cached."""
        return any(backend.is_busy for backend in self._backends)

    def has_legacy(self) -> bool:
        """True once one of them has made a legacy pool."""
        return any(has_legacy_pool(backend) for backend in self._backends)

    def trim(self) -> int:
        """Give cached blocks back, after all queued work; the bytes released. A failure stops no other."""
        return trim_pool(*self._backends)

    def stats(self) -> PoolStats:
        """What they hold, together."""
        found = [pool_stats(backend) for backend in self._backends]
        names = PoolStats.__slots__
        return PoolStats(**{name: sum(getattr(s, name) for s in found) for name in names})

    def memory_free(self) -> int:
        """Bytes free on the first backend's device."""
        first = self._backends[0]
        return self._ledger.free(first.name, first.memory_free())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimSchedule:
    """The positions of one prompt after which a trim is due: a grid of `interval` tokens from `origin`.

    `origin` is where this request begins to prefill, so that a restored prefix does not count.
    """

    origin: int
    n_prompt: int
    interval: int  # 0: never
    next_at: int

    @classmethod
    def of(cls, origin: int, n_prompt: int, interval: int) -> TrimSchedule:
        """The schedule of a prompt that is prefilled from `origin` on."""
        return cls(origin=origin, n_prompt=n_prompt, interval=interval, next_at=origin + interval)

    def is_due(self, n_past: int) -> bool:
        """True if a point of the grid was reached and more of the prompt remains."""
        return self.interval > 0 and self.next_at <= n_past < self.n_prompt

    def behind(self, n_past: int) -> TrimSchedule:
        """The schedule whose next point lies behind `n_past`; points passed over are skipped."""
        done = (n_past - self.origin) // self.interval
        return replace(self, next_at=self.origin + (done + 1) * self.interval)


@dataclass(slots=True)
class AdaptiveTrim:
    """Trims only when the next chunk may not find room: free memory against the largest growth seen."""

    held_bytes: int = 0  # by the pools after the last chunk
    growth_bytes: int = 0  # the largest between two chunks

    def observe(self, held_bytes: int) -> None:
        """Take in what the pools hold after a chunk."""
        self.growth_bytes = max(self.growth_bytes, held_bytes - self.held_bytes)
        self.held_bytes = held_bytes

    def is_due(self, *, free: int, cached: int) -> bool:
        """True if there is something to give back and little room for the next chunk."""
        return cached > 0 and free < max(3 * self.growth_bytes // 2, LOW_BYTES)


class PoolTrims:
    """Decides when to trim, does it, logs and counts it.

    A trim that is asked for while work is queued waits until the next one is asked for and nothing is.
    """

    def __init__(self, pools: Pools, interval: int | Auto, *, chunk: int) -> None:
        """`interval`: tokens between two trims in a prompt, 0 for none, or 'auto'."""
        self._pools, self._interval = pools, interval
        self._schedules: dict[int, TrimSchedule] = {}  # of the prompts under way, by slot
        self._adaptive = AdaptiveTrim()
        self._counts: dict[str, TrimStats] = {}
        self._deferred: TrimReason | None = None
        self.n_relieved = 0  # allocations that failed, to be tried again
        if interval != "auto" and 0 < interval < chunk:
            LOG.warning(
                "a trim interval of %d tokens is below the chunk of %d: pools are trimmed after every chunk, "
                "and each trim waits for the device and drops captured graphs",
                interval,
                chunk,
            )

    @property
    def counts(self) -> tuple[TrimStats, ...]:
        """What was done so far, by reason."""
        return tuple(self._counts.values())

    def report(self) -> PoolReport:
        """The pools now; there are none once their backends are closed."""
        try:
            stats = self._pools.stats()
        except EngineClosed:
            return PoolReport()
        return PoolReport(
            kind="legacy" if stats.n_legacy_pools else "vmm" if stats.n_pools else "none",
            live_bytes=stats.live_bytes,
            cached_bytes=stats.cached_bytes,
            vmm_bytes=stats.vmm_bytes,
        )

    def add(self, earlier: Sequence[TrimStats]) -> None:
        """Count in what was done before, for an engine that was parked meanwhile."""
        for stats in earlier:
            self._add(stats)

    def _add(self, more: TrimStats) -> None:
        old = self._counts.get(more.reason, TrimStats(reason=more.reason))
        self._counts[more.reason] = TrimStats(
            reason=more.reason,
            n_trims=old.n_trims + more.n_trims,
            released_bytes=old.released_bytes + more.released_bytes,
            seconds=old.seconds + more.seconds,
        )

    def begin(self, n_past: int, n_prompt: int, *, slot: int = 0) -> None:
        """A prompt of `n_prompt` tokens is prefilled in `slot`, from `n_past` on."""
        interval = 0 if self._interval == "auto" else self._interval
        self._schedules[slot] = TrimSchedule.of(n_past, n_prompt, interval)

    def after_chunk(self, n_past: int, *, slot: int = 0) -> None:
        """Call when a chunk is computed, read, handed to the draft and committed: trims if it is time."""
        schedule = self._schedules.get(slot)
        if schedule is None or n_past >= schedule.n_prompt:
            return
        self._catch_up()
        where = f" pos={n_past}/{schedule.n_prompt}"
        if self._interval == "auto":
            if self._pools.has_legacy() and self._is_low():
                self._trim("prefill", where)
        elif schedule.is_due(n_past):
            if self._pools.has_legacy():
                self._trim("prefill", where)
            self._schedules[slot] = schedule.behind(n_past)

    def end(self, slot: int) -> None:
        """Nothing more is prefilled in `slot`."""
        self._schedules.pop(slot, None)

    def relieve(self) -> None:
        """Make room after an allocation that failed."""
        self.n_relieved += 1
        self._trim_if_legacy("allocation")

    def release_scratch(self) -> None:
        """Give scratch back when nothing waits to be computed."""
        self._catch_up()
        self._trim_if_legacy("idle")

    def _trim_if_legacy(self, reason: TrimReason) -> None:
        """A device that fails here is told of by the next thing that is asked of it."""
        try:
            if self._pools.has_legacy() and self._pools.stats().cached_bytes > 0:
                self._trim(reason)
        except BackendError as error:
            LOG.warning("pools were not trimmed: %s", error)

    def _catch_up(self) -> None:
        """Do what was asked for while work was queued."""
        reason = self._deferred
        if reason is not None and not self._pools.is_busy:
            self._deferred = None
            self._trim_if_legacy(reason)

    def _is_low(self) -> bool:
        stats = self._pools.stats()
        self._adaptive.observe(stats.live_bytes + stats.cached_bytes)
        return self._adaptive.is_due(free=self._pools.memory_free(), cached=stats.cached_bytes)

    def _trim(self, reason: TrimReason, where: str = "") -> None:
        if self._pools.is_busy:
            self._deferred = reason
            return
        before = self._pools.stats()
        started = time.perf_counter()
        released = self._pools.trim()
        seconds = time.perf_counter() - started
        self._adaptive.held_bytes = max(0, self._adaptive.held_bytes - released)
        self._add(TrimStats(reason=reason, n_trims=1, released_bytes=released, seconds=seconds))
        LOG.log(
            logging.INFO if released else logging.DEBUG,
            "pool-trim reason=%s%s released=%.1fMiB graphs=%d ranks=%d ms=%.1f free=%.2fGiB",
            reason,
            where,
            released / 2**20,
            before.n_graphs,
            before.n_legacy_pools,
            1000 * seconds,
            self._pools.memory_free() / 2**30,
        )

"""What an engine measures of itself: durations, scratch pools, memory of devices. Frozen data of layer 0."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final, Literal

BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PoolKind = Literal["none", "legacy", "vmm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Durations by how long they were. `counts` has those up to each bound, then those above the last."""

    bounds_s: tuple[float, ...] = BOUNDS_S
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0
    max_s: float = 0.0

    @property
    def n(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def including(self, seconds: float) -> Histogram:
        """The same, and one duration more."""
        i = bisect_left(self.bounds_s, seconds)
        counts = (*self.counts[:i], self.counts[i] + 1, *self.counts[i + 1 :])
        longest = max(self.max_s, seconds)
        return replace(self, counts=counts, sum_s=self.sum_s + seconds, max_s=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """Scratch pools of an engine's devices, together.

    'legacy' pools keep blocks until they are trimmed, 'vmm' ones map pages and never shrink; where there are
    both, it is 'legacy'. 'none': no device has one, or the engine is parked.
    """

    kind: PoolKind = "none"
    live_bytes: int = 0  # of legacy pools, in use
    cached_bytes: int = 0  # of legacy pools: what a trim would give back
    vmm_bytes: int = 0  # mapped

    @property
    def trim_strategy(self) -> str:
        """How it is trimmed: 'overlay', by our addition to ggml's back end, or 'none'."""
        return "overlay" if self.kind == "legacy" else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device, whoever uses it; where the engine was opened with a cap, what that leaves."""

    total_bytes: int
    free_bytes: int

"""What graphs would take, without allocating them. Layer 3.

Whoever plans makes the engine's own parts with a dry ledger: they declare and charge what they always do,
and no memory is allocated. Graphs over them are measured by ggml's allocator. So a plan cannot forget a
tensor that the engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.graph import measure_by_device, measure_scratch
from pyggml_dflash.ggml.ops import GraphBuilder

Build = Callable[[], GraphBuilder]
Measured = tuple[dict[str, int], dict[str, int], int]  # compute and scratch by device, metadata


def last_of_each_run(kind: Callable[[int], str], start: int, stop: int) -> list[int]:
    """For each kind that the numbers from `start` below `stop` have, in runs, the last number of its run.

    A kind must not come back once another has followed it.
    """
    found = []
    while start < stop:
        low, high = start, stop - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if kind(middle) == kind(start) else (low, middle - 1)
        found.append(low)
        start = low + 1
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBytes:
    """What one graph takes: compute memory and scratch on one device, headers and node list on the host."""

    compute: int = 0
    metadata: int = 0
    scratch: int = 0


class MemoryProbe:
    """Measures what graphs of a backend and its peers take on one of their devices, each key once.

    Keys must name all that a graph's size depends on, within one family of engines.
    """

    def __init__(self, backend: Backend) -> None:
        """Measures on the backend's own device."""
        self._backend, self._device = backend, backend.name
        self._families: dict[Hashable, dict[Hashable, Measured]] = {}
        self._known: dict[Hashable, Measured] = {}
        self.scratch = 0  # the largest of all graphs asked for since `begin`; those of one backend share it

    def begin(self) -> None:
        """The graphs asked for from now on belong to another engine."""
        self.scratch = 0

    def on(self, device: str) -> MemoryProbe:
        """The same graphs, measured on another device; both know what either has measured."""
        probe = MemoryProbe(self._backend)
        probe._device, probe._families, probe._known = device, self._families, self._known
        return probe

    def of(self, family: Hashable) -> MemoryProbe:
        """For graphs of a family of engines; knows what any probe made from this one measured of it."""
        probe = self.on(self._device)
        probe._known = self._families.setdefault(family, {})
        return probe

    def graph(self, key: Hashable, build: Build) -> GraphBytes:
        """What the graph that `build` makes would take; the builder is closed."""
        if key not in self._known:
            builder = build()
            try:
                compute = measure_by_device(self._backend, builder)
                self._known[key] = compute, measure_scratch(self._backend, builder), builder.n_bytes
            finally:
                builder.close()
        compute, scratch, metadata = self._known[key]
        found = GraphBytes(
            compute=compute.get(self._device, 0), scratch=scratch.get(self._device, 0), metadata=metadata
        )
        self.scratch = max(self.scratch, found.scratch)
        return found

    def largest(self, graphs: Iterable[tuple[Hashable, Build]]) -> int:
        """Compute bytes of the largest of these graphs, 0 for none."""
        return max((self.graph(key, build).compute for key, build in graphs), default=0)

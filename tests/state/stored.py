"""A slot table that was made by hand, with every kind of state tensor, and states to put into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyggml_dflash.arch.base import StateLayout, StateTensor
from pyggml_dflash.ggml.arena import host_view, read_bytes, write, zero
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.state.slot import Slot, SlotTable
from pyggml_dflash.state.snapshot import SnapshotMemory
from pyggml_dflash.state.snapshot_store import SnapshotStore
from pyggml_dflash.state.strips import Part, Strip

N_SLOTS = 3
LAYOUT = StateLayout(
    n_ctx=64,
    tensors=(
        StateTensor(name="k", type=ElementType.F16, shape=(32, 64), grows=True),
        StateTensor(name="v", type=ElementType.Q8_0, shape=(32, 64), grows=True),
        StateTensor(name="conv", type=ElementType.F32, shape=(3, 8), grows=False),
        StateTensor(name="pooled", type=ElementType.F32, shape=(8, 16), grows=True, positions_per_row=4),
        StateTensor(name="memory", type=ElementType.F32, shape=(4, 4, 2), grows=False),
    ),
)
FINGERPRINT = bytes(range(16))


def used(tensor: StateTensor, n_past: int) -> int:
    """Bytes of a tensor that hold something at `n_past`."""
    whole = {"k": 64 * n_past, "v": 34 * n_past, "pooled": 32 * (n_past // 4)}
    return whole.get(tensor.name, tensor.n_bytes)


@dataclass(slots=True)
class States:
    """A table of slots and a store for their states."""

    backend: Backend
    ledger: Ledger
    table: SlotTable
    store: SnapshotStore
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    @property
    def memory(self) -> SnapshotMemory:
        """Where the store's snapshots lie."""
        return self.store.memory

    def fill(self, slot: Slot, n_past: int) -> None:
        """Noise everywhere: `n_past` tokens have run, and rows behind them been written and taken back."""
        slot.reset()
        slot.vacate(self.table.layout.n_ctx)
        for t in self.table.layout.tensors:
            noise = self.rng.integers(1, 256, t.n_bytes, dtype=np.uint8)
            write(self.table.tensors[t.name], noise, slot.id * t.n_bytes)
        slot.commit(n_past)

    def bytes_of(self, slot: Slot) -> dict[str, bytes]:
        """Every byte of a slot, by tensor."""
        return {
            t.name: read_bytes(self.table.tensors[t.name], slot.id * t.n_bytes, t.n_bytes)
            for t in self.table.layout.tensors
        }

    def expected(self, image: dict[str, bytes], n_past: int) -> dict[str, bytes]:
        """What a restore makes of an image: the used bytes, and zeros."""
        found = {}
        for t in self.table.layout.tensors:
            n = used(t, n_past)
            found[t.name] = image[t.name][:n] + bytes(t.n_bytes - n)
        return found


@contextmanager
def opened(
    *, layout: StateLayout = LAYOUT, caps: dict[str, int] | None = None, **memory: Any
) -> Iterator[States]:
    """A table on the CPU; `memory` are options of `SnapshotMemory`."""
    backend = Backend(choose_device("CPU"), threads=1)
    ledger = Ledger()
    table = SlotTable(backend, ledger, layout, N_SLOTS)
    ledger.caps = caps or {}
    store = SnapshotStore(
        table, backend, SnapshotMemory(backend, backend, ledger, **memory), fingerprint=FINGERPRINT
    )
    try:
        yield States(backend, ledger, table, store)
    finally:
        table.close()
        backend.close()


class Ring:
    """A companion with one tensor: 8 bytes per position in a ring of 16, and a row of 4 bytes."""

    n_cells = 16

    def __init__(self, cells: Tensor, row: Tensor, kind: str = "ring") -> None:
        self.cells, self.row, self.kind = cells, row, kind
        self.n_seen = 0
        self.calls: list[str] = []

    def covers(self, n_past: int) -> bool:
        return self.n_seen == n_past

    def parts(self, n_past: int) -> tuple[Part, ...]:
        n = min(n_past, self.n_cells)
        strips = (
            Strip(name="ring", type=ElementType.I8, shape=(8, n)),
            Strip(name="row", type=ElementType.I8, shape=(4,)),
        )
        return (
            Part(strip=strips[0], tensor=self.cells, offset=0, n_written=8 * self.n_cells),
            Part(strip=strips[1], tensor=self.row, offset=0, n_written=4),
        )

    def resume(self, n_past: int) -> None:
        self.calls.append(f"resume {n_past}")
        self.n_seen = n_past

    def forget(self) -> None:
        self.calls.append("forget")
        self.n_seen = 0
        for tensor in (self.cells, self.row):
            zero(tensor)

    def bytes(self) -> bytes:
        """Everything it holds."""
        return host_view(self.cells).tobytes() + host_view(self.row).tobytes()

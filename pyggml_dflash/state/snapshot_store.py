"""Moves states between slots and snapshots, and counts what became of it. Layer 5.

A snapshot is published when every byte of it is there. A restore checks everything first, then writes or
zeroes every byte of the slot: what the slot held before cannot show.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import DflashError, SnapshotError
from pyggml_dflash.ggml.arena import host_view, write, zero
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.transfer import Transfer
from pyggml_dflash.measures import Histogram
from pyggml_dflash.state.slot import RECENT_TOKENS, Slot, SlotTable
from pyggml_dflash.state.snapshot import Contents, Room, Snapshot, SnapshotMemory, Tokens, frozen_tokens
from pyggml_dflash.state.strips import Companion, Part, layout_strips, slot_parts, snapshot_bytes

log = logging.getLogger(__name__)

Fill = Callable[[int, npt.NDArray[np.uint8]], None]  # number of a strip, the bytes to write its data into

NO_ROOM: Final = "no room in the allowance"
NO_MEMORY: Final = "allocation failed"
COPY_FAILED: Final = "copy failed"
CLOSED: Final = "snapshot is closed"
OTHER_MODEL: Final = "another model or layout"
OTHER_STRIPS: Final = "strips do not fit the layout"
TOO_LONG: Final = "longer than the context"


@dataclass(slots=True)
class SnapshotCounters:
    """What became of captures and restores; bytes are those of strips, seconds include the last copy."""

    captured_bytes: int = 0
    capture_times: Histogram = field(default_factory=Histogram)
    restored_bytes: int = 0
    restore_times: Histogram = field(default_factory=Histogram)
    n_without_companion: int = 0  # captures and restores that had to leave a companion's strips out
    skipped: Counter[str] = field(default_factory=Counter)  # captures and loads not tried, by reason
    failed: Counter[str] = field(default_factory=Counter)  # captures and loads that failed, by reason
    refused: Counter[str] = field(default_factory=Counter)  # restores, by reason

    @property
    def n_captured(self) -> int:
        """How many states were captured."""
        return self.capture_times.n

    @property
    def n_restored(self) -> int:
        """How many states were restored."""
        return self.restore_times.n

    @property
    def capture_gbs(self) -> float:
        """10^9 bytes per second over all captures; 0 before the first."""
        seconds = self.capture_times.sum_s
        return self.captured_bytes / seconds / 1e9 if seconds else 0.0

    @property
    def restore_gbs(self) -> float:
        """10^9 bytes per second over all restores; 0 before the first."""
        seconds = self.restore_times.sum_s
        return self.restored_bytes / seconds / 1e9 if seconds else 0.0


class SnapshotStore:
    """Captures and restores snapshots of one table of slots. Used on the engine's thread."""

    def __init__(
        self,
        slots: SlotTable,
        compute: Backend,
        memory: SnapshotMemory,
        *,
        fingerprint: bytes,
        counters: SnapshotCounters | None = None,
    ) -> None:
        """`counters`: those of a store before, to go on with."""
        self._slots, self._compute, self.memory = slots, compute, memory
        self.fingerprint = fingerprint
        self.counters = SnapshotCounters() if counters is None else counters

    def estimate(self, n_past: int, companion: Companion | None = None) -> int:
        """Bytes of a snapshot at `n_past`."""
        strips = layout_strips(self._slots.layout, n_past)
        more = () if companion is None else companion.parts(n_past)
        return snapshot_bytes([*strips, *(part.strip for part in more)], n_past)

    def capture(
        self, slot: Slot, tokens: Sequence[int] | Tokens, companion: Companion | None = None
    ) -> Snapshot | None:
        """A copy of the state that `tokens` led to in `slot`; the caller closes it.

        None if there is none, which `counters` explain; nothing is changed by that. Strips of a
        `companion` that has seen something else are left out.
        """
        n_past = slot.n_past
        assert 0 < n_past == len(tokens), f"{len(tokens)} tokens do not lead to n_past {n_past}"
        started = time.perf_counter()
        parts, more = slot_parts(self._slots, slot, n_past), self._companion_state(companion, n_past)
        contents = Contents(
            tokens=frozen_tokens(tokens),
            fingerprint=self.fingerprint,
            strips=tuple(part.strip for part in parts),
            companion=companion.kind if companion is not None and more else "",
            companion_strips=tuple(part.strip for part in more),
        )
        room = self._allocate(contents)
        if room is None:
            return None
        try:
            with Transfer(self._compute) as transfer:
                for part, tensor in zip(parts + more, room.tensors, strict=True):
                    if tensor is not None:
                        transfer.copy(part.tensor, part.offset, tensor, 0, part.strip.n_bytes)
        except DflashError as error:
            room.arena.close()
            self.counters.failed[COPY_FAILED] += 1
            log.warning("no snapshot of %d tokens: %s", n_past, error)
            return None
        except BaseException:
            room.arena.close()
            raise
        counters = self.counters
        counters.captured_bytes += sum(strip.n_bytes for strip in contents.all_strips)
        counters.capture_times = counters.capture_times.including(time.perf_counter() - started)
        return Snapshot(contents, room, self.memory)

    def _companion_state(self, companion: Companion | None, n_past: int) -> tuple[Part, ...]:
        if companion is None:
            return ()
        if companion.covers(n_past):
            return companion.parts(n_past)
        self.counters.n_without_companion += 1
        return ()

    def adopt(self, contents: Contents, fill: Fill) -> Snapshot | None:
        """A snapshot whose strips `fill` provides one after the other, as from a file.

        What `fill` raises is raised, and nothing is left behind. None as in `capture`.
        """
        room = self._allocate(contents)
        if room is None:
            return None
        try:
            for i, tensor in enumerate(room.tensors):
                if tensor is not None:
                    _fill_tensor(tensor, i, fill)
        except BaseException:
            room.arena.close()
            raise
        return Snapshot(contents, room, self.memory)

    def _allocate(self, contents: Contents) -> Room | None:
        if not self.memory.fits(contents.n_bytes):
            self.counters.skipped[NO_ROOM] += 1
            return None
        try:
            return self.memory.allocate(contents.all_strips)
        except DflashError as error:
            self.counters.failed[NO_MEMORY] += 1
            log.warning("no snapshot of %d tokens: %s", contents.n_past, error)
            return None

    def mismatch(self, contents: Contents) -> str:
        """Why a state of this kind cannot be restored into these slots; '' if it can."""
        layout = self._slots.layout
        if contents.fingerprint != self.fingerprint:
            return OTHER_MODEL
        if not 0 < contents.n_past <= layout.n_ctx:
            return TOO_LONG
        return "" if contents.strips == layout_strips(layout, contents.n_past) else OTHER_STRIPS

    @property
    def has_rows_only(self) -> bool:
        """True if a state at one position has in it those at every position before."""
        return self._slots.layout.recurrent_bytes == 0

    def restore(
        self,
        slot: Slot,
        snapshot: Snapshot,
        companion: Companion | None = None,
        *,
        n_past: int | None = None,
    ) -> None:
        """Put the state into `slot`, whatever it holds, as if the snapshot's tokens had just run there.

        `n_past`: so many of them alone, for which a state has to have rows only, and no companion.
        `SnapshotError` if it does not belong here, before anything is changed. A companion gets its strips,
        or is told to forget if the snapshot has none that fit it.
        """
        contents = snapshot.contents
        reason = CLOSED if snapshot.closed else self.mismatch(contents)
        if reason:
            self.counters.refused[reason] += 1
            raise SnapshotError(reason)
        self._compute.synchronize()  # nothing that is queued may write behind the copies
        started = time.perf_counter()
        n_past = contents.n_past if n_past is None else n_past
        assert n_past == contents.n_past or (
            0 < n_past < contents.n_past and self.has_rows_only and companion is None
        )
        parts = slot_parts(self._slots, slot, n_past)
        if companion is not None:
            parts += self._ready_companion(contents, companion)
        slot.vacate(n_past)  # a reset clears all of it if this ends half-way
        try:
            with Transfer(self._compute) as transfer:
                for part, tensor in zip(parts, snapshot.tensors, strict=False):  # a companion's come last
                    _put(transfer, part, tensor)
        except BaseException:
            if companion is not None:
                companion.forget()
            raise
        slot.resume(n_past, contents.tokens[:n_past][-RECENT_TOKENS:].tolist())
        counters = self.counters
        counters.restored_bytes += sum(part.strip.n_bytes for part in parts)
        counters.restore_times = counters.restore_times.including(time.perf_counter() - started)

    def _ready_companion(self, contents: Contents, companion: Companion) -> tuple[Part, ...]:
        """Have it forget what it knows; where its strips go, if it is one that can continue from them."""
        companion.forget()
        if companion.kind == contents.companion:
            parts = companion.parts(contents.n_past)
            if tuple(part.strip for part in parts) == contents.companion_strips:
                companion.resume(contents.n_past)
                return parts
        self.counters.n_without_companion += 1
        return ()


def _fill_tensor(tensor: Tensor, i: int, fill: Fill) -> None:
    if tensor.is_host:
        fill(i, host_view(tensor).reshape(-1).view(np.uint8))
        return
    data = np.empty(tensor.n_bytes, np.uint8)
    fill(i, data)
    write(tensor, data)


def _put(transfer: Transfer, part: Part, tensor: Tensor | None) -> None:
    """Write a strip to where it belongs and zero what else may be behind it."""
    n_bytes = part.strip.n_bytes
    if tensor is not None:
        transfer.copy(tensor, 0, part.tensor, part.offset, n_bytes)
    if part.n_written > n_bytes:
        zero(part.tensor, part.offset + n_bytes, part.n_written - n_bytes)

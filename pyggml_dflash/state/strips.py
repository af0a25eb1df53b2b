"""What a sequence's state consists of at a position: strips, and where they lie in a live state. Layer 5.

Growing tensors hold something in the rows that the positions fill, recurrent ones everywhere. A drafter
keeps state of the sequence beside the slot; it takes part as a `Companion`, whose strips come last, so
that a snapshot can be restored without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from pyggml_dflash.arch.base import StateLayout, StateTensor
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.state.slot import Slot, SlotTable

ALIGNMENT: Final = (
    256  # of a strip in memory: the most that a backend asks for (32 CPU, 128 CUDA, 256 Vulkan)
)
HEADER_BYTES: Final = 1024  # of a strip beside its data: ggml's header, ours, and their share of the heap
TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One contiguous run of bytes of a state; `shape` is in ggml's order."""

    name: str
    type: ElementType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the data."""
        return self.type.row_bytes(self.shape[0]) * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A strip in a live state: from byte `offset` of `tensor` on.

    Bytes from there up to `n_written` may hold anything; behind the strip they belong to nothing.
    """

    strip: Strip
    tensor: Tensor
    offset: int
    n_written: int


class Companion(Protocol):
    """State of a sequence beside its slot, such as a drafter's: complete for a position, or of no use.

    `capture` asks `covers` and copies the parts if it says yes; a snapshot is complete without them.
    `restore` calls `forget`, and if the snapshot has strips that fit, `resume` and fills the parts. If
    not, the rest of that sequence goes on without the companion, which `covers` then tells.
    """

    @property
    def kind(self) -> str:
        """Equal for companions that can continue each other's state: name, types, sizes."""

    def covers(self, n_past: int) -> bool:
        """True if it has seen exactly the first `n_past` positions of the sequence.

        What it has still to take in, it takes in first.
        """

    def parts(self, n_past: int) -> tuple[Part, ...]:
        """Where its state of the first `n_past` positions lies, whatever it holds now."""

    def resume(self, n_past: int) -> None:
        """Having forgotten: the parts are about to hold the state of `n_past` positions."""

    def forget(self) -> None:
        """It has seen nothing of the sequence that its slot now holds; its state is zero."""


def row_part(tensor: Tensor, n_rows: int, n_written: int, *, first: int = 0) -> Part:
    """`n_rows` rows of a tensor from row `first` on, of which `n_written` may hold something."""
    strip, row = Strip(name=tensor.name, type=tensor.type, shape=(tensor.shape[0], n_rows)), tensor.strides[1]
    return Part(strip=strip, tensor=tensor, offset=first * row, n_written=n_written * row)


def strip_of(tensor: StateTensor, n_past: int) -> Strip:
    """What `n_past` positions leave in a tensor; rows that are not complete belong to no strip."""
    if not tensor.grows:
        return Strip(name=tensor.name, type=tensor.type, shape=tensor.shape)
    assert len(tensor.shape) == 2, "rows of a growing tensor lie one behind the other"
    shape = (tensor.shape[0], n_past // tensor.positions_per_row)
    return Strip(name=tensor.name, type=tensor.type, shape=shape)


def layout_strips(layout: StateLayout, n_past: int) -> tuple[Strip, ...]:
    """The strips of a slot at `n_past`, in the layout's order; a few may be empty."""
    return tuple(strip_of(tensor, n_past) for tensor in layout.tensors)


def state_parts(
    layout: Iterable[StateTensor],
    tensors: Mapping[str, Tensor],
    n_past: int,
    n_written: int,
    slot: int = 0,
) -> tuple[Part, ...]:
    """Where the strips of `n_past` positions lie in a slot's part of `tensors`.

    `n_written` positions may have left something there, of whatever sequence.
    """
    found = []
    for t in layout:
        rows = -(-n_written // t.positions_per_row)
        n_bytes = min(t.n_bytes, rows * t.type.row_bytes(t.shape[0])) if t.grows else t.n_bytes
        part = Part(
            strip=strip_of(t, n_past), tensor=tensors[t.name], offset=slot * t.n_bytes, n_written=n_bytes
        )
        found.append(part)
    return tuple(found)


def slot_parts(table: SlotTable, slot: Slot, n_past: int) -> tuple[Part, ...]:
    """Where the strips of `n_past` positions lie in a slot, whatever it holds now."""
    return state_parts(table.layout.tensors, table.tensors, n_past, slot.n_written, slot.id)


def snapshot_bytes(strips: Iterable[Strip], n_past: int, alignment: int = ALIGNMENT) -> int:
    """Memory that a snapshot of these strips takes, headers and tokens included."""
    held = [strip.n_bytes for strip in strips if strip.n_bytes]
    aligned = sum(-(-n // alignment) * alignment for n in held)
    return aligned + HEADER_BYTES * len(held) + TOKEN_BYTES * n_past

"""Snapshots: immutable copies of a sequence's state, and the memory they lie in. Layer 5.

A snapshot takes what a sequence uses, not what a slot has room for. It does not know the slot that it was
made from, and outlives it; `SnapshotMemory` outlives both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import EngineClosed
from pyggml_dflash.ggml.arena import TensorArena, host_view, read_bytes
from pyggml_dflash.ggml.device import Backend, DeviceKind
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.state.strips import Strip, snapshot_bytes

log = logging.getLogger(__name__)

Place = Literal["device", "host"]
Tokens = npt.NDArray[np.int32]

LABEL: Final = "snapshots"  # in the ledger


def snapshot_place(kind: DeviceKind) -> Place:
    """Where snapshots of a state on this kind of device lie.

    A CPU's and an integrated GPU's memory is the system's. A discrete GPU's (RPC devices say they are one)
    is what slots and graphs compete for, so its snapshots lie in system memory.
    """
    return "device" if kind in ("cpu", "igpu") else "host"


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for one snapshot: a tensor of bytes per strip, None for an empty one, and what frees them."""

    arena: TensorArena
    tensors: tuple[Tensor | None, ...]


class SnapshotMemory:
    """Memory for snapshots: that of the device that computes, or the system's; at most `allowance` bytes.

    `pinned` asks for system memory that a discrete GPU copies at full speed; where that cannot be had a
    warning says so, once, and snapshots lie in ordinary memory. It owns nothing: snapshots do.
    """

    def __init__(
        self,
        compute: Backend,
        host: Backend,
        ledger: Ledger,
        *,
        pinned: bool = False,
        allowance: int | None = None,
    ) -> None:
        """`host`: a CPU backend. Snapshots on it outlive `compute`; those of an integrated GPU do not."""
        self.place = snapshot_place(compute.info.kind)
        self.outlives_compute = compute.info.kind != "igpu"
        self.backend = host if self.outlives_compute else compute
        self.allowance, self.n_held = allowance, 0
        self._ledger = ledger
        self._pinned_type = compute.pinned_buffer_type if pinned and self.place == "host" else None
        self._wants_pinned = pinned
        if pinned and self._pinned_type is None:
            self._warn_pageable(f"{compute.name} has no pinned memory")

    def fits(self, n_bytes: int) -> bool:
        """Whether a snapshot of `n_bytes` stays within the allowance."""
        return self.allowance is None or self.n_held + n_bytes <= self.allowance

    def allocate(self, strips: Sequence[Strip]) -> Room:
        """Room for these strips, not yet counted as held; raises `DeviceMemoryError`."""
        n = sum(1 for strip in strips if strip.n_bytes)
        arena = TensorArena(
            self.backend, self._ledger, LABEL, n_tensors=max(1, n), buffer_type=self._pinned_type
        )
        try:
            tensors = tuple(
                arena.declare(s.name, ElementType.I8, s.n_bytes) if s.n_bytes else None for s in strips
            )
            arena.allocate()
        except BaseException:
            arena.close()
            raise
        first = next((t for t in tensors if t is not None), None)
        if self._wants_pinned and first is not None and first.memory == "CPU":
            self._warn_pageable("the driver gave no pinned memory")
        return Room(arena, tensors)

    def _warn_pageable(self, why: str) -> None:
        if self._wants_pinned:
            log.warning("%s: snapshots lie in ordinary memory", why)
        self._wants_pinned = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """What a snapshot holds: the tokens int32 [n_past], read-only, and the strips, a companion's last."""

    tokens: Tokens
    fingerprint: bytes  # of the model, the layout and what else the numbers depend on
    strips: tuple[Strip, ...]
    companion: str = ""  # its kind; '' for none
    companion_strips: tuple[Strip, ...] = ()

    @property
    def n_past(self) -> int:
        """Tokens that led to the state."""
        return len(self.tokens)

    @property
    def all_strips(self) -> tuple[Strip, ...]:
        """Every strip in order."""
        return self.strips + self.companion_strips

    @property
    def n_bytes(self) -> int:
        """Memory of a snapshot with these contents."""
        return snapshot_bytes(self.all_strips, self.n_past)


class Snapshot:
    """One stored state. Never changed after it was made; closed by its owner, before the backend."""

    __slots__ = ("_memory", "_room", "contents", "n_bytes")

    def __init__(self, contents: Contents, room: Room, memory: SnapshotMemory) -> None:
        self.contents, self.n_bytes = contents, contents.n_bytes
        self._room: Room | None = room
        self._memory = memory
        memory.n_held += self.n_bytes

    @property
    def tokens(self) -> Tokens:
        """int32 [n_past], read-only: what led to the state."""
        return self.contents.tokens

    @property
    def closed(self) -> bool:
        """True once its memory is free."""
        return self._room is None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The data of each strip as bytes, None for an empty strip; `EngineClosed` after `close`."""
        if self._room is None:
            raise EngineClosed("Snapshot")
        return self._room.tensors

    def data(self, i: int) -> npt.NDArray[np.uint8]:
        """The bytes of strip `i`, uint8 [n_bytes]: a view where it lies in system memory, else a copy."""
        tensor = self.tensors[i]
        if tensor is None:
            return np.empty(0, np.uint8)
        if tensor.is_host:
            return host_view(tensor).reshape(-1).view(np.uint8)
        return np.frombuffer(read_bytes(tensor, 0, tensor.n_bytes), np.uint8)

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self._room is not None:
            self._memory.n_held -= self.n_bytes
            self._room.arena.close()
            self._room = None


def frozen_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """A read-only copy, int32 [n]."""
    copy = np.array(tokens, np.int32)
    copy.setflags(write=False)
    return copy

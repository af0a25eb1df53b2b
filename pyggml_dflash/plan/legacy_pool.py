"""A model of ggml's legacy scratch pool: what a run of allocations would make it hold. Layer 3.

The pool caches freed blocks in a table and reuses the one that fits best. A request that no cached
block can serve gets a new block, a little larger than asked; so temporaries that grow from chunk to
chunk leave every earlier size behind, until the pool is trimmed. Bytes only, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pyggml_dflash.errors import DeviceMemoryError

TABLE_SIZE: Final = 256
ALIGNMENT: Final = 256
LOOK_AHEAD: Final = 1.05

# What a pool does when the driver refuses: fail; drop its cache and ask once more, as ggml does since 0.25;
# or, where that is refused too, ask for what is wanted without the look-ahead, as some forks of ggml do.
Relief = Literal["none", "flush", "exact"]


@dataclass(frozen=True, slots=True)
class Block:
    """A live allocation: the bytes that the driver gave for it."""

    n_bytes: int


class LegacyPoolSim:
    """One pool on a device with `limit` bytes (None: endless)."""

    def __init__(self, limit: int | None = None, *, relief: Relief = "flush") -> None:
        self.limit, self._relief = limit, relief
        self._table: list[int | None] = [None] * TABLE_SIZE
        self.held_bytes = self.peak_bytes = 0
        self.n_mallocs = self.n_flushes = 0

    @property
    def cached_bytes(self) -> int:
        """Bytes of blocks that nobody uses: what a trim releases."""
        return sum(size for size in self._table if size is not None)

    @property
    def live_bytes(self) -> int:
        """Bytes of blocks in use."""
        return self.held_bytes - self.cached_bytes

    @property
    def n_blocks(self) -> int:
        """Cached blocks."""
        return sum(size is not None for size in self._table)

    def alloc(self, n_bytes: int) -> Block:
        """A block of at least `n_bytes`; raises `DeviceMemoryError` above the limit."""
        found: int | None = None
        least = 0
        for i, size in enumerate(self._table):
            if size is not None and size >= n_bytes and (found is None or size < least):
                found, least = i, size
        if found is not None:
            self._table[found] = None
            return Block(least)
        padded = -(-int(LOOK_AHEAD * n_bytes) // ALIGNMENT) * ALIGNMENT
        if not self._has_room(padded) and self._relief != "none":
            self.n_flushes += 1
            self.trim()
        exact = self._relief == "exact" and not self._has_room(padded)
        return self._malloc(n_bytes if exact else padded)

    def _malloc(self, n_bytes: int) -> Block:
        if not self._has_room(n_bytes):
            free = max(0, (self.limit or 0) - self.held_bytes)
            raise DeviceMemoryError(what="pool", wanted=n_bytes, free=free, device="simulated pool")
        self.n_mallocs += 1
        self.held_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Block(n_bytes)

    def _has_room(self, n_bytes: int) -> bool:
        return self.limit is None or self.held_bytes + n_bytes <= self.limit

    def free(self, block: Block) -> None:
        """Put a block into the first empty place of the table, or give it back when there is none."""
        for i, size in enumerate(self._table):
            if size is None:
                self._table[i] = block.n_bytes
                return
        self.held_bytes -= block.n_bytes

    def trim(self) -> int:
        """Give every cached block back; returns the bytes released. Live blocks stay."""
        released = self.cached_bytes
        self._table = [None] * TABLE_SIZE
        self.held_bytes -= released
        return released

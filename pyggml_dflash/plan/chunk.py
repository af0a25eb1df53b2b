"""How many prompt rows a forward may carry beside what is resident, and the numbers behind it. Layer 3.

Pure arithmetic on bytes that somebody measured: knows no architecture and allocates nothing. What
cannot be measured is `None`, and never fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

TILE: Final = 256  # chunks are whole multiples of it: rows of a kernel's tile
FLOOR: Final = 4096  # rows of the smallest chunk that keeps a large device busy
MAX_ROWS: Final = 32768  # row limit of the route-sort kernel for experts

Workspace = Callable[[int], "int | None"]  # rows of a chunk -> bytes that its forward takes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What one device has free and what of it a plan takes, by name; bytes."""

    device: str
    available: int
    headroom: int
    terms: Mapping[str, int] = field(hash=False)

    @property
    def required(self) -> int:
        """Everything that will be resident, and the headroom."""
        return sum(self.terms.values()) + self.headroom

    @property
    def balance(self) -> int:
        """Bytes left over; negative where they lack."""
        return self.available - self.required


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How many prompt rows one prefill forward carries at a context, and the measurements behind it.

    `available`, `required` and `position_bytes` are those of the device that binds; `shares` has all.
    """

    n_ctx: int
    chunk: int  # rows per forward; 0 when not even the smallest fits
    available: int  # bytes free before anything of the plan is allocated
    required: int | None  # all that is resident, a floor-sized chunk, the headroom; None: not measurable
    position_bytes: int  # one context position across every slot
    device: str = ""
    snapshot_bytes: int = 0  # of a state at the end of the context, as it is stored
    shares: tuple[DeviceShare, ...] = ()

    @property
    def fits(self) -> bool:
        """True if everything has room."""
        return self.required is not None and self.required <= self.available

    @property
    def missing(self) -> int:
        """Bytes that lack; for a plan that cannot be measured, what a quarter of the context takes."""
        if self.required is None:
            return self.n_ctx // 4 * self.position_bytes
        return max(0, self.required - self.available)

    @property
    def spare(self) -> int:
        """Bytes left over."""
        return 0 if self.required is None else max(0, self.available - self.required)


def binding_share(shares: tuple[DeviceShare, ...]) -> DeviceShare:
    """The device that lacks most, or has least left over."""
    return min(shares, key=lambda share: share.balance)


@dataclass(frozen=True, slots=True)
class ChunkFit:
    """The largest chunk that has room, and what is left to snapshots beside it."""

    chunk: int
    snapshot_bytes: int = 0


def fit_chunk(
    n_ctx: int,
    available: int,
    fixed: int,
    workspace: Workspace,
    *,
    snapshots: int | None = None,
    floor: int = FLOOR,
    max_rows: int = MAX_ROWS,
    headroom: int | None = None,
) -> ChunkFit:
    """The most rows, in whole tiles, whose workspace fits beside `fixed` bytes and the headroom.

    `snapshots`: bytes wanted for snapshots on the same device. A chunk at the floor comes before them
    and they come before a larger chunk. `workspace` must grow with the rows above two tiles.
    """
    budget = available - (available // 10 if headroom is None else headroom)
    workspace = cache(workspace)
    room_for_snapshots = 0
    if snapshots is not None:
        least = fit_chunk(min(n_ctx, floor, max_rows), available, fixed, workspace, headroom=headroom).chunk
        least_bytes = workspace(least) if least else None
        if least_bytes is None:
            return ChunkFit(0)
        room_for_snapshots = min(snapshots, budget - fixed - least_bytes)
        fixed += room_for_snapshots
    if n_ctx <= 0 or fixed >= budget:
        return ChunkFit(0, room_for_snapshots)
    return ChunkFit(_largest(min(n_ctx, max_rows), budget - fixed, workspace), room_for_snapshots)


def _largest(most: int, room: int, workspace: Workspace) -> int:
    """The largest whole number of tiles up to `most`; below two tiles the largest power of two."""

    def has_room(rows: int) -> bool:
        taken = workspace(rows)
        return taken is not None and taken <= room

    low, high = 1, most // TILE  # `low` is not known to fit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if has_room(TILE * middle) else (low, middle - 1)
    if low > 1:
        return TILE * low
    rows = TILE
    while rows > most:
        rows //= 2
    while rows and not has_room(rows):
        rows //= 2
    return rows

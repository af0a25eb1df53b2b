"""From how many prompt rows on experts in host memory are copied to the target and computed there. Layer 3.

A CPU computes few rows faster than their experts could be copied; for many rows a copy of every expert costs
less. Which rows are streamed depends on how the engine was opened and on the rows of a forward alone, so
that the numbers of a prompt do not depend on what else runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import Auto, HostMemory

# Beside an H200 16 CPU cores compute 600 rows a second with experts of 7.8 GB. Copying these takes as long as
# about 650 rows from ordinary memory, 200 from pinned memory: docs/measurements/h200-host-experts.md.
AUTO_ROWS: Final[dict[HostMemory, int]] = {"pageable": 1024, "pinned": 256}
CHUNK: Final = 4096  # rows of a chunk that the engine chooses, where memory allows: one copy for more rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Fewest rows of a forward whose experts are copied to the target; 0 for never, and why."""

    rows: int = 0
    pinned: bool = False  # the experts lie in memory that the target copies at full speed
    is_auto: bool = True  # nobody asked for it
    is_possible: bool = True  # there are experts in host memory, and a target that could copy them
    reason: str = ""

    @property
    def may_be_left_out(self) -> bool:
        """True if an engine that does not fit with it is to be tried without."""
        return self.is_auto and self.rows > 0

    @property
    def in_ordinary_memory(self) -> Streaming:
        """The same without pinned memory, where a copy takes longer."""
        return replace(self, rows=AUTO_ROWS["pageable"] if self.is_auto else self.rows, pinned=False)

    def without(self, reason: str) -> Streaming:
        """Experts that compute where they lie, and why."""
        return replace(self, rows=0, pinned=False, reason=reason)


NO_STREAMING: Final = Streaming()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What the user asked for, and what it meets."""

    rows: int | Auto
    memory: HostMemory
    repacks: bool  # CPU layouts are insisted on
    most_rows: int  # of a forward of a prompt
    target: str  # kind of the device that the rows belong to
    experts: str | None  # kind of the device beside it that has the experts; None: there is none
    lacks: str | None = None  # a tensor that the target cannot compute with


def choose_streaming(request: StreamRequest) -> Streaming:
    """As asked, or from `AUTO_ROWS` rows on beside a GPU; what cannot be raises `UsageError`."""
    obstacle = _obstacle(request)
    asked = request.rows
    if obstacle is not None:
        if isinstance(asked, int) and asked:
            raise UsageError(f"stream_experts is {asked}; {obstacle}")
        if request.memory == "pinned":
            raise UsageError(f"expert_memory is 'pinned', for experts that are streamed; {obstacle}")
        return Streaming(is_possible=False, reason=obstacle)
    why_not = _why_not(request)
    if why_not is not None and request.memory == "pinned":
        raise UsageError(f"expert_memory is 'pinned', for experts that are streamed; {why_not}")
    if why_not is not None:
        return Streaming(reason=why_not)
    rows = AUTO_ROWS[request.memory] if isinstance(asked, str) else asked
    return Streaming(rows=rows, pinned=request.memory == "pinned", is_auto=isinstance(asked, str))


def _obstacle(request: StreamRequest) -> str | None:
    """Why experts cannot be streamed, if so."""
    if request.experts != "cpu" or request.target == "cpu":
        return "no other device has experts in host memory: pass expert_device CPU beside another target"
    if request.repacks and request.rows != 0:
        return "experts in CPU layouts cannot be copied: leave out repack 'on'"
    if request.lacks is not None:
        return f"the target cannot compute with {request.lacks}"
    return None


def _why_not(request: StreamRequest) -> str | None:
    """Why experts that could be streamed are not, if so."""
    if isinstance(request.rows, int):
        return None if request.rows else "stream_experts is off"
    if request.target not in ("gpu", "igpu"):
        return "copies over a network would take longer"
    if request.most_rows < AUTO_ROWS[request.memory]:
        return f"no chunk has {AUTO_ROWS[request.memory]} rows"
    return None

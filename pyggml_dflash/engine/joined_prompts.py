"""Prompts of several slots in one forward: which may share one, and what it reads. Layer 6.

Every prompt has the rows that it would have alone: it attends to its own cache, goes on from its own state
and ends where it would end. What works row by row is made for the rows of all together, so weights are read
once. It reads the inputs of a chunk, in which the rows of all lie side by side and their masks one behind the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from pyggml_dflash.arch.base import Capture, GraphKey, OutputKind, Record, Step, Stretch
from pyggml_dflash.engine.batching import Batching
from pyggml_dflash.engine.forward import Model
from pyggml_dflash.engine.inputs import START, Inputs, bucketed
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.state.slot import Slot

LEAST_CHUNK: Final = 16  # whoever wants shorter chunks wants the memory, which parts of prompts take too
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The next rows of the prompt of a slot, and what is wanted of them."""

    slot: Slot
    tokens: Sequence[int]
    output: OutputKind  # 'none' or 'last'
    capture: bool  # record what a drafter reads


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Which prompts may share a forward: as many as come out as alone, and fit what one of a chunk takes."""

    model: Model
    batching: Batching
    n_ctx: int
    chunk: int

    @property
    def most_rows(self) -> int:
        """Rows of all together; 0: every prompt runs alone."""
        return min(self.batching.joined_rows.stop - 1, self.chunk) if self.chunk >= LEAST_CHUNK else 0

    @property
    def most_prompts(self) -> int:
        """How many: their last rows run like those of slots that decode together."""
        return self.batching.rows

    def takes(self, n: int) -> bool:
        """True if a prompt's `n` rows may share a forward with others."""
        return n in self.batching.joined_rows and n < self.most_rows

    def groups(self, wanted: Iterable[tuple[T, int, int]]) -> list[list[T]]:
        """In this order, those that share a forward with the ones before; each with its rows and `n_past`.

        The rows of the record that drafters read lie apart by one, so these are counted too.
        """
        groups, n_rows, n_tiled = list[list[T]](), 0, 0
        for one, n, n_past in wanted:
            tiled = self._tiled_kv(n, n_past)
            if groups and self._fits(len(groups[-1]) + 1, n_rows + n, n_tiled + tiled):
                groups[-1].append(one)
                n_rows, n_tiled = n_rows + n, n_tiled + tiled
            else:
                groups.append([one])
                n_rows, n_tiled = n, tiled
        return groups

    def _fits(self, n_prompts: int, n_rows: int, n_tiled: int) -> bool:
        recorded = n_rows + n_prompts - 1
        return (
            n_prompts <= self.most_prompts
            and n_rows <= self.most_rows
            and recorded <= self.chunk
            and n_tiled <= self.n_ctx
        )

    def _tiled_kv(self, n: int, n_past: int) -> int:
        """Cache rows of a mask that is kept with the rows of tiles: those of one context are planned for."""
        n_kv = bucketed(n_past + n)
        key = GraphKey(n_tokens=n, n_kv=n_kv, slot=0, output="none")
        return n_kv if self.model.in_tiles(key) else 0


def joined_step(
    g: GraphBuilder, model: Model, key: GraphKey, inputs: Inputs, record: Record, capture: Capture | None
) -> Step:
    """The inputs of a chunk as a graph that joins prompts sees them."""
    parts, at = [], START
    for part in key.parts:
        flash, tiled = model.uses_flash(part), model.in_tiles(part)
        own = capture if part.capture else None
        parts.append(inputs.step(g, part, flash, None, record, own, tiled=tiled, at=at))
        at = at.behind(part)
    stretches = tuple(Stretch(slot=slot, start=start, n=n, record={}) for slot, start, n in key.stretches)
    return replace(inputs.step(g, key, False, None), parts=tuple(parts), stretches=stretches)

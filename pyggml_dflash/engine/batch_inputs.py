"""What goes into a forward whose rows attend on their own, each as in a forward of one row. Layer 6.

In a batch every row is of another slot. Tokens, positions and cache rows of all rows lie side by side; masks,
and what an architecture asks for beyond these, are the slots' own: those of a forward of one row alone, so
that a batch of any slots is fed in the same way and a mask changes by one element from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy.typing as npt

from pyggml_dflash.arch.base import Capture, GraphKey, Record, Step
from pyggml_dflash.engine.inputs import Inputs
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import InputArena
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder


def with_parts(
    g: GraphBuilder,
    step: Step,
    own: Sequence[Inputs],
    flash_attn: Sequence[bool],
    record: Record | None,
    capture: Capture | None,
) -> Step:
    """The step with a part for each row, which has inputs of its own but stands where the step's row does."""
    parts = []
    for i, (key, inputs, flash) in enumerate(zip(step.key.parts, own, flash_attn, strict=True)):
        part = inputs.step(g, key, flash, None, record, capture if key.capture else None)
        positions, rows = g.only(step.positions, 0, i), g.only(step.rows, 0, i)
        parts.append(replace(part, positions=positions, rows=rows))
    return replace(step, parts=tuple(parts))


class BatchInputs:
    """The inputs of forwards of up to one row per slot."""

    def __init__(
        self, backend: Backend, ledger: Ledger, own: Sequence[Inputs], n_embd: int, *, embedded: bool
    ) -> None:
        """`own`: the inputs of one row of each slot, in the order of the slots; their owner closes them."""
        n, self._own = len(own), own
        self._n_embd, self._embedded = n_embd, embedded
        with ExitStack() as stack:
            self._arena = InputArena(
                backend,
                ledger,
                "inputs",
                {
                    "x": (ElementType.F32, n * n_embd) if embedded else (ElementType.I32, n),
                    "positions": (ElementType.I32, n),
                    "rows": (ElementType.I64, n),
                    "slots": (ElementType.I32, n),
                },
            )
            stack.callback(self._arena.close)
            self._stack = stack.pop_all()

    def step(self, g: GraphBuilder, key: GraphKey) -> Step:
        """The inputs of all rows as a graph of this key sees them; `with_parts` adds those of each."""
        arena, n = self._arena, key.n_tokens
        x = arena["x"].tensor
        return Step(
            key=key,
            tokens=None if self._embedded else g.view(x, (n,), (), 0),
            embeddings=g.view(x, (self._n_embd, n), (4 * self._n_embd,), 0) if self._embedded else None,
            positions=g.view(arena["positions"].tensor, (n,), (), 0),
            rows=g.view(arena["rows"].tensor, (n,), (), 0),
            mask=None,
            flash_attn=False,
            slots=g.view(arena["slots"].tensor, (n,), (), 0),
        )

    def fill(self, x: npt.ArrayLike, slots: Sequence[int], n_past: Sequence[int], n_ctx: int) -> None:
        """Write tokens or embedding rows, and where they stand; row i is the next one of `slots[i]`."""
        n = len(slots)
        width = n * self._n_embd if self._embedded else n
        values = (
            ("x", x, width),
            ("positions", n_past, n),
            ("rows", [slot * n_ctx + past for slot, past in zip(slots, n_past, strict=True)], n),
            ("slots", slots, n),
        )
        for name, value, size in values:
            self._arena[name].array[:size] = value
            self._arena[name].upload(0, size)
        for slot, past in zip(slots, n_past, strict=True):
            self._own[slot].show_one(past)

    def close(self) -> None:
        """Free the tensors."""
        self._stack.close()

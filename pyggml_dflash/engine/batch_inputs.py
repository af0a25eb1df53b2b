"""What goes into a forward whose rows attend on their own, each as in a forward of one row. Layer 6.

In a batch every row is of another slot; in a ragged forward a slot may have several, one behind the other.
Tokens, positions and cache rows of all rows lie side by side; masks, and what an architecture asks for beyond
these, are those of a forward of one row alone, so that any rows are fed in the same way and a mask changes by
few elements from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy.typing as npt

from pyggml_dflash.arch.base import Capture, GraphKey, Record, Step, Stretch
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
    """The inputs of forwards of up to `n` rows of several slots."""

    def __init__(self, backend: Backend, ledger: Ledger, n: int, n_embd: int, *, embedded: bool) -> None:
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
                    "log": (ElementType.I64, n),
                },
            )
            stack.callback(self._arena.close)
            self._stack = stack.pop_all()

    def step(
        self,
        g: GraphBuilder,
        key: GraphKey,
        records: Sequence[Record] = (),
        capture: Capture | None = None,
    ) -> Step:
        """The inputs of all rows as a graph of this key sees them; `with_parts` adds those of each.

        `records`: of a ragged forward, where each slot's rows are recorded.
        """
        arena, n = self._arena, key.n_tokens
        x, stretches = arena["x"].tensor, key.stretches if records else ()
        return Step(
            key=key,
            tokens=None if self._embedded else g.view(x, (n,), (), 0),
            embeddings=g.view(x, (self._n_embd, n), (4 * self._n_embd,), 0) if self._embedded else None,
            positions=g.view(arena["positions"].tensor, (n,), (), 0),
            rows=g.view(arena["rows"].tensor, (n,), (), 0),
            mask=None,
            flash_attn=False,
            slots=None if records else g.view(arena["slots"].tensor, (n,), (), 0),
            record=records[0] if records else None,
            capture=capture if records else None,
            log=g.view(arena["log"].tensor, (n,), (), 0) if records else None,
            stretches=tuple(
                Stretch(slot=slot, start=start, n=n_rows, record=record)
                for (slot, start, n_rows), record in zip(stretches, records, strict=False)
            ),
        )

    def fill(
        self,
        x: npt.ArrayLike,
        slots: Sequence[int],
        n_past: Sequence[int],
        n_ctx: int,
        own: Sequence[Inputs],
        log: Sequence[int] = (),
    ) -> None:
        """Write tokens or embedding rows, and where they stand; row i is of `slots[i]`, behind `n_past[i]`.

        `own`: what each row's own inputs are. `log`: the rows of the record that a ragged forward writes.
        """
        n = len(slots)
        width = n * self._n_embd if self._embedded else n
        values = (
            ("x", x, width),
            ("positions", n_past, n),
            ("rows", [slot * n_ctx + past for slot, past in zip(slots, n_past, strict=True)], n),
            ("slots", slots, n),
            ("log", log, len(log)),
        )
        for name, value, size in values:
            self._arena[name].array[:size] = value
            self._arena[name].upload(0, size)
        for inputs, past in zip(own, n_past, strict=True):
            inputs.show_one(past)

    def close(self) -> None:
        """Free the tensors."""
        self._stack.close()

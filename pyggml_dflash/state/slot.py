"""Slots: room for one sequence each, and how far it has come. Layer 5.

One arena holds every slot's state; the architecture's layout says which tensors. `n_past` moves only
when a forward has completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from pyggml_dflash.arch.base import StateLayout
from pyggml_dflash.ggml.arena import Home, SpreadArena, zero
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor

RECENT_TOKENS: Final = 8  # more than any n-gram that a model hashes


class Slot:
    """One sequence: `n_past` tokens are committed to its state, the newest of them are `recent`."""

    __slots__ = ("_n_written", "_offered", "_table", "id", "n_past", "recent", "torn")

    def __init__(self, table: SlotTable, id: int) -> None:
        self._table, self.id, self.n_past = table, id, 0
        self.recent: tuple[int, ...] = ()
        self._offered: Sequence[int] = ()
        self._n_written = 0  # positions that forwards wrote, committed or not
        self.torn = False  # a forward changed what has no copy, or may have, and was not committed

    def reset(self) -> None:
        """Forget the sequence: the next one starts as in a fresh process."""
        self._table.clear(self.id, self._n_written)
        self.n_past, self.recent, self._offered, self._n_written = 0, (), (), 0
        self.torn = False

    def offer(self, tokens: Sequence[int]) -> None:
        """Note the tokens of the forward that runs next; `commit` takes the first of them."""
        self._offered = tokens
        self._n_written = max(self._n_written, self.n_past + len(tokens))

    def commit(self, n_tokens: int) -> None:
        """Count the first `n_tokens` of the forward that has completed."""
        self.n_past += n_tokens
        self.torn = False
        assert self.n_past <= self._table.layout.n_ctx
        newest = self._offered[max(0, n_tokens - RECENT_TOKENS) : n_tokens]
        self.recent = (*self.recent, *newest)[-RECENT_TOKENS:]

    @property
    def n_written(self) -> int:
        """Positions that may hold anything, committed or not; all behind them are zero."""
        return self._n_written

    def vacate(self, n_tokens: int) -> None:
        """Hold nothing: whoever calls is about to write the state of up to `n_tokens` into the tensors."""
        self.n_past, self.recent, self._offered = 0, (), ()
        self._n_written = max(self._n_written, n_tokens)

    def resume(self, n_past: int, newest: Sequence[int]) -> None:
        """Stand behind `n_past` tokens, the `newest` at their end: the tensors hold their state and zeros."""
        assert len(newest) >= min(n_past, RECENT_TOKENS)
        self.n_past = self._n_written = n_past
        self.recent, self._offered = tuple(newest[-RECENT_TOKENS:]), ()


class SlotTable:
    """State tensors of `n_slots` slots, each where its layer computes; zeroed when made, since masked rows
    are still read."""

    def __init__(
        self, backend: Backend, ledger: Ledger, layout: StateLayout, n_slots: int, home: Home | None = None
    ) -> None:
        """`home`: by a tensor's name, the backend that holds it; None: `backend` holds all."""
        self.layout = layout
        with ExitStack() as stack:
            arena = SpreadArena(
                home or (lambda name: backend), ledger, "state", n_tensors=len(layout.tensors)
            )
            stack.callback(arena.close)
            self.tensors: dict[str, Tensor] = {
                t.name: arena.declare(t.name, t.type, *t.shape, n_slots) for t in layout.tensors
            }
            arena.allocate(zero=True)
            self.n_bytes = arena.n_bytes
            self._stack = stack.pop_all()
        self.slots = tuple(Slot(self, i) for i in range(n_slots))

    def clear(self, slot: int, n_positions: int) -> None:
        """Zero one slot's recurrent tensors, and of the others what the first `n_positions` wrote.

        A mask hides what is behind a sequence from it, but not NaN: zero times NaN is NaN.
        """
        for t in self.layout.tensors:
            n_used = -(-n_positions // t.positions_per_row) * t.type.row_bytes(t.shape[0])
            n_bytes = n_used if t.grows else t.n_bytes
            if n_bytes:
                zero(self.tensors[t.name], slot * t.n_bytes, n_bytes)

    def close(self) -> None:
        """Free the state."""
        self.tensors.clear()
        self._stack.close()

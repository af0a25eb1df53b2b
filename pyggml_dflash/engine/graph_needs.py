"""What the graphs of a whole context take, measured without memory. Layer 6.

Of every kind of forward the largest is measured, in each form and where attention changes its way.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pyggml_dflash.arch.base import Commit, GraphKey, OutputKind, StateUpdate
from pyggml_dflash.arch.tiled import TILE_ROWS
from pyggml_dflash.engine.batching import LARGEST, MOST_ROWS, most_ragged_rows
from pyggml_dflash.engine.inputs import BUCKET, bucketed
from pyggml_dflash.ggml.padding import MOST_PADDED
from pyggml_dflash.plan.measure import Build, MemoryProbe, last_of_each_run

if TYPE_CHECKING:
    from pyggml_dflash.engine.graphs import Forwards

# Graphs of some other numbers of rows have larger gaps, of up to such a part of what those looked at take.
LAID_OUT: Final = 8
SHORT_TAIL: Final = 16  # rows of a prompt's last chunk below which kernels take other paths


def forward_needs(forwards: Forwards, probe: MemoryProbe) -> int:
    """Bytes of the largest graph of a context, however slots will decode together.

    `forwards` may be those of a dry ledger. Graphs that they keep are forgotten.
    """
    before = forwards.batching
    if forwards.n_slots > 1:
        forwards.use(replace(LARGEST, joined_rows=range(1, forwards.most_joined + 1)))
    try:
        return _Needs(forwards, probe).find()
    finally:
        forwards.use(before)


class _Needs:
    """One look at the graphs of some forwards."""

    def __init__(self, forwards: Forwards, probe: MemoryProbe) -> None:
        self._forwards, self._probe = forwards, probe
        self._n_ctx = forwards.n_ctx
        self._captures = forwards.recording is not None
        self._depths = self._where_largest()

    def find(self) -> int:
        """The largest of all."""
        found = [self._largest(1, self._depths)]
        if self._forwards.n_slots > 1:
            found.append(self._probe.largest((key, self._builder(key)) for key in self._batches()))
            found.append(self._sharing())
        if self._forwards.recording is not None:
            found.append(self._speculation())
        chunks, end = self._chunks(), (self._n_ctx,)
        found += [self._largest(n, end) for n in chunks]
        return max(*found, self._scored(chunks))

    def _scored(self, chunks: Set[int]) -> int:
        """Of forwards that return the logits of all rows. Over few cache rows there may be no gap for what is
        alive beside these, so the largest is measured at the start of the context too."""
        most, end = self._forwards.scored_rows, (self._n_ctx,)
        found = [self._largest(min(n, most), end, output="all") for n in chunks]
        return max(*found, self._largest(most, (bucketed(most),), output="all"))

    def _largest(self, n_tokens: int, depths: Sequence[int], *, output: OutputKind = "last") -> int:
        keys = self._keys(n_tokens, depths, slot=0, output=output)
        return self._probe.largest((key, self._builder(key)) for key in keys)

    def _keys(
        self, n_tokens: int, depths: Sequence[int], *, slot: int, output: OutputKind = "last"
    ) -> list[GraphKey]:
        captures = self._captures and output == "last"  # where all rows are wanted nothing is drafted
        return [
            GraphKey(n_tokens=n_tokens, n_kv=n, slot=slot, output=output, capture=captures, form=form)
            for n, form in self._furthest(n_tokens, depths)
        ]

    def _batches(self) -> list[GraphKey]:
        """Batches of most rows, all of them at such a depth; rows use the same memory in turns."""
        n = min(self._forwards.n_slots, MOST_ROWS)
        rows = (self._keys(1, self._depths, slot=slot) for slot in range(n))
        return [GraphKey.batch(parts) for parts in zip(*rows, strict=True)]

    def _sharing(self) -> int:
        """Of forwards that prompts share; with room for such gaps where no chunk is far longer."""
        found = self._probe.largest((key, self._builder(key)) for key in self._joined())
        return found + (found // LAID_OUT if self._shared_may_be_largest else 0)

    @property
    def _shared_may_be_largest(self) -> bool:
        return self._forwards.chunk < 2 * self._forwards.prompt_limits.most_rows

    def _joined(self) -> list[GraphKey]:
        """Forwards that prompts share: of as many prompts as there may be, of two, and with the largest masks
        of tiles. Where no chunk is far longer, also of a long prompt and a short one, which may take most."""
        forwards, limits = self._forwards, self._forwards.prompt_limits
        if forwards.why_prompts_run_alone is not None or limits.most_rows < 2:
            return []
        rows, most = limits.most_rows, min(forwards.n_slots, limits.most_prompts)
        if forwards.model.in_tiles(self._keys(2, (self._n_ctx,), slot=0)[-1]):
            most = min(most, max(2, self._n_ctx // BUCKET))
        masks, found = self._with_large_masks(), list[GraphKey]()
        for n in {rows // most, rows // 2, *masks}:
            n_equal = min(most, rows // n) if n else 0
            rest = (rows - n * n_equal,) if n_equal < most and rows > n * n_equal else ()
            if n_equal + len(rest) > 1:
                found.append(self._joined_of((*(n,) * n_equal, *rest)))
        if self._shared_may_be_largest:
            pairs = {(rows - 1, 1), (1, rows - 1), (3, rows - 4), *((n, 1) for n in masks)}
            found += [self._joined_of(pair) for pair in pairs if min(pair) > 0 and sum(pair) <= rows]
        return found

    def _joined_of(self, sizes: Sequence[int]) -> GraphKey:
        """Prompts with so many rows each, as deep as they may be together."""
        in_tiles = self._forwards.model.in_tiles
        alone = [self._keys(n, (self._n_ctx,), slot=slot)[-1] for slot, n in enumerate(sizes)]
        tiled = [i for i, key in enumerate(alone) if in_tiles(key)]
        for i in tiled:
            share = max(1, self._n_ctx // BUCKET // len(tiled)) * BUCKET
            rest = self._n_ctx - share * (len(tiled) - 1) if i == tiled[0] else share
            alone[i] = replace(alone[i], n_kv=max(share, rest))
        return GraphKey.prompts(tuple(alone))

    def _builder(self, key: GraphKey | Commit) -> Build:
        return partial(self._forwards.builder, key)

    def _speculation(self) -> int:
        forwards, probe = self._forwards, self._probe
        recording = forwards.recording
        assert recording is not None
        width, update = recording.max_width, recording.update
        verifies = [
            GraphKey(n_tokens=width, n_kv=n, slot=0, output="all", update=update, capture=True, form=form)
            for n, form in self._furthest(width, self._depths)
        ]
        graphs: list[GraphKey | Commit] = [*verifies]
        if forwards.n_slots > 1:  # then rows may attend on their own
            alone = [replace(key, capture=False) for key in self._keys(1, self._depths, slot=0)]
            graphs += [
                replace(verifies[-1], n_kv=part.n_kv, form="", parts=(part,) * width) for part in alone
            ]
            graphs += self._ragged(width, update)
        commit = Commit(slot=0, update=update, width=width, n_keep=width)
        if forwards.records_state(commit):
            graphs.append(commit)
        return probe.largest((key, self._builder(key)) for key in graphs)

    def _ragged(self, width: int, update: StateUpdate) -> list[GraphKey]:
        """Verify forwards of most rows over most slots, all of them at such a depth."""
        n_slots = self._forwards.n_slots
        most = most_ragged_rows(n_slots, width)
        shares = [len(range(i, most, n_slots)) for i in range(n_slots)]
        rows = (self._keys(1, self._depths, slot=slot) for slot in range(n_slots))
        return [
            GraphKey.ragged(
                tuple(
                    replace(part, capture=False)
                    for part, n in zip(parts, shares, strict=True)
                    for _ in range(n)
                ),
                update,
            )
            for parts in zip(*rows, strict=True)
            if most
        ]

    def _chunks(self) -> set[int]:
        """Rows of the chunks at the end of the context that may take most: a tail, the most in each form,
        those with large masks, and the most whose experts compute where they lie."""
        form, n_ctx, chunk = self._forwards.form, self._n_ctx, self._forwards.chunk
        most = last_of_each_run(lambda n: form(n_ctx - n, n, n_ctx), 1, chunk + 1)
        found = {min(chunk, SHORT_TAIL), *most, *self._with_large_masks()}
        if self._forwards.model.paddings:  # then products of fewer rows are made of copies
            found.add(max(1, min(chunk, MOST_PADDED) - 1))
        if streamed := self._forwards.model.stream_rows:
            found.add(min(chunk, streamed - 1))
        if self._forwards.streams.n > 1:
            found.add(min(chunk, self._forwards.streams.least - 1))
        return found

    def _with_large_masks(self) -> list[int]:
        """Rows of tails whose masks have more rows than those of longer ones, which take more otherwise."""
        found, largest, rows = list[int](), 0, self._forwards.model.mask_rows
        for n in range(min(self._forwards.chunk, TILE_ROWS), 1, -1):
            if rows(n) > max(n, largest):
                found.append(n)
            largest = max(largest, rows(n))
        return found

    def _furthest(self, n_tokens: int, depths: Sequence[int]) -> list[tuple[int, str]]:
        """Cache rows and form of the furthest forwards of so many rows, up to each depth and in each form.

        Of one form the furthest is the largest, but a form that ends early can be larger than the next.
        """
        form = self._forwards.form
        found, start = [], 0
        for depth in depths:
            stop = depth - n_tokens + 1
            for n_past in last_of_each_run(lambda n: self._form_behind(n, n_tokens), start, stop):
                n_kv = bucketed(n_past + n_tokens)
                found.append((n_kv, form(n_past, n_tokens, n_kv)))
            start = stop
        return found

    def _form_behind(self, n_past: int, n_tokens: int) -> str:
        return self._forwards.form(n_past, n_tokens, bucketed(n_past + n_tokens))

    def _where_largest(self) -> tuple[int, ...]:
        """Cache rows where decode graphs are largest: where attention without flash ends, and at the end.

        Where prompts go row by row too, no other graph has what flash attention takes below that.
        """
        plain, n_ctx = self._forwards.model.plain_kv, self._n_ctx
        turns = (plain.start - 1, plain.stop - 1) if self._forwards.chunk == 1 else (plain.stop - 1,)
        found = (n // BUCKET * BUCKET for n in turns) if plain else ()
        return (*(n for n in found if n < n_ctx), n_ctx)

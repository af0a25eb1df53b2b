"""Forwards of one model: builds graphs, keeps those that come again, feeds and runs them. Layer 6.

A prefill graph is built for each chunk, since a chunk takes far longer than its build; all of them
share one allocator. Decode and verify graphs are kept: the topology has no `n_past`, only the number
of cache rows rounded up to a bucket, so a step writes four small inputs and runs.

With a `Recording`, forwards write what a drafter reads into tensors of their own, and verify forwards
leave the recurrent state alone until `commit` says how many of their rows stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Commit, FedRows, GraphKey, OutputKind, Step
from pyggml_dflash.engine.batch_inputs import BatchInputs, with_parts
from pyggml_dflash.engine.batching import UNMEASURED, Batching, most_ragged_rows
from pyggml_dflash.engine.forward import (
    MakeStep,
    Model,
    Recording,
    build_graph,
    record_layout,
    record_places,
)
from pyggml_dflash.engine.graph_cache import BuildCount, GraphCache, Relieve
from pyggml_dflash.engine.graph_needs import forward_needs
from pyggml_dflash.engine.inputs import BUCKET, Inputs, RowGather, bucketed
from pyggml_dflash.engine.prompt_streams import ONE_STREAM, PromptStreams
from pyggml_dflash.engine.record_space import RecordSpace
from pyggml_dflash.ggml.arena import Home, SpreadArena
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import builder_for
from pyggml_dflash.ggml.products import Product, products
from pyggml_dflash.ggml.tensor import Tensor, WeightKind
from pyggml_dflash.plan.measure import MemoryProbe
from pyggml_dflash.state.slot import RECENT_TOKENS, Slot, SlotTable

Logits = npt.NDArray[np.float32]
ALL_LOGITS_BYTES: Final = 64 * 2**20  # most bytes of logits that one teacher-forced forward returns


class Forwards:
    """Runs forwards over a table of slots. Never moves `n_past`: the caller commits."""

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        model: Model,
        slots: SlotTable,
        *,
        chunk: int,
        host: Backend | None,
        recording: Recording | None = None,
        relieve: Relieve | None = None,
        home: Home | None = None,
        streams: PromptStreams = ONE_STREAM,
    ) -> None:
        """`host`: a CPU backend to gather embedding rows on when `backend` is no host device.

        `home`: by a tensor's name, the backend that holds what is recorded of a layer; None: `backend` holds
        all. `streams`: how a chunk of a prompt is divided.
        """
        self.streams = streams
        self._home = home or (lambda name: backend)
        self._backend, self._ledger, self.model, self._slots = backend, ledger, model, slots
        self.n_ctx, self.chunk, self.recording = slots.layout.n_ctx, chunk, recording
        self.record: dict[str, Tensor] = {}
        self.built = BuildCount()
        self.batching = UNMEASURED
        self._joined: Logits | None = None
        self._records: tuple[dict[str, Tensor], ...] = ({},) * self.n_slots
        max_width = 1 if recording is None else recording.max_width
        self.space = RecordSpace(self.n_slots, max(chunk, max_width), max_width)
        # By slot, the row of the record that its next capture begins at.
        self.recorded = [self.space.own(i).first for i in range(self.n_slots)]
        n_ragged = 0 if recording is None else most_ragged_rows(self.n_slots, max_width)
        with ExitStack() as stack:
            self.feeder = model.architecture.feeder(model.config, model.weights)
            if self.feeder is not None:
                stack.callback(self.feeder.close)
            self.gather = None
            if host is not None:
                most = max(chunk, max_width, len(slots.slots), n_ragged)
                self.gather = RowGather(host, ledger, model.weights, most)
                stack.callback(self.gather.close)
            if recording is not None:
                self._allocate_record(stack, recording)
            self._ones = tuple(self._inputs(stack, 1) for _ in slots.slots)
            self._batch = self._batch_inputs(stack, max(self.n_slots, n_ragged))
            self._few = self._inputs(stack, max_width)
            self._streams = tuple(self._inputs(stack, rows) for rows in streams.most_rows(chunk))
            self._many = self._streams[0]
            n_apart = max(max_width, n_ragged) if len(slots.slots) > 1 and recording is not None else 0
            self._apart = tuple(self._inputs(stack, 1) for _ in range(n_apart))
            self._cache = GraphCache(backend, ledger, "graphs", relieve=relieve, built=self.built)
            stack.callback(self._cache.close)
            self._stack = stack.pop_all()

    def use(self, batching: Batching) -> None:
        """Decode as a probe found; graphs that were built before are forgotten."""
        self.batching = batching
        self.model = replace(self.model, paddings=batching.paddings)
        self._cache.clear()

    @property
    def cache_types(self) -> frozenset[ElementType]:
        """Element types of keys and values."""
        return frozenset(t.type for t in self._slots.layout.tensors if t.grows)

    @property
    def n_slots(self) -> int:
        """Sequences that there is room for."""
        return len(self._slots.slots)

    @property
    def scored_rows(self) -> int:
        """Most rows of a forward that returns the logits of all of them."""
        return max(1, min(self.chunk, ALL_LOGITS_BYTES // (4 * self.model.config.n_vocab)))

    @property
    def max_width(self) -> int:
        """Rows of the widest verify forward that may be chosen unasked.

        Where slots decode together a row must not tell what ran beside it, other rows of its slot included.
        """
        assert self.recording is not None
        most, batching = self.recording.max_width, self.batching
        return min(most, batching.verify_rows) if batching.exact and self.n_slots > 1 else most

    @property
    def is_host(self) -> bool:
        """True if a CPU computes."""
        return self._backend.is_host

    def _inputs(self, stack: ExitStack, max_rows: int) -> Inputs:
        embedded = self.gather is not None
        inputs = Inputs(
            self._backend,
            self._ledger,
            self.model.architecture,
            self.model.config,
            max_rows=max_rows,
            max_kv=self.n_ctx,
            embedded=embedded,
        )
        stack.callback(inputs.close)
        return inputs

    def _batch_inputs(self, stack: ExitStack, n_rows: int) -> BatchInputs | None:
        if len(self._ones) == 1:
            return None
        embedded, n_embd = self.gather is not None, self.model.config.n_embd
        inputs = BatchInputs(self._backend, self._ledger, n_rows, n_embd, embedded=embedded)
        stack.callback(inputs.close)
        return inputs

    def _allocate_record(self, stack: ExitStack, recording: Recording) -> None:
        tensors = record_layout(self.model, recording, self.space.n_rows)
        if not tensors:
            return
        places = record_places(self.model, recording, self.n_slots)
        n_tensors = len(tensors) + sum(len(place) for place in places)
        arena = SpreadArena(self._home, self._ledger, "speculation record", n_tensors=n_tensors)
        stack.callback(arena.close)
        self.record = {t.name: arena.declare(t.name, t.type, *t.shape) for t in tensors}
        more = [{t.name: arena.declare(t.name, t.type, *t.shape) for t in place} for place in places]
        arena.allocate(zero=True)
        self._records = (self.record, *({**self.record, **place} for place in more))

    def prefill(
        self,
        slot: Slot,
        tokens: Sequence[int],
        output: OutputKind,
        *,
        capture: bool = False,
        ahead: Sequence[int] = (),
    ) -> Logits | None:
        """Run up to `chunk` prompt tokens behind what the slot has; `capture`: record them behind `recorded`.

        Returns logits F32 [rows, n_vocab] of the last row or of all, or None for output 'none'. The
        array is a copy. `ahead`: the tokens of the next chunk, for what the host can prepare meanwhile.
        """
        n, n_past = len(tokens), slot.n_past
        n_kv = bucketed(n_past + n)
        key = GraphKey(
            n_tokens=n,
            n_kv=n_kv,
            slot=slot.id,
            output=output,
            capture=capture,
            form=self.form(n_past, n, n_kv),
        )
        keys = self.streams.keys(key, n_past, self.form)
        self._fill_streams(slot, tokens, keys)
        graph = self._cache.once(*self._build_streams(keys))
        try:
            if self.feeder is not None and ahead:
                first = ahead[: self.streams.rows(len(ahead))[0]]
                self.feeder.expect(first, (*slot.recent, *tokens)[-RECENT_TOKENS:])
            slot.torn = True
            results = graph.run()
            return None if output == "none" else np.concatenate(results)
        finally:
            graph.close()

    def picks(self, slot: Slot, tokens: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        """Run up to `chunk` prompt tokens behind what the slot has: per layer with experts which were chosen,
        I32 [n_tokens, n_used]."""
        n, n_past = len(tokens), slot.n_past
        n_kv = bucketed(n_past + n)
        key = GraphKey(n_tokens=n, n_kv=n_kv, slot=slot.id, output="all", form=self.form(n_past, n, n_kv))
        self._fill(self._many, slot, tokens, key)
        builder, _ = self._build(key, self._many)
        try:
            chosen = tuple(builder.output(builder.cont(x)) for x in builder.picks)
            graph = self._cache.once(builder, chosen)
            return [np.array(found, np.int32) for found in graph.run()]
        finally:
            builder.close()

    def decode(self, slot: Slot, token: int, *, capture: bool = False) -> Logits:
        """Run one token behind what the slot has: logits F32 [n_vocab], overwritten by the next call."""
        key, inputs = self._row_key(slot.id, slot.n_past, capture=capture), self._ones[slot.id]
        graph = self._cache.get(key, lambda: self._build(key, inputs))
        if capture:
            self._fill_log(inputs, slot, 1)
        x = token if self.gather is None else self.gather.gather((token,))[0]
        inputs.fill_one(x, slot.id, slot.n_past, self.n_ctx)
        self._feed(inputs, slot, (token,), key)
        slot.torn = True
        logits: Logits = graph.run()[0][0]
        return logits

    def _row_key(self, slot: int, n_past: int, *, capture: bool) -> GraphKey:
        n_kv = (n_past // BUCKET + 1) * BUCKET
        form = self.form(n_past, 1, n_kv)
        return GraphKey(n_tokens=1, n_kv=n_kv, slot=slot, output="last", capture=capture, form=form)

    def row_keys(self, slot: int, n_past: int, n: int) -> tuple[GraphKey, ...]:
        """Keys of `n` rows of a slot, one after the other, as if each were decoded."""
        return tuple(self._row_key(slot, n_past + i, capture=False) for i in range(n))

    def decode_batch(
        self, slots: Sequence[Slot], tokens: Sequence[int], *, capture: Collection[int] = ()
    ) -> Logits:
        """Run one token behind what each of several slots has: logits F32 [n, n_vocab], row i of `slots[i]`.

        They are overwritten by the next call. Slots in the order of their ids cost least. `capture`: the
        rows that are recorded, each where `recorded` says for its slot.
        """
        order = sorted(range(len(slots)), key=lambda i: slots[i].id)
        groups = _groups(order, self.batching.rows)
        if len(groups) == 1 and order == list(range(len(order))):
            return self._decode_group(slots, tokens, capture)
        if self._joined is None:
            self._joined = np.empty((self.n_slots, self.model.config.n_vocab), np.float32)
        for group in groups:
            captured = [i for i, row in enumerate(group) if row in capture]
            self._joined[group] = self._decode_group(
                [slots[i] for i in group], [tokens[i] for i in group], captured
            )
        return self._joined[: len(order)]

    def _decode_group(self, slots: Sequence[Slot], tokens: Sequence[int], capture: Collection[int]) -> Logits:
        """One forward for slots in the order of their ids."""
        if len(slots) == 1:
            return self.decode(slots[0], tokens[0], capture=0 in capture)[None]
        batch = self._batch
        assert batch is not None
        parts = tuple(
            self._row_key(slot.id, slot.n_past, capture=i in capture) for i, slot in enumerate(slots)
        )
        key = GraphKey.batch(parts)
        graph = self._cache.get(key, lambda: self._build(key, batch))
        x = tokens if self.gather is None else self.gather.gather(tokens).reshape(-1)
        ids = [slot.id for slot in slots]
        batch.fill(x, ids, [slot.n_past for slot in slots], self.n_ctx, [self._ones[id] for id in ids])
        for slot, token, part in zip(slots, tokens, parts, strict=True):
            if part.capture:
                self._fill_log(self._ones[slot.id], slot, 1)
            self._feed(self._ones[slot.id], slot, (token,), part)
            slot.torn = True
        return graph.run()[0]

    def verify(self, slot: Slot, tokens: Sequence[int]) -> Logits:
        """Run a few rows that may be taken back: logits F32 [n_tokens, n_vocab], as of the last call.

        Keys and values are written; the recurrent state is not, until `commit`.
        """
        assert self.recording is not None
        n, n_past = len(tokens), slot.n_past
        n_kv, apart = bucketed(n_past + n), 1 < n <= self.batching.verify_rows
        key = GraphKey(
            n_tokens=n,
            n_kv=n_kv,
            slot=slot.id,
            output="all",
            update=self.recording.update,
            capture=True,
            form="" if apart else self.form(n_past, n, n_kv),
            parts=self.row_keys(slot.id, n_past, n) if apart else (),
        )
        graph = self._cache.get(key, lambda: self._build(key, self._few))
        self._fill(self._few, slot, tokens, key)
        return graph.run()[0]

    def verify_ragged(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Logits:
        """As `verify`, a few rows of each of several slots in one forward: logits of all rows, in this order.

        Rows attend on their own, so each is as in a forward of one row, as far as products are the same for
        so many. `commit` finds a slot's rows by its place among the slots.
        """
        assert self.recording is not None
        batch = self._batch
        assert batch is not None
        each = list(zip(slots, tokens, strict=True))
        owners = [slot for slot, own in each for _ in own]
        depth = [slot.n_past + i for slot, own in each for i in range(len(own))]
        parts = tuple(self._row_key(s.id, at, capture=False) for s, at in zip(owners, depth, strict=True))
        key = GraphKey.ragged(parts, self.recording.update)
        graph = self._cache.get(key, lambda: self._build(key, batch))
        every = [token for own in tokens for token in own]
        x = every if self.gather is None else self.gather.gather(every).reshape(-1)
        log = [row for slot, own in each for row in self._rows_to_log(slot, len(own))]
        batch.fill(x, [slot.id for slot in owners], depth, self.n_ctx, self._apart[: len(parts)], log)
        first = 0
        for slot, own in each:
            self._feed_apart(slot, own, parts[first : first + len(own)], first)
            first += len(own)
        return graph.run()[0]

    def _feed_apart(self, slot: Slot, tokens: Sequence[int], parts: Sequence[GraphKey], first: int) -> None:
        """Feed rows of a slot that attend on their own, as if each were decoded."""
        slot.offer(tokens)
        if self.feeder is not None:
            for i, part in enumerate(parts):
                rows = self._fed_rows(slot, tokens[: i + 1], i, part)
                self._apart[first + i].feed(self.feeder, rows)

    def commit(self, slot: Slot, *, width: int, n_keep: int, place: int = 0) -> None:
        """Bring the recurrent state to the first `n_keep` of the `width` rows of the last verify forward.

        `place`: which one the slot was in a ragged forward.
        """
        assert self.recording is not None
        update = self.recording.update
        width = n_keep if update == "replay" else width  # which then is the same work
        commit = Commit(slot=slot.id, update=update, width=width, n_keep=n_keep, place=place)
        if self.records_state(commit):
            self._cache.get(commit, lambda: self._build_commit(commit)).run()

    def form(self, n_past: int, n_tokens: int, n_kv: int) -> str:
        """How the architecture builds such a forward; see `Architecture.form`."""
        model, host = self.model, self._backend.is_host
        return model.architecture.form(model.config, n_past, n_tokens, n_kv, host=host)

    def records_state(self, commit: Commit) -> bool:
        """True if there is anything to do for a commit."""
        model = self.model
        return bool(model.architecture.record_tensors(model.config, commit.update, commit.width))

    def needs(self, probe: MemoryProbe) -> int:
        """Bytes of the largest graph of a whole context, without running one."""
        return forward_needs(self, probe)

    def products(self) -> list[Product]:
        """Kinds of products with weights that decoding has, the smallest first."""
        found: dict[WeightKind, Product] = {}
        for n_past in (0, self.n_ctx - 1):  # a form of attention may have products of its own
            builder = self.builder(self._row_key(0, n_past, capture=False))
            try:
                found |= {product.kind: product for product in products(builder)}
            finally:
                builder.close()
        return sorted(found.values(), key=lambda product: product.n_bytes)

    def builder(self, key: GraphKey | Commit) -> GraphBuilder:
        """The graph of a forward or a commit, as it would be placed; the caller closes it."""
        if isinstance(key, Commit):
            return self._build_commit(key)[0]
        if key.slot < 0:
            assert self._batch is not None
            return self._build(key, self._batch)[0]
        is_verify = key.update != "commit"
        if key.n_tokens > 1 and not is_verify:
            keys = self.streams.keys(key, max(0, key.n_kv - key.n_tokens), self.form)
            return self._build_streams(keys)[0]
        return self._build(key, self._ones[key.slot] if key.n_tokens == 1 else self._few)[0]

    def _fill(self, inputs: Inputs, slot: Slot, tokens: Sequence[int], key: GraphKey) -> None:
        self._fill_streams(slot, tokens, (key,), (inputs,))
        for i, part in enumerate(key.parts):
            self._apart[i].show_one(slot.n_past + i)
            if self.feeder is not None:
                self._apart[i].feed(self.feeder, self._fed_rows(slot, tokens[: i + 1], i, part, apart=True))

    def _fill_streams(
        self,
        slot: Slot,
        tokens: Sequence[int],
        keys: Sequence[GraphKey],
        streams: Sequence[Inputs] | None = None,
    ) -> None:
        """Write the inputs of forwards that take one part of the tokens after the other."""
        x = tokens if self.gather is None else self.gather.gather(tokens)
        slot.offer(tokens)
        start = 0
        for key, inputs in zip(keys, self._streams if streams is None else streams, strict=False):
            n, n_past = key.n_tokens, slot.n_past + start
            part = x[start : start + n]
            inputs.fill(part if self.gather is None else np.reshape(part, -1), n, slot.id, n_past, self.n_ctx)
            if key.capture:
                self._fill_log(inputs, slot, n, start)
            if self.feeder is not None:
                inputs.feed(self.feeder, self._fed_rows(slot, tokens[: start + n], start, key))
            if not key.parts:
                inputs.fill_mask(n, n_past, key.n_kv)
            start += n

    def _fill_log(self, inputs: Inputs, slot: Slot, n: int, start: int = 0) -> None:
        inputs.fill_log(n, self._rows_to_log(slot, n, start).start)

    def _rows_to_log(self, slot: Slot, n: int, start: int = 0) -> range:
        first = self.recorded[slot.id] + start
        assert self.space.has(slot.id, first, n), "the record is full"
        return range(first, first + n)

    def _feed(self, inputs: Inputs, slot: Slot, tokens: Sequence[int], key: GraphKey) -> None:
        slot.offer(tokens)
        if self.feeder is not None:
            inputs.feed(self.feeder, self._fed_rows(slot, tokens, 0, key))

    def _fed_rows(
        self, slot: Slot, tokens: Sequence[int], start: int, key: GraphKey, *, apart: bool = False
    ) -> FedRows:
        """The tokens from `start` on, of those that come behind what the slot has."""
        assert len(slot.recent) == min(slot.n_past, RECENT_TOKENS), "the slot does not know its newest tokens"
        return FedRows(
            key=key,
            tokens=tokens[start:],
            before=(*slot.recent, *tokens[:start])[-RECENT_TOKENS:],
            n_past=slot.n_past + start,
            n_ctx=self.n_ctx,
            apart=apart,
        )

    def _build(self, key: GraphKey, inputs: Inputs | BatchInputs) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        return build_graph(
            self._backend, self.model, self._slots.tensors, [(key, self._step_maker(key, inputs))]
        )

    def _build_streams(self, keys: Sequence[GraphKey]) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        made = [(key, self._step_maker(key, own)) for key, own in zip(keys, self._streams, strict=False)]
        return build_graph(self._backend, self.model, self._slots.tensors, made)

    def _step_maker(self, key: GraphKey, inputs: Inputs | BatchInputs) -> MakeStep:
        model, recording = self.model, self.recording
        capture = recording.capture if recording is not None and key.capture else None

        def step(g: GraphBuilder) -> Step:
            if isinstance(inputs, BatchInputs) and key.update != "commit":
                records = self._records[: len(key.stretches)]
                whole, own = inputs.step(g, key, records, capture), list(self._apart[: len(key.parts)])
            elif isinstance(inputs, BatchInputs):
                whole, own = inputs.step(g, key), [self._ones[part.slot] for part in key.parts]
            else:
                flash, tiled = model.uses_flash(key), model.in_tiles(key)
                whole = inputs.step(g, key, flash, None, self.record, capture, tiled=tiled)
                own = list(self._apart[: len(key.parts)])
            flash_attn = [model.uses_flash(part) for part in key.parts]
            return with_parts(g, whole, own, flash_attn, self.record, capture) if own else whole

        return step

    def _build_commit(self, commit: Commit) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        model = self.model
        builder = builder_for(self._backend, model.architecture.max_nodes(model.config) + 64)
        try:
            model.architecture.build_commit(
                builder, model.config, model.weights, self._slots.tensors, self._records[commit.place], commit
            )
            return builder, ()
        except BaseException:
            builder.close()
            raise

    def close(self) -> None:
        """Free graphs, their memory and inputs."""
        self._stack.close()


def _groups(rows: list[int], most: int) -> list[list[int]]:
    """Rows in runs of about the same length, at most `most` each."""
    n = -(-len(rows) // most)
    ends = [len(rows) * i // n for i in range(n + 1)]
    return [rows[start:stop] for start, stop in pairwise(ends)]

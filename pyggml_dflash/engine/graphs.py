"""Forwards of one model: builds graphs, keeps those that come again, and runs them. Layer 6.

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

from pyggml_dflash.arch.base import Commit, GraphKey, OutputKind
from pyggml_dflash.engine.batch_inputs import BatchInputs
from pyggml_dflash.engine.batching import MOST_JOINED, MOST_JOINED_CPU, UNMEASURED, Batching
from pyggml_dflash.engine.forward import Model, Recording, build_graph, record_layout, record_places
from pyggml_dflash.engine.forward_inputs import ForwardInputs
from pyggml_dflash.engine.graph_cache import BuildCount, GraphCache, Relieve
from pyggml_dflash.engine.graph_needs import forward_needs
from pyggml_dflash.engine.inputs import BUCKET, Inputs, RowGather, bucketed
from pyggml_dflash.engine.joined_prompts import LEAST_CHUNK, PromptLimits, PromptRows
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
from pyggml_dflash.model.weights import HEAD
from pyggml_dflash.plan.measure import MemoryProbe
from pyggml_dflash.state.slot import Slot, SlotTable

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
        with ExitStack() as stack:
            self._inputs = ForwardInputs(
                backend,
                ledger,
                model,
                self.space,
                n_ctx=self.n_ctx,
                chunk=chunk,
                host=host,
                streams=streams,
            )
            stack.callback(self._inputs.close)
            if recording is not None:
                self._allocate_record(stack, recording)
            self._cache = GraphCache(backend, ledger, "graphs", relieve=relieve, built=self.built)
            stack.callback(self._cache.close)
            self._stack = stack.pop_all()

    def use(self, batching: Batching) -> None:
        """Decode as a probe found; graphs that were built before are forgotten, and hold no memory."""
        self.batching = batching
        self.model = replace(self.model, paddings=batching.paddings)
        self._cache.clear()

    @property
    def cache_types(self) -> frozenset[ElementType]:
        """Element types of keys and values."""
        return frozenset(t.type for t in self._slots.layout.tensors if t.grows)

    @property
    def gather(self) -> RowGather | None:
        """What reads embedding rows in host memory, where the backend is no host device."""
        return self._inputs.gather

    @property
    def recorded(self) -> list[int]:
        """By slot, the row of the record that its next capture begins at; a `Backlog` moves it."""
        return self._inputs.recorded

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
        key = self._chunk_key(PromptRows(slot, tokens, output, capture))
        keys = self.streams.keys(key, slot.n_past, self.form)
        self._inputs.fill_chunk(slot, tokens, keys)
        graph = self._cache.once(*self._build_chunk(keys))
        try:
            self._inputs.expect(slot, tokens, ahead[: self.streams.rows(len(ahead))[0]])
            slot.torn = True
            results = graph.run()
            return None if output == "none" else np.concatenate(results)
        finally:
            graph.close()

    def prefill_together(self, prompts: Sequence[PromptRows]) -> Logits | None:
        """As `prefill`, rows of the prompts of several slots in one forward, up to `chunk` of them together.

        Each attends and goes on from its state as alone. Logits F32 [n, n_vocab] of the last row of each that
        wants them, a copy; None if none does.
        """
        parts = tuple(self._chunk_key(prompt) for prompt in prompts)
        key = GraphKey.prompts(parts)
        self._inputs.fill_prompts(prompts, parts)
        graph = self._cache.once(*self._build(key, self._inputs.streams[0]))
        try:
            for prompt in prompts:
                prompt.slot.torn = True
            results = graph.run()
            return None if key.output == "none" else results[0].copy()
        finally:
            graph.close()

    @property
    def prompt_limits(self) -> PromptLimits:
        """Which prompts may share a forward."""
        return PromptLimits(self.model, self.batching, self.n_ctx, self.chunk)

    @property
    def most_joined(self) -> int:
        """Rows of the largest forward that prompts may share on this device."""
        most = MOST_JOINED_CPU if self._backend.info.kind in ("cpu", "rpc") else MOST_JOINED
        return min(most, self.chunk)

    @property
    def why_prompts_run_alone(self) -> str | None:
        """What keeps prompts from sharing a forward, whatever products give; None: nothing."""
        if self.chunk < LEAST_CHUNK:
            return f"chunks of {self.chunk} rows are shorter than {LEAST_CHUNK}"
        if len(self._backend.all) > 1:
            return "the model lies on several devices"
        if self._inputs.feeder is not None:
            return f"the host prepares what a prompt of {self.model.config.architecture} reads"
        return None

    @property
    def head_kind(self) -> WeightKind | None:
        """Of products with the head, which a prompt has for its last row alone."""
        return self.model.weights[HEAD].weight_kind

    def _chunk_key(self, prompt: PromptRows) -> GraphKey:
        n, n_past = len(prompt.tokens), prompt.slot.n_past
        n_kv = bucketed(n_past + n)
        return GraphKey(
            n_tokens=n,
            n_kv=n_kv,
            slot=prompt.slot.id,
            output=prompt.output,
            capture=prompt.capture,
            form=self.form(n_past, n, n_kv),
        )

    def picks(self, slot: Slot, tokens: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        """Run up to `chunk` prompt tokens behind what the slot has: per layer with experts which were chosen,
        I32 [n_tokens, n_used]."""
        key = self._chunk_key(PromptRows(slot, tokens, "all", False))
        self._inputs.fill_chunk(slot, tokens, (key,))
        builder, _ = self._build_chunk((key,))
        try:
            chosen = tuple(builder.output(builder.cont(x)) for x in builder.picks)
            graph = self._cache.once(builder, chosen)
            return [np.array(found, np.int32) for found in graph.run()]
        finally:
            builder.close()

    def decode(self, slot: Slot, token: int, *, capture: bool = False) -> Logits:
        """Run one token behind what the slot has: logits F32 [n_vocab], overwritten by the next call."""
        key = self._row_key(slot.id, slot.n_past, capture=capture)
        graph = self._cache.get(key, lambda: self._build(key, self._inputs.ones[slot.id]))
        self._inputs.fill_one(slot, token, key)
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
        parts = tuple(
            self._row_key(slot.id, slot.n_past, capture=i in capture) for i, slot in enumerate(slots)
        )
        key = GraphKey.batch(parts)
        graph = self._cache.get(key, lambda: self._build_batch(key))
        self._inputs.fill_batch(slots, tokens, parts)
        for slot in slots:
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
        graph = self._cache.get(key, lambda: self._build(key, self._inputs.few))
        self._inputs.fill_few(slot, tokens, key)
        return graph.run()[0]

    def verify_ragged(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Logits:
        """As `verify`, a few rows of each of several slots in one forward: logits of all rows, in this order.

        Rows attend on their own, so each is as in a forward of one row, as far as products are the same for
        so many. `commit` finds a slot's rows by its place among the slots.
        """
        assert self.recording is not None
        each = list(zip(slots, tokens, strict=True))
        parts = tuple(part for slot, own in each for part in self.row_keys(slot.id, slot.n_past, len(own)))
        key = GraphKey.ragged(parts, self.recording.update)
        graph = self._cache.get(key, lambda: self._build_batch(key))
        self._inputs.fill_ragged(each, parts)
        return graph.run()[0]

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
        if key.joins_prompts:
            return self._build(key, self._inputs.streams[0])[0]
        if key.mixes_slots:
            return self._build_batch(key)[0]
        if key.n_tokens == 1:
            return self._build(key, self._inputs.ones[key.slot])[0]
        if key.update != "commit":
            return self._build(key, self._inputs.few)[0]
        return self._build_chunk(self.streams.keys(key, max(0, key.n_kv - key.n_tokens), self.form))[0]

    def _build(self, key: GraphKey, inputs: Inputs | BatchInputs) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        return self._build_all([(key, inputs)])

    def _build_batch(self, key: GraphKey) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        assert self._inputs.batch is not None
        return self._build(key, self._inputs.batch)

    def _build_chunk(self, keys: Sequence[GraphKey]) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        return self._build_all(list(zip(keys, self._inputs.streams, strict=False)))

    def _build_all(
        self, forwards: Sequence[tuple[GraphKey, Inputs | BatchInputs]]
    ) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        """Forwards one behind the other in one graph."""
        model, recording = self.model, self.recording
        made = []
        for key, inputs in forwards:
            capture = recording.capture if recording is not None and key.capture else None
            made.append((key, self._inputs.maker(model, key, inputs, self._records, capture)))
        return build_graph(self._backend, model, self._slots.tensors, made)

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

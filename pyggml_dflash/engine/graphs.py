"""Forwards of one model: builds graphs, keeps those that come again, feeds and runs them. Layer 6.

A prefill graph is built for each chunk, since a chunk takes far longer than its build. Decode and verify
graphs are kept: the topology has no `n_past`, only the number of cache rows rounded up to a bucket, so a
step writes four small inputs and runs. All of them share one piece of memory.

With a `Recording`, forwards write what a drafter reads into tensors of their own, and verify forwards
leave the recurrent state alone until `commit` says how many of their rows stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import (
    Architecture,
    Capture,
    Commit,
    FedRows,
    GraphKey,
    OutputKind,
    StateTensor,
    StateUpdate,
    Step,
    Tap,
)
from pyggml_dflash.engine.graph_cache import BuildCount, GraphCache, Relieve
from pyggml_dflash.engine.inputs import BUCKET, Inputs, RowGather, bucketed
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import can_run
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import LoadedWeights
from pyggml_dflash.plan.measure import Build, MemoryProbe, last_of_each_run
from pyggml_dflash.state.slot import RECENT_TOKENS, Slot, SlotTable

SHORT_TAIL: Final = 16  # rows of a prompt's last chunk below which kernels take other paths

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Model:
    """What a forward is built from."""

    architecture: Architecture
    config: ModelConfig
    weights: LoadedWeights
    flash_attn: bool
    plain_kv: range = range(0)  # cache rows over which decode and verify attend without flash attention

    def uses_flash(self, key: GraphKey) -> bool:
        """Whether a forward of this key uses flash attention; the same for decode and verify."""
        is_prompt = key.n_tokens > 1 and key.update == "commit"
        return self.flash_attn and (is_prompt or key.n_kv not in self.plain_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What forwards record for a drafter, and how a verify forward can be taken back."""

    capture: Capture
    update: StateUpdate  # 'snapshots' or 'replay'
    max_width: int  # rows of the widest verify forward


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
    ) -> None:
        """`host`: a CPU backend to gather embedding rows on when `backend` is no host device."""
        self._backend, self._ledger, self.model, self._slots = backend, ledger, model, slots
        self.n_ctx, self.chunk, self.recording = slots.layout.n_ctx, chunk, recording
        self.record: dict[str, Tensor] = {}
        self.recorded = 0  # rows at the front of the record that captures leave alone
        self.built = BuildCount()
        max_width = 1 if recording is None else recording.max_width
        self.record_rows = max(chunk, max_width)
        with ExitStack() as stack:
            self.feeder = model.architecture.feeder(model.config, model.weights)
            if self.feeder is not None:
                stack.callback(self.feeder.close)
            self.gather = None
            if host is not None:
                self.gather = RowGather(host, ledger, model.weights, max(chunk, max_width))
                stack.callback(self.gather.close)
            if recording is not None:
                self._allocate_record(stack, recording)
            self._one = self._inputs(stack, 1)
            self._few = self._inputs(stack, max_width)
            self._many = self._inputs(stack, chunk)
            self._cache = GraphCache(backend, ledger, "graphs", relieve=relieve, built=self.built)
            stack.callback(self._cache.close)
            self._stack = stack.pop_all()

    @property
    def cache_types(self) -> frozenset[ElementType]:
        """Element types of keys and values."""
        return frozenset(t.type for t in self._slots.layout.tensors if t.grows)

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

    def _allocate_record(self, stack: ExitStack, recording: Recording) -> None:
        tensors = record_layout(self.model, recording, self.record_rows)
        if not tensors:
            return
        arena = TensorArena(self._backend, self._ledger, "speculation record", n_tensors=len(tensors))
        stack.callback(arena.close)
        self.record = {t.name: arena.declare(t.name, t.type, *t.shape) for t in tensors}
        arena.allocate(zero=True)

    def prefill(
        self,
        slot: Slot,
        tokens: Sequence[int],
        output: OutputKind,
        *,
        capture: bool = False,
        ahead: Sequence[int] = (),
    ) -> Logits | None:
        """Run up to `chunk` prompt tokens behind what the slot has; `capture`: record rows behind `recorded`.

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
            form=self._form(n_past, n, n_kv),
        )
        self._fill(self._many, slot, tokens, key)
        graph = self._cache.once(*self._build(key, self._many))
        if self.feeder is not None and ahead:
            self.feeder.expect(ahead, (*slot.recent, *tokens)[-RECENT_TOKENS:])
        try:
            slot.torn = True
            results = graph.run()
            return None if output == "none" else np.array(results[0], np.float32)
        finally:
            graph.close()

    def decode(self, slot: Slot, token: int, *, capture: bool = False) -> Logits:
        """Run one token behind what the slot has: logits F32 [n_vocab], overwritten by the next call."""
        n_past = slot.n_past
        n_kv = (n_past // BUCKET + 1) * BUCKET
        form = self._form(n_past, 1, n_kv)
        key = GraphKey(n_tokens=1, n_kv=n_kv, slot=slot.id, output="last", capture=capture, form=form)
        graph = self._cache.get(key, lambda: self._build(key, self._one))
        if capture:
            self._fill_log(self._one, 1)
        x = token if self.gather is None else self.gather.gather((token,))[0]
        self._one.fill_one(x, slot.id, n_past, self.n_ctx)
        self._feed(self._one, slot, (token,), key)
        slot.torn = True
        logits: Logits = graph.run()[0][0]
        return logits

    def verify(self, slot: Slot, tokens: Sequence[int]) -> Logits:
        """Run a few rows that may be taken back: logits F32 [n_tokens, n_vocab], as of the last call.

        Keys and values are written; the recurrent state is not, until `commit`.
        """
        assert self.recording is not None
        n, n_past = len(tokens), slot.n_past
        n_kv = bucketed(n_past + n)
        key = GraphKey(
            n_tokens=n,
            n_kv=n_kv,
            slot=slot.id,
            output="all",
            update=self.recording.update,
            capture=True,
            form=self._form(n_past, n, n_kv),
        )
        graph = self._cache.get(key, lambda: self._build(key, self._few))
        self._fill(self._few, slot, tokens, key)
        return graph.run()[0]

    def commit(self, slot: Slot, *, width: int, n_keep: int) -> None:
        """Bring the recurrent state to the first `n_keep` rows of the last verify forward of `width` rows."""
        assert self.recording is not None
        update = self.recording.update
        width = n_keep if update == "replay" else width  # which then is the same work
        commit = Commit(slot=slot.id, update=update, width=width, n_keep=n_keep)
        if self._records_state(commit):
            self._cache.get(commit, lambda: self._build_commit(commit)).run()

    def _form(self, n_past: int, n_tokens: int, n_kv: int) -> str:
        model, host = self.model, self._backend.is_host
        return model.architecture.form(model.config, n_past, n_tokens, n_kv, host=host)

    def _records_state(self, commit: Commit) -> bool:
        model = self.model
        return bool(model.architecture.record_tensors(model.config, commit.update, commit.width))

    def needs(self, probe: MemoryProbe) -> int:
        """Bytes of the largest graph of a whole context, without running one."""
        captures, depths = self.recording is not None, self._depths()

        def largest(n_tokens: int, depths: Sequence[int]) -> int:
            return probe.largest(
                self._to_measure(
                    GraphKey(n_tokens=n_tokens, n_kv=n, slot=0, output="last", capture=captures, form=form)
                )
                for n, form in self._furthest(n_tokens, depths)
            )

        found = [largest(1, depths)]
        if self.recording is not None:
            found.append(self._speculation_needs(probe, self.recording, depths))
        chunks = {min(self.chunk, SHORT_TAIL), *self._most_rows()}
        return max(*found, *(largest(n, (self.n_ctx,)) for n in chunks))

    def _speculation_needs(self, probe: MemoryProbe, recording: Recording, depths: Sequence[int]) -> int:
        width, update = recording.max_width, recording.update
        verifies = [
            GraphKey(n_tokens=width, n_kv=n, slot=0, output="all", update=update, capture=True, form=form)
            for n, form in self._furthest(width, depths)
        ]
        verify = probe.largest(map(self._to_measure, verifies))
        commit = Commit(slot=0, update=update, width=width, n_keep=width)
        if not self._records_state(commit):
            return verify
        return max(verify, probe.graph(commit, lambda: self._build_commit(commit)[0]).compute)

    def _most_rows(self) -> list[int]:
        """The most rows of a chunk at the end of the context in each form of a forward."""
        n_ctx = self.n_ctx
        return last_of_each_run(lambda n: self._form(n_ctx - n, n, n_ctx), 1, self.chunk + 1)

    def _furthest(self, n_tokens: int, depths: Sequence[int]) -> list[tuple[int, str]]:
        """Cache rows and form of the furthest forwards of so many rows, up to each depth and in each form.

        Of one form the furthest is the largest, but a form that ends early can be larger than the next.
        """
        found, start = [], 0
        for depth in depths:
            stop = depth - n_tokens + 1
            for n_past in last_of_each_run(lambda n: self._form_behind(n, n_tokens), start, stop):
                n_kv = bucketed(n_past + n_tokens)
                found.append((n_kv, self._form(n_past, n_tokens, n_kv)))
            start = stop
        return found

    def _form_behind(self, n_past: int, n_tokens: int) -> str:
        return self._form(n_past, n_tokens, bucketed(n_past + n_tokens))

    def _depths(self) -> tuple[int, ...]:
        """Cache rows where decode graphs are largest: where attention without flash ends, and at the end."""
        plain = self.model.plain_kv
        last_plain = (plain.stop - 1) // BUCKET * BUCKET
        return (last_plain, self.n_ctx) if plain and last_plain < self.n_ctx else (self.n_ctx,)

    def builder(self, key: GraphKey) -> GraphBuilder:
        """The graph of a forward, as it would be placed; the caller closes it."""
        is_verify = key.update != "commit"
        inputs = self._one if key.n_tokens == 1 else self._few if is_verify else self._many
        return self._build(key, inputs)[0]

    def _to_measure(self, key: GraphKey) -> tuple[GraphKey, Build]:
        return key, lambda: self.builder(key)

    def _fill(self, inputs: Inputs, slot: Slot, tokens: Sequence[int], key: GraphKey) -> None:
        x = tokens if self.gather is None else self.gather.gather(tokens).reshape(-1)
        inputs.fill(x, key.n_tokens, slot.id, slot.n_past, self.n_ctx)
        inputs.fill_mask(key.n_tokens, slot.n_past, key.n_kv)
        if key.capture:
            self._fill_log(inputs, key.n_tokens)
        self._feed(inputs, slot, tokens, key)

    def _fill_log(self, inputs: Inputs, n: int) -> None:
        assert self.recorded + n <= self.record_rows, "the record is full"
        inputs.fill_log(n, self.recorded)

    def _feed(self, inputs: Inputs, slot: Slot, tokens: Sequence[int], key: GraphKey) -> None:
        slot.offer(tokens)
        if self.feeder is None:
            return
        assert len(slot.recent) == min(slot.n_past, RECENT_TOKENS), "the slot does not know its newest tokens"
        rows = FedRows(key=key, tokens=tokens, before=slot.recent, n_past=slot.n_past, n_ctx=self.n_ctx)
        inputs.feed(self.feeder, rows)

    def _build(self, key: GraphKey, inputs: Inputs) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        state = self._slots.tensors
        return build_forward(
            self._backend, self.model, state, inputs, key, record=self.record, recording=self.recording
        )

    def _build_commit(self, commit: Commit) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        model = self.model
        builder = GraphBuilder(
            model.architecture.max_nodes(model.config) + 64, lambda op: can_run(self._backend, op)
        )
        try:
            model.architecture.build_commit(
                builder, model.config, model.weights, self._slots.tensors, self.record, commit
            )
            return builder, ()
        except BaseException:
            builder.close()
            raise

    def close(self) -> None:
        """Free graphs, their memory and inputs."""
        self._stack.close()


def record_layout(model: Model, recording: Recording, max_rows: int) -> tuple[StateTensor, ...]:
    """Tensors that forwards of up to `max_rows` rows record into."""
    config, capture = model.config, recording.capture
    found = list(model.architecture.record_tensors(config, recording.update, recording.max_width))
    if capture.layers:
        shape = (config.n_embd * len(capture.layers), max_rows)
        found.append(StateTensor(name="features", type=ElementType.F32, shape=shape, grows=False))
    if capture.hidden:
        shape = (config.hidden_width, max_rows + 1)  # row 0 is the one before the forward
        found.append(StateTensor(name="hidden", type=ElementType.F32, shape=shape, grows=False))
    return tuple(found)


def build_forward(
    backend: Backend,
    model: Model,
    state: dict[str, Tensor],
    inputs: Inputs,
    key: GraphKey,
    tap: Tap | None = None,
    record: dict[str, Tensor] | None = None,
    recording: Recording | None = None,
) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
    """A forward as a graph without memory, and what to read from it: the logits, if the key asks."""
    max_nodes = model.architecture.max_nodes(model.config) + 64
    builder = GraphBuilder(max_nodes, lambda op: can_run(backend, op))
    try:
        capture = recording.capture if recording is not None and key.capture else None
        step: Step = inputs.step(builder, key, model.uses_flash(key), tap, record, capture)
        logits = model.architecture.build(builder, model.config, model.weights, state, step)
        if logits is None:
            return builder, ()
        return builder, (builder.output(logits),)
    except BaseException:
        builder.close()
        raise

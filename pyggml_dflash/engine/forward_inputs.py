"""The inputs of all forwards over a table of slots, and how they are filled for each kind. Layer 6.

A forward of one row has inputs of its own for each slot, since its mask changes by few elements from step to
step. Chunks of a prompt, verify forwards of one slot and batches share one set each. Where a drafter follows,
it is written here too which rows of the record a forward captures into.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from pyggml_dflash.arch.base import Capture, FedRows, GraphKey, Record, Step
from pyggml_dflash.engine.batch_inputs import BatchInputs, with_parts
from pyggml_dflash.engine.batching import most_ragged_rows
from pyggml_dflash.engine.forward import MakeStep, Model
from pyggml_dflash.engine.inputs import START, Inputs, RowGather
from pyggml_dflash.engine.joined_prompts import PromptRows, joined_step
from pyggml_dflash.engine.prompt_streams import PromptStreams
from pyggml_dflash.engine.record_space import RecordSpace
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.state.slot import RECENT_TOKENS, Slot


class ForwardInputs:
    """What is filled before a forward runs. `recorded`: by slot, the row that its next capture begins at."""

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        model: Model,
        space: RecordSpace,
        *,
        n_ctx: int,
        chunk: int,
        host: Backend | None,
        streams: PromptStreams,
    ) -> None:
        """`host`: as of `Forwards`; `streams`: how a chunk is divided."""
        n_slots, width = space.n_slots, space.max_width
        n_ragged = most_ragged_rows(n_slots, width)
        self._backend, self._ledger, self._model, self._n_ctx = backend, ledger, model, n_ctx
        self._space = space
        self.recorded = [space.own(i).first for i in range(n_slots)]
        with ExitStack() as stack:
            self.feeder = model.architecture.feeder(model.config, model.weights)
            if self.feeder is not None:
                stack.callback(self.feeder.close)
            self.gather: RowGather | None = None
            if host is not None:
                self.gather = RowGather(host, ledger, model.weights, max(chunk, width, n_slots, n_ragged))
                stack.callback(self.gather.close)
            self.ones = tuple(self._inputs(stack, 1) for _ in range(n_slots))
            self.batch = self._batch_inputs(stack, max(n_slots, n_ragged)) if n_slots > 1 else None
            self.few = self._inputs(stack, width)
            self.streams = tuple(self._inputs(stack, rows) for rows in streams.most_rows(chunk))
            n_apart = max(width, n_ragged) if n_slots > 1 and width > 1 else 0
            self._apart = tuple(self._inputs(stack, 1) for _ in range(n_apart))
            self._stack = stack.pop_all()

    def _inputs(self, stack: ExitStack, max_rows: int) -> Inputs:
        inputs = Inputs(
            self._backend,
            self._ledger,
            self._model.architecture,
            self._model.config,
            max_rows=max_rows,
            max_kv=self._n_ctx,
            embedded=self.gather is not None,
        )
        stack.callback(inputs.close)
        return inputs

    def _batch_inputs(self, stack: ExitStack, n_rows: int) -> BatchInputs:
        n_embd, embedded = self._model.config.n_embd, self.gather is not None
        inputs = BatchInputs(self._backend, self._ledger, n_rows, n_embd, embedded=embedded)
        stack.callback(inputs.close)
        return inputs

    def fill_chunk(self, slot: Slot, tokens: Sequence[int], keys: Sequence[GraphKey]) -> None:
        """Write `streams` for forwards that take one part of a prompt's tokens after the other."""
        self._fill_in_turn(slot, tokens, keys, self.streams)

    def fill_prompts(self, prompts: Sequence[PromptRows], parts: Sequence[GraphKey]) -> None:
        """Write the first of `streams` for a forward that joins prompts, whose rows lie side by side."""
        every = [token for prompt in prompts for token in prompt.tokens]
        x = every if self.gather is None else self.gather.gather(every)
        inputs, at = self.streams[0], START
        for prompt, part in zip(prompts, parts, strict=True):
            slot, n, n_past = prompt.slot, part.n_tokens, prompt.slot.n_past
            slot.offer(prompt.tokens)
            own = x[at.row : at.row + n]
            rows = own if self.gather is None else np.reshape(own, -1)
            inputs.fill(rows, n, slot.id, n_past, self._n_ctx, at)
            if part.capture:
                inputs.fill_log(n, self._rows_to_log(slot, n).start, at)
            inputs.fill_mask(n, n_past, part.n_kv, at)
            at = at.behind(part)

    def fill_one(self, slot: Slot, token: int, key: GraphKey) -> None:
        """Write `ones` of a slot for its next token."""
        inputs = self.ones[slot.id]
        if key.capture:
            self._fill_log(inputs, slot, 1)
        x = token if self.gather is None else self.gather.gather((token,))[0]
        inputs.fill_one(x, slot.id, slot.n_past, self._n_ctx)
        self._feed(inputs, slot, (token,), key)

    def fill_batch(self, slots: Sequence[Slot], tokens: Sequence[int], parts: Sequence[GraphKey]) -> None:
        """Write `batch` and `ones` for the next token of each slot."""
        assert self.batch is not None
        x = tokens if self.gather is None else self.gather.gather(tokens).reshape(-1)
        own = [self.ones[slot.id] for slot in slots]
        self.batch.fill(x, [slot.id for slot in slots], [slot.n_past for slot in slots], self._n_ctx, own)
        for slot, token, part, inputs in zip(slots, tokens, parts, own, strict=True):
            if part.capture:
                self._fill_log(inputs, slot, 1)
            self._feed(inputs, slot, (token,), part)

    def fill_few(self, slot: Slot, tokens: Sequence[int], key: GraphKey) -> None:
        """Write `few` for a verify forward, whose rows attend together or each on its own."""
        self._fill_in_turn(slot, tokens, (key,), (self.few,))
        for i, part in enumerate(key.parts):
            self._apart[i].show_one(slot.n_past + i)
            if self.feeder is not None:
                self._apart[i].feed(self.feeder, self._fed_rows(slot, tokens[: i + 1], i, part, apart=True))

    def fill_ragged(self, each: Sequence[tuple[Slot, Sequence[int]]], parts: Sequence[GraphKey]) -> None:
        """Write `batch` for a verify forward over several slots, with tokens of each."""
        assert self.batch is not None
        owners = [slot for slot, own in each for _ in own]
        depth = [slot.n_past + i for slot, own in each for i in range(len(own))]
        every = [token for _, own in each for token in own]
        x = every if self.gather is None else self.gather.gather(every).reshape(-1)
        log = [row for slot, own in each for row in self._rows_to_log(slot, len(own))]
        rows = self._apart[: len(parts)]
        self.batch.fill(x, [slot.id for slot in owners], depth, self._n_ctx, rows, log)
        first = 0
        for slot, own in each:
            slot.offer(own)
            if self.feeder is not None:
                for i in range(len(own)):
                    fed = self._fed_rows(slot, own[: i + 1], i, parts[first + i])
                    rows[first + i].feed(self.feeder, fed)
            first += len(own)

    def expect(self, slot: Slot, tokens: Sequence[int], ahead: Sequence[int]) -> None:
        """Have the host prepare what comes behind `tokens`, while these are computed."""
        if self.feeder is not None and ahead:
            self.feeder.expect(ahead, (*slot.recent, *tokens)[-RECENT_TOKENS:])

    def maker(
        self,
        model: Model,
        key: GraphKey,
        inputs: Inputs | BatchInputs,
        records: Sequence[Record],
        capture: Capture | None,
    ) -> MakeStep:
        """What makes the step of a graph of this key, which reads `inputs`.

        `records`: where each slot of a ragged forward records, the first one where other forwards do.
        """

        def step(g: GraphBuilder) -> Step:
            if isinstance(inputs, BatchInputs) and key.update != "commit":
                whole = inputs.step(g, key, records[: len(key.stretches)], capture)
                own = self._apart[: len(key.parts)]
            elif isinstance(inputs, BatchInputs):
                whole, own = inputs.step(g, key), tuple(self.ones[part.slot] for part in key.parts)
            elif key.joins_prompts:
                return joined_step(g, model, key, inputs, records[0], capture)
            else:
                flash, tiled = model.uses_flash(key), model.in_tiles(key)
                whole = inputs.step(g, key, flash, None, records[0], capture, tiled=tiled)
                own = self._apart[: len(key.parts)]
            flash_attn = [model.uses_flash(part) for part in key.parts]
            return with_parts(g, whole, own, flash_attn, records[0], capture) if own else whole

        return step

    def _fill_in_turn(
        self, slot: Slot, tokens: Sequence[int], keys: Sequence[GraphKey], each: Sequence[Inputs]
    ) -> None:
        x = tokens if self.gather is None else self.gather.gather(tokens)
        slot.offer(tokens)
        start = 0
        for key, inputs in zip(keys, each, strict=False):
            n, n_past = key.n_tokens, slot.n_past + start
            part = x[start : start + n]
            rows = part if self.gather is None else np.reshape(part, -1)
            inputs.fill(rows, n, slot.id, n_past, self._n_ctx)
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
        assert self._space.has(slot.id, first, n), "the record is full"
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
            n_ctx=self._n_ctx,
            apart=apart,
        )

    def close(self) -> None:
        """Free them, the feeder and the gathered table's graph."""
        self._stack.close()

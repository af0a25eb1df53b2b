"""Sparse attention of qwen4exp: the indexer's keys, the choice of groups, attention over the chosen. Layer 4.

Every forward stores its raw keys and pools the groups that it completes, whatever its form; `indexer`
tells what the inputs mean and who may see what. The choice of groups stays on the device. Groups of
equal score, which are common since scores are rectified, are taken lowest first: the tie-break is too
small to change the sum of any other score.

Shapes are ggml's, fastest dimension first: d is the indexer's head_dim, M the number of rows of the
forward, n_pool the number of groups in the cache rows that it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.arch.base import GraphKey, State, StateTensor, Step
from pyggml_dflash.arch.blocks import KVView, apart, attend, norm, project_qkv, rope_params
from pyggml_dflash.arch.qwen4exp.indexer import MAX_GATHERED, AttentionForm, IndexerConfig
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import BlockWeights

# Times the group's number, this is taken off its score. Scores of use are above 1e-18, where a float
# does not notice; 2^24 groups stay below that.
TIE_BREAK: Final = 1e-30
PART_ROWS: Final = 16  # rows whose copies lie in memory at a time, 10 MB each for the published model


def max_sparse_nodes(config: IndexerConfig) -> int:
    """An upper bound on the operations of one layer's attention, projections included."""
    parts = -(-MAX_GATHERED // PART_ROWS)
    return 96 + 4 * config.n_head + 3 * config.ratio.bit_length() + 16 * parts


def max_part_nodes(config: IndexerConfig) -> int:
    """The same for what a row of a batch does alone."""
    return 80 + 4 * config.n_head + 3 * config.ratio.bit_length()


def index_state(layer: int, config: IndexerConfig, n_ctx: int) -> tuple[StateTensor, StateTensor]:
    """What a sparse layer keeps beside keys and values: the ring of raw keys, and a pooled key per group.

    Both are F32: the choice follows small differences, pooled keys take a sixteenth of what F16 keys and
    values of the published model take, and the CPU reads them three times as fast as F16.
    """
    d, f32 = config.head_dim, ElementType.F32
    pooled = (d, n_ctx // config.ratio)
    return (
        StateTensor(name=f"blk.{layer}.index_raw", type=f32, shape=(d, config.n_raw), grows=False),
        StateTensor(
            name=f"blk.{layer}.index_pooled",
            type=f32,
            shape=pooled,
            grows=True,
            positions_per_row=config.ratio,
        ),
    )


@dataclass(frozen=True, slots=True)
class IndexedKV:
    """The cache of a sparse layer, all slots.

    Keys and values, the ring of raw keys F32 [d, n_raw, slot], pooled keys F32 [d, n_ctx / ratio, slot].
    """

    kv: KVView
    raw: Tensor
    pooled: Tensor

    @classmethod
    def of(cls, state: State, layer: int, config: ModelConfig) -> IndexedKV:
        """The cache of `layer`."""
        kv = KVView.of(state, layer, config)
        return cls(kv, state[f"blk.{layer}.index_raw"], state[f"blk.{layer}.index_pooled"])

    def known_raw(self, g: GraphBuilder, slot: int, new: Tensor) -> Tensor:
        """[d, n_raw + M]: the slot's ring with the forward's raw keys [d, M] behind it, as of now."""
        d, n_raw, _, _ = self.raw.shape
        _, row, stride, _ = self.raw.strides
        return g.expand(g.concat(g.view(self.raw, (d, n_raw), (row,), slot * stride), new, 1))

    def write_raw(self, g: GraphBuilder, new: Tensor, rows: Tensor) -> None:
        """Store the last raw keys of [d, M] at `rows`, counted over all slots."""
        d, n_raw, n_slots, _ = self.raw.shape
        n_kept, row = rows.shape[0], new.strides[1]
        kept = g.view(new, (d, n_kept), (row,), (new.shape[1] - n_kept) * row)
        g.expand(g.set_rows(g.reshape(self.raw, d, n_raw * n_slots), kept, rows))

    def write_pooled(self, g: GraphBuilder, new: Tensor, groups: Tensor) -> None:
        """Store pooled keys [d, 1, n] at `groups`, counted over all slots."""
        d, n_groups, n_slots, _ = self.pooled.shape
        flat = g.expand(g.reshape(self.pooled, d, n_groups * n_slots))
        rows = g.view(new, (d, groups.shape[0]), (new.strides[2],), 0)
        g.expand(g.set_rows(flat, rows, groups))

    def pooled_keys(self, g: GraphBuilder, slot: int, n_pool: int) -> Tensor:
        """[d, n_pool] of a slot."""
        _, row, stride, _ = self.pooled.strides
        return g.view(self.pooled, (self.pooled.shape[0], n_pool), (row,), slot * stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStep:
    """The indexer's inputs of one forward as tensors, made once and shared by its layers."""

    form: AttentionForm
    raw_rows: Tensor  # I64 [rows of the ring that are written]
    members: Tensor  # I32 [ratio * n_new]
    groups: Tensor  # I64 [n_new]
    positions: Tensor  # I32 [n_new]
    choice: Choice | None  # unless the form is dense

    @classmethod
    def of(
        cls, g: GraphBuilder, inputs: Mapping[str, Tensor], config: IndexerConfig, form: AttentionForm,
        key: GraphKey,
    ) -> IndexStep:  # fmt: skip
        """The flat inputs of `index_inputs` as a graph of this key and form sees them."""

        def first(name: str, n: int) -> Tensor:
            return g.view(inputs[f"index.{name}"], (n,), (), 0)

        n_new = config.n_new(key.n_tokens)
        return cls(
            form=form,
            raw_rows=first("raw_rows", min(key.n_tokens, config.n_raw)),
            members=first("members", n_new * config.ratio),
            groups=first("groups", n_new),
            positions=first("positions", n_new),
            choice=None if form == "dense" else Choice.of(g, inputs, config, form, key),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the choice of groups reads: mask F16 [n_pool, M], tie_break F32 [n_pool], and the tails.

    tails I32 [1, M] where the form is masked; gathered: [n_tail, M], with visible F16 [n, 1, 1, M] over
    the n = ratio * n_gathered cache rows that a row gathers.
    """

    mask: Tensor
    tie_break: Tensor
    tails: Tensor
    visible: Tensor | None

    @classmethod
    def of(
        cls, g: GraphBuilder, inputs: Mapping[str, Tensor], config: IndexerConfig, form: AttentionForm,
        key: GraphKey,
    ) -> Choice:  # fmt: skip
        """The flat inputs as a graph of this key and form sees them."""
        n_pool, m = key.n_kv // config.ratio, key.n_tokens
        n_tail, n = (config.n_tail, config.n_gathered * config.ratio) if form == "gathered" else (1, 0)
        visible = inputs["index.gathered_mask"]
        return cls(
            mask=g.view(inputs["index.mask"], (n_pool, m), (2 * n_pool,), 0),
            tie_break=g.scale(g.count(n_pool), -TIE_BREAK),
            tails=g.view(inputs["index.tails"], (n_tail, m), (4 * n_tail,), 0),
            visible=g.view(visible, (n, 1, 1, m), (2 * n, 2 * n, 2 * n), 0) if n else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayer:
    """One sparse attention layer: sizes, weights and cache. Its methods append to a graph."""

    config: ModelConfig
    indexer: IndexerConfig
    w: BlockWeights
    cache: IndexedKV

    def attention(
        self,
        g: GraphBuilder,
        x: Tensor,
        step: Step,
        index: IndexStep | None,
        parts: tuple[IndexStep, ...] = (),
    ) -> Tensor:
        """Attention over the chosen groups and the tail, times sigmoid(gate): [head_dim * head, M].

        x [n_embd, M] feeds attention and indexer alike. The query projection holds, head by head, the
        query rows and then the gate rows. Writes keys, values, raw and pooled keys. `parts`: those of the
        step's parts, which then choose each for itself; `index` is None where they are of several slots.
        """
        config, w, d, n_tokens = self.config, self.w, self.config.head_dim, x.shape[1]
        both, k, v = project_qkv(g, w, x, config, 2 * d)  # [2 * head_dim, head, M]
        shape, strides = (d, config.n_head, n_tokens), (both.strides[1], both.strides[2])
        q, gate = g.view(both, shape, strides, 0), g.view(both, shape, strides, 4 * d)
        q = self._turned(g, q, "attn_q_norm", step.positions)
        k = self._turned(g, k, "attn_k_norm", step.positions)
        self.cache.kv.write(g, k, v, step.rows)
        raw = w.linear(g, "indexer.k_proj", x)  # [index d, M]
        if index is not None:
            self._store_keys(g, raw, step.key.slot, index)
        else:
            for i, part in enumerate(parts):
                self._store_keys(g, g.only(raw, 1, i), step.parts[i].key.slot, part)
        if not parts:
            assert index is not None
            wanted = None if index.choice is None else self._index_queries(g, x, step)
            out = self._attend(g, q, wanted, step, index)
        else:
            any_choice = any(part.choice is not None for part in parts)
            all_wanted = self._index_queries(g, x, step) if any_choice else None

            def attend_alone(part: Step, i: int) -> Tensor:
                wanted = None if all_wanted is None else g.only(all_wanted, 2, i)
                return self._attend(g, g.only(q, 2, i), wanted, part, parts[i])

            out = apart(g, step, attend_alone)
        gate = g.cont_2d(gate, d * config.n_head, n_tokens)
        return g.mul(out, g.sigmoid(gate))

    def _attend(
        self, g: GraphBuilder, q: Tensor, wanted: Tensor | None, step: Step, index: IndexStep
    ) -> Tensor:
        """Attention of q [head_dim, head, M] over what the indexer's queries [d, head, M] choose."""
        choice = index.choice
        if choice is None or wanted is None:
            return attend(g, q, self.cache.kv, step, self.config.attn_scale)
        scores = self._scores(g, wanted, step, choice)
        chosen = g.best_k(scores, self.indexer.n_chosen)  # [n_chosen, M]
        step.show("index_scores", scores)
        step.show("index_chosen", chosen)
        if index.form == "masked":
            return self._attend_masked(g, q, step, scores, chosen, choice)
        with g.at(self.cache.kv.k):  # rows of the cache stay where they are
            return self._attend_gathered(g, q, step, chosen, choice)

    def write_keys(self, g: GraphBuilder, x: Tensor, slot: int, index: IndexStep) -> None:
        """Store the raw keys of x [n_embd, M], and the pooled keys of the groups that they complete."""
        self._store_keys(g, self.w.linear(g, "indexer.k_proj", x), slot, index)

    def _store_keys(self, g: GraphBuilder, raw: Tensor, slot: int, index: IndexStep) -> None:
        known = self.cache.known_raw(g, slot, raw)
        self.cache.write_raw(g, raw, index.raw_rows)

        d, ratio, n_new = self.indexer.head_dim, self.indexer.ratio, index.groups.shape[0]
        total = g.reshape(g.get_rows(known, index.members), d * ratio, n_new)  # members side by side
        while total.shape[0] > d:  # halves are added until one key is left
            half, row = total.shape[0] // 2, total.strides[1]
            left, right = (g.view(total, (half, n_new), (row,), 4 * half * i) for i in range(2))
            total = g.add(left, right)
        mean = g.scale(g.reshape(total, d, 1, n_new), 1.0 / ratio)
        pooled = self._turned(g, mean, "indexer.k_norm", index.positions)
        self.cache.write_pooled(g, pooled, index.groups)

    def scores(self, g: GraphBuilder, x: Tensor, step: Step, choice: Choice) -> Tensor:
        """How much each row of x [n_embd, M] wants each group: F32 [n_pool, M], -inf if it cannot see it."""
        return self._scores(g, self._index_queries(g, x, step), step, choice)

    def _index_queries(self, g: GraphBuilder, x: Tensor, step: Step) -> Tensor:
        q = self.w.linear(g, "indexer.q_proj", x)
        q = g.reshape(q, self.indexer.head_dim, self.indexer.n_head, x.shape[1])
        return self._turned(g, q, "indexer.q_norm", step.positions)

    def _scores(self, g: GraphBuilder, q: Tensor, step: Step, choice: Choice) -> Tensor:
        d = self.indexer.head_dim
        keys = self.cache.pooled_keys(g, step.key.slot, choice.mask.shape[0])
        return g.add(g.lightning_indexer(q, keys, choice.mask, d**-0.5), choice.tie_break)

    def _turned(self, g: GraphBuilder, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """x [d, head, n], normalised and rotated."""
        x = norm(g, x, self.w[f"{name}.weight"], self.config.norm_eps)
        return g.rope(x, positions, None, rope_params(self.config.rope))

    def _attend_masked(
        self, g: GraphBuilder, q: Tensor, step: Step, scores: Tensor, chosen: Tensor, choice: Choice
    ) -> Tensor:
        """Attention over all cache rows with a mask that leaves the chosen groups and the tail.

        A row that sees fewer groups than it may choose also gets some that it does not see. They lie at
        or behind its tail, so the causal mask hides them.
        """
        assert step.mask is not None
        n_pool, m = choice.mask.shape[0], choice.mask.shape[1]
        n, n_chosen = n_pool + 1, chosen.shape[0]  # a full cache has its tail behind the last group
        zeros = g.fill(g.view(scores, (1, n_chosen, m), (4, 4 * n_chosen), 0), 0.0)
        taken = g.fill(g.view(step.mask, (1, n, m), (2, 2 * n), 0), float("-inf"))
        taken = g.set_rows(taken, zeros, chosen)
        taken = g.set_rows(taken, g.view(zeros, (1, 1, m), (4, 4 * n_chosen), 0), choice.tails)
        taken = g.view(taken, (1, n_pool, m), (2, 2 * n), 0)
        mask = g.add(g.reshape(step.mask, self.indexer.ratio, n_pool, m), taken)
        mask = g.reshape(mask, step.key.n_kv, m)
        return attend(g, q, self.cache.kv, step, self.config.attn_scale, mask, self.indexer.dense_limit)

    def _attend_gathered(
        self, g: GraphBuilder, q: Tensor, step: Step, chosen: Tensor, choice: Choice
    ) -> Tensor:
        """Attention over copies of the chosen groups and the tail, each row with its own.

        Some rows at a time, so that few copies lie in memory. Their outputs take the place of their
        queries, which also keeps the parts in order.
        """
        d, n_head, n_tokens = q.shape[:3]
        n = self.indexer.n_gathered
        groups = g.concat(chosen, choice.tails, 0)  # [n, M]
        rows, width = g.reshape(q, d * n_head, n_tokens), 4 * d * n_head
        for first in range(0, n_tokens, PART_ROWS):
            m = min(PART_ROWS, n_tokens - first)
            some = g.view(groups, (n * m,), (), 4 * n * first)
            keys, values = (self._gather(g, x, step, some) for x in (self.cache.kv.k, self.cache.kv.v))
            queries = g.view(rows, (d, 1, n_head, m), (4 * d, 4 * d, width), width * first)
            assert choice.visible is not None
            mask, row = choice.visible, choice.visible.strides[3]
            mask = g.view(mask, (mask.shape[0], 1, 1, m), (row, row, row), row * first)
            out = self._attend_apart(g, queries, keys, values, mask, flash_attn=step.flash_attn)
            rows = out if m == n_tokens else g.put(rows, out, first)
        return rows

    def _attend_apart(
        self, g: GraphBuilder, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, flash_attn: bool
    ) -> Tensor:
        """Attention of q [head_dim, 1, head, m], each row over keys and values of its own."""
        d, _, n_head, m = q.shape
        if flash_attn:
            return g.reshape(g.flash_attn(q, keys, values, mask, self.config.attn_scale), d * n_head, m)
        weights = g.accumulate_f32(g.mul_mat(keys, q))  # [key, 1, head, m]
        weights = g.soft_max(weights, mask, self.config.attn_scale)
        return g.reshape(g.mul_mat(g.cont(g.transpose(values)), weights), d * n_head, m)

    def _gather(self, g: GraphBuilder, cache: Tensor, step: Step, groups: Tensor) -> Tensor:
        """F32 [head_dim, n, head_kv, m]: m rows' own n cache rows, of I32 `groups` [n_gathered * m]."""
        width, d, ratio = self.config.kv_dim, self.config.head_dim, self.indexer.ratio
        n, m = self.indexer.n_gathered * ratio, groups.shape[0] // self.indexer.n_gathered
        _, row, slot, _ = cache.strides
        shape = (width * ratio, step.key.n_kv // ratio)  # a group's rows lie side by side
        rows = g.get_rows(g.view(cache, shape, (row * ratio,), step.key.slot * slot), groups)
        return g.view(rows, (d, n, self.config.n_head_kv, m), (4 * width, 4 * d, 4 * width * n), 0)

"""The n-gram embedding's part of the forward (PLE): what it adds to the residual before its layer. Layer 4.

A token's rows of the table, side by side, give one key per stream and one value. How well a stream's
key suits the residual decides how much of the value it gets; a causal convolution over these gated
values, which reaches back in steps of the n-gram's length, is added. Its past is the slot's history:
the newest columns of its input. Shapes are ggml's: D is n_embd, C the number of streams, M the rows of
the forward, which are S sequences of M / S tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.arch.base import Commit, Record, State, StateTensor
from pyggml_dflash.arch.blocks import norm, read_slots, write_slots
from pyggml_dflash.arch.qwen4exp.ngram import NgramConfig
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.weights import BlockWeights, TensorSpec, matrix, vector

MIN_SCORE: Final = 1e-6  # below it the root of a score is no longer taken; part of the model's definition


def ple_specs(file: GgufFile, config: NgramConfig, n_embd: int, n_stream: int) -> list[TensorSpec]:
    """The tensors of the module; its table is no weight, see `ngram`."""
    prefix, n_all = f"blk.{config.layer}.ple_", n_embd * n_stream
    norms = (f"{prefix}norm_{x}.weight" for x in ("key", "query", "conv"))
    return [
        *matrix(f"{prefix}key.weight", config.width, n_all),
        *matrix(f"{prefix}value.weight", config.width, n_embd),
        *(_stream_vector(file, name, n_embd, n_stream) for name in norms),
        TensorSpec(f"{prefix}conv1d.weight", (config.n_taps, n_all), "table"),  # files have F32 or F16
    ]


def _stream_vector(file: GgufFile, name: str, n_embd: int, n_stream: int) -> TensorSpec:
    """A vector for all streams, flat or with a dimension for them: files have both."""
    found = file.tensors.get(name)
    if found is not None and found.shape == (n_embd, n_stream):
        return TensorSpec(name, found.shape, "vector")
    return vector(name, n_embd * n_stream)


def ple_state(config: NgramConfig, n_embd: int, n_stream: int) -> StateTensor:
    """A slot's history of the convolution: F32 [D * C, n_history], the oldest column first."""
    shape = (n_embd * n_stream, config.n_history)
    return StateTensor(name=f"blk.{config.layer}.ple_conv", type=ElementType.F32, shape=shape, grows=False)


def ple_record(config: NgramConfig, n_embd: int, n_stream: int, width: int) -> StateTensor:
    """What a forward of up to `width` rows that may be taken back records, for either kind of update."""
    shape = (n_embd * n_stream, config.n_history + width)
    return StateTensor(name=f"blk.{config.layer}.ple_window", type=ElementType.F32, shape=shape, grows=False)


def slot_history(g: GraphBuilder, config: NgramConfig, state: State, slot: int, n_slots: int = 1) -> Tensor:
    """The histories [D * C, n_history, n_slots] of `n_slots` slots from `slot` on."""
    x = state[f"blk.{config.layer}.ple_conv"]
    column = 4 * x.shape[0]
    size = column * config.n_history
    return g.view(x, (x.shape[0], config.n_history, n_slots), (column, size), slot * size)


def histories(g: GraphBuilder, config: NgramConfig, state: State, slots: Tensor) -> Tensor:
    """Copies [D * C, n_history, S] of the histories of the slots I32 [S]."""
    x = state[f"blk.{config.layer}.ple_conv"]
    n_channel, n = x.shape[0], config.n_history
    return g.reshape(read_slots(g, x, n_channel * n, slots), n_channel, n, slots.shape[0])


@dataclass(frozen=True, slots=True)
class PleScan:
    """The module run over rows: what it adds, F32 [D, C, M], and its window [D * C, n_history + M / S, S].

    The window is the convolution's input with the history in front; any run of `n_history` columns of
    it is the history at that point.
    """

    increment: Tensor
    window: Tensor

    def commit(self, g: GraphBuilder, history: Tensor) -> None:
        """Overwrite the history with the newest columns."""
        n_new = self.window.shape[1] - history.shape[1]
        g.expand(g.copy(_columns(g, self.window, n_new, history.shape[1]), history))

    def commit_slots(self, g: GraphBuilder, config: NgramConfig, state: State, slots: Tensor) -> None:
        """Overwrite the histories of the slots with the newest columns of their windows."""
        n_channel, n_columns, n_seq, _ = self.window.shape
        n = config.n_history
        newest = g.cont_2d(_columns(g, self.window, n_columns - n, n), n_channel * n, n_seq)
        write_slots(g, state[f"blk.{config.layer}.ple_conv"], newest, slots)

    def record(self, g: GraphBuilder, config: NgramConfig, record: Record) -> None:
        """Keep the window of one sequence for `commit_ple`; the history stays as it was."""
        n_channel, n_columns, n_seq, _ = self.window.shape
        assert n_seq == 1
        target = record[f"blk.{config.layer}.ple_window"]
        g.expand(g.copy(self.window, g.view(target, (n_channel, n_columns), (target.strides[1],), 0)))


def _columns(g: GraphBuilder, window: Tensor, first: int, n: int) -> Tensor:
    """Columns [first, first + n) of every sequence's window."""
    n_channel, _, n_seq, _ = window.shape
    _, column, sequence, _ = window.strides
    return g.view(window, (n_channel, n, n_seq), (column, sequence), first * column)


def ple(
    g: GraphBuilder,
    w: BlockWeights,
    config: NgramConfig,
    rows: Tensor,
    residual: Tensor,
    history: Tensor,
    eps: float,
) -> PleScan:
    """Run the module on rows [width, M], residual [D, C, M] and history [D * C, n_history, S].

    Reads the history only: the caller commits or records.
    """
    return ple_scan(g, w, config, ple_rows(g, w, config, rows, residual, eps), history)


@dataclass(frozen=True, slots=True)
class PleRows:
    """What the module does row by row: gated values F32 [D, C, M], and their norm [D * C, M]."""

    gated: Tensor
    columns: Tensor


def ple_rows(
    g: GraphBuilder, w: BlockWeights, config: NgramConfig, rows: Tensor, residual: Tensor, eps: float
) -> PleRows:
    """The module on rows [width, M] and residual [D, C, M], up to the convolution."""
    n_embd, n_stream, n_tokens, _ = residual.shape

    def normed(x: Tensor, name: str) -> Tensor:
        return norm(g, x, g.reshape(w[f"ple_norm_{name}.weight"], n_embd, n_stream), eps)

    key = normed(g.reshape(w.linear(g, "ple_key", rows), n_embd, n_stream, n_tokens), "key")
    score = g.scale(g.sum_rows(g.mul(key, normed(residual, "query"))), 1 / math.sqrt(n_embd))
    size = g.sqrt(g.clamp(g.abs(score), MIN_SCORE, math.inf))
    gate = g.sigmoid(g.mul(g.sgn(score), size))  # [1, C, M]
    value = g.reshape(w.linear(g, "ple_value", rows), n_embd, 1, n_tokens)
    gated = g.mul(g.repeat(value, n_embd, n_stream, n_tokens, 1), gate)
    return PleRows(gated, g.reshape(normed(gated, "conv"), n_embd * n_stream, n_tokens))


def ple_scan(
    g: GraphBuilder, w: BlockWeights, config: NgramConfig, rows: PleRows, history: Tensor
) -> PleScan:
    """The convolution over rows of S sequences, behind history [D * C, n_history, S]."""
    n_embd, n_stream, n_tokens, _ = rows.gated.shape
    n_seq = history.shape[2]
    columns = g.reshape(rows.columns, n_embd * n_stream, n_tokens // n_seq, n_seq)
    window = g.concat(history, columns, 1)
    past = g.silu(dilated_conv(g, window, w["ple_conv1d.weight"], config.n_gram))
    return PleScan(g.add(rows.gated, g.reshape(past, n_embd, n_stream, n_tokens)), window)


def dilated_conv(g: GraphBuilder, window: Tensor, taps: Tensor, step: int) -> Tensor:
    """Causal convolution per channel whose taps [taps, channel] are `step` columns apart, the newest last.

    window [channel, (taps - 1) * step + n, S]: result [channel, n, S].
    """
    n_taps, n_channel, _, _ = taps.shape
    weights = g.cont(g.transpose(taps if taps.type is ElementType.F32 else g.cast(taps, ElementType.F32)))
    n = window.shape[1] - (n_taps - 1) * step
    total: Tensor | None = None
    for i in range(n_taps):
        term = g.mul(_columns(g, window, i * step, n), g.view(weights, (n_channel,), (), 4 * i * n_channel))
        total = term if total is None else g.add(total, term)
    assert total is not None
    return total


def commit_ple(g: GraphBuilder, config: NgramConfig, state: State, record: Record, commit: Commit) -> None:
    """Bring a slot's history to the first `n_keep` rows of a recorded forward."""
    window = record[f"blk.{config.layer}.ple_window"]
    g.follow(window)
    kept = _columns(g, window, commit.n_keep, config.n_history)
    g.expand(g.copy(kept, slot_history(g, config, state, commit.slot)))

"""Hyper-connections of qwen4exp: a residual of several streams, mixed before each part. Layer 4.

Where other models have a norm, a mixer normalises every stream, gates it element by element through a
low-rank product over all streams, and takes the mean: the input of the next part. Its output goes back
to each stream with a weight of that stream's own. Streams are never mixed with each other. Shapes are
ggml's: D is n_embd, C the number of streams, M the rows of the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyggml_dflash.arch.base import Step
from pyggml_dflash.arch.blocks import norm
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.weights import BlockWeights, LoadedWeights, TensorSpec, matrix, vector


def stream_vector(file: TensorFile, name: str, config: Qwen4ExpConfig) -> TensorSpec:
    """A vector for all streams, flat or with a dimension for them: files have both."""
    found = file.tensors.get(name)
    if found is not None and found.shape == (config.n_embd, config.n_stream):
        return TensorSpec(name, found.shape, "vector")
    return vector(name, config.hidden_width)


def mixer_specs(
    file: TensorFile, prefix: str, config: Qwen4ExpConfig, *, inject: bool = True
) -> list[TensorSpec]:
    """The tensors of a mixer; the last one of a model has nothing to feed back and no `inject`."""
    wide = config.hidden_width
    return [
        stream_vector(file, f"{prefix}norm.weight", config),
        *matrix(f"{prefix}down.weight", wide, config.low_rank),
        *matrix(f"{prefix}up.weight", config.low_rank, wide),
        *(matrix(f"{prefix}inject.weight", wide, config.n_stream) if inject else ()),
    ]


def mixer_weights(weights: LoadedWeights, prefix: str) -> BlockWeights:
    """The tensors of the mixer whose names begin with `prefix`, by what follows it."""
    return BlockWeights(weights, prefix)


def spread(g: GraphBuilder, config: Qwen4ExpConfig, x: Tensor) -> Tensor:
    """Equal streams [D, C, M] of embedding rows x [D, M]."""
    return g.repeat(g.reshape(x, config.n_embd, 1, x.shape[1]), config.n_embd, config.n_stream, x.shape[1], 1)


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a part reads, x [D, M], and what tells the streams its worth: the normed residual [D * C, M]."""

    residual: Tensor  # [D, C, M]
    x: Tensor
    normed: Tensor

    def only(self, g: GraphBuilder, step: Step) -> Mixed:
        """The rows that the step's output asks for."""
        n_tokens = step.key.n_tokens
        if step.key.output != "last" or n_tokens == 1:
            return self
        return replace(
            self,
            residual=_last(g, self.residual),
            normed=_last(g, self.normed),
        )


def _last(g: GraphBuilder, x: Tensor) -> Tensor:
    """The last row of x [n, M] or [n, C, M]."""
    shape, strides = [n for n in x.shape if n > 1], x.strides
    axis = len(shape) - 1
    kept = (*shape[:-1], 1)
    return g.view(x, kept, strides[1 : axis + 1], (shape[-1] - 1) * strides[axis])


def mix(g: GraphBuilder, w: BlockWeights, config: Qwen4ExpConfig, residual: Tensor) -> Mixed:
    """Make the input of a part out of the residual [D, C, M]."""
    n_embd, n_stream, n_tokens, _ = residual.shape
    gamma = g.reshape(w["norm.weight"], n_embd, n_stream)
    streams = norm(g, residual, gamma, config.norm_eps)
    flat = g.reshape(streams, n_embd * n_stream, n_tokens)
    low = g.silu(g.scale(w.linear(g, "down", flat), 1.0 / n_stream))
    gate = g.reshape(w.linear(g, "up", low), n_embd, n_stream, n_tokens)
    return Mixed(residual, g.mean_of_gated_streams(streams, gate), flat)


def feed_back(g: GraphBuilder, w: BlockWeights, mixed: Mixed, y: Tensor) -> Tensor:
    """The residual [D, C, M] after a part that made y [D, M] of what was mixed."""
    n_stream = mixed.residual.shape[1]
    weight = g.sigmoid(g.scale(w.linear(g, "inject", mixed.normed), 1.0 / n_stream))
    return g.add_to_streams(mixed.residual, y, g.scale(weight, 2.0))

"""Inside a forward: embeddings, mixers, feed-forward parts and residuals are those of the stored models.

When logits are wrong, the first of these to fail names the layer and the part.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.base import FedRows, GraphKey
from pyggml_dflash.engine.graphs import BUCKET, Inputs
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, StepGraph
from pyggml_dflash.ggml.ops import GraphBuilder, Supports
from pyggml_dflash.ggml.tensor import Tensor
from tests.reference.opened import Floats, OnOff, Parts, assembled, on_the_cpu
from tests.reference.stored import model_file, stored
from tests.tiny import Tiny, tokens, write_tiny

# Other programs that compute the same differ by 1.1e-4 at most; values are up to 60.
TOLERANCE = 5e-4

NAMES = ("llama-tiny", "qwen3-tiny", "qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")


def look_inside(parts: Parts, tokens: list[int], supports: Supports | None = None) -> dict[str, Floats]:
    """Every tensor that the architecture shows in a forward of `tokens`, as rows, by its name."""
    model, n = parts.model, len(tokens)
    form = model.architecture.form(model.config, 0, n, BUCKET, host=True)
    key = GraphKey(n_tokens=n, n_kv=BUCKET, slot=0, output="all", form=form)
    shown: dict[str, Tensor] = {}
    with ExitStack() as stack:
        inputs = Inputs(
            parts.backend,
            parts.ledger,
            model.architecture,
            model.config,
            max_rows=n,
            max_kv=BUCKET,
            embedded=False,
        )
        stack.callback(inputs.close)
        n_ctx, feeder = parts.forwards.n_ctx, parts.forwards._inputs.feeder
        inputs.fill(tokens, n, 0, 0, n_ctx)
        inputs.fill_mask(n, 0, BUCKET)
        if feeder is not None:
            inputs.feed(feeder, FedRows(key=key, tokens=tokens, before=(), n_past=0, n_ctx=n_ctx))
        builder = GraphBuilder(model.architecture.max_nodes(model.config), supports)
        stack.callback(builder.close)

        def show(name: str, x: Tensor) -> None:
            if x.type is ElementType.F32:  # numbers, not choices, which come in any order
                shown[name] = builder.output(x)

        step = inputs.step(builder, key, model.flash_attn, show)
        logits = model.architecture.build(builder, model.config, model.weights, parts.state, step)
        assert logits is not None
        builder.output(logits)
        allocator = GraphAllocator(parts.backend, parts.ledger, "inside")
        stack.callback(allocator.close)
        found = StepGraph(parts.backend, builder, tuple(shown.values()), allocator).run()
        return {name: np.array(rows) for name, rows in zip(shown, found, strict=True)}


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_every_layer_has_its_stored_output(
    tmp_path: Path, name: str, flash_attn: OnOff
) -> None:
    expected = stored(name, None)
    options = on_the_cpu(model_file(name, "F32", tmp_path), max_ctx=256, flash_attn=flash_attn)
    with assembled(options) as parts:
        found = look_inside(parts, expected.hidden_tokens)
    assert sorted(found) == sorted(expected.hidden)
    for part in found:  # in the order of the forward
        np.testing.assert_allclose(
            found[part], expected.hidden[part], rtol=0, atol=TOLERANCE, err_msg=f"first wrong part: {part}"
        )


@pytest.mark.parametrize("n_taps", [2, 3, 4, 64])
@pytest.mark.parametrize("n_tokens", [1, 2, 30])
def test_a_device_without_the_convolution_computes_the_same(
    tmp_path: Path, n_taps: int, n_tokens: int
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen35", n_taps=n_taps, recurrent=(True,) * 4))
    ids = tokens(n_tokens, seed=1)
    found = []
    for supports in (lambda op: True, lambda op: False):
        with assembled(on_the_cpu(path)) as parts:
            look_inside(parts, ids, supports)  # leaves a state behind
            found.append(look_inside(parts, ids, supports)["h_final"])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_stream", [2, 4, 5])
@pytest.mark.parametrize("n_tokens", [1, 2, 70])  # of 70, the last ones leave groups of tokens out
def test_a_device_without_stream_and_indexer_operations_computes_the_same(
    tmp_path: Path, n_stream: int, n_tokens: int
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen4exp", n_stream=n_stream))
    ids = tokens(n_tokens, seed=2)
    with assembled(on_the_cpu(path)) as parts:
        fused = look_inside(parts, ids, lambda op: True)
    with assembled(on_the_cpu(path)) as parts:
        composed = look_inside(parts, ids, lambda op: False)
    assert sorted(fused) == sorted(composed)
    for name in fused:
        np.testing.assert_allclose(composed[name], fused[name], rtol=0, atol=1e-5, err_msg=name)

"""Every form that a file of an architecture may have computes what its definition says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES
from tests.reference.opened import continued, on_the_cpu, open_core
from tests.reference.qwen4exp import reference
from tests.tiny import Tiny, tokens, write_tiny

TOLERANCE = 1e-4  # of the logits' standard deviation; 2e-5 was measured

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 2048,  # both ends of the ramp lie within the head
}
ANY: dict[str, dict[str, object]] = {
    "plain": {},
    "head-tied-to-the-table": {"tied": True},
    "qkv-in-one-tensor": {"fused_qkv": True},
    "biases": {"biases": True},
    "qkv-in-one-tensor-with-bias": {"fused_qkv": True, "biases": True},
    "a-scalar-beside-every-matrix": {"scales": True},
    "one-kv-head": {"n_head_kv": 1},
    "a-kv-head-per-head": {"n_head_kv": 4, "metadata": {"attention.head_count_kv": None}},
    "head-size-from-the-width": {
        "head_dim": 16,
        "rope_dims": 8,
        "metadata": {"attention.key_length": None, "attention.value_length": None},
    },
    "three-heads": {"n_head": 3, "n_head_kv": 1},
    "part-of-the-head-turns": {"rope_dims": 20},
    "another-rope-base": {"metadata": {"rope.freq_base": 1e6}},
    "rope-linear": {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "rope-linear-by-the-old-key": {"metadata": {"rope.scale_linear": 4.0}, "seed": 3},
    "rope-yarn": {"metadata": YARN},
    "rope-yarn-from-the-trained-context": {
        "n_ctx_train": 512,
        "metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 3.0},
    },
    "rope-yarn-with-other-betas": {
        "metadata": {**YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
    },
    "rope-yarn-with-attention-factor": {"metadata": {**YARN, "rope.scaling.attn_factor": 0.8}},
    "attention-scale-given": {"metadata": {"attention.scale": 0.3}},
    "a-large-eps": {"metadata": {"attention.layer_norm_rms_epsilon": 0.1}},
    "one-layer": {"n_layer": 1},
    "odd-sizes": {
        "n_embd": 51,
        "n_head": 3,
        "n_head_kv": 1,
        "head_dim": 33,
        "rope_dims": 10,
        "n_ff": 77,
        "n_vocab": 263,
        "net_head_dim": 7,
        "expert_ff": 19,
        "shared_ff": 23,
    },
}
DENSE: dict[str, dict[str, object]] = {
    "gate-and-up-in-one-tensor": {"fused_ffn": True},
    "gate-and-up-in-one-tensor-with-bias": {"fused_ffn": True, "biases": True},
}
PLAIN: dict[str, dict[str, object]] = {"rope-factors": {"rope_factors": True}}
HYBRID: dict[str, dict[str, object]] = {
    "as-many-value-heads-as-key-heads": {"n_key_head": 4, "n_value_head": 4},
    "three-value-heads-per-key-head": {"n_key_head": 2, "n_value_head": 6},
    "one-key-head": {"n_key_head": 1, "n_value_head": 2},
    "two-taps": {"n_taps": 2},
    "five-taps": {"n_taps": 5},
    "large-delta-net-heads": {"net_head_dim": 64, "n_key_head": 1, "n_value_head": 2},
    "layers-by-interval": {"lists_recurrent": False},
    "layers-by-the-default-interval": {
        "interval": 4,
        "n_layer": 5,
        "lists_recurrent": False,
        "metadata": {"full_attention_interval": None},
    },
    "the-list-outweighs-the-interval": {"recurrent": (False, True, True, False), "interval": 3},
    "a-delta-net-last": {"n_layer": 3},
    "attention-only": {"interval": 1},
    "delta-nets-only": {"recurrent": (True,) * 4},
    "three-rope-sections": {"rope_sections": (2, 1, 1)},
    "no-rope-sections": {"rope_sections": None},
    "an-mtp-block": {"n_mtp": 1},
    "two-mtp-blocks-by-interval": {"n_mtp": 2, "lists_recurrent": False},
}
EXPERTS: dict[str, dict[str, object]] = {
    "one-expert-of-four": {"n_used": 1},
    "three-experts-of-four": {"n_used": 3},
    "all-experts": {"n_used": 4},
    "a-single-expert": {"n_expert": 1, "n_used": 1},
    "many-experts": {"n_expert": 16, "n_used": 5, "seed": 2},
    "expert-weights-scaled": {"weight_scale": 2.5},
    "expert-weights-scaled-by-one": {"weight_scale": 1.0},
    "gate-and-up-of-experts-in-one-tensor": {"fused_experts": True},
    "gate-and-up-of-experts-in-one-tensor-with-scales": {"fused_experts": True, "scales": True},
    "no-shared-expert": {"shared_ff": 0},
    "no-shared-expert-by-absence": {
        "shared_ff": 0,
        "metadata": {"expert_shared_feed_forward_length": None},
    },
    "expert-width-from-the-dense-one": {
        "expert_ff": 48,
        "shared_ff": 96,
        "metadata": {
            "feed_forward_length": 96,
            "expert_feed_forward_length": None,
            "expert_shared_feed_forward_length": None,
        },
    },
}
NEEDS_NO_KEY = {  # keys that qwen4exp demands
    "no-shared-expert-by-absence",
    "expert-width-from-the-dense-one",
}
WIDE = (64, 4)  # a vector for all streams may have a dimension for them
STREAMS: dict[str, dict[str, object]] = {
    "two-streams": {"n_stream": 2},
    "five-streams": {"n_stream": 5},
    "stream-vectors-with-two-dimensions": {
        "shapes": {
            "output_hc_norm.weight": WIDE,
            "blk.1.hc_ffn_norm.weight": WIDE,
            "blk.2.ple_norm_key.weight": WIDE,
        }
    },
    "dense-attention": {"ratio": 0},
    "dense-attention-by-absence": {"metadata": {"attention.compress_ratios": None}},
    "one-ratio-for-all-layers": {"metadata": {"attention.compress_ratios": 4}},
    "groups-of-two": {"ratio": 2},
    "groups-of-sixteen": {"ratio": 16},
    "one-group-is-chosen": {"budget": 4},
    "one-index-head": {"index_heads": 1, "seed": 1},
    "n-grams-first": {"ngram_layer": 0},
    "no-n-grams": {"metadata": {"ple.layers": None}, "shapes": {"per_layer_token_embd.weight": None}},
    "pairs-only": {"n_gram": 2, "ngram_sizes": (101, 103)},
    "n-grams-of-four": {"n_gram": 4, "ngram_heads": 1, "ngram_sizes": (101, 103, 107)},
    "two-n-gram-taps": {"ngram_taps": 2},
    "kv-heads-per-layer": {"metadata": {"attention.head_count_kv": [0, 2, 0, 2]}},
    "kv-heads-per-layer-but-for-the-mtp-block": {
        "n_mtp": 1,
        "metadata": {"attention.head_count_kv": [0, 2, 0, 2, 0]},
    },
    "expert-width-per-layer": {"metadata": {"expert_feed_forward_length": [32] * 4}},
}


def forms() -> list[Any]:
    """Every form of every architecture, by name."""
    found: list[Any] = []
    for name in sorted(ARCHITECTURES):
        tiny = Tiny(architecture=name)
        kinds = [ANY, HYBRID if tiny.has_delta_nets else PLAIN, EXPERTS if tiny.has_experts else DENSE]
        kinds += [STREAMS] if tiny.has_streams else []
        found += [
            pytest.param(replace(tiny, **fields), id=f"{name}-{form}")  # type: ignore[arg-type]
            for kind in kinds
            for form, fields in kind.items()
            if not (tiny.has_streams and form in NEEDS_NO_KEY)
        ]
    return found


def check(path: Path, *, n_prompt: int, n_answer: int, chunk: int) -> None:
    """Teacher-forced logits, and those of a prompt in chunks and a decoded answer."""
    ids = tokens(n_prompt + n_answer, seed=5)
    expected = reference(path).forward(ids)
    assert expected.router_gap.min() > 1e-5, "this seed makes an expert's choice a matter of rounding"
    if expected.group_gap is not None:  # scores that are equal are all zero, and not a matter of rounding
        near = (expected.group_gap > 0) & (expected.group_gap < 1e-6)
        assert not near.any(), "this seed makes a group's choice a matter of rounding"
    with open_core(on_the_cpu(path, max_ctx=512, chunk=chunk, flash_attn="off")) as core:
        found = core.logits(ids)
        steps = np.array(list(continued(core, ids[:n_prompt], ids[n_prompt:])))
    bound = TOLERANCE * expected.logits.std()
    np.testing.assert_allclose(found, expected.logits, rtol=0, atol=bound)
    np.testing.assert_allclose(steps, expected.logits[n_prompt - 1 : -1], rtol=0, atol=bound)


@pytest.mark.parametrize("tiny", forms())
def test_logits_are_those_of_the_definition(tmp_path: Path, tiny: Tiny) -> None:
    check(write_tiny(tmp_path, tiny), n_prompt=40, n_answer=8, chunk=24)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_text_that_crosses_a_bucket_of_the_cache_goes_on_as_defined(
    tmp_path: Path, architecture: str
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture=architecture))
    check(path, n_prompt=250, n_answer=20, chunk=64)  # the 257th row is in the second bucket


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_split_file_is_the_same_model(tmp_path: Path, architecture: str) -> None:
    ids, tiny = tokens(40, seed=6), Tiny(architecture=architecture)
    whole = write_tiny(tmp_path, tiny)
    first_of_three = write_tiny(tmp_path, tiny, n_parts=3)
    with open_core(on_the_cpu(whole)) as one, open_core(on_the_cpu(first_of_three)) as three:
        np.testing.assert_array_equal(three.logits(ids), one.logits(ids))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_scores_of_any_size_leave_numbers(tmp_path: Path, architecture: str, flash_attn: str) -> None:
    """Attention scores far beyond what exp can hold, and norms of rows that are zero."""
    tiny = Tiny(architecture=architecture, metadata={"attention.scale": 1e4})
    path = write_tiny(tmp_path, tiny)
    with open_core(on_the_cpu(path, flash_attn="on" if flash_attn == "on" else "off")) as core:
        assert np.isfinite(core.logits(tokens(70, seed=7))).all()

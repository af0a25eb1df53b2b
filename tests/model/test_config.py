"""Metadata is read as numbers that make sense together, or refused with key, value and what would work."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES, architecture_of
from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.config import ModelConfig
from tests.tiny import Tiny, tensor_shapes, write_tiny

EVERY = sorted(ARCHITECTURES)
HYBRIDS = [name for name in EVERY if Tiny(architecture=name).has_delta_nets]


def config_of(folder: Path, tiny: Tiny) -> ModelConfig:
    with GgufFile.open(write_tiny(folder, tiny)) as file:
        name, architecture = architecture_of(file)
        return architecture.read_config(file, name)


def refusal(folder: Path, tiny: Tiny, kind: type[ModelFileError]) -> str:
    """The message, after the file that every refusal names first."""
    with pytest.raises(kind) as raised:
        config_of(folder, tiny)
    assert raised.type is kind
    assert raised.value.exit_code == 3
    path = str(folder / f"{tiny.architecture}.gguf")
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# Per key, values that are out of range, and the range as the message gives it.
COUNTS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "block_count": ((0, 1025, -1), "1 to 1024"),
    "context_length": ((0, 2**31, -5), "1 to 2147483647"),
    "embedding_length": ((0, 2**20 + 1), "1 to 1048576"),
    "attention.head_count": ((0, 4097), "1 to 4096"),
    "attention.head_count_kv": ((0, 4097), "1 to 4096"),
    "attention.key_length": ((0, 8193), "1 to 8192"),
    "attention.value_length": ((0, 8193), "1 to 8192"),
    "rope.dimension_count": ((0, 34), "1 to 32"),
}
DENSE_COUNTS = {"feed_forward_length": ((0, 2**24 + 1), "1 to 16777216")}
HYBRID_COUNTS = {
    "nextn_predict_layers": ((-1, 17), "0 to 16"),
    "ssm.conv_kernel": ((0, 1, 65), "2 to 64"),
    "ssm.state_size": ((0, 1025), "1 to 1024"),
    "ssm.group_count": ((0, 4097), "1 to 4096"),
    "ssm.time_step_rank": ((0, 4097), "1 to 4096"),
    "ssm.inner_size": ((0,), "1 to 16777216"),
}
EXPERT_COUNTS = {
    "expert_count": ((0, 65537), "1 to 65536"),
    "expert_used_count": ((0, 5), "1 to 4"),
    "expert_feed_forward_length": ((0,), "1 to 16777216"),
    "expert_shared_feed_forward_length": ((-1,), "0 to 16777216"),
}
NUMBERS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "attention.layer_norm_rms_epsilon": ((math.nan, math.inf, -0.5, 1.5), "0 to 1"),
    "attention.scale": ((math.nan, -1.0), "0 to inf"),
    "rope.freq_base": ((math.nan, math.inf, 0.0, 0.5, -10000.0), "1 to inf"),
}


def out_of_range() -> list[Any]:
    found: list[Any] = []
    for name in EVERY:
        tiny = Tiny(architecture=name)
        ranges: dict[str, tuple[tuple[float, ...], str]] = {**COUNTS, **NUMBERS}
        ranges |= {**HYBRID_COUNTS} if tiny.has_delta_nets else {}
        ranges |= {**EXPERT_COUNTS} if tiny.has_experts else {**DENSE_COUNTS}
        found += [
            pytest.param(name, key, value, allowed, id=f"{name}-{key}-{value}")
            for key, (values, allowed) in ranges.items()
            for value in values
        ]
    found.append(pytest.param("qwen35moe", "expert_weights_scale", math.nan, "0 to 1e+06", id="scale-nan"))
    found.append(pytest.param("qwen35", "full_attention_interval", 0, "1 to 1024", id="qwen35-interval-0"))
    return found


@pytest.mark.parametrize(("architecture", "key", "value", "allowed"), out_of_range())
def test_a_value_out_of_range_is_refused_with_the_range(
    tmp_path: Path, architecture: str, key: str, value: float, allowed: str
) -> None:
    tiny = Tiny(architecture=architecture, lists_recurrent=False, metadata={key: value})
    message = refusal(tmp_path, tiny, DamagedFileError)
    shown = re.escape(str(value))
    assert re.fullmatch(
        rf"{architecture}\.{re.escape(key)} is {shown}; expected {re.escape(allowed)}", message
    )


SCALED: Mapping[str, tuple[float, ...]] = {
    "rope.scaling.factor": (0.0, math.nan, -2.0, 1e7),
    "rope.scaling.attn_factor": (0.0, math.nan, 1e7),
    "rope.scaling.yarn_beta_fast": (math.nan, -1.0),
    "rope.scaling.yarn_beta_slow": (math.inf, -1.0),
    "rope.scaling.original_context_length": (0, -1),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in SCALED for value in SCALED[key]])
@pytest.mark.parametrize("architecture", EVERY)
def test_numbers_of_a_rope_scaling_are_checked_too(
    tmp_path: Path, architecture: str, key: str, value: float
) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, key: value}
    message = refusal(tmp_path, Tiny(architecture=architecture, metadata=keys), DamagedFileError)
    assert message.startswith(f"{architecture}.{key} is {value}; expected ")


def required() -> list[tuple[str, str]]:
    always = ("block_count", "context_length", "embedding_length", "attention.head_count")
    found = []
    for name in EVERY:
        keys = [*always, "attention.layer_norm_rms_epsilon"]
        keys += [key for key in HYBRID_COUNTS if key.startswith("ssm.")] if name in HYBRIDS else []
        keys += (
            ["expert_count", "expert_used_count"]
            if Tiny(architecture=name).has_experts
            else ["feed_forward_length"]
        )
        found += [(name, key) for key in keys]
    return found


@pytest.mark.parametrize(("architecture", "key"), required())
def test_a_key_that_is_needed_is_named_when_absent(tmp_path: Path, architecture: str, key: str) -> None:
    message = refusal(tmp_path, Tiny(architecture=architecture, metadata={key: None}), UnsupportedModelError)
    assert re.fullmatch(rf"the metadata key '{architecture}\.{re.escape(key)}' \(.+\) is missing", message)


CONTRADICTIONS: Mapping[str, tuple[str, dict[str, object], type[ModelFileError], str]] = {
    "a text as a count": ("llama", {"block_count": "four"}, DamagedFileError, "llama.block_count.*four"),
    "a fraction as a count": ("llama", {"block_count": 4.0}, DamagedFileError, "llama.block_count.*4.0"),
    "a list as a count": (
        "qwen3",
        {"attention.head_count": [4, 4]},
        DamagedFileError,
        "attention.head_count",
    ),
    "heads that do not share evenly": (
        "llama",
        {"attention.head_count": 4, "attention.head_count_kv": 3},
        DamagedFileError,
        "4 heads cannot share 3 KV heads",
    ),
    "key and value heads of two sizes": (
        "qwen3",
        {"attention.value_length": 16},
        UnsupportedModelError,
        "key heads of 32 and value heads of 16 differ",
    ),
    "an odd number of turning dimensions": (
        "llama",
        {"rope.dimension_count": 7},
        DamagedFileError,
        r"llama.rope.dimension_count is 7; expected an even number",
    ),
    "a rope scaling of another kind": (
        "llama",
        {"rope.scaling.type": "longrope"},
        UnsupportedModelError,
        "llama.rope.scaling.type is 'longrope'; known: none, linear, yarn",
    ),
    "a dense architecture with experts": (
        "llama",
        {"expert_count": 8},
        UnsupportedModelError,
        "llama with experts is not supported",
    ),
    "an inner size that heads do not make": (
        "qwen35",
        {"ssm.inner_size": 96},
        DamagedFileError,
        "qwen35.ssm.inner_size is 96; heads and sizes make 64",
    ),
    "value heads that do not share evenly": (
        "qwen35",
        {"ssm.group_count": 3},
        DamagedFileError,
        "4 value heads cannot share 3 key heads",
    ),
    "MTP layers without a trunk": (
        "qwen35",
        {"nextn_predict_layers": 4},
        DamagedFileError,
        "4 MTP layers of 4 layers leave no trunk",
    ),
    "a list of layers that is too short": (
        "qwen35",
        {"attention.recurrent_layers": [True, False, True]},
        DamagedFileError,
        "attention.recurrent_layers.* array of 4 bools is needed",
    ),
    "a list of layers that is too long": (
        "qwen35",
        {"attention.recurrent_layers": [True] * 5},
        DamagedFileError,
        "attention.recurrent_layers",
    ),
    "a list of layers of other numbers": (
        "qwen35",
        {"attention.recurrent_layers": [1, 2, 1, 0]},
        DamagedFileError,
        "attention.recurrent_layers",
    ),
    "two rope sections": (
        "qwen35",
        {"rope.dimension_sections": [2, 1]},
        DamagedFileError,
        r"qwen35.rope.dimension_sections is \[2, 1\]; expected 3 or 4 counts",
    ),
    "rope sections of nothing": (
        "qwen35moe",
        {"rope.dimension_sections": [0, 0, 0, 0]},
        DamagedFileError,
        r"rope.dimension_sections is \[0, 0, 0, 0\]",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_named(tmp_path: Path, case: str) -> None:
    architecture, keys, kind, text = CONTRADICTIONS[case]
    message = refusal(tmp_path, Tiny(architecture=architecture, metadata=keys), kind)
    assert re.search(text, message), message


def test_an_unknown_architecture_is_refused_with_those_known(tmp_path: Path) -> None:
    message = refusal(tmp_path, Tiny(architecture="mamba"), UnsupportedModelError)
    assert message == f"architecture 'mamba' is not supported; supported: {', '.join(EVERY)}"


@pytest.mark.parametrize("architecture", EVERY)
@pytest.mark.parametrize("shape", [None, (64,), (64, 33, 8)])
def test_a_table_that_is_missing_or_no_table_is_refused(
    tmp_path: Path, architecture: str, shape: tuple[int, ...] | None
) -> None:
    tiny = Tiny(architecture=architecture, shapes={"token_embd.weight": shape})
    message = refusal(tmp_path, tiny, DamagedFileError)
    problem = "is missing" if shape is None else f"has shape {list(shape)}; expected two dimensions"
    assert message == f"tensor 'token_embd.weight' {problem}"


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_file_with_an_mtp_block_alone_says_where_it_belongs(tmp_path: Path, architecture: str) -> None:
    tiny = Tiny(architecture=architecture, n_mtp=1)
    trunk = {name: None for name in tensor_shapes(tiny) if re.match(r"blk\.[0-3]\.", name)}
    message = refusal(tmp_path, replace(tiny, shapes=trunk), UnsupportedModelError)
    assert "only an MTP block" in message
    assert "beside its target" in message


# what is read


@pytest.mark.parametrize("architecture", EVERY)
def test_the_numbers_of_the_file_are_those_of_the_config(tmp_path: Path, architecture: str) -> None:
    tiny = Tiny(architecture=architecture)
    config = config_of(tmp_path, tiny)
    assert (config.architecture, config.n_layer, config.n_mtp) == (architecture, tiny.n_layer, 0)
    assert (config.n_embd, config.n_vocab, config.n_ctx_train) == (64, 264, 1024)
    assert (config.n_head, config.n_head_kv, config.head_dim, config.kv_dim) == (4, 2, 32, 64)
    assert config.n_ff == (0 if tiny.has_experts else 96)
    assert config.norm_eps == pytest.approx(1e-6)
    assert config.attn_scale == pytest.approx(32**-0.5)
    assert (config.rope.n_dims, config.rope.freq_base, config.rope.scaling) == (tiny.n_rot, 10000, "none")
    assert config.rope.pairs == ("adjacent" if architecture == "llama" else "halves")
    assert config.recurrent == tuple(tiny.is_recurrent(i) for i in range(4))
    assert (config.delta_net is not None) == tiny.has_delta_nets
    assert (config.moe is not None) == tiny.has_experts


@pytest.mark.parametrize("architecture", EVERY)
def test_what_a_file_leaves_out_has_the_usual_value(tmp_path: Path, architecture: str) -> None:
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    keys = dict.fromkeys((*absent, "rope.dimension_count"))
    config = config_of(tmp_path, Tiny(architecture=architecture, metadata=keys))
    assert (config.n_head_kv, config.head_dim, config.rope.n_dims) == (4, 16, 16)
    assert config.rope.freq_base == 10000


@pytest.mark.parametrize("n_listed", [4, 6])
def test_mtp_layers_may_stand_in_the_list_of_layers_or_not(tmp_path: Path, n_listed: int) -> None:
    listed = [True, False, True, False, False, False][:n_listed]
    tiny = Tiny(architecture="qwen35", n_mtp=2, metadata={"attention.recurrent_layers": listed})
    config = config_of(tmp_path, tiny)
    assert (config.n_layer, config.n_mtp, config.recurrent) == (4, 2, (True, False, True, False))


def test_one_bool_stands_for_every_layer(tmp_path: Path) -> None:
    keys = {"attention.recurrent_layers": True}
    config = config_of(tmp_path, Tiny(architecture="qwen35", n_mtp=1, metadata=keys))
    assert config.recurrent == (True,) * 4


def test_a_list_of_layers_may_be_zeros_and_ones(tmp_path: Path) -> None:
    keys = {"attention.recurrent_layers": [1, 0, 0, 1]}
    config = config_of(tmp_path, Tiny(architecture="qwen35", metadata=keys))
    assert config.recurrent == (True, False, False, True)


def test_yarn_is_read_with_its_defaults(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    rope = config_of(tmp_path, Tiny(architecture="qwen3", metadata=keys)).rope
    assert (rope.scaling, rope.factor, rope.n_ctx_orig) == ("yarn", 4, 1024)
    assert (rope.attn_factor, rope.beta_fast, rope.beta_slow) == (1, 32, 1)


def test_integers_of_any_width_are_read(tmp_path: Path) -> None:
    keys: dict[str, object] = {"block_count": np.int64(4), "context_length": np.uint16(512)}
    keys["feed_forward_length"] = np.uint64(96)
    config = config_of(tmp_path, Tiny(architecture="llama", metadata=keys))
    assert (config.n_layer, config.n_ctx_train, config.n_ff) == (4, 512, 96)

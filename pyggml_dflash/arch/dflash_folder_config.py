"""A published DFlash draft's config.json, said in the keys of a `dflash` GGUF file. Layer 4.

A name is looked up in `dflash_config` first, then beside it. What a GGUF file has no key for, and what
implementations read in different ways, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from pyggml_dflash.errors import DamagedFileError
from pyggml_dflash.ggml.gguf_values import MetaValue, quote
from pyggml_dflash.model.checkpoint import JsonConfig

MAX_LAYERS: Final = 64
KINDS: Final = ("DFlashDraftModel", "DFlash2DraftModel")
MASK_TOKEN: Final = "tokenizer.ggml.mask_token_id"

# Keys behind 'dflash.', and the names in config.json that say the same.
COUNTS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
OPTIONAL_COUNTS: Final = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "block_size": "block_size",
    "target_block_count": "num_target_layers",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}
OPTIONAL_NUMBERS: Final = {
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "input_embedding_scale",
    "attention.value_scale": "attention_value_scale",
}
OTHERS: Final = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.causal": "is_causal",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "hidden_activation": "hidden_act",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "partial_rotary_factor",
    "target_layers": "target_layer_ids",
}
CONFIG_NAMES: Final = {
    MASK_TOKEN: "mask_token_id",
    **{f"dflash.{key}": name for key, name in (COUNTS | OPTIONAL_COUNTS | OPTIONAL_NUMBERS | OTHERS).items()},
}
ROPE_NAMES: Final = {  # of a rotary scaling, beside those that every one may have
    "default": (),
    "mrope": (),  # sections for the positions of pictures, which are equal for text
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}


def draft_metadata(config: JsonConfig) -> Mapping[str, MetaValue]:
    """What a `dflash` GGUF file would say, by key, and with the draft's target in target_block_count."""
    _check_kind(config)
    found: dict[str, MetaValue] = {"block_count": config.integer("num_hidden_layers", high=MAX_LAYERS)}
    found |= {key: config.integer(name) for key, name in COUNTS.items()}
    optional = {key: config.integer(name, None) for key, name in OPTIONAL_COUNTS.items()}
    numbers = {key: config.number(name, None) for key, name in OPTIONAL_NUMBERS.items()}
    found |= {key: value for key, value in (optional | numbers).items() if value is not None}
    found["attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps")
    if (activation := config.text("hidden_act", "silu")) != "silu":
        found["hidden_activation"] = activation  # in a GGUF file no word means silu
    found["target_layers"] = np.array([i + 1 for i in _target_layer_ids(config)], np.int32)
    causal = config.flag("is_causal", config.flag("causal", None))
    if causal is not None:
        found["attention.causal"] = causal
    found |= _rotary(config) | _sliding(config)
    everything: dict[str, MetaValue] = {"general.architecture": "dflash"}
    everything |= {f"dflash.{key}": value for key, value in found.items()}
    everything[MASK_TOKEN] = config.integer("mask_token_id", low=0)
    return MappingProxyType(everything)


def _check_kind(config: JsonConfig) -> None:
    kinds = config.texts("architectures", [KINDS[0]])
    if not kinds or kinds[0] not in KINDS:
        raise config.unsupported(f"'architectures' is {kinds}; known are {', '.join(KINDS)}")
    for name in ("markov_head_type", "sample_from_anchor"):
        if config.get(name) is not None:
            raise config.unsupported(f"DSpark drafts are not supported ('{name}')")


def _target_layer_ids(config: JsonConfig) -> list[int]:
    """The layers whose outputs the draft reads: the given ones, or the published rule, which spreads them."""
    ids = config.integers("target_layer_ids", None)
    if ids is not None:
        return ids
    n_target, n_draft = config.integer("num_target_layers", low=4), config.integer("num_hidden_layers")
    if n_draft == 1:
        return [n_target // 2]
    return [round(1 + i * (n_target - 4) / (n_draft - 1)) for i in range(n_draft)]


def _rotary(config: JsonConfig) -> dict[str, MetaValue]:
    """Base, dimensions and scaling of rotary positions."""
    name = next((n for n in ("rope_parameters", "rope_scaling") if config.section(n)), None)
    given = {} if name is None else config.section(name) or {}
    rope, inside = JsonConfig(config.path, given, *config.scopes), JsonConfig(config.path, given)
    found: dict[str, MetaValue] = {"rope.freq_base": rope.number("rope_theta")}
    factor = rope.number("partial_rotary_factor", None)
    if factor is not None:
        found["rope.dimension_count"] = int(head_dim(config) * factor)
    kind = inside.text("rope_type", inside.text("type", "default"))
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    unknown = sorted(
        n for n in given if given[n] is not None and n not in known | {*ROPE_NAMES.get(kind, ())}
    )
    if kind not in ROPE_NAMES or unknown:
        what = f"the type {quote(kind)}" if kind not in ROPE_NAMES else f"{quote(unknown[0])} for {kind}"
        raise config.unsupported(f"'{name}' has {what}; known types are {', '.join(ROPE_NAMES)}")
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": inside.number("factor")}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = inside.integer("original_max_position_embeddings")
        betas = {f"rope.scaling.yarn_{b}": inside.number(b, None) for b in ("beta_fast", "beta_slow")}
        found |= {key: value for key, value in betas.items() if value is not None}
    return found


def head_dim(config: JsonConfig) -> int:
    """Elements of a head."""
    default = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", max(1, default))


def interleaved_pairs(config: JsonConfig) -> tuple[int, int] | None:
    """(head size, its dimensions that turn) where rotary pairs lie side by side; None: half a head apart."""
    if config.flag("rope_is_neox_style", True):
        return None
    n_rot = _rotary(config).get("rope.dimension_count")
    return head_dim(config), n_rot if isinstance(n_rot, int) else head_dim(config)


def _sliding(config: JsonConfig) -> dict[str, MetaValue]:
    """The window, and which layers have it; empty where all see everything."""
    n_layer, types = config.integer("num_hidden_layers"), config.texts("layer_types", None)
    if types is not None and (
        len(types) != n_layer or not {*types} <= {"sliding_attention", "full_attention"}
    ):
        raise DamagedFileError(
            f"{config.path}: 'layer_types' must name sliding_attention or full_attention for each of "
            f"{n_layer} layers; it is {quote(str(types))}"
        )
    if config.flag("use_swa", False):
        slides = [True] * n_layer
    elif config.flag("use_sliding_window", False):
        first = 0 if types is not None else config.integer("max_window_layers", low=0)
        slides = [i >= first if types is None else types[i] == "sliding_attention" for i in range(n_layer)]
    elif "sliding_attention" in (types or ()):
        raise config.unsupported(
            "'layer_types' has sliding layers, but 'use_sliding_window' is not true, and implementations "
            "disagree on what that means; set it to true, or name the layers full_attention"
        )
    else:
        slides = []
    if not any(slides):
        return {}
    of_swa = config.integer("swa_window_size", 0) if config.flag("use_swa", False) else 0
    window = of_swa or config.integer("sliding_window")
    return {
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": np.array(slides, np.bool_),
    }


def value_types(metadata: Mapping[str, MetaValue]) -> Mapping[str, str]:
    """The types that a GGUF file has these values in."""
    names = {bool: "bool", int: "u32", float: "f32", str: "str"}
    found = {}
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            found[key] = f"array of {len(value)} {'bool' if value.dtype == np.bool_ else 'i32'}"
        else:
            found[key] = names[type(value)]
    return MappingProxyType(found)

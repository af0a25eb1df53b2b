"""Writes a random DFlash draft, version 1 or 2, beside a target file that gives it its vocabulary."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model_shapes import DraftShape
from random_tensors import TensorWriter, mix

from pyggml_dflash.ggml.gguf import GgufFile


class DraftWriter:
    """Adds the tensors and keys of one random draft to a `TensorWriter`."""

    def __init__(self, shape: DraftShape, n_vocab: int, out: TensorWriter) -> None:
        self._shape, self._n_vocab, self._out = shape, n_vocab, out

    def add_all(self) -> None:
        """Keys and every tensor; the vocabulary is the target's."""
        s, out, n_vocab = self._shape, self._out, self._n_vocab
        self._add_keys()
        out.matrix("fc.weight", (len(s.target_layers) * s.n_embd, s.n_embd), "matrix", 0)
        out.vector("enc.output_norm.weight", s.n_embd)
        out.vector("output_norm.weight", s.n_embd)
        for layer in range(s.n_layer):
            self._add_layer(layer)
        if s.version == 2:
            rank = s.selector_rank
            out.matrix("selector_hidden.weight", (s.n_embd, rank), "mixer", 0)
            for side in ("predecessor", "successor"):  # scores of pairs have a spread of one
                out.matrix(f"selector_{side}.weight", (rank, n_vocab), "table", 0, out_std=rank**0.25)

    def _add_keys(self) -> None:
        s, put = self._shape, self._out.file.set
        put("general.architecture", "dflash")
        put("general.name", f"random DFlash {s.version}")
        put("general.quantization_version", 2)
        keys: dict[str, object] = {
            "block_count": s.n_layer,
            "context_length": 262_144,
            "embedding_length": s.n_embd,
            "feed_forward_length": s.n_ff,
            "attention.head_count": s.n_head,
            "attention.head_count_kv": s.n_head_kv,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e7,
            "rope.dimension_sections": [s.head_dim // 2, 0, 0, 0],
            "block_size": s.block_size,
            "target_layers": list(s.target_layers),
            "attention.sliding_window": s.window,
            "attention.sliding_window_pattern": list(s.sliding),
        }
        if s.causal is not None:
            keys["attention.causal"] = s.causal
        if s.version == 2:
            keys |= {
                "conv_kernel_size": s.conv_taps,
                "conv_group_size": s.conv_group,
                "selector_rank": s.selector_rank,
                "selector_top_k": s.n_candidates,
            }
        for key, value in keys.items():
            put(f"dflash.{key}", value)
        put("tokenizer.ggml.mask_token_id", s.mask_token)

    def _add_layer(self, layer: int) -> None:
        s, out, p = self._shape, self._out, f"blk.{layer}."
        q_dim, kv_dim = s.head_dim * s.n_head, s.head_dim * s.n_head_kv
        out.vector(f"{p}attn_norm.weight", s.n_embd)
        out.matrix(f"{p}attn_q.weight", (s.n_embd, q_dim), "matrix", layer)
        out.matrix(f"{p}attn_k.weight", (s.n_embd, kv_dim), "matrix", layer)
        out.matrix(f"{p}attn_v.weight", (s.n_embd, kv_dim), "attn_v", layer)
        out.matrix(f"{p}attn_output.weight", (q_dim, s.n_embd), "matrix", layer)
        out.vector(f"{p}attn_q_norm.weight", s.head_dim)
        out.vector(f"{p}attn_k_norm.weight", s.head_dim)
        out.vector(f"{p}ffn_norm.weight", s.n_embd)
        out.matrix(f"{p}ffn_gate.weight", (s.n_embd, s.n_ff), "matrix", layer)
        out.matrix(f"{p}ffn_up.weight", (s.n_embd, s.n_ff), "matrix", layer)
        out.matrix(f"{p}ffn_down.weight", (s.n_ff, s.n_embd), "ffn_down", layer)
        if s.version == 2:
            width = 2 * s.conv_taps * (s.n_embd // s.conv_group)
            for part in ("attn", "ffn"):
                base = out.rng.normal(0, 0.1, (2, s.conv_taps, s.n_embd))
                base[:, 0] += 1  # the row itself, and a little of those before
                out.numbers(f"{p}{part}_conv_base", base)
                out.matrix(f"{p}{part}_conv_proj.weight", (s.n_embd, width), "mixer", layer, out_std=0.1)


def write_draft(path: Path, shape: DraftShape, type_name: str, target: Path, *, seed: int = 1) -> int:
    """Write a random draft for `target`, whose width and layers it takes; returns its parameters."""
    with GgufFile.open(target) as file:
        name = file.get_str("general.architecture")
        n_layer = file.get_int(f"{name}.block_count") - file.get_int(f"{name}.nextn_predict_layers", 0)
        n_vocab = len(file.get_strs("tokenizer.ggml.tokens"))
        fitted = shape.for_target(n_layer, file.get_int(f"{name}.embedding_length"), n_vocab)
        out = TensorWriter(mix(type_name, fitted.n_layer), seed)
        others = [key for key in file.metadata if not key.startswith("tokenizer.")]
        out.file.copy_metadata(file, without=[*others, "tokenizer.ggml.mask_token_id"])
        DraftWriter(fitted, n_vocab, out).add_all()
    out.file.write(path)
    return out.n_params

"""Writes a GGUF file of a real model's shape with random weights, to measure speed where no model is.

    python benchmarks/random_model.py qwen35-27b --mtp target.gguf
    python benchmarks/random_model.py dflash2-27b --target target.gguf --type Q8_0 draft.gguf

Names, keys and the mix of types are those of real files, so other programs load it too; the text is noise.
The same arguments give the same bytes. Bytes come from a pool (`random_blocks`), so the disk sets the pace:
2.6 GB take seconds. The shapes are in `model_shapes`. A model may have fewer layers than published; a draft
takes vocabulary, width and layer numbers from its target. `qwen4exp` has 70 GB of experts and an n-gram table
of 29 GB at 4 bits: give it fewer --layers and a smaller --ngram-base.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model_shapes import DRAFTS, PRESETS, Shape, tiny
from random_draft import write_draft
from random_next import NextLayers
from random_tensors import N_UNUSED, TYPES, TensorWriter, known_tokens, mix

LOGIT_STD = 4.0  # of the head's output, as trained models have about
TIED_STD = 2.0  # a tied head favours the token it just read; less, so that text does not stand still
MIN_VOCAB = len(known_tokens()) + N_UNUSED + 1


class ModelWriter:
    """Adds the tensors and keys of one random model to a `TensorWriter`."""

    def __init__(self, shape: Shape, out: TensorWriter) -> None:
        self._shape, self._out = shape, out
        self._next = None if shape.next is None else NextLayers(shape, shape.next, out)

    def add_all(self) -> None:
        """Keys, vocabulary, and every tensor."""
        s, out = self._shape, self._out
        self._add_keys()
        out.vocabulary(s.n_vocab, "qwen35" if s.is_hybrid else "qwen2")
        out.matrix(
            "token_embd.weight", (s.n_embd, s.n_vocab), "embedding", 0, TIED_STD if s.tied else LOGIT_STD
        )
        for layer in range(s.n_layer + s.n_mtp):
            self._add_layer(layer)
        if self._next is None:
            out.vector("output_norm.weight", s.n_embd)
        else:
            self._next.add_outer()
        if not s.tied:
            out.matrix("output.weight", (s.n_embd, s.n_vocab), "head", 0, LOGIT_STD)

    def _add_keys(self) -> None:
        s, put = self._shape, self._out.file.set
        put("general.architecture", s.architecture)
        put("general.name", f"random {s.architecture}")
        put("general.quantization_version", 2)
        keys: dict[str, object] = {
            "block_count": s.n_layer + s.n_mtp,
            "context_length": s.n_ctx,
            "embedding_length": s.n_embd,
            "attention.head_count": s.n_head,
            "attention.head_count_kv": s.n_head_kv,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": s.n_rot,
            "rope.freq_base": s.rope_base,
        }
        if s.n_mtp:
            keys["nextn_predict_layers"] = s.n_mtp
        if s.n_ff:
            keys["feed_forward_length"] = s.n_ff
        if s.is_hybrid:
            keys |= {
                "rope.dimension_sections": list(s.rope_sections),
                "full_attention_interval": 4,
                "ssm.conv_kernel": 4,
                "ssm.state_size": s.state,
                "ssm.group_count": s.n_key_head,
                "ssm.time_step_rank": s.n_value_head,
                "ssm.inner_size": s.value_dim,
            }
        if s.n_expert:
            keys |= {
                "expert_count": s.n_expert,
                "expert_used_count": s.n_expert_used,
                "expert_feed_forward_length": s.expert_ff,
                "expert_shared_feed_forward_length": s.expert_ff,
            }
        for key, value in keys.items():
            put(f"{s.architecture}.{key}", value)
        if self._next is not None:
            self._next.add_keys()

    def _add_layer(self, layer: int) -> None:
        s, out, p = self._shape, self._out, f"blk.{layer}."
        if self._next is None:
            out.vector(f"{p}attn_norm.weight", s.n_embd)
            second = "post_attention_norm" if s.is_hybrid else "ffn_norm"
            out.vector(f"{p}{second}.weight", s.n_embd)
        else:
            self._next.add_to_layer(layer)
        if s.is_recurrent(layer):
            self._add_delta_net(layer)
        else:
            self._add_attention(layer)
        if s.n_expert:
            self._add_experts(layer)
        else:
            out.matrix(f"{p}ffn_gate.weight", (s.n_embd, s.n_ff), "matrix", layer)
            out.matrix(f"{p}ffn_up.weight", (s.n_embd, s.n_ff), "matrix", layer)
            out.matrix(f"{p}ffn_down.weight", (s.n_ff, s.n_embd), "ffn_down", layer)
        if layer >= s.n_layer:
            self._add_mtp(layer)

    def _add_mtp(self, layer: int) -> None:
        s, out, p = self._shape, self._out, f"blk.{layer}.nextn."
        out.matrix(f"{p}eh_proj.weight", (2 * s.n_embd, s.n_embd), "matrix", layer)
        out.vector(f"{p}enorm.weight", s.n_embd)
        if self._next is None:
            out.vector(f"{p}hnorm.weight", s.n_embd)
            out.vector(f"{p}shared_head_norm.weight", s.n_embd)
        else:
            self._next.add_to_mtp(layer)

    def _add_attention(self, layer: int) -> None:
        s, out, p = self._shape, self._out, f"blk.{layer}."
        gated = 2 if s.is_hybrid else 1  # queries, and behind each head's its gate
        out.matrix(f"{p}attn_q.weight", (s.n_embd, gated * s.head_dim * s.n_head), "matrix", layer)
        out.matrix(f"{p}attn_k.weight", (s.n_embd, s.head_dim * s.n_head_kv), "matrix", layer)
        out.matrix(f"{p}attn_v.weight", (s.n_embd, s.head_dim * s.n_head_kv), "attn_v", layer)
        out.matrix(f"{p}attn_output.weight", (s.head_dim * s.n_head, s.n_embd), "matrix", layer)
        if s.architecture != "llama":
            out.vector(f"{p}attn_q_norm.weight", s.head_dim)
            out.vector(f"{p}attn_k_norm.weight", s.head_dim)

    def _add_delta_net(self, layer: int) -> None:
        s, out, p = self._shape, self._out, f"blk.{layer}."
        out.matrix(f"{p}attn_qkv.weight", (s.n_embd, s.conv_dim), "attn_v", layer)
        out.matrix(f"{p}attn_gate.weight", (s.n_embd, s.value_dim), "matrix", layer)
        out.matrix(f"{p}ssm_alpha.weight", (s.n_embd, s.n_value_head), "matrix", layer)
        out.matrix(f"{p}ssm_beta.weight", (s.n_embd, s.n_value_head), "matrix", layer)
        out.matrix(f"{p}ssm_out.weight", (s.value_dim, s.n_embd), "matrix", layer)
        out.vector(f"{p}ssm_norm.weight", s.state)
        out.numbers(f"{p}ssm_conv1d.weight", out.rng.normal(0, 0.5, (s.conv_dim, 4)))
        out.numbers(f"{p}ssm_dt.bias", out.rng.uniform(-4, -1, s.n_value_head))
        out.numbers(f"{p}ssm_a", -out.rng.uniform(0.2, 2, s.n_value_head))

    def _add_experts(self, layer: int) -> None:
        s, out, p = self._shape, self._out, f"blk.{layer}."
        out.numbers(f"{p}ffn_gate_inp.weight", out.rng.normal(0, s.n_embd**-0.5, (s.n_expert, s.n_embd)))
        out.numbers(f"{p}ffn_gate_inp_shexp.weight", out.rng.normal(0, s.n_embd**-0.5, s.n_embd))
        for end, more in (("exps", (s.n_expert,)), ("shexp", ())):
            out.matrix(f"{p}ffn_gate_{end}.weight", (s.n_embd, s.expert_ff, *more), "matrix", layer)
            out.matrix(f"{p}ffn_up_{end}.weight", (s.n_embd, s.expert_ff, *more), "matrix", layer)
            out.matrix(f"{p}ffn_down_{end}.weight", (s.expert_ff, s.n_embd, *more), "ffn_down", layer)


def write_model(path: Path, shape: Shape, type_name: str, *, seed: int = 1) -> int:
    """Write a random model; returns its number of parameters."""
    out = TensorWriter(mix(type_name, shape.n_layer, tied=shape.tied), seed)
    ModelWriter(shape, out).add_all()
    out.file.write(path)
    return out.n_params


def shape_of(
    preset: str, *, small: bool, layers: int | None, vocab: int | None, mtp: bool, ngram_base: int | None
) -> Shape:
    """A preset with the changes asked for; `click.UsageError` where it has nothing to change."""
    shape = tiny(PRESETS[preset]) if small else PRESETS[preset]
    if mtp and not shape.is_hybrid:
        raise click.UsageError(f"--mtp: {preset} has no MTP block")
    if ngram_base and shape.next is None:
        raise click.UsageError(f"--ngram-base: {preset} has no n-gram table")
    parts = replace(shape.next, ngram_base=ngram_base) if shape.next and ngram_base else shape.next
    return replace(
        shape, n_layer=layers or shape.n_layer, n_vocab=vocab or shape.n_vocab, n_mtp=int(mtp), next=parts
    )


@click.command()
@click.argument("preset", type=click.Choice([*PRESETS, *DRAFTS]))
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--type", "type_name", type=click.Choice(TYPES), default="Q4_K_M", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Layers of a model, instead of the preset's.")
@click.option("--vocab", type=click.IntRange(MIN_VOCAB), help="Rows of the vocabulary, likewise.")
@click.option("--mtp", is_flag=True, help="Add an MTP block behind the layers.")
@click.option("--ngram-base", type=click.IntRange(100), help="Rows per hash head of an n-gram table.")
@click.option("--tiny", "small", is_flag=True, help="The architecture at sizes for a test.")
@click.option(
    "--target",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The model that a draft is for; needed by drafts, and by nothing else.",
)
@click.option("--seed", default=1, show_default=True)
def main(
    preset: str,
    path: Path,
    type_name: str,
    layers: int | None,
    vocab: int | None,
    mtp: bool,
    ngram_base: int | None,
    small: bool,
    target: Path | None,
    seed: int,
) -> None:
    """Write a random model or draft of the shape PRESET to PATH."""
    started = time.perf_counter()
    if preset in DRAFTS:
        if target is None:
            raise click.UsageError(f"{preset} is a draft: name the model it is for with --target")
        if layers or vocab or mtp or ngram_base or small:
            raise click.UsageError("a draft takes its sizes from its target; leave other sizes out")
        n_params = write_draft(path, DRAFTS[preset], type_name, target, seed=seed)
    else:
        if target is not None:
            raise click.UsageError(f"--target: {preset} is no draft")
        shape = shape_of(preset, small=small, layers=layers, vocab=vocab, mtp=mtp, ngram_base=ngram_base)
        n_params = write_model(path, shape, type_name, seed=seed)
    seconds = time.perf_counter() - started
    print(f"{path}: {n_params / 1e9:.2f} G parameters, {path.stat().st_size / 1e9:.2f} GB, {seconds:.1f} s")


if __name__ == "__main__":
    main()

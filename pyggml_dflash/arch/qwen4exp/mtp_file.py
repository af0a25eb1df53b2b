"""The MTP block of qwen4exp in a file of its own: its names, and whether it is made for a target. Layer 4."""

from __future__ import annotations

from dataclasses import replace

from pyggml_dflash.arch.mtp import check_side, check_side_block
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig, layer_count, layer_ints, moe_config
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader


def with_names_of_today(file: GgufFile) -> TensorFile:
    """The file, or a view of it where it holds a block alone whose last mixer has its early names."""
    n_before = file.get_int("qwen4exp.block_count") - file.get_int("qwen4exp.nextn_predict_layers", 0)
    block = f"blk.{n_before}.nextn."
    older = {f"output_hc_{name}": f"{block}hc_head_{name}" for name in ("down.weight", "up.weight")}
    older[f"{block}shared_head_norm.weight"] = f"{block}hc_head_norm.weight"
    has_trunk = any(name.startswith("blk.0.") for name in file.tensors)
    if has_trunk or not older.keys() <= file.tensors.keys() or file.tensors.keys() & {*older.values()}:
        return file
    ours = {name: older.get(name, name) for name in file.tensors}
    tensors = {ours[name]: replace(t, name=ours[name]) for name, t in file.tensors.items()}
    shown = {today: name for name, today in older.items()}
    return TensorFile(file.path, file.metadata, file.value_types, tensors, file.maps, names=shown)


def read_side_streams(file: TensorFile, target: Qwen4ExpConfig, n_tokens: int) -> Qwen4ExpConfig:
    """The target's configuration with the MTP block that `file` brings; see `mtp.read_side_block`.

    Where the file does not tell how the block attends, it attends as the target's sparse layers do.
    """
    r = ConfigReader(file, file.get_str("general.architecture"))
    check_side_block(r, target, n_tokens)
    n_layer, n_all = target.n_layer, target.n_layer + 1
    for name, wanted in (
        ("attention.head_count", target.n_head),
        ("attention.head_count_kv", target.n_head_kv),
    ):
        own = layer_count(r, name, target.attention_layers, n_layer, n_all, high=4096)
        check_side(r, r.shown(name), own, wanted)
    for name, wanted in (
        ("attention.key_length", target.head_dim),
        ("attention.value_length", target.head_dim),
        ("hyper_connection.count", target.n_stream),
        ("hyper_connection.low_rank", target.low_rank),
        ("attention.indexer.head_count", target.indexer.n_head),
        ("attention.indexer.key_length", target.indexer.head_dim),
        ("attention.indexer.top_k", target.indexer.budget),
    ):
        check_side(r, r.shown(name), r.count(name), wanted)
    check_side(r, "set of experts", moe_config(r, n_layer, n_all), target.moe)
    ratio = max(target.ratios)
    if r.has("attention.compress_ratios"):
        own_ratios = layer_ints(r, "attention.compress_ratios", n_layer, n_all)
        check_side(r, "compress ratio", max(own_ratios), ratio)
        ratio = own_ratios[n_layer] if len(own_ratios) == n_all else ratio
    return replace(target, n_mtp=1, ratios=(*target.ratios[:n_layer], ratio))

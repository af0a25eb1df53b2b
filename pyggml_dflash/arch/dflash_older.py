"""Drafts from before llama.cpp had DFlash, under other keys, opened as a `dflash` GGUF file. Layer 4.

The architecture is `qwen35-dflash-draft` or `dflash-draft`. Target layers are counted by their outputs, as
published. What other programs took from the target or from constants, and so is not in every file, cannot be
made up here: such a file is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from pyggml_dflash.arch.dflash_folder_config import MASK_TOKEN, value_types
from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_values import MetaValue
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.checkpoint import MAX_COUNT

OLDER_ARCHITECTURES: Final = ("qwen35-dflash-draft", "dflash-draft")
ADVICE: Final = "convert the published folder with 'dflash convert-draft'"

COUNTS: Final = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
)
OPTIONAL_COUNTS: Final = ("attention.value_length", "vocab_size", "rope.dimension_count")
NUMBERS: Final = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
NOT_NEEDED: Final = (  # what tensors say as well, and programs disagree on
    "dflash.n_target_layers",
    "dflash.n_target_features",
    "dflash.feat_dim_per_capture",
    "n_target_layers",
    "n_target_features",
)
TENSORS: Final = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
}
VARIANTS: Final = {
    "dflash.domino.": "Domino drafts",
    "dflash.dspark.": "DSpark drafts",
    "dflash.aux_hidden_norm.": "drafts that normalise each target layer",
}


def open_older_draft(file: GgufFile) -> TensorFile:
    """A view of `file`, whose mappings it shares, under today's keys and names."""
    older = _Older(file)
    metadata, names = older.metadata(), older.tensor_names()
    types = dict(value_types(metadata))
    for key, value in file.metadata.items():
        if key.startswith("tokenizer.") or key == "general.name":
            metadata[key], types[key] = value, file.value_types[key]
    tensors = {ours: replace(file.tensors[theirs], name=ours) for theirs, ours in names.items()}
    shown = older.keys | {ours: theirs for theirs, ours in names.items()}
    return TensorFile(file.path, metadata, types, tensors, file.maps, names=shown)


class _Older:
    """Reads one file; `keys` has what today's keys are called in it."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = file.get_str("general.architecture") + "."
        self.keys: dict[str, str] = {}

    def metadata(self) -> dict[str, MetaValue]:
        """Today's keys."""
        self._refuse_variants()
        file = self._file
        found: dict[str, MetaValue] = {"general.architecture": "dflash"}
        for name in COUNTS:
            found[f"dflash.{name}"] = file.get_int(self._key(name))
        for name in OPTIONAL_COUNTS:
            if (count := file.get_int(self._key(name), None)) is not None:
                found[f"dflash.{name}"] = count
        for name in NUMBERS:
            found[f"dflash.{name}"] = file.get_float(self._key(name))
        found["dflash.block_size"] = self._int("block_size", "dflash.block_size", "its block size")
        found[MASK_TOKEN] = self._mask_token()
        found["dflash.target_layers"] = np.array([i + 1 for i in self._target_layer_ids()], np.int32)
        found |= self._sliding(file.get_int(self._key("block_count")))
        self._refuse_unknown()
        return found

    def _key(self, name: str) -> str:
        """The key with the file's prefix, noted as what today's is called."""
        self.keys[f"dflash.{name}"] = key = self._prefix + name
        return key

    def _either(self, name: str, today: str) -> str | None:
        """The one key of `name` that the file has: some writers put 'dflash.' before it, some do not."""
        keys = [k for k in (self._prefix + "dflash." + name, self._prefix + name) if k in self._file.metadata]
        if len(keys) == 2 and not np.array_equal(*(self._file.metadata[k] for k in keys)):  # type: ignore[arg-type]
            raise DamagedFileError(f"{self._file.path}: {keys[0]} and {keys[1]} are not the same")
        if keys:
            self.keys[today] = keys[0]
        return keys[0] if keys else None

    def _int(self, name: str, today: str, what: str) -> int:
        key = self._either(name, today)
        if key is None:
            raise self._ambiguous(what, self._prefix + "dflash." + name)
        return self._file.get_int(key)

    def _mask_token(self) -> int:
        if MASK_TOKEN in self._file.metadata:
            return self._file.get_int(MASK_TOKEN)
        return self._int("mask_token_id", MASK_TOKEN, "its mask token")

    def _target_layer_ids(self) -> list[int]:
        key = self._either("target_layer_ids", "dflash.target_layers")
        if key is None:
            raise self._ambiguous("which target layers it reads", self._prefix + "dflash.target_layer_ids")
        ids = self._file.get_ints(key)
        for i in ids:
            if not 0 <= i <= MAX_COUNT:
                raise DamagedFileError(f"{self._file.path}: {key} has {i}; expected 0 to {MAX_COUNT}")
        return ids

    def _ambiguous(self, what: str, key: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._file.path}: this older draft does not say {what} ({key}), which programs took from "
            f"their target: {ADVICE}"
        )

    def _sliding(self, n_layer: int) -> dict[str, MetaValue]:
        """Window and layers; a window without a list of layers was ignored by some, applied by others."""
        window_key = self._key("attention.sliding_window")
        pattern_key = self._key("attention.sliding_window_pattern")
        if not self._file.get_int(window_key, 0) and pattern_key not in self._file.metadata:
            return {}
        if pattern_key not in self._file.metadata:
            raise self._ambiguous("which layers have its window", pattern_key)
        pattern = self._file.get_bools(pattern_key, n=n_layer)
        if not any(pattern):
            return {}
        return {
            "dflash.attention.sliding_window": self._file.get_int(window_key),
            "dflash.attention.sliding_window_pattern": np.array(pattern, np.bool_),
        }

    def _refuse_variants(self) -> None:
        names = [*self._file.tensors, *(k.removeprefix(self._prefix) for k in self._file.metadata)]
        for start, what in VARIANTS.items():
            found = next((name for name in names if name.startswith(start)), None)
            if found is not None:
                raise UnsupportedModelError(f"{self._file.path}: {what} are not supported ({found})")

    def _refuse_unknown(self) -> None:
        known = {*self.keys.values(), *(self._prefix + name for name in NOT_NEEDED)}
        known |= {self._prefix + end for end in ("mask_token_id", "block_size", "target_layer_ids")}
        for key in self._file.metadata:
            if key.startswith(self._prefix) and key not in known:
                raise UnsupportedModelError(
                    f"{self._file.path}: what {key} changes in an older draft is not known: {ADVICE}"
                )

    def tensor_names(self) -> dict[str, str]:
        """Names in the file, and today's."""
        names: dict[str, str] = {}
        taken: set[str] = set()
        for theirs in self._file.tensors:
            ours = TENSORS.get(theirs, theirs)
            if theirs.startswith("blk.") and theirs.endswith(".post_attention_norm.weight"):
                ours = theirs.replace("post_attention_norm", "ffn_norm")
            if ours in taken:
                raise UnsupportedModelError(
                    f"{self._file.path}: tensor {theirs!r} may stand for {ours!r}, which is there too: "
                    f"{ADVICE}"
                )
            names[theirs] = ours
            taken.add(ours)
        return names

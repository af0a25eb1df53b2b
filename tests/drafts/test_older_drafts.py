"""Drafts under the older keys and names say what today's say; what they leave to their target is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.arch.dflash_config import read_draft
from pyggml_dflash.arch.draft_forms import draft_kind, open_draft
from pyggml_dflash.errors import ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.drafts.drafted import arrays, draft_file, open_target, with_draft
from tests.reference.stored import model_file

ARCHITECTURES = ("qwen35-dflash-draft", "dflash-draft")
COPIED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
)
DOTTED = {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}
UNDERSCORED = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}


def older(
    source: Path,
    folder: Path,
    *,
    architecture: str = ARCHITECTURES[0],
    names: Mapping[str, str] = DOTTED,
    keys: Mapping[str, object] | None = None,
    tensors: tuple[str, ...] = (),
) -> Path:
    """The draft as older programs wrote it, with keys put in place of others (None: left out)."""
    writer = GgufWriter()
    with GgufFile.open(source) as file:
        found: dict[str, Any] = {
            name: file.metadata[f"dflash.{name}"] for name in COPIED if f"dflash.{name}" in file.metadata
        }
        found["vocab_size"] = 768
        found["dflash.n_target_layers"] = 5  # of whatever; programs disagree on what it counts
        found["dflash.block_size"] = file.get_int("dflash.block_size")
        found["dflash.mask_token_id"] = file.get_int("tokenizer.ggml.mask_token_id")
        found["dflash.target_layer_ids"] = [i - 1 for i in file.get_ints("dflash.target_layers")]
        writer.set("general.architecture", architecture)
        for name, value in (found | dict(keys or {})).items():
            if value is not None:
                whole = name.startswith("tokenizer.")
                writer.set(name if whole else f"{architecture}.{name}", value)
        for t in file.tensors.values():
            ours = names.get(t.name, t.name)
            if "ffn_norm" in names:
                ours = ours.replace("ffn_norm", names["ffn_norm"])
            writer.add_raw(ours, file.data(t).copy(), shape=t.shape, element=t.type)
        for name in tensors:
            writer.add_tensor(name, np.zeros(128, np.float32))
        (path,) = writer.write(folder / "older.gguf")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("names", [DOTTED, UNDERSCORED, UNDERSCORED | {"ffn_norm": "post_attention_norm"}])
@pytest.mark.parametrize("name", ["dflash-tiny", "dflash-swa-default-tiny"])
def test_an_older_file_says_what_todays_says(
    folder: Path, tmp_path: Path, name: str, names: dict[str, str], architecture: str
) -> None:
    source = draft_file(name, folder)
    path = older(source, tmp_path, architecture=architecture, names=names)
    with open_draft(path) as file, open_draft(source) as today:
        assert read_draft(file) == read_draft(today)
        assert {*file.tensors} == {*today.tensors}
        for tensor in today.tensors.values():
            found = file.tensors[tensor.name]
            assert (found.shape, found.type) == (tensor.shape, tensor.type)
            np.testing.assert_array_equal(file.data(found), today.data(tensor))


def test_keys_may_stand_without_the_second_prefix(folder: Path, tmp_path: Path) -> None:
    source = draft_file("dflash-tiny", folder)
    ends = {"block_size": 8, "mask_token_id": 763, "target_layer_ids": [1, 3, 6]}
    keys = ends | {f"dflash.{name}": None for name in ends}
    with open_draft(older(source, tmp_path, keys=keys)) as file, open_draft(source) as today:
        assert read_draft(file) == read_draft(today)


def test_an_older_file_proposes_what_todays_proposes(folder: Path, tmp_path: Path) -> None:
    z = arrays("dflash-fitted-tiny")
    path = older(draft_file("dflash-fitted-tiny", folder), tmp_path)
    with open_target(model_file("qwen35-tiny", "F32", folder)) as target, with_draft(target, path) as drafted:
        for i in range(4):
            drafted.begin()
            drafted.feed(z[f"d{i}_tokens"].tolist())
            assert drafted.propose(int(z[f"d{i}_anchor"][0])).tokens == tuple(z[f"d{i}_proposal"].tolist())


PREFIX = "qwen35-dflash-draft."
NOT_SAID: tuple[tuple[str, dict[str, object], str], ...] = (
    (
        "target-layers",
        {"dflash.target_layer_ids": None},
        f"({PREFIX}dflash.target_layer_ids), which programs",
    ),
    ("mask-token", {"dflash.mask_token_id": None}, f"its mask token ({PREFIX}dflash.mask_token_id)"),
    ("block-size", {"dflash.block_size": None}, f"its block size ({PREFIX}dflash.block_size)"),
    (
        "window-of-which-layers",
        {"attention.sliding_window": 24},
        f"which layers have its window ({PREFIX}attention.sliding_window_pattern)",
    ),
    ("something-else", {"dflash.mystery": 3}, f"what {PREFIX}dflash.mystery changes"),
)


@pytest.mark.parametrize(("keys", "reason"), [c[1:] for c in NOT_SAID], ids=[c[0] for c in NOT_SAID])
def test_what_an_older_file_does_not_say_is_refused_with_what_would_work(
    folder: Path, tmp_path: Path, keys: dict[str, object], reason: str
) -> None:
    path = older(draft_file("dflash-tiny", folder), tmp_path, keys=keys)
    with pytest.raises(UnsupportedModelError) as caught:
        open_draft(path)
    assert reason in str(caught.value)
    assert "convert the published folder with 'dflash convert-draft'" in str(caught.value)


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("domino-key", {"keys": {"dflash.domino.enabled": 1}}, "Domino drafts are not supported"),
    ("domino-tensor", {"tensors": ("dflash.domino.start",)}, "Domino drafts are not supported"),
    ("dspark", {"keys": {"dflash.dspark.enabled": 1}}, "DSpark drafts are not supported"),
    ("aux-norm", {"tensors": ("dflash.aux_hidden_norm.0.weight",)}, "normalise each target layer"),
    ("gate", {"tensors": ("blk.0.attn_gate.weight",)}, "gated draft variants are not supported"),
    ("two-norms", {"tensors": ("blk.0.post_attention_norm.weight",)}, "which is there too"),
    ("two-fusions", {"tensors": ("dflash_fc.weight",)}, "which is there too"),
    ("layer-beyond-int", {"keys": {"dflash.target_layer_ids": [2**40]}}, "has 1099511627776; expected 0"),
    ("negative-layer", {"keys": {"dflash.target_layer_ids": [-5]}}, "has -5; expected 0"),
    ("no-width", {"keys": {"embedding_length": None}}, f"'{PREFIX}embedding_length' (an integer) is missing"),
    ("no-base", {"keys": {"rope.freq_base": None}}, f"'{PREFIX}rope.freq_base' (a number) is missing"),
    ("block-of-one", {"keys": {"dflash.block_size": 1}}, f"{PREFIX}dflash.block_size is 1; expected 2"),
    (
        "two-sizes",
        {"keys": {"block_size": 7}},
        f"{PREFIX}dflash.block_size and {PREFIX}block_size are not the",
    ),
    (
        "other-family",
        {"architecture": "gemma4-dflash-draft"},
        "architecture 'gemma4-dflash-draft' is no draft",
    ),
)


def opened_and_read(path: Path) -> None:
    with open_draft(path) as file:
        draft_kind(file)
        read_draft(file)


@pytest.mark.parametrize(("change", "reason"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_variant_or_a_contradiction_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = older(draft_file("dflash-tiny", folder), tmp_path, **change)
    with pytest.raises(ModelFileError) as caught:
        opened_and_read(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("key", ["dflash.target_layer_ids", "dflash.dflash.target_layer_ids"])
def test_target_layers_under_a_name_that_may_count_either_way_are_refused(
    folder: Path, tmp_path: Path, key: str
) -> None:
    writer = GgufWriter()
    with GgufFile.open(draft_file("dflash-tiny", folder)) as file:
        writer.copy_metadata(file, without={"dflash.target_layers"})
        writer.set(key, [1, 3, 6])
        for name in file.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        (path,) = writer.write(tmp_path / "draft.gguf")
    with (
        open_draft(path) as file,
        pytest.raises(UnsupportedModelError, match="from their input or from") as e,
    ):
        read_draft(file)
    assert f"{key} does not say" in str(e.value)
    assert "write dflash.target_layers, which counts inputs" in str(e.value)

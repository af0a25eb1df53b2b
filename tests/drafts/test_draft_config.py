"""A draft that was made for another target, or is of a kind that is not known, is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.arch.dflash_config import DraftConfig, draft_tensors, read_draft_config
from pyggml_dflash.errors import ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import check_tensors
from pyggml_dflash.options import DraftCausal
from tests.drafts.drafted import draft_file
from tests.reference.stored import model_file

TOO_MANY = [f"t{i}" for i in range(769)]  # the target has 768


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def target(folder: Path) -> ModelConfig:
    with GgufFile.open(model_file("qwen35-tiny", "F32", folder)) as file:
        name, architecture = architecture_of(file)
        return architecture.read_config(file, name)


@pytest.fixture(scope="module")
def drafts(folder: Path) -> Iterator[dict[str, GgufFile]]:
    with ExitStack() as stack:
        names = (
            "dflash-tiny",
            "dflash-swa-tiny",
            "dflash-swa-default-tiny",
            "dflash2-tiny",
            "dflash-fitted-tiny",
        )
        yield {name: stack.enter_context(GgufFile.open(draft_file(name, folder))) for name in names}


def read_edited(
    source: GgufFile,
    target: ModelConfig,
    folder: Path,
    metadata: Mapping[str, object],
    tensors: tuple[str, ...] = (),
) -> DraftConfig:
    """The configuration with keys put in place of others (None: left out), and more tensors named."""
    writer = GgufWriter()
    writer.copy_metadata(source, without=set(metadata))
    for key, value in metadata.items():
        if value is not None:
            writer.set(key, value)
    for name in (*source.tensors, *tensors):
        writer.add_tensor(name, np.zeros(1, np.float32))  # only the names are read here
    path = folder / "edited.gguf"
    writer.write(path)
    with GgufFile.open(path) as file:
        return read_draft_config(file, target)


OF_ANOTHER_TARGET: tuple[tuple[str, dict[str, object], str], ...] = (
    ("width", {"dflash.embedding_length": 256}, "its width is 256, the target's 128"),
    ("vocabulary", {"tokenizer.ggml.tokens": TOO_MANY}, "its vocabulary has 769 tokens, the target's 768"),
    ("mask-token", {"tokenizer.ggml.mask_token_id": 768}, "its mask token is 768, the target has 768 tokens"),
    ("negative-mask-token", {"tokenizer.ggml.mask_token_id": -1}, "its mask token is -1"),
    ("layer-0", {"dflash.target_layers": [0, 4, 7]}, "layer 0; the target has layers 1 to 7"),
    ("layer-beyond", {"dflash.target_layers": [2, 4, 8]}, "layer 8; the target has layers 1 to 7"),
    ("negative-layer", {"dflash.target_layers": [2, -1, 7]}, "layer -1; the target has layers 1 to 7"),
)


@pytest.mark.parametrize(
    ("metadata", "reason"), [c[1:] for c in OF_ANOTHER_TARGET], ids=[c[0] for c in OF_ANOTHER_TARGET]
)
def test_a_draft_for_another_target_is_refused_with_the_reason(
    drafts: dict[str, GgufFile], target: ModelConfig, tmp_path: Path, metadata: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="this draft is for another target") as caught:
        read_edited(drafts["dflash-tiny"], target, tmp_path, metadata)
    assert reason in str(caught.value)
    assert "edited.gguf" in str(caught.value)


DAMAGED: tuple[tuple[str, str, dict[str, object], str], ...] = (
    ("no-mask-token", "dflash-tiny", {"tokenizer.ggml.mask_token_id": None}, "tokenizer.ggml.mask_token_id"),
    ("no-layers", "dflash-tiny", {"dflash.target_layers": None}, "dflash.target_layers"),
    (
        "layer-twice",
        "dflash-tiny",
        {"dflash.target_layers": [2, 4, 2]},
        "dflash.target_layers repeats a layer",
    ),
    ("block-of-one", "dflash-tiny", {"dflash.block_size": 1}, "dflash.block_size is 1; expected 2 to 256"),
    ("no-layer", "dflash-tiny", {"dflash.block_count": 0}, "dflash.block_count is 0"),
    (
        "pattern-too-short",
        "dflash-swa-tiny",
        {"dflash.attention.sliding_window_pattern": [True]},
        "sliding_window_pattern",
    ),
    (
        "group-size",
        "dflash2-tiny",
        {"dflash.conv_group_size": 7},
        "128 channels are no whole number of groups of 7",
    ),
    ("no-group-size", "dflash2-tiny", {"dflash.conv_group_size": None}, "dflash.conv_group_size"),
    ("no-taps", "dflash2-tiny", {"dflash.conv_kernel_size": 0}, "dflash.conv_kernel_size is 0"),
    ("no-candidates", "dflash2-tiny", {"dflash.selector_top_k": 0}, "dflash.selector_top_k is 0"),
    ("no-rank", "dflash2-tiny", {"dflash.selector_rank": None}, "dflash.selector_rank"),
)


@pytest.mark.parametrize(
    ("name", "metadata", "reason"), [c[1:] for c in DAMAGED], ids=[c[0] for c in DAMAGED]
)
def test_a_draft_with_impossible_numbers_is_refused_by_their_names(
    drafts: dict[str, GgufFile],
    target: ModelConfig,
    tmp_path: Path,
    name: str,
    metadata: dict[str, object],
    reason: str,
) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_edited(drafts[name], target, tmp_path, metadata)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("marker", "what"),
    [
        ("markov_w1.weight", "DSpark drafts are not supported"),
        ("blk.0.attn_sinks", "drafts with attention sinks are not supported"),
        ("blk.0.attn_gate.weight", "gated draft variants are not supported"),
    ],
)
def test_drafts_of_other_kinds_are_refused_by_their_kind(
    drafts: dict[str, GgufFile], target: ModelConfig, tmp_path: Path, marker: str, what: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_edited(drafts["dflash-tiny"], target, tmp_path, {}, (marker,))
    assert what in str(caught.value)
    assert repr(marker) in str(caught.value)


def test_a_tensor_of_another_shape_is_refused(
    drafts: dict[str, GgufFile], target: ModelConfig, tmp_path: Path
) -> None:
    config = read_edited(drafts["dflash2-tiny"], target, tmp_path, {})
    with GgufFile.open(tmp_path / "edited.gguf") as file, pytest.raises(ModelFileError, match=r"fc\.weight"):
        check_tensors(file, draft_tensors(config, target.n_vocab))


def test_what_is_read_of_a_draft(drafts: dict[str, GgufFile], target: ModelConfig) -> None:
    first = read_draft_config(drafts["dflash-tiny"], target)
    assert (first.version, first.block_size, first.target_layers) == (1, 8, (2, 4, 7))
    assert (first.mask_token, first.windows, first.causal) == (763, (0, 0, 0), (False, False, False))
    second = read_draft_config(drafts["dflash2-tiny"], target)
    assert second.conv is not None
    assert second.selector is not None
    assert (second.version, second.conv.n_taps, second.conv.group_size) == (2, 3, 8)
    assert (second.selector.rank, second.selector.n_candidates) == (16, 6)
    assert (round(second.logit_scale, 6), second.softcap) == (0.9, 30.0)


@pytest.mark.parametrize(
    ("name", "causality", "causal"),
    [
        ("dflash-swa-tiny", "auto", (False, False)),  # the file says so
        ("dflash-swa-tiny", "swa", (True, False)),
        ("dflash-swa-tiny", "all", (True, True)),
        ("dflash-swa-default-tiny", "auto", (True, False)),
        ("dflash-swa-default-tiny", "none", (False, False)),
        ("dflash-swa-default-tiny", "all", (True, True)),
    ],
)
def test_causality_is_the_users_else_the_files_else_that_of_sliding_layers(
    drafts: dict[str, GgufFile],
    target: ModelConfig,
    name: str,
    causality: DraftCausal,
    causal: tuple[bool, ...],
) -> None:
    config = read_draft_config(drafts[name], target, causality)
    assert (config.windows, config.causal) == ((24, 0), causal)

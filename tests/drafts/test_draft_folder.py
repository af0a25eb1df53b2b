"""A published folder says what the GGUF file made of it says; what is wrong or unclear is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash import EngineOptions, fit_report
from pyggml_dflash.arch import architecture_of
from pyggml_dflash.arch.dflash_config import draft_tensors, read_draft, read_draft_config
from pyggml_dflash.arch.draft_forms import open_draft
from pyggml_dflash.errors import ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import check_tensors
from tests.drafts.drafted import arrays, draft_file, open_target, with_draft
from tests.drafts.published import Stored, as_bf16, draft_config, publish, stored_tensors, write_safetensors
from tests.reference.stored import model_file

DRAFTS = ("dflash-tiny", "dflash-swa-tiny", "dflash-swa-default-tiny", "dflash2-tiny", "dflash-fitted-tiny")
PUBLISHED_SHA256 = "b4faf289c1df440a01623fd4d2749ab84ce18e5b3d7a67ae47c877de86bae2a1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[ModelConfig]:
    with GgufFile.open(model_file("qwen35-tiny", "F32", folder)) as file:
        name, architecture = architecture_of(file)
        yield architecture.read_config(file, name)


def numbers(file: TensorFile, name: str) -> np.ndarray[Any, Any]:
    """A tensor's elements in single precision."""
    t = file.tensors[name]
    data = file.data(t)
    if t.type.name == "BF16":
        return (data.view("<u2").astype("<u4") << 16).view("<f4").reshape(t.shape)
    return data.view({"F32": "<f4", "F16": "<f2"}[t.type.name]).astype("<f4").reshape(t.shape)


def test_the_folder_that_tests_write_is_the_published_one(tmp_path: Path) -> None:
    path = publish("dflash-fitted-tiny", tmp_path, kind="F16")
    assert hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() == PUBLISHED_SHA256


@pytest.mark.parametrize("name", DRAFTS)
def test_a_folder_and_a_file_of_one_draft_say_the_same(folder: Path, tmp_path: Path, name: str) -> None:
    with open_draft(publish(name, tmp_path)) as published, open_draft(draft_file(name, folder)) as file:
        assert read_draft(published) == read_draft(file)
        assert {*published.tensors} == {*file.tensors}
        for tensor in file.tensors.values():
            found = published.tensors[tensor.name]
            assert (found.shape, found.type) == (tensor.shape, tensor.type)
            np.testing.assert_array_equal(published.data(found), file.data(tensor))


def test_matrices_stay_as_they_are_and_vectors_become_single_precision(tmp_path: Path) -> None:
    with open_draft(publish("dflash2-tiny", tmp_path, change=as_bf16)) as file:
        expected = stored_tensors("dflash2-tiny")
        for tensor in file.tensors.values():
            vector = len(tensor.shape) == 1 or tensor.name.endswith("_conv_base")
            assert tensor.type.name == ("F32" if vector else "BF16"), tensor.name
            wanted = expected[file.shown(tensor.name)][1]
            cut = (wanted.view("<u4") >> 16 << 16).view("<f4")
            np.testing.assert_array_equal(numbers(file, tensor.name), cut.reshape(tensor.shape))


@pytest.mark.parametrize("name", ["dflash-fitted-tiny", "dflash2-tiny"])
def test_a_draft_in_bf16_drafts(folder: Path, tmp_path: Path, name: str) -> None:
    """Weights of 8 bits are near enough to propose what the exact ones do, most of the time."""
    z = arrays(name)
    path = publish(name, tmp_path, change=as_bf16)
    same, total = 0, 0
    with open_target(model_file("qwen35-tiny", "F32", folder)) as target, with_draft(target, path) as drafted:
        for i in range(4):
            drafted.begin()
            drafted.feed(z[f"d{i}_tokens"].tolist())
            proposal = drafted.propose(int(z[f"d{i}_anchor"][0])).tokens
            same += int((np.array(proposal) == z[f"d{i}_proposal"]).sum())
            total += len(proposal)
    assert same > 0.6 * total


def prefixed(tensors: Stored) -> Stored:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def suffixed_codebooks(tensors: Stored) -> Stored:
    return {name + ".weight" * name.endswith("_codebook"): tensor for name, tensor in tensors.items()}


def with_spare_tensors(tensors: Stored) -> Stored:
    spare = {"embed_tokens.weight": ("F32", np.zeros((768, 128), "<f4"))}
    return tensors | spare | {"rotary_emb.inv_freq": ("F32", np.zeros(16, "<f4"))}


@pytest.mark.parametrize("change", [prefixed, suffixed_codebooks, with_spare_tensors])
def test_published_folders_differ_in_names_that_mean_nothing(tmp_path: Path, change: Any) -> None:
    path = publish("dflash2-tiny", tmp_path, change=change, config={"has_embed_tokens": False})
    with open_draft(path) as file, open_draft(draft_file("dflash2-tiny", tmp_path)) as plain:
        assert read_draft(file) == read_draft(plain)
        assert {*file.tensors} == {*plain.tensors}


def side_by_side(tensors: Stored) -> Stored:
    """Rotary pairs (0, 1), (2, 3) where they were (0, 16), (1, 17); heads have 32 elements."""
    order = np.arange(32).reshape(2, 16).T.reshape(-1)

    def mixed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values.reshape(-1, 32, *values.shape[1:])[:, order].reshape(values.shape)

    turned = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
    return {
        name: (dtype, mixed(values) if name.endswith(turned) else values)
        for name, (dtype, values) in tensors.items()
    }


def test_rotary_pairs_side_by_side_are_put_half_a_head_apart(tmp_path: Path) -> None:
    path = publish("dflash-tiny", tmp_path, change=side_by_side, config={"rope_is_neox_style": False})
    with open_draft(path) as file, open_draft(draft_file("dflash-tiny", tmp_path)) as plain:
        for name in plain.tensors:
            np.testing.assert_array_equal(numbers(file, name), numbers(plain, name), err_msg=name)


def said(tmp_path: Path, name: str, config: dict[str, Any]) -> Any:
    with open_draft(publish(name, tmp_path, config=config)) as file:
        return read_draft(file)


def nested(name: str, **values: Any) -> dict[str, Any]:
    """dflash_config with values put in place of others."""
    return {"dflash_config": draft_config(name)["dflash_config"] | values}


MASK = {"mask_token_id": 763}
SPELLINGS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "beside",
        {"dflash_config": None, "mask_token_id": 763, "target_layer_ids": [1, 3, 6]},
        {"target_layers": (2, 4, 7)},
    ),
    ("inside-wins", {**nested("dflash-tiny", block_size=5), "block_size": 8}, {"block_size": 5}),
    ("no-block-size", {"block_size": None}, {"block_size": 16}),
    ("ids-by-rule", {"dflash_config": MASK}, {"target_layers": (2, 4, 6)}),
    ("causal", {"is_causal": True}, {"causal": (True, True, True)}),
    ("causal-inside", nested("dflash-tiny", causal=True), {"causal": (True, True, True)}),
    ("scales", {"output_multiplier": 0.5, "input_embedding_scale": 2}, {"logit_scale": 0.5}),
    ("value-scale", nested("dflash-tiny", attention_value_scale=0.25), {"value_scale": 0.25}),
    ("swa", nested("dflash-tiny", use_swa=True, swa_window_size=9), {"windows": (9, 9, 9)}),
    ("swa-old", {"use_swa": True, "sliding_window": 7}, {"windows": (7, 7, 7), "causal": (True,) * 3}),
    (
        "derived-types",
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        {"windows": (0, 0, 5), "causal": (False, False, True)},
    ),
    ("window-of-none", {"use_sliding_window": True, "sliding_window": None}, {"windows": (0, 0, 0)}),
)


@pytest.mark.parametrize(("config", "expected"), [s[1:] for s in SPELLINGS], ids=[s[0] for s in SPELLINGS])
def test_what_a_configuration_says(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = said(tmp_path, "dflash-tiny", config)
    for name, value in expected.items():
        assert getattr(found, name) == value


ROTARY: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"rope_parameters": None, "rope_theta": 5e5}, {"freq_base": 5e5, "scaling": "none", "n_dims": 32}),
    ({"rope_parameters": {"rope_theta": 7e5}, "rope_theta": 1}, {"freq_base": 7e5}),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4}}, {"scaling": "linear"}),
    ({"partial_rotary_factor": 0.5}, {"n_dims": 16}),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4]}}, {"scaling": "none"}),
    (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8,
                "original_max_position_embeddings": 2048,
                "beta_fast": 30,
                "attention_factor": None,
            }
        },
        {"scaling": "yarn", "factor": 8.0, "n_ctx_orig": 2048, "beta_fast": 30.0, "beta_slow": 1.0},
    ),
)


@pytest.mark.parametrize(("config", "expected"), ROTARY)
def test_what_a_configuration_says_of_positions(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = said(tmp_path, "dflash-tiny", config).rope
    for name, value in expected.items():
        assert getattr(found, name) == value


def test_one_draft_layer_reads_the_middle_of_its_target(tmp_path: Path) -> None:
    config = draft_config("dflash-tiny") | {"num_hidden_layers": 1, "dflash_config": MASK}
    path = publish("dflash-tiny", tmp_path, config=config | {"layer_types": ["full_attention"]})
    with open_draft(path) as file:
        assert file.get_ints("dflash.target_layers") == [5]


BAD_CONFIGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("no-width", {"hidden_size": None}, "'hidden_size' is missing"),
    ("no-layers", {"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
    ("too-many-layers", {"num_hidden_layers": 65}, "'num_hidden_layers' is 65; it must be"),
    ("no-epsilon", {"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
    ("no-mask", nested("dflash2-tiny", mask_token_id=None), "'mask_token_id' is missing"),
    ("no-ids", {"dflash_config": MASK, "num_target_layers": None}, "'num_target_layers' is missing"),
    ("no-base", {"rope_parameters": {}, "rope_theta": None}, "'rope_theta' is missing"),
    ("no-taps", nested("dflash2-tiny", conv_kernel_size=None), "'conv_kernel_size' (an integer) is missing"),
    ("no-rank", nested("dflash2-tiny", selector_rank=None), "'selector_rank' (an integer) is missing"),
    ("width-zero", {"hidden_size": 0}, "'hidden_size' is 0; it must be a whole number from 1"),
    ("width-of-text", {"hidden_size": "128"}, "'hidden_size' is \"128\"; it must be a whole number"),
    ("block-of-one", nested("dflash2-tiny", block_size=1), "block_size is 1; expected 2 to 256"),
    ("heads", {"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads evenly"),
    ("negative-mask", nested("dflash2-tiny", mask_token_id=-1), "'mask_token_id' is -1; it must be"),
    ("ids-of-text", nested("dflash2-tiny", target_layer_ids=["a"]), "'target_layer_ids' is [\"a\"]"),
    ("id-twice", nested("dflash2-tiny", target_layer_ids=[1, 1]), "target_layer_ids repeats a layer"),
    ("no-id", nested("dflash2-tiny", target_layer_ids=[]), "target_layer_ids is empty"),
    ("group-size", nested("dflash2-tiny", conv_group_size=7), "no whole number of groups of 7"),
    ("activation", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; known: silu"),
    ("other-kind", {"architectures": ["Qwen3DSparkModel"]}, "known are DFlashDraftModel, DFlash2DraftModel"),
    ("no-kind", {"architectures": []}, "'architectures' is []"),
    ("dspark", {"sample_from_anchor": True}, "DSpark drafts are not supported ('sample_from_anchor')"),
    ("rotary-kind", {"rope_parameters": {"rope_type": "llama3"}}, "'rope_parameters' has the type 'llama3'"),
    (
        "rotary-by-layer",
        {"rope_parameters": {"full_attention": {"rope_theta": 1}}},
        "'rope_parameters' has 'full_attention' for default",
    ),
    (
        "yarn-factor",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": 1.5}},
        "'rope_parameters' has 'attention_factor' for yarn",
    ),
    ("few-types", {"layer_types": ["full_attention"]}, "'layer_types' must name"),
    ("odd-type", {"layer_types": ["chunked_attention"] * 3}, "'layer_types' must name"),
    (
        "sliding-or-not",
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
        "'use_sliding_window' is not true, and implementations disagree",
    ),
    (
        "no-window",
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True},
        "'sliding_window' is missing",
    ),
    (
        "types-unsaid",
        {"layer_types": None, "use_sliding_window": True, "max_window_layers": None, "sliding_window": 8},
        "'max_window_layers' is missing",
    ),
)


@pytest.mark.parametrize(("config", "reason"), [b[1:] for b in BAD_CONFIGS], ids=[b[0] for b in BAD_CONFIGS])
def test_a_configuration_that_is_wrong_or_unclear_is_refused_by_its_own_names(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        said(tmp_path, "dflash2-tiny", config)
    assert reason in str(caught.value)
    assert "dflash2-tiny-published" in str(caught.value)


STRANGE = (True, 0, -1, 2**31, 10**400, 1e300, "x", [], [0], [[]], {"a": {}})
KNOWN = (
    "architectures attention_value_scale block_size causal conv_group_size conv_kernel_size dflash_config "
    "final_logit_softcapping has_embed_tokens head_dim hidden_act hidden_size input_embedding_scale "
    "intermediate_size is_causal layer_types mask_token_id max_position_embeddings max_window_layers "
    "num_attention_heads num_hidden_layers num_key_value_heads num_target_layers output_multiplier "
    "partial_rotary_factor rms_norm_eps rope_is_neox_style rope_parameters rope_scaling rope_theta "
    "sample_from_anchor selector_rank selector_top_k sliding_window swa_window_size target_layer_ids "
    "use_sliding_window use_swa vocab_size rope_type factor original_max_position_embeddings beta_fast"
)


@pytest.mark.parametrize("key", KNOWN.split())
def test_a_strange_value_is_refused_or_harmless(target: ModelConfig, tmp_path: Path, key: str) -> None:
    """Nothing but our own errors comes out, with as many of the other keys in use as there can be."""
    path, config = publish("dflash2-tiny", tmp_path), draft_config("dflash2-tiny")
    rope = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64}
    config |= {"rope_parameters": rope, "rope_is_neox_style": False, "layer_types": None}
    config |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    for value in STRANGE:
        for strange in (
            {key: value},
            {"dflash_config": config["dflash_config"] | {key: value}},
            {"rope_parameters": rope | {key: value}},
        ):
            (path / "config.json").write_text(json.dumps(config | strange))
            with suppress(ModelFileError), open_draft(path) as file:
                draft = read_draft_config(file, target)
                check_tensors(file, draft_tensors(draft, target.n_vocab))


OF_ANOTHER_TARGET: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("width", {"hidden_size": 256}, "its width is 256, the target's 128"),
    ("vocabulary", {"vocab_size": 769}, "its vocabulary has 769 tokens, the target's 768"),
    ("layers", {"num_target_layers": 64}, "it was made for 64 layers (num_target_layers), the target has 8"),
    ("mask", nested("dflash-tiny", mask_token_id=768), "its mask token is 768, the target has 768 tokens"),
    ("id", nested("dflash-tiny", target_layer_ids=[1, 3, 7]), "layer 8; the target has layers 1 to 7"),
)


@pytest.mark.parametrize(
    ("config", "reason"), [c[1:] for c in OF_ANOTHER_TARGET], ids=[c[0] for c in OF_ANOTHER_TARGET]
)
def test_a_folder_for_another_target_is_refused_with_the_reason(
    target: ModelConfig, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    path = publish("dflash-tiny", tmp_path, config=config)
    with open_draft(path) as file, pytest.raises(UnsupportedModelError, match="for another target") as caught:
        read_draft_config(file, target)
    assert reason in str(caught.value)


Q_PROJ = "layers.1.self_attn.q_proj.weight"


def without(*names: str) -> Any:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def beside(*names: str) -> Any:
    return lambda tensors: tensors | {name: ("F32", np.zeros((128, 128), "<f4")) for name in names}


def shaped(name: str, *shape: int) -> Any:
    return lambda tensors: tensors | {name: ("F32", np.zeros(shape, "<f4"))}


BAD_TENSORS: tuple[tuple[str, Any, str], ...] = (
    ("missing", without(Q_PROJ), f"tensor '{Q_PROJ}' is missing; expected [128, 128]"),
    ("missing-norm", without("norm.weight"), "tensor 'norm.weight' is missing; expected [128]"),
    ("shape", shaped(Q_PROJ, 128, 64), f"tensor '{Q_PROJ}' has shape [64, 128]; expected [128, 128]"),
    ("shape-of-a-vector", shaped("norm.weight", 64), "tensor 'norm.weight' has shape [64]; expected [128]"),
    ("fusion-of-other-layers", shaped("fc.weight", 128, 256), "'fc.weight' has shape [256, 128]"),
    ("one-more-layer", beside("layers.3.mlp.up_proj.weight"), "'layers.3.mlp.up_proj.weight' of this draft"),
    ("unknown", beside("extra.weight"), "tensor 'extra.weight' of this draft is not supported"),
    ("own-table", beside("embed_tokens.weight"), "embedding table of their own are not supported"),
    ("own-head", beside("lm_head.weight"), "head of their own are not supported (tensor 'lm_head.weight')"),
    ("twice", beside("model.norm.weight"), "are the same part of the draft"),
)


@pytest.mark.parametrize(("change", "reason"), [b[1:] for b in BAD_TENSORS], ids=[b[0] for b in BAD_TENSORS])
def test_a_tensor_that_is_missing_misshapen_or_unknown_is_refused_by_its_published_name(
    target: ModelConfig, tmp_path: Path, change: Any, reason: str
) -> None:
    path = publish("dflash-tiny", tmp_path, change=change)
    with pytest.raises(ModelFileError) as caught, open_draft(path) as file:
        check_tensors(file, draft_tensors(read_draft_config(file, target), target.n_vocab))
    assert reason in str(caught.value)


def test_heads_that_cannot_be_turned_are_refused(tmp_path: Path) -> None:
    config = {"rope_is_neox_style": False, "partial_rotary_factor": 0.03}
    path = publish("dflash-tiny", tmp_path, config=config)
    with pytest.raises(ModelFileError, match="no whole number of heads of 32 with 0 dimensions in pairs"):
        open_draft(path)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    path = publish("dflash-tiny", tmp_path)
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="mask embedding of their own are not supported"):
        open_draft(path)


def test_a_part_of_a_folder_is_refused_with_the_folder_as_advice(tmp_path: Path) -> None:
    path = publish("dflash-tiny", tmp_path) / "model.safetensors"
    with pytest.raises(ModelFileError, match=r"name the folder that holds its config\.json"):
        open_draft(path)


def test_a_selector_is_required_where_the_folder_says_that_it_has_one(tmp_path: Path) -> None:
    names = [f"candidate_selector.{name}" for name in ("predecessor_codebook", "successor_codebook")]
    drop = without(*names, "candidate_selector.hidden_projection.weight")
    path = publish("dflash2-tiny", tmp_path, change=drop)
    assert draft_config("dflash2-tiny")["architectures"] == ["DFlash2DraftModel"]
    with pytest.raises(ModelFileError, match="DFlash2DraftModel, but there is no candidate_selector"):
        open_draft(path)


@pytest.mark.parametrize("lacks", ["selector", "conv"])
def test_a_draft_is_of_the_second_version_as_a_whole_or_not_at_all(tmp_path: Path, lacks: str) -> None:
    def change(tensors: Stored) -> Stored:
        return {name: tensor for name, tensor in tensors.items() if lacks not in name}

    path = publish("dflash2-tiny", tmp_path, change=change, config={"architectures": ["DFlashDraftModel"]})
    names = {
        "selector": "candidate_selector.hidden_projection",
        "conv": "layers.0.attention_conv.base_kernel",
    }
    with (
        open_draft(path) as file,
        pytest.raises(ModelFileError, match=f"tensor '{names[lacks]}.*' is missing"),
    ):
        read_draft(file)


def test_weights_of_the_first_version_are_none_of_the_second(tmp_path: Path) -> None:
    path = publish("dflash-tiny", tmp_path, config={"architectures": ["DFlash2DraftModel"]})
    with pytest.raises(ModelFileError, match="DFlash2DraftModel, but there is no candidate_selector"):
        open_draft(path)


def test_several_files_are_one_draft(tmp_path: Path) -> None:
    path = publish("dflash-tiny", tmp_path)
    tensors = stored_tensors("dflash-tiny")
    (path / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        write_safetensors(path / f"model-0000{i + 1}-of-00002.safetensors", half)
    weight_map = {n: f"model-0000{i + 1}-of-00002.safetensors" for i, half in enumerate(halves) for n in half}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_draft(path) as file, open_draft(draft_file("dflash-tiny", tmp_path)) as plain:
        for name in plain.tensors:
            np.testing.assert_array_equal(numbers(file, name), numbers(plain, name), err_msg=name)


def test_a_fit_counts_a_folder_and_names_how_to_read_it(folder: Path, tmp_path: Path) -> None:
    path = publish("dflash-swa-default-tiny", tmp_path)
    options = EngineOptions(
        model=model_file("qwen35-tiny", "F32", folder), draft=path, draft_causal="none", device="CPU"
    )
    flags = fit_report(options).flags
    assert flags[flags.index("--draft") + 1] == str(path)
    assert flags[flags.index("--draft-causal") + 1] == "none"

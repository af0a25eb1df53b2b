"""Random files of real shapes: they load, their text is finite and drafts change no token; the same bytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from model_shapes import DRAFTS, PRESETS, NextParts, spread_layers, tiny
from random_blocks import BlockPool
from random_draft import write_draft
from random_model import ModelWriter, main, write_model
from random_next import hash_multipliers, head_sizes
from random_tensors import TYPES, TensorWriter, mix

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.arch.mtp import mtp_tensors
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from tests.engine.tiny import opened, prompt
from tests.reference.blocks import numbers

LOADABLE = [name for name, shape in PRESETS.items() if shape.architecture in ARCHITECTURES]
HYBRID = "qwen35-27b"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", LOADABLE)
def test_a_file_of_every_shape_loads_and_decodes_to_finite_logits(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny(PRESETS[name]), "Q4_K_M")
    with opened(path, max_ctx=256) as engine:
        logits = engine.logits(prompt(20))
        assert len(engine.generate(prompt(20), max_tokens=8, ignore_eos=True).tokens) == 8
    assert np.isfinite(logits).all()
    assert 1 < logits.std() < 8


@pytest.mark.parametrize("type_name", TYPES)
def test_a_file_of_every_type_decodes_to_finite_logits(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny(PRESETS[HYBRID]), type_name)
    with opened(path, max_ctx=256) as engine:
        assert np.isfinite(engine.logits(prompt(5))).all()


@pytest.mark.parametrize("name", list(DRAFTS))
def test_a_draft_of_every_shape_fits_its_target_and_changes_no_token(name: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    write_model(target, tiny(PRESETS[HYBRID]), "F32")
    write_draft(draft, DRAFTS[name], "Q8_0", target)
    with opened(target, max_ctx=256) as plain, opened(target, draft=draft, spec_width=4, max_ctx=256) as fast:
        expected = plain.generate(prompt(12), max_tokens=10, ignore_eos=True).tokens
        result = fast.generate(prompt(12), max_tokens=10, ignore_eos=True)
    assert result.tokens == expected
    assert result.speculation is not None
    assert result.speculation.drafted > 0


@pytest.mark.parametrize("name", ["qwen35-4b", "qwen35moe-35b-a3b"])
def test_an_mtp_block_can_be_added_and_drafts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, replace(tiny(PRESETS[name]), n_mtp=1), "Q8_0")
    with GgufFile.open(path) as file:
        config = ARCHITECTURES[PRESETS[name].architecture].read_config(file, PRESETS[name].architecture)
        assert config.n_mtp == 1
        assert {spec.name for spec in mtp_tensors(config, file) if spec.required} <= file.tensors.keys()
    with opened(path, spec="mtp", spec_width=3, max_ctx=256) as engine:
        result = engine.generate(prompt(12), max_tokens=6, ignore_eos=True)
    assert result.speculation is not None
    assert result.speculation.drafted > 0


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    shape = tiny(PRESETS["qwen4exp"])
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_model(tmp_path / f"{name}.gguf", shape, "Q4_K_M", seed=seed)
    a, b, c = (sha256(tmp_path / f"{name}.gguf") for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("element", [E for E in ElementType if E.name in (*TYPES, "Q5_K", "Q5_0", "Q5_1")])
def test_blocks_have_the_spread_asked_for_and_no_mean(element: ElementType) -> None:
    n = 1 << 20
    data = np.concatenate([p.reshape(-1) for p in BlockPool(3).tensor(element, n, 0.02)])
    values = numbers(element, (1024, n // 1024), data)
    assert abs(values.std() / 0.02 - 1) < 0.03
    assert abs(values.mean()) < 0.02 / 16


def test_a_mix_keeps_head_and_sensitive_layers_finer_and_small_mixers_in_q8() -> None:
    choose = mix("Q4_K_M", 64)
    assert choose("head", 0) is ElementType.Q6_K
    assert choose("ffn_down", 0) is ElementType.Q6_K
    assert choose("ffn_down", 9) is ElementType.Q4_K
    assert choose("embedding", 0) is ElementType.Q4_K
    assert choose("mixer", 0) is choose("table", 0) is ElementType.Q8_0
    assert mix("F16", 64)("mixer", 0) is ElementType.F16


def test_rows_that_k_quants_cannot_hold_fall_back_as_in_real_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny(PRESETS["qwen4exp"]), "Q4_K_M")
    with GgufFile.open(path) as file:
        types = {file.tensors[f"blk.{i}.ffn_down_exps.weight"].type for i in range(8)}
        assert types == {ElementType.Q5_0, ElementType.Q8_0}
        assert file.tensors["blk.0.ffn_up_exps.weight"].type is ElementType.Q4_K


def test_the_27b_shape_has_the_published_number_of_parameters() -> None:
    out = TensorWriter(mix("Q4_K_M", 64), 1)
    ModelWriter(PRESETS[HYBRID], out).add_all()
    assert out.n_params == 26_895_998_464


def test_hash_constants_are_those_of_the_published_model() -> None:
    assert hash_multipliers(3, 248_320) == [23703573157769, 20109073645365, 8052911324071]
    sizes = head_sizes(NextParts())
    assert (sizes[0], sizes[-1], sum(sizes)) == (20_000_003, 20_000_171, 320_001_446)


@pytest.mark.parametrize(
    ("n_layer", "expected"), [(64, (2, 17, 32, 47, 62)), (8, (2, 3, 4, 5, 6)), (4, (1, 2, 3))]
)
def test_a_draft_reads_layers_that_its_target_has(n_layer: int, expected: tuple[int, ...]) -> None:
    assert spread_layers(n_layer, 5) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dflash2-27b"], "--target"),
        (["qwen3-4b", "--mtp"], "no MTP block"),
        (["qwen35-4b", "--ngram-base", "1000"], "no n-gram table"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    result = CliRunner().invoke(main, [*arguments, str(path)])
    assert result.exit_code == 2
    assert message in result.output
    assert not path.exists()

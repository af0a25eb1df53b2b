"""Drafts of qwen4exp's MTP block never change the text, whatever they are worth."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pyggml_dflash import Engine
from pyggml_dflash.errors import UnsupportedModelError
from pyggml_dflash.options import MtpConvention
from tests.drafts.drafted import draft_file
from tests.reference.stored import model_file, stored


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_file("qwen4exp-tiny", "F32", tmp_path_factory.mktemp("models"))


def opened(model: Path, **options: object) -> Engine:
    common = {"device": "CPU", "threads": 1, "max_ctx": 512, "cache_type_k": "f32", "cache_type_v": "f32"}
    return Engine.open(model, **{**common, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("convention", get_args(MtpConvention))
@pytest.mark.parametrize("width", [2, 5, 16])
def test_greedy_texts_are_the_stored_ones(model: Path, convention: MtpConvention, width: int) -> None:
    """From 9, 40 and 150 tokens on, so below, across and above the budget of sparse attention."""
    with opened(model, spec="mtp", spec_width=width, mtp_convention=convention) as engine:
        for text in stored("qwen4exp-tiny", None).texts:
            result = engine.generate(text.prompt, max_tokens=len(text.tokens), ignore_eos=True)
            assert list(result.tokens) == text.tokens
            assert result.speculation is not None
            assert result.speculation.drafted > 0


def test_a_dflash_draft_is_refused_since_the_residual_has_several_streams(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="read one residual stream; qwen4exp has several"):
        opened(model, draft=draft_file("dflash-tiny", tmp_path))

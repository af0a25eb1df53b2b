"""A trained model of the family qwen4exp tells the stored stories, within its budget and past it.

The file says of its two attention layers that they are dense, as a faulty converter does; a copy of it says
what the model was trained with. Copies of chosen rows are a third way to the same text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
import pytest

from pyggml_dflash import Engine
from pyggml_dflash.arch.qwen4exp import indexer
from tests.engine.hostile import edited
from tests.reference.opened import on_the_cpu, open_core
from tests.reference.stories import Story, check_answer, check_clear_choices, check_tokens, stories

Form = Literal["dense", "masked", "gathered"]
RATIOS: Final = "qwen4exp.attention.compress_ratios"
RATIO, BUDGET = 8, 128
DENSE_LIMIT: Final = BUDGET + RATIO - 1
ALL: Final = stories("reference-next.json")
N_PAST_BUDGET: Final = 5  # stories that end behind the dense limit

pytestmark = pytest.mark.trained
FORMS = pytest.mark.parametrize("form", get_args(Form))


@pytest.fixture(scope="module")
def sparse(pico_next: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the ratios that the model was trained with."""
    path = tmp_path_factory.mktemp("pico-next") / "sparse.gguf"
    return edited(pico_next, path, keys={RATIOS: [0, 0, 0, RATIO, 0, 0, 0, RATIO]})


@pytest.fixture
def model(pico_next: Path, sparse: Path, form: Form, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that runs in this form."""
    monkeypatch.setattr(indexer, "GATHER_FROM", 1 if form == "gathered" else 8)
    return pico_next if form == "dense" else sparse


@FORMS
def test_answers_are_the_stored_ones_up_to_a_near_tie(
    model: Path, form: Form, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        Engine.open(model, max_ctx=512, device="CPU", threads=1) as engine,
    ):
        for story in ALL:
            check_answer(engine, story)
    assert [RATIOS in record.getMessage() for record in caplog.records] == [True] * (form == "dense")


@FORMS
def test_every_stored_token_is_the_best_but_for_near_ties(model: Path, form: Form) -> None:
    with open_core(on_the_cpu(model, max_ctx=512)) as core:
        for story in ALL:
            check_tokens(core, story)
            check_clear_choices(core, story)


@pytest.mark.parametrize("form", ["masked", "gathered"])
def test_sparse_attention_begins_to_show_where_the_budget_ends(pico_next: Path, model: Path) -> None:
    def logits(path: Path, story: Story) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        with open_core(on_the_cpu(path, max_ctx=512)) as core:
            return check_tokens(core, story)

    n_past_budget = 0
    for story in ALL:
        differs = np.abs(logits(model, story) - logits(pico_next, story)).max(axis=1)
        visible = len(story.prompt) + np.arange(len(story.tokens))
        np.testing.assert_array_equal(differs[visible <= DENSE_LIMIT], 0)
        if visible[-1] > DENSE_LIMIT:
            n_past_budget += 1
            assert differs[visible > DENSE_LIMIT].max() > 0.1  # 0.38 was the least
    assert n_past_budget == N_PAST_BUDGET

"""The model that ships with the package tells the stored stories."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggml_dflash import Engine
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.core import EngineCore
from tests.reference.opened import on_the_cpu, open_core
from tests.reference.stories import Story, check_answer, check_clear_choices, check_tokens, stories

STORIES = pytest.mark.parametrize("story", stories("reference.json"), ids=[f"story{i}" for i in range(10)])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(max_ctx=512, device="CPU", threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    with open_core(on_the_cpu(DEFAULT_MODEL, max_ctx=512)) as core:
        yield core


@STORIES
def test_the_answer_is_the_stored_one_up_to_a_near_tie(engine: Engine, story: Story) -> None:
    check_answer(engine, story)


@STORIES
def test_every_stored_token_is_the_best_but_for_near_ties(core: EngineCore, story: Story) -> None:
    check_tokens(core, story)


@STORIES
def test_clear_choices_are_those_of_single_precision_weights(core: EngineCore, story: Story) -> None:
    check_clear_choices(core, story)

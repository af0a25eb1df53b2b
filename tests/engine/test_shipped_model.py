"""The model that ships with the package tells the stored stories.

Stored are greedy continuations by another program on the same Q8_0 file, and for the single-precision model
of the same weights how far the two best logits were apart at every step. Where they were close, rounding
decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pyggml_dflash import Engine
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.core import EngineCore
from tests.reference.opened import continued, on_the_cpu, open_core
from tests.reference.stored import DATA

# Two logits so close may change places when sums are taken in another order; 0.018 was the most.
NEAR_TIE = 0.1
# Two logits so far apart keep their places when weights are rounded to 8 bits; 0.07 did not.
CLEAR = 0.3
END = (4090, 4092)  # <|endoftext|> and <|im_end|>


@dataclass(frozen=True, slots=True)
class Story:
    """A prompt, its continuation by the Q8_0 file, and that by single-precision weights, both greedy."""

    text: str  # of the prompt
    prompt: list[int]
    tokens: list[int]  # the end token too, where the story ended
    exact_tokens: list[int]
    gaps: list[float]  # between the two best logits, for each of `exact_tokens`


def stories() -> list[Story]:
    found: list[dict[str, Any]] = json.loads((DATA / "pico" / "reference.json").read_text())["prompts"]
    return [
        Story(
            text=p["prompt"],
            prompt=p["prompt_ids"],
            tokens=p["llama_cpp"]["q8_0"]["ids"],
            exact_tokens=p["hf_fp32"]["ids"],
            gaps=p["hf_fp32"]["top2_gaps"],
        )
        for p in found
    ]


STORIES = pytest.mark.parametrize("story", stories(), ids=[f"story{i}" for i in range(10)])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(max_ctx=512, device="CPU", threads=1) as engine:
        yield engine


@STORIES
def test_the_answer_is_the_stored_one_up_to_a_near_tie(engine: Engine, story: Story) -> None:
    assert engine.tokenize(story.text) == story.prompt
    ended = story.tokens[-1] in END
    answer = story.tokens[:-1] if ended else story.tokens
    result = engine.generate(story.text, max_tokens=len(story.tokens), logprobs=2)
    for found, stored, logprob in zip(result.tokens, answer, result.logprobs, strict=False):
        if found != stored:
            assert dict(logprob.top)[stored] > logprob.logprob - NEAR_TIE
            return
    assert result.tokens == tuple(answer)
    assert result.finish_reason == ("stop" if ended else "length")
    assert result.text == engine.detokenize(answer)


@STORIES
def test_every_stored_token_is_the_best_but_for_near_ties(core: EngineCore, story: Story) -> None:
    steps = np.array(list(continued(core, story.prompt, story.tokens)))
    stored = np.take_along_axis(steps, np.array(story.tokens)[:, None], axis=1)[:, 0]
    assert (steps.max(axis=1) - stored).max() < NEAR_TIE


@STORIES
def test_clear_choices_are_those_of_single_precision_weights(core: EngineCore, story: Story) -> None:
    steps = np.array(list(continued(core, story.prompt, story.exact_tokens)))
    clear = np.array(story.gaps) > CLEAR
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(steps.argmax(axis=1)[clear], np.array(story.exact_tokens)[clear])


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    with open_core(on_the_cpu(DEFAULT_MODEL, max_ctx=512)) as core:
        yield core

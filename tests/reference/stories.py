"""Stored stories of trained models: greedy continuations, and how close the two best logits were.

They are by other programs: from the Q8_0 file, and from single-precision weights with the gap between the two
best logits at every step. Where they were close, rounding decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pyggml_dflash import Engine
from pyggml_dflash.engine.core import EngineCore
from tests.reference.opened import Floats, continued
from tests.reference.stored import DATA

# Two logits so close may change places when sums are taken in another order; 0.018 was the most between two
# programs on the same file, 0.041 between a Q8_0 file and single-precision weights.
NEAR_TIE: Final = 0.1
# Two logits so far apart keep their places when weights are rounded to 8 bits; 0.07 did not.
CLEAR: Final = 0.3
N_TIED: Final = 8  # tokens that are looked at for a near tie; five were within 0.05
END: Final = (4090, 4092)  # <|endoftext|> and <|im_end|>


@dataclass(frozen=True, slots=True)
class Story:
    """A prompt, its continuation by the Q8_0 file, and that by single-precision weights, both greedy."""

    text: str  # of the prompt
    prompt: list[int]
    tokens: list[int]  # the end token too, where the story ended
    exact_tokens: list[int]
    gaps: list[float]  # between the two best logits, for each of `exact_tokens`


def stories(name: str) -> list[Story]:
    """Those of a file below the tests' data."""
    found: list[dict[str, Any]] = json.loads((DATA / "pico" / name).read_text())["prompts"]
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


def check_answer(engine: Engine, story: Story) -> None:
    """The engine's own answer is the stored one, or leaves it at a near tie."""
    assert engine.tokenize(story.text) == story.prompt
    ended = story.tokens[-1] in END
    answer = story.tokens[:-1] if ended else story.tokens
    result = engine.generate(story.text, max_tokens=len(story.tokens), logprobs=N_TIED)
    for found, stored, logprob in zip(result.tokens, answer, result.logprobs, strict=False):
        if found != stored:
            assert dict(logprob.top)[stored] > logprob.logprob - NEAR_TIE
            return
    assert result.tokens == tuple(answer)
    assert result.finish_reason == ("stop" if ended else "length")
    assert result.text == engine.detokenize(answer)


def check_tokens(core: EngineCore, story: Story) -> Floats:
    """Every stored token is the best but for near ties; the logits that choose them."""
    steps = np.array(list(continued(core, story.prompt, story.tokens)))
    stored = np.take_along_axis(steps, np.array(story.tokens)[:, None], axis=1)[:, 0]
    assert (steps.max(axis=1) - stored).max() < NEAR_TIE
    return steps


def check_clear_choices(core: EngineCore, story: Story) -> None:
    """Where single-precision weights choose clearly, so does the core."""
    steps = np.array(list(continued(core, story.prompt, story.exact_tokens)))
    clear = np.array(story.gaps) > CLEAR
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(steps.argmax(axis=1)[clear], np.array(story.exact_tokens)[clear])

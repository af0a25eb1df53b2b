"""Drafting as a caller meets it: the shipped model's acceptance, statistics, and choices per request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggml_dflash import Engine, GenerationResult, SamplingOptions, UsageError
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.options import Spec
from tests.engine.tiny import LLAMA, opened, prompt
from tests.reference.stories import END, NEAR_TIE, stories

STORIES = stories("reference.json")


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with opened(None, max_ctx=512, spec="off") as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(plain: Engine) -> list[GenerationResult]:
    return [plain.generate(story.prompt, max_tokens=128, logprobs=2) for story in STORIES]


@pytest.fixture(scope="module")
def dflash() -> Iterator[Engine]:
    with opened(None, max_ctx=512, spec="auto") as engine:
        yield engine


@pytest.fixture(scope="module")
def mtp() -> Iterator[Engine]:
    with opened(None, max_ctx=512, spec="mtp") as engine:
        yield engine


@pytest.fixture(params=["dflash", "mtp"])
def drafting(request: pytest.FixtureRequest, dflash: Engine, mtp: Engine) -> Engine:
    return dflash if request.param == "dflash" else mtp


# acceptance, and the same text


@pytest.mark.parametrize(("spec", "width", "least"), [("dflash", 8, 4.0), ("mtp", 4, 3.0)])
def test_a_target_step_makes_as_many_tokens_as_the_model_card_says(
    spec: Spec, width: int, least: float, request: pytest.FixtureRequest
) -> None:
    """Tokens of the ten stored prompts per verify forward; what is drafted beyond the end does not count."""
    engine: Engine = request.getfixturevalue(spec)
    n_tokens = n_steps = 0
    for story in STORIES:
        result = engine.generate(story.prompt, max_tokens=128, spec_width=width)
        assert result.speculation is not None
        assert result.speculation.plain_steps <= 1  # where there is room for one token only
        n_tokens += len(result.tokens) - 1 + (result.finish_reason == "stop")  # the first is the prefill's
        n_steps += result.speculation.verify_steps + result.speculation.plain_steps
    assert n_tokens / n_steps >= least


@pytest.mark.parametrize("width", ["auto", 2, 4])
def test_drafts_change_no_greedy_text(answers: list[GenerationResult], drafting: Engine, width: int) -> None:
    for story, expected in zip(STORIES, answers, strict=True):
        found = drafting.generate(story.prompt, max_tokens=128, spec_width=width)
        assert same_up_to_a_near_tie(found, expected)


def same_up_to_a_near_tie(found: GenerationResult, expected: GenerationResult) -> bool:
    """Equal, or different first where the two best logits are so close that rounding decides."""
    for token, other, logprob in zip(expected.tokens, found.tokens, expected.logprobs, strict=False):
        if token != other:
            return dict(logprob.top).get(other, -99.0) > logprob.logprob - NEAR_TIE
    return (found.tokens, found.text) == (expected.tokens, expected.text)


# statistics


def test_statistics_add_up(drafting: Engine) -> None:
    result = drafting.generate(STORIES[0].prompt, max_tokens=64, spec_width=4, ignore_eos=True)
    stats = result.speculation
    assert stats is not None
    assert stats.drafter == drafting.info.spec
    assert stats.verify_steps == sum(stats.steps_by_width.values()) > 0
    assert stats.drafted == sum((rows - 1) * n for rows, n in stats.steps_by_width.items())
    n_made = 1 + stats.verify_steps + stats.accepted + stats.plain_steps
    assert 64 <= n_made < 64 + 4
    assert stats.acceptance_length == 1 + stats.accepted / stats.verify_steps
    assert len(stats.accept_rates) == 3
    assert all(1 >= a >= b >= 0 for a, b in zip(stats.accept_rates, stats.accept_rates[1:], strict=False))
    times = (stats.draft_s, stats.verify_s, stats.rollback_s)
    assert min(times) > 0
    assert sum(times) + stats.plain_s <= result.timings.decode_s
    assert result.plain_reason is None


def test_where_drafting_does_not_pay_steps_are_plain_and_the_reason_is_told(drafting: Engine) -> None:
    core = drafting._loaded.core
    control = core._control
    width = drafting.info.max_width
    core._control = VerifyWidth(width, {1: 1e-9, 2: 1.0, width: 2.0})
    try:
        result = drafting.generate(STORIES[0].prompt, max_tokens=40, ignore_eos=True)
    finally:
        core._control = control
    stats = result.speculation
    assert stats is not None
    assert (stats.verify_steps, stats.plain_steps, stats.accept_rates) == (0, 39, ())
    assert stats.plain_s > 0
    assert " rows cost " in str(result.plain_reason)


def test_an_answer_of_one_token_has_no_steps(drafting: Engine) -> None:
    result = drafting.generate(STORIES[0].prompt, max_tokens=1)
    assert result.speculation is not None
    assert (result.speculation.verify_steps, result.speculation.plain_steps) == (0, 0)
    assert result.speculation.acceptance_length == 1
    assert result.plain_reason is None


# choices per request


def test_a_request_may_do_without_drafts(plain: Engine, drafting: Engine) -> None:
    story = STORIES[1].prompt
    result = drafting.generate(story, max_tokens=20, spec="off")
    assert (result.speculation, result.plain_reason) == (None, "speculation is switched off")
    assert result.tokens == plain.generate(story, max_tokens=20).tokens
    again = drafting.generate(story, max_tokens=20, spec_width=3)
    assert again.speculation is not None
    assert again.tokens == result.tokens


def test_a_request_may_choose_the_width(drafting: Engine) -> None:
    for width in (2, 3, 4):
        result = drafting.generate(STORIES[2].prompt, max_tokens=30, spec_width=width, ignore_eos=True)
        assert result.speculation is not None
        assert max(result.speculation.steps_by_width) == width
        at_the_end = result.speculation.verify_steps - result.speculation.steps_by_width[width]
        assert at_the_end <= 2
    most = drafting.info.max_width
    with pytest.raises(
        UsageError, match=f"spec_width is {most + 1}; this engine verifies at most {most} rows"
    ):
        drafting.generate(STORIES[2].prompt, max_tokens=30, spec_width=most + 1)


@pytest.mark.parametrize(("has", "wants"), [("dflash", "mtp"), ("mtp", "dflash")])
def test_a_drafter_that_is_not_loaded_is_refused(
    has: str, wants: Spec, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(has)
    with pytest.raises(UsageError, match=f"spec is '{wants}'; this engine drafts with '{has}'"):
        engine.generate([1, 2], spec=wants)
    result = engine.generate([1, 2], max_tokens=3, spec=has, ignore_eos=True)  # type: ignore[arg-type]
    assert result.speculation is not None


def test_an_engine_without_a_drafter_says_why() -> None:
    with opened(LLAMA, max_ctx=128, spec="auto") as engine:
        for spec in (None, "auto", "off"):
            result = engine.generate(prompt(9), max_tokens=3, spec=spec)  # type: ignore[arg-type]
            assert result.plain_reason == engine.info.spec_reason
        for refused in ({"spec": "mtp"}, {"spec": "dflash"}, {"spec_width": 4}):
            with pytest.raises(UsageError, match="this engine "):
                engine.generate(prompt(9), **refused)


def test_a_seed_is_told_where_it_gives_the_text_again(dflash: Engine) -> None:
    def seed_of(**options: int | None) -> int | None:
        sampling = SamplingOptions(temperature=0.8, seed=options.get("seed"))
        return dflash.generate(
            STORIES[0].prompt,
            max_tokens=20,
            sampling=sampling,
            spec_width=options.get("width"),
            ignore_eos=True,
        ).seed

    assert seed_of(seed=5, width=8) == 5
    assert seed_of(width=8) is None
    with opened(None, max_ctx=128, spec="off") as engine:
        assert engine.generate([1], max_tokens=2, sampling=SamplingOptions(temperature=1)).seed is not None


def test_the_end_token_ends_an_answer_inside_a_run(dflash: Engine) -> None:
    story = next(s for s in STORIES if s.tokens[-1] in END)
    result = dflash.generate(story.prompt, max_tokens=128, spec_width=8)
    assert result.finish_reason == "stop"
    assert not set(END) & set(result.tokens)


def test_drafting_requests_do_not_pile_up_memory(drafting: Engine) -> None:
    def some() -> dict[str, dict[str, int]]:
        for story, width in zip(STORIES[:6], (2, 3, 4, 4, 3, 2), strict=True):
            drafting.generate(story.prompt * 3, max_tokens=30, spec_width=width, ignore_eos=True)
            drafting.generate(story.prompt, max_tokens=5, spec="off")
        return drafting.memory()

    some()
    assert some() == some()

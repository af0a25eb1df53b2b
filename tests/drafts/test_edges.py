"""An answer ends, and is described, inside a block as it would be without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.engine.drafting import Proposal
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.gguf import TensorInfo
from pyggml_dflash.options import KVType
from tests.drafts.drafted import draft_file
from tests.drafts.generated import assert_same, loaded_model, run, telling
from tests.drafts.speculated import right_up_to
from tests.engine.hostile import Array, NewTensor, edited
from tests.engine.served import Reader
from tests.reference.stored import model_file

PROMPT = np.random.default_rng(2).integers(0, 750, 30).tolist()
N = 24
WIDTH = 6
ALL = WIDTH
KINDS = ("dflash-tiny", "dflash-swa-tiny", "dflash2-tiny", "mtp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return model_file("qwen35-tiny", "F32", folder)


def spec_options(kind: str, folder: Path) -> dict[str, Any]:
    """Engine options for a kind of draft."""
    return {"spec": "mtp"} if kind == "mtp" else {"draft": draft_file(kind, folder)}


@dataclass(frozen=True, slots=True)
class Pair:
    """One model without drafts and with them."""

    plain: Loaded
    drafting: Loaded

    def text(self, prompt: Sequence[int] = PROMPT, n: int = 2 * N) -> list[int]:
        """Prompt and plain answer."""
        return [*prompt, *run(self.plain, [*prompt], max_tokens=n, ignore_eos=True).tokens]

    def compare(self, prompt: Sequence[int] = PROMPT, **request: Any) -> None:
        """Both answers are the same, and so is how far the slot has come.

        A text may end inside a block that the slot has taken whole.
        """
        found, plain = (run(loaded, [*prompt], **request) for loaded in (self.drafting, self.plain))
        assert_same(found, plain)
        assert found.speculation is not None
        ahead, there = (loaded.core.slots[0].n_past for loaded in (self.drafting, self.plain))
        assert ahead == there or (found.stop is not None and ahead < there + WIDTH)

    def told(self, n_right: int | None) -> AbstractContextManager[None]:
        """Drafts whose first `n_right` are right and the others not; None: the drafter's own."""
        if n_right is None:
            return nullcontext()
        return telling(self.drafting, right_up_to(n_right, self.text()))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, target: Path, folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        plain = stack.enter_context(loaded_model(target, spec="off"))
        options = spec_options(request.param, folder)
        yield Pair(plain, stack.enter_context(loaded_model(target, spec_width=WIDTH, **options)))


def test_an_answer_may_end_after_any_number_of_tokens(pair: Pair) -> None:
    with pair.told(ALL):
        for n in range(1, N):
            pair.compare(max_tokens=n)


@pytest.mark.parametrize("n_right", [ALL, 2])
def test_an_end_token_ends_the_answer_wherever_it_stands(
    pair: Pair, n_right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an accepted draft, as the target's own token behind the drafts, and as the first token of all."""
    with pair.told(n_right):
        for token in pair.text()[len(PROMPT) :][:16]:
            for loaded in (pair.plain, pair.drafting):
                monkeypatch.setattr(loaded.tokenizer, "stop_ids", frozenset({token}))
            pair.compare(max_tokens=2 * N, logprobs=1)
        pair.compare(max_tokens=N, ignore_eos=True)


def test_what_is_behind_an_end_token_is_neither_kept_nor_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pair.text()
    answer = text[len(PROMPT) :]
    at = next(i for i in range(3, WIDTH) if answer.index(answer[i]) == i)  # in the first block
    monkeypatch.setattr(pair.drafting.tokenizer, "stop_ids", frozenset({answer[at]}))
    with telling(pair.drafting, right_up_to(ALL, text)):
        stats = run(pair.drafting, PROMPT, max_tokens=N).speculation
    assert stats is not None
    assert (stats.verify_steps, stats.drafted, stats.accepted) == (1, at - 1, at - 1)
    assert pair.drafting.core.slots[0].n_past == len(PROMPT) + at


def test_stop_strings_end_the_text_wherever_they_stand(pair: Pair) -> None:
    text = run(pair.plain, PROMPT, max_tokens=N).text
    with pair.told(ALL):
        for start in range(0, len(text) - 4, 5):
            pair.compare(max_tokens=2 * N, stop=(text[start : start + 3],))
            pair.compare(max_tokens=2 * N, stop=(text[start : start + 2], text[start + 1 : start + 4]))


@pytest.mark.parametrize("n_right", [ALL, 2, None])
def test_log_probabilities_are_those_of_plain_decoding(pair: Pair, n_right: int | None) -> None:
    with pair.told(n_right):
        pair.compare(max_tokens=N, logprobs=5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_with_the_context(kind: str, target: Path, folder: Path) -> None:
    """With any number of rows left; a draft's own rows go beyond the end."""
    options = spec_options(kind, folder)
    for left in (0, 1, 2, 5, 9):
        with ExitStack() as stack:
            n_ctx = len(PROMPT) + left
            plain = stack.enter_context(loaded_model(target, max_ctx=n_ctx, chunk=20, spec="off"))
            drafting = loaded_model(target, max_ctx=n_ctx, chunk=20, spec_width=WIDTH, **options)
            pair = Pair(plain, stack.enter_context(drafting))
            pair.compare(logprobs=0)
            assert pair.plain.core.slots[0].n_past == n_ctx
            with telling(pair.drafting, right_up_to(ALL, pair.text(n=left + 1))):
                pair.compare()


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 255, 256, 257])
def test_a_prompt_may_have_any_length(pair: Pair, n: int) -> None:
    """Shorter than a window, as long as a chunk, as long as a ring of the draft."""
    prompt = np.random.default_rng(n).integers(0, 750, n).tolist()
    pair.compare(prompt, max_tokens=12)


def test_a_drafter_may_propose_less_than_asked_for_and_nothing_at_all(pair: Pair) -> None:
    text, lengths = pair.text(), itertools.cycle([3, 0, 1, 5, 0, 0, 2])
    right = right_up_to(ALL, text)
    with telling(pair.drafting, lambda n_past, n, own: right(n_past, n, own)[: next(lengths)]):
        pair.compare(max_tokens=2 * N, logprobs=0)
        stats = run(pair.drafting, PROMPT, max_tokens=2 * N).speculation
    assert stats is not None
    assert stats.plain_steps > 2
    assert stats.accepted == stats.drafted > 10


class Interrupted(Exception):
    """Raised by a test within a step."""


def test_a_drafter_that_fails_is_put_aside_for_the_rest_of_the_answer(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    text, calls = pair.text(), itertools.count()
    right = right_up_to(ALL, text)

    def fails(n_past: int, n_drafts: int, own: Proposal) -> Sequence[int]:
        if next(calls) == 2:
            raise Interrupted("on purpose")
        return right(n_past, n_drafts, own)

    with telling(pair.drafting, fails):
        found = run(pair.drafting, PROMPT, max_tokens=N)
    assert_same(found, run(pair.plain, PROMPT, max_tokens=N))
    assert found.speculation is not None
    assert (found.speculation.verify_steps, found.speculation.plain_steps > 0) == (2, True)
    assert found.plain_reason == "drafting was put aside: on purpose"
    assert "on purpose" in caplog.text
    pair.compare(max_tokens=N)


def test_a_step_that_is_cancelled_leaves_no_trace(pair: Pair) -> None:
    text = pair.text()
    right = right_up_to(ALL, text)
    cancelled = False

    def cancels(n_past: int, n_drafts: int, own: Proposal) -> Sequence[int]:
        nonlocal cancelled
        cancelled = n_past > len(PROMPT) + 6
        return right(n_past, n_drafts, own)

    with telling(pair.drafting, cancels):
        result = run(pair.drafting, PROMPT, Reader(is_enough=lambda: cancelled), max_tokens=2 * N)
    assert result.finish_reason == "cancelled"
    assert [*PROMPT, *result.tokens] == text[: len(PROMPT) + len(result.tokens)]
    assert 6 < len(result.tokens) < 20
    pair.compare(max_tokens=N)


def test_a_request_that_is_cancelled_before_its_first_token_has_none(pair: Pair) -> None:
    for loaded in (pair.plain, pair.drafting):
        n_read = itertools.count()
        result = run(loaded, PROMPT, Reader(is_enough=lambda n_read=n_read: next(n_read) > 0), max_tokens=N)  # type: ignore[misc]
        assert (result.tokens, result.finish_reason) == ((), "cancelled")


def test_requests_do_not_see_those_before_them(pair: Pair) -> None:
    """Longer ones and shorter ones, and calls that run the model without the drafter."""
    drafting = pair.drafting
    prompts = [PROMPT[:20], np.random.default_rng(5).integers(0, 750, 300).tolist(), PROMPT]
    alone = {}
    for i, prompt in enumerate(prompts):
        pair.compare(prompt, max_tokens=12)
        alone[i] = run(drafting, prompt, max_tokens=12).speculation
    logits = drafting.core.logits(PROMPT)
    np.testing.assert_array_equal(logits, pair.plain.core.logits(PROMPT))
    for i in (2, 0, 1, 1, 0):
        pair.compare(prompts[i], max_tokens=12)
        again = run(drafting, prompts[i], max_tokens=12).speculation
        assert again is not None
        assert alone[i] is not None
        assert (again.drafted, again.accepted) == (alone[i].drafted, alone[i].accepted)  # type: ignore[union-attr]


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "more", [{}, PENALTIES, {"logit_bias": {5: 3.0, 7: -9.0}}], ids=["alone", "penalties", "biases"]
)
def test_penalties_biases_and_seeds_count_as_in_plain_decoding(
    pair: Pair, sampling: dict[str, Any], more: dict[str, Any]
) -> None:
    both = {**sampling, **more}
    answer = run(pair.plain, PROMPT, max_tokens=2 * N, sampling=both, ignore_eos=True).tokens
    for n_right in (ALL, 2):
        with telling(pair.drafting, right_up_to(n_right, [*PROMPT, *answer])):
            pair.compare(max_tokens=N, sampling=both, logprobs=1)
    pair.compare(max_tokens=N, sampling=both)


def test_penalties_end_a_loop_as_in_plain_decoding(pair: Pair) -> None:
    """A prompt that repeats one word, and drafts that go on repeating it."""
    prompt = [33] * 48
    for sampling in ({}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}):
        with telling(pair.drafting, lambda n_past, n_drafts, own: [33] * n_drafts):
            pair.compare(prompt, max_tokens=N, sampling=sampling)


def test_answers_of_drawn_drafts_have_no_seed_that_repeats_them(pair: Pair) -> None:
    drawn = run(pair.drafting, PROMPT, max_tokens=8, sampling={"temperature": 1.0})
    assert drawn.seed is None
    plain = run(pair.plain, PROMPT, max_tokens=8, sampling={"temperature": 1.0})
    pair.compare(max_tokens=8, sampling={"temperature": 1.0, "seed": plain.seed})


@pytest.mark.parametrize("cache", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_any_type_serve_a_model_and_its_draft(
    kind: str, cache: KVType, target: Path, folder: Path
) -> None:
    """Tokens are those of plain decoding up to a reported near tie; one word 48 times is a prompt too."""
    caches: dict[str, Any] = {"cache_type_k": cache, "cache_type_v": cache, "flash_attn": "on"}
    with ExitStack() as stack:
        plain = stack.enter_context(loaded_model(target, spec="off", **caches))
        options = {**spec_options(kind, folder), **caches}
        drafting = stack.enter_context(loaded_model(target, spec_width=5, **options))
        for prompt in (PROMPT, PROMPT[:3], [33] * 48):
            expected = run(plain, prompt, max_tokens=N).tokens
            with telling(drafting, right_up_to(3, [*prompt, *expected])):
                found = run(drafting, prompt, max_tokens=N)
            parting = [i for i in range(N) if found.tokens[i] != expected[i]]
            assert found.speculation is not None
            assert found.speculation.accepted > 0
            assert not parting or parting[0] in found.speculation.near_ties


NAN_AT = {
    "dflash-tiny": "enc.output_norm.weight",
    "dflash2-tiny": "selector_hidden.weight",
    "mtp": "blk.8.nextn.shared_head_norm.weight",
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", list(NAN_AT))
def test_drafts_that_are_no_numbers_are_no_drafts(
    kind: str, value: float, target: Path, folder: Path, tmp_path: Path
) -> None:
    def spoil(info: TensorInfo, data: Array) -> NewTensor:
        good = data.view(np.float32)
        return info.type, info.shape, np.full_like(good, value) if info.name == NAN_AT[kind] else good

    source = target if kind == "mtp" else draft_file(kind, folder)
    spoiled = edited(source, tmp_path / "spoiled.gguf", tensors=spoil)
    model, options = (spoiled, {"spec": "mtp"}) if kind == "mtp" else (target, {"draft": spoiled})
    with ExitStack() as stack:
        plain = stack.enter_context(loaded_model(target, spec="off"))
        pair = Pair(plain, stack.enter_context(loaded_model(model, spec_width=4, **options)))
        pair.compare(max_tokens=N, logprobs=0)
        pair.compare(max_tokens=N, sampling={"temperature": 0.9, "seed": 1})
        result = run(pair.drafting, PROMPT, max_tokens=N, ignore_eos=True, sampling={"temperature": 0.9})
        assert len(result.tokens) == N
        assert result.speculation is not None
        assert (result.speculation.drafted, result.speculation.plain_steps) == (0, N - 1)


@pytest.mark.parametrize("kind", ["dflash-tiny", "dflash-swa-tiny", "mtp"])
def test_a_request_that_fails_among_nan_leaves_the_drafter_as_it_was(
    kind: str, target: Path, folder: Path, tmp_path: Path
) -> None:
    """The failing prompt is longer, so its rows lie behind those of the next."""

    def spoil(info: TensorInfo, data: Array) -> NewTensor:
        rows = data.view(np.float32).reshape(info.shape[1::-1]).copy()
        if info.name == "token_embd.weight":
            rows[700] = np.nan
        return info.type, info.shape, rows

    model = edited(target, tmp_path / "m.gguf", tensors=spoil)
    prompt = [token for token in PROMPT if token != 700]
    with loaded_model(model, spec_width=4, **spec_options(kind, folder)) as loaded:
        alone = run(loaded, prompt, max_tokens=N)
        with pytest.raises(BackendError, match="NaN"):
            run(loaded, [*prompt, 700, *prompt], max_tokens=N)
        again = run(loaded, prompt, max_tokens=N)
    assert again.tokens == alone.tokens
    assert again.speculation is not None
    assert alone.speculation is not None
    assert again.speculation.plain_steps == alone.speculation.plain_steps
    assert again.speculation.drafted == alone.speculation.drafted > 0

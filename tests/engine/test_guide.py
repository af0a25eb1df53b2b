"""An answer's guide: reasoning, its budget, its end, and what is constrained behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pyggml_dflash import Constraint
from pyggml_dflash.engine.constraint import Constraints
from pyggml_dflash.engine.guide import AnswerGuide, closing_ids
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.requests import ReasoningBlock
from tests.model.vocabularies import byte_level, sentencepiece

CONTROL, USER_DEFINED = 3, 4
STOP = "<|im_end|>"
TAGS = ["<think>", "</think>"]
OTHERS = ["k>{", "</think>[", ">\n\n"]  # tokens that go on behind the tag


def with_tags(kind: int = USER_DEFINED) -> Tokenizer:
    added = [(STOP, CONTROL), *((tag, kind) for tag in TAGS), *((text, USER_DEFINED) for text in OTHERS)]
    return Tokenizer.from_metadata(byte_level([("\n", "\n")], added=added))


def without_tags() -> Tokenizer:
    """Tags are written byte by byte."""
    added = [(STOP, CONTROL), *((text, USER_DEFINED) for text in OTHERS)]
    return Tokenizer.from_metadata(byte_level([("\n", "\n")], added=added))


def with_spaces() -> Tokenizer:
    """A text's first word has a space in front, if nobody takes care."""
    return Tokenizer.from_metadata(sentencepiece(["\u2581", "a", "{", "}"], added=[(STOP, CONTROL)]))


TOKENIZERS = {
    "tags": with_tags(),
    "control": with_tags(CONTROL),
    "bytes": without_tags(),
    "spm": with_spaces(),
}
CONSTRAINTS = {tokenizer: Constraints(tokenizer) for tokenizer in TOKENIZERS.values()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def guide_of(
    tokenizer: Tokenizer, *, is_open: bool = True, budget: int = -1, regex: str | None = None
) -> AnswerGuide:
    block = ReasoningBlock(opens=TAGS[0], closes=TAGS[1], is_open=is_open, budget=budget)
    if regex is None:
        return AnswerGuide(tokenizer, block, None)
    matcher = CONSTRAINTS[tokenizer].matcher(Constraint(kind="regex", text=regex))
    return AnswerGuide(tokenizer, block, matcher)


def allowed(guide: AnswerGuide, tokenizer: Tokenizer) -> set[int]:
    """Ids that the guide leaves; both ways to ask give the same."""
    logits = np.zeros(tokenizer.n_vocab)
    guide.restrict(logits)
    found = {int(i) for i in np.flatnonzero(logits == 0)}
    assert found == {i for i in range(tokenizer.n_vocab) if guide.allows(i)}
    return found


def write(guide: AnswerGuide, tokens: Sequence[int]) -> None:
    for token in tokens:
        assert guide.allows(token)
        guide.accept(token)


def forced(guide: AnswerGuide, tokenizer: Tokenizer) -> str:
    """The text of the tokens that come without a choice."""
    tokens: list[int] = []
    while len(only := allowed(guide, tokenizer)) == 1:
        tokens += only
        guide.accept(tokens[-1])
    return tokenizer.decode(tokens, continuation=True)


# the constraint begins behind the block


def test_reasoning_is_free_and_its_end_begins_the_constraint(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, regex=r"\{a\}")
    write(guide, tokenizer.spell("aa { <"))
    write(guide, tokenizer.spell("</think>"))
    write(guide, tokenizer.spell("{a"))
    assert guide.finished_at is None
    write(guide, tokenizer.spell("}"))
    assert guide.finished_at == sum(map(len, map(tokenizer.spell, ["aa { <", "</think>", "{a", "}"])))


def test_no_answer_ends_within_reasoning_that_a_constraint_follows(tokenizer: Tokenizer) -> None:
    stops = set(tokenizer.stop_ids)
    constrained, free = guide_of(tokenizer, regex="a"), guide_of(tokenizer)
    assert not stops & allowed(constrained, tokenizer)
    assert stops <= allowed(free, tokenizer)


def test_nothing_comes_past_the_constraint_with_the_token_that_closes_the_block(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, regex="a")
    bad = {token for text in ("k>{", "</think>[") if (token := tokenizer.find(text)) is not None}
    assert allowed(guide, tokenizer) & bad == bad - {tokenizer.find("</think>[")}
    write(guide, tokenizer.spell("x</thin"))
    assert not allowed(guide, tokenizer) & bad
    assert tokenizer.spell("k")[0] in allowed(guide, tokenizer)


def test_tokens_that_close_the_tag_and_go_on_are_found_by_what_must_precede_them() -> None:
    tokenizer = TOKENIZERS["bytes"]
    found = {
        n: [tokenizer.token_text(i) for i in ids] for n, ids in closing_ids(tokenizer, b"</think>").items()
    }
    assert found == {0: ["</think>["], 6: ["k>{"]}


@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
def test_line_breaks_may_stand_between_block_and_constraint(tokenizer: Tokenizer, gap: str) -> None:
    guide = guide_of(tokenizer, regex=r"\{a\}")
    write(guide, [*tokenizer.spell("</think>"), *tokenizer.spell(gap), *tokenizer.spell("{a}")])
    assert guide.finished_at is not None


def test_two_line_breaks_are_enough(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, regex=r"\{a\}")
    write(guide, [*tokenizer.spell("</think>"), *tokenizer.spell("\n\n")])
    assert allowed(guide, tokenizer) == set(tokenizer.spell("{"))


def test_line_breaks_of_the_token_that_closes_the_block_count() -> None:
    tokenizer = TOKENIZERS["bytes"]
    guide = guide_of(tokenizer, regex=r"\{a\}")
    token = tokenizer.find(">\n\n")
    assert token is not None
    write(guide, [*tokenizer.spell("x</think"), token])
    assert allowed(guide, tokenizer) == set(tokenizer.spell("{"))


# a block that the model may open


def test_an_answer_may_begin_with_the_block_or_without(tokenizer: Tokenizer) -> None:
    opened, direct = (guide_of(tokenizer, is_open=False, regex=r"\{a\}") for _ in range(2))
    assert allowed(direct, tokenizer) == {tokenizer.spell("{")[0], tokenizer.spell("<think>")[0]}
    write(direct, tokenizer.spell("{a}"))
    assert direct.finished_at == len(tokenizer.spell("{a}"))
    write(opened, [*tokenizer.spell("<think>"), *tokenizer.spell("a</think>"), *tokenizer.spell("{a}")])
    assert opened.finished_at is not None


def test_what_begins_like_the_tag_may_be_the_answer(tokenizer: Tokenizer) -> None:
    for text in ("<b", "<think>a</think><b"):
        guide = guide_of(tokenizer, is_open=False, regex="<b")
        write(guide, tokenizer.spell(text))
        assert guide.finished_at is not None


# budgets


@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_spent_budget_closes_the_block(tokenizer: Tokenizer, budget: int, is_open: bool) -> None:
    guide = guide_of(tokenizer, is_open=is_open, budget=budget)
    write(guide, [] if is_open else tokenizer.spell("<think>"))
    a = tokenizer.spell("a")[0]
    for _ in range(budget):
        assert len(allowed(guide, tokenizer)) == tokenizer.n_vocab
        write(guide, [a])
    assert forced(guide, tokenizer) == "</think>"


def test_a_budget_of_nothing_closes_the_block_at_once(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, budget=0)
    assert forced(guide, tokenizer) == "</think>"
    may_open = guide_of(tokenizer, budget=0, is_open=False)
    write(may_open, tokenizer.spell("<think>"))
    assert forced(may_open, tokenizer) == "</think>"


def test_with_a_budget_of_nothing_a_constraint_begins_the_answer(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, budget=0, is_open=False, regex=r"\{a\}")
    assert allowed(guide, tokenizer) == set(tokenizer.spell("{"))


def test_a_tag_that_was_begun_is_completed_and_not_begun_again() -> None:
    tokenizer = TOKENIZERS["bytes"]
    guide = guide_of(tokenizer, budget=5)
    write(guide, tokenizer.spell("abc</"))
    assert forced(guide, tokenizer) == "think>"


def test_behind_a_block_that_was_closed_there_is_an_answer(tokenizer: Tokenizer) -> None:
    stops = set(tokenizer.stop_ids)
    guide = guide_of(tokenizer, budget=0)
    assert forced(guide, tokenizer) == "</think>"
    for text in ("\n", " "):
        assert not stops & allowed(guide, tokenizer)
        write(guide, tokenizer.spell(text))
    write(guide, tokenizer.spell("a"))
    assert stops <= allowed(guide, tokenizer)


def test_who_closes_the_block_himself_may_say_nothing(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, budget=50)
    write(guide, [*tokenizer.spell("a"), *tokenizer.spell("</think>")])
    assert set(tokenizer.stop_ids) <= allowed(guide, tokenizer)


def test_a_spent_budget_leads_to_the_constraint(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, budget=2, regex=r"\{a\}")
    write(guide, tokenizer.spell("a")[:1] * 2)
    assert forced(guide, tokenizer) == "</think>"
    write(guide, tokenizer.spell("{a}"))
    assert guide.finished_at is not None


def test_nothing_is_asked_behind_the_end(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, budget=0, is_open=False, regex="a")
    write(guide, tokenizer.spell("a"))
    assert guide.finished_at == 1
    assert len(allowed(guide, tokenizer)) == tokenizer.n_vocab
    guide.accept(0)
    assert guide.finished_at == 1

"""Where reasoning begins and ends, and how many tokens it is, whichever way tokens divide the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml_dflash.model.reasoning import Phase, ReasoningTracker, count_reasoning
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.requests import ReasoningBlock
from tests.model.vocabularies import byte_level

CONTROL, USER_DEFINED = 3, 4
PIECES = ("<think>", "</think>", "<think>\n", "a </thi", "nk> b", ">\n\n", "x</think>", "<|im_end|>")
OPEN = ReasoningBlock(opens="<think>", closes="</think>", is_open=True)
MAY_OPEN = ReasoningBlock(opens="<think>", closes="</think>", is_open=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    kinds = [CONTROL if text.startswith("<|") else USER_DEFINED for text in PIECES]
    return Tokenizer.from_metadata(byte_level(added=list(zip(PIECES, kinds, strict=True))))


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """One token per piece that the vocabulary has as a whole, else one per byte."""
    ids: list[int] = []
    for piece in pieces:
        found = tokenizer.find(piece)
        ids += [found] if found is not None else list(piece.encode())
    return ids


def follow(tokenizer: Tokenizer, block: ReasoningBlock, ids: Sequence[int]) -> tuple[Phase, int]:
    tracker = ReasoningTracker(tokenizer, block)
    for token in ids:
        tracker.accept(token)
    return tracker.phase, tracker.n_tokens


@pytest.mark.parametrize(
    ("block", "pieces", "expected"),
    [
        (OPEN, (), ("inside", 0)),
        (OPEN, ("abc",), ("inside", 3)),
        (OPEN, ("abc", "</think>"), ("behind", 3)),
        (OPEN, ("</think>",), ("behind", 0)),
        (OPEN, ("ab", "<", "/think>"), ("behind", 2)),
        (OPEN, ("a </thi", "nk> b", "cd"), ("behind", 1)),
        (OPEN, ("x</think>", "cd"), ("behind", 1)),
        (OPEN, ("ab</thi",), ("inside", 7)),  # no tag yet
        (OPEN, ("ab", "<", "</think>"), ("behind", 3)),
        (OPEN, ("ab", "<|im_end|>", "</think>"), ("behind", 3)),
        (MAY_OPEN, (), ("opening", 0)),
        (MAY_OPEN, ("\n", "<thi"), ("opening", 0)),
        (MAY_OPEN, ("<thi", "nk>", "ab"), ("inside", 2)),
        (MAY_OPEN, ("<think>", "ab", "</think>", "cd"), ("behind", 2)),
        (MAY_OPEN, ("<think>\n", "ab", "</think>"), ("behind", 3)),
        (MAY_OPEN, ("hello <think>",), ("behind", 0)),
    ],
)
def test_tokens_between_the_tags_are_counted(
    tokenizer: Tokenizer, block: ReasoningBlock, pieces: tuple[str, ...], expected: tuple[Phase, int]
) -> None:
    assert follow(tokenizer, block, ids_of(tokenizer, *pieces)) == expected


@given(pieces=st.lists(st.sampled_from([*PIECES, "<", "/think>", ">", " ", "word"]), max_size=8))
def test_the_block_ends_where_its_text_does(tokenizer: Tokenizer, pieces: list[str]) -> None:
    ids = ids_of(tokenizer, *pieces)
    reasoning, tag, _ = tokenizer.decode(ids).partition("</think>")
    before = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
    in_block = [i for i in range(len(ids)) if "</think>" not in before[i]]  # those that close it, too
    of_tag = [i for i in in_block if len(before[i + 1]) > len(before[i]) >= len(reasoning)]
    phase, n_tokens = follow(tokenizer, OPEN, ids)
    assert (phase == "behind") == bool(tag)
    assert n_tokens == len(in_block) - (len(of_tag) if tag else 0)
    assert count_reasoning(tokenizer, OPEN, ids) == n_tokens


def test_an_answer_without_a_block_has_no_reasoning(tokenizer: Tokenizer) -> None:
    assert count_reasoning(tokenizer, None, ids_of(tokenizer, "<think>", "abc")) == 0


def test_what_stands_behind_a_tag_in_its_token_is_kept(tokenizer: Tokenizer) -> None:
    tracker = ReasoningTracker(tokenizer, OPEN)
    for token in ids_of(tokenizer, "a </thi", "nk> b"):
        tracker.accept(token)
    assert tracker.rest == b" b"

"""SentencePiece vocabularies: ranked merges against a plain greedy search over the scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.errors import UnsupportedModelError
from pyggml_dflash.model.tokenizer import Tokenizer
from tests.model.vocabularies import sentencepiece

MARK = "\u2581"
NORMAL, USER_DEFINED = 1, 4
_WORDS = [
    "__",
    "the",
    "_the",
    "_th",
    "he",
    "____",
    "_t",
    "in",
    "ing",
    "an",
    "and",
    "_an",
    "_and",
    "==",
    "====",
]
WORDS = [word.replace("_", MARK) for word in _WORDS]
LETTERS = [MARK, *"abdeghint=.", "\u00e9", "\u4e2d"]


def greedy(text: str, pieces: Sequence[str]) -> list[str]:
    """Join the best neighbours, leftmost first, until none are left; then spell the unknown as bytes."""
    rank = {piece: i for i, piece in enumerate(pieces)}
    symbols = list(text.replace(" ", MARK))
    while True:
        unions = [(rank.get(a + b), i) for i, (a, b) in enumerate(pairwise(symbols))]
        best = min(((r, i) for r, i in unions if r is not None), default=None)
        if best is None:
            break
        i = best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    spelled = [[s] if s in rank else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [token for tokens in spelled for token in tokens]


def ids_of(metadata: dict[str, list[str]], texts: Sequence[str]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens.index(text) for text in texts]


@st.composite
def vocabularies(draw: st.DrawFn) -> list[str]:
    """Letters and pieces of them in the order in which training would find them, best first."""
    letters = draw(st.sampled_from([["a"], ["a", "b"], ["a", MARK], ["a", "b", MARK, "\u00e9"]]))
    pieces = list(letters)
    for _ in range(draw(st.integers(0, 10))):
        union = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if union not in pieces and len(union) <= 12:
            pieces.append(union)
    return pieces


@settings(max_examples=200, deadline=None)
@given(pieces=vocabularies(), text=st.text(alphabet="ab \u00e9\U0001f600", max_size=30))
def test_ranked_merges_find_what_the_greedy_search_finds(pieces: list[str], text: str) -> None:
    metadata = sentencepiece(pieces) | {"tokenizer.ggml.add_space_prefix": False}
    found = Tokenizer.from_metadata(metadata).encode(text, add_special=False)
    assert found == ids_of(metadata, greedy(text, pieces))


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece([*LETTERS, *WORDS], added=[("<think>", USER_DEFINED)]))


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abdeghint=. \u00e9\u4e2d\U0001f600", min_size=1, max_size=40))
def test_text_gets_a_space_in_front_and_comes_back_without_it(words: Tokenizer, text: str) -> None:
    metadata = sentencepiece([*LETTERS, *WORDS])
    ids = words.encode(text, add_special=False)
    assert ids == ids_of(metadata, greedy(" " + text, [*LETTERS, *WORDS]))
    assert words.decode(ids) == text


def test_bos_is_added_and_the_empty_text_stays_empty(words: Tokenizer) -> None:
    assert (words.bos_id, words.eos_id, words.add_bos, words.add_eos) == (1, 2, True, False)
    assert words.encode("") == [1]
    assert words.encode("", add_special=False) == []


def test_a_space_goes_before_text_after_any_added_token(words: Tokenizer) -> None:
    ids = words.encode("the<think>the</s>the", add_special=False)
    assert [words.decode([i], skip_special=False, continuation=True) for i in ids] == [
        " the",
        "<think>",
        " the",
        "</s>",
        " the",
    ]


def test_the_file_may_turn_the_space_off() -> None:
    metadata = sentencepiece([*LETTERS, *WORDS]) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert tokenizer.encode("the", add_special=False) == ids_of(metadata, ["the"])


def test_a_continuation_keeps_its_space(words: Tokenizer) -> None:
    ids = words.encode("the and", add_special=False)
    assert words.decode(ids) == "the and"
    assert words.decode(ids, continuation=True) == " the and"


def test_control_tokens_are_ordinary_text_unless_parsed(words: Tokenizer) -> None:
    literal = words.encode("</s>", add_special=False, parse_special=False)
    assert words.eos_id not in literal
    assert words.decode(literal) == "</s>"
    assert words.encode("</s>", add_special=False) == [words.eos_id]


def test_no_merge_leads_to_a_control_token() -> None:
    pieces = [*LETTERS, "<", "/", "s", ">", "</", "s>"]  # </ and s> would join to </s>
    tokenizer = Tokenizer.from_metadata(sentencepiece(pieces))
    assert tokenizer.eos_id not in tokenizer.encode("</s>", add_special=False, parse_special=False)


def test_bytes_stand_for_characters_without_a_piece(words: Tokenizer) -> None:
    ids = words.encode("\U0001f600", add_special=False)
    assert b"".join(words.token_bytes(i) for i in ids) == b" \xf0\x9f\x98\x80"
    assert ids[1:] == [3 + byte for byte in "\U0001f600".encode()]
    assert not words.is_special(ids[1])


def without_bytes(pieces: Sequence[str]) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *pieces],
        "tokenizer.ggml.scores": [0.0] * (1 + len(pieces)),
        "tokenizer.ggml.token_type": [2] + [1] * len(pieces),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    tokenizer = Tokenizer.from_metadata(without_bytes(["a", "b"]))
    assert tokenizer.encode("axyb") == [1, 0, 2]
    assert tokenizer.decode([1, 0, 2]) == "ab"


def test_a_vocabulary_that_cannot_spell_everything_is_refused() -> None:
    metadata = without_bytes(["a", "b"]) | {"tokenizer.ggml.token_type": [NORMAL] * 3}
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.tokens .* 256 byte tokens"):
        Tokenizer.from_metadata(metadata)

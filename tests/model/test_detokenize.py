"""Tokens to text as they come: whole characters, and together the same as all at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.model.tokenizer import TextDecoder, Tokenizer
from tests.model.vocabularies import byte_level, metadata_of, sentencepiece

MARK = "\u2581"
# Two, three and four bytes, a joined family of emoji, a flag, combining marks.
TEXTS = [
    "\u00e9\u00df",
    "\u4e2d\u6587\uac00",
    "\U0001f680\U0001f999",
    "\U0001f469\u200d\U0001f467",
    "\U0001f1eb\U0001f1f7",
    "e\u0301\u0302",
]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    added = [("<|im_end|>", 3), ("<think>", 4), ("[PAD]", 5)]
    return {
        "bytes": Tokenizer.from_metadata(byte_level([("a", "b"), (" ", "ab")], added=added)),
        "pieces": Tokenizer.from_metadata(sentencepiece([MARK, "a", "\u00e9", MARK + "a"], added=added)),
        "llama-tiny": Tokenizer.from_metadata(metadata_of("llama-tiny-Q8_0")),
        "qwen35-tiny": Tokenizer.from_metadata(metadata_of("qwen35-tiny-Q8_0")),
    }


def pushed(decoder: TextDecoder, ids: list[int]) -> list[str]:
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("name", ["bytes", "pieces", "llama-tiny", "qwen35-tiny"])
@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("continuation", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_pieces_together_are_the_whole_text(
    tokenizers: dict[str, Tokenizer], name: str, skip_special: bool, continuation: bool, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=40))
    decoder = TextDecoder(tokenizer, skip_special=skip_special, continuation=continuation)
    whole = tokenizer.decode(ids, skip_special=skip_special, continuation=continuation)
    assert "".join(pushed(decoder, ids)) == whole


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.integers(0, 255) | st.sampled_from([0xC3, 0xE2, 0xF0, 0x9F, 0x80, 0xBF, 0xED, 0xA0])))
def test_any_bytes_decode_as_python_decodes_them(tokenizers: dict[str, Tokenizer], data: list[int]) -> None:
    tokenizer = tokenizers["bytes"]  # id = byte
    expected = bytes(data).decode("utf-8", errors="replace")
    assert tokenizer.decode(data) == expected
    assert "".join(pushed(TextDecoder(tokenizer), data)) == expected


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["bytes", "pieces", "llama-tiny", "qwen35-tiny"])
def test_characters_that_tokens_split_come_out_whole(
    tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special=False)
    assert len(ids) > 1
    pieces = pushed(TextDecoder(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["\u00e9", "\u4e2d", "\U0001f680"])
def test_a_character_comes_with_its_last_byte(tokenizers: dict[str, Tokenizer], text: str) -> None:
    ids = list(text.encode())
    decoder = TextDecoder(tokenizers["bytes"])
    assert [decoder.push(token) for token in ids] == [""] * (len(ids) - 1) + [text]


def test_text_before_a_split_character_is_not_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    decoder = TextDecoder(tokenizers["bytes"])
    assert [decoder.push(token) for token in b"ab\xf0\x9f\x9a\x80c"] == [
        "a",
        "b",
        "",
        "",
        "",
        "\U0001f680",
        "c",
    ]


def test_what_cannot_become_a_character_is_not_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    decoder = TextDecoder(tokenizers["bytes"])
    assert [decoder.push(token) for token in b"\xe4\xb8a\xff\x80"] == ["", "", "\ufffda", "\ufffd", "\ufffd"]
    assert decoder.flush() == ""


@pytest.mark.parametrize("tail", [b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x9a"])
def test_an_unfinished_character_is_replaced_at_the_end(
    tokenizers: dict[str, Tokenizer], tail: bytes
) -> None:
    decoder = TextDecoder(tokenizers["bytes"])
    assert pushed(decoder, [97, *tail]) == ["a", *[""] * len(tail), "\ufffd"]
    assert tokenizers["bytes"].decode([97, *tail]) == "a\ufffd"


def test_a_control_token_between_the_bytes_of_a_character_does_not_break_it(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    end = tokenizer.find("<|im_end|>")
    assert end is not None
    assert pushed(TextDecoder(tokenizer), [0xC3, end, 0xA9]) == ["", "", "\u00e9", ""]


def test_the_space_of_sentencepiece_is_taken_from_the_first_word_only(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["pieces"]
    ids = tokenizer.encode("a a")
    assert pushed(TextDecoder(tokenizer), ids) == ["", "a", " a", ""]
    assert pushed(TextDecoder(tokenizer, continuation=True), ids) == ["", " a", " a", ""]
    space = tokenizer.find("<0x20>")
    assert space is not None
    assert tokenizer.decode([space, space]) == "".join(pushed(TextDecoder(tokenizer), [space, space])) == " "

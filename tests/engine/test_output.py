"""Tokens to text: what is given out step by step is what a search through the whole text gives."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.engine.output import OutputAssembler
from pyggml_dflash.requests import TextPiece, TokenLogprob


class BytesDecoder:
    """A vocabulary of byte strings: token i stands for `pieces[i]`."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._pieces[token])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def whole_text_oracle(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """What is shown of a finished text, and the stop string that ends it."""
    found = [(text.find(s), len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    at, _, string = min(found)
    return text[:at], string


def certain_length(text: str, stop: Sequence[str], endings: Sequence[str]) -> int:
    """How much of `text` is shown however it continues, found by trying every continuation that matters."""
    shown = [whole_text_oracle(text + ending, stop)[0] for ending in endings]
    length = 0
    while length < len(text) and all(s[: length + 1] == text[: length + 1] for s in shown):
        length += 1
    return length


def assemble(pieces: Sequence[bytes], stop: Sequence[str]) -> tuple[OutputAssembler, list[TextPiece]]:
    assembler, given_out = OutputAssembler(BytesDecoder(pieces), stop), []
    for token in range(len(pieces)):
        given_out.append(assembler.push(token))
        if assembler.stopped is not None:
            break
    given_out.append(assembler.finish())
    return assembler, [piece for piece in given_out if piece is not None]


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


TEXTS = st.text(alphabet="abé😀", max_size=24)
STOPS = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 200), max_size=24)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, stop=STOPS, cuts=CUTS)
def test_any_split_into_tokens_gives_what_the_whole_text_gives(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    pieces = cut(text.encode(), cuts)
    assembler, given_out = assemble(pieces, stop)
    shown, string = whole_text_oracle(text, stop)
    assert (assembler.text, assembler.stopped) == (shown, string)
    assert "".join(piece.text for piece in given_out) == shown
    assert all(piece.text.isprintable() for piece in given_out)


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(alphabet="ab", max_size=14),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
def test_text_is_given_out_as_soon_as_it_is_certain_and_no_sooner(text: str, stop: list[str]) -> None:
    endings = ["", "-", *(s[at:] for s in stop for at in range(len(s)))]
    assembler = OutputAssembler(BytesDecoder([c.encode() for c in text]), stop)
    for token in range(len(text)):
        assembler.push(token)
        so_far = text[: token + 1]
        assert len(assembler.text) == certain_length(so_far, stop, endings)
        ends = {whole_text_oracle(so_far + ending, stop) for ending in endings}
        assert (assembler.stopped is not None) == (
            len(ends) == 1 and None not in {string for _, string in ends}
        )
        if assembler.stopped is not None:
            break


@settings(deadline=None)
@given(text=TEXTS, stop=STOPS, cuts=CUTS)
def test_every_token_and_logprob_is_in_exactly_one_piece(text: str, stop: list[str], cuts: list[int]) -> None:
    pieces = cut(text.encode(), cuts)
    assembler, pushed, given_out = OutputAssembler(BytesDecoder(pieces), stop), [], []
    for token in range(len(pieces)):
        pushed.append(token)
        given_out.append(assembler.push(token, TokenLogprob(token=token, logprob=-float(token))))
        if assembler.stopped is not None:
            break
    given_out.append(assembler.finish())
    assert assembler.finish() is None
    assert [token for piece in given_out if piece is not None for token in piece.tokens] == pushed
    assert [entry.token for piece in given_out if piece is not None for entry in piece.logprobs] == pushed


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "string"),
    [
        (["Hello", " END", " more"], ["END"], "Hello ", "END"),
        (["Hello E", "ND more"], ["END"], "Hello ", "END"),
        (["Hello E", "N", "D more"], ["END"], "Hello ", "END"),
        (["Hello E", "N", "X more"], ["END"], "Hello ENX more", None),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["aaab"], ["aab"], "a", "aab"),
        (["aa", "ab"], ["aab"], "a", "aab"),
        (["one two", " three"], ["three", "two"], "one ", "two"),
        (["ab", "cd"], ["bc", "abcd"], "", "abcd"),
        (["ab", "cx"], ["bc", "abcd"], "a", "bc"),
        (["ab", "c"], ["bc", "abcd"], "a", "bc"),
        (["x", "ab", "c"], ["abc", "ab"], "x", "ab"),
        (["x\n", "\nUser", ":"], ["\n\nUser:", "\n\nBot:"], "x", "\n\nUser:"),
        (["END"], ["END"], "", "END"),
        (["E", "N"], ["END"], "EN", None),
        ([], ["END"], "", None),
        (["ends", " here"], [], "ends here", None),
    ],
)
def test_the_answer_ends_before_the_earliest_stop_string(
    pieces: list[str], stop: list[str], shown: str, string: str | None
) -> None:
    assembler, given_out = assemble([piece.encode() for piece in pieces], stop)
    assert (assembler.text, assembler.stopped) == (shown, string)
    assert "".join(piece.text for piece in given_out) == shown


def test_the_order_of_stop_strings_does_not_matter() -> None:
    for stop in (["ab", "abc", "bc"], ["bc", "abc", "ab"], ["abc", "bc", "ab"]):
        assembler, _ = assemble([b"x", b"abc"], stop)
        assert (assembler.text, assembler.stopped) == ("x", "ab")


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_stop_string_right_after_a_split_character_keeps_the_character(character: str) -> None:
    data = character.encode()
    for at in range(1, len(data)):
        assembler, given_out = assemble([b"x", data[:at], data[at:] + b"#", b"#", b"tail"], ["##"])
        assert (assembler.text, assembler.stopped) == ("x" + character, "##")
        assert [piece.text for piece in given_out] == ["x", character, ""]
        assert [piece.tokens for piece in given_out] == [(0,), (1, 2), (3,)]


def test_a_stop_string_may_be_a_split_character() -> None:
    assembler, _ = assemble([b"x\xf0\x9f", b"\x98", b"\x80y"], ["😀"])
    assert (assembler.text, assembler.stopped) == ("x", "😀")


def test_bytes_that_stay_incomplete_become_replacement_characters_at_the_end() -> None:
    assembler, given_out = assemble([b"x", b"\xf0\x9f"], ["##"])
    assert assembler.text == "x\ufffd"
    assert [piece.tokens for piece in given_out] == [(0,), (1,)]


def test_the_last_text_of_the_decoder_may_complete_a_stop_string() -> None:
    assembler, given_out = assemble([b"x#", b"\xf0\x9f"], ["#\ufffd"])
    assert (assembler.text, assembler.stopped) == ("x", "#\ufffd")
    assert [(piece.text, piece.tokens) for piece in given_out] == [("x", (0,)), ("", (1,))]


def test_a_push_without_certain_text_gives_nothing_and_keeps_its_tokens() -> None:
    assembler = OutputAssembler(BytesDecoder([b"E", b"N", b"\xc3", b"\xa9"]), ["END"])
    first, second = TokenLogprob(token=0, logprob=-1.0), TokenLogprob(token=1, logprob=-2.0)
    assert assembler.push(0, first) is None
    assert assembler.push(1, second) is None
    assert assembler.push(2) is None
    assert assembler.push(3) == TextPiece(text="ENé", tokens=(0, 1, 2, 3), logprobs=(first, second))
    assert assembler.finish() is None


def test_the_piece_that_ends_the_answer_has_the_tokens_of_the_stop_string() -> None:
    assembler = OutputAssembler(BytesDecoder([b"yes E", b"N", b"D!"]), ["END"])
    assert assembler.push(0) == TextPiece(text="yes ", tokens=(0,))
    assert assembler.push(1) is None
    assert assembler.push(2) == TextPiece(text="", tokens=(1, 2))
    assert assembler.stopped == "END"
    assert assembler.finish() is None


def test_requests_share_nothing() -> None:
    one = OutputAssembler(BytesDecoder([b"E", b"ND"]), ["END"])
    other = OutputAssembler(BytesDecoder([b"N", b"D"]), ["END"])
    assert one.push(0) is None
    assert other.push(0) == TextPiece(text="N", tokens=(0,))
    assert one.push(1) == TextPiece(text="", tokens=(0, 1))
    assert other.stopped is None

"""Text to tokens: the stored vectors, what is added around a text, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError, UsageError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.pretokenize import PRE_TOKENIZERS
from pyggml_dflash.model.tokenizer import MAX_TEXT_CHARS, TextDecoder, Tokenizer
from tests.model.vocabularies import DATA, byte_letters, byte_level, metadata_of, sentencepiece

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
MODELS = {
    "llama-tiny-Q8_0": "tok_llama_a",
    "qwen3-tiny-Q4_K_M": "tok_qwen2_a",
    "qwen35-tiny-Q8_0": "tok_qwen35_a",
}
VECTORS = [
    (model, case)
    for model, vectors in MODELS.items()
    for case in json.loads((DATA / f"tokenization/{vectors}.json").read_text(encoding="utf-8"))["cases"]
]
each_vector = pytest.mark.parametrize(
    ("model", "case"), VECTORS, ids=[f"{model}-{case['id']}" for model, case in VECTORS]
)


@pytest.fixture(scope="module")
def tokenizers() -> dict[tuple[str, bool], Tokenizer]:
    """Of each tiny model, with and without NFC."""
    return {
        (m, nfc): Tokenizer.from_metadata(metadata_of(m), nfc=nfc) for m in MODELS for nfc in (True, False)
    }


@pytest.fixture(scope="module")
def llama(tokenizers: dict[tuple[str, bool], Tokenizer]) -> Tokenizer:
    return tokenizers["llama-tiny-Q8_0", True]


@pytest.fixture(scope="module")
def qwen35(tokenizers: dict[tuple[str, bool], Tokenizer]) -> Tokenizer:
    return tokenizers["qwen35-tiny-Q8_0", True]


@each_vector
def test_ids_are_those_of_hugging_face(
    tokenizers: dict[tuple[str, bool], Tokenizer], model: str, case: dict[str, Any]
) -> None:
    tokenizer = tokenizers[model, True]
    assert tokenizer.encode(case["text"], add_special=False) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["decodes_to"]


@each_vector
def test_without_nfc_ids_are_those_of_llama_cpp(
    tokenizers: dict[tuple[str, bool], Tokenizer], model: str, case: dict[str, Any]
) -> None:
    ids = tokenizers[model, False].encode(case["text"], add_special=False)
    assert ids == case.get("llama_cpp_ids", case["ids"])


def test_the_shipped_model_encodes_its_reference_prompts() -> None:
    cases = json.loads((DATA / "chat/pico_prompts.json").read_text(encoding="utf-8"))["cases"]
    with (
        resources.as_file(resources.files("pyggml_dflash") / "models/pico-q8_0.gguf") as path,
        GgufFile.open(path) as file,
    ):
        tokenizer = Tokenizer.from_metadata(file.metadata)
    for case in cases:
        assert tokenizer.encode(case["prompt"]) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["prompt"]


def test_bos_goes_first_where_the_model_wants_it(llama: Tokenizer, qwen35: Tokenizer) -> None:
    assert llama.add_bos
    assert llama.encode("hi") == [llama.bos_id, *llama.encode("hi", add_special=False)]
    assert llama.encode("") == [llama.bos_id]
    assert not qwen35.add_bos
    assert qwen35.encode("hi") == qwen35.encode("hi", add_special=False)
    assert qwen35.encode("") == []


def test_a_text_that_begins_with_bos_gets_no_second(llama: Tokenizer) -> None:
    text = "<|begin_of_text|>hi"
    assert llama.encode(text) == llama.encode(text, add_special=False) == llama.encode("hi")


def test_the_file_says_whether_bos_and_eos_are_added() -> None:
    metadata = byte_level(added=[("<s>", CONTROL), ("</s>", CONTROL)])
    metadata |= {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}
    assert Tokenizer.from_metadata(metadata).encode("a") == [97]
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_metadata(metadata).encode("a") == [256, 97, 257]
    assert Tokenizer.from_metadata(metadata).encode("a", add_special=False) == [97]


def test_llama_bpe_adds_bos_unless_the_file_says_otherwise() -> None:
    metadata = byte_level(added=[("<s>", CONTROL)], pre="llama-bpe") | {"tokenizer.ggml.bos_token_id": 256}
    assert Tokenizer.from_metadata(metadata).encode("a") == [256, 97]
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_metadata(metadata).encode("a") == [97]


def test_control_tokens_are_ordinary_text_unless_parsed(qwen35: Tokenizer, llama: Tokenizer) -> None:
    for tokenizer in (qwen35, llama):
        special = [i for i in range(tokenizer.n_vocab) if tokenizer.is_special(i)]
        assert special
        text = " ".join(tokenizer.token_text(i) for i in special)
        literal = tokenizer.encode(text, add_special=False, parse_special=False)
        assert not set(literal) & set(special)
        assert tokenizer.decode(literal) == text
        assert set(special) <= set(tokenizer.encode(text, add_special=False))


def test_user_defined_tokens_are_always_parsed_and_always_shown(qwen35: Tokenizer) -> None:
    think = qwen35.find("<think>")
    assert think is not None
    assert not qwen35.is_special(think)
    for parse_special in (True, False):
        assert qwen35.encode("<think>", add_special=False, parse_special=parse_special) == [think]
    assert qwen35.decode([think]) == "<think>"


@pytest.mark.parametrize(
    "tag", ["<think>", "</think>", "[/THINK]", "<seed:think>", "<tool_call>", "</tool_call>"]
)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_tags_that_answers_are_read_by_are_shown_whatever_the_file_says_of_them(tag: str, kind: int) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(added=[(tag, kind), ("<|other|>", CONTROL)]))
    assert tokenizer.encode(tag) == [256]
    assert not tokenizer.is_special(256)
    assert tokenizer.decode([97, 256, 257, 98]) == f"a{tag}b"
    decoder = TextDecoder(tokenizer)
    assert "".join(decoder.push(token) for token in (97, 256, 257, 98)) == f"a{tag}b"


def test_a_spelling_has_the_bytes_of_the_text_and_no_space_in_front() -> None:
    pieces = ["\u2581", "\u2581a", "a", "b", "\u2581b"]
    for tokenizer in (
        Tokenizer.from_metadata(sentencepiece(pieces)),
        Tokenizer.from_metadata(byte_level([("a", "b")])),
    ):
        for text in ("ab", " ab", "</x>", "\n\n", "\u00e9"):
            ids = tokenizer.spell(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_control_tokens_are_left_out_of_text_unless_asked_for(qwen35: Tokenizer) -> None:
    ids = qwen35.encode("<|im_start|>user\nhi<|im_end|>")
    assert qwen35.decode(ids) == "user\nhi"
    assert qwen35.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_stop_tokens_are_eos_and_what_ends_a_turn(qwen35: Tokenizer, llama: Tokenizer) -> None:
    assert {qwen35.token_text(i) for i in qwen35.stop_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert {llama.token_text(i) for i in llama.stop_ids} == {"<|end_of_text|>", "<|eot_id|>"}


def test_a_stop_text_counts_only_as_an_added_token() -> None:
    texts = ["<|im_end|>", "<|fim_pad|>", "<|eot_id|>", "<|other|>"]
    added = list(zip(texts, [CONTROL, USER_DEFINED, 1, CONTROL], strict=True))
    assert Tokenizer.from_metadata(byte_level(added=added)).stop_ids == {256, 257}
    metadata = byte_level(added=added) | {
        "tokenizer.ggml.eot_token_id": 259,
        "tokenizer.ggml.eos_token_id": 97,
    }
    assert Tokenizer.from_metadata(metadata).stop_ids == {97, 256, 257, 259}


def test_unused_tokens_are_known_and_have_no_text() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(added=[("[PAD256]", UNUSED), ("[PAD257]", UNUSED)]))
    assert tokenizer.unused_ids == {256, 257}
    assert tokenizer.token_bytes(256) == b""
    assert tokenizer.token_text(256) == "[PAD256]"
    assert tokenizer.decode([97, 256, 98], skip_special=False) == "ab"
    assert 256 not in tokenizer.encode("[PAD256]")


def test_nfc_applies_only_where_the_model_was_trained_so() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    for pre, normalizes in {"qwen35": True, "qwen2": True, "llama-bpe": False, "gpt-2": False}.items():
        metadata = byte_level(pre=pre)
        expected = composed if normalizes else decomposed
        assert Tokenizer.from_metadata(metadata).encode(decomposed) == list(expected.encode())
        assert Tokenizer.from_metadata(metadata, nfc=False).encode(decomposed) == list(decomposed.encode())


def test_merges_do_not_cross_the_words_of_the_pre_tokenizer() -> None:
    merges = [("1", "2"), ("12", "3"), ("123", "4"), (" ", "a"), ("a", "'")]
    pieces = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm", "tekken"):
        tokenizer = Tokenizer.from_metadata(byte_level(merges, pre=pre))
        pieces[pre] = [tokenizer.token_text(i) for i in tokenizer.encode("1234 a'", add_special=False)]
    assert pieces == {
        "gpt-2": ["1234", " a", "'"],
        "llama-bpe": ["123", "4", " a", "'"],
        "qwen2": ["1", "2", "3", "4", " a", "'"],
        "smollm": ["1", "2", "3", "4", " a", "'"],
        "tekken": ["1", "2", "3", "4", " a", "'"],
    }


def test_a_word_that_is_a_token_needs_no_merge_in_llama_bpe() -> None:
    for pre, expected in {"llama-bpe": [256], "qwen2": [97, 98, 99]}.items():
        assert Tokenizer.from_metadata(byte_level(added=[("abc", 1)], pre=pre)).encode("abc") == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level([("a", "b"), (" ", "ab")], pre=pre), nfc=False)
    for text in (
        "",
        "  ab'S 12345\u0663\u00bd\r\n\n\t x ",
        "\u4e2d\u6587\ud55c\uad6d\u0301\u3000\U0001f44d!?--$`",
        "\n \x0b",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["qwen35", "llama-bpe", "deepseek-llm", "default", "gpt-4o"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_comes_back(pre: str, text: str) -> None:
    metadata = byte_level([("a", "b"), (" ", "ab")], pre=pre)
    tokenizer = Tokenizer.from_metadata(metadata, nfc=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_many_threads_may_encode_at_once(qwen35: Tokenizer) -> None:
    texts = [f"story {i}: caf\u00e9 \U0001f680 {'x' * i}" for i in range(64)]
    expected = [qwen35.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(qwen35.encode, texts * 4)) == expected * 4


@pytest.mark.parametrize("token", [-1, 768, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(qwen35: Tokenizer, token: int) -> None:
    for use in (qwen35.token_bytes, qwen35.token_text, qwen35.is_special, lambda i: qwen35.decode([0, i])):
        with pytest.raises(UsageError, match=rf"token {token} .* 0 to 767"):
            use(token)


def test_a_lone_surrogate_is_refused_by_its_place(qwen35: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"U\+D83D at index 3"):
        qwen35.encode("abc\ud83d")


def test_a_text_must_be_a_string_of_bounded_length(qwen35: Tokenizer) -> None:
    with pytest.raises(UsageError, match="bytes"):
        qwen35.encode(b"abc")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"{MAX_TEXT_CHARS + 1} characters; at most {MAX_TEXT_CHARS}"):
        qwen35.encode(" " * (MAX_TEXT_CHARS + 1))


def test_a_character_the_vocabulary_cannot_spell_is_refused() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][4] = "lacks byte 4"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("\u00e9b") == [*"\u00e9b".encode()]
    with pytest.raises(UsageError, match=r"'\\x04' at index 2"):
        tokenizer.encode("\u00e9b\x04")


def test_letters_that_spell_no_byte_are_taken_as_text() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(added=[("\u6f22", 1), ("<\u00e9>", USER_DEFINED)]))
    assert tokenizer.token_bytes(256) == "\u6f22".encode()
    assert tokenizer.token_bytes(257) == "<\u00e9>".encode()


def test_an_empty_token_stands_for_nothing_in_the_text() -> None:
    metadata = byte_level(added=[("", UNUSED), ("", UNUSED)])
    assert Tokenizer.from_metadata(metadata).n_vocab == 258


BAD_METADATA: list[tuple[str, object, type[ModelFileError]]] = [
    ("model", "t5", UnsupportedModelError),
    ("model", None, UnsupportedModelError),
    ("model", 7, DamagedFileError),
    ("pre", "nonsense", UnsupportedModelError),
    ("pre", 7, DamagedFileError),
    ("tokens", None, UnsupportedModelError),
    ("tokens", [], DamagedFileError),
    ("tokens", "abc", DamagedFileError),
    ("tokens", [1, 2], DamagedFileError),
    ("tokens", [*byte_letters(), "a"], DamagedFileError),
    ("token_type", [1] * 255, DamagedFileError),
    ("token_type", [1] * 255 + [9], DamagedFileError),
    ("token_type", [1] * 255 + [-1], DamagedFileError),
    ("token_type", [1] * 255 + [6], DamagedFileError),
    ("token_type", ["1"] * 256, DamagedFileError),
    ("token_type", [1.0] * 256, DamagedFileError),
    ("token_type", 1, DamagedFileError),
    ("merges", None, UnsupportedModelError),
    ("merges", ["ab"], DamagedFileError),
    ("merges", [" ab"], DamagedFileError),
    ("merges", ["a b"], DamagedFileError),
    ("merges", ["\u2603 b"], DamagedFileError),
    ("bos_token_id", 256, DamagedFileError),
    ("eos_token_id", -1, DamagedFileError),
    ("eot_token_id", True, DamagedFileError),
    ("unknown_token_id", "0", DamagedFileError),
    ("add_bos_token", True, DamagedFileError),
    ("add_eos_token", True, DamagedFileError),
    ("add_bos_token", 2, DamagedFileError),
    ("add_bos_token", "yes", DamagedFileError),
]


@pytest.mark.parametrize(("key", "value", "error"), BAD_METADATA)
def test_bad_metadata_is_refused_by_its_key(key: str, value: object, error: type[ModelFileError]) -> None:
    metadata = byte_level()
    metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(error, match=rf"tokenizer\.ggml\.{key}"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_sentencepiece_needs_scores_and_types(key: str) -> None:
    metadata = sentencepiece(["a", "b"])
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.ggml\.{key}"):
        Tokenizer.from_metadata(metadata)


def test_a_score_that_is_no_number_is_refused() -> None:
    metadata = sentencepiece(["a", "b"])
    metadata["tokenizer.ggml.scores"][260] = float("nan")
    with pytest.raises(DamagedFileError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_metadata(metadata)


def test_a_missing_pre_tokenizer_name_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    Tokenizer.from_metadata(metadata)
    assert "tokenizer.ggml.pre is missing" in caplog.text

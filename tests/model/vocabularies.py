"""Small vocabularies made by hand, as GGUF metadata; shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyggml_dflash.ggml.gguf import GgufFile

DATA = Path(__file__).parents[1] / "data"


def metadata_of(name: str) -> dict[str, Any]:
    """The metadata of a model under tests/data/models."""
    with GgufFile.open(DATA / "models" / f"{name}.gguf") as file:
        return dict(file.metadata)


def byte_letters() -> list[str]:
    """How byte-level vocabularies spell the bytes 0 to 255."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def spell(text: str) -> str:
    """`text` in the letters of byte-level vocabularies."""
    letters = byte_letters()
    return "".join(letters[byte] for byte in text.encode())


def byte_level(
    merges: Sequence[tuple[str, str]] = (), *, added: Sequence[tuple[str, int]] = (), pre: str = "gpt-2"
) -> dict[str, Any]:
    """A byte-level vocabulary: id = byte for 0 to 255, then one token per merge, then (text, type)s.

    The sides of a merge are given as text.
    """
    pairs = [(spell(left), spell(right)) for left, right in merges]
    tokens = [*byte_letters(), *("".join(pair) for pair in pairs), *(text for text, _ in added)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (256 + len(pairs)) + [kind for _, kind in added],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
    }


def sentencepiece(pieces: Sequence[str], *, added: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, `pieces` (best score first), (text, type)s."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *(text for text, _ in added)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0] * len(added),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [kind for _, kind in added],
    }
